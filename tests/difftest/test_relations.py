"""Metamorphic relations: what must hold between calls whatever the records say, on each backend by itself.

The reference runs on CPU tensors, Triton on `--device`. They catch what a misunderstanding shared by both backends
hides from a byte comparison.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import kv_canary as kc
from kv_canary.constants import to_signed
from kv_canary.difftest.strategies.domain import World, int64, kv_sources, owner_numbers, seeds, steps, worlds

pytestmark = pytest.mark.parametrize("backend", ["reference", "triton"])

# A write costs about 0.1 s in the interpreter, so how many examples a relation gets goes by how many it does in one.
examples = settings.default.max_examples
few, some = (settings(max_examples=max(1, examples // n)) for n in (20, 12))

# Bits flipped in each example of a flip relation, one at a time.
FLIPS = 4

WINDOWS = (0, 0, 1, 7, 16, 31)
TAG = kc.Tag.TAIL_SWA


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one request does in one forward: it has `prefix` cached tokens and writes `extend`."""

    row: int
    prefix: int
    extend: int


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One planned entry, or where a violation was found."""

    row: int
    position: int
    slot: int
    previous: int
    token: int


@dataclass(frozen=True, kw_only=True)
class Violation:
    """The words of a violation row that relations speak of."""

    reasons: int
    entry: Entry
    words: tuple[int, ...]


class Engine:
    """A world's requests on one backend, as an engine serves them; its pool starts out empty."""

    def __init__(self, world: World, backend: str, device: torch.device, *, spare_slots: int = 0) -> None:
        self.world, self.backend = world, backend
        self.device = device if backend == "triton" else torch.device("cpu")
        endpoint = world.endpoint
        records = torch.cat([torch.zeros_like(endpoint.records), torch.zeros(spare_slots, 4, dtype=torch.int64)])
        if spare_slots == 0:
            records = place(endpoint.records, self.device).zero_()
        self.endpoint = kc.Endpoint(
            tag=TAG,
            records=records.to(self.device),
            k_source=self._source(endpoint.k_source),
            v_source=self._source(endpoint.v_source),
        )
        self.anchors = None if world.anchors is None else world.anchors.to(self.device)
        self.tails = torch.zeros(world.num_rows, dtype=torch.int64, device=self.device)
        self.table = world.slots.to(torch.int32).to(self.device)
        self.lut: torch.Tensor | None = None
        self.counters = torch.zeros(len(kc.Tag), 2, dtype=torch.int64, device=self.device)

    def _source(self, source: kc.KvSource | None) -> kc.KvSource | None:
        if source is None:
            return None
        return dataclasses.replace(source, layers=tuple(place(layer, self.device) for layer in source.layers))

    def int64(self, values: Any) -> torch.Tensor:
        return int64(values).to(self.device)

    def behind_lut(self, seed: int) -> None:
        """Give the table full-pool slots, which a LUT maps to the slots of this pool."""
        full = 1 + np.random.default_rng(seed).permutation(self.world.num_slots - 1)
        lut = torch.zeros(self.world.num_slots, dtype=torch.int64)
        lut[torch.from_numpy(full)] = torch.arange(1, self.world.num_slots)
        to_full = torch.zeros(self.world.num_slots, dtype=torch.int64)
        to_full[1:] = torch.from_numpy(full)
        self.table = to_full[self.world.slots].to(torch.int32).to(self.device)
        self.lut = lut.to(self.device)

    def plan(self, parts: list[Part], *, tokens: bool = True, **options: Any) -> tuple[kc.VerifyPlan, kc.WritePlan]:
        owners = dict(zip(self.world.rows, self.world.owners, strict=True))
        known: dict[str, Any] = {}
        if tokens:
            known["expected_tokens"] = self.world.tokens.to(torch.int32).to(self.device)
            known["expected_lens"] = self.int64(p.prefix for p in parts)
        verify_plan = kc.VerifyPlan.allocate(verify_cap=sum(p.prefix for p in parts), device=self.device)
        write_plan = kc.WritePlan.allocate(write_cap=len(parts), device=self.device)
        status = torch.zeros(1, dtype=torch.int32, device=self.device)
        kc.ops.plan(
            rows=self.int64(p.row for p in parts),
            owners=self.int64(owners.get(p.row, 0) for p in parts),
            prefix_lens=self.int64(p.prefix for p in parts),
            extend_lens=self.int64(p.extend for p in parts),
            req_to_token=self.table,
            lut=self.lut,
            verify_plan=verify_plan,
            write_plan=write_plan,
            status=status,
            backend=self.backend,
            **known,
            **options,
        )
        assert status.item() == 0
        return verify_plan, write_plan

    def write(self, plan: kc.WritePlan, parts: list[Part], *, step: int = 1, lifetime: bool = True) -> list[Violation]:
        tokens, slots = (
            torch.cat([int64([]), *(of[p.row, p.prefix : p.prefix + p.extend] for p in parts)])
            for of in (self.world.tokens, self.world.slots)
        )
        log = kc.ViolationLog.allocate(ring_cap=2048, device=self.device)
        kc.ops.write(
            write_plan=plan,
            input_ids=tokens.to(self.device),
            positions=self.int64(p.prefix + k for p in parts for k in range(p.extend)),
            out_slots=slots.to(self.device),
            endpoint=self.endpoint,
            tails=self.tails,
            step=self.int64([step]),
            check_positions=torch.ones(1, dtype=torch.int32, device=self.device),
            expected_input_ids=tokens.to(self.device),
            track_lifetime=lifetime,
            violations=log,
            counters=self.counters,
            backend=self.backend,
        )
        return violations_in(log)

    def advance(self, parts: list[Part]) -> None:
        """Advance the tails over what each part writes."""
        status = torch.zeros(1, dtype=torch.int32, device=self.device)
        flat = [self.world.tokens[p.row, p.prefix : p.prefix + p.extend] for p in parts]
        kc.ops.chain_tails(
            flat=torch.cat([int64([]), *flat]).to(self.device),
            offsets=self.int64(np.cumsum([0, *(p.extend for p in parts)])),
            rows=self.int64(p.row for p in parts),
            starts=self.int64(p.prefix for p in parts),
            anchors=self.anchors,
            tails=self.tails,
            status=status,
            backend=self.backend,
        )
        assert status.item() == 0

    def serve(self, parts: list[Part], *, step: int = 1, **options: Any) -> list[Violation]:
        """Run a forward with its tails brought up to the prefixes before, and return what its write reports."""
        self.start_tails(parts)
        found = self.write(self.plan(parts)[1], parts, step=step, **options)
        self.advance(parts)
        return found

    def start_tails(self, parts: list[Part]) -> None:
        """Give the rows of requests without a prefix the tail of no tokens."""
        for part in parts:
            if part.prefix == 0:
                self.tails[part.row] = kc.ANCHOR if self.anchors is None else self.anchors[part.row]

    def remember(self, parts: list[Part]) -> None:
        """Serve `parts` on the reference: a history that is not what a test is about, in a tenth of the time."""
        history = copy.copy(self)
        history.backend = "reference"
        assert history.serve(parts) == []

    def verify(self, plan: kc.VerifyPlan, *, lifetime: bool = False) -> list[Violation]:
        log = kc.ViolationLog.allocate(ring_cap=2048, device=self.device)
        kc.ops.verify(
            verify_plan=plan,
            endpoint=self.endpoint,
            anchors=self.anchors,
            step=self.int64([9]),
            track_lifetime=lifetime,
            violations=log,
            counters=self.counters,
            backend=self.backend,
        )
        return violations_in(log)

    def records(self) -> list[list[int]]:
        return self.endpoint.records.tolist()


