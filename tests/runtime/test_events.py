"""The event log: what stands in it, and that no half line ever does, whatever the disk and other processes do."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

import kv_canary as kc
from kv_canary.observers.events import EventLog
from kv_canary.ratelimit import RateLimit

from .engine import full_engine
from .test_observers import Clock, facts, flip, rank_report


@pytest.fixture(autouse=True)
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let lines be written where they are told: how they reach the output thread is for test_output.py."""
    monkeypatch.setattr("kv_canary.observers.events.post", lambda work: work())


def events(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file, each of which must be a whole line."""
    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def kinds(path: Path) -> list[str]:
    return [event["event"] for event in events(path)]


def make_log(path: Path, **options: Any) -> EventLog:
    return EventLog(path, config=kc.CanaryConfig(), **options)


def test_a_life_with_a_violation(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    engine = full_engine(event_log=path, stride=1)
    a = engine.add("a", 20)
    engine.step((a, 6))
    flip(engine, "a", 2)
    engine.step((a, 1))
    (report,) = engine.found()
    engine.manager.close()
    engine.manager.close()
    start, status, incident, found, stop = events(path)
    assert (start["event"], start["version"], start["pid"]) == ("start", kc.__version__, os.getpid())
    assert start["config"]["event_log"] == str(path)
    assert start["config"]["stride"] == 1
    assert {k: status[k] for k in ("event", "step", "before", "watching")} == {
        "event": "watching",
        "step": 1,
        "before": "off",
        "watching": "complete",
    }
    assert (incident["event"], incident["number"], incident["requests"]) == ("incident", 1, ["a"])
    assert incident["sentence"] == engine.manager.incidents[0].sentence
    assert (found["event"], found["step"]) == ("report", 2)
    assert found["report"] == json.loads(json.dumps(report.as_dict()))
    assert (stop["event"], stop["step"], stop["violations"], stop["incidents"]) == ("stop", 2, 1, 1)
    assert (stop["watching"], stop["verdict"]) == ("complete", "CORRUPTION: 1 incident, 1 violation, requests a")
    assert stop["sentence"] == str(engine.manager.summary())


def test_times_are_utc_whatever_the_clock_says(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    make_log(path, now=lambda: datetime(2026, 1, 2, 1, 4, 5, 678901, tzinfo=timezone(timedelta(hours=2))))
    make_log(path)
    fixed, real = (event["time"] for event in events(path))
    assert fixed == "2026-01-01T23:04:05.678Z"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", real)
    assert abs(datetime.fromisoformat(real) - datetime.now(UTC)) < timedelta(hours=1)


def test_overflow_and_missing_launches_are_told_and_held_back(tmp_path: Path) -> None:
    path, clock = tmp_path / "events.jsonl", Clock()
    log = make_log(path, limit=RateLimit(10.0, clock=clock))
    for step in range(1, 4):
        log.on_step(facts(step=step, watching="partial", statuses=(("full", 5),), verified=3))
        log.on_step(facts(step=step, watching="stale", missing={"HEAD_FULL": 1}))
    clock.now += 10
    log.on_step(facts(step=9, watching="stale", statuses=(("full", 5),), missing={"HEAD_FULL": 2}))
    told = [{k: v for k, v in e.items() if k not in ("time", "pid", "event")} for e in events(path)]
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for kind, what in zip(kinds(path), told, strict=True):
        by_kind.setdefault(kind, []).append(what)
    same = {"group": "full", "bits": ["OVERFLOW", "LENGTH_RANGE"], "relied_on": 8}
    assert by_kind["overflow"] == [
        {**same, "step": 1, "held_back": 0, "verified": 3},
        {**same, "step": 9, "held_back": 2, "verified": 8},
    ]
    assert by_kind["missing"] == [
        {"step": 1, "launches": {"HEAD_FULL": 1}, "held_back": 0},
        {"step": 9, "launches": {"HEAD_FULL": 2}, "held_back": 2},
    ]
    changes = [(c["before"], c["watching"]) for c in by_kind["watching"]]
    there, back = ("partial", "stale"), ("stale", "partial")
    assert changes == [("off", "partial"), there, back, there, back, there]


def test_differences_between_ranks_are_told_in_full(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    make_log(path).on_ranks(rank_report())
    told = events(path)[-1]
    assert (told["event"], told["step"]) == ("ranks", 4)
    assert told["report"] == json.loads(json.dumps(rank_report().as_dict()))


def test_a_new_canary_appends(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for _ in range(2):
        make_log(path).close()
    assert kinds(path) == ["start", "stop"] * 2


@pytest.mark.parametrize("where", ["missing/events.jsonl", "."])
def test_a_file_that_cannot_be_appended_to_is_refused_by_name(tmp_path: Path, where: str) -> None:
    with pytest.raises(ValueError, match="kv-canary: CanaryConfig: event_log must be a file that can be appended to"):
        full_engine(event_log=tmp_path / where)


def test_the_file_may_be_moved_away(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = make_log(path)
    path.rename(tmp_path / "moved")
    log.on_step(facts())
    log.close()
    assert (kinds(tmp_path / "moved"), kinds(path)) == (["start"], ["watching", "stop"])


def full_disk(monkeypatch: pytest.MonkeyPatch, *, room: int) -> None:
    """Let only `room` more bytes be written."""
    true, left = os.write, [room]

    def write(descriptor: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = true(descriptor, data[: left[0]])
        left[0] -= done
        return done

    monkeypatch.setattr(os, "write", write)


@pytest.mark.parametrize("room", [0, 1, 40])
def test_a_full_disk_leaves_no_half_line_and_the_engine_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    path = tmp_path / "events.jsonl"
    engine = full_engine(event_log=path)
    a = engine.add("a", 40)
    engine.step((a, 6))
    engine.step((a, 1))
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        full_disk(patch, room=room)
        for position in (1, 2, 3):
            flip(engine, "a", position)
            engine.step((a, 1))
            assert path.read_bytes() == before
            flip(engine, "a", position)
        engine.step((a, 1))
        assert path.read_bytes() == before
    complaints = [r.message for r in caplog.records if "event log" in r.message]
    assert len(complaints) == 1
    assert complaints[0].endswith("No space left on device; events lost so far: 1")
    assert "Traceback" not in caplog.text
    # There is room again: what was lost is said before what comes next.
    engine.manager.flush()
    engine.manager.close()
    assert kinds(path)[-2:] == ["lost", "stop"]
    # Each with its report, and the one incident that they are.
    assert events(path)[-2]["events"] == engine.manager.summary().violations + 1 == 4


def test_what_a_killed_process_left_of_a_line_stays_apart(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"time": "2026-01-01T00')
    log = make_log(path)
    log.close()
    half, *whole = path.read_text().splitlines()
    assert half == '{"time": "2026-01-01T00'
    assert [json.loads(line)["event"] for line in whole] == ["start", "stop"]


def test_a_long_life_keeps_two_files_of_bounded_size(tmp_path: Path) -> None:
    path, older = tmp_path / "events.jsonl", tmp_path / "events.jsonl.1"
    log = make_log(path, most_bytes=4000)
    for step in range(1, 200):
        log.on_step(facts(step=step, watching=("complete", "partial")[step % 2]))
        assert path.stat().st_size <= 4000
        assert not older.exists() or older.stat().st_size <= 4000
    steps = [e["step"] for e in events(older) + events(path)]
    # The latest ones, each once, in order.
    assert steps == list(range(200 - len(steps), 200))
    assert 20 < len(steps) < 199


def test_a_line_longer_than_the_bound_is_written_all_the_same(tmp_path: Path) -> None:
    path, older = tmp_path / "events.jsonl", tmp_path / "events.jsonl.1"
    older.write_text("older\n")
    log = make_log(path, most_bytes=10)
    assert older.read_text() == "older\n"
    log.close()
    assert (kinds(older), kinds(path)) == (["start"], ["stop"])


def test_a_file_that_was_renamed_while_this_one_waited_gets_no_more_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, moved = tmp_path / "events.jsonl", tmp_path / "moved"
    log = make_log(path)
    true = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        if not moved.exists():
            path.rename(moved)
        true(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    log.close()
    assert (kinds(moved), kinds(path)) == (["start"], ["stop"])


def in_threads(*work: Callable[[], None]) -> None:
    threads = [threading.Thread(target=w) for w in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_lines_of_several_canaries_never_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # However slow the machine is: none gives up here.
    monkeypatch.setattr("kv_canary.observers.events._PATIENCE", 60.0)
    path = tmp_path / "events.jsonl"
    # A lock belongs to whoever opened the file, so that threads stand for processes here.
    logs = [make_log(path) for _ in range(4)]

    def work(log: EventLog, number: int) -> Callable[[], None]:
        def write() -> None:
            for step in range(50):
                log.on_step(facts(step=1000 * number + step, watching=("complete", "partial")[step % 2]))

        return write

    in_threads(*(work(log, number) for number, log in enumerate(logs)))
    steps = [event["step"] for event in events(path) if event["event"] == "watching"]
    assert sorted(steps) == [1000 * number + step for number in range(4) for step in range(50)]
    assert not any(event["event"] == "lost" for event in events(path))


def test_a_process_that_keeps_the_file_locked_does_not_stop_this_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"
    log = make_log(path)
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with caplog.at_level(logging.ERROR, "kv_canary"):
            log.on_step(facts())
    assert "could not be written" in caplog.text
    log.close()
    assert kinds(path) == ["start", "lost", "stop"]
