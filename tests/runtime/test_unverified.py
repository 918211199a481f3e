"""Slots of which the records say nothing: how they are marked, taken in anew, and left out of what is reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kv_canary as kc
from kv_canary.constants import HEAD_OF_CHAIN, Reason, Tag
from kv_canary.runtime.drain import Findings
from kv_canary.runtime.unverified import Unverified
from kv_canary.specs.violation_row import ViolationRow, site_of

from .engine import Engine, Request, full_engine, make_pool


def slots(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def settled(engine: Engine, *numbers: int) -> list[bool]:
    [pool] = engine.manager.pools
    known = engine.manager.unverified.settled(pool)
    assert known is not None
    return known[slots(*numbers)].tolist()


def forget(engine: Engine, request: Request, *positions: int) -> None:
    """Drop the records of a request's cached positions, and mark them as gaps."""
    [group] = engine.groups
    engine.manager.unverified.forget(group.pool, slots(*(engine.slot_of(group, request, p) for p in positions)))


def served(**options: Any) -> tuple[Engine, Request]:
    """Return an engine with a request that has eight cached tokens."""
    engine = full_engine(**options)
    request = engine.add("a", 60)
    engine.step((request, 8))
    return engine, request


def test_a_freed_slot_is_no_gap_and_stays_in_doubt() -> None:
    engine = full_engine()
    [pool] = engine.manager.pools
    unverified = engine.manager.unverified
    unverified.forget(pool, slots(3, 4, 5))
    unverified.doubt(pool, slots(4))
    unverified.freed(pool, slots(4, 5))
    assert settled(engine, 3, 4, 5, 6) == [True, False, True, True]
    cached = kc.CachedSlots(
        group="full", slots=slots(3, 4, 5, 6), positions=slots(0, 1, 2, 3), previous=slots(-2, 3, 4, 5)
    )
    left = unverified.without_gaps(pool, cached)
    assert left.slots.tolist() == [4, 5, 6]
    assert left.positions.tolist() == [1, 2, 3]
    # The one before slot 4 has no record to hold it against.
    assert left.previous[0] != 3
    assert left.previous.tolist()[1:] == [4, 5]


def test_no_mark_is_left_once_all_slots_have_records_again() -> None:
    engine = full_engine()
    [pool] = engine.manager.pools
    unverified = engine.manager.unverified
    unverified.forget(pool, slots(3, 4))
    unverified.tidy()
    assert unverified.any_marked
    unverified.written(pool, slots(3, 4))
    unverified.doubt(pool, slots(9))
    unverified.tidy()
    cached = kc.CachedSlots(group="full", slots=slots(3), positions=slots(0), previous=slots(-2))
    assert unverified.without_gaps(pool, cached) is cached
    unverified.written(pool, slots(9))
    unverified.tidy()
    assert not unverified.any_marked
    assert unverified.settled(pool) is None


@pytest.mark.parametrize("records", ["one", "head_and_tail"])
def test_what_a_row_is_about_to_read_is_taken_in_once_for_each_marking(
    monkeypatch: pytest.MonkeyPatch, records: str
) -> None:
    engine, request = served(records=records)
    looks: list[int] = []
    take_in = Unverified._take_in
    monkeypatch.setattr(Unverified, "_take_in", lambda self, *args: (looks.append(1), take_in(self, *args))[1])
    for times in (1, 2, 3):
        forget(engine, request, 2, 5)
        for _ in range(3):
            engine.step((request, 1))
        # The steps behind the first go on from where it was.
        assert len(looks) == times
        assert engine.manager.unverified.taken_in == 2 * times
    assert engine.found() == []
    summary = engine.manager.summary()
    assert (summary.violations, engine.manager.unverified.taken_back) == (0, 0)
    assert summary.positions_verified == summary.positions_relied_on > 0


def never_written(tag: Tag, slot: int) -> ViolationRow:
    return ViolationRow(
        site=site_of(tag, 1 + (tag == Tag.HEAD_SWA)), reasons=Reason.NEVER_WRITTEN, slot=slot, row=1, position=2
    )


def test_reports_of_gaps_are_taken_back_and_no_others() -> None:
    full, windowed = (kc.BufferGroup(name=name, pool=make_pool(name=name)) for name in ("full", "windowed"))
    windowed = kc.BufferGroup(name="windowed", pool=windowed.pool, window=16, lut=torch.arange(64, dtype=torch.int32))
    engine = Engine([full, windowed])
    unverified = engine.manager.unverified
    unverified.forget(full.pool, slots(3))
    groups = engine.manager.groups
    gap, other = never_written(Tag.HEAD_FULL, 3), never_written(Tag.HEAD_FULL, 4)
    elsewhere = never_written(Tag.HEAD_SWA, 3)
    found = Findings(total=3, rows=[gap, other, elsewhere])
    left = unverified.take_back(found, groups)
    assert (left.rows, left.total) == ([other, elsewhere], 2)
    assert unverified.taken_back == 1
    assert engine.manager.summary().unverified == unverified.taken_in + 1
    # Rows that the ring had no room for may be gaps as well.
    assert unverified.take_back(Findings(total=9, rows=[gap]), groups) == Findings(total=0, rows=[])
    untouched = Findings(total=2, rows=[other, elsewhere])
    assert unverified.take_back(untouched, groups) is untouched


def test_a_gap_that_is_copied_over_what_a_row_has_read_is_taken_in_before_it_reads_it() -> None:
    engine, request = served()
    [group] = engine.groups
    unverified = engine.manager.unverified
    unverified.forget(group.pool, slots(engine.slot_of(group, request, 2), 100))
    engine.step((request, 1))
    assert unverified.taken_in == 1
    engine.manager.move(group.pool, slots(100), slots(engine.slot_of(group, request, 5)), owner=request.owner)
    engine.step((request, 1))
    assert engine.found() == []
    # Not read as it is, reported, and taken back.
    assert (unverified.taken_in, unverified.taken_back) == (2, 0)


def test_slots_that_the_pool_does_not_have_leave_no_gap_in_others() -> None:
    engine, request = served()
    [group] = engine.groups
    unverified = engine.manager.unverified
    beyond = len(group.pool.records)
    unverified.forget(group.pool, slots(engine.slot_of(group, request, 2), beyond, beyond + 7, 0, -1))
    engine.step((request, 1))
    assert engine.found() == []
    # Where the marking fails, every slot of the pool counts as a gap.
    assert unverified.taken_in == 1


def test_a_gap_that_is_copied_to_no_slot_hides_no_prefix_that_begins_elsewhere() -> None:
    engine, request = served()
    [group] = engine.groups
    unverified, [pool] = engine.manager.unverified, engine.manager.pools
    unverified.forget(pool, slots(100))
    engine.manager.move(pool, slots(100), slots(0), owner=request.owner)
    there = [engine.slot_of(group, request, p) for p in range(3)]
    cached = kc.CachedSlots(
        group="full", slots=slots(*there), positions=slots(0, 1, 2), previous=slots(HEAD_OF_CHAIN, *there[:2])
    )
    assert unverified.without_gaps(pool, cached).previous.tolist() == cached.previous.tolist()
    # Nor one that the pool does not have: a sweep reports that.
    gone = kc.CachedSlots(group="full", slots=slots(9999), positions=slots(0), previous=slots(HEAD_OF_CHAIN))
    assert unverified.without_gaps(pool, gone).slots.tolist() == [9999]
