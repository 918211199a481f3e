"""The scripted engine in the sizes of these tests, on the reference backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import kv_canary as kc
from kv_canary.difftest.simulator.requests import Request
from kv_canary.difftest.simulator.scripted_engine import ScriptedEngine, kv_source

__all__ = ["BYTES", "LAYERS", "MAX_LEN", "MAX_ROWS", "Engine", "Request", "full_engine", "make_pool"]

MAX_ROWS = 8
MAX_LEN = 128
LAYERS = 2
BYTES = 32


def make_pool(
    num_slots: int = 128, *, name: str = "pool", read_bytes: int = BYTES, page_size: int = 1, extra_slots: int = 0
) -> kc.KvPool:
    """Return a pool of random bytes: 2 layers of 32 bytes a token, covered wholly by default."""
    k, v = (kv_source(num_slots, BYTES, layers=LAYERS, read_bytes=read_bytes, page_size=page_size) for _ in range(2))
    names = tuple(f"layer {i}" for i in range(LAYERS))
    return kc.KvPool(
        name=name,
        num_slots=num_slots,
        k_source=k,
        v_source=v,
        extra_slots=extra_slots,
        layer_names=names,
        device="cpu",
    )


class Engine(ScriptedEngine):
    """The scripted engine, for at most 4 requests of 128 tokens."""

    def __init__(
        self,
        groups: Sequence[kc.BufferGroup],
        config: kc.CanaryConfig = kc.CanaryConfig(backend="reference"),  # noqa: B008 (it is frozen)
        **options: Any,
    ) -> None:
        limits = kc.CanaryLimits(max_rows=MAX_ROWS, max_requests=4, max_tokens=64, max_len=MAX_LEN)
        super().__init__(groups, config, limits=limits, **options)


def full_engine(**options: Any) -> Engine:
    """Return an engine with one full-attention group."""
    config = kc.CanaryConfig(**{"backend": "reference", **options})
    return Engine([kc.BufferGroup(name="full", pool=make_pool())], config)
