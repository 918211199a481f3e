"""The launches of a case: the ops' calls, as the runtime makes them, and the bytes that they have to move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import kv_canary as kc
from kv_canary.bench.speed.cases import Does
from kv_canary.bench.speed.state import OWNERS, State
from kv_canary.runtime import sweep
from kv_canary.specs import get_spec

SECTOR = 32
RECORD = 32
# Of one token in a forward's inputs: its id, its position and its slot.
INPUT = 24
# Of one entry of an explicit plan: slot, predecessor, position, token, row. Of one that HEAD leaves for TAIL.
PLANNED = 36
RESOLVED = 8
TABLE = 4


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of device memory that a launch moves.

    Args:
        necessary: those that it reads and writes by definition: records, table entries, covered bytes, inputs, outputs.
        sectors: 32-byte sectors that hold them, each counted once, and what its own design adds (resolved slots).
    """

    necessary: int
    sectors: int

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(necessary=self.necessary + other.necessary, sectors=self.sectors + other.sectors)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of an op with all its arguments, scratch too: nothing is allocated when it is launched."""

    op: str
    arguments: Mapping[str, Any]
    backend: str

    def __call__(self) -> None:
        """Launch it, through the front door."""
        getattr(kc.ops, self.op)(**self.arguments, backend=self.backend)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Something to time: calls one after the other.

    Args:
        name: as results name it.
        calls: in their order.
        traffic: of all of them.
        entries: positions that it verifies, or tokens or slots that it works on.
    """

    name: str
    calls: tuple[Call, ...]
    traffic: Traffic
    entries: int

    def __call__(self) -> None:
        """Launch them all."""
        for call in self.calls:
            call()


@dataclass(frozen=True, kw_only=True)
class Entries:
    """The positions that HEAD verifies, and what of memory they touch.

    Args:
        slots, positions, requests: int64 [entries].
        apart: predecessors whose record is not the entry's before, which is read anyway.
        unique: slots, each counted once.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    requests: torch.Tensor
    apart: int
    unique: int

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Everything to time of a case: the whole first, and its parts; `entries` where it verifies any."""

    whole: Part
    parts: tuple[Part, ...]
    entries: Entries | None = None


def work_of(state: State) -> Work:
    """Return what is launched for the state's case. The calls share buffers: launch a whole before a part of it."""
    builders: dict[Does, Callable[[State], Work]] = {
        "step": _step,
        "write": _write_alone,
        "scatter": _scatter,
        "chain_tails": _chain_tails,
        "retire": _retire,
        "move": _move,
        "sweep": _sweep,
    }
    return builders[state.case.does](state)


def _step(state: State) -> Work:
    """HEAD, write and TAIL; then the parts, and the plan and the verification of the explicit way."""
    n = len(state.rows)
    batch = _batch_arguments(state)
    asked = _entries_at_most(state)
    resolved = kc.ResolvedSlots.allocate(entry_cap=asked, device=state.device)
    write_plan = kc.WritePlan.allocate(write_cap=n, device=state.device)
    status = torch.zeros(1, dtype=torch.int32, device=state.device)
    found = _found(state)
    head = _call(
        state,
        "verify_prefixes",
        **batch,
        **found,
        endpoint=state.endpoint(kc.Tag.HEAD_FULL, with_bytes=True),
        anchors=state.anchors,
        track_lifetime=True,
        resolved=resolved,
        write_plan=write_plan,
        status=status,
    )
    write = _write(state, write_plan)
    tail = _call(
        state,
        "verify_resolved",
        **found,
        rows=state.rows,
        resolved=resolved,
        endpoint=state.endpoint(kc.Tag.TAIL_FULL, with_bytes=False),
        anchors=state.anchors,
        # As the runtime has it: slots may be freed before TAIL.
        track_lifetime=False,
    )
    # The explicit way, for comparison, with buffers of its own.
    verify_plan = kc.VerifyPlan.allocate(verify_cap=asked, device=state.device)
    plan = _call(
        state,
        "plan",
        **batch,
        step=state.step,
        verify_plan=verify_plan,
        write_plan=kc.WritePlan.allocate(write_cap=n, device=state.device),
        status=torch.zeros_like(status),
    )
    verify = _call(
        state,
        "verify",
        **found,
        verify_plan=verify_plan,
        endpoint=state.endpoint(kc.Tag.HEAD_FULL, with_bytes=True),
        anchors=state.anchors,
        track_lifetime=True,
    )
    head()
    entries = _entries_of(resolved)
    count, records, covered = len(entries), _record_reads(entries), _covered(state, entries)
    looked_up = _stream(count * TABLE)
    if state.lut is not None:
        # A LUT entry stands alone in its sector: slots are in random order.
        looked_up += Traffic(necessary=8 * count, sectors=count)
    left = Traffic(necessary=0, sectors=_stream(count * RESOLVED).sectors)
    planned = _stream(count * PLANNED)
    parts = (
        Part(name="HEAD", calls=(head,), traffic=records + covered + looked_up + left, entries=count),
        Part(name="write", calls=(write,), traffic=_write_traffic(state), entries=state.case.new),
        Part(name="TAIL", calls=(tail,), traffic=records + left, entries=count),
    )
    whole = Part(
        name="step",
        calls=(head, write, tail),
        traffic=parts[0].traffic + parts[1].traffic + parts[2].traffic,
        entries=count,
    )
    apart = (
        Part(name="plan", calls=(plan,), traffic=looked_up + planned, entries=count),
        Part(name="verify", calls=(verify,), traffic=records + covered + planned, entries=count),
    )
    return Work(whole=whole, parts=parts + apart, entries=entries)


