"""Marks of slots: writes of many tokens are not compared each with each, whatever the marks held before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import kv_canary as kc
import kv_canary.kernels.write as kernel
from kv_canary.backends import interpreting
from kv_canary.difftest.simulator.scripted_engine import kv_source

# What a kernel calls is seen in the interpreter alone.
pytestmark = pytest.mark.skipif(not interpreting(), reason="needs Triton's interpreter")

SLOTS, TOKENS, STEP = 1200, 700, 5


def write(slots: torch.Tensor, marks: torch.Tensor, *, offset: int = TOKENS, backend: str = "triton") -> torch.Tensor:
    """Write one request's tokens to these slots; return the violations' slots."""
    plan = kc.WritePlan.allocate(write_cap=1)
    plan.rows.fill_(1)
    plan.owners.fill_(7)
    plan.offsets.copy_(torch.tensor([0, offset]))
    plan.seed_slots.fill_(-1)
    plan.num_requests.fill_(1)
    log = kc.ViolationLog.allocate(ring_cap=64)
    records = torch.zeros(SLOTS, 4, dtype=torch.int64)
    source = kv_source(SLOTS, layers=1, token_bytes=32)
    kc.ops.write(
        write_plan=plan,
        input_ids=torch.arange(TOKENS) + 10,
        positions=torch.arange(TOKENS),
        out_slots=slots,
        endpoint=kc.Endpoint(tag=kc.Tag.TAIL_FULL, records=records, k_source=source, v_source=source),
        tails=torch.zeros(2, dtype=torch.int64),
        step=torch.tensor([STEP]),
        check_positions=torch.zeros(1, dtype=torch.int32),
        track_lifetime=True,
        violations=log,
        counters=torch.zeros(6, 2, dtype=torch.int64),
        slot_marks=marks,
        backend=backend,
    )
    return log.ring[: int(log.count), 2].sort().values


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One more for each tile whose tokens were compared with all others."""
    seen: list[int] = []
    real = kernel._last_with_slot

    def counting(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(kernel, "_last_with_slot", counting)
    return seen


@pytest.mark.parametrize("earlier", [0, (STEP - 1) << 32 | 900, -1, -(1 << 63)], ids=["new", "older", "-1", "least"])
def test_marks_say_which_token_is_a_slots_last(earlier: int, compared: list[int]) -> None:
    slots = torch.randperm(SLOTS - 1, generator=torch.Generator().manual_seed(3))[:TOKENS] + 1
    # In one tile, in two that are far from each other, three times, and the first with the last.
    for first, *others in ((3, 9), (40, 600), (80, 81, 500), (0, TOKENS - 1)):
        slots[others] = int(slots[first])
    slots[200] = 0
    marks = torch.full((SLOTS,), earlier)
    marks[0] = 77
    found = write(slots, marks)
    assert compared == []
    assert found.tolist() == sorted(slots[[3, 40, 80, 81, 0]].tolist())
    # The last of each, and nothing of the padding slot.
    last = {int(slot): j for j, slot in enumerate(slots.tolist())}
    assert {int(s): int(marks[s]) & 0xFFFFFFFF for s in last if s} == {s: j for s, j in last.items() if s}
    assert set((marks[list(last)][torch.tensor(list(last)) > 0] >> 32).tolist()) == {STEP}
    assert int(marks[0]) == 77


@pytest.mark.parametrize("offset", [TOKENS, 650])
def test_where_marks_say_nothing_tokens_are_compared(offset: int, compared: list[int]) -> None:
    slots = torch.randperm(SLOTS - 1, generator=torch.Generator().manual_seed(4))[:TOKENS] + 1
    slots[600] = slots[40]
    # Of a later step; of this one, and of an input that has another slot, or of none.
    for later in ((STEP + 1) << 32, STEP << 32 | 699, STEP << 32 | 5000):
        compared.clear()
        marks = torch.full((SLOTS,), later)
        assert write(slots, marks, offset=offset).tolist() == [int(slots[40])]
        assert compared
        assert write(slots, marks, offset=offset, backend="reference").tolist() == [int(slots[40])]
