"""Windowed groups behind a table from full slots to their own: what is evicted, moved or given away there."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kv_canary as kc

from .engine import Engine, Request, make_pool
from .test_forward import flip

WINDOW = 6


class Sliding(Engine):
    """A full group, and a sliding one whose slots are given out and taken back as windows move on."""

    def __init__(self, *, slots: int = 40, **options: Any) -> None:
        self.lut = torch.zeros(256, dtype=torch.int64)
        full = kc.BufferGroup(name="full", pool=make_pool(256, name="full"))
        swa = kc.BufferGroup(name="swa", pool=make_pool(slots, name="swa"), window=WINDOW, lut=self.lut)
        super().__init__([full, swa], kc.CanaryConfig(backend="reference", **options))
        self.free = list(range(1, slots))

    def map(self, request: Request, start: int, end: int) -> None:
        first = self.allocate(self.groups[0].pool, end - start)
        full = torch.arange(first, first + end - start)
        for table in self.tables.values():
            table[request.row, start:end] = full
        self.lut[full] = torch.tensor([self.free.pop(0) for _ in range(end - start)], dtype=torch.int64)

    def leave(self, request: Request, *, retire: bool = True, keep: int = WINDOW) -> None:
        """Take the slots back that no token to come will read: retired, then out of the table, then free."""
        gone = self.tables["full"][request.row, : max(0, request.cached - keep)].long()
        gone = gone[self.lut[gone] > 0]
        slots = self.lut[gone].clone()
        if retire:
            self.manager.retire(self.groups[1].pool, slots, owner=request.owner)
        self.lut[gone] = 0
        self.free += slots.tolist()


def test_windows_move_on_over_slots_that_are_used_again() -> None:
    engine = Sliding()
    a, b = engine.add("a", 100), engine.add("b", 100)
    for n in (8, 1, 5, 1, 1, 7, 1, 1, 1, 6, 1):
        engine.step((a, n), (b, 1))
        engine.leave(a)
        engine.leave(b)
    assert [r.sentence for r in engine.found()] == []
    # More tokens than the sliding pool has slots have gone through it.
    assert a.cached + b.cached > 39
    summary = engine.manager.summary()
    assert summary.positions_verified == summary.positions_relied_on
    assert summary.watching == "complete"


def test_one_position_too_many_taken_back_is_unmapped() -> None:
    engine = Sliding()
    a = engine.add("a", 100)
    engine.step((a, 10))
    engine.leave(a, keep=WINDOW - 1)
    engine.step((a, 1))
    found = engine.found()
    assert {(r.reasons, r.position, r.group) for r in found} == {(("UNMAPPED",), 4, "swa")}
    assert {r.tag for r in found} == {"HEAD_SWA", "TAIL_SWA"}


def test_a_stale_entry_of_the_table_is_freed_memory() -> None:
    engine = Sliding()
    a = engine.add("a", 100)
    engine.step((a, 10))
    slot = int(engine.lut[int(engine.tables["full"][a.row, 7])])
    engine.manager.retire(engine.groups[1].pool, torch.tensor([slot]), owner=a.owner)
    engine.step((a, 1))
    assert [(r.reasons, r.position, r.slot, r.tag) for r in engine.found()] == [(("FREED",), 7, slot, "HEAD_SWA")]


def test_a_slot_given_away_while_the_window_reads_it_is_found() -> None:
    engine = Sliding(check_tokens=True)
    a, b = engine.add("a", 100), engine.add("b", 100)
    engine.step((a, 10))
    slot = int(engine.lut[int(engine.tables["full"][a.row, 7])])
    engine.free.insert(0, slot)
    engine.step((b, 1))
    [overwrite] = engine.found()
    assert (overwrite.reasons, overwrite.slot, overwrite.tag, overwrite.request_id) == (
        ("OVERWRITE",),
        slot,
        "TAIL_SWA",
        "b",
    )
    engine.step((a, 1))
    found = {(r.position, r.group) for r in engine.found()}
    assert (7, "swa") in found
    assert found <= {(7, "swa"), (8, "swa")}


@pytest.mark.parametrize("wrong", [0, 256, -1, 39])
def test_a_full_slot_outside_the_table_or_the_pool_is_reported(wrong: int) -> None:
    engine = Sliding()
    a = engine.add("a", 100)
    engine.step((a, 10))
    if wrong == 39:
        engine.lut[int(engine.tables["swa"][a.row, 7])] = 1000
    else:
        engine.tables["swa"] = engine.tables["swa"].clone()
        engine.tables["swa"][a.row, 7] = wrong
    engine.step((a, 1))
    found = engine.found()
    expected = "UNMAPPED" if wrong == 0 else "SLOT_RANGE"
    assert {(r.reasons, r.position, r.group) for r in found} == {((expected,), 7, "swa")}
    assert engine.manager.summary().watching == ("partial" if wrong in (256, -1) else "complete")


def test_a_prefix_hit_needs_its_window_only() -> None:
    engine = Sliding()
    a = engine.add("a", list(range(40)))
    for _ in range(3):
        engine.step((a, 10))
        engine.leave(a)
    b = engine.add("b", [*range(28), 900, 901, 902])
    for table in engine.tables.values():
        table[b.row, :28] = table[a.row, :28]
    b.cached = 28
    # Of its last six positions four are resident.
    engine.step((b, 1))
    assert {(r.reasons, r.position, r.group) for r in engine.found()} == {
        (("UNMAPPED",), p, "swa") for p in range(28 - WINDOW, 24)
    }


def test_a_changed_byte_outside_every_window_is_nobody_s_business() -> None:
    engine = Sliding()
    a = engine.add("a", 100)
    engine.step((a, 12))
    group = engine.groups[1]
    for position in range(12):
        slot = engine.slot_of(group, a, position)
        flip(group, slot, position)
    a.tokens[12:] = [5] * 88
    engine.step((a, 1))
    assert {(r.position, r.tag) for r in engine.found()} == {(p, "HEAD_SWA") for p in range(6, 12)}


@settings(max_examples=max(1, settings.default.max_examples // 20))
@given(
    seed=st.integers(0, 1 << 30),
    stride=st.sampled_from([1, 3]),
    at_tail=st.booleans(),
    records=st.sampled_from(["one", "head_and_tail"]),
)
def test_lives_of_windows_are_clean_and_a_fault_in_one_is_found(
    seed: int, stride: int, at_tail: bool, records: Any
) -> None:
    rng = random.Random(seed)
    engine = Sliding(slots=80, stride=stride, verify_bytes_at_tail=at_tail, records=records)
    live: list[Request] = []
    for i in range(16):
        if len(live) < 3:
            live.append(engine.add(f"r{i}", 100))
        work = [(r, rng.choice([1, 1, 4, 9])) for r in live if rng.random() < 0.8]
        if work:
            engine.step(*work)
        for r in list(live):
            engine.leave(r)
            if r.cached > 30:
                live.remove(r)
                engine.leave(r, keep=0)
                engine.rows.release(r.name)
    assert [r.sentence for r in engine.found()] == []
    victim = max(live, key=lambda r: r.cached)
    if victim.cached == 0:
        return
    position = victim.cached - 1 - rng.randrange(min(WINDOW, victim.cached))
    group = engine.groups[1]
    slot = engine.slot_of(group, victim, position)
    flip(group, slot, position)
    engine.step((victim, 0))
    for _ in range(stride - 1):
        engine.step((victim, 0))
    found = engine.found()
    assert {(r.slot, r.group, r.reasons) for r in found} == {(slot, "swa", ("K",))}
