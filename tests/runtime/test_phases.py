"""Brackets around forwards and steps: what is out of order is refused, and what raises leaves nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import kv_canary as kc
from kv_canary.difftest.simulator import Action, EngineConfig, GroupConfig
from kv_canary.difftest.simulator.actions import opening, random_action
from kv_canary.difftest.simulator.canary_engine import CanaryEngine
from kv_canary.difftest.strategies.domain import seeds
from kv_canary.difftest.strategies.engine import engine_configs
from kv_canary.runtime.launches import GroupLaunches

from .engine import Engine, full_engine

CALLS = ("begin", "head", "tail", "end", "abort")
# What a forward may do where it stands, and where it stands then.
MODEL = {
    "idle": {"begin": "begun", "abort": "idle"},
    "begun": {"head": "head", "abort": "idle"},
    "head": {"tail": "tail", "abort": "idle"},
    "tail": {"end": "idle", "abort": "idle"},
}


def test_every_sequence_of_calls_is_as_the_model_says() -> None:
    engine = full_engine()
    a = engine.add("a", 8)
    engine.step((a, 4))
    batch = engine.batch((a, 1))
    calls: dict[str, Callable[[], None]] = {
        "begin": lambda: engine.forward.begin(batch),
        **{name: getattr(engine.forward, name) for name in CALLS[1:]},
    }
    for sequence in itertools.chain.from_iterable(itertools.product(CALLS, repeat=n) for n in range(1, 6)):
        standing: str | None = "idle"
        for name in sequence[:-1]:
            standing = MODEL[standing].get(name) if standing else None
        # A refusal changes nothing, so that a shorter sequence has shown what follows one.
        if standing is None:
            continue
        for name in sequence[:-1]:
            calls[name]()
        steps = engine.manager.step
        if sequence[-1] in MODEL[standing]:
            calls[sequence[-1]]()
        else:
            with pytest.raises(RuntimeError, match=f"forward target: {sequence[-1]} must come when .* when {standing}"):
                calls[sequence[-1]]()
            # The forward can go on from where it stood.
            assert engine.manager.step == steps
            for name in ("head", "tail", "end")[("begun", "head", "tail", "idle").index(standing) :]:
                calls[name]()
        engine.forward.abort()
        engine.run(batch)
    assert [r.sentence for r in engine.found()] == []


@dataclass
class Bracket:
    """A forward of two in one manager, and a batch for it."""

    forward: kc.SingleForwardManager
    batch: kc.ForwardBatch


def two_forwards() -> tuple[Engine, Bracket, Bracket]:
    engine = full_engine()
    a, b = engine.add("a", 8), engine.add("b", 8)
    engine.step((a, 4), (b, 4))
    first = Bracket(engine.forward, engine.batch((a, 1)))
    return engine, first, Bracket(engine.manager.forward("other"), engine.batch((b, 1)))


def run(engine: Engine, bracket: Bracket) -> None:
    with bracket.forward.around(bracket.batch):
        engine.write_bytes(bracket.batch)


@pytest.mark.parametrize("phases", [1, 2, 3])
@pytest.mark.parametrize("in_a_step", [True, False])
def test_a_forward_inside_another_is_refused(phases: int, in_a_step: bool) -> None:
    engine, first, other = two_forwards()

    def interleave() -> None:
        first.forward.begin(first.batch)
        for phase in ("head", "tail")[: phases - 1]:
            getattr(first.forward, phase)()
            if phase == "head":
                engine.write_bytes(first.batch)
        refused = pytest.raises(RuntimeError, match=r"forward other: begin .* no forward is under way.*forward target")
        with refused:
            other.forward.begin(other.batch)
        # Neither is the worse for it.
        for phase in ("head", "tail")[phases - 1 :]:
            getattr(first.forward, phase)()
        first.forward.end()
        run(engine, other)

    if in_a_step:
        with engine.manager.one_step():
            interleave()
    else:
        interleave()
    assert engine.manager.step == (2 if in_a_step else 3)
    assert [r.sentence for r in engine.found()] == []
    assert engine.manager.summary().watching == "complete"


def test_every_interleaving_of_two_forwards_is_as_the_model_says() -> None:
    names = ("begin", "head", "tail", "end")
    for order in sorted(set(itertools.permutations((0,) * 4 + (1,) * 4))):
        _, *brackets = two_forwards()
        done = [0, 0]
        refused = False
        for which in order:
            bracket, name = brackets[which], names[done[which]]
            must_refuse = name == "begin" and 0 < done[1 - which] < 4
            arguments = (bracket.batch,) if name == "begin" else ()
            if must_refuse:
                with pytest.raises(RuntimeError, match="no forward is under way"):
                    bracket.forward.begin(*arguments)
                refused = True
                break
            getattr(bracket.forward, name)(*arguments)
            done[which] += 1
        assert refused == (order not in ((0,) * 4 + (1,) * 4, (1,) * 4 + (0,) * 4))


def test_nothing_else_that_needs_records_of_all_slots_runs_inside_a_forward() -> None:
    engine, first, other = two_forwards()
    first.forward.begin(first.batch)
    for call, name in ((engine.manager.sweep, "sweep"), (engine.manager.scrub, "sweep")):
        with pytest.raises(RuntimeError, match=f"{name} must come when no forward is under way, got it inside"):
            call()
    tables = {"full": engine.tables["full"]}
    for forward, said in ((other.forward, "no forward is under way"), (first.forward, "the forward is idle")):
        capturing = forward.capturing(requests=1, tokens=1, tables=tables)
        with pytest.raises(RuntimeError, match=f"capturing must come when {said}"):
            capturing.__enter__()
    first.forward.abort()
    engine.manager.sweep()
    assert engine.found() == []


def test_a_step_inside_a_step_or_a_forward_is_refused() -> None:
    engine, first, _ = two_forwards()
    nested = engine.manager.one_step()
    with engine.manager.one_step(), pytest.raises(RuntimeError, match="a step must begin when none is under way"):
        nested.__enter__()
    nested = engine.manager.one_step()
    with (
        first.forward.around(first.batch),
        pytest.raises(RuntimeError, match="a step must begin when none is under way"),
    ):
        nested.__enter__()
    run(engine, first)
    assert [r.sentence for r in engine.found()] == []


def test_a_step_that_ends_inside_a_forward_is_refused_and_the_forward_given_up() -> None:
    engine, first, other = two_forwards()
    with pytest.raises(RuntimeError, match="the end of a step must come when no forward"), engine.manager.one_step():
        first.forward.begin(first.batch)
    with pytest.raises(RuntimeError, match="head must come when the forward is begun, got it when idle"):
        first.forward.head()
    run(engine, other)
    run(engine, first)
    assert [r.sentence for r in engine.found()] == []


def test_what_a_step_raises_is_not_hidden_by_the_forward_that_it_cut_short() -> None:
    engine, first, other = two_forwards()

    def step() -> None:
        with engine.manager.one_step():
            first.forward.begin(first.batch)
            raise KeyError("the engine's own")

    with pytest.raises(KeyError, match="the engine's own"):
        step()
    run(engine, other)
    run(engine, first)
    assert [r.sentence for r in engine.found()] == []
    summary = engine.manager.summary()
    assert summary.watching == "complete"


class Failure(Exception):  # noqa: N818 - what the tests throw, and nothing else
    """Thrown on purpose."""


def thrower(*_: object, **__: object) -> None:
    raise Failure


def in_tokens(engine: Engine, batch: kc.ForwardBatch, monkeypatch: pytest.MonkeyPatch) -> kc.ForwardBatch:
    last = dataclasses.replace(batch.requests[-1], tokens=thrower)
    return dataclasses.replace(batch, requests=[*batch.requests[:-1], last])


def in_method(owner: str, name: str) -> Callable[..., kc.ForwardBatch]:
    def spoil(engine: Engine, batch: kc.ForwardBatch, monkeypatch: pytest.MonkeyPatch) -> kc.ForwardBatch:
        holders = {"forward": engine.forward, "launches": GroupLaunches, "state": engine.manager.state}
        holder = {**holders, "inputs": engine.forward._inputs}[owner]
        monkeypatch.setattr(holder, name, thrower)
        return batch

    return spoil


class Perturbing:
    """A fault injector that fails before or behind the forward."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __call__(self, engine: Engine, batch: kc.ForwardBatch, monkeypatch: pytest.MonkeyPatch) -> kc.ForwardBatch:
        monkeypatch.setattr(engine.manager, "perturber", self)
        return batch

    def before(self, *_: object, **__: object) -> None:
        if self.where == "before":
            raise Failure

    def after(self, *_: object, **__: object) -> None:
        if self.where == "after":
            raise Failure

    def restore(self) -> None:
        pass


