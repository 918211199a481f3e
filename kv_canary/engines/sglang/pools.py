"""SGLang's KV pools as the canary's groups: which pools are known, and what those of several parts are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, overload

from kv_canary.engines.sglang import pool_layouts
from kv_canary.engines.sglang.pool_layouts import Wanted
from kv_canary.errors import must_be
from kv_canary.runtime.pools import BufferGroup

__all__ = ["Attach", "Wanted", "attach", "register_pool"]

Attach = Callable[[Any, Wanted], tuple[BufferGroup, ...]]
_Attach = TypeVar("_Attach", bound=Attach)

_CACHE = "sglang.srt.mem_cache"

# By dotted name: nothing of the engine is imported here.
_attachers: dict[str, Attach] = {
    f"{_CACHE}.memory_pool.MHATokenToKVPool": pool_layouts.mha,
    f"{_CACHE}.memory_pool.MHATokenToKVPoolFP4": pool_layouts.mha,
    f"{_CACHE}.memory_pool.MHATokenToKVPoolMXFP8": pool_layouts.mha,
    f"{_CACHE}.memory_pool.MLATokenToKVPool": pool_layouts.mla,
    f"{_CACHE}.memory_pool.MLATokenToKVPoolFP4": pool_layouts.mla,
    f"{_CACHE}.deepseek_v4_memory_pool.DeepSeekV4SingleKVPool": pool_layouts.deepseek_v4,
    f"{_CACHE}.deepseek_v4_memory_pool.DeepSeekV4UniformFP8KVPool": pool_layouts.deepseek_v4_uniform,
}

# A method with such a name decides where a token's bytes lie, or which slot number finds them.
_PLACING = ("set_", "_set_", "_store", "_write", "_scatter", "_create_buffers", "create_buffer", "translate_loc")


def attach(pool: Any, *, name: str, read_bytes: int, window: int = 0, token_offset: int = 0) -> tuple[BufferGroup, ...]:
    """Return the groups of a KV pool; their sources are views of its buffers, in all its layers.

    A pool whose layers are of one kind has the group "full"; with sliding-window layers there is "swa" besides, whose
    slots the pool's own table translates from full ones. Where a quantised cache keeps scales as rows of a slot, "full
    scales" and "swa scales" cover them. The tables of all of them are `req_to_token`.

    Args:
        pool: a runner's `token_to_kv_pool`, sized for good and with its allocator.
        name: "" for the target model's; for another, such as "draft", the groups are "draft", "draft swa" and so on.
        read_bytes: bytes of K, and of V, that a token's fingerprint covers, in one layer; see `KvSource`.
        window: cached positions that a query of a sliding-window layer may read; unused where there are no such layers.
        token_offset: 1 for an EAGLE draft model's pool.

    Raises:
        ValueError: nobody has told what the pool stores where (see `register_pool`), or it stores it as no slot checker
            can follow; the text says which.
    """
    return _attach(pool, Wanted(prefix=name, read_bytes=read_bytes, window=window, token_offset=token_offset))


@overload
def register_pool(pool_class: type | str) -> Callable[[_Attach], _Attach]: ...
@overload
def register_pool(pool_class: type | str, attach: _Attach) -> _Attach: ...
def register_pool(pool_class: type | str, attach: _Attach | None = None) -> Callable[[_Attach], _Attach] | _Attach:
    """Make pools of a class known: `attach(pool, want)` returns their groups, as the functions of `pool_layouts` do.

    A subclass is served like its base only as long as it overrides nothing that decides where a token's bytes lie; one
    that does has to be registered itself. The last registration of a class counts.

    Args:
        pool_class: the class, or its dotted name where it is not to be imported.
        attach: the function; left out, what comes back is a decorator for it.
    """

    def register(function: _Attach) -> _Attach:
        _attachers[pool_class if isinstance(pool_class, str) else _dotted(pool_class)] = function
        return function

    return register if attach is None else register(attach)


def _attach(pool: Any, want: Wanted) -> tuple[BufferGroup, ...]:
    """Return the groups of a pool, or of a part of one, by the registration that is safe for its class."""
    cls = type(pool)
    passed: list[type] = []
    for base in cls.__mro__:
        function = _attachers.get(_dotted(base))
        if function is not None:
            own = {n for c in passed for n in vars(c) if n.startswith(_PLACING) and hasattr(base, n)}
            if own:
                got = f"{_dotted(cls)}, which overrides {', '.join(sorted(own))} of {base.__name__}"
                raise ValueError(must_be("attach", "pool", "of a class that register_pool was told of", got))
            return function(pool, want)
        passed.append(base)
    raise ValueError(must_be("attach", "pool", "of a class that register_pool was told of", _dotted(cls)))


def _dotted(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


@register_pool(f"{_CACHE}.swa_memory_pool.SWAKVPool")
def _hybrid_window(pool: Any, want: Wanted) -> tuple[BufferGroup, ...]:
    """Full-attention and sliding-window layers, each in a pool of its own; a part without layers has no group."""
    ids: dict[bool, list[int]] = {False: [], True: []}
    for layer_id, (_, is_window) in pool.layers_mapping.items():
        ids[is_window].append(layer_id)
    groups: tuple[BufferGroup, ...] = ()
    if ids[False]:
        groups += _attach(pool.full_kv_pool, dataclasses.replace(want, layer_ids=tuple(ids[False])))
    if ids[True]:
        groups += _attach(pool.swa_kv_pool, _windowed(pool, want, tuple(ids[True])))
    return groups


@register_pool(f"{_CACHE}.memory_pool.HybridLinearKVPool")
def _hybrid_linear(pool: Any, want: Wanted) -> tuple[BufferGroup, ...]:
    """Full-attention layers beside linear ones; the state of the latter is a request's, not a token's."""
    ids = tuple(pool.full_attention_layer_id_mapping)
    return _attach(pool.full_kv_pool, dataclasses.replace(want, layer_ids=ids))


@register_pool(f"{_CACHE}.memory_pool.MiniMaxSparseKVPool")
def _minimax_sparse(pool: Any, want: Wanted) -> tuple[BufferGroup, ...]:
    """K and V of all layers; the keys that the sparse layers' index is searched by are not covered."""
    return _attach(pool.main_pool, want)


