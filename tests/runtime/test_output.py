"""What the canary says leaves the engine's thread: nobody who posts waits, and what is dropped is counted and said."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kv_canary as kc
from kv_canary import output
from kv_canary.observers.events import EventLog
from kv_canary.output import BackgroundLogger, Output

from .engine import Engine, full_engine
from .test_observers import flip


class Blocking(logging.Handler):
    """A handler that waits until it is let go; at most half a minute."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.gate.wait(30)
        self.told.append(record.getMessage())


@pytest.fixture
def blocking() -> Iterator[Blocking]:
    """A handler of the canary's log that blocks until the test has ended, or lets it go."""
    handler = Blocking()
    logger = logging.getLogger("kv_canary")
    logger.addHandler(handler)
    yield handler
    handler.gate.set()
    assert output.drain()
    logger.removeHandler(handler)


def damaged(**options: object) -> Engine:
    """Return an engine whose next step finds a violation, and the one after that reports it."""
    engine = full_engine(**options)
    a = engine.add("a", 60)
    engine.step((a, 20))
    engine.step((a, 1))
    flip(engine, "a", 3)
    return engine


def test_a_handler_that_blocks_costs_the_step_nothing(blocking: Blocking) -> None:
    engine = damaged()
    a = engine.requests["a"]
    began = time.monotonic()
    for _ in range(4):
        engine.step((a, 1))
    engine.manager.flush()
    # Each line would have waited half a minute.
    assert time.monotonic() - began < 15
    assert engine.manager.summary().violations == 4
    assert not blocking.told
    blocking.gate.set()
    assert output.drain()
    assert any("incident 1" in line for line in blocking.told)


def test_a_file_that_is_locked_costs_the_step_nothing_and_one_wait_in_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_canary.observers.events._PATIENCE", 2.0)
    path = tmp_path / "events.jsonl"
    engine = damaged(event_log=path, mode="log")
    a = engine.requests["a"]
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        began = time.monotonic()
        for _ in range(20):
            engine.step((a, 1))
        engine.manager.flush()
        took = time.monotonic() - began
        assert output.drain(30)
        drained = time.monotonic() - began
    # Twenty reports, each of which would have waited 2 s; the thread waits once and pauses.
    assert took < 15
    assert drained < took + 20
    engine.manager.close()
    assert '"lost"' in path.read_text()


def test_the_event_log_is_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        damaged(event_log=tmp_path / "events.jsonl")
    finally:
        os.umask(before)
    assert (tmp_path / "events.jsonl").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize(("mode", "then"), [(0o644, 0o600), (0o666, 0o600), (0o604, 0o600), (0o640, 0o640)])
def test_an_event_log_that_was_there_is_open_to_its_owner_and_to_a_group_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, then: int, rotates: bool
) -> None:
    path = tmp_path / "events.jsonl"
    if not rotates:
        path.touch()
        path.chmod(mode)
    engine = damaged(event_log=path)
    if rotates:
        assert output.drain()
        path.rename(tmp_path / "moved")
        path.touch()
        path.chmod(mode)
    engine.step((engine.requests["a"], 1))
    engine.manager.flush()
    assert output.drain()
    assert path.stat().st_mode & 0o777 == then
    assert '"incident"' in path.read_text()
    engine.manager.close()
    assert "can be read by everyone" not in caplog.text


def test_an_event_log_that_stays_open_to_everyone_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fchmod", refuse)
    path = tmp_path / "events.jsonl"
    path.touch()
    path.chmod(0o644)
    engine = damaged(event_log=path)
    engine.step((engine.requests["a"], 1))
    engine.manager.close()
    assert caplog.text.count("can be read by everyone") == 1
    assert '"stop"' in path.read_text()


