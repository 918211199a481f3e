"""Own graphs: what comes again is captured once and replayed, with the memory and the numbers that it was made with."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import kv_canary as kc
from kv_canary.runtime import replays as replays_module
from kv_canary.runtime.batch import ModelInputs
from kv_canary.runtime.host import Mailbox
from kv_canary.runtime.launches import GroupLaunches
from kv_canary.runtime.replays import (
    MAX_GRAPHS,
    MOST_FAILURES,
    RUNS_BEFORE_CAPTURE,
    RUNS_BEFORE_EXCHANGE,
    RUNS_BEFORE_RETRY,
    Branch,
    Launch,
    Replays,
)

from .engine import Engine, full_engine, make_pool
from .tape import Recorder
from .test_captured import groups_of
from .test_forward import flip


class Captures:
    """Counts launches, and captures of them that launch nothing."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.captured: list[str] = []

    def launch(self, name: str) -> Launch:
        return lambda: self.ran.append(name)

    def capture(self, launch: Launch) -> Launch:
        before = list(self.ran)
        launch()
        name = self.ran.pop()
        assert self.ran == before
        self.captured.append(name)
        return lambda: self.ran.append(f"replay of {name}")


def test_what_comes_again_is_captured_once() -> None:
    captures = Captures()
    replays = Replays(captures.capture)
    for _ in range(RUNS_BEFORE_CAPTURE + 3):
        replays.run("a", captures.launch("a"))
    replays.run("b", captures.launch("b"))
    assert captures.captured == ["a"]
    assert captures.ran == ["a"] * RUNS_BEFORE_CAPTURE + ["replay of a"] * 3 + ["b"]


def test_launches_run_as_they_are_without_graphs() -> None:
    captures = Captures()
    replays = Replays(None)
    for _ in range(5):
        replays.run("a", captures.launch("a"))
    assert captures.ran == ["a"] * 5


def test_nothing_is_replayed_or_captured_into_another_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = Captures()
    replays = Replays(captures.capture)
    for _ in range(RUNS_BEFORE_CAPTURE):
        replays.run("a", captures.launch("a"))
    monkeypatch.setattr(replays_module, "_capturing", lambda: True)
    for _ in range(RUNS_BEFORE_CAPTURE + 1):
        replays.run("a", captures.launch("a"))
        replays.run("b", captures.launch("b"))
    assert captures.captured == ["a"]
    assert "replay of a" not in captures.ran


def test_there_are_only_so_many_graphs_and_counts() -> None:
    captures = Captures()
    replays = Replays(captures.capture)
    for key in range(MAX_GRAPHS + 10):
        for _ in range(RUNS_BEFORE_CAPTURE):
            replays.run(key, captures.launch(str(key)))
    assert len(captures.captured) == MAX_GRAPHS
    for key in range(10_000):
        replays.run(("once", key), captures.launch("once"))
    assert len(replays._runs) <= 1024
    replays.run(0, captures.launch("0"))
    assert captures.ran[-1] == "replay of 0"


def test_what_comes_often_takes_the_place_of_what_was_longest_not_replayed() -> None:
    captures = Captures()
    replays = Replays(captures.capture)
    for key in range(MAX_GRAPHS):
        for _ in range(RUNS_BEFORE_CAPTURE):
            replays.run(key, captures.launch(str(key)))
    replays.run(0, captures.launch("0"))
    for _ in range(RUNS_BEFORE_EXCHANGE):
        assert not replays.is_settled("new")
        replays.run("new", captures.launch("new"))
    assert replays.is_settled("new")
    assert captures.captured[-1] == "new"
    assert [key for key in range(MAX_GRAPHS) if not replays.is_settled(key)] == [1]


class Failing:
    """Captures of which the first so many fail."""

    def __init__(self, count: int) -> None:
        self.left, self.told = count, list[Exception]()
        self.replays = Replays(self.capture, failed=self.told.append)

    def capture(self, launch: Launch) -> Launch:
        self.left -= 1
        if self.left >= 0:
            raise RuntimeError("no graphs today")
        return launch


