"""Sizes come from the engine's limits, and what does not fit them is told."""

from __future__ import annotations

import pytest
import torch

import kv_canary as kc
from kv_canary.runtime.capacities import CanaryLaunchCapacities, CanaryLimits

from .engine import Engine, Request, full_engine, make_pool
from .test_forward import flip

LIMITS = CanaryLimits(max_rows=9, max_requests=4, max_tokens=64, max_len=100)


@pytest.mark.parametrize(
    ("window", "verify_capacity", "entries"),
    [
        (0, None, 400),
        # Rounded up to a multiple of 16.
        (7, None, 32),
        (1000, None, 400),
        (0, 50, 50),
        (0, 1000, 400),
        (7, 50, 32),
        (7, 5, 5),
        (0, 1, 1),
    ],
)
def test_capacities_hold_whatever_the_engine_may_ask(window: int, verify_capacity: int | None, entries: int) -> None:
    got = CanaryLaunchCapacities.from_args(limits=LIMITS, window=window, verify_capacity=verify_capacity)
    assert got == CanaryLaunchCapacities(requests=4, tokens=64, entries=entries)


@pytest.mark.parametrize(
    ("name", "value", "low"),
    [("max_rows", 1, 2), ("max_requests", 0, 1), ("max_tokens", 0, 1), ("max_len", 0, 1), ("max_len", -5, 1)],
)
def test_limits_that_no_engine_has_are_refused(name: str, value: int, low: int) -> None:
    given = {"max_rows": 9, "max_requests": 4, "max_tokens": 64, "max_len": 100, name: value}
    with pytest.raises(ValueError, match=f"CanaryLimits: {name} must be at least {low}, got {value}"):
        CanaryLimits(**given)


def sharers(engine: Engine, count: int, *, prefix: int) -> list[Request]:
    """Return requests that all have one prefix of a cached text, more of it together than the pool has slots."""
    first = engine.add("first", 120)
    for start in range(0, prefix, 60):
        engine.step((first, min(60, prefix - start)))
    found = []
    for i in range(count):
        r = engine.add(f"r{i}", first.tokens[:prefix] + [i] * 20)
        for group in engine.groups:
            table = engine.tables[group.name]
            table[r.row, :prefix] = table[first.row, :prefix]
        r.cached = prefix
        found.append(r)
    engine.manager.flush()
    return found


def test_a_prefix_that_a_whole_batch_shares_is_verified_for_each() -> None:
    engine = full_engine()
    requests = sharers(engine, 4, prefix=100)
    assert engine.groups[0].pool.num_slots < 4 * 100
    before = engine.manager.summary().positions_verified
    flip(engine.groups[0], 37, 36)
    engine.step(*((r, 1) for r in requests))
    found = engine.found()
    assert [(r.reasons, r.request_id, r.slot) for r in found] == [(("K",), r.name, 37) for r in requests]
    summary = engine.manager.summary()
    assert summary.positions_verified - before == 400
    assert summary.watching == "complete"


def test_a_plan_that_is_too_small_verifies_what_fits_and_says_so() -> None:
    engine = full_engine(verify_capacity=150)
    requests = sharers(engine, 4, prefix=100)
    before = engine.manager.summary()
    assert before.watching == "complete"
    assert engine.forward.entry_capacities["full"] <= 150
    # In the order of the requests: position 36 of the first and of the second one fit.
    flip(engine.groups[0], 37, 36)
    flip(engine.groups[0], 90, 89)
    engine.step(*((r, 1) for r in requests))
    found = engine.found()
    assert [(r.slot, r.request_id) for r in found] == [(37, "r0"), (90, "r0"), (37, "r1")]
    after = engine.manager.summary()
    assert after.watching == "partial"
    assert after.positions_verified - before.positions_verified == 150
    assert after.positions_relied_on - before.positions_relied_on == 400
    assert after.launches["TAIL_FULL"] - before.launches["TAIL_FULL"] == 2


def test_what_a_step_writes_is_recorded_however_little_it_verifies() -> None:
    engine = full_engine(verify_capacity=1)
    a = engine.add("a", 60)
    for _ in range(3):
        engine.step((a, 15))
    assert engine.found() == []
    assert int((engine.groups[0].pool.records[:, 3] != 0).sum()) == 45
    assert engine.manager.summary().positions_verified == 2


def test_a_group_of_windows_never_needs_more_than_its_windows() -> None:
    full = kc.BufferGroup(name="full", pool=make_pool(200))
    ring = kc.BufferGroup(name="ring", pool=make_pool(200, name="ring"), window=5, ring=True)
    lut = torch.arange(200, dtype=torch.int64)
    swa = kc.BufferGroup(name="swa", pool=make_pool(200, name="swa"), window=9, lut=lut)
    engine = Engine([full, ring, swa])
    assert [engine.manager.context.capacities(g).entries for g in engine.groups] == [512, 32, 48]
    a, b = engine.add("a", 120), engine.add("b", 120)
    for n in (30, 30, 1, 1):
        engine.step((a, n), (b, n))
    assert engine.found() == []
    summary = engine.manager.summary()
    assert summary.watching == "complete"
    assert summary.positions_verified == summary.positions_relied_on
    assert engine.forward.entry_capacities == {"full": 512, "ring": 32, "swa": 48}
    # Also with prefixes longer than the limits: windows stay as they are.
    wide = {name: torch.ones(table.shape[0], 4096, dtype=torch.int32) for name, table in engine.tables.items()}
    engine.tables = wide
    a.tokens, a.cached = list(range(4096)), 2000
    engine.step((a, 1))
    assert engine.forward.entry_capacities == {"full": 2048, "ring": 32, "swa": 48}


@pytest.mark.parametrize("cached", [9, 12, 15, 16, 17, 40])
def test_a_forward_that_needs_a_little_more_room_than_there_is_gets_it(
    cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_canary.runtime.launches._FEW_ENTRIES", 8)
    engine = full_engine()
    a = engine.add("a", 60)
    engine.step((a, cached))
    assert engine.forward.entry_capacities == {"full": 8}
    flip(engine.groups[0], engine.slot_of(engine.groups[0], a, cached - 1), cached - 1)
    engine.step((a, 1))
    assert [(r.position, r.tag) for r in engine.found()] == [(cached - 1, "HEAD_FULL")]
    summary = engine.manager.summary()
    assert summary.positions_verified == summary.positions_relied_on == cached
    assert summary.incomplete == {}
