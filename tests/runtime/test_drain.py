"""What a step finds is reported one step later, once, and whatever the handlers do."""

from __future__ import annotations

import dataclasses
import logging
import re
import weakref
from collections.abc import Callable

import pytest
import torch

import kv_canary as kc
from kv_canary.constants import Tag
from kv_canary.observers import Observer, StepFacts
from kv_canary.runtime.device_state import FIRST_STATUS, VIOLATION_COUNT
from kv_canary.runtime.drain import Drain, Findings
from kv_canary.runtime.forward import SingleForwardManager

from .engine import Engine, Request, full_engine, make_pool


def damage(engine: Engine, request: Request, *positions: int) -> None:
    """Flip one bit of the K of these cached positions."""
    group = engine.groups[0]
    for position in positions:
        layer = group.pool.k_source.coverage(position)[0]
        group.pool.k_source.layers[layer][engine.slot_of(group, request, position), 0] ^= 1


def logging_engine(reports: list[kc.ViolationReport], **options: object) -> Engine:
    config = kc.CanaryConfig(backend="reference", **options)
    return Engine([kc.BufferGroup(name="full", pool=make_pool())], config, on_report=reports.append)


def test_a_violation_is_reported_when_the_next_step_begins_and_only_then() -> None:
    seen: list[kc.ViolationReport] = []
    engine = logging_engine(seen)
    a = engine.add("a", 20)
    engine.step((a, 4))
    damage(engine, a, 2)
    engine.step((a, 1))
    assert seen == []
    assert engine.manager.summary().violations == 0
    damage(engine, a, 2)
    engine.forward.begin(engine.batch((a, 1)))
    assert [(r.reasons, r.step, r.request_id) for r in seen] == [(("K",), 2, "a")]
    for phase in (engine.forward.head, engine.forward.tail, engine.forward.end):
        phase()
    a.cached += 1
    engine.step((a, 1))
    engine.manager.flush()
    engine.manager.flush()
    assert len(seen) == len(engine.manager.reports) == 1
    assert engine.manager.summary().violations == 1
    assert engine.manager.summary().reasons == {"K": 1}


def test_tensors_are_kept_until_a_step_that_begins_behind_is_drained() -> None:
    engine = logging_engine([])
    a = engine.add("a", 20)
    engine.step((a, 4))
    tensors = [torch.zeros(3)]
    kept = weakref.ref(tensors[0])
    engine.manager.keep(tensors)
    del tensors
    engine.step((a, 1))
    # Its words are read when the next one begins.
    assert kept() is not None
    engine.step((a, 1))
    assert kept() is None


def test_tensors_are_not_kept_forever_where_no_step_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, streams = logging_engine([]), list[torch.Tensor]()
    monkeypatch.setattr("kv_canary.runtime.steps.let_go", lambda *tensors: streams.extend(tensors))
    tensors = [torch.zeros(3) for _ in range(300)]
    for tensor in tensors:
        engine.manager.keep([tensor])
    assert 0 < len(streams) < len(tensors)
    assert all(one is other for one, other in zip(streams, tensors, strict=False))


@pytest.mark.parametrize("capacity", [2, 3, 5, 7, 8, 16, 1024])
def test_every_violation_is_counted_once_however_often_the_ring_is_emptied(capacity: int) -> None:
    seen: list[kc.ViolationReport] = []
    engine = logging_engine(seen, ring_capacity=capacity, max_reports_per_step=1000)
    a = engine.add("a", 60)
    engine.step((a, 8))
    expected: list[tuple[int, int]] = []
    for i in range(40):
        positions = [(i + k) % 8 for k in range(i * 7 % 4)]
        damage(engine, a, *positions)
        engine.step((a, 1))
        expected += [(i + 2, p) for p in sorted(positions)]
        damage(engine, a, *positions)
    engine.manager.flush()
    engine.manager.flush()
    summary = engine.manager.summary()
    assert summary.violations == len(expected) == 60
    written = [(r.step, r.position) for r in seen]
    # No step finds more than 3, so a ring of 3 never overflows; a smaller one loses details, never counts.
    if capacity >= 3:
        assert written == expected
        assert summary.reasons == {"K": 60}
    else:
        assert set(written) < set(expected)
        assert len(set(written)) == len(written)


