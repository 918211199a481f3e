"""From the write to the free, the copy and the flush: records follow the slots that they stand for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import kv_canary as kc

from .engine import BYTES, LAYERS, Engine, Request, full_engine, make_pool
from .test_forward import flip


def slots_of(engine: Engine, request: Request, start: int, end: int) -> torch.Tensor:
    return engine.tables["full"][request.row, start:end].long().clone()


def copy_bytes(pool: kc.KvPool, src: torch.Tensor, dst: torch.Tensor) -> None:
    for source in (pool.k_source, pool.v_source):
        for layer in source.layers:
            layer[dst] = layer[src]


@pytest.fixture(params=["one", "head_and_tail"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return full_engine(records=request.param)


def test_every_read_of_a_freed_slot_is_reported(engine: Engine) -> None:
    pool = engine.groups[0].pool
    a = engine.add("a", 20)
    engine.step((a, 6))
    engine.manager.retire(pool, slots_of(engine, a, 2, 4), owner=a.owner)
    engine.step((a, 1))
    found = engine.found()
    assert {(r.reasons, r.position, r.tag) for r in found} == {(("FREED",), p, "HEAD_FULL") for p in (2, 3)}


def test_a_freed_slot_that_is_used_again_is_clean(engine: Engine) -> None:
    pool = engine.groups[0].pool
    a = engine.add("a", 20)
    engine.step((a, 6))
    engine.manager.retire(pool, slots_of(engine, a, 0, 6), owner=a.owner)
    b = engine.add("b", 20)
    engine.next_slot.clear()
    for n in (6, 1, 1):
        engine.step((b, n))
    assert [r.sentence for r in engine.found()] == []


def test_a_reader_behind_the_new_owner_is_reported(engine: Engine) -> None:
    pool = engine.groups[0].pool
    a, b = engine.add("a", 20), engine.add("b", 20)
    engine.step((a, 6))
    engine.manager.retire(pool, slots_of(engine, a, 0, 6), owner=a.owner)
    engine.next_slot.clear()
    engine.step((b, 6))
    engine.tables["full"][a.row, :6] = engine.tables["full"][b.row, :6]
    engine.step((a, 1))
    found = engine.found()
    assert {r.request_id for r in found} == {"a"}
    assert {r.position for r in found if "TOKEN" in r.reasons} == set(range(6))


def test_a_read_of_a_freed_slot_of_a_ring_is_reported() -> None:
    ring = kc.BufferGroup(name="ring", pool=make_pool(), window=5, ring=True)
    engine = Engine([ring])
    a = engine.add("a", 20)
    engine.step((a, 4))
    engine.manager.retire(ring.pool, engine.tables["ring"][a.row, 2:3].long(), owner=a.owner)
    engine.step((a, 1))
    assert {(r.reasons, r.position, r.tag) for r in engine.found()} == {(("FREED",), 2, "HEAD_SWA")}


def test_a_read_of_a_freed_slot_beside_a_prefix_that_is_yet_to_come_is_reported() -> None:
    engine = full_engine()
    a, b, c = (engine.add(name, list(range(100, 120))) for name in "abc")
    engine.step((c, 6))
    engine.manager.retire(engine.groups[0].pool, slots_of(engine, c, 2, 4), owner=c.owner)
    # b goes on from what a writes in this very forward.
    engine.map(a, 0, 8)
    engine.tables["full"][b.row, :8] = engine.tables["full"][a.row, :8]
    b.cached = 8
    for request, end in ((b, 9), (c, 7)):
        engine.map(request, request.cached, end)
    batch = engine.batch((a, 8), (b, 1), (c, 1), map_new=False)
    requests = [dataclasses.replace(r, pending=8 if r.request_id == "b" else 0) for r in batch.requests]
    engine.run(dataclasses.replace(batch, requests=requests))
    found = {(r.reasons, r.request_id, r.position, r.tag) for r in engine.found()}
    assert found == {(("FREED",), "c", p, "HEAD_FULL") for p in (2, 3)}


@pytest.mark.parametrize("freed_at", ["head", "tail"])
def test_what_is_freed_behind_a_prepared_forward_does_not_accuse_it(engine: Engine, freed_at: str) -> None:
    """A request that ends while its last step runs: its slots are freed behind the model, or behind TAIL."""
    pool = engine.groups[0].pool
    a = engine.add("a", 20)
    engine.step((a, 6))
    batch = engine.batch((a, 1))
    engine.forward.begin(batch)
    engine.forward.head()
    if freed_at == "head":
        engine.manager.retire(pool, slots_of(engine, a, 0, 6), owner=a.owner)
    engine.write_bytes(batch)
    engine.forward.tail()
    if freed_at == "tail":
        engine.manager.retire(pool, slots_of(engine, a, 0, 7), owner=a.owner)
    engine.forward.end()
    assert [r.sentence for r in engine.found()] == []
    # The next one that still reads them is guilty.
    a.cached += 1
    engine.step((a, 1))
    assert {r.reasons for r in engine.found()} == {("FREED",)}


def test_a_slot_freed_twice_or_never_written_stays_as_it_is(engine: Engine) -> None:
    pool = engine.groups[0].pool
    a = engine.add("a", 20)
    engine.step((a, 6))
    freed = slots_of(engine, a, 0, 3)
    engine.manager.retire(pool, torch.cat([freed, torch.tensor([0, 99])]), owner=a.owner)
    engine.manager.retire(pool, freed, owner=a.owner)
    for records in pool.buffers:
        assert bool((records[freed, 3] < 0).all())
        assert records[[0, 99]].abs().sum() == 0


def test_nothing_is_freed_without_slots_or_without_lifetimes() -> None:
    for options, slots in (({}, []), ({"track_lifetime": False}, [1, 2])):
        engine = full_engine(**options)
        a = engine.add("a", 20)
        engine.step((a, 6))
        engine.manager.retire(engine.groups[0].pool, torch.tensor(slots, dtype=torch.int64), owner=a.owner)
        assert not (engine.groups[0].pool.records[:, 3] < 0).any()
        engine.step((a, 1))
        assert engine.found() == []


def test_slots_of_one_pool_are_freed_there_only() -> None:
    groups = [kc.BufferGroup(name=n, pool=make_pool(name=n)) for n in ("full", "other")]
    engine = Engine(groups)
    a = engine.add("a", 20)
    engine.step((a, 6))
    engine.manager.retire(groups[1].pool, torch.arange(1, 7), owner=a.owner)
    assert not (groups[0].pool.records[:, 3] < 0).any()
    engine.step((a, 1))
    assert {(r.reasons, r.position) for r in engine.found()} == {(("FREED",), p) for p in range(6)}


def test_two_owners_of_a_slot_are_reported_at_the_second_write(engine: Engine) -> None:
    a, b = engine.add("a", 20), engine.add("b", 20)
    engine.step((a, 6), (b, 6))
    engine.tables["full"][b.row, 6] = engine.tables["full"][a.row, 5]
    engine.step((b, 1), map_new=False)
    found = engine.found()
    assert {(r.reasons, r.request_id, r.position) for r in found} == {(("OVERWRITE",), "b", 6)}
    # And the victim sees whose its slot is now.
    engine.step((a, 1))
    assert {(r.request_id, r.position) for r in engine.found()} == {("a", 5)}


def test_moved_records_are_the_new_owner_s(engine: Engine) -> None:
    pool = engine.groups[0].pool
    a = engine.add("a", 20)
    engine.step((a, 6))
    src, dst = slots_of(engine, a, 0, 6), torch.arange(101, 107)
    copy_bytes(pool, src, dst)
    engine.manager.move(pool, src, dst, owner=77)
    engine.manager.retire(pool, src, owner=a.owner)
    engine.tables["full"][a.row, :6] = dst
    engine.step((a, 1))
    assert [r.sentence for r in engine.found()] == []
    for records in pool.buffers:
        assert {int(w) & 0xFFFFFF for w in records[dst, 3]} == {77}
    assert bool((pool.records[src, 3] < 0).all())


def test_a_move_that_swaps_or_overlaps_reads_before_it_writes(engine: Engine) -> None:
    pool = engine.groups[0].pool
    a = engine.add("a", 20)
    engine.step((a, 6))
    src = slots_of(engine, a, 0, 6)
    dst = src.roll(1)
    copy_bytes(pool, src, dst)
    engine.manager.move(pool, src, dst, owner=a.owner)
    engine.tables["full"][a.row, :6] = dst
    engine.step((a, 1))
    assert [r.sentence for r in engine.found()] == []


def test_a_move_of_what_was_freed_or_never_written_brings_nothing(engine: Engine) -> None:
    pool = engine.groups[0].pool
    a = engine.add("a", 20)
    engine.step((a, 6))
    src = slots_of(engine, a, 0, 2)
    engine.manager.retire(pool, src[:1], owner=a.owner)
    engine.manager.move(pool, torch.tensor([int(src[0]), 90]), torch.tensor([101, 102]), owner=a.owner)
    engine.tables["full"][a.row, :2] = torch.tensor([101, 102])
    engine.step((a, 1))
    assert {(r.reasons, r.position) for r in engine.found() if r.position < 2} == {
        (("NEVER_WRITTEN",), p) for p in (0, 1)
    }


def test_a_copy_whose_bytes_did_not_arrive_is_reported(engine: Engine) -> None:
    pool = engine.groups[0].pool
    a = engine.add("a", 20)
    engine.step((a, 6))
    src, dst = slots_of(engine, a, 0, 6), torch.arange(101, 107)
    copy_bytes(pool, src[:5], dst[:5])
    engine.manager.move(pool, src, dst, owner=a.owner)
    engine.tables["full"][a.row, :6] = dst
    batch = engine.batch((a, 1))
    engine.run(batch)
    found = engine.found()
    assert {(r.position, r.slot) for r in found} == {(5, 106)}
    assert {reason for r in found for reason in r.reasons} == {"K", "V"}


def test_an_empty_move_does_nothing(engine: Engine) -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    engine.manager.move(engine.groups[0].pool, nothing, nothing, owner=1)
    assert int(engine.groups[0].pool.records.abs().sum()) == 0


@pytest.mark.parametrize("call", ["clear", "clear and go on"])
def test_a_flushed_cache_is_as_new(engine: Engine, call: str) -> None:
    a = engine.add("a", 20)
    engine.step((a, 6))
    engine.manager.clear()
    for records in engine.groups[0].pool.buffers:
        assert int(records.abs().sum()) == 0
    # Its slots belong to nobody: another request may take them, and the first one may begin again.
    engine.next_slot.clear()
    b = engine.add("b", 20)
    if call == "clear":
        a.cached = 0
        engine.step((b, 6), (a, 6))
    else:
        engine.step((b, 6))
        a.cached = 0
        engine.step((b, 1), (a, 6))
    engine.step((b, 1), (a, 1))
    assert [r.sentence for r in engine.found()] == []


class Tiered:
    """An engine with a host tier of 40 slots: their records lie behind those of the pool, their bytes elsewhere."""

    def __init__(self, **options: Any) -> None:
        self.pool = make_pool(64, extra_slots=40)
        self.engine = Engine(
            [kc.BufferGroup(name="full", pool=self.pool)], kc.CanaryConfig(backend="reference", **options)
        )
        sources = (self.pool.k_source, self.pool.v_source)
        self.host = [torch.zeros(LAYERS, 40, BYTES, dtype=torch.uint8) for _ in sources]

    def offload(self, slots: torch.Tensor, tier: torch.Tensor, *, owner: int) -> None:
        for source, host in zip((self.pool.k_source, self.pool.v_source), self.host, strict=True):
            for layer, copy in zip(source.layers, host, strict=True):
                copy[tier] = layer[slots]
        self.engine.manager.move(self.pool, slots, tier + 64, owner=owner)
        self.engine.manager.retire(self.pool, slots, owner=owner)

    def load(self, tier: torch.Tensor, slots: torch.Tensor, *, owner: int, lost: int = 0) -> None:
        kept = len(tier) - lost
        for source, host in zip((self.pool.k_source, self.pool.v_source), self.host, strict=True):
            for layer, copy in zip(source.layers, host, strict=True):
                layer[slots[:kept]] = copy[tier[:kept]]
        self.engine.manager.move(self.pool, tier + 64, slots, owner=owner)


@pytest.mark.parametrize("again", [False, True])
def test_what_was_on_the_host_when_a_pool_was_forgotten_is_taken_in_when_it_comes_back(again: bool) -> None:
    tiered = Tiered()
    engine = tiered.engine
    unverified = engine.manager.unverified
    a, b = engine.add("a", 40), engine.add("b", 40)
    engine.step((a, 9), (b, 3))
    tiered.offload(slots_of(engine, a, 0, 9), torch.arange(10, 19), owner=a.owner)
    unverified.forget_all(tiered.pool)
    engine.step((b, 1))
    live = set(slots_of(engine, b, 0, 4).tolist())
    engine.manager.retire(tiered.pool, torch.tensor([slot for slot in range(1, 64) if slot not in live]))
    engine.manager.flush()
    # What is marked on the host keeps no step of the engine's from being like any other.
    assert unverified.is_clean
    tier = torch.arange(10, 19)
    if again:
        engine.manager.move(tiered.pool, tier + 64, tier + 74, owner=a.owner)
        tiered.host = [torch.roll(host, 10, dims=1) for host in tiered.host]
        tier = tier + 10
        engine.manager.flush()
        assert unverified.is_clean
    back = torch.arange(40, 49)
    tiered.load(tier, back, owner=a.owner)
    engine.tables["full"][a.row, :9] = back.to(torch.int32)
    engine.step((a, 1), (b, 1))
    engine.step((a, 1))
    assert [r.sentence for r in engine.found()] == []
    assert unverified.taken_in >= 9


@pytest.mark.parametrize("records", ["one", "head_and_tail"])
@pytest.mark.parametrize("lost", [0, 2])
def test_records_go_to_the_host_tier_and_back_with_the_bytes(records: Any, lost: int) -> None:
    tiered = Tiered(records=records)
    engine = tiered.engine
    a = engine.add("a", 40)
    for n in (8, 1):
        engine.step((a, n))
    slots, tier = slots_of(engine, a, 0, 9), torch.arange(10, 19)
    tiered.offload(slots, tier, owner=a.owner)
    # The slots are another's in the meantime.
    engine.next_slot.clear()
    b = engine.add("b", 40)
    for n in (12, 1):
        engine.step((b, n))
    back = torch.arange(40, 49)
    tiered.load(tier, back, owner=a.owner, lost=lost)
    engine.tables["full"][a.row, :9] = back
    engine.step((a, 1), (b, 1))
    engine.step((a, 1), (b, 1))
    found = engine.found()
    assert {(r.request_id, r.position) for r in found} == {("a", p) for p in range(9 - lost, 9)}
    assert all(set(r.reasons) <= {"K", "V"} for r in found)


def test_a_position_that_is_still_in_the_host_tier_is_no_slot_of_the_pool() -> None:
    tiered = Tiered()
    engine = tiered.engine
    a = engine.add("a", 40)
    engine.step((a, 8))
    tiered.offload(slots_of(engine, a, 0, 1), torch.tensor([3]), owner=a.owner)
    engine.tables["full"][a.row, 0] = 64 + 3
    engine.step((a, 1))
    assert {(r.reasons, r.position) for r in engine.found()} == {(("SLOT_RANGE",), 0)}


def quarantined(**options: Any) -> Engine:
    return full_engine(quarantine=True, sweep_every=1, **options)


def test_a_freed_slot_that_changes_is_found_by_the_sweep() -> None:
    engine = quarantined()
    pool = engine.groups[0].pool
    a, b = engine.add("a", 20), engine.add("b", 20)
    engine.step((a, 6), (b, 4))
    freed = slots_of(engine, a, 0, 6)
    engine.manager.retire(pool, freed, owner=a.owner)
    engine.step((b, 1))
    assert engine.found() == []
    flip(engine.groups[0], int(freed[3]), 3)
    engine.step((b, 1))
    found = engine.found()
    assert [(r.reasons, r.tag, r.slot, r.position) for r in found] == [(("K",), "SWEEP_FULL", int(freed[3]), 3)]
    # Until somebody writes there.
    engine.next_slot.clear()
    c = engine.add("c", 20)
    engine.step((b, 1), (c, 6), map_new=True)
    engine.found()
    engine.step((c, 1))
    assert [r.sentence for r in engine.found() if r.tag == "SWEEP_FULL"] == []


def test_a_freed_slot_that_is_taken_by_another_request_is_no_alarm() -> None:
    engine = quarantined()
    pool = engine.groups[0].pool
    a = engine.add("a", 20)
    engine.step((a, 6))
    engine.manager.retire(pool, slots_of(engine, a, 0, 6), owner=a.owner)
    engine.next_slot.clear()
    b = engine.add("b", 20)
    for n in (3, 2, 2):
        engine.step((b, n))
    assert [r.sentence for r in engine.found()] == []


@pytest.mark.parametrize("then", ["retry", "free", "free and retire again"])
def test_what_a_forward_given_up_may_have_written_is_in_no_quarantine(then: str) -> None:
    engine = quarantined()
    pool = engine.groups[0].pool
    a = engine.add("a", 20)
    engine.step((a, 6))
    engine.manager.retire(pool, slots_of(engine, a, 0, 6), owner=a.owner)
    engine.next_slot.clear()
    b, c = engine.add("b", 20), engine.add("c", 20)
    batch = engine.batch((b, 4))
    engine.forward.begin(batch)
    engine.forward.head()
    engine.write_bytes(batch)
    engine.forward.abort()
    assert [r.sentence for r in engine.found()] == []
    if then == "retry":
        engine.run(batch)
        b.cached = 4
        engine.step((b, 1))
    elif then == "free and retire again":
        engine.manager.retire(pool, slots_of(engine, b, 0, 4), owner=b.owner)
    engine.step((c, 1))
    assert [r.sentence for r in engine.found()] == []
    # The others are there still, and what was written since is there again.
    victim = 6
    if then == "retry":
        engine.manager.retire(pool, slots_of(engine, b, 1, 2), owner=b.owner)
        victim = int(slots_of(engine, b, 1, 2))
    position = int(pool.records[victim, 0]) >> 32
    flip(engine.groups[0], victim, position)
    engine.manager.sweep()
    assert {(r.slot, r.tag) for r in engine.found()} == {(victim, "SWEEP_FULL")}


def test_a_live_slot_that_a_forward_given_up_wrote_over_is_in_no_quarantine_when_it_is_freed() -> None:
    engine = quarantined()
    pool = engine.groups[0].pool
    a = engine.add("a", 20)
    engine.step((a, 6))
    # Two of its tokens were drafts, which are put in again.
    a.cached = 4
    a.tokens[4:] = [1, 2, 3, 4]
    batch = engine.batch((a, 2), map_new=False)
    engine.forward.begin(batch)
    engine.forward.head()
    engine.write_bytes(batch)
    engine.forward.abort()
    moved = slots_of(engine, a, 0, 6)
    engine.manager.move(pool, moved, moved + 50, owner=a.owner)
    copy_bytes(pool, moved, moved + 50)
    engine.manager.retire(pool, torch.cat([moved, moved + 50]), owner=a.owner)
    engine.manager.sweep()
    assert [r.sentence for r in engine.found()] == []
