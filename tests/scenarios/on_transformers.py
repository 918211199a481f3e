"""Classes A to D in a real engine: transformers' continuous batching."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kv_canary import Reason

from .harness import Scenario
from .real_engine import PAGE, VERSION, RealEngine, live, prompt


def forgets_references(engine: RealEngine) -> None:
    """A block goes back to the pool with the first request that lets go of it."""
    ledger = engine.allocator.ledger

    def release(block: int, no_cache: bool = False) -> bool:
        if ledger.shared_ref_counts.pop(block, 1) > 1:
            engine.acted([block])
        ledger.hash_to_block.pop(ledger.block_to_hash.pop(block, None), None)
        return True

    ledger.release = release


def cancelled_sharer(engine: RealEngine) -> None:
    shared = prompt(1, 3 * PAGE)
    engine.come("first", [*shared, *prompt(2, 5)], new_tokens=8)
    engine.step(2)
    engine.come("second", [*shared, *prompt(3, 7)], new_tokens=8)
    engine.step(2)
    engine.manager.cancel_request("second")
    engine.step()
    engine.come("third", prompt(4, 40), new_tokens=8)
    engine.finish()


def stores_late(engine: RealEngine) -> None:
    """What is stored on the host arrives there after it was loaded back."""
    offloading = engine.processor.offloading_manager
    store, restore = offloading._offload_to_cpu, offloading.restore_scheduled_requests

    def offload(*args: Any, **kwargs: Any) -> Any:
        views, offloading._cpu_views = offloading._cpu_views, {n: v.clone() for n, v in offloading._cpu_views.items()}
        try:
            return store(*args, **kwargs)
        finally:
            offloading._cpu_views = views

    def load(requests: Any) -> Any:
        names = [f.state.request_id for f in requests if f.state.is_cpu_offloaded]
        result = restore(requests)
        for name in names:
            engine.acted(engine.allocator.block_table[name], [name])
        return result

    offloading._offload_to_cpu, offloading.restore_scheduled_requests = offload, load


def tight_cache(engine: RealEngine) -> None:
    """More is asked for than fits: some requests wait on the host."""
    for i in range(4):
        engine.come(f"request{i}", prompt(10 + i, 20), new_tokens=40)
    engine.finish()


def keeps_hashes(engine: RealEngine) -> None:
    """Evicted blocks can still be found by their hashes."""
    ledger, acquire = engine.allocator.ledger, engine.allocator.acquire_prefix_blocks
    evicted: set[int] = set()

    def evict() -> list[int]:
        blocks = list(ledger.cached_blocks)
        ledger.cached_blocks.clear()
        evicted.update(blocks)
        engine.acted([])
        return blocks

    def hit(name: str, length: int, blocks: list[int]) -> None:
        acquire(name, length, blocks)
        stale = [b for b in blocks if b in evicted]
        if stale:
            engine.acted(stale, [name])

    ledger.evict_cached_blocks, engine.allocator.acquire_prefix_blocks = evict, hit


def evicted_between(engine: RealEngine) -> None:
    """An A -> B -> A pattern, with an eviction between."""
    first = prompt(1, 3 * PAGE + 5)
    engine.come("first", first, new_tokens=3)
    engine.finish()
    engine.cache.evict_cached_blocks()
    for i in range(3):
        engine.come(f"other{i}", prompt(20 + i, 3 * PAGE + 1), new_tokens=12)
    engine.step(4)
    engine.come("again", first, new_tokens=5)
    engine.finish()


def keeps_old_cache(engine: RealEngine) -> None:
    """The cache is not emptied when the weights change."""
    engine.cache.evict_cached_blocks = lambda: False
    acquire = engine.allocator.acquire_prefix_blocks

    def hit(name: str, length: int, blocks: list[int]) -> None:
        acquire(name, length, blocks)
        engine.acted(blocks, [name])

    engine.allocator.acquire_prefix_blocks = hit


def weights_updated(engine: RealEngine) -> None:
    before = prompt(1, 3 * PAGE + 5)
    engine.come("before", before, new_tokens=3)
    engine.finish()
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    engine.version += 1
    engine.cache.evict_cached_blocks()
    engine.come("after", before, new_tokens=5)
    engine.finish()


def _scenario(
    life: Callable[[RealEngine], None],
    bug: Callable[[RealEngine], None],
    *,
    options: dict[str, Any] | None = None,
    **facts: Any,
) -> Scenario:
    options = options or {}
    return Scenario(
        healthy=lambda: live(life, None, **options), faulty=lambda: live(life, bug, **options), engine=VERSION, **facts
    )


SCENARIOS: tuple[Scenario, ...] = (
    _scenario(
        cancelled_sharer,
        forgets_references,
        name="transformers-shared-block-freed",
        fault="A",
        example="mini-sglang#142",
        doc="cancelling a request frees blocks that another one shares",
        expected=Reason.FREED,
    ),
    _scenario(
        tight_cache,
        stores_late,
        name="transformers-loaded-before-stored",
        fault="B",
        example="vllm#46278",
        doc="requests are loaded back from the host before they have arrived there",
        expected=Reason.K | Reason.V,
        options={"num_blocks": 10, "host_gib": 0.01},
    ),
    _scenario(
        evicted_between,
        keeps_hashes,
        name="transformers-phantom-hit",
        fault="C",
        example="local-inference-lab/vllm#480",
        doc="evicted blocks keep their hashes, and are hit when others use them",
        expected=Reason.TOKEN,
    ),
    _scenario(
        weights_updated,
        keeps_old_cache,
        name="transformers-weights-updated",
        fault="D",
        example="lmdeploy#4917",
        doc="cached blocks survive an update of the weights, whose version is the requests' identity",
        expected=Reason.CHAIN,
    ),
)