@register_pool(f"{_CACHE}.deepseek_v4_memory_pool.DeepSeekV4TokenToKVPool")
def _deepseek_v4(pool: Any, want: Wanted) -> tuple[BufferGroup, ...]:
    """The sliding window's rows of all layers, and rows of a token each where layers are compressed by 1.

    Compressed caches with an entry for every 2, 4 or 128 tokens have no bytes of one token: their slots are checked, as
    they follow from the full ones, and their bytes are not; nor are index keys, or a window that is a ring or a row of
    the request (then there is no "swa").
    """
    start = pool._stage_start
    ratios = pool.compression_ratios[start : pool._stage_end]
    groups: tuple[BufferGroup, ...] = ()
    if pool.kv_pools.get(1) is not None:
        layer_ids = tuple(pool.sources_by_ratio[1])
        groups += _attach(pool.kv_pools[1], dataclasses.replace(want, layer_ids=layer_ids))
    elif any(ratios):
        lut = pool.full_to_swa_index_mapping
        # The table has an entry more than there are slots.
        slots = len(lut) - 1 if pool.full_size is None else pool.full_size + pool.page_size
        groups += (want.group(num_slots=slots, k=None, v=None, layers=(), device=pool.device),)
    if pool.swa_kv_pool is not None and pool.swa_req_ring_size is None:
        layer_ids = tuple(range(start, start + len(ratios)))
        groups += _attach(pool.swa_kv_pool, _windowed(pool, want, layer_ids))
    return groups


def _windowed(pool: Any, want: Wanted, layer_ids: tuple[int, ...]) -> Wanted:
    """Return what the sliding window's part of a pool is to be.

    Raises:
        ValueError: nobody has told how long the window is, or the pool has no table of slots yet.
    """
    lut = pool.full_to_swa_index_mapping
    if lut is None:
        raise ValueError(must_be(type(pool).__name__, "full_to_swa_index_mapping", "registered", "None"))
    if want.window < 1:
        raise ValueError(must_be("attach", "window", "at least 1 for sliding-window layers", str(want.window)))
    return dataclasses.replace(want, kind="swa", lut=lut, layer_ids=layer_ids)
