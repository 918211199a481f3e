"""KV connectors: what they bring is taken in, healthy lives are silent, and what they write by mistake is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kv_canary.difftest.stress.vllm.engine import VOCABULARY, Engine, Runner, Traffic, drafts_of

from .waiting import serve_held_up

Model = Callable[[str], str]


@dataclass(frozen=True, kw_only=True)
class Life:
    """A life of an engine with a connector.

    Args:
        waits: whether requests wait for what is brought, or their first forward does.
        kind: of the model.
        runner: of the model.
        steps: in which requests come.
        asynchronous: see `Engine`.
        drafts: whether a draft model of one layer drafts.
        groups: that share what is brought.
        canary: settings.
        arguments: of vLLM's `LLM`.
    """

    waits: bool
    kind: str = "llama"
    runner: Runner = "V1"
    steps: int = 40
    asynchronous: bool = False
    drafts: bool = False
    groups: int = 1
    canary: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)


# Without a prefix cache of the engine's own, all that requests share is brought.
ALL = {"enable_prefix_caching": False}
LIVES = {
    "before the first forward": Life(waits=False, arguments=ALL, canary={"seals": "layer"}),
    "while requests wait": Life(waits=True, arguments=ALL, canary={"seals": "layer", "check_inputs": "1"}),
    "beside a prefix cache": Life(waits=True, steps=60),
    "three groups over one memory": Life(
        waits=True, kind="gemma3", groups=3, arguments={**ALL, "num_gpu_blocks_override": 70}
    ),
    "three groups, before the first forward": Life(
        waits=False, kind="gemma3", groups=3, arguments={**ALL, "num_gpu_blocks_override": 70}
    ),
    "windows": Life(waits=False, kind="mistral", arguments=ALL),
    "asynchronous": Life(waits=True, asynchronous=True, arguments=ALL),
    "asynchronous, before the first forward": Life(waits=False, asynchronous=True, arguments=ALL),
    "a draft model": Life(waits=True, steps=25, drafts=True, groups=2, arguments=ALL),
    "V2": Life(waits=True, runner="V2", steps=14, arguments=ALL),
    "V2, before the first forward": Life(waits=False, runner="V2", steps=14, arguments=ALL),
}
LONG = (
    "windows",
    "three groups over one memory",
    "three groups, before the first forward",
    "asynchronous",
    "beside a prefix cache",
    "a draft model",
    "V2, before the first forward",
    "while requests wait",
)


def serve(model: str, life: Life, canary: Mapping[str, str] | None) -> tuple[dict[str, list[int]], int, Any]:
    """Live a life; return its outputs, the tokens that were brought, and the canary's summary."""
    from kv_canary.difftest.stress.vllm import loopback

    more = {"speculative_config": drafts_of("draft_model", model)} if life.drafts else {}
    connector = loopback.settings("a life", waits=life.waits)
    arguments = {**life.arguments, **more, "kv_transfer_config": connector}
    with Engine(model, runner=life.runner, canary=canary, asynchronous=life.asynchronous, **arguments) as engine:
        Traffic(seed=3, documents=(70, 130, 200), aborts=0.08).serve(engine, life.steps)
        brought = loopback.STORES["a life"].brought
        if canary is None:
            return engine.outputs, brought, None
        session = engine.session
        session.manager.flush()
        assert session.manager.guard.failures == {}
        assert [report.sentence for report in session.manager.reports] == []
        assert session.left_out == 0
        return engine.outputs, brought, session.manager.summary()


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] if n in LONG else []) for n in LIVES])
def test_a_healthy_life_is_silent_and_says_how_much_came_from_outside(model: Model, name: str) -> None:
    life = LIVES[name]
    folder = model(life.kind)
    without, _, _ = serve(folder, life, None)
    outputs, brought, summary = serve(folder, life, life.canary)
    assert outputs == without
    assert brought >= 32
    assert summary.violations == summary.discarded == summary.skipped == summary.unverified == 0
    assert summary.positions_verified == summary.positions_relied_on > 5000
    # Of requests that are given up while they wait nobody relies on anything.
    assert 0 < summary.uncovered <= brought * life.groups