def test_what_is_no_file_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    path.chmod(0o644)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with contextlib.suppress(ValueError):
        EventLog(path, config=kc.CanaryConfig())
    os.close(reader)
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_handler_that_raises_reaches_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    class Raises(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("handler broke")

    handler = Raises()
    logging.getLogger("kv_canary").addHandler(handler)
    before = output.OUTPUT.failed
    try:
        engine = damaged()
        for _ in range(3):
            engine.step((engine.requests["a"], 1))
        engine.manager.flush()
        assert output.drain()
    finally:
        logging.getLogger("kv_canary").removeHandler(handler)
    assert engine.manager.summary().violations == 3
    assert output.OUTPUT.failed > before


def test_what_does_not_fit_is_dropped_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    queue = Output(capacity=4, linger=0.1)
    gate = threading.Event()
    done: list[int] = []
    assert queue.post(gate.wait)
    while queue._waiting:
        time.sleep(0.001)
    assert [queue.post(lambda i=i: done.append(i)) for i in range(6)] == [True] * 4 + [False] * 2
    assert queue.dropped == 2
    gate.set()
    assert queue.drain(10)
    assert done == [0, 1, 2, 3]
    deadline = time.monotonic() + 10
    while "2 log lines, events or bundles were dropped" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "2 log lines, events or bundles were dropped" in caplog.text


def test_the_thread_is_there_only_while_there_is_work() -> None:
    queue = Output(linger=0.05)
    assert queue._thread is None
    queue.post(lambda: None)
    thread = queue._thread
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()
    done: list[int] = []
    queue.post(lambda: done.append(1))
    assert queue.drain(10)
    assert done == [1]


def test_draining_waits_no_longer_than_it_is_told() -> None:
    queue, gate = Output(), threading.Event()
    queue.post(gate.wait)
    began = time.monotonic()
    assert not queue.drain(0.1)
    assert time.monotonic() - began < 5
    gate.set()
    assert queue.drain(10)


def test_lines_are_as_of_the_call(caplog: pytest.LogCaptureFixture) -> None:
    queue, gate = Output(), threading.Event()
    logger = BackgroundLogger(logging.getLogger("kv_canary"), queue)
    queue.post(gate.wait)
    what = ["first"]
    with caplog.at_level(logging.INFO, "kv_canary"):
        logger.info("said: %s", what)
    what[0] = "changed"
    logger.info("below the level")
    gate.set()
    assert queue.drain(10)
    assert [(r.getMessage(), r.filename) for r in caplog.records] == [("said: ['first']", "test_output.py")]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_forked_child_says_its_own_and_ends(tmp_path: Path) -> None:
    gate = threading.Event()
    # Work is under way, and the lock is held, when the process is forked.
    output.post(gate.wait)
    with output.OUTPUT._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            output.post(lambda: (tmp_path / "child").write_text("said"))
            os._exit(0 if output.drain(10) else 1)
    gate.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (tmp_path / "child").read_text() == "said"
    assert output.drain()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_forked_child_ends_no_event_log_of_its_parents(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    engine = damaged(event_log=path)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        engine.manager.close()
        os._exit(0 if output.drain(10) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert '"stop"' not in path.read_text()
    engine.manager.close()
    assert output.drain()
    (stop,) = (line for line in path.read_text().splitlines() if '"stop"' in line)
    assert json.loads(stop)["pid"] == os.getpid()


FORKS = """
import os, sys
from kv_canary.engines.ending import at_exit

class Canary:
    def close(self):
        print("closed", flush=True)

kept, dropped = Canary(), Canary()
at_exit(kept.close)
at_exit(dropped.close)
del dropped
child = os.fork()
if not child:
    sys.exit(0)
print("child", os.waitpid(child, 0)[1], flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_what_is_for_the_end_of_a_process_is_not_for_that_of_a_forked_one() -> None:
    command = [sys.executable, "-P", "-c", FORKS]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.split() == ["child", "0", "closed"]


def test_waiting_for_less_than_a_second_is_waiting() -> None:
    queue = Output()
    queue.post(lambda: time.sleep(0.05))
    assert queue.drain(0.95)


def test_without_a_thread_work_is_dropped_and_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    queue = Output()
    monkeypatch.setattr(threading.Thread, "start", no_room)
    assert not queue.post(lambda: None)
    assert queue.dropped == 1
    assert queue.drain(0.0)
    monkeypatch.undo()
    done: list[int] = []
    assert queue.post(lambda: done.append(1))
    assert queue.drain(10.0)
    assert done == [1]


def test_a_handler_that_exits_ends_nothing_but_its_line() -> None:
    queue, done = Output(), list[int]()
    queue.post(lambda: sys.exit(1))
    queue.post(lambda: done.append(1))
    assert queue.drain(10)
    assert (done, queue.failed, queue.dropped) == ([1], 1, 0)


def test_a_signal_handler_may_log_while_its_thread_does() -> None:
    # A lock that waits for its own thread hangs there.
    queue = Output()
    with queue._lock:
        assert queue.post(lambda: None)
    assert queue.drain(10)


def test_no_second_thread_starts_while_the_first_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, started, start = Output(), list[str](), threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        started.append(thread.name)
        # As by a signal.
        assert len(started) > 1 or queue.post(lambda: None)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    queue.post(lambda: None)
    assert queue.drain(10)
    assert started == ["kv-canary-output"]
