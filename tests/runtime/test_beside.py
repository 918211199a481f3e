"""HEAD of a forward that is repeated may run while the model does: it then finds and leaves what it finds in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import kv_canary as kc
from kv_canary.runtime import replays as replays_module
from kv_canary.runtime import steps as steps_module
from kv_canary.runtime.context import CanaryContext
from kv_canary.runtime.drain import Drain
from kv_canary.runtime.forward import SingleForwardManager
from kv_canary.runtime.replays import Beside, Launch

from .engine import MAX_LEN, MAX_ROWS, make_pool
from .test_repetition import Decoder, expect_watched_behind_a_failure, life, spoil, text


class Late:
    """A stream beside the forwards' on which nothing runs before it is waited for."""

    def __init__(self) -> None:
        self.launch: Launch | None = None
        self.runs = self.joins = 0

    def run(self, launch: Launch) -> None:
        assert self.launch is None, "what was launched before has not been waited for"
        self.launch, self.runs = launch, self.runs + 1

    def join(self) -> bool:
        if self.launch is None:
            return False
        launch, self.launch = self.launch, None
        self.joins += 1
        launch()
        return True


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[Late]:
    """Let every HEAD of a decode that may run beside the model do so, as late as it may."""
    made: list[Late] = []

    def new(_: CanaryContext) -> Late:
        made.append(Late())
        return made[-1]

    monkeypatch.setattr(CanaryContext, "new_beside", new)
    monkeypatch.setattr(Drain, "is_empty", False)
    monkeypatch.setattr(steps_module, "_LONG_STEP", 0.0)
    monkeypatch.setattr(steps_module, "_UNHURRIED", 1)
    return made