def _write_alone(state: State) -> Work:
    n = len(state.rows)
    plan = kc.WritePlan(
        rows=state.rows,
        owners=state.owners,
        offsets=state.batch.offsets,
        prefix_lens=state.cached,
        seed_slots=torch.full((n,), kc.HEAD_OF_CHAIN, dtype=torch.int64, device=state.device),
        num_requests=torch.full((1,), n, dtype=torch.int32, device=state.device),
    )
    write = _write(state, plan)
    whole = Part(name="write", calls=(write,), traffic=_write_traffic(state), entries=state.case.new)
    return Work(whole=whole, parts=())


def _scatter(state: State) -> Work:
    pool = torch.full((len(state.rows) + 1, int(state.new.max())), -1, dtype=torch.int32, device=state.device)
    call = _call(
        state,
        "scatter_token_ids",
        flat=state.batch.tokens,
        offsets=state.batch.offsets,
        rows=state.rows,
        starts=state.cached,
        pool=pool,
        status=torch.zeros(1, dtype=torch.int32, device=state.device),
    )
    count = state.case.new
    return Work(whole=Part(name="scatter", calls=(call,), traffic=_stream(12 * count), entries=count), parts=())


def _chain_tails(state: State) -> Work:
    call = _call(
        state,
        "chain_tails",
        flat=state.batch.tokens,
        offsets=state.batch.offsets,
        rows=state.rows,
        starts=state.cached,
        anchors=state.anchors,
        tails=state.tails,
        status=torch.zeros(1, dtype=torch.int32, device=state.device),
    )
    count = state.case.new
    return Work(whole=Part(name="chain_tails", calls=(call,), traffic=_stream(8 * count), entries=count), parts=())


def _retire(state: State) -> Work:
    slots = state.history.slots
    owner = torch.tensor([OWNERS], device=state.device)
    call = _call(state, "retire", slots=slots, owner=owner, step=state.step, records=(state.records,))
    # A record is read, and one of its words written.
    count = len(slots)
    traffic = _stream(8 * count) + Traffic(necessary=(RECORD + 8) * count, sectors=2 * count)
    return Work(whole=Part(name="retire", calls=(call,), traffic=traffic, entries=count), parts=())


def _move(state: State) -> Work:
    src = state.history.slots
    dst = state.free[torch.randperm(len(state.free), device=state.device)[: len(src)]]
    call = _call(state, "move", src=src, dst=dst, owner=OWNERS, step=state.step, records=(state.records,))
    count = len(src)
    staged = Traffic(necessary=0, sectors=2 * _stream(RECORD * count).sectors)
    traffic = _stream(16 * count) + Traffic(necessary=2 * RECORD * count, sectors=2 * count) + staged
    return Work(whole=Part(name="move", calls=(call,), traffic=traffic, entries=count), parts=())


