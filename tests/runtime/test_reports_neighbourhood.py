"""What lies around a fault: read from the engine's own tables, verified anew, and never in the engine's way."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import kv_canary as kc
from kv_canary import ops
from kv_canary.reports import Neighbourhood
from kv_canary.reports.reporter import SIDE
from kv_canary.runtime.cached import CachedSlots

from .engine import Engine, full_engine, make_pool


def around(engine: Engine) -> Neighbourhood:
    engine.manager.flush()
    found = engine.manager.accounts.incidents[0].neighbourhood
    assert found is not None
    return found


@pytest.fixture
def engine() -> Engine:
    """An engine whose request `a` has 30 tokens cached in slots 1 to 30."""
    engine = full_engine()
    engine.step((engine.add("a", 60), 30))
    return engine


def damage(engine: Engine, *slots: int) -> None:
    for layer in engine.groups[0].pool.k_source.layers:
        layer[list(slots), 0] ^= 1


def test_every_position_beside_the_fault_has_its_slot_writer_and_verdict(engine: Engine) -> None:
    a = engine.requests["a"]
    damage(engine, 13)
    engine.step((a, 1))
    found = around(engine)
    assert (found.request, found.group, found.as_of_step, found.moved) == ("a", "full", 2, False)
    assert [r.position for r in found.rows] == list(range(12 - SIDE, 12 + SIDE + 1))
    assert [r.slot for r in found.rows] == [r.position + 1 for r in found.rows]
    assert {r.position: r.verdict for r in found.rows if r.verdict} == {12: ("K",)}
    for row in found.rows:
        assert row.token == row.expected_token == a.tokens[row.position]
        assert (row.stored_position, row.writer, row.owner, row.step) == (row.position, "a", a.owner, 1)


def test_it_ends_where_the_text_ends(engine: Engine) -> None:
    damage(engine, 1, 30)
    engine.step((engine.requests["a"], 1))
    found = around(engine)
    assert [r.position for r in found.rows] == list(range(SIDE + 1))
    assert found.rows[0].verdict == ("K",)
    # A fault at the end is shown up to the tokens of the step that found it.
    engine = full_engine()
    a = engine.add("a", 60)
    engine.step((a, 10))
    damage(engine, 10)
    engine.step((a, 2))
    assert [r.position for r in around(engine).rows][-1] == 11


def test_it_says_when_it_was_read_and_whether_the_table_has_moved_on(engine: Engine) -> None:
    a = engine.requests["a"]
    damage(engine, 13)
    engine.step((a, 1))
    # The engine maps the position elsewhere before the report is made.
    engine.tables["full"][a.row, 12] = 100
    found = around(engine)
    assert found.moved
    assert {r.position: (r.slot, r.verdict) for r in found.rows if r.verdict} == {12: (100, ("NEVER_WRITTEN",))}


def test_bad_entries_of_the_table_are_shown_and_never_read(engine: Engine) -> None:
    a = engine.requests["a"]
    table = engine.tables["full"][a.row]
    table[10], table[12], table[14] = 0, -5, 1 << 30
    engine.step((a, 1))
    found = {r.position: r for r in around(engine).rows}
    assert [found[p].verdict for p in (10, 12, 14)] == [("UNMAPPED",), ("SLOT_RANGE",), ("SLOT_RANGE",)]
    assert [found[p].slot for p in (10, 12, 14)] == [0, kc.BAD_SLOT, 1 << 30]
    assert all(found[p].token is None for p in (10, 12, 14))
    assert found[11].verdict == ()


def test_a_first_token_is_held_against_the_identity() -> None:
    engine = full_engine()
    a = engine.add("a", 30)
    for start in (0, 6):
        batch = engine.batch((a, 6 if start == 0 else 1))
        requests = [kc.ForwardRequest(**(vars(r) | {"identity": 7})) for r in batch.requests]
        if start:
            damage(engine, 4)
        engine.run(kc.ForwardBatch(**(vars(batch) | {"requests": requests})))
        a.cached = 6
    assert [r.verdict for r in around(engine).rows] == [(), (), (), ("K",), (), (), ()]


def test_it_looks_without_a_trace_in_counters_log_or_records(engine: Engine) -> None:
    a = engine.requests["a"]
    damage(engine, 13)
    engine.step((a, 1))
    state, records = engine.manager.state, engine.groups[0].pool.records
    before = state.counters.clone(), records.clone()
    around(engine)
    assert torch.equal(state.counters, before[0])
    assert torch.equal(records, before[1])
    assert int(state.violations.count) == 0


@pytest.mark.parametrize("broken", ["tokens", "verify"])
def test_what_goes_wrong_while_it_looks_goes_no_further(
    engine: Engine, broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a = engine.requests["a"]
    damage(engine, 13)
    engine.step((a, 1))

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("the request is gone")

    if broken == "tokens":
        request = engine.manager.accounts._steps.newest.request(a.row)
        object.__setattr__(request, "tokens", fail)
        assert {r.expected_token for r in around(engine).rows} == {None}
    else:
        real = ops.verify
        monkeypatch.setattr(ops, "verify", fail, raising=False)
        engine.manager.flush()
        monkeypatch.setattr(ops, "verify", real, raising=False)
        assert engine.manager.accounts.incidents[0].neighbourhood is None
        assert "looking around incident 1 failed; the canary goes on" in caplog.text
    assert engine.manager.summary().violations == len(engine.manager.reports) == 1
    engine.step((a, 1))


def test_positions_that_the_window_has_left_are_not_read() -> None:
    groups = [
        kc.BufferGroup(name="full", pool=make_pool(name="full")),
        kc.BufferGroup(name="swa", pool=make_pool(name="swa"), window=5, ring=True),
    ]
    engine = Engine(groups)
    a = engine.add("a", 60)
    engine.step((a, 10))
    for layer in groups[1].pool.k_source.layers:
        layer[engine.slot_of(groups[1], a, 6), 0] ^= 1
    engine.step((a, 1))
    found = around(engine)
    assert {r.position: r.verdict for r in found.rows} == {
        **dict.fromkeys(range(6), ("LEFT_WINDOW",)),
        6: ("K",),
        **dict.fromkeys(range(7, 11), ()),
    }


def test_a_sweep_s_finding_is_shown_among_the_slots_beside_it() -> None:
    pool = make_pool()
    engine = Engine([kc.BufferGroup(name="full", pool=pool)])
    a = engine.add("a", 40)
    engine.step((a, 12))
    slots = torch.arange(1, 13)
    cached = CachedSlots(
        group="full", slots=slots, positions=slots - 1, previous=torch.arange(12) - (slots == 1).long()
    )
    damage(engine, 5)
    engine.manager._steps._sweeper.cached = lambda: [cached]
    engine.manager._steps._sweeper.sweep()
    engine.manager.flush()
    incident = engine.manager.accounts.incidents[0]
    assert (incident.tags, incident.requests, incident.slots) == (("SWEEP_FULL",), (), ((5, 5),))
    assert "a check between forwards reads position 4 in slot 5 of full: K" in incident.sentence
    found = incident.neighbourhood
    assert found is not None
    assert found.request is None
    assert {r.slot: r.verdict for r in found.rows} == {s: ("K",) if s == 5 else () for s in range(1, 13)}


def test_only_a_few_looks_are_taken_in_one_drain(caplog: pytest.LogCaptureFixture) -> None:
    engine = full_engine()
    a = engine.add("a", 60)
    engine.step((a, 30))
    table, wrong = engine.tables["full"][a.row], range(2, 14, 2)
    for n, p in enumerate(wrong):
        # Of other kinds: each names another writer.
        engine.groups[0].pool.records[p + 1, 3] += n + 1
        engine.groups[0].pool.records[p + 1, 0] += 1
    with caplog.at_level(logging.ERROR, "kv_canary"):
        engine.step((a, 1))
        engine.manager.flush()
    found = engine.manager.accounts.incidents
    assert len(found) == len(wrong)
    assert sum(i.neighbourhood is not None for i in found) == 4
    assert len(table) > 0
