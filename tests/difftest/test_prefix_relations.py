"""What planning and verifying in one call must have in common with doing one after the other, on each backend.

Any call will do, hostile ones too: `plan` then `verify` is what `verify_prefixes` is, and `verify` once more, what
`verify_resolved` makes of the slots that are left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import kv_canary as kc
from kv_canary import ops
from kv_canary.constants import HEAD_OF_CHAIN, RUN_ENTRIES
from kv_canary.difftest.memory import room_for
from kv_canary.difftest.runner import launch
from kv_canary.difftest.strategies import cases
from kv_canary.specs import get_spec
from kv_canary.specs.interface import Leaf
from kv_canary.specs.violation_row import VIOLATION_WORDS

INT32_MAX = (1 << 31) - 1
# Words of a violation row that hold a slot.
SLOT, PREDECESSOR = 2, 13

# Four launches and more of each backend.
# Enough of them that some find something.
half = settings(max_examples=max(40, settings.default.max_examples // 2))


class Launcher:
    """Makes calls on one backend, on copies with guards around them."""

    def __init__(self, backend: str, device: torch.device) -> None:
        self.backend = backend
        self.device = device if backend == "triton" else torch.device("cpu")

    def after(self, op: str, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return the complete call of `op`, with its outputs as the launch leaves them."""
        spec = get_spec(op)
        bound = spec.bind(call)
        with room_for(spec, bound, device=self.device):
            left = launch(spec, bound, backend=self.backend, device=self.device, fill=2)

        def output(leaf: Leaf) -> torch.Tensor:
            if leaf.path not in left:
                return leaf.tensor
            return left[leaf.path].clone().view(leaf.tensor.dtype).view(leaf.tensor.shape)

        return spec.map_tensors(bound, output)


def named(op: str, call: Mapping[str, Any]) -> dict[str, Any]:
    """Those arguments of a call that `op` takes too, less outputs and scratch."""
    arguments = get_spec(op).arguments
    taken = {n: v for n, v in call.items() if n in arguments and getattr(arguments[n], "role", "in") == "in"}
    return taken if op != "plan" or call["strides"] is not None else {**taken, "step": None}


def fresh(call: Mapping[str, Any]) -> dict[str, Any]:
    """A log with room for all that the call can find, and counters that are not zero."""
    capacity = len(call["resolved"].entries)
    return {
        "violations": kc.ViolationLog.allocate(ring_cap=capacity),
        "counters": torch.arange(2 * len(kc.Tag)).view(-1, 2),
    }


def found(call: Mapping[str, Any]) -> Counter[tuple[int, ...]]:
    """The violations of a call, in any order; slots past 32 bits all read the same, as resolved slots hold them."""
    log = call["violations"]
    rows = log.ring[: int(log.count)].view(-1, VIOLATION_WORDS)
    rows[:, [SLOT, PREDECESSOR]] = rows[:, [SLOT, PREDECESSOR]].clamp(max=INT32_MAX)
    return Counter(map(tuple, rows.tolist()))


def same(left: Any, right: Any) -> None:
    """Check that two tensors, or the tensors of two structures, hold the same."""
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    else:
        for name, tensor in vars(left).items():
            assert torch.equal(tensor, getattr(right, name)), name


@pytest.mark.every_day("reference")
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_planning_and_verifying_in_one_is_doing_both(backend: str, device: torch.device) -> None:
    made = Launcher(backend, device)
    seen: Counter[str] = Counter()

    @half
    @given(case=cases("verify_prefixes"))
    def check(case: dict[str, Any]) -> None:
        given = {**get_spec("verify_prefixes").bind(case), **fresh(case)}
        at_once = made.after("verify_prefixes", given)
        capacity = len(given["resolved"].entries)
        planned = made.after(
            "plan",
            {
                **named("plan", given),
                "verify_plan": kc.VerifyPlan.allocate(verify_cap=capacity),
                "write_plan": kc.WritePlan.allocate(write_cap=len(given["write_plan"].rows)),
                "status": torch.zeros(1, dtype=torch.int32),
            },
        )
        plan, resolved = planned["verify_plan"], at_once["resolved"]
        verified = made.after("verify", {**named("verify", given), **fresh(given), "verify_plan": plan})
        same(at_once["write_plan"], planned["write_plan"])
        same(at_once["status"], planned["status"])
        same(at_once["counters"], verified["counters"])
        assert found(at_once) == found(verified)
        same(resolved.num_valid, plan.num_valid)
        same(resolved.num_requested, plan.num_requested)
        n = int(plan.num_valid)
        slots, previous, positions, requests = resolved.unfold(0, n)
        for words, wanted in ((slots, plan.slots), (previous, plan.prev_slots), (positions, plan.positions)):
            same(words, wanted[:n].clamp(max=INT32_MAX))
        same(given["rows"][requests].to(torch.int32), plan.rows[:n])

        # TAIL: on the slots that were found, and on the plan once more.
        again = made.after("verify", {**named("verify", given), **fresh(given), "verify_plan": plan})
        tail = made.after("verify_resolved", {**named("verify_resolved", given), **fresh(given), "resolved": resolved})
        same(tail["counters"], again["counters"])
        assert found(tail) == found(again)
        seen.update(entries=n, violations=int(at_once["violations"].count) + int(tail["violations"].count))

    check()
    assert seen["entries"]
    assert seen["violations"]


def test_a_layout_of_another_batch_looks_nothing_up_beside_the_prefix(device: torch.device) -> None:
    """Entries before the request's first, and behind its last two, which would be the memory behind the table."""
    n = RUN_ENTRIES + 3
    table = torch.arange(1, 2 * n + 1, dtype=torch.int32, device=device).view(n, 2)[:2]
    rows = torch.tensor([1], device=device)
    endpoint = kc.Endpoint(tag=kc.Tag.HEAD_FULL, records=torch.zeros(8, 4, dtype=torch.int64, device=device))
    resolved = kc.ResolvedSlots.allocate(entry_cap=n, device=device)
    ops.verify_prefixes(
        backend="triton",
        rows=rows,
        prefix_lens=torch.tensor([2], device=device),
        extend_lens=torch.tensor([1], device=device),
        req_to_token=table,
        step=torch.tensor([1], device=device),
        endpoint=endpoint,
        laid_out=torch.tensor([1, n], device=device),
        laid_out_stride=torch.tensor([1], device=device),
        resolved=resolved,
        write_plan=kc.WritePlan.allocate(write_cap=1, device=device),
        status=torch.zeros(1, dtype=torch.int32, device=device),
        violations=kc.ViolationLog.allocate(ring_cap=n, device=device),
        counters=torch.zeros(len(kc.Tag), 2, dtype=torch.int64, device=device),
        entry_offsets=torch.zeros(2, dtype=torch.int64, device=device),
        longest_stride=torch.zeros(1, dtype=torch.int64, device=device),
    )
    assert resolved.entries[:, 0].tolist() == [0, 3, 4, *[0] * RUN_ENTRIES]
    # Nor the slot before the first of the next run.
    assert resolved.runs[[0, 1, RUN_ENTRIES], 0].tolist() == [0, HEAD_OF_CHAIN, 0]
