"""Is the result right? Asked before anything is timed, and again afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import kv_canary as kc
from kv_canary.backends import implementation
from kv_canary.bench.speed.state import State
from kv_canary.bench.speed.workload import Call, Work
from kv_canary.specs import get_spec
from kv_canary.specs.interface import Leaf


class CheckFailed(RuntimeError):  # noqa: N818 - it is what a check comes to
    """A result is wrong: a benchmark of it would be worth nothing."""


def check(state: State, work: Work) -> None:
    """Hold every call of a case to the reference, healthy and with a changed byte and a changed record.

    The reference works on copies of what a call may write, on the same device, and every byte of the outcome is
    compared. The explicit plan's calls are held to it as well.

    Raises:
        CheckFailed: naming the case, and what differs or was not found.
    """
    name = state.case.name
    # Parts share their calls with the whole.
    calls = list({id(c): c for part in (work.whole, *work.parts) for c in part.calls}.values())
    for call in calls:
        _hold(call, f"{name}: {call.op}")
    expect_silence(state, f"{name}: a healthy pool")
    if work.entries is None or not len(work.entries):
        return
    verifying = [call for call in calls if call.op.startswith("verify")]
    slot, position = int(work.entries.slots[-1]), int(work.entries.positions[-1])
    for what, damage, reason in (
        ("a byte of K", _changed_byte(state.k_source, slot, position), kc.Reason.K),
        ("a byte of V", _changed_byte(state.v_source, slot, position), kc.Reason.V),
        ("a chain", _changed_chain(state, slot), kc.Reason.CHAIN),
    ):
        with damage:
            for call in verifying:
                state.violations.count.zero_()
                _hold(call, f"{name}: {call.op} with {what} changed")
                expects = reason is kc.Reason.CHAIN or call.arguments["endpoint"].k_source is not None
                # Of a sweep's plans one names the slot.
                if expects and len([c for c in verifying if c.op == call.op]) == 1:
                    _expect(state, slot, reason, f"{name}: {call.op} with {what} changed")
        state.violations.count.zero_()


def expect_silence(state: State, what: str) -> None:
    """Raise CheckFailed if a violation was reported."""
    if int(state.violations.count):
        first = state.violations.ring[0].tolist()
        raise CheckFailed(f"{what} gave {int(state.violations.count)} violations, the first {first}")


@contextmanager
def expect_launches(state: State, work: Work, launches: Sequence[tuple[str, int]]) -> Iterator[None]:
    """Raise CheckFailed unless the block verified and wrote what that many launches of each part do.

    `launches` is filled in by the block. A graph that captured nothing would be fast.
    """
    before = state.counters.clone()
    yield
    done = (state.counters - before).sum(dim=0).tolist()
    parts = {p.name: p for p in (work.whole, *work.parts)}
    wanted = [0, 0]
    for name, times in launches:
        for call in parts[name].calls:
            if "counters" in call.arguments:
                wanted[0] += times
                wanted[1] += times * _counted(call)
    if done != wanted:
        raise CheckFailed(f"{state.case.name}: the timed launches counted {done} launches and entries, not {wanted}")
    expect_silence(state, f"{state.case.name}: the timed launches")


def _counted(call: Call) -> int:
    """Return what one launch of a call adds to its counter."""
    arguments = call.arguments
    if call.op == "write":
        return int((arguments["out_slots"] > 0).sum())
    plan = arguments["verify_plan"] if call.op == "verify" else arguments["resolved"]
    return int(plan.num_valid)


def _hold(call: Call, what: str) -> None:
    """Launch a call, and compare every byte that it wrote with what the reference writes."""
    spec = get_spec(call.op)
    copies = spec.map_tensors(call.arguments, _copy_written)
    call()
    implementation(call.op, "reference")(**copies)
    pairs = zip(spec.leaves(call.arguments), spec.leaves(copies), strict=True)
    for got, expected in pairs:
        if got.role not in ("out", "inout") or got.source is not None:
            continue
        if got.path.endswith(".ring"):
            same = _rows(got.tensor, call.arguments) == _rows(expected.tensor, copies)
        else:
            same = torch.equal(got.tensor, expected.tensor)
        if not same:
            raise CheckFailed(f"{what}: {got.path} is not the reference's")


def _copy_written(leaf: Leaf) -> torch.Tensor:
    return leaf.tensor if leaf.role == "in" or leaf.source is not None else leaf.tensor.clone()


def _rows(ring: torch.Tensor, arguments: Mapping[str, Any]) -> list[list[int]]:
    """The rows of a violation ring, whose order is free."""
    return sorted(ring[: int(arguments["violations"].count)].tolist())


def _expect(state: State, slot: int, reason: kc.Reason, what: str) -> None:
    rows = state.violations.ring[: int(state.violations.count)].tolist()
    named = [row for row in rows if row[2] == slot and row[1] & reason]
    # A changed chain also parts its successor from it; a shared slot is found by each request that reads it.
    if not named or (reason is not kc.Reason.CHAIN and len(named) != len(rows)):
        raise CheckFailed(f"{what} in slot {slot} gave {rows}")


@contextmanager
def _changed_byte(source: kc.KvSource, slot: int, position: int) -> Iterator[None]:
    layer, first, _ = source.coverage(position)
    source.layers[layer][slot, first + 3] ^= 1
    try:
        yield
    finally:
        source.layers[layer][slot, first + 3] ^= 1


@contextmanager
def _changed_chain(state: State, slot: int) -> Iterator[None]:
    state.records[slot, 1] ^= 1
    try:
        yield
    finally:
        state.records[slot, 1] ^= 1
