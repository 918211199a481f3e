"""The actions that can happen to an engine, as values that can be drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from kv_canary.difftest.simulator.engine import Engine
from kv_canary.difftest.simulator.op_calls import Call
from kv_canary.difftest.simulator.requests import Request


@dataclass(frozen=True, kw_only=True)
class Action:
    """An action to happen.

    Args:
        kind: one of ACTIONS.
        pick: whom it happens to, counted round; or which text a prompt begins with.
        amount: how many tokens or pages.
        more: how many of those are shared, accepted or padding.
    """

    kind: str
    pick: int = 0
    amount: int = 1
    more: int = 0


def perform(engine: Engine, action: Action) -> Iterator[Call]:
    """Perform `action`; yield the op calls that go with it, each to be made before the next is asked for."""
    yield from ACTIONS[action.kind](engine, action)


def _arrive(engine: Engine, action: Action) -> Iterator[Call]:
    """A request arrives, or one that waits gets its turn."""
    if not engine.waiting or action.pick % 4:
        shared = min(action.more, action.amount)
        engine.arrive(stem=action.pick % 2, shared=shared, fresh=action.amount - shared, identity=action.pick // 2 % 2)
    for request in list(engine.waiting):
        engine.admit(request)
    yield from ()


def _prefill(engine: Engine, action: Action) -> Iterator[Call]:
    """Requests with tokens left get a chunk of them in."""
    work = {r: min(engine.remaining(r), max(action.amount, 1)) for r in engine.running if _prefills(engine, r)}
    yield from engine.step(work, padding=_padding(action)) if work else _mixed(engine, action)


def _decode(engine: Engine, action: Action) -> Iterator[Call]:
    """Requests that are in get one token more."""
    work = {r: 1 for r in engine.running if not _prefills(engine, r)}
    yield from engine.step(work, padding=_padding(action)) if work else _mixed(engine, action)


def _mixed(engine: Engine, action: Action) -> Iterator[Call]:
    """Chunks and decodes in one batch."""
    chunk = max(action.amount, 1)
    work = {r: min(engine.remaining(r), chunk) if _prefills(engine, r) else 1 for r in engine.running}
    yield from engine.step(work, padding=_padding(action))


def _speculate(engine: Engine, action: Action) -> Iterator[Call]:
    """Requests that are in get drafts, some of which are rejected. Rings have no room for drafts."""
    drafts = 2 + action.amount % 6
    work = {r: drafts for r in engine.running if not _prefills(engine, r) and not engine.rings}
    accepted = {r: 1 + (action.more + i) % drafts for i, r in enumerate(work)}
    yield from engine.step(work, accepted=accepted, padding=_padding(action)) if work else _mixed(engine, action)


def _idle(engine: Engine, action: Action) -> Iterator[Call]:
    """A step of nothing, or of padding only."""
    yield from engine.step({}, padding=_padding(action))


def _on_request(function: Callable[[Engine, Request], Iterator[Call]]) -> Callable[[Engine, Action], Iterator[Call]]:
    def act(engine: Engine, action: Action) -> Iterator[Call]:
        if engine.running:
            yield from function(engine, engine.running[action.pick % len(engine.running)])

    return act


def _flush(engine: Engine, action: Action) -> Iterator[Call]:
    engine.flush()
    yield from ()


ACTIONS: Mapping[str, Callable[[Engine, Action], Iterator[Call]]] = {
    "arrive": _arrive,
    "prefill": _prefill,
    "decode": _decode,
    "mixed": _mixed,
    "speculate": _speculate,
    "idle": _idle,
    "finish": _on_request(lambda engine, request: engine.finish(request)),
    "retract": _on_request(lambda engine, request: engine.retract(request)),
    "fork": _on_request(lambda engine, request: engine.fork(request)),
    "compact": _on_request(lambda engine, request: engine.compact(request)),
    "evict": lambda engine, action: engine.evict(action.amount),
    "leave_windows": lambda engine, action: engine.leave_windows(cached_too=True),
    "flush": _flush,
}


# Those that run the model, and end a round.
STEPS = frozenset({"prefill", "decode", "mixed", "speculate", "idle"})


def _prefills(engine: Engine, request: Request) -> bool:
    """Whether a request still has more to put in than the token that was generated last."""
    return request.cached == 0 or engine.remaining(request) > 1


def _padding(action: Action) -> int:
    return max(action.more, 0) % 4


# How often each kind happens in a life that is left to chance.
_WEIGHTS = {
    "arrive": 6,
    "prefill": 3,
    "decode": 3,
    "mixed": 6,
    "speculate": 3,
    "finish": 2,
    "retract": 0.5,
    "fork": 1.5,
    "compact": 0.7,
    "evict": 0.5,
    "leave_windows": 0.5,
}


def opening(rng: np.random.Generator, *, longest: int) -> list[Action]:
    """Return how a busy engine's life begins: three requests whose prompts begin alike, and a chunk of each."""
    lengths = [int(n) for n in rng.integers(longest // 4, longest, 3)]
    arrivals = [Action(kind="arrive", pick=2 * i + 1, amount=n, more=longest // 2) for i, n in enumerate(lengths)]
    return [*arrivals, Action(kind="prefill", amount=int(rng.integers(1, 2 * longest)))]


def random_action(rng: np.random.Generator, *, longest: int) -> Action:
    """Return an action as it may come next in an engine's life, with lengths of a few tokens or up to `longest`."""
    weights = np.array(list(_WEIGHTS.values()))
    amount = int(rng.integers(1, [8, 24, longest + 1, 2 * longest][rng.integers(4)]))
    return Action(
        kind=list(_WEIGHTS)[rng.choice(len(weights), p=weights / weights.sum())],
        pick=int(rng.integers(8)),
        amount=amount,
        more=int(rng.integers(0, max(amount, 4))),
    )
