"""vLLM's KV caches as pools and groups, over the memory that its kernels are given.

Each group of vLLM's is one of the canary's, or one for each shape that its layers' memory has.

Blocks of all groups are numbered together, and lie in the same memory where groups overlay each other; a block is one
group's at a time. Slot numbers are `block * block_size + offset`; block 0 is vLLM's null block, so slot 0 is nobody's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kv_canary.errors import must_be
from kv_canary.runtime.pools import BufferGroup, KvPool
from kv_canary.specs.structures import KvSource

# Kinds of layers whose slots hold one token each, by the names of their classes: a kind derived from one may not.
_FULL = ("FullAttentionSpec", "MLAAttentionSpec")
_WINDOWED = ("SlidingWindowSpec", "SlidingWindowMLASpec")
# With some that are no request's tokens in front of each request's, in the lengths that the runner shows.
_WITH_SINKS = "SinkFullAttentionSpec"
# Tokens whose K the CPU's kernels keep together, transposed.
_TRANSPOSED = 32


@dataclass(frozen=True, kw_only=True, eq=False)
class AttachedGroup:
    """A group of vLLM's and the canary's for it.

    Args:
        number: of vLLM's; of several where its layers differ.
        group: the canary's, whose tables are vLLM's.
        block_size: tokens of a block, as the scheduler counts them.
        layers: vLLM's names of its layers, in the order of the pool's sources.
        sources_of_a_head: into how many sources of K, and of V, each head of a layer is split.
        is_draft: whether a draft model writes it.
    """

    number: int
    group: BufferGroup
    block_size: int
    layers: tuple[str, ...]
    sources_of_a_head: int
    is_draft: bool = False


def attach(
    worker: Any, *, read_bytes: int, drafts: frozenset[str], unfollowed: Mapping[str, str] | None = None
) -> tuple[list[AttachedGroup], list[str]]:
    """Return the groups of a worker, those of a draft model last, and what of its KV cache is not covered, in words.

    Args:
        worker: whose KV cache is there.
        read_bytes: bytes of a token that one fingerprint covers.
        drafts: names of layers that a draft model writes, in forwards of its own.
        unfollowed: names of layers that are left out, each with the reason.

    Raises:
        ValueError: nothing of it can be covered, or memory lies as the adapter does not know.
    """
    runner, config = worker.model_runner, worker.vllm_config
    layers = config.compilation_config.static_forward_context
    mine, its, uncovered = list[AttachedGroup](), list[AttachedGroup](), list[str]()
    pools: dict[tuple[Any, ...], KvPool] = {}
    for number, found in enumerate(runner.kv_cache_config.kv_cache_groups):
        specs = getattr(found.kv_cache_spec, "kv_cache_specs", {})
        alike: dict[tuple[Any, ...], list[str]] = {}
        views: dict[str, torch.Tensor] = {}
        for name in found.layer_names:
            spec = specs.get(name, found.kv_cache_spec)
            if reason := (unfollowed or {}).get(name) or _why_uncovered(spec):
                if (said := f"{'draft of ' * (name in drafts)}group {number} ({reason})") not in uncovered:
                    uncovered.append(said)
            elif not getattr(layers[name], "kv_sharing_target_layer_name", None):
                views[name] = view = _view(layers[name])
                alike.setdefault((name in drafts, type(spec).__name__, _geometry(view, spec)), []).append(name)
        for (is_draft, _, geometry), names in alike.items():
            ours = its if is_draft else mine
            spec = specs.get(names[0], found.kv_cache_spec)
            own = {name: views[name] for name in names}
            key = (geometry, *(view.data_ptr() for view in own.values()))
            if key not in pools:
                slots = runner.kv_cache_config.num_blocks * spec.block_size
                name = f"pool {len(pools)}" if pools else "pool"
                pools[key] = _pool(name, own, spec, slots=slots, read_bytes=read_bytes)
            is_windowed = type(spec).__name__ in _WINDOWED
            window = max(spec.sliding_window - 1, 0) if is_windowed else 0
            # The first one of the target, and of a draft, has the plain name.
            part = sum(other.number == number for other in ours)
            name = f"{'draft ' if is_draft else ''}{'swa' if window else 'full'} {number}{f'.{part}' if part else ''}"
            group = BufferGroup(name=name, pool=pools[key], window=window, page_size=_page_size(runner, number, spec))
            ours.append(
                AttachedGroup(
                    number=number,
                    group=group,
                    block_size=spec.block_size,
                    layers=tuple(names),
                    sources_of_a_head=len(pools[key].layer_names) // (len(names) * own[names[0]].shape[1]),
                    is_draft=is_draft,
                )
            )
    if not mine:
        expected = "with attention over slots of one token each"
        raise ValueError(must_be("vllm adapter", "KV cache", expected, ", ".join(uncovered) or "no group"))
    return mine + its, uncovered


def first_of_each(groups: Iterable[AttachedGroup]) -> list[AttachedGroup]:
    """Return one group for each of vLLM's: those whose layers differ have one list of blocks all the same."""
    firsts: dict[int, AttachedGroup] = {}
    for group in groups:
        firsts.setdefault(group.number, group)
    return list(firsts.values())