def test_violations_past_the_ring_are_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    engine = full_engine(ring_capacity=4, max_reports_per_step=100)
    a = engine.add("a", 20)
    engine.step((a, 10))
    damage(engine, a, *range(10))
    engine.step((a, 1))
    with caplog.at_level(logging.ERROR, "kv_canary"):
        reports = engine.found()
    assert len(reports) == 4
    assert engine.manager.summary().violations == 10
    assert re.search(r"6 of \d+ violations are not written out", caplog.text)


def test_only_so_many_violations_of_a_step_are_written_out(caplog: pytest.LogCaptureFixture) -> None:
    engine = full_engine(max_reports_per_step=3)
    a = engine.add("a", 20)
    engine.step((a, 10))
    damage(engine, a, *range(8))
    engine.step((a, 1))
    with caplog.at_level(logging.ERROR, "kv_canary"):
        reports = engine.found()
    assert len(reports) == 3
    assert engine.manager.summary().violations == 8
    assert engine.manager.summary().reasons == {"K": 8}
    assert re.search(r"5 of \d+ violations are not written out", caplog.text)
    # One incident, one line.
    assert sum("Changed: K of" in r.message for r in caplog.records) == 1
    assert "positions 0 to 7 in slots 1 to 8 of full: K (8 violations)" in caplog.text


def test_raise_mode_raises_at_the_next_begin_and_goes_on_afterwards() -> None:
    engine = full_engine(mode="raise", max_reports_per_step=2)
    a = engine.add("a", 20)
    engine.step((a, 6))
    damage(engine, a, 1, 2, 3)
    engine.step((a, 1))
    damage(engine, a, 1, 2, 3)
    batch = engine.batch((a, 1))
    with pytest.raises(kc.CanaryViolationError, match=r"3 violations: step 2 HEAD_FULL.*\(and 1 more\)") as caught:
        engine.forward.begin(batch)
    assert (caught.value.total, len(caught.value.reports)) == (3, 2)
    assert engine.manager.step == 2
    engine.run(batch)
    a.cached += 1
    engine.step((a, 1))
    engine.manager.flush()
    assert engine.manager.step == 4
    assert engine.manager.summary().violations == 3


def test_raise_mode_raises_at_flush_and_only_once() -> None:
    engine = full_engine(mode="raise")
    a = engine.add("a", 20)
    engine.step((a, 6))
    damage(engine, a, 1)
    engine.step((a, 1))
    with pytest.raises(kc.CanaryViolationError, match="1 violation: "):
        engine.manager.flush()
    engine.manager.flush()


def test_raise_mode_raises_where_no_details_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = full_engine(mode="raise")
    monkeypatch.setattr(engine.manager._steps._drain, "poll", lambda **_: Findings(total=2))
    with pytest.raises(kc.CanaryViolationError, match=r"2 violations: .*did not fit the ring"):
        engine.manager.flush()


