"""Storms and long runs: what the canary keeps, says and costs is bounded, however much goes wrong and for how long."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kv_canary as kc
from kv_canary import output
from kv_canary.constants import Reason, Tag
from kv_canary.observers.events import EventLog
from kv_canary.ratelimit import RateLimit
from kv_canary.reports.decode import Decoder
from kv_canary.reports.incidents import MOST_DAMAGES, MOST_KNOWN_NAMES, MOST_NAMES, IncidentTracker
from kv_canary.specs.violation_row import ViolationRow

from .engine import full_engine, make_pool
from .test_events import events
from .test_observers import Clock, flip

REQUESTS, PREFIX, STEPS = 20, 520, 12


def seconds_of(function: Callable[[], Any]) -> float:
    """Return the CPU time of this thread that a call takes."""
    began = time.thread_time()
    function()
    return time.thread_time() - began


def calls_of(function: Callable[[], Any]) -> int:
    """Return how many functions a call calls: what it costs, on a busy machine too."""
    count = 0

    def called(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def storm(prefix: int = PREFIX) -> tuple[kc.CanaryManager, Callable[[], None], kc.KvPool]:
    """Return a canary, a step of twenty requests that rely on `prefix` positions or more, and their pool."""
    slots = REQUESTS * 600 + 1
    k, v = (
        kc.KvSource(layers=(torch.randint(0, 255, (slots, 16), dtype=torch.uint8),), page_size=1, bytes_per_token=16)
        for _ in range(2)
    )
    pool = kc.KvPool(name="kv", num_slots=slots, k_source=k, v_source=v, device="cpu")
    limits = kc.CanaryLimits(max_rows=REQUESTS + 1, max_requests=REQUESTS, max_tokens=REQUESTS * prefix, max_len=700)
    manager = kc.CanaryManager(
        [kc.BufferGroup(name="full", pool=pool)], limits=limits, config=kc.CanaryConfig(backend="reference")
    )
    forward, table = manager.forward(), torch.zeros(REQUESTS + 1, 700, dtype=torch.int32)
    for row in range(1, REQUESTS + 1):
        table[row, :600] = torch.arange((row - 1) * 600 + 1, row * 600 + 1)
    done = [0]

    def step() -> None:
        start, count = done[0], 1 if done[0] else prefix
        rows = range(1, REQUESTS + 1)
        batch = kc.ForwardBatch(
            requests=[
                kc.ForwardRequest(
                    request_id=f"r{r}",
                    row=r,
                    owner=r,
                    prefix_len=start,
                    extend_len=count,
                    tokens=lambda i, j, r=r: [1000 * r + t for t in range(i, j)],
                )
                for r in rows
            ],
            input_ids=torch.cat([1000 * r + torch.arange(start, start + count) for r in rows]),
            positions=torch.arange(start, start + count).repeat(REQUESTS),
            out_slots={"full": torch.cat([table[r, start : start + count].long() for r in rows])},
            tables={"full": table},
        )
        with forward.around(batch):
            pass
        done[0] += count

    step()
    return manager, step, pool


def costs_of(kind: str, *, prefix: int) -> list[int]:
    """Return how many calls the report of each step of a storm costs, from the second step on."""
    manager, step, pool = storm(prefix)
    if kind == "bytes":
        for source in (pool.k_source, pool.v_source):
            source.layers[0].bitwise_xor_(1)
    else:
        pool.records[1:, 0] += 1 << 32 if kind == "positions" else 1
    costs: list[int] = []
    take = manager.accounts.take
    manager.accounts.take = lambda findings: costs.append(calls_of(lambda: take(findings)))  # type: ignore[method-assign]
    for _ in range(STEPS):
        step()
    manager.flush()
    assert manager.summary().violations > STEPS * REQUESTS * (prefix - 1)
    assert manager.incidents
    assert len(manager.reports) == 16 * len([cost for cost in costs if cost > 100]) or len(manager.reports) <= 1024
    return costs[1:]


@pytest.mark.parametrize("kind", ["bytes", "positions", "tokens"])
def test_violations_of_a_step_cost_what_their_requests_do_however_many_they_are(kind: str) -> None:
    few, many = (costs_of(kind, prefix=prefix) for prefix in (PREFIX // 2, PREFIX))
    # The first one groups all that the ring holds; what comes every step from then on is bounded.
    assert many[0] < REQUESTS * 6000
    assert sorted(many)[len(many) // 2] < 1.1 * sorted(few)[len(few) // 2]
    assert sorted(many)[len(many) // 2] < REQUESTS * 1500


def row_of(*, step: int, row: int, slot: int = 7, position: int = 3) -> ViolationRow:
    """Return a violation row: a bit of K of a slot, found by a request in `row`."""
    return ViolationRow(
        site=Tag.HEAD_FULL,
        reasons=Reason.K,
        slot=slot,
        row=row,
        position=position,
        identity=(position << 32) | 5,
        token=5,
        chain=11,
        kv=12,
        observed_kv=13,
        writer=9,
        step=step,
    )


def test_an_incident_that_goes_on_for_ever_stays_small() -> None:
    pool = make_pool()
    names = (f"{i} {'x' * 400}" for i in range(1 << 30))
    decoder = Decoder(
        [kc.BufferGroup(name="full", pool=pool)],
        name_of_row=lambda step, row: next(names),
        name_of_owner=lambda owner: "writer",
    )
    book = IncidentTracker(decoder, arrived=lambda step, row: 1)
    # Every step new requests read the bad slot; the decoder is asked for a name once for each cluster.
    times = []
    for step in range(1, 4001):
        rows = [row_of(step=step, row=row) for row in range(1, 9)]
        times.append(seconds_of(lambda rows=rows: book.take(rows)))
    (incident,) = book.incidents()
    assert len(incident.requests) == MOST_NAMES
    assert all(len(name) <= 256 for name in incident.requests)
    opened = next(iter(book._open.values()))
    assert len(opened.known_names) == MOST_KNOWN_NAMES
    assert incident.num_requests >= 4000
    early, late = sorted(times[500:1500])[500], sorted(times[3000:])[500]
    assert late < 3 * early
    assert f"and {incident.num_requests - 4} more" in incident.sentence


def test_a_request_that_comes_again_is_counted_once() -> None:
    decoder = Decoder(
        [kc.BufferGroup(name="full", pool=make_pool())],
        name_of_row=lambda step, row: f"r{row}",
        name_of_owner=lambda owner: None,
    )
    book = IncidentTracker(decoder, arrived=lambda step, row: 1)
    for step in range(1, 50):
        book.take([row_of(step=step, row=row) for row in range(1, 41)])
    (incident,) = book.incidents()
    assert (len(incident.requests), incident.num_requests, incident.count) == (16, 40, 49 * 40)


def test_places_of_damage_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_canary.reports.incidents.MOST_DAMAGES", 100)
    decoder = Decoder(
        [kc.BufferGroup(name="full", pool=make_pool())],
        name_of_row=lambda step, row: f"r{row}",
        name_of_owner=lambda owner: None,
    )
    book = IncidentTracker(decoder, arrived=lambda step, row: 1)
    for step in range(1, 200):
        book.take([row_of(step=step, row=1, slot=step, position=step)])
    assert len(book._damages) == 100 < MOST_DAMAGES
    assert len(book.incidents()) == 1


def test_sentences_are_bounded_over_all_incidents(caplog: pytest.LogCaptureFixture) -> None:
    engine = full_engine()
    a = engine.add("a", 120)
    engine.step((a, 60))
    with caplog.at_level(logging.INFO, "kv_canary"):
        for position in range(60):
            # A new incident at every step: another writer's record, another kind of damage, another request.
            b = engine.add(f"b{position}", engine.requests["a"].tokens, row=2 + position % 5)
            engine.tables["full"][b.row, :60] = engine.tables["full"][a.row, :60]
            engine.groups[0].pool.records[engine.slot_of(engine.groups[0], a, position), position % 3] ^= (
                1 << position % 30
            )
            b.cached = 60
            engine.step((b, 1))
        engine.manager.flush()
    assert engine.manager.summary().violations > 60
    assert len(caplog.records) <= 62


def test_a_bucket_is_filled_again_and_says_what_was_held_back() -> None:
    clock = Clock()
    limit = RateLimit(10.0, per_minute=60, clock=clock)
    assert [limit.admit(i) for i in range(70)] == [0] * 60 + [None] * 10
    clock.now += 2.5
    # Two lines more by now, the first of which says how many were held back.
    assert [limit.admit(100 + i) for i in range(4)] == [10, 0, None, None]
    clock.now += 1000
    assert [limit.admit(200 + i) for i in range(61)] == [2] + [0] * 59 + [None]


def test_reports_in_the_event_log_are_bounded(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_canary.observers.events.post", lambda work: work())
    clock = Clock()
    log = EventLog(tmp_path / "events.jsonl", config=kc.CanaryConfig(), clock=clock)
    engine = full_engine()
    a = engine.add("a", 20)
    engine.step((a, 10))
    flip(engine, "a", 3)
    engine.step((a, 1))
    (report,) = engine.found()
    for _ in range(1000):
        log.on_report(report)
    clock.now += 60
    log.on_report(report)
    told = [e["held_back"] for e in events(tmp_path / "events.jsonl") if e["event"] == "report"]
    assert told == [0] * 600 + [400]


def test_doubt_after_forwards_that_failed_is_bounded_by_the_pool() -> None:
    engine = full_engine(quarantine=True, sweep_every=1)
    a = engine.add("a", 100)
    engine.step((a, 20))
    marks = engine.manager.unverified._marks[engine.groups[0].pool]
    before = marks.numel()
    batch = engine.batch((a, 4))
    for _ in range(200):
        engine.forward.begin(batch)
        engine.forward.head()
        engine.forward.abort()
    assert engine.manager.unverified._marks[engine.groups[0].pool].numel() == before
    assert int((marks != 0).sum()) == 4
    # What is written anew is in doubt no more.
    engine.run(batch)
    assert int((marks != 0).sum()) == 0


def test_a_hundred_thousand_lines_leave_a_bounded_queue() -> None:
    queue = output.Output(capacity=100)
    gate = [True]
    queue.post(lambda: [time.sleep(0.001) for _ in range(20_000) if gate[0]])
    for _ in range(100_000):
        queue.post(lambda: None)
    assert len(queue._waiting) <= 100
    assert queue.dropped >= 99_000
    gate[0] = False
    assert queue.drain(30)


def test_a_name_of_any_length_costs_no_more_than_a_short_one(caplog: pytest.LogCaptureFixture, tmp_path: Any) -> None:
    """A client may give one; all that is kept and said of it is its beginning, and a hash that tells it from others."""
    path, folder = tmp_path / "events.jsonl", tmp_path / "bundles"
    engine = full_engine(event_log=path, bundles=folder, seals="layer")
    long = [begin + "x" * 100_000 for begin in "ab"]
    a, b = (engine.add(name, 40) for name in long)
    engine.step((a, 10), (b, 10))
    # One reads the other's slots.
    engine.tables["full"][b.row, 2:6] = engine.tables["full"][a.row, 2:6]
    with caplog.at_level(logging.ERROR, "kv_canary"):
        engine.step((a, 1), (b, 1))
        engine.manager.flush()
    engine.manager.complete(b.name, {"full": engine.tables["full"][b.row, :10].long()})
    engine.manager.flush()
    engine.manager.close()
    output.OUTPUT.drain(5.0)
    [incident] = engine.manager.incidents
    mine, theirs = (kc.errors.short_name(name) for name in long[::-1])
    assert len(mine) == 256
    assert kc.errors.short_name(long[1] + "y") != mine
    assert incident.requests == (mine,)
    assert incident.writer == f"request {theirs}"
    assert max(len(record.message) for record in caplog.records) < 4000
    assert max(map(len, path.read_text().splitlines())) < 20_000
    assert max(file.stat().st_size for file in folder.iterdir()) < 100_000


def test_names_of_past_requests_are_kept_short() -> None:
    rows = kc.RowTable(8)
    rows.row("y" * 5000)
    owner = rows.owner("y" * 5000)
    rows.release("y" * 5000)
    assert rows.name(owner) == kc.errors.short_name("y" * 5000)
    assert len(rows.name(owner) or "") == kc.errors.LONGEST_NAME