def may_hash_parts(worker: Any) -> bool:
    """Whether vLLM's prefix cache may find a block that is not full, of a prompt that ends in it.

    It may with states of Mamba's whose blocks are larger than what is hashed at a time, which is the sizes' greatest
    common divisor unless it is set; how the scheduler decides is not looked into.
    """
    sizes = {group.kv_cache_spec.block_size for group in worker.model_runner.kv_cache_config.kv_cache_groups}
    unit = getattr(worker.vllm_config.cache_config, "prefix_match_unit", None)
    return len(sizes) > 1 or (unit is not None and sizes != {unit})


def _why_uncovered(spec: Any) -> str:
    """Return why slots of layers do not hold one token each, in words; nothing where they do.

    Raises:
        ValueError: nothing of a model with such layers can be covered.
    """
    spec = getattr(spec, "first_spec", spec)
    kind = type(spec).__name__
    if kind == _WITH_SINKS:
        expected = "without static sinks (which are no request's tokens, and are counted as such)"
        raise ValueError(must_be("vllm adapter", "KV cache", expected, kind))
    if kind not in (*_FULL, *_WINDOWED):
        return kind
    states = getattr(spec, "tokens_per_state", 1)
    return "" if states == 1 else f"{kind}, {states} tokens in a slot"


def _view(layer: Any) -> torch.Tensor:
    """Return a layer's memory as [blocks, heads, tokens, content]; latent attention is bound without the one head."""
    view: torch.Tensor = layer.kv_cache
    return view.unsqueeze(1) if view.dim() == 3 else view


def _geometry(view: torch.Tensor, spec: Any) -> tuple[Any, ...]:
    """Return what layers of one pool have in common."""
    spec = getattr(spec, "first_spec", spec)
    return spec.block_size, spec.head_size, spec.dtype, view.shape[1:], view.stride(), view.dtype


def _page_size(runner: Any, number: int, spec: Any) -> int:
    """Return how many tokens an entry of a group's block table stands for."""
    tables = getattr(getattr(runner, "input_batch", None), "block_table", None)
    return int(spec.block_size if tables is None else tables[number].block_size)


