"""Speculative decoding in a real scheduler in this process."""

from __future__ import annotations

import random
from typing import Any

from kv_canary.difftest.stress.sglang import drafts

from . import engine


def build(models: tuple[str, str], *, mode: str = "raise", settings: dict[str, str] | None = None, **args: Any) -> Any:
    """Return a scheduler that decodes with chains of STEPS drafts, with a canary in it.

    Args:
        models: target and draft.
        mode: of the canary.
        settings: further variables of its environment.
        args: of SGLang's ServerArgs.
    """
    environment = {"SGLANG_ON_CPU": "speculative", "KV_CANARY_MODE": mode, **(settings or {})}
    with engine.overriding(**environment):
        return engine.build_scheduler(models[0], **(drafts.arguments(models[1]) | args))


def some_tokens(n: int, *, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, engine.VOCABULARY) for _ in range(n)]
