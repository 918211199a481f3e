"""HEAD of a forward that is repeated may run while the model does: it then finds and leaves what it finds in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import kv_canary as kc
from kv_canary.runtime import forward as forward_module
from kv_canary.runtime import replays as replays_module
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
    """Let every HEAD that may run beside the model do so, as late as it may."""
    made: list[Late] = []

    def new(_: CanaryContext) -> Late:
        made.append(Late())
        return made[-1]

    monkeypatch.setattr(CanaryContext, "new_beside", new)
    monkeypatch.setattr(Drain, "is_empty", False)
    monkeypatch.setattr(forward_module, "_BUSY_DECODES", 1)
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


@pytest.mark.parametrize("prefills", [False, True])
def test_what_is_damaged_before_the_forward_is_found_in_it(late: list[Late], prefills: bool) -> None:
    engine = Decoder(repeats=True)
    engine.admit(text(10), text(1000))
    for _ in range(3):
        engine.prefill({1: 9, 2: 9})
    engine.decode(6)
    step, runs = engine.manager.step, late[0].runs
    spoil(engine, position=5)
    if prefills:
        engine.prefill({1: 9, 2: 9})
    else:
        engine.decode()
    engine.manager.flush()
    assert late[0].runs == runs + 1
    [report] = engine.manager.reports
    assert (report.request_id, report.position, report.reasons, report.step) == ("text 1000", 5, ("K",), step + 1)


@pytest.mark.parametrize("part", ["head", "tail", "end", "model"])
def test_whatever_becomes_of_the_forward_its_stream_waits_for_head(
    late: list[Late], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Decoder(repeats=True)
    engine.admit(text(10), text(1000))
    engine.prefill({1: 20, 2: 7})
    engine.decode(6)

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of luck")

    runs = late[0].runs
    with monkeypatch.context() as patch:
        if part == "end":
            patch.setattr(engine.manager._steps, "_end_step", fails)
        elif part == "model":
            patch.setattr(engine, "write", fails)
        else:
            patch.setattr(engine.forward._decodes[2], part, fails)
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
    engine = Decoder(repeats=True)
    engine.admit(text(10), text(1000))
    engine.prefill({1: 20, 2: 7})
    engine.decode(6)

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


def test_a_decode_runs_beside_the_model_once_the_device_was_busy_for_long(
    late: list[Late], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward_module, "_BUSY_DECODES", 12)
    engine = Decoder(repeats=True)
    engine.admit(text(10), text(1000))
    engine.prefill({1: 20, 2: 7})
    first = engine.manager.step
    engine.decode(20)
    assert engine.manager.step == first + 20
    assert 0 < late[0].runs == engine.manager.step - 11
    monkeypatch.setattr(Drain, "is_empty", True)
    engine.decode()
    monkeypatch.setattr(Drain, "is_empty", False)
    runs = late[0].runs
    engine.decode(11)
    assert late[0].runs == runs
    engine.decode()
    assert late[0].runs == runs + 1


def test_launches_that_are_timed_come_one_behind_the_other(late: list[Late], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Decoder(repeats=True)
    engine.admit(text(10), text(1000))
    engine.prefill({1: 20, 2: 7})
    engine.decode(6)
    spans: list[Launch] = []
    monkeypatch.setattr(SingleForwardManager, "_timed", lambda _, launch: (spans.append(launch), launch()))
    steps, runs = engine.manager._steps, late[0].runs
    begin = steps._begin_step

    def timed() -> Any:
        step = begin()
        steps.timer = Timer()  # type: ignore[assignment]
        return step

    monkeypatch.setattr(steps, "_begin_step", timed)
    engine.decode(2)
    assert (late[0].runs, len(spans)) == (runs, 4)


class Timer:
    """Times nothing."""

    has_spans = False


def test_a_prefix_that_comes_is_held_against_its_seals_behind_head(late: list[Late]) -> None:
    engine = Decoder(repeats=True, seals="layer")
    engine.admit(text(10))
    engine.prefill({1: 20})
    shared = engine.tables["g0"][1, :16].clone()
    for n in range(4):
        engine.admit([*text(10, 16), *text(2000 * (n + 1), 100)])
        engine.cached[2] = 16
        engine.tables["g0"][2, :16] = shared
        runs = late[0].runs
        engine.prefill({1: 1, 2: 9})
        # Nobody new.
        assert late[0].runs == runs
        prefilled = engine.prefilled
        engine.prefill({1: 1, 2: 9})
        assert late[0].runs == runs + engine.prefilled - prefilled
        engine.finish(2)
        engine.manager.row_ended(2)
    engine.manager.flush()
    summary = engine.manager.summary()
    assert summary.audits is not None
    assert (summary.audits.admitted, summary.violations) == (4 * 16, 0)
    assert late[0].runs >= 2


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
