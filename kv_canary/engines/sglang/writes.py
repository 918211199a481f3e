"""The K and V that SGLang's model hands over to its pools, layer by layer, for `check_writes`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from kv_canary.engines.patches import Patches
from kv_canary.errors import must_be
from kv_canary.runtime.pools import BufferGroup, KvPool

logger = logging.getLogger("kv_canary")

# The place of the mask behind V among the arguments of `set_kv_buffer`.
_MASK_PLACE = 4
# Parts of pools that have several.
_PARTS = ("full_kv_pool", "swa_kv_pool", "main_pool")


def watch(
    pools: Iterable[tuple[Any, Sequence[BufferGroup]]],
    *,
    handed: Callable[[KvPool, int, torch.Tensor, torch.Tensor], None],
    in_order: Callable[[], bool],
    patches: Patches,
    following: Callable[[str], AbstractContextManager[Any]],
) -> None:
    """Hand on what the model hands over to pools that keep it as it is; which do not is logged.

    Where an attention backend writes K and V by a kernel of its own, nothing is handed over; neither inside of CUDA
    graphs that were captured before, see `capture_again`.

    Args:
        pools: of runners, with their groups.
        handed: `CanaryManager.handed`.
        in_order: whether the tokens of the forward under way are those that the canary was told of, in order.
        patches: what their methods are wrapped with.
        following: gives the context, by what is done, of a part of the canary that may fail where the engine must not.
    """
    for pool, groups in pools:
        for group in groups:
            part = next((p for p in _parts(pool) if _is_of(group, p)), None)
            if part is None:
                logger.warning(
                    "kv-canary: sglang adapter: check_writes does not cover group %s: its pool keeps other bytes than "
                    "the model hands over",
                    group.name,
                )
                continue
            _wrap(part, group.pool, handed=handed, in_order=in_order, patches=patches, following=following)


def capture_again(runner: Any, *, keeps: Any) -> None:
    """Capture a runner's decode graphs anew, behind `watch`: what the model hands over is taken in by them, too.

    Args:
        runner: SGLang's `ModelRunner`.
        keeps: what holds the memory that the graphs copy to, for as long as there may be such graphs.

    Raises:
        ValueError: that fails. The graphs of before are of no use then: the attention backend has other buffers by now.
    """
    graphs = getattr(runner, "decode_cuda_graph_runner", None)
    if graphs is None or graphs is runner.eager_runner:
        return
    # Lest their memory be held while others are captured.
    del graphs
    runner.kv_canary_keeps = keeps
    try:
        runner.recapture_decode_cuda_graph()
    except Exception as error:
        expected = "off where decode graphs cannot be captured a second time"
        raise ValueError(
            must_be("sglang adapter", "check_writes", expected, f"{type(error).__name__}: {error}")
        ) from error


def _wrap(
    part: Any,
    pool: KvPool,
    *,
    handed: Callable[[KvPool, int, torch.Tensor, torch.Tensor], None],
    in_order: Callable[[], bool],
    patches: Patches,
    following: Callable[[str], AbstractContextManager[Any]],
) -> None:
    def set_kv_buffer(
        original: Callable[..., Any], layer: Any, loc: Any, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        with following("taking in what the model hands over"):
            # Of the type that is kept, scales are not applied; what a mask leaves out is on another rank.
            is_whole = kwargs.get("dcp_kv_mask") is None and len(args) < _MASK_PLACE
            if in_order() and is_whole and k.dtype == v.dtype == part.dtype:
                number = args[2] if len(args) > 2 else kwargs.get("layer_id_override")
                number = layer.layer_id if number is None else number
                handed(pool, number - part.start_layer, k, v)
        return original(layer, loc, k, v, *args, **kwargs)

    patches.wrap(part, "set_kv_buffer", set_kv_buffer)


def _parts(pool: Any) -> Iterator[Any]:
    """Yield a pool and its parts that keep rows as they are handed over: plain ones of K and V, unquantised."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    for part in (pool, *(getattr(pool, name, None) for name in _PARTS)):
        if type(part) is not MHATokenToKVPool or part.is_quantized_kv_cache:
            continue
        if part.kv_cache_layout == "nhd" and part.dtype == part.store_dtype:
            yield part


def _is_of(group: BufferGroup, part: Any) -> bool:
    """Whether a group's bytes are a part's."""
    k, v = group.pool.k_source, group.pool.v_source
    if k is None or v is None:
        return False
    mine, theirs = (k.layers[0], v.layers[0]), (part.k_buffer[0], part.v_buffer[0])
    return [x.data_ptr() for x in mine] == [x.data_ptr() for x in theirs]