def test_launches_whose_capture_has_failed_go_on_and_are_captured_later() -> None:
    failing, ran = Failing(1), Captures()
    keys = [f"size {n}" for n in range(2 * MOST_FAILURES)]
    runs = 0
    while runs < RUNS_BEFORE_RETRY:
        for key in keys:
            failing.replays.run(key, ran.launch(key))
            runs += 1
            assert not failing.replays.is_settled(key)
    assert failing.replays.rounds_up
    for key in [*keys, *keys]:
        failing.replays.run(key, ran.launch(key))
    assert all(failing.replays.is_settled(key) for key in keys)
    assert [str(error) for error in failing.told] == ["no graphs today"]


def test_captures_that_fail_again_and_again_are_given_up_and_graphs_are_replayed_still() -> None:
    failing, ran = Failing(0), Captures()
    for _ in range(RUNS_BEFORE_CAPTURE):
        failing.replays.run("good", lambda: ran.ran.append("good"))
    failing.left = 10_000
    for _ in range(2 * MOST_FAILURES * RUNS_BEFORE_RETRY):
        failing.replays.run("bad", ran.launch("bad"))
    assert len(failing.told) == MOST_FAILURES
    assert failing.replays.rounds_up
    # What is kept for repetition launches as it is.
    assert failing.replays.is_settled("any")
    launch = ran.launch("settled")
    assert failing.replays.settle(launch) is launch
    failing.replays.run("good", ran.launch("not replayed"))
    assert ran.ran[-1] == "good"


def test_captures_that_fail_now_and_then_are_not_given_up() -> None:
    failing, ran = Failing(0), Captures()
    for key in range(2 * MOST_FAILURES):
        failing.left = 1
        for _ in range(RUNS_BEFORE_CAPTURE + RUNS_BEFORE_RETRY):
            failing.replays.run(key, ran.launch("again"))
        assert failing.replays.is_settled(key)
    assert len(failing.told) == 2 * MOST_FAILURES


@pytest.mark.parametrize("redacts", [False, True])
def test_a_capture_that_fails_is_counted_and_said_once(caplog: pytest.LogCaptureFixture, redacts: bool) -> None:
    manager = full_engine(redact=redacts).manager
    with caplog.at_level(logging.ERROR, "kv_canary"):
        for _ in range(3):
            manager.context.capture_failed(RuntimeError("no graphs today"))
    assert manager.guard.failures == {"capturing a graph: RuntimeError": 3}
    assert not manager.guard.touched
    assert caplog.text.count("capturing a graph failed") == 1
    assert ("no graphs today" in caplog.text) is not redacts


def test_what_a_launch_raises_comes_through() -> None:
    def fails() -> None:
        raise ValueError("bad table")

    replays = Replays(Captures().capture)
    for _ in range(RUNS_BEFORE_CAPTURE + 1):
        with pytest.raises(ValueError, match="bad table"):
            replays.run("a", fails)


PAIRS = [
    *((True, 3, "full"), (False, 1, "full")),
    *((True, 1, "ring"), (False, 3, "ring")),
    *((True, 3, "lut"), (False, 1, "lut")),
]


def with_graphs(engine: Engine) -> Recorder:
    """Let the engine's forward replay its launches as a GPU would: what was recorded, with the same tensors."""
    recorder = Recorder()
    engine.forward._replays = Replays(recorder.capture)
    return recorder


