"""One copy of weights and KV for several schedulers on one card, of which one runs at a time.

Their prompts are the same and so are their slots: each one's prefill writes what is there already. Whoever compares
them checks that their tokens and the sums of their KV agree; else what they share was no good.
"""

from __future__ import annotations

import fcntl
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kv_canary.bench.serving.modes import Shape

# A parameter begins on so many elements.
_ALIGNED = 256


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What all schedulers map.

    Args:
        kv: [layers, K and V, slots, heads, head_dim].
        weights: flat.
        lock: held while weights are loaded: until they are exchanged each scheduler has its own.
    """

    kv: torch.Tensor
    weights: torch.Tensor
    lock: Path


def allocate(shape: Shape, *, slots: int, lock: Path) -> Shared:
    """Return zeros for a model's weights and for KV of so many slots."""
    kv = torch.zeros(shape.layers, 2, slots + 1, shape.kv_heads, shape.head_dim, dtype=torch.bfloat16, device="cuda")
    attention = shape.hidden * (shape.heads + 2 * shape.kv_heads) * shape.head_dim + shape.hidden**2
    layer = attention + 3 * shape.hidden * shape.inner + 2 * shape.hidden + 8 * _ALIGNED
    # The vocabulary is padded.
    size = shape.layers * layer + 2 * (shape.vocabulary + 64) * shape.hidden + shape.hidden + 16 * _ALIGNED
    weights = torch.zeros(size, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    return Shared(kv=kv, weights=weights, lock=lock)


def let_go() -> None:
    """Give back what schedulers that have ended had mapped, so that what is allocated next may lie elsewhere."""
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()


def use(shared: Shared, *, own_kv: bool) -> None:
    """Let the scheduler that is made next in this process take its weights from `shared`, and its KV pool or not."""
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.model_loader import loader

    kv, weights, fill, load = (
        shared.kv,
        shared.weights,
        loader.initialize_dummy_weights,
        loader.DummyModelLoader.load_model,
    )

    def initialize(model: Any, *args: Any, **kwargs: Any) -> Any:
        start = 0
        for parameter in model.parameters():
            if parameter.dtype == weights.dtype:
                size = parameter.numel()
                parameter.data = weights[start : start + size].view(parameter.shape)
                start += -(-size // _ALIGNED) * _ALIGNED
        torch.cuda.empty_cache()
        return fill(model, *args, **kwargs)

    @functools.wraps(load)
    def one_at_a_time(*args: Any, **kwargs: Any) -> Any:
        with shared.lock.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return load(*args, **kwargs)

    def create(pool: Any) -> None:
        size = pool.size + pool.page_size
        pool.k_buffer, pool.v_buffer = ([kv[layer, half, :size] for layer in range(pool.layer_num)] for half in (0, 1))

    loader.initialize_dummy_weights = initialize
    loader.DummyModelLoader.load_model = one_at_a_time
    if not own_kv:
        memory_pool.MHATokenToKVPool._create_buffers_normal = create