def test_an_on_report_that_raises_is_logged_and_goes_no_further(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def on_report(report: kc.ViolationReport) -> None:
        calls.append(report.position)
        raise OSError("the disk is full")

    engine = Engine([kc.BufferGroup(name="full", pool=make_pool())], on_report=on_report)
    a = engine.add("a", 20)
    engine.step((a, 6))
    damage(engine, a, 1, 4)
    engine.step((a, 1))
    damage(engine, a, 1, 4)
    with caplog.at_level(logging.ERROR, "kv_canary"):
        engine.step((a, 1))
    engine.step((a, 1))
    engine.manager.flush()
    # Both were handed on, once each, though the first call already raised.
    assert calls == [1, 4]
    assert caplog.text.count("on_report failed (OSError). Further failures of this kind are counted") == 1
    assert list(engine.manager.summary().failures.values()) == [2]
    assert "the disk is full" in caplog.text
    assert engine.manager.summary().violations == len(engine.manager.reports) == 2


def test_a_canary_that_has_seen_no_forward_is_disabled() -> None:
    engine = full_engine()
    assert engine.manager.summary() == kc.CanarySummary(
        watching="off", steps=0, positions_verified=0, violations=0, reasons={}, launches={}
    )
    engine.manager.flush()
    assert engine.manager.summary().watching == "off"


def test_an_incomplete_plan_degrades_the_status_for_good(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As where the host was told otherwise than the device.
    monkeypatch.setattr(SingleForwardManager, "_check_tables", lambda *_: None)
    engine = full_engine()
    a = engine.add("a", 20)
    engine.step((a, 6))
    # The table is shorter than the prefix.
    whole = engine.tables["full"]
    batch = engine.batch((a, 1))
    batch.tables["full"] = whole[:, :4].clone()
    with caplog.at_level(logging.WARNING, "kv_canary"):
        engine.run(batch)
        engine.manager.flush()
    assert "group full: the plan of step 2 was incomplete" in caplog.text
    engine.tables["full"] = whole
    a.cached += 1
    engine.step((a, 1))
    engine.manager.flush()
    assert engine.manager.summary().watching == "partial"


def test_the_warning_of_an_incomplete_plan_names_its_status(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As where the host was told otherwise than the device.
    monkeypatch.setattr(SingleForwardManager, "_check_tables", lambda *_: None)
    engine = full_engine()
    a = engine.add("a", 20)
    engine.step((a, 6))
    batch = engine.batch((a, 1))
    batch.tables["full"] = engine.tables["full"][:, :4].clone()
    engine.run(batch)
    engine.manager.flush()
    assert "LENGTH_RANGE" in caplog.text


def test_the_summary_is_ready_for_json() -> None:
    engine = full_engine()
    a = engine.add("a", 20)
    engine.step((a, 6))
    damage(engine, a, 1)
    engine.step((a, 1))
    reports = engine.found()
    summary = engine.manager.summary().as_dict()
    assert set(summary.pop("memory")) == {"kv", "records", "seals", "tokens", "scratch"}
    assert set(summary.pop("cost")) == {"step_us", "host_us", "device_us", "device_waits"}
    assert summary == {
        "watching": "complete",
        "verdict": "CORRUPTION: 1 incident, 1 violation, requests a",
        "incidents": 1,
        "requests": ["a"],
        "steps": 2,
        "positions_relied_on": 6,
        "positions_verified": 6,
        "bytes_held": "by sample",
        "violations": 1,
        "discarded": 0,
        "uncovered": 0,
        "reasons": {"K": 1},
        "launches": {"HEAD_FULL": 2, "TAIL_FULL": 4},
        "stride": 1,
        "incomplete": {},
        "skipped": 0,
        "unverified": 0,
        "failures": {},
        "dropped": engine.manager.summary().dropped,
        "scrub": None,
        "audits": None,
        "writes": None,
    }
    assert reports[0].as_dict()["reasons"] == ("K",)
    assert reports[0].as_dict()["record"]["position"] == 1


def test_the_ring_is_emptied_behind_what_was_read() -> None:
    engine = full_engine(ring_capacity=4)
    log = engine.manager.state.violations
    a = engine.add("a", 20)
    engine.step((a, 6))
    damage(engine, a, 0, 1)
    counts = []
    for _ in range(4):
        engine.step((a, 1))
        counts.append(int(log.count))
    assert counts == [2, 2, 2, 2]
    engine.manager.flush()
    assert torch.equal(log.count, torch.zeros(1, dtype=torch.int64))
    assert engine.manager.summary().violations == 8


def thrown_away(batch: kc.ForwardBatch, name: str) -> kc.ForwardBatch:
    """Return the forward with the result of one request thrown away."""
    requests = [dataclasses.replace(r, discarded=lambda: True) if r.request_id == name else r for r in batch.requests]
    return dataclasses.replace(batch, requests=requests)


def test_rows_of_discarded_results_that_overflow_the_ring_raise_no_alarm() -> None:
    engine = full_engine(ring_capacity=4)
    a = engine.add("a", 30)
    engine.step((a, 12))
    for position in range(12):
        damage(engine, a, position)
    engine.run(thrown_away(engine.batch((a, 1)), "a"))
    assert engine.found() == []
    summary = engine.manager.summary()
    assert (summary.violations, summary.discarded) == (0, 12)


def test_a_discarded_row_hides_nobody_else() -> None:
    engine = full_engine(ring_capacity=64)
    a, b = engine.add("a", 30), engine.add("b", 30)
    engine.step((a, 12), (b, 12))
    damage(engine, a, 3)
    damage(engine, b, 5)
    engine.run(thrown_away(engine.batch((a, 1), (b, 1)), "a"))
    [report] = engine.found()
    assert (report.request_id, report.position) == ("b", 5)
    assert engine.manager.summary().discarded == 1


@pytest.mark.parametrize("thrown", [False, True])
def test_a_result_that_may_be_thrown_away_and_is_not_hides_nothing(thrown: bool) -> None:
    engine = full_engine()
    a = engine.add("a", 30)
    engine.step((a, 12))
    damage(engine, a, 3)
    batch = engine.batch((a, 1))
    engine.run(dataclasses.replace(batch, requests=[dataclasses.replace(batch.requests[0], discarded=lambda: thrown)]))
    assert [r.position for r in engine.found()] == ([] if thrown else [3])
    assert engine.manager.summary().discarded == int(thrown)


class Steps(Observer):
    """Keeps the facts of every step."""

    def __init__(self) -> None:
        self.facts: list[StepFacts] = []

    def on_step(self, facts: StepFacts) -> None:
        self.facts.append(facts)


def test_many_forwards_of_a_step_lose_no_status(monkeypatch: pytest.MonkeyPatch) -> None:
    # As where the host was told otherwise than the device.
    monkeypatch.setattr(SingleForwardManager, "_check_tables", lambda *_: None)
    engine = full_engine()
    a = engine.add("a", 20)
    engine.step((a, 6))
    engine.manager.flush()
    steps = Steps()
    engine.manager.accounts.join(steps)
    batch = engine.batch((a, 1))
    with engine.manager.one_step():
        for i in range(100):
            forward = engine.manager.forward(f"inner {i}")
            bad = {"full": engine.tables["full"][:, :4].clone()} if i == 77 else batch.tables
            with forward.around(dataclasses.replace(batch, tables=bad)):
                pass
    engine.manager.flush()
    [step] = steps.facts
    assert step.statuses == (("full", int(kc.Status.LENGTH_RANGE)),)


def test_an_engine_without_a_row_table_still_has_its_requests_named() -> None:
    engine = full_engine()
    engine.manager.accounts._rows = None
    a, b = engine.add("a", 20), engine.add("b", 20)
    engine.step((a, 6), (b, 6))
    damage(engine, a, 2)
    engine.step((a, 1))
    engine.tables["full"][b.row, 3] = engine.slot_of(engine.groups[0], a, 3)
    engine.step((b, 1))
    found = {(r.request_id, r.record.request_id) for r in engine.found() if "POSITION" not in r.reasons}
    assert {("a", "a"), ("b", "a")} <= found


def test_memory_for_the_words_serves_in_any_mode() -> None:
    """An engine in inference mode may end a step of which nothing was allocated before."""
    engine = full_engine()
    drain = Drain(engine.manager.state)
    with torch.inference_mode():
        drain.push(1, {}, launches=None)
        drain.poll()
    drain.push(2, {}, launches=None)
    assert [words.step for words in drain.poll().steps] == [2]


class Arrival:
    """The event behind a copy to the host: it has arrived when it is said to have, or when somebody waits for it."""

    def __init__(self) -> None:
        self.is_there, self.waits = False, 0

    def record(self) -> None:
        self.is_there = False

    def query(self) -> bool:
        return self.is_there

    def synchronize(self) -> None:
        self.waits += 1
        self.is_there = True


def test_only_words_that_have_arrived_are_read_and_nobody_waits_for_the_others() -> None:
    drain = Drain(full_engine().manager.state)
    sheets, arrivals = [drain.new_sheet() for _ in range(3)], [Arrival() for _ in range(3)]
    for step, (sheet, arrival) in enumerate(zip(sheets, arrivals, strict=True), start=1):
        sheet.arrived = arrival  # type: ignore[assignment]
        sheet.copy()
        drain.push(step, {}, launches=None, sheet=sheet)
    assert drain.poll().steps == []
    arrivals[0].is_there = True
    assert [words.step for words in drain.poll().steps] == [1]
    assert not drain.is_empty
    assert [arrival.waits for arrival in arrivals] == [0, 0, 0]
    # Behind the last copy on a stream, all before it are there.
    assert [words.step for words in drain.poll(wait=True).steps] == [2, 3]
    assert [arrival.waits for arrival in arrivals] == [0, 0, 1]


LAUNCHES = {int(Tag.HEAD_FULL): 1, int(Tag.TAIL_FULL): 2}


def pushed(drain: Drain, steps: int, *, missing: int = 0, bits: int = 0, violations: int = 0) -> None:
    """Push steps, the second of which makes fewer launches, has a status, or finds something, as is asked for."""
    words = drain._state.words
    for step in range(1, steps + 1):
        for tag, count in LAUNCHES.items():
            words[2 * tag] += count - (missing if step == 2 else 0)
            words[2 * tag + 1] += 10 * step
        if step == 2:
            words[VIOLATION_COUNT] += violations
        words[FIRST_STATUS:].view(torch.int32)[0] = bits if step == 2 else 0
        drain.push(step, {0: "full"}, launches=LAUNCHES)


def test_steps_with_nothing_to_tell_are_told_as_one() -> None:
    drain = Drain(full_engine().manager.state)
    pushed(drain, 3)
    [words] = drain.poll(merges=True).steps
    assert (words.first, words.step, words.statuses) == (1, 3, [])
    assert words.counters[2 * Tag.HEAD_FULL : 2 * Tag.HEAD_FULL + 2] == [3, 60]
    assert drain.drained == 3
    pushed(drain, 2)
    assert [(words.first, words.step) for words in drain.poll().steps] == [(1, 1), (2, 2)]


@pytest.mark.parametrize("what", [{"missing": 1}, {"missing": -1}, {"bits": 4}])
def test_where_one_step_has_something_to_tell_each_is_told(what: dict[str, int]) -> None:
    drain = Drain(full_engine().manager.state)
    pushed(drain, 3, **what)
    found = drain.poll(merges=True).steps
    assert [(words.first, words.step) for words in found] == [(1, 1), (2, 2), (3, 3)]
    assert [words.statuses for words in found] == [[], [("full", 4)] if "bits" in what else [], []]


def test_what_a_step_has_found_is_told_with_the_words_of_each() -> None:
    engine = full_engine()
    pushed(engine.manager._steps._drain, 3, violations=2)
    findings = engine.manager._steps._drain.poll(merges=True)
    assert (findings.total, [words.step for words in findings.steps]) == (2, [1, 2, 3])


def test_steps_of_which_nobody_is_told_are_counted_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, told = [], []
    for merges in (False, True):
        engine = full_engine()
        steps = engine.manager._steps
        poll, look = steps._drain.poll, steps.look
        monkeypatch.setattr(steps, "look", lambda wait=False: None)

        def polled(poll: Callable[..., Findings], merges: bool, **_: bool) -> Findings:
            findings = poll(merges=merges)
            told.append(len(findings.steps))
            return findings

        monkeypatch.setattr(steps._drain, "poll", lambda p=poll, m=merges, **_: polled(p, m))
        a = engine.add("a", 40)
        for _ in range(6):
            engine.step((a, 3))
        look()
        summary = engine.manager.summary()
        counted.append((summary.positions_relied_on, summary.positions_verified, summary.launches, summary.watching))
        assert steps.drained == 6
    assert told == [6, 1]
    assert counted[0] == counted[1]
    assert counted[0][:2] == (45, 45)