@pytest.mark.every_day(
    # Every value of each parameter with every value of each other one.
    *(f"{faults}-{stride}-{layout}" for faults, stride, layout in PAIRS)
)
@pytest.mark.parametrize("layout", ["full", "ring", "lut"])
@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("faults", [False, True])
def test_replays_find_and_record_what_launches_do(layout: str, stride: int, faults: bool) -> None:
    engines = []
    for _ in range(2):
        torch.manual_seed(0)
        config = kc.CanaryConfig(backend="reference", stride=stride, check_inputs=True, max_reports_per_step=500)
        engines.append(Engine(groups_of(layout), config))
    recorder, of_state = with_graphs(engines[1]), Recorder()
    engines[1].manager.state._replays = Replays(of_state.capture)
    rng = random.Random(stride)
    requests = [tuple(engine.add(f"r{i}", 100) for engine in engines) for i in range(5)]
    for step in range(16):
        chosen = rng.sample(range(5), rng.randrange(1, 5))
        lengths = [rng.choice([1, 1, 1, 2, 4]) for _ in chosen]
        bad = rng.randrange(5) if faults and rng.random() < 0.4 else None
        for side, engine in enumerate(engines):
            if bad is not None and requests[bad][side].cached:
                r = requests[bad][side]
                group = engine.groups[step % len(engine.groups)]
                flip(group, engine.slot_of(group, r, r.cached - 1), r.cached - 1)
            torch.manual_seed(step)
            engine.step(*((requests[i][side], n) for i, n in zip(chosen, lengths, strict=True)))
        for mine, theirs in zip(*(e.manager.pools for e in engines), strict=True):
            for a, b in zip(mine.buffers, theirs.buffers, strict=True):
                assert torch.equal(a, b)
        tails, others = (e.manager.state.tails[0].chains for e in engines)
        assert torch.equal(tails, others)
    found = [[r.sentence for r in engine.found()] for engine in engines]
    assert sorted(found[0]) == sorted(found[1])
    assert faults or not found[0]
    # What brings rows up is part of HEAD's, where it is small.
    assert recorder.replayed > 8
    summaries = [engine.manager.summary() for engine in engines]
    assert summaries[0] == summaries[1]


def test_a_table_or_a_buffer_that_moved_is_no_replay() -> None:
    engine = full_engine(check_tokens=True)
    recorder = with_graphs(engine)
    a = engine.add("a", 120)
    engine.step((a, 4))
    for _ in range(RUNS_BEFORE_CAPTURE + 1):
        engine.step((a, 1))
    assert (recorder.captured, recorder.replayed) == (2, 4)
    # A replay would go on reading the old table.
    old = engine.tables["full"]
    engine.tables["full"] = old.clone()
    old.fill_(77)
    engine.step((a, 1))
    assert recorder.replayed == 4
    engine.forward._launches[0].room = 4096
    engine.step((a, 1))
    assert recorder.replayed == 4
    assert engine.found() == []


def test_a_forward_with_pending_tokens_is_another_launch() -> None:
    engine = Engine([kc.BufferGroup(name="full", pool=make_pool(400))])
    recorder = with_graphs(engine)
    a, b = engine.add("a", 100), engine.add("b", 100)
    for _ in range(4):
        engine.step((a, 1), (b, 1))
    before = recorder.replayed
    # b goes on from what a writes in the same forward.
    b.tokens[:8], b.cached = a.tokens[:8], 8
    batch = engine.batch((a, 4), (b, 1))
    engine.tables["full"][b.row, :8] = engine.tables["full"][a.row, :8]
    shared = dataclasses.replace(batch.requests[1], pending=4, owner=b.owner + 50)
    engine.run(dataclasses.replace(batch, requests=[batch.requests[0], shared]))
    assert recorder.replayed == before
    assert [r.sentence for r in engine.found()] == []


def columns_of(views: list[torch.Tensor]) -> list[list[int]]:
    return [view.tolist() for view in views]


@pytest.mark.parametrize("more", [0, 1, 2])
def test_a_mailbox_brings_numbers_with_zeros_behind(more: int) -> None:
    box = Mailbox(torch.device("cpu"), words=20)
    widths = (3 + more, 1 + more, more)
    for _ in range(2):
        box.post([9] * 3, [9] * 4, [9] * 2)
        views = box.post([1, 2, 3], range(1), [], widths=widths)
        assert columns_of(views) == [column + [0] * more for column in ([1, 2, 3], [0], [])]
    # Where kernels are compiled for.
    assert all((view.data_ptr() - box.buffer.data_ptr()) % 16 == 0 for view in views)