def place(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on `device` with the strides and the offset of `tensor`."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    whole = tensor.as_strided((tensor.storage_offset() + last + 1,), (1,), 0)
    return whole.clone().to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def violations_in(log: kc.ViolationLog) -> list[Violation]:
    count = int(log.count)
    assert count <= len(log.ring)
    return [
        Violation(
            reasons=row[1],
            entry=Entry(row=row[3], position=row[4], slot=row[2], previous=row[13], token=row[6]),
            words=tuple(row),
        )
        for row in log.ring[:count].tolist()
    ]


def entries_in(plan: kc.VerifyPlan) -> list[Entry]:
    n = int(plan.num_valid)
    columns = (t[:n].tolist() for t in (plan.rows, plan.positions, plan.slots, plan.prev_slots, plan.tokens))
    return [Entry(row=r, position=p, slot=s, previous=b, token=t) for r, p, s, b, t in zip(*columns, strict=True)]


def expected_entries(world: World, window: int) -> list[Entry]:
    """What a plan of every request's whole history must hold, in order; worked out from the world alone."""
    entries = []
    for row, n in zip(world.rows, world.lengths, strict=True):
        start = max(n - window, 0) if window else 0
        slots, tokens = world.slots[row].tolist(), world.tokens[row].tolist()
        for p in range(start, n):
            previous = kc.HEAD_OF_CHAIN if p == 0 else kc.UNCHECKED if p == start else slots[p - 1]
            entries.append(Entry(row=row, position=p, slot=slots[p], previous=previous, token=tokens[p]))
    return entries


def healthy(world: World) -> World:
    """The same world, less the sources that do not hold all of its slots."""

    def whole(source: kc.KvSource | None) -> kc.KvSource | None:
        if source is None or (world.num_slots - 1 - source.slot_bias) // source.page_size >= source.num_rows:
            return None
        return source

    endpoint = world.endpoint
    sources = {name: whole(getattr(endpoint, name)) for name in ("k_source", "v_source")}
    return dataclasses.replace(world, endpoint=dataclasses.replace(endpoint, **sources))


def whole_histories(world: World) -> list[Part]:
    return [Part(row=row, prefix=0, extend=n) for row, n in zip(world.rows, world.lengths, strict=True)]


def all_cached(world: World) -> list[Part]:
    return [Part(row=row, prefix=n, extend=1) for row, n in zip(world.rows, world.lengths, strict=True)]


healthy_worlds = worlds(longest=129, whole=True).map(healthy)
cached_worlds = healthy_worlds.filter(lambda world: sum(world.lengths) > 0)


@st.composite
def cut_worlds(draw: Any, *, cuts: int, longest: int = 129) -> tuple[World, list[list[int]]]:
    """A world, and for each of its requests `cuts` ordered places to cut its history at."""
    world = draw(worlds(longest=longest, whole=True).map(healthy))
    return world, [sorted(draw(st.integers(0, n)) for _ in range(cuts)) for n in world.lengths]


def parts_between(world: World, low: list[int], high: list[int]) -> list[Part]:
    return [Part(row=r, prefix=a, extend=b - a) for r, a, b in zip(world.rows, low, high, strict=True)]


@few
# Long enough for several tiles of a write.
@given(drawn=cut_worlds(cuts=2, longest=513))
def test_two_writes_store_what_one_stores(
    backend: str, device: torch.device, drawn: tuple[World, list[list[int]]]
) -> None:
    world, cuts = drawn
    first, second, end = [c[0] for c in cuts], [c[1] for c in cuts], world.lengths
    once, twice = Engine(world, backend, device), Engine(world, backend, device)
    for engine in (once, twice):
        engine.remember(parts_between(world, [0] * len(end), first))
    assert once.serve(parts_between(world, first, end), step=5) == []
    assert twice.serve(parts_between(world, first, second), step=5) == []
    assert twice.serve(parts_between(world, second, end), step=5) == []
    assert once.records() == twice.records()
    assert once.tails.tolist() == twice.tails.tolist()
    stored = once.counters[TAG, 1].item()
    assert stored == twice.counters[TAG, 1].item() == sum(end)


@few
@given(drawn=cut_worlds(cuts=1), data=st.data())
def test_permuting_requests_permutes_nothing_but_order(
    backend: str, device: torch.device, drawn: tuple[World, list[list[int]]], data: st.DataObject
) -> None:
    world, cuts = drawn
    first = [c[0] for c in cuts]
    # Padding has tokens in the flat inputs too.
    parts = [*parts_between(world, first, world.lengths), Part(row=0, prefix=0, extend=data.draw(st.integers(0, 1)))]
    order = data.draw(st.permutations(range(len(parts))))
    window, after_write = data.draw(st.sampled_from(WINDOWS)), data.draw(st.booleans())
    strides = [data.draw(st.integers(1, 4)) for _ in parts]
    step = data.draw(steps)
    plans, segments, engines = [], [], []
    for indices in (range(len(parts)), order):
        engine = Engine(world, backend, device)
        engine.remember(parts_between(world, [0] * len(first), first))
        ordered = [parts[i] for i in indices]
        options = {"window": window, "after_write": after_write, "step": engine.int64([step])}
        verify_plan, write_plan = engine.plan(ordered, strides=engine.int64(strides[i] for i in indices), **options)
        entries = entries_in(verify_plan)
        plans.append({part.row: [e for e in entries if e.row == part.row] for part in ordered})
        assert [e.row for e in entries] == [e.row for part in ordered for e in plans[-1][part.row]]
        fields = (write_plan.rows, write_plan.owners, write_plan.prefix_lens, write_plan.seed_slots)
        segments.append(Counter(zip(*(t.tolist() for t in (*fields, write_plan.offsets.diff())), strict=True)))
        engine.start_tails(ordered)
        assert engine.write(write_plan, ordered, step=5) == []
        engine.advance(ordered)
        engines.append(engine)
    assert plans[0] == plans[1]
    assert segments[0] == segments[1]
    assert engines[0].records() == engines[1].records()
    assert engines[0].tails.tolist() == engines[1].tails.tolist()
    assert engines[0].counters.tolist() == engines[1].counters.tolist()


@some
@given(drawn=cut_worlds(cuts=1), data=st.data())
def test_verify_after_write_finds_nothing(
    backend: str, device: torch.device, drawn: tuple[World, list[list[int]]], data: st.DataObject
) -> None:
    world, cuts = drawn
    first = [c[0] for c in cuts]
    engine = Engine(world, backend, device)
    if data.draw(st.booleans(), label="lut"):
        engine.behind_lut(world.seed)
    lifetime = data.draw(st.booleans(), label="track_lifetime")
    options: dict[str, Any] = {"window": data.draw(st.sampled_from(WINDOWS), label="window")}
    strides = data.draw(st.sampled_from([1, 1, 2, 3]), label="stride")
    options["strides"] = engine.int64([strides] * len(first))
    options["step"] = engine.int64([data.draw(steps, label="step")])
    engine.remember(parts_between(world, [0] * len(first), first))
    chunk = parts_between(world, first, world.lengths)
    verify_plan, write_plan = engine.plan(chunk, **options)
    assert engine.verify(verify_plan, lifetime=lifetime) == []
    assert engine.write(write_plan, chunk, lifetime=lifetime) == []
    engine.advance(chunk)
    verify_plan, _ = engine.plan(all_cached(world), **options)
    if strides == 1:
        assert entries_in(verify_plan) == expected_entries(world, options["window"])
    before = engine.counters.clone()
    assert engine.verify(verify_plan, lifetime=lifetime) == []
    assert (engine.counters - before)[TAG].tolist() == [1, int(verify_plan.num_valid)]


@st.composite
def ring_worlds(draw: Any) -> tuple[World, int, list[list[int]]]:
    """Requests that keep window + 1 slots each, written over and over; the window and each request's chunk lengths."""
    window = draw(st.sampled_from([1, 2, 7, 16]))
    count = draw(st.integers(1, 2))
    forwards = draw(st.integers(2, 4))
    chunks = [[draw(st.integers(0, window + 1)) for _ in range(forwards)] for _ in range(count)]
    lens = [sum(c) for c in chunks]
    num_slots = 1 + count * (window + 1)
    rng = np.random.default_rng(draw(seeds))
    slots, tokens = (torch.zeros(count + 1, max([1, *lens]), dtype=torch.int64) for _ in range(2))
    for i, n in enumerate(lens):
        slots[i + 1, :n] = 1 + i * (window + 1) + torch.arange(n) % (window + 1)
        tokens[i + 1, :n] = torch.from_numpy(rng.integers(0, 1 << 17, n))
    sources = [draw(st.one_of(st.none(), kv_sources(num_slots, short=False))) for _ in range(2)]
    records = torch.zeros(num_slots, 4, dtype=torch.int64)
    world = World(
        num_slots=num_slots,
        rows=list(range(1, count + 1)),
        lengths=lens,
        slots=slots,
        tokens=tokens,
        owners=[draw(owner_numbers) for _ in lens],
        tails=torch.zeros(count + 1, dtype=torch.int64),
        anchors=torch.arange(count + 1) if draw(st.booleans()) else None,
        endpoint=kc.Endpoint(tag=TAG, records=records, k_source=sources[0], v_source=sources[1]),
        seed=0,
    )
    return healthy(world), window, chunks


@few
@given(drawn=ring_worlds())
def test_a_ring_planned_for_after_the_write_verifies_after_it(
    backend: str, device: torch.device, drawn: tuple[World, int, list[list[int]]]
) -> None:
    world, window, chunks = drawn
    engine = Engine(world, backend, device)
    for forward in range(len(chunks[0])):
        parts = [
            Part(row=row, prefix=sum(c[:forward]), extend=c[forward]) for row, c in zip(world.rows, chunks, strict=True)
        ]
        before, write_plan = engine.plan(parts, window=window)
        after, _ = engine.plan(parts, window=window, after_write=True)
        assert engine.verify(before) == []
        engine.start_tails(parts)
        assert engine.write(write_plan, parts) == []
        engine.advance(parts)
        assert engine.verify(after) == []
        resident = [(p.row, q) for p in parts for q in range(max(p.prefix + p.extend - window - 1, 0), p.prefix)]
        assert [(e.row, e.position) for e in entries_in(after)] == resident
        # What was resident before and is not after has been written over, and no more than that: a later position
        # stands there.
        gone = {(p.row, q) for p in parts for q in range(max(p.prefix - window, 0), p.prefix + p.extend - window - 1)}
        gone = {(e.row, e.position) for e in entries_in(before)} & gone
        found = {(v.entry.row, v.entry.position) for v in engine.verify(before) if v.reasons & kc.Reason.POSITION}
        assert found == gone


@some
@given(world=cached_worlds, data=st.data())
def test_a_flipped_bit_of_a_record_is_found_there_and_nowhere_else(
    backend: str, device: torch.device, world: World, data: st.DataObject
) -> None:
    window = data.draw(st.sampled_from(WINDOWS), label="window")
    lifetime = data.draw(st.booleans(), label="track_lifetime")
    engine = Engine(world, backend, device)
    engine.remember(whole_histories(world))
    plan, _ = engine.plan(all_cached(world), window=window)
    entries = expected_entries(world, window)
    for _ in range(FLIPS):
        # The ends of the plan and of the words' fields are where links and halves meet.
        slot = data.draw(st.sampled_from([entries[0], entries[-1], *entries]), label="target").slot
        word = data.draw(st.sampled_from([0, 1, 2, 2, 3]), label="word")
        bit = data.draw(st.one_of(st.integers(0, 63), st.sampled_from([0, 31, 32, 63])), label="bit")
        engine.endpoint.records[slot, word] ^= to_signed(1 << bit)
        found = {}
        for violation in engine.verify(plan, lifetime=lifetime):
            reasons = violation.reasons
            if word == 0 and bit >= 32:
                # Bytes are covered by the record's own position, so another one may show in the fingerprints too.
                reasons &= ~(kc.Reason.K | kc.Reason.V)
            found[violation.entry.row, violation.entry.position] = reasons
        expected = {(e.row, e.position): expected_reasons(engine, e, slot, word, bit, lifetime) for e in entries}
        assert found == {at: reasons for at, reasons in expected.items() if reasons}
        engine.endpoint.records[slot, word] ^= to_signed(1 << bit)
    assert engine.verify(plan, lifetime=lifetime) == []


def expected_reasons(engine: Engine, entry: Entry, slot: int, word: int, bit: int, lifetime: bool) -> int:
    """What `entry` must be reported for when that bit of the record of `slot` is flipped."""
    reasons = kc.Reason(0)
    if entry.slot == slot:
        if word == 0:
            reasons |= kc.Reason.CHAIN | (kc.Reason.TOKEN if bit < 32 else kc.Reason.POSITION)
        elif word == 1:
            reasons |= kc.Reason.CHAIN
        elif word == 2 and bit < 32 and engine.endpoint.k_source is not None:
            reasons |= kc.Reason.K
        elif word == 2 and bit >= 32 and engine.endpoint.v_source is not None:
            reasons |= kc.Reason.V
        elif word == 3 and bit == 63 and lifetime:
            reasons |= kc.Reason.FREED
        if entry.previous == kc.UNCHECKED:
            reasons &= ~kc.Reason.CHAIN
    if entry.previous == slot and word == 1:
        reasons |= kc.Reason.CHAIN
    return int(reasons)


def covers(source: kc.KvSource, entry: Entry, layer: int, row: int, column: int) -> bool:
    """Whether the fingerprint of `entry` is taken over that byte; from the design's text, not from the code."""
    at_row, at = divmod(entry.slot - source.slot_bias, source.page_size)
    windows = -(-source.bytes_per_token // source.read_bytes)
    first = entry.position // len(source.layers) % windows * source.read_bytes
    last = min(first + source.read_bytes, source.bytes_per_token)
    begin = source.offset_bytes + at * source.token_stride_bytes
    return (layer, row) == (entry.position % len(source.layers), at_row) and first <= column - begin < last


@some
@given(
    world=cached_worlds.filter(lambda w: w.endpoint.k_source is not None or w.endpoint.v_source is not None),
    data=st.data(),
)
def test_a_flipped_bit_of_a_byte_is_found_where_it_is_covered_and_nowhere_else(
    backend: str, device: torch.device, world: World, data: st.DataObject
) -> None:
    engine = Engine(world, backend, device)
    engine.remember(whole_histories(world))
    plan, _ = engine.plan(all_cached(world))
    entries = expected_entries(world, 0)
    sources = [s for s in (engine.endpoint.k_source, engine.endpoint.v_source) if s is not None]
    for flips in range(FLIPS):
        source = sources[flips % len(sources)]
        layer = data.draw(st.integers(0, len(source.layers) - 1), label="layer")
        if data.draw(st.booleans(), label="in a cached token"):
            target = data.draw(st.sampled_from(entries), label="target")
            layer = data.draw(st.sampled_from([layer, target.position % len(source.layers)]))
            row, at = divmod(target.slot - source.slot_bias, source.page_size)
            byte = data.draw(st.integers(0, source.bytes_per_token - 1), label="byte")
            column = source.offset_bytes + at * source.token_stride_bytes + byte
        else:
            row = data.draw(st.integers(0, source.num_rows - 1), label="row")
            column = data.draw(st.integers(0, source.row_bytes - 1), label="column")
        mask = 1 << data.draw(st.integers(0, 7), label="bit")
        source.layers[layer][row, column] ^= mask
        reason = int(kc.Reason.K if source is engine.endpoint.k_source else kc.Reason.V)
        expected = Counter((e.slot, e.position, reason) for e in entries if covers(source, e, layer, row, column))
        assert Counter((v.entry.slot, v.entry.position, v.reasons) for v in engine.verify(plan)) == expected
        source.layers[layer][row, column] ^= mask
    assert engine.verify(plan) == []


@some
@given(
    world=healthy_worlds.filter(lambda w: len(w.rows) >= 2 and min(sorted(w.lengths)[-2:]) >= 2),
    data=st.data(),
)
def test_a_row_that_names_anothers_prefix_is_found_at_write(
    backend: str, device: torch.device, world: World, data: st.DataObject
) -> None:
    able = [(row, n) for row, n in zip(world.rows, world.lengths, strict=True) if n >= 2]
    (other, other_len), (row, length) = data.draw(st.permutations(able))[:2]
    prefix = data.draw(st.integers(1, min(other_len, length - 1)), label="prefix")
    engine = Engine(world, backend, device)
    engine.remember([Part(row=other, prefix=0, extend=other_len)])
    engine.advance([Part(row=row, prefix=0, extend=prefix)])
    engine.table[row, :prefix] = engine.table[other, :prefix]
    parts = [Part(row=row, prefix=prefix, extend=data.draw(st.integers(1, length - prefix), label="extend"))]
    verify_plan, write_plan = engine.plan(parts, tokens=False)
    same = torch.equal(world.tokens[row, :prefix], world.tokens[other, :prefix]) and world.anchors is None
    # It is somebody's whole prefix: without anchors or tokens to compare with, every link of it holds.
    heads = [] if world.anchors is None else [(int(world.slots[other, 0]), int(kc.Reason.CHAIN))]
    assert [(v.entry.slot, v.reasons) for v in engine.verify(verify_plan)] == heads
    seed = int(world.slots[other, prefix - 1])
    record, tail = engine.endpoint.records[seed].tolist(), int(engine.tails[row])
    found = engine.write(write_plan, parts, lifetime=False)
    if same:
        assert found == []
        return
    assert len(found) == 1
    owner = world.owners[world.rows.index(row)]
    assert found[0].words == (
        *(int(TAG), int(kc.Reason.PREFIX), seed, row, prefix - 1, record[0], -1, record[1]),
        *(tail, record[2], 0, record[3], 1, seed, to_signed(owner), 0),
    )


@some
@given(world=healthy_worlds, data=st.data())
def test_moving_there_and_back_restores_the_records(
    backend: str, device: torch.device, world: World, data: st.DataObject
) -> None:
    # The spare slots are a host tier: further rows of the same buffer.
    engine = Engine(world, backend, device, spare_slots=data.draw(st.integers(0, 40), label="spare"))
    engine.remember(whole_histories(world))
    before = engine.records()
    slots = list(range(1, len(before)))
    places = [s + 1 for s in np.random.default_rng(data.draw(seeds)).permutation(len(slots)).tolist()]
    for step, (src, dst) in enumerate([(slots, places), (places, slots)]):
        kc.ops.move(
            src=engine.int64(src),
            dst=engine.int64(dst),
            owner=77,
            step=engine.int64([step]),
            records=(engine.endpoint.records,),
            backend=backend,
        )
        if step == 0:
            moved = engine.records()
            assert [moved[d][:3] for d in dst] == [before[s][:3] for s in src]
    stamped = (1 << 24) | 77
    assert engine.records() == [[*r[:3], stamped] if any(r) else r for r in before]


@some
@given(world=cached_worlds, data=st.data())
def test_retired_slots_are_freed_where_lifetime_is_tracked(
    backend: str, device: torch.device, world: World, data: st.DataObject
) -> None:
    engine = Engine(world, backend, device)
    engine.remember(whole_histories(world))
    plan, _ = engine.plan(all_cached(world))
    entries = expected_entries(world, 0)
    retired = set(data.draw(st.lists(st.integers(0, world.num_slots - 1), max_size=20), label="retired"))
    written = {e.slot for e in entries}
    before = engine.records()
    kc.ops.retire(
        slots=engine.int64(sorted(retired)),
        owner=engine.int64([3]),
        step=engine.int64([4]),
        records=(engine.endpoint.records,),
        backend=backend,
    )
    writer = to_signed((1 << 63) | (4 << 24) | 3)
    after = engine.records()
    assert after == [[*r[:3], writer] if s in retired & written else r for s, r in enumerate(before)]
    assert engine.verify(plan) == []
    found = Counter((v.entry, v.reasons) for v in engine.verify(plan, lifetime=True))
    assert found == Counter((e, int(kc.Reason.FREED)) for e in entries if e.slot in retired)


@some
@given(world=cached_worlds, data=st.data())
def test_a_slot_may_be_reused_once_it_is_retired(
    backend: str, device: torch.device, world: World, data: st.DataObject
) -> None:
    engine = Engine(world, backend, device)
    engine.remember(whole_histories(world))
    row, n = max(zip(world.rows, world.lengths, strict=True), key=lambda pair: pair[1])
    slots = world.slots[row, :n].tolist()
    retired = set(data.draw(st.lists(st.sampled_from(slots)), label="retired"))
    kc.ops.retire(
        slots=engine.int64(sorted(retired)),
        owner=engine.int64([0]),
        step=engine.int64([4]),
        records=(engine.endpoint.records,),
        backend=backend,
    )
    # Another request gets the same slots, for other tokens.
    index = world.rows.index(row)
    owners = [(o ^ 1) if i == index else o for i, o in enumerate(world.owners)]
    engine.world = dataclasses.replace(world, owners=owners, tokens=world.tokens + 1)
    part = [Part(row=row, prefix=0, extend=n)]
    found = engine.serve(part, lifetime=True)
    expected = {s for s in slots if s not in retired}
    assert Counter((v.entry.slot, v.reasons) for v in found) == Counter((s, int(kc.Reason.OVERWRITE)) for s in expected)
    assert engine.verify(engine.plan([Part(row=row, prefix=n, extend=0)])[0], lifetime=True) == []


@st.composite
def rows_in_pieces(draw: Any) -> tuple[World, list[list[int]]]:
    """A world, and for each request the lengths of the pieces that its tokens come in."""
    world, cuts = draw(cut_worlds(cuts=draw(st.integers(1, 3))))
    return world, [np.diff([0, *c, n]).tolist() for c, n in zip(cuts, world.lengths, strict=True)]


@some
@given(drawn=rows_in_pieces())
def test_tails_advanced_in_pieces_are_those_advanced_at_once(
    backend: str, device: torch.device, drawn: tuple[World, list[list[int]]]
) -> None:
    world, pieces = drawn
    once, often = Engine(world, backend, device), Engine(world, backend, device)
    once.advance(whole_histories(world))
    for i in range(max((len(p) for p in pieces), default=0)):
        often.advance([Part(row=r, prefix=sum(p[:i]), extend=p[i]) for r, p in zip(world.rows, pieces, strict=True)])
    assert once.tails.tolist() == often.tails.tolist()
    # The tail is the chain of the last record.
    once.remember(whole_histories(world))
    for row, n in zip(world.rows, world.lengths, strict=True):
        if n > 0:
            assert once.tails[row] == once.endpoint.records[int(world.slots[row, n - 1]), 1]


@some
@given(drawn=rows_in_pieces(), data=st.data())
def test_tokens_scattered_in_pieces_are_those_scattered_at_once(
    backend: str, device: torch.device, drawn: tuple[World, list[list[int]]], data: st.DataObject
) -> None:
    world, pieces = drawn
    # A pool narrower than the longest row truncates both alike.
    width = data.draw(st.integers(1, world.tokens.shape[1] + 2), label="width")
    rounds = max((len(p) for p in pieces), default=0)
    engine = Engine(world, backend, device)
    pools = []
    starts_and_lens = (
        [[[0] * len(pieces)], [[sum(p[:i]) for p in pieces] for i in range(rounds)]],
        [
            [world.lengths],
            [[p[i] for p in pieces] for i in range(rounds)],
        ],
    )
    for all_starts, all_lens in zip(*starts_and_lens, strict=True):
        pool = torch.full((world.num_rows, width), -7, dtype=torch.int32, device=engine.device)
        for starts, lens in zip(all_starts, all_lens, strict=True):
            flat = [world.tokens[r, s : s + n] for r, s, n in zip(world.rows, starts, lens, strict=True)]
            kc.ops.scatter_token_ids(
                flat=torch.cat([int64([]), *flat]).to(engine.device),
                offsets=engine.int64(np.cumsum([0, *lens])),
                rows=engine.int64(world.rows),
                starts=engine.int64(starts),
                pool=pool,
                status=torch.zeros(1, dtype=torch.int32, device=engine.device),
                backend=backend,
            )
        pools.append(pool.tolist())
    assert pools[0] == pools[1]
    for row, n in zip(world.rows, world.lengths, strict=True):
        kept = min(n, width)
        assert pools[0][row] == world.tokens[row, :kept].tolist() + [-7] * (width - kept)
    assert pools[0][0] == [-7] * width


@some
@given(world=healthy_worlds, data=st.data())
def test_strided_plans_cover_every_position_in_rotation(
    backend: str, device: torch.device, world: World, data: st.DataObject
) -> None:
    engine = Engine(world, backend, device)
    parts = all_cached(world)
    options = {"window": data.draw(st.sampled_from((*WINDOWS, 100))), "after_write": data.draw(st.booleans())}
    strides = [data.draw(st.integers(0, 5)) for _ in parts]
    first = data.draw(st.sampled_from([0, 1, 7, (1 << 39) - 2, -3]), label="first step")
    full = entries_in(engine.plan(parts, **options)[0])
    seen: Counter[Entry] = Counter()
    n = max([1, *strides])
    for step in range(first, first + n):
        strided, _ = engine.plan(parts, **options, strides=engine.int64(strides), step=engine.int64([step]))
        entries = entries_in(strided)
        # In the order of the full plan, none of them changed.
        kept = set(entries)
        assert entries == [e for e in full if e in kept]
        seen.update(entries)
    assert set(seen) == set(full)
    # In n steps a stride of n comes to each position once, but for the last one, which every step has.
    for part, stride in zip(parts, strides, strict=True):
        if stride == n:
            assert {seen[e] for e in full if e.row == part.row and e.position != part.prefix - 1} <= {1}
        assert {seen[e] for e in full if e.row == part.row and e.position == part.prefix - 1} <= {n}


@some
@given(world=cached_worlds, data=st.data())
def test_a_broken_link_between_requests_shows_nowhere_else(
    backend: str, device: torch.device, world: World, data: st.DataObject
) -> None:
    """A table entry swapped for another position's slot is found at that position and at its successor."""
    engine = Engine(world, backend, device)
    engine.remember(whole_histories(world))
    entries = expected_entries(world, 0)
    target, other = (data.draw(st.sampled_from(entries), label=which) for which in ("target", "other"))
    assume((target.position, target.token) != (other.position, other.token))
    engine.table[target.row, target.position] = other.slot
    found = {(v.entry.row, v.entry.position): v.reasons for v in engine.verify(engine.plan(all_cached(world))[0])}
    at = (target.row, target.position)
    assert set(found) - {at, (target.row, target.position + 1)} == set()
    assert bool(found[at] & kc.Reason.POSITION) == (target.position != other.position)
    assert bool(found[at] & kc.Reason.TOKEN) == (target.token != other.token)