def _pool(name: str, views: Mapping[str, torch.Tensor], spec: Any, *, slots: int, read_bytes: int) -> KvPool:
    """Return the pool of layers that share blocks.

    Args:
        name: how reports call it.
        views: [blocks, heads, tokens, content] by layer, as its kernels are given it.
        spec: vLLM's, of the layers.
        slots: that blocks can name, as the scheduler numbers them.
        read_bytes: see `attach`.
    """
    first = next(iter(views.values()))
    halves = _transposed(views, spec) if first.device.type == "cpu" else _halves(views, spec, read_bytes=read_bytes)
    return KvPool(
        name=name,
        num_slots=slots,
        # The first block is vLLM's null block.
        first_slot=spec.block_size,
        k_source=halves.k,
        v_source=halves.v,
        layer_names=tuple(halves.names),
        device=first.device,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Halves:
    """Where K and V of a pool lie, and how its sources are called, in order."""

    k: KvSource
    v: KvSource | None
    names: Sequence[str]


def _halves(views: Mapping[str, torch.Tensor], spec: Any, *, read_bytes: int) -> _Halves:
    """Return K and V of layers in any order of their axes but the last: a source for each layer and head.

    Where a head's bytes are no K and V side by side (packed or latent ones), all of them are the K.
    """
    first = next(iter(views.values()))
    heads, element = first.shape[1], first.element_size()
    content = first.shape[3] * element
    k_bytes = spec.head_size * _size_of(spec.dtype)
    is_split = spec.state_content_bytes is None and "MLA" not in type(spec).__name__ and k_bytes < content
    rows = [_rows(view, head) for view in views.values() for head in range(heads)]
    stride, tokens = first.stride(2) * element, first.shape[2]
    widths = (k_bytes, content - k_bytes) if is_split else (content,)
    sources = [
        KvSource(
            layers=tuple(rows),
            page_size=tokens,
            bytes_per_token=width,
            read_bytes=min(read_bytes, width),
            offset_bytes=0 if not half else k_bytes,
            token_stride_bytes=stride,
        )
        for half, width in enumerate(widths)
    ]
    return _Halves(k=sources[0], v=sources[1] if is_split else None, names=_names(views, heads))


def _rows(view: torch.Tensor, head: int) -> torch.Tensor:
    """Return a head of a layer, uint8 [blocks, bytes], from its first token's first byte to its last one's last."""
    blocks, _, tokens, content = view.shape
    length = (tokens - 1) * view.stride(2) + content
    start = view.storage_offset() + head * view.stride(1)
    return torch.as_strided(view, (blocks, length), (view.stride(0), 1), start).view(torch.uint8)


def _transposed(views: Mapping[str, torch.Tensor], spec: Any) -> _Halves:
    """Return K and V as the CPU's kernels keep them: K as [content, tokens], V as [tokens, content], a head at a time.

    Every number of a token is a source of its own.

    Raises:
        ValueError: they keep them in another way.
    """
    first = next(iter(views.values()))
    heads, tokens, size = first.shape[1], first.shape[2], spec.head_size
    is_known = first.dtype == torch.float32 and tokens == _TRANSPOSED and first.shape[3] == 2 * size
    if not is_known or not first[0].is_contiguous():
        expected = f"float32 in blocks of {_TRANSPOSED} tokens on a CPU"
        got = f"{first.dtype} in blocks of {tokens}, shape {list(first.shape)}"
        raise ValueError(must_be("vllm adapter", "KV cache", expected, got))
    k, v, width = [], [], first.element_size()
    for view in views.values():
        flat = view.flatten(1)
        for head in range(heads):
            begin = head * 2 * tokens * size
            for i in range(size):
                k.append(flat[:, begin + i * tokens : begin + (i + 1) * tokens])
                first_of_v = begin + tokens * size + i
                v.append(flat[:, first_of_v : first_of_v + (tokens - 1) * size + 1])
    common = {"page_size": tokens, "bytes_per_token": width, "read_bytes": width}
    return _Halves(
        k=KvSource(layers=tuple(k), **common),
        v=KvSource(layers=tuple(v), token_stride_bytes=size * width, **common),
        names=[f"{name}, number {i}" for name in _names(views, heads) for i in range(size)],
    )


def _names(layers: Iterable[str], heads: int) -> list[str]:
    return [f"{layer} head {head}" for layer in layers for head in range(heads)]


def _size_of(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()