def test_a_mailbox_grows_and_keeps_its_memory() -> None:
    box = Mailbox(torch.device("cpu"), words=4)
    for n in (3, 50, 20):
        assert columns_of(box.post(range(n))) == [list(range(n))]
    where, sheets = box.buffer.data_ptr(), [s.host.data_ptr() for s in box._sheets]
    for _ in range(20):
        box.post(range(50))
    assert box.buffer.data_ptr() == where
    assert [s.host.data_ptr() for s in box._sheets] == sheets
    assert len(sheets) == 1


def test_a_mailbox_overwrites_nothing_that_a_copy_still_reads() -> None:
    """Two copies under way at most: there are three sheets, and each is taken again only when its copy is over."""
    box = Mailbox(torch.device("cpu"), words=4)
    under_way: list[Any] = []

    class Event:
        def __init__(self) -> None:
            self.over = False

        def record(self) -> None:
            self.over = False
            under_way.append(self)

        def query(self) -> bool:
            return self.over

    for n in range(9):
        box.post([n])
        newest = box._sheets[-1]
        if newest.sent is None:
            newest.sent = Event()
            newest.sent.record()
        if len(under_way) > 2:
            under_way.pop(0).over = True
    assert len(box._sheets) == 3
    assert sorted(int(s.values[0]) for s in box._sheets) == [6, 7, 8]


# Branches.


