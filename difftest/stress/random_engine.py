"""Model engines of geometries, canaries and histories that are drawn from seeds, which count what happens to them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings

from kv_canary.config import CanaryConfig
from kv_canary.difftest.simulator import Action, EngineConfig
from kv_canary.difftest.simulator.actions import random_action
from kv_canary.difftest.simulator.canary_engine import CanaryEngine
from kv_canary.difftest.simulator.groups import Group
from kv_canary.difftest.simulator.requests import Request
from kv_canary.difftest.strategies.engine import engine_configs
from kv_canary.runtime.batch import ForwardBatch

# How often what `random_action` never does happens: steps of nothing, and an emptied cache.
IDLE_SHARE, FLUSH_SHARE = 0.03, 0.01
# How often the model fails, before it has written anything.
FAILURE_SHARE = 0.01


class ModelFailedError(RuntimeError):
    """The model of an engine raised, as models do; the engine tries again later."""


class CountingEngine(CanaryEngine):
    """An engine that counts what happens to it, in `happened`, and whose model fails now and then.

    Args:
        chance: decides when the model fails; None: it never does.
    """

    def __init__(self, *args: Any, chance: np.random.Generator | None = None, **options: Any) -> None:
        self.happened: Counter[str] = Counter()
        super().__init__(*args, **options)
        self._chance = chance
        self.relied_on = 0
        self.during_forward = self._maybe_fail

    def act(self, action: Action) -> None:
        """Perform `action`; a model that fails ends it."""
        try:
            self.run(action)
        except ModelFailedError:
            self.happened["failed forwards"] += 1

    def flush(self) -> None:
        self.happened["flushes"] += 1
        super().flush()

    def take_cached_prefix(self, request: Request) -> None:
        super().take_cached_prefix(request)
        self.happened["prefix hits"] += request.cached > 0

    def retire(self, group: Group, slots: Sequence[int], *, owner: int) -> Any:
        self.happened["slots freed"] += len(slots)
        return super().retire(group, slots, owner=owner)

    def move(self, group: Group, src: Sequence[int], dst: Sequence[int], *, owner: int) -> Any:
        self.happened["slots copied"] += len(src)
        return super().move(group, src, dst, owner=owner)

    def finish(self, request: Request, *, keep: bool = True) -> Any:
        self.happened["finished" if keep else "retracted"] += 1
        return super().finish(request, keep=keep)

    def step(self, work: Any, *, accepted: Any = None, padding: int = 0) -> Any:
        for request, count in (accepted or {}).items():
            self.happened["drafts rejected"] += max(work[request] - count, 0)
        return super().step(work, accepted=accepted, padding=padding)

    def fork(self, parent: Request) -> Any:
        before = self.next_serial
        yield from super().fork(parent)
        self.happened["forks"] += self.next_serial > before

    def compact(self, request: Request) -> Any:
        before = list(request.pages)
        yield from super().compact(request)
        self.happened["compactions"] += request.pages != before

    def evict(self, count: int) -> Any:
        before = len(self.cache.pages())
        yield from super().evict(count)
        self.happened["pages evicted"] += before - len(self.cache.pages())

    def _maybe_fail(self, batch: ForwardBatch) -> None:
        self.happened["steps" if batch.requests else "empty steps"] += 1
        self.happened["tokens"] += sum(r.extend_len for r in batch.requests)
        for window in (group.config.window for group in self.groups):
            self.relied_on += sum(min(r.prefix_len, window) if window else r.prefix_len for r in batch.requests)
        if self._chance is not None and batch.requests and self._chance.random() < FAILURE_SHARE:
            raise ModelFailedError("kv-canary: stress: the model failed, as it was told to")


def any_action(rng: np.random.Generator, *, longest: int) -> Action:
    """Return an action as it may come next, flushes and empty steps among them."""
    chance = rng.random()
    if chance < FLUSH_SHARE:
        return Action(kind="flush")
    if chance < FLUSH_SHARE + IDLE_SHARE:
        return Action(kind="idle")
    return random_action(rng, longest=longest)


def draw_configs(number: int, count: int) -> list[EngineConfig]:
    """Return `count` engines of any geometry, the same ones for the same `number`; owners are serial numbers."""
    drawn: list[EngineConfig] = []

    # The first example is always the simplest there is.
    @settings(
        max_examples=count + 1,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @seed(number)
    @given(engine_configs())
    def draw(config: EngineConfig) -> None:
        drawn.append(dataclasses.replace(config, serial_owners=True))

    draw()
    return drawn[1 : count + 1]


def draw_sealing_canary(rng: np.random.Generator, backend: str) -> CanaryConfig:
    """Return a configuration of the canary as `draw_canary`, most with seals, of layers or of all of them together."""
    canary = draw_canary(rng, backend)
    seals, share = str(rng.choice(["layer", "layer", "model", "off"])), float(rng.choice([0.005, 0.1, 1.0]))
    # Seals tell by the records whose bytes they are of.
    if not canary.track_lifetime:
        return canary
    return dataclasses.replace(canary, seals=seals, scrub_share=share)  # type: ignore[arg-type]


def draw_canary(rng: np.random.Generator, backend: str) -> CanaryConfig:
    """Return a configuration of the canary, with any of its checks on or off; without seals."""
    sweep_every = int(rng.choice([0, 3, 7]))
    return CanaryConfig(
        backend=backend,
        records=str(rng.choice(["one", "head_and_tail"])),  # type: ignore[arg-type]
        stride=int(rng.choice([1, 1, 1, 3])),
        read_bytes=int(rng.choice([16, 16, 5, 1 << 20])),
        check_tokens=bool(rng.integers(2)),
        verify_bytes_at_tail=bool(rng.integers(2)),
        track_lifetime=sweep_every > 0 or bool(rng.random() < 0.9),
        sweep_every=sweep_every,
        quarantine=sweep_every > 0 and bool(rng.integers(2)),
    )