def _sweep(state: State) -> Work:
    """The cached slots of all requests, in explicit plans of `sweep.CHUNK` entries, as the runtime's sweeps are."""
    slots, positions = state.history.slots, state.history.positions
    previous = torch.where(positions == 0, kc.HEAD_OF_CHAIN, slots.roll(1))
    calls = []
    for start in range(0, len(slots), sweep.CHUNK):
        part = slice(start, start + sweep.CHUNK)
        n = len(slots[part])
        plan = kc.VerifyPlan(
            slots=slots[part],
            prev_slots=previous[part],
            positions=positions[part],
            tokens=torch.full((n,), -1, dtype=torch.int64, device=state.device),
            rows=torch.zeros(n, dtype=torch.int32, device=state.device),
            num_valid=torch.full((1,), n, dtype=torch.int32, device=state.device),
            num_requested=torch.full((1,), n, dtype=torch.int64, device=state.device),
        )
        endpoint = state.endpoint(kc.Tag.SWEEP_FULL, with_bytes=True)
        calls.append(_call(state, "verify", verify_plan=plan, endpoint=endpoint, track_lifetime=True, **_found(state)))
    entries = Entries(
        slots=slots,
        positions=positions,
        requests=torch.zeros_like(slots),
        apart=0,
        unique=len(slots.unique()),
    )
    traffic = _record_reads(entries) + _covered(state, entries) + _stream(len(slots) * PLANNED)
    whole = Part(name="sweep", calls=tuple(calls), traffic=traffic, entries=len(slots))
    return Work(whole=whole, parts=(), entries=entries)


def _write(state: State, write_plan: kc.WritePlan) -> Call:
    return _call(
        state,
        "write",
        **_found(state),
        write_plan=write_plan,
        input_ids=state.batch.tokens,
        positions=state.batch.positions,
        out_slots=state.batch.slots,
        endpoint=state.endpoint(kc.Tag.TAIL_FULL, with_bytes=True),
        tails=state.tails,
        check_positions=torch.ones(1, dtype=torch.int32, device=state.device),
        track_lifetime=True,
    )


def _call(state: State, op: str, **arguments: Any) -> Call:
    return Call(op=op, arguments=get_spec(op).bind(arguments), backend=state.backend)


def _batch_arguments(state: State) -> dict[str, Any]:
    return {
        "rows": state.rows,
        "owners": state.owners,
        "prefix_lens": state.cached,
        "extend_lens": state.new,
        "req_to_token": state.table,
        "window": state.case.window,
        "lut": state.lut,
        # On a GPU the runtime always passes strides: its budget may raise them at any step.
        "strides": state.strides,
    }


def _found(state: State) -> dict[str, Any]:
    return {"step": state.step, "violations": state.violations, "counters": state.counters}


def _entries_at_most(state: State) -> int:
    window = state.case.window
    return max(1, sum(min(r.cached, window) if window else r.cached for r in state.case.requests))


def _entries_of(resolved: kc.ResolvedSlots) -> Entries:
    slots, previous, positions, requests = resolved.unfold(0, int(resolved.num_valid))
    apart = previous > 0
    apart[1:] &= previous[1:] != slots[:-1]
    return Entries(
        slots=slots, positions=positions, requests=requests, apart=int(apart.sum()), unique=len(slots.unique())
    )


def _stream(size: int) -> Traffic:
    """Bytes that lie one after the other."""
    return Traffic(necessary=size, sectors=-(-size // SECTOR))


def _record_reads(entries: Entries) -> Traffic:
    return Traffic(
        necessary=RECORD * (len(entries) + entries.apart), sectors=(entries.unique + entries.apart) * RECORD // SECTOR
    )


def _covered(state: State, entries: Entries) -> Traffic:
    """The fingerprinted bytes of K and of V."""
    size = state.case.read_bytes
    return Traffic(necessary=2 * size * len(entries), sectors=2 * -(-size // SECTOR) * entries.unique)


def _write_traffic(state: State) -> Traffic:
    """Inputs, covered bytes, the old record and the new one of each token; the seed and the tail of each request."""
    count, size = state.case.new, state.case.read_bytes
    seeds = sum(1 for r in state.case.requests if r.cached)
    return (
        _stream(INPUT * count)
        + _stream(8 * len(state.rows))
        + Traffic(necessary=RECORD * seeds, sectors=seeds)
        + Traffic(necessary=(2 * size + 2 * RECORD) * count, sectors=(2 * -(-size // SECTOR) + 2) * count)
    )
