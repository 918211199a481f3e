"""vLLM's own engine with a canary: its outputs are what they are without one, and a healthy life is a silent one."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from kv_canary.difftest.stress.vllm.engine import Engine, Runner, Traffic, drafts_of, save_model

from .models import picture, save_model_of_pictures, tokenizer

Model = Callable[[str], str]


@dataclass(frozen=True, kw_only=True)
class Life:
    """A life of an engine, and what has to come up in it.

    Args:
        kind: of the model.
        runner: of the model.
        steps: in which requests come.
        canary: settings.
        arguments: of vLLM's `LLM`.
        asynchronous: see `Engine`.
        drafter: of a model, by vLLM's name; "" for none.
        traffic: arguments of `Traffic`.
        hits, pending, preempted, drafts: whether prefixes are hit, hit in the step that writes them, requests put off,
            tokens drafted.
        inputs: whether what the model is given is held against the requests' own tokens, so that no step repeats the
            one before it.
    """

    kind: str = "llama"
    runner: Runner = "V1"
    steps: int = 60
    canary: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    asynchronous: bool = False
    drafter: Literal["", "draft_model", "eagle"] = ""
    traffic: Mapping[str, Any] = field(default_factory=dict)
    hits: bool = True
    pending: bool = True
    preempted: bool = True
    drafts: bool = False
    inputs: bool = False


def stopped(_: random.Random) -> Mapping[str, Any]:
    """Return arguments of sampling with many tokens that stop a request, at places that nobody knows before."""
    return {"stop_token_ids": list(range(100, 120))}


WIDE = {"num_gpu_blocks_override": 70}
LIVES = {
    "V1": Life(steps=40, canary={"seals": "layer"}),
    "V1, what it is given": Life(inputs=True),
    "V1, no prefix cache": Life(arguments={"enable_prefix_caching": False}, hits=False, pending=False),
    "V1, windows": Life(kind="mistral", preempted=False),
    "V1, three groups over one memory": Life(kind="gemma3", arguments=WIDE, preempted=False),
    "V1, asynchronous": Life(asynchronous=True, traffic={"sampling": stopped}, preempted=False),
    "V1, a draft model": Life(steps=25, drafter="draft_model", drafts=True, preempted=False),
    "V1, asynchronous, a draft model": Life(
        steps=25, drafter="draft_model", drafts=True, asynchronous=True, traffic={"sampling": stopped}, preempted=False
    ),
    # A block is only hit where the one behind it was written too.
    "V1, EAGLE": Life(steps=25, drafter="eagle", drafts=True, preempted=False, pending=False),
    "V2": Life(runner="V2", steps=40),
    "V2, what it is given": Life(runner="V2", steps=25, inputs=True, preempted=False),
    "V2, a draft model": Life(runner="V2", steps=8, drafter="draft_model", drafts=True, preempted=False),
    "V2, asynchronous, EAGLE": Life(
        runner="V2", steps=8, drafter="eagle", drafts=True, asynchronous=True, preempted=False, pending=False
    ),
    "V2, windows": Life(kind="mistral", runner="V2", steps=20, preempted=False),
    "V2, three groups over one memory": Life(kind="gemma3", runner="V2", steps=25, arguments=WIDE, preempted=False),
    "V2, asynchronous": Life(runner="V2", steps=25, asynchronous=True, traffic={"sampling": stopped}, preempted=False),
}


@dataclass
class Seen:
    """What came up in a life."""

    hits: int = 0
    preempted: int = 0
    drafts: int = 0


def serve(model: str, life: Life, canary: Mapping[str, str] | None) -> tuple[dict[str, list[int]], Seen, Any]:
    """Live a life; return its outputs, what came up, and the canary's summary."""
    seen = Seen()
    more = {"speculative_config": drafts_of(life.drafter, model)} if life.drafter else {}
    settings = {**life.arguments, **more}
    with Engine(model, runner=life.runner, canary=canary, asynchronous=life.asynchronous, **settings) as engine:
        scheduler = engine.scheduler
        schedule = scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            seen.hits += sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
            seen.preempted += len(output.preempted_req_ids or ())
            seen.drafts += sum(map(len, output.scheduled_spec_decode_tokens.values()))
            return output

        scheduler.schedule = watched
        Traffic(**{"seed": 3, **life.traffic}).serve(engine, life.steps)
        if canary is None:
            return engine.outputs, seen, None
        session = engine.session
        session.manager.flush()
        assert session.off == ""
        assert session.manager.guard.failures == {}
        assert [report.sentence for report in session.manager.reports] == []
        return engine.outputs, seen, session.manager.summary()


