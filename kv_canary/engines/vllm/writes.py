"""The K and V that vLLM's model hands over to its caches, layer by layer, for `check_writes`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from kv_canary.engines.patches import Patches
from kv_canary.engines.vllm.pools import AttachedGroup
from kv_canary.output import logger
from kv_canary.runtime.pools import KvPool


def watch(
    groups: Sequence[AttachedGroup],
    layers: Mapping[str, Any],
    *,
    handed: Callable[[KvPool, int, torch.Tensor, torch.Tensor], None],
    is_followed: Callable[[], bool],
    patches: Patches,
    following: Callable[[str], AbstractContextManager[Any]],
) -> None:
    """Hand on what the model hands over to layers that keep it as it is; which do not is logged.

    Args:
        groups: that are covered.
        layers: vLLM's attention layers, by name.
        handed: `CanaryManager.handed`.
        is_followed: whether a forward is under way that the canary was told of.
        patches: what methods are wrapped with.
        following: gives the context, by what is done, of a part of the canary that may fail where the engine must not.
    """
    pools = [g.group.pool for g in groups]
    for group in groups:
        why = ""
        if pools.count(group.group.pool) > 1:
            why = "its memory is other groups', too"
        elif group.group.pool.v_source is None:
            why = "what lies there is not K and V as they are handed over"
        elif not all(hasattr(layers[name].impl, "do_kv_cache_update") for name in group.layers):
            why = "its attention backend writes K and V with a kernel of its own"
        elif layers[group.layers[0]].kv_cache.dtype != layers[group.layers[0]].dtype:
            why = "its pool keeps another type than the model hands over"
        if why:
            logger.warning("kv-canary: vllm adapter: check_writes does not cover group %s: %s", group.group.name, why)
            continue
        for number, name in enumerate(group.layers):
            _wrap(
                layers[name].impl,
                group,
                number,
                handed=handed,
                is_followed=is_followed,
                patches=patches,
                following=following,
            )


def _wrap(
    impl: Any,
    group: AttachedGroup,
    number: int,
    *,
    handed: Callable[[KvPool, int, torch.Tensor, torch.Tensor], None],
    is_followed: Callable[[], bool],
    patches: Patches,
    following: Callable[[str], AbstractContextManager[Any]],
) -> None:
    pool = group.group.pool

    def do_kv_cache_update(
        original: Callable[..., Any], layer: Any, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if is_followed():
            with following("taking in what the model hands over"):
                # [tokens, heads, sources of a head, numbers]
                k, v = (x.view(x.shape[0], x.shape[1], group.sources_of_a_head, -1) for x in (key, value))
                for head in range(k.shape[1]):
                    for part in range(group.sources_of_a_head):
                        source = (number * k.shape[1] + head) * group.sources_of_a_head + part
                        handed(pool, source, k[:, head, part], v[:, head, part])
        return original(layer, key, value, *args, **kwargs)

    patches.wrap(impl, "do_kv_cache_update", do_kv_cache_update)