class Stream:
    """A stream that notes what waits for what."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: Stream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to streams while a graph is captured, without a GPU."""
    log: list[str] = []
    main = Stream("main", log)

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        log.append(f"on {stream.name}")
        try:
            yield
        finally:
            log.append(f"off {stream.name}")

    monkeypatch.setattr(replays_module, "_capturing", lambda: True)
    made = iter(("side", "another"))
    monkeypatch.setattr(replays_module, "_streams", replays_module._Streams())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: Stream(next(made), log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", on)
    return log


def use_graphs(log: list[str], monkeypatch: pytest.MonkeyPatch, *, fails: str = "") -> None:
    """Have graphs that note what is captured, without a GPU; the first one fails where `fails` says."""
    handles = iter(range(100))
    left = [fails]

    def happens(what: str) -> None:
        log.append(what)
        if left[0] == what:
            left[0] = ""
            raise RuntimeError(what)

    class Graph:
        def capture_begin(self, pool: int, *, capture_error_mode: str) -> None:
            assert (capture_error_mode, gc.isenabled()) == ("thread_local", False)
            happens("begin")

        def capture_end(self) -> None:
            happens("end")

        def replay(self) -> None:
            log.append("replay")

    class Byte:
        def zero_(self) -> None:
            log.append("zero")

    monkeypatch.setattr(replays_module, "CanaryGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(replays_module._Streams, "byte", lambda _: Byte())
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda _, memory: log.append(f"memory {memory} is free"))


def test_a_branch_begins_behind_what_was_launched_and_is_waited_for_once(streams: list[str]) -> None:
    branch = Branch()
    with branch.beside():
        streams.append("seal")
    streams.append("verify")
    branch.join()
    branch.join()
    assert streams == ["side waits for main", "on side", "seal", "off side", "verify", "main waits for side"]


def test_where_nothing_is_captured_there_is_no_branch(streams: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays_module, "_capturing", lambda: False)
    branch = Branch()
    with branch.beside():
        streams.append("seal")
    branch.join()
    assert streams == ["seal"]


def test_captures_are_on_one_stream_of_their_thread_behind_what_runs_and_before_what_comes(
    streams: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_graphs(streams, monkeypatch)
    once = ["side waits for main", "on side", "begin", "launch", "end", "off side", "main waits for side"]
    for _ in range(3):
        replays_module.capture_graph(lambda: streams.append("launch"))
        assert streams == once
        streams.clear()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(replays_module.capture_graph, lambda: streams.append("launch")).result()
    assert streams == [line.replace("side", "another") for line in once]
    assert gc.isenabled()


@pytest.mark.parametrize("where", ["begin", "launch", "end"])
def test_of_a_capture_that_fails_nothing_is_left(
    where: str, streams: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch ends neither its allocator's capture nor its generator's where the device gave one up."""
    use_graphs(streams, monkeypatch, fails=where)

    def launch() -> None:
        streams.append("launch")
        if where == "launch":
            raise RuntimeError("launch")

    with pytest.raises(RuntimeError, match=where):
        replays_module.capture_graph(launch)
    happened = {"begin": ["begin"], "launch": ["begin", "launch", "end"], "end": ["begin", "launch", "end"]}[where]
    # The next capture that succeeds settles the generator.
    expected = [*happened, "memory 0 is free", "begin", "zero", "end"]
    assert streams == ["side waits for main", "on side", *expected, "off side"]
    assert gc.isenabled()
    streams.clear()
    replays_module.capture_graph(lambda: streams.append("launch"))
    assert streams[2:5] == ["begin", "launch", "end"]


@pytest.mark.parametrize("fails", ["seal", "tail"])
def test_a_launch_that_fails_leaves_no_branch_open(
    fails: str, streams: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("no")

    engine = full_engine(seals="layer")
    engine.step((engine.add("a", 20), 5))
    monkeypatch.setattr(GroupLaunches, fails, failing)
    streams.clear()
    with pytest.raises(RuntimeError, match="no"):
        engine.forward._launch_tail()
    assert streams[-1] == "main waits for side"


@pytest.mark.parametrize("sizes", [(4,), (2, 4)])
def test_views_of_one_buffer_that_differ_in_length_share_no_graph(sizes: tuple[int, ...]) -> None:
    """An engine has a graph of its own for 2 requests and one for 4, all of which read the same buffers."""
    engine, recorder = full_engine(check_tokens=True), Recorder()
    engine.forward._replays = Replays(recorder.capture)
    ids, at, slots, rows, lengths = (torch.zeros(4, dtype=torch.int64) for _ in range(5))
    views = {
        n: ModelInputs(
            input_ids=ids[:n],
            positions=at[:n],
            out_slots={"full": slots[:n]},
            rows=rows[:n],
            lengths=lengths[:n],
            stays=True,
        )
        for n in sizes
    }
    requests = [engine.add(f"r{i}", 60) for i in range(4)]
    engine.step(*((r, 4) for r in requests))
    for count in (2, 2, 2, 2, 4, 4, 4, 2, 4):
        which = requests[:count]
        given = [torch.tensor([r.row for r in which]), torch.tensor([r.cached + 1 for r in which])]
        batch = engine.batch(*((r, 1) for r in which))
        batch = dataclasses.replace(batch, rows=given[0], lengths=given[1], is_given_at_tail=True)
        values = (batch.input_ids, batch.positions, batch.out_slots["full"], *given)
        for there, value in zip((ids, at, slots, rows, lengths), values, strict=True):
            there.zero_()[:count] = torch.as_tensor(value)
        engine.forward.begin(batch)
        engine.forward.head()
        engine.write_bytes(batch)
        engine.forward.tail(given=views[min(n for n in sizes if n >= count)])
        engine.forward.end()
        for request in which:
            request.cached += 1
    assert [r.sentence for r in engine.found()] == []
    assert recorder.replayed


def test_what_a_capture_makes_can_be_changed_in_any_mode_of_the_engines() -> None:
    made: list[torch.Tensor] = []

    def capture(launch: Launch) -> Launch:
        made.append(torch.zeros(1))
        return launch

    replays = Replays(capture)
    with torch.inference_mode():
        for _ in range(RUNS_BEFORE_CAPTURE):
            replays.run("key", lambda: None)
    [its] = made
    its += 1
    assert its.tolist() == [1]