# Lives whose parts come together in others.
LONG = (
    "V1, a draft model",
    "V1, EAGLE",
    "V1, three groups over one memory",
    "V1, no prefix cache",
    "V2, a draft model",
    "V2, asynchronous",
    "V2, what it is given",
    "V2, windows",
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] if n in LONG else []) for n in LIVES])
def test_a_healthy_life_is_silent_and_generates_the_same(model: Model, name: str, monkeypatch) -> None:
    from kv_canary.engines.vllm.blocks import Blocks
    from kv_canary.runtime.forward import SingleForwardManager

    life, pending, find = LIVES[name], [0], Blocks.pending
    repeated, repeat = [0], SingleForwardManager.repeat

    def counted(self: Blocks, *args: Any) -> Any:
        found = find(self, *args)
        pending[0] += 0 if found is None else int(found.sum())
        return found

    def told(self: SingleForwardManager, *args: Any, **kwargs: Any) -> bool:
        repeats = repeat(self, *args, **kwargs)
        repeated[0] += repeats
        return repeats

    monkeypatch.setattr(Blocks, "pending", counted)
    monkeypatch.setattr(SingleForwardManager, "repeat", told)
    # With drafts no step repeats another, and it takes nothing away.
    folder, checks = model(life.kind), life.inputs or life.drafts
    without, _, _ = serve(folder, life, None)
    outputs, seen, summary = serve(folder, life, {"check_inputs": str(int(checks)), **life.canary})
    assert outputs == without
    assert len(outputs) > 5
    assert summary.violations == summary.discarded == summary.skipped == summary.unverified == 0
    assert summary.positions_verified == summary.positions_relied_on > 5000
    assert bool(seen.hits) == life.hits
    assert bool(pending[0]) == life.pending
    assert seen.preempted or not life.preempted
    assert bool(seen.drafts) == life.drafts
    assert (repeated[0] > 5) != checks


def test_requests_of_one_token_are_held_against_their_seals_when_they_end(model: Model) -> None:
    with Engine(model("llama"), canary={"seals": "layer"}) as engine:
        for n in range(6):
            engine.submit(f"one {n}", [5 + n, *range(40, 100)], new_tokens=1)
        engine.run()
        engine.submit("last", list(range(200, 240)), new_tokens=4)
        engine.run()
        session = engine.session
        session.manager.flush()
        summary = session.manager.summary()
        assert summary.violations == 0
        # Of requests of one token nobody ever reads what was written last: their ends are looked at all the same.
        assert summary.audits.completed >= 6


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_models_that_embed_are_watched_and_answer_the_same(tmp_path: Path, runner: Runner) -> None:
    folder = save_model(tmp_path / "llama")
    tokenizer().save_pretrained(folder)
    draw = random.Random(1)
    shared = [draw.randrange(3, 900) for _ in range(130)]
    prompts = [
        shared[: draw.choice([40, 70, 130])] + draw.sample(range(3, 900), draw.randrange(1, 60)) for _ in "x" * 12
    ]
    answers = []
    for canary in (None, {"seals": "layer", "check_inputs": "1"}):
        with Engine(folder, runner=runner, canary=canary, embeds=True, enable_prefix_caching=True) as engine:
            for n, prompt in enumerate(prompts):
                engine.submit(f"r{n}", prompt)
            engine.run()
            answers.append(engine.outputs)
            if canary is not None:
                assert_is_clean(engine, at_least=1000)
    assert answers[0] == answers[1]
    assert len(answers[0]) == 12


@pytest.mark.parametrize("runner", ["V1", pytest.param("V2", marks=pytest.mark.long)])
def test_models_that_are_shown_pictures_are_watched_and_answer_the_same(tmp_path: Path, runner: Runner) -> None:
    folder, text = save_model_of_pictures(tmp_path / "blip"), list(range(10, 70))
    answers = []
    for canary in (None, {"seals": "layer", "check_inputs": "1"}):
        with Engine(folder, runner=runner, canary=canary, skip_tokenizer_init=False) as engine:
            # The same text behind other pictures, and the same picture before other text: hits and none.
            for n, (seed, end) in enumerate([(0, 35), (1, 60), (0, 60), (1, 40), (0, 60), (2, 60)]):
                engine.submit(f"r{n}", text[:end], new_tokens=8, picture=picture(seed))
                if n % 2:
                    engine.run()
            engine.submit("of text alone", text, new_tokens=8)
            engine.run()
            answers.append(engine.outputs)
            if canary is not None:
                assert_is_clean(engine, at_least=1000)
    assert answers[0] == answers[1]
    # Pictures count.
    assert answers[0]["r1"] != answers[0]["r2"] == answers[0]["r4"] != answers[0]["r5"]


def assert_is_clean(engine: Engine, *, at_least: int) -> None:
    session = engine.session
    session.manager.flush()
    summary = session.manager.summary()
    assert session.manager.guard.failures == {}
    assert [report.sentence for report in session.manager.reports] == []
    assert summary.skipped == summary.unverified == session.left_out == 0
    assert summary.positions_verified == summary.positions_relied_on > at_least