@pytest.fixture
def waiting(model: Model) -> Iterator[Callable[[bool], tuple[Engine, Any]]]:
    """Return what makes an engine with a connector that has kept a prompt of five blocks, all of it gone from here."""
    from kv_canary.difftest.stress.vllm import loopback

    engines: list[Engine] = []

    def make(waits: bool, **more: Any) -> tuple[Engine, Any]:
        connector = loopback.settings("faults", waits=waits)
        engine = Engine(model("llama"), canary={"seals": "layer"}, kv_transfer_config=connector, **ALL, **more)
        engines.append(engine)
        engine.submit("first", DOCUMENT, new_tokens=2)
        engine.run()
        return engine, loopback.STORES["faults"]

    yield make
    for engine in engines:
        engine.close()


DOCUMENT = [(7 * n) % VOCABULARY + 3 for n in range(170)]


def found(engine: Engine) -> list[str]:
    """Return what the incidents say."""
    engine.session.manager.flush()
    assert engine.session.manager.guard.failures == {}
    return [str(incident) for incident in engine.session.manager.incidents]


@pytest.mark.parametrize("waits", [True, False])
def test_kv_that_lands_after_it_was_said_to_be_there_is_found(waiting: Any, waits: bool) -> None:
    engine, store = waiting(waits)
    store.fault = "late"
    engine.submit("second", DOCUMENT, new_tokens=12)
    engine.run()
    assert store.brought == 160
    (said,) = found(engine)
    assert "second" in said
    assert store.hurt in said


@pytest.mark.parametrize("waits", [True, False])
def test_kv_that_is_written_over_blocks_that_others_read_is_found(waiting: Any, waits: bool) -> None:
    engine, store = waiting(waits)
    engine.submit("victim", [9, *DOCUMENT[:100]], new_tokens=40)
    for _ in range(6):
        engine.step()
    [running] = engine.scheduler.running
    store.fault, store.victim = "stray", engine.scheduler.kv_cache_manager.get_block_ids(running.request_id)[0][1]
    engine.submit("second", DOCUMENT, new_tokens=4)
    engine.run()
    said = found(engine)
    assert said
    assert all("victim" in each for each in said)


@pytest.mark.parametrize("waits", [True, False])
def test_what_is_brought_may_come_behind_what_is_found_here(model: Model, waits: bool) -> None:
    from kv_canary.difftest.stress.vllm import loopback

    connector = loopback.settings("behind", waits=waits)
    with Engine(model("llama"), canary={"check_inputs": "1"}, kv_transfer_config=connector) as engine:
        # The last of these takes the ends of the first one's blocks: the longest unused, from the end on.
        for name, prompt in (("first", DOCUMENT), ("second", range(3, 503)), ("third", range(500, 710))):
            engine.submit(name, list(prompt), new_tokens=2)
            engine.run()
        before = loopback.STORES["behind"].brought
        engine.submit("again", DOCUMENT, new_tokens=8)
        engine.run()
        assert loopback.STORES["behind"].brought - before == 32
        assert found(engine) == []
        summary = engine.session.manager.summary()
        assert summary.uncovered == loopback.STORES["behind"].brought
        assert summary.positions_verified == summary.positions_relied_on


def test_requests_that_are_given_up_while_they_wait_leave_nothing_behind(waiting: Any) -> None:
    engine, store = waiting(True)
    for n in range(4):
        engine.submit(f"given up {n}", DOCUMENT, new_tokens=4)
        engine.step()
        engine.abort(f"given up {n}")
    engine.submit("last", DOCUMENT, new_tokens=6)
    engine.run()
    assert store.brought > 160
    assert found(engine) == []
    assert engine.session.manager.summary().uncovered == 160


