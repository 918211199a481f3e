"""Sweeps look at what no forward is about to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import kv_canary as kc
from kv_canary.constants import HEAD_OF_CHAIN, UNCHECKED
from kv_canary.hashing import mix
from kv_canary.runtime import sweep as sweep_module
from kv_canary.runtime.cached import CachedSlots

from .engine import Engine, Request, full_engine, make_pool
from .test_forward import flip


def cached_of(slots: Sequence[int], *, group: str = "full", first: int = HEAD_OF_CHAIN, start: int = 0) -> CachedSlots:
    """Return what a prefix cache says that holds one prefix, or what is resident of it from `start` on."""
    slots = list(slots)
    return CachedSlots(
        group=group,
        slots=torch.tensor(slots, dtype=torch.int64),
        positions=torch.arange(start, start + len(slots)),
        previous=torch.tensor([first, *slots[:-1]] if slots else [], dtype=torch.int64),
    )


class Caching:
    """An engine with one finished request that only the prefix cache still holds, and one that goes on."""

    def __init__(self, *, groups: list[kc.BufferGroup] | None = None, tokens: int = 20, **options: Any) -> None:
        config = kc.CanaryConfig(backend="reference", **options)
        self.engine = Engine(groups or [kc.BufferGroup(name="full", pool=make_pool())], config)
        self.engine.manager._steps._sweeper.cached = lambda: self.cached
        self.cached: list[CachedSlots] = []
        self.idle, self.busy = self.engine.add("idle", 60), self.engine.add("busy", 60)
        self.engine.step((self.idle, tokens), (self.busy, 4))
        self.cached = [cached_of(self.slots(g)) for g in self.engine.groups[:1]]
        self.engine.found()

    def slots(self, group: kc.BufferGroup) -> list[int]:
        return [self.engine.slot_of(group, self.idle, p) for p in range(self.idle.cached)]

    def step(self) -> list[kc.ViolationReport]:
        self.engine.step((self.busy, 1))
        return self.engine.found()


@pytest.mark.parametrize("chunk", [1, 3, 19, 20, 21, 1 << 18])
def test_an_idle_slot_that_changed_is_found_by_the_next_sweep(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_module, "CHUNK", chunk)
    caching = Caching(sweep_every=3)
    group = caching.engine.groups[0]
    assert [caching.step() for _ in range(4)] == [[]] * 4
    for position in (0, 7, 19):
        slot = caching.slots(group)[position]
        flip(group, slot, position)
        # Of three steps one sweeps; forwards do not read the slot.
        found = [report for _ in range(3) for report in caching.step()]
        assert [(r.reasons, r.tag, r.slot, r.position) for r in found] == [(("K",), "SWEEP_FULL", slot, position)]
        flip(group, slot, position)
    assert [caching.step() for _ in range(3)] == [[]] * 3


@pytest.mark.parametrize(("chunk", "launches"), [(1, 20), (6, 4), (20, 1), (100, 1)])
def test_a_sweep_is_cut_into_launches(chunk: int, launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_module, "CHUNK", chunk)
    caching = Caching()
    caching.engine.manager.sweep()
    caching.engine.manager.flush()
    counters = caching.engine.manager.state.counters[kc.Tag.SWEEP_FULL].tolist()
    assert counters == [launches, 20]


def test_a_sweep_counts_as_no_position_that_a_forward_relied_on() -> None:
    caching = Caching(sweep_every=1)
    for _ in range(3):
        assert caching.step() == []
    summary = caching.engine.manager.summary()
    assert summary.positions_verified == summary.positions_relied_on
    assert summary.launches["SWEEP_FULL"] == 3
    assert summary.watching == "complete"


def test_a_cache_that_is_empty_or_that_nobody_walks_costs_nothing() -> None:
    engine = full_engine(sweep_every=1)
    a = engine.add("a", 20)
    engine.step((a, 4))
    engine.manager._steps._sweeper.cached = lambda: [cached_of([])]
    engine.step((a, 4))
    assert engine.found() == []
    assert "SWEEP_FULL" not in engine.manager.summary().launches


def test_scrub_reports_at_once_and_flush_is_not_needed() -> None:
    caching = Caching()
    group = caching.engine.groups[0]
    manager = caching.engine.manager
    manager.scrub()
    assert list(manager.reports) == []
    flip(group, caching.slots(group)[5], 5)
    manager.scrub()
    assert [(r.reasons, r.tag, r.position) for r in manager.reports] == [(("K",), "SWEEP_FULL", 5)]
    manager.reports.clear()
    manager.flush()
    assert list(manager.reports) == []


def test_scrub_raises_in_raise_mode() -> None:
    caching = Caching(mode="raise")
    group = caching.engine.groups[0]
    flip(group, caching.slots(group)[5], 5)
    with pytest.raises(kc.CanaryViolationError, match="SWEEP_FULL"):
        caching.engine.manager.scrub()
    flip(group, caching.slots(group)[5], 5)
    caching.engine.manager.scrub()


def test_what_a_sweep_between_steps_finds_is_told_by_the_next_step() -> None:
    caching = Caching()
    group, manager = caching.engine.groups[0], caching.engine.manager
    flip(group, caching.slots(group)[5], 5)
    manager.sweep()
    flip(group, caching.slots(group)[5], 5)
    assert list(manager.reports) == []
    assert [r.tag for r in caching.step()] == ["SWEEP_FULL"]


def test_a_sweep_before_any_forward_is_silent() -> None:
    engine = full_engine()
    engine.manager.sweep()
    engine.manager.scrub()
    assert engine.manager.summary().watching == "off"


@pytest.mark.parametrize("wrong", ["token of another chain", "position", "freed", "never written"])
def test_a_cache_that_holds_something_else_is_found(wrong: str) -> None:
    caching = Caching(quarantine=False)
    engine, slots = caching.engine, caching.slots(caching.engine.groups[0])
    expected = {"token of another chain": "CHAIN", "position": "POSITION", "freed": "FREED"}.get(wrong, "NEVER_WRITTEN")
    if wrong == "token of another chain":
        other = engine.add("other", 20)
        engine.step((other, 20))
        slots[9] = engine.slot_of(engine.groups[0], other, 9)
        engine.found()
    elif wrong == "position":
        slots[9], slots[10] = slots[10], slots[9]
    elif wrong == "freed":
        engine.manager.retire(engine.groups[0].pool, torch.tensor([slots[9]]), owner=1)
    else:
        slots[9] = 120
    caching.cached = [cached_of(slots)]
    engine.manager.scrub()
    found = list(engine.manager.reports)
    assert {r.tag for r in found} == {"SWEEP_FULL"}
    assert 9 in {r.position for r in found if expected in r.reasons}
    assert {r.position for r in found} <= {9, 10, 11}


@pytest.mark.parametrize(("first", "found"), [(UNCHECKED, []), (HEAD_OF_CHAIN, [0])])
def test_where_keys_carry_an_identity_the_first_position_s_chain_is_not_checked(first: int, found: list[int]) -> None:
    caching = Caching()
    engine = caching.engine
    salted = engine.add("salted", 20)
    batch = engine.batch((salted, 8))
    request = batch.requests[0]
    object.__setattr__(request, "identity", mix(5))
    engine.run(batch)
    slots = [engine.slot_of(engine.groups[0], salted, p) for p in range(8)]
    caching.cached = [cached_of(slots, first=first)]
    engine.manager.scrub()
    assert [r.position for r in engine.manager.reports if "CHAIN" in r.reasons] == found
    engine.manager.reports.clear()
    # All the rest of it is.
    flip(engine.groups[0], slots[0], 0)
    engine.manager.scrub()
    assert [(r.position, r.slot) for r in engine.manager.reports if "K" in r.reasons] == [(0, slots[0])]


def test_of_a_window_what_is_resident_is_verified_under_its_own_tag() -> None:
    lut = torch.arange(128, dtype=torch.int64)
    full = kc.BufferGroup(name="full", pool=make_pool(name="full"))
    swa = kc.BufferGroup(name="swa", pool=make_pool(name="swa"), window=6, lut=lut)
    caching = Caching(groups=[full, swa], sweep_every=1)
    slots = caching.slots(swa)
    caching.cached.append(cached_of(slots[13:], group="swa", first=UNCHECKED, start=13))
    assert caching.step() == []
    for position, seen in ((12, False), (13, True), (19, True)):
        flip(swa, slots[position], position)
        expected = [(("K",), "SWEEP_SWA", slots[position])] if seen else []
        assert [(r.reasons, r.tag, r.slot) for r in caching.step()] == expected
        flip(swa, slots[position], position)


def test_a_group_that_there_is_not_is_refused() -> None:
    caching = Caching()
    caching.cached = [cached_of([1, 2], group="other")]
    with pytest.raises(ValueError, match="sweep: group must be one of full, got 'other'"):
        caching.engine.manager.sweep()


@pytest.mark.parametrize("name", ["slots", "positions", "previous"])
@pytest.mark.parametrize("spoil", [lambda t: t.int(), lambda t: t[:1], lambda t: t[None], lambda t: t.float()])
def test_columns_that_do_not_belong_together_are_refused(name: str, spoil: Any) -> None:
    given = {n: torch.arange(3) for n in ("slots", "positions", "previous")}
    CachedSlots(group="full", **given)
    with pytest.raises(ValueError, match=r"CachedSlots: (slots|positions|previous) must be int64 of shape"):
        CachedSlots(group="full", **{**given, name: spoil(given[name])})


def busy_with(caching: Caching, *requests: Request) -> None:
    caching.engine.step(*((r, 1) for r in requests))


def test_a_sweep_between_the_forwards_of_a_step_changes_nothing() -> None:
    found = []
    for sweeps in (False, True):
        torch.manual_seed(1)
        caching = Caching(quarantine=True, sweep_every=1000)
        manager = caching.engine.manager
        with manager.one_step():
            busy_with(caching, caching.busy)
            if sweeps:
                manager.sweep()
            busy_with(caching, caching.busy)
        assert caching.engine.found() == []
        found.append((caching.engine.groups[0].pool.records.clone(), manager.summary().positions_verified))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