@pytest.mark.parametrize("in_a_step", [False, True])
@pytest.mark.parametrize(
    "spoil",
    [
        in_tokens,
        in_method("inputs", "post"),
        Perturbing("before"),
        Perturbing("after"),
        in_method("state", "advance"),
        in_method("forward", "_prepare"),
        in_method("launches", "_verify_prefixes"),
        in_method("launches", "_verify_resolved"),
        in_method("launches", "_write"),
    ],
)
def test_what_raises_inside_a_forward_leaves_it_ready(
    spoil: Callable[..., kc.ForwardBatch], in_a_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = full_engine(stride=2)
    a, b = engine.add("a", 60), engine.add("b", 60)
    engine.step((a, 20), (b, 17))
    engine.step((a, 1), (b, 1))
    batch = engine.batch((a, 1), (b, 1))
    steps = engine.manager.step
    with monkeypatch.context() as patch:
        spoilt = spoil(engine, batch, patch)
        step = engine.manager.one_step() if in_a_step else contextlib.nullcontext()
        with pytest.raises((Failure, OverflowError)), step:
            engine.run(spoilt)
    # The step is over, whether it was an explicit one or not: the next one is another.
    assert engine.manager.step == steps + 1
    engine.run(batch)
    a.cached += 1
    b.cached += 1
    assert engine.manager.step == steps + 2
    engine.manager.flush()
    before = engine.manager.summary()
    # All of what the forward given up may not have verified was verified by the one behind it.
    engine.step((a, 1), (b, 1))
    assert [r.sentence for r in engine.found()] == []
    after = engine.manager.summary()
    assert (before.watching, after.watching) == ("complete", "complete")
    assert after.positions_relied_on - before.positions_relied_on == a.cached + b.cached - 2


def test_the_forward_behind_one_that_was_given_up_verifies_everything() -> None:
    engine = full_engine(stride=4)
    a = engine.add("a", 100)
    engine.step((a, 64))
    engine.manager.flush()
    assert engine.manager.summary().positions_verified == 0
    # It is admitted again, and its forward fails before HEAD.
    b = engine.add("b", a.tokens[:64] + [5, 6, 7, 8])
    engine.tables["full"][b.row, :64] = engine.tables["full"][a.row, :64]
    b.cached = 64
    batch = engine.batch((b, 1))
    engine.forward.begin(batch)
    engine.forward.abort()
    engine.run(batch)
    b.cached += 1
    engine.manager.flush()
    assert engine.manager.summary().positions_verified == 64
    engine.step((b, 1))
    engine.manager.flush()
    assert engine.manager.summary().positions_verified < 64 + 65


def test_a_cache_walk_that_raises_loses_no_step() -> None:
    engine = full_engine(sweep_every=1)
    a = engine.add("a", 20)
    engine.step((a, 4))
    engine.manager._steps._sweeper.cached = thrower
    for _ in range(2):
        with pytest.raises(Failure):
            engine.step((a, 1))
        a.cached += 1
    engine.manager._steps._sweeper.cached = lambda: ()
    engine.step((a, 1))
    assert engine.found() == []
    summary = engine.manager.summary()
    assert summary.watching == "complete"
    assert summary.positions_verified == summary.positions_relied_on == 4 + 5 + 6


class Fragile(CanaryEngine):
    """An engine whose next forward fails where `fails` says, if it says so: at which call of it, before or behind."""

    fails: tuple[str, int] = ("", 0)

    def forward_batch(self, extends: Mapping[Any, int]) -> kc.ForwardBatch:
        batch = super().forward_batch(extends)
        if self.fails[0] != "tokens":
            return batch
        return dataclasses.replace(batch, requests=[dataclasses.replace(r, tokens=thrower) for r in batch.requests])

    def _step_calls(self, extends: Mapping[Any, int], *, padding: int) -> Iterator[Any]:
        where, count = self.fails
        forward = self.manager.forward()
        with pytest.MonkeyPatch.context() as patch:
            if where in ("_prepare", "head", "tail", "end"):
                patch.setattr(forward, where, at_call(count, getattr(forward, where)))
            if where in (*LAUNCHES, *LAUNCHES_OF_RINGS):
                patch.setattr(GroupLaunches, where, at_call(count, getattr(GroupLaunches, where)))
            if where == "model":
                self.during_forward = thrower
            if where == "walk":
                patch.setattr(self.manager._steps._sweeper, "cached", thrower)
            try:
                yield from super()._step_calls(extends, padding=padding)
            finally:
                self.during_forward = None


def at_call(count: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, but throw at its n-th call, before or behind what it does."""
    calls = itertools.count(1)

    def call(*arguments: Any, **options: Any) -> Any:
        if next(calls) != count // 2 + 1:
            return function(*arguments, **options)
        if count % 2:
            function(*arguments, **options)
        raise Failure

    return call


LAUNCHES, LAUNCHES_OF_RINGS = ("_verify_prefixes", "_verify_resolved", "_write"), ("_plan", "_verify")
POINTS = ("tokens", "_prepare", *LAUNCHES, "head", "tail", "model", "walk")


def survive(engine: Fragile, action: Action) -> bool:
    """Let `action` happen; if its forward fails, do what an engine does then, and return True."""
    try:
        engine.run(action)
    except Failure:
        for request in list(engine.running):
            # What a ring held of the window may be overwritten: such a request has to begin anew.
            for _ in engine.retract(request) if engine.rings else engine.trim(request):
                pass
        return True
    return False


@settings(max_examples=max(1, settings.default.max_examples // 8), phases=[Phase.explicit, Phase.generate])
@given(
    config=engine_configs(max_lens=(24, 40)),
    seed=seeds,
    stride=st.sampled_from([1, 3]),
    records=st.sampled_from(["one", "head_and_tail"]),
    bytes_at_tail=st.booleans(),
    tokens=st.booleans(),
    quarantine=st.booleans(),
)
def test_no_failure_of_any_forward_makes_a_healthy_engine_guilty(
    config: EngineConfig,
    seed: int,
    stride: int,
    records: Any,
    bytes_at_tail: bool,
    tokens: bool,
    quarantine: bool,
) -> None:
    # A shared page that a failed forward has half rewritten is no healthy engine's. Owners are serial, as is promised.
    config = dataclasses.replace(config, rewrite_matched=False, serial_owners=True)
    canary = kc.CanaryConfig(
        backend="reference",
        stride=stride,
        records=records,
        verify_bytes_at_tail=bytes_at_tail,
        check_tokens=tokens,
        quarantine=quarantine,
        sweep_every=1 + seed % 3,
    )
    engine = Fragile(config, canary=canary)
    rng, chooser = np.random.default_rng(seed), random.Random(seed)
    actions = opening(rng, longest=config.max_len)
    actions += [random_action(rng, longest=config.max_len) for _ in range(12)]
    for action in actions:
        fails = chooser.choice((*POINTS, *LAUNCHES_OF_RINGS)), chooser.randrange(6)
        engine.fails = fails if chooser.random() < 0.5 else ("", 0)
        survive(engine, action)
        engine.fails = ("", 0)
    # And it goes on: everything in the cache is looked at once more.
    for _ in range(2):
        survive(engine, Action(kind="mixed", amount=3))
    engine.manager.sweep()
    engine.manager.flush()
    assert [r.sentence for r in engine.manager.reports] == []
    assert engine.manager.summary().watching == "complete"


@pytest.mark.parametrize("where", POINTS)
def test_a_fault_behind_a_failure_is_found(where: str) -> None:
    """What a failure left behind does not blind the canary either."""
    group = GroupConfig(kind="full", num_slots=101, k_source=source(101))
    config = EngineConfig(groups=(group,), page_size=1, num_pages=100, first_slot=1, max_rows=4, max_len=40)
    engine = Fragile(config, canary=kc.CanaryConfig(backend="reference", sweep_every=1))
    engine.arrive(stem=0, shared=0, fresh=20)
    for kind in ("arrive", "prefill", "decode"):
        engine.run(Action(kind=kind, amount=30))
    engine.fails = (where, 0)
    assert survive(engine, Action(kind="decode"))
    engine.fails = ("", 0)
    assert [r.sentence for r in engine.manager.reports] == []
    [request, *_] = engine.running
    slot = int(engine.table[request.row, 7])
    layer, first, _ = group.k_source.coverage(7)
    group.k_source.layers[layer][slot, first] ^= 1
    engine.run(Action(kind="decode"))
    engine.manager.flush()
    found = {(r.reasons, r.tag, r.slot) for r in engine.manager.reports}
    assert (("K",), "HEAD_FULL", slot) in found
    assert {r.slot for r in engine.manager.reports} == {slot}


def source(num_slots: int) -> kc.KvSource:
    layers = tuple(torch.randint(0, 256, (num_slots, 32), dtype=torch.uint8) for _ in range(2))
    return kc.KvSource(layers=layers, page_size=1, bytes_per_token=32, read_bytes=32)