@pytest.mark.parametrize("is_given_up", [True, False])
def test_what_was_brought_for_a_request_that_has_not_come_is_taken_in_as_it_is_found(
    model: Model, monkeypatch: pytest.MonkeyPatch, is_given_up: bool
) -> None:
    """It is in the prefix cache once it is there, whether its request is given up, or has to wait for room."""
    from kv_canary.difftest.stress.vllm import loopback

    monkeypatch.setattr(loopback, "_DELAY", 40)
    connector = loopback.settings("held up", waits=True)
    with Engine(model("llama"), canary={"seals": "layer"}, kv_transfer_config=connector) as engine:
        serve_held_up(engine, DOCUMENT, is_given_up=is_given_up)
        assert loopback.STORES["held up"].brought == 160
        assert found(engine) == []
        told = {name.partition("-")[0]: tokens for name, tokens in engine.outputs.items()}
        assert told["first"] == told["second"]
        assert told.get("held up") == (None if is_given_up else told["first"])
        summary = engine.session.manager.summary()
        assert (summary.unverified, summary.uncovered) == (160, 0) if is_given_up else (0, 160)
        assert summary.positions_verified == summary.positions_relied_on


# Without the wait, asynchronous scheduling does not get over it in vLLM 0.32 itself (vllm#49252); V2: see test_wild.py.
@pytest.mark.parametrize(("waits", "asynchronous"), [(True, False), (True, True), (False, False)])
def test_what_could_not_be_brought_is_computed_and_nobody_is_accused(
    waiting: Any, waits: bool, asynchronous: bool
) -> None:
    engine, store = waiting(waits, asynchronous=asynchronous)
    store.fault = "fails"
    engine.submit("second", DOCUMENT, new_tokens=6)
    engine.run()
    engine.submit("third", DOCUMENT, new_tokens=6)
    engine.run()
    assert store.hurt
    assert found(engine) == []
    told = {name.partition("-")[0]: tokens for name, tokens in engine.outputs.items()}
    assert told["second"] == told["third"]
    summary = engine.session.manager.summary()
    assert summary.positions_verified == summary.positions_relied_on


def test_a_request_that_asks_again_waits_for_nothing_that_it_was_promised() -> None:
    from kv_canary.engines.vllm.told import _Watched

    connector = SimpleNamespace(
        get_num_new_matched_tokens=lambda request, computed: None, update_state_after_alloc=lambda *arguments: None
    )
    watched, request = _Watched(connector), SimpleNamespace(request_id="a")
    scheduler = SimpleNamespace(requests={"a": request})
    blocks = SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],))
    connector.get_num_new_matched_tokens(request, 32)
    connector.update_state_after_alloc(request, blocks, 64)
    first = watched.take(scheduler, [])
    assert {name: (b.start, b.end, b.blocks) for name, b in first["coming"].items()} == {"a": (32, 96, [[1, 2, 3]])}
    # It failed: what is found here by then is no connector's.
    connector.get_num_new_matched_tokens(request, 96)
    connector.update_state_after_alloc(request, blocks, 0)
    assert watched.take(scheduler, ["a"]) == {"here": {}, "now": {}, "coming": {}}


def test_what_the_scheduler_cannot_tell_is_taken_in_anew_and_reported_by_nobody(
    waiting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the canary's own part fails, the engine goes on, and nobody is accused."""
    from kv_canary.engines.vllm.told import _Watched

    engine, _ = waiting(True)
    engine.session.manager.guard.contains = True

    def fail(*_: Any) -> None:
        raise RuntimeError("of the canary's own")

    monkeypatch.setattr(_Watched, "take", fail)
    engine.submit("second", DOCUMENT, new_tokens=6)
    engine.run()
    engine.session.manager.flush()
    assert engine.session.manager.guard.failures
    assert len(engine.session.manager.incidents) == 0
    assert len(next(tokens for name, tokens in engine.outputs.items() if name.startswith("second"))) == 6


def test_what_a_scheduler_raises_is_said_by_kind_and_place_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process has no canary that could say whether texts are to be left out."""
    from kv_canary.engines.vllm import told

    class Scheduler:
        @property
        def connector(self) -> None:
            raise ValueError("request somebody@example.org")

    monkeypatch.setattr(told, "_failed", set())
    told.follow(Scheduler())
    assert "what a connector brings could not be followed" in caplog.text
    assert f'File "{__file__}", line ' in caplog.text
    assert "ValueError" in caplog.text
    assert "somebody" not in caplog.text