@pytest.mark.parametrize("windows", [(0,), (16,), (0, 16)], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"stride": 4}, {"check_tokens": False}, {"verify_bytes_at_tail": True}], ids=str
)
def test_what_runs_as_late_as_it_may_leaves_what_is_left_in_order(
    windows: Sequence[int], options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    in_order = Decoder(repeats=True, windows=windows, **options)
    life(in_order)
    made: list[Late] = request.getfixturevalue("late")
    beside = Decoder(repeats=True, windows=windows, **options)
    life(beside)
    assert in_order.repeated == beside.repeated > 10
    assert made[0].runs == made[0].joins >= beside.repeated
    expected, found = in_order.leavings(), beside.leavings()
    assert in_order.manager.summary().violations == beside.manager.summary().violations == 0
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


def decoding() -> Decoder:
    """Return an engine whose decode steps are repeated."""
    engine = Decoder(repeats=True)
    engine.admit(text(10), text(1000))
    engine.prefill({1: 20, 2: 7})
    engine.decode(6)
    return engine


def test_what_is_damaged_before_the_forward_is_found_in_it(late: list[Late]) -> None:
    engine = decoding()
    step, runs = engine.manager.step, late[0].runs
    spoil(engine, position=5)
    engine.decode()
    engine.manager.flush()
    assert late[0].runs == runs + 1
    [report] = engine.manager.reports
    assert (report.request_id, report.position, report.reasons, report.step) == ("text 1000", 5, ("K",), step + 1)


def test_a_prefill_comes_behind_head(late: list[Late]) -> None:
    engine = decoding()
    for _ in range(4):
        runs = late[0].runs
        engine.prefill({1: 9, 2: 9})
        assert late[0].runs == runs
    assert engine.prefilled >= 2


@pytest.mark.parametrize("part", ["head", "tail", "end", "model"])
def test_whatever_becomes_of_the_forward_its_stream_waits_for_head(
    late: list[Late], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = decoding()

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of luck")

    runs = late[0].runs
    with monkeypatch.context() as patch:
        if part == "end":
            patch.setattr(engine.manager._steps, "_end_step", fails)
        elif part == "model":
            patch.setattr(engine, "write", fails)
        else:
            for lap in engine.forward._decodes[2]._laps:
                patch.setattr(lap, part, fails)
        if part == "model":
            with pytest.raises(RuntimeError, match="out of luck"):
                engine.decode()
            engine.forward.abort()
        else:
            engine.decode()
    assert (late[0].runs, late[0].launch) == (runs + 1, None)
    if part != "model":
        expect_watched_behind_a_failure(engine)


def test_a_wait_that_fails_reaches_nobody(late: list[Late], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = decoding()

    def fails() -> None:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(late[0], "join", fails)
        engine.decode()
    # Nothing of HEAD has run.
    late[0].launch = None
    expect_watched_behind_a_failure(engine)
    assert sum(engine.manager.summary().failures.values()) >= 2


def test_where_the_device_waits_for_the_host_head_comes_first(
    late: list[Late], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Drain, "is_empty", True)
    engine = Decoder(repeats=True)
    life(engine)
    assert engine.repeated > 10
    assert late[0].runs == 0


@pytest.mark.parametrize("hurries", ["a step is short", "the device waits"])
def test_a_decode_runs_beside_the_model_once_the_host_has_had_time_for_long(
    hurries: str, late: list[Late], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(steps_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(steps_module, "_LONG_STEP", 0.5)
    monkeypatch.setattr(steps_module, "_UNHURRIED", 12)
    engine = Decoder(repeats=True)
    engine.admit(text(10), text(1000))

    def decode(*seconds: float) -> list[int]:
        """Return how many HEADs have run beside in steps that end so long behind one another."""
        ran = []
        for each in seconds:
            now[0] += each
            runs = late[0].runs
            engine.decode()
            ran.append(late[0].runs - runs)
        return ran

    now[0] += 1.0
    engine.prefill({1: 20, 2: 7})
    assert decode(*[1.0] * 14) == [0] * 11 + [1] * 3
    if hurries == "a step is short":
        # That is known behind it.
        assert decode(0.25) == [1]
    else:
        with monkeypatch.context() as patch:
            patch.setattr(Drain, "is_empty", True)
            assert decode(1.0) == [0]
    assert decode(*[1.0] * 14) == [0] * 12 + [1] * 2


def test_launches_that_are_timed_come_one_behind_the_other(late: list[Late], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = decoding()
    spans: list[Launch] = []
    monkeypatch.setattr(SingleForwardManager, "_timed", lambda _, launch: (spans.append(launch), launch()))
    steps, runs = engine.manager._steps, late[0].runs
    begin = steps._next_step

    def timed() -> Any:
        step = begin()
        steps.timer = Timer()  # type: ignore[assignment]
        return step

    monkeypatch.setattr(steps, "_next_step", timed)
    engine.decode(2)
    assert (late[0].runs, len(spans)) == (runs, 4)


class Timer:
    """Times nothing."""

    has_spans = False


@pytest.mark.parametrize(
    ("why", "groups", "options", "inner"),
    [
        ("nothing", {}, {}, False),
        ("a ring", {"window": 16, "ring": True}, {}, False),
        ("records of HEAD's own", {}, {"records": "head_and_tail"}, False),
        ("what the model hands over", {}, {"check_writes": True, "seals": "layer"}, False),
        ("drafts", {}, {}, True),
    ],
)
def test_head_runs_first_where_the_model_changes_what_it_reads(
    why: str, groups: dict[str, Any], options: dict[str, Any], inner: bool, late: list[Late]
) -> None:
    group = kc.BufferGroup(name="g", pool=make_pool(512), **groups)
    limits = kc.CanaryLimits(max_rows=MAX_ROWS, max_requests=4, max_tokens=64, max_len=MAX_LEN)
    manager = kc.CanaryManager([group], limits=limits, config=kc.CanaryConfig(backend="reference", **options))
    made = len(late)
    forward = manager.forward("f", inner=inner)
    assert (forward._beside is None, len(late) - made) == (why != "nothing", why == "nothing")


def test_on_a_cpu_nothing_runs_beside() -> None:
    assert Decoder(repeats=True).forward._beside is None


# The stream.


class Stream:
    def __init__(self, name: str) -> None:
        self.name = name


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to streams, without a GPU."""
    log: list[str] = []
    current = [Stream("main")]
    names = iter(("begun", "done"))

    class Event:
        def __init__(self, device: torch.device) -> None:
            self.name = next(names)

        def record(self) -> None:
            log.append(f"{self.name} on {current[0].name}")

        def wait(self, stream: Stream | None = None) -> None:
            log.append(f"{(stream or current[0]).name} waits for {self.name}")

    def use(stream: Stream) -> None:
        current[0] = stream
        log.append(f"on {stream.name}")

    side = Stream("side")
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_stream", use)
    monkeypatch.setattr(replays_module._Streams, "of", lambda _, purpose: {"beside": side}[purpose])
    return log


LAUNCHED = ["begun on main", "side waits for begun", "on side", "HEAD", "done on side", "on main"]


def test_what_is_launched_beside_begins_behind_what_was_and_is_waited_for_once(log: list[str]) -> None:
    beside = Beside(torch.device("cuda", 0))
    assert not beside.join()
    beside.run(lambda: log.append("HEAD"))
    assert beside.join()
    assert not beside.join()
    assert log == [*LAUNCHED, "main waits for done"]


def test_what_fails_beside_leaves_the_stream_as_it_was_and_is_waited_for(log: list[str]) -> None:
    beside = Beside(torch.device("cuda", 0))

    def fails() -> None:
        log.append("HEAD")
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        beside.run(fails)
    beside.join()
    assert log == [*LAUNCHED, "main waits for done"]
