"""The places of a token's bytes in SGLang's plain pools: those that keep a list of layers of one kind.

Every function returns groups whose sources are views of the pool's own buffers. Slot numbers are the engine's; slot 0
lies in the padding page, which every pool keeps in front of the slots that its allocator gives out. What belongs to a
token but is no row of K or V (block scales of a quantised cache) is a group of its own over the same slots, so that a
report names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kv_canary.errors import must_be
from kv_canary.runtime.pools import BufferGroup, KvPool
from kv_canary.specs.structures import KvSource


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The properties of a group to make, besides the pool that it is made for.

    Args:
        prefix: in front of the names of the groups; "" for the target model's.
        kind: "full", or "swa" for the sliding window's part of a pool.
        read_bytes: bytes of a token that one fingerprint covers; what a token has at most.
        window: of the sliding window's part, cached positions that a query may read.
        lut: full slot -> slot of the pool, int64 [N], where the tables hold full slots.
        token_offset: 1 for the pool of an EAGLE draft model, else 0.
        layer_ids: the model's numbers of the pool's layers; None: as the pool says.
    """

    prefix: str = ""
    kind: str = "full"
    read_bytes: int
    window: int = 0
    lut: torch.Tensor | None = None
    token_offset: int = 0
    layer_ids: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """The group's name: "full" and "swa" of the target, "draft" and "draft swa" of a draft."""
        if not self.prefix:
            return self.kind
        return self.prefix if self.kind == "full" else f"{self.prefix} {self.kind}"

    def group(
        self,
        *,
        num_slots: int,
        k: KvSource | None,
        v: KvSource | None,
        layers: Sequence[str],
        device: torch.device | str,
        suffix: str = "",
        first_slot: int = 1,
    ) -> BufferGroup:
        """Return the group of these sources, with records of its own for `num_slots` slots, padding first."""
        name = f"{self.name} {suffix}".rstrip()
        pool = KvPool(
            name=name,
            num_slots=num_slots,
            k_source=k,
            v_source=v,
            first_slot=first_slot,
            layer_names=tuple(layers),
            device=device,
        )
        windowed = self.kind != "full"
        return BufferGroup(
            name=name,
            pool=pool,
            window=self.window if windowed else 0,
            lut=self.lut if windowed else None,
            token_offset=self.token_offset,
        )

    def source(self, layers: Sequence[torch.Tensor], *, page_size: int, width: int, offset: int = 0) -> KvSource:
        """Return the source of `width` bytes a token; all of `layers` are read as bytes, where they lie."""
        return KvSource(
            layers=tuple(layer.view(torch.uint8) for layer in layers),
            page_size=page_size,
            bytes_per_token=width,
            read_bytes=min(self.read_bytes, width),
            offset_bytes=offset,
        )

    def token_rows(self, layers: Sequence[torch.Tensor], num_slots: int) -> KvSource:
        """Return the source of buffers that keep one row a slot, the first `num_slots` of each."""
        rows = [layer[:num_slots] for layer in layers]
        return self.source(rows, page_size=1, width=rows[0][0].numel() * rows[0].element_size())


def mha(pool: Any, want: Wanted) -> tuple[BufferGroup, ...]:
    """Return the groups of a `MHATokenToKVPool`, or of one that keeps block scales beside it.

    A token is a row `[heads, dim]` of K and one of V in every layer. In the "hnd" layout it is a row in each of the
    page's heads, so that a head counts as a layer. Scales are covered where they are rows of a slot too; where a kernel
    keeps them interleaved for itself (MXFP8 with pages of 128, NVFP4's native ones) they are not.

    Raises:
        ValueError: the layout of the buffers is another, or their memory is not there yet.
    """
    part = type(pool).__name__
    slots = _final_slots(pool)
    ids = _layer_ids(pool, want)
    if pool.kv_cache_layout == "hnd":
        return (_by_head(pool, want, ids),)
    if pool.kv_cache_layout != "nhd":
        raise ValueError(must_be(part, "kv_cache_layout", "'nhd' or 'hnd'", repr(pool.kv_cache_layout)))
    _expect_rows(part, "k_buffer", pool.k_buffer, slots)
    _expect_rows(part, "v_buffer", pool.v_buffer, slots)
    names = [f"layer {i}" for i in ids]
    device = pool.k_buffer[0].device
    groups = [
        want.group(
            num_slots=slots,
            k=want.token_rows(pool.k_buffer, slots),
            v=want.token_rows(pool.v_buffer, slots),
            layers=names,
            device=device,
            first_slot=pool.page_size,
        )
    ]
    k_scales, v_scales = getattr(pool, "k_scale_buffer", None), getattr(pool, "v_scale_buffer", None)
    if k_scales and v_scales and _has_rows(k_scales, slots) and _has_rows(v_scales, slots):
        k, v = want.token_rows(k_scales, slots), want.token_rows(v_scales, slots)
        groups.append(
            want.group(
                num_slots=slots, k=k, v=v, layers=names, device=device, suffix="scales", first_slot=pool.page_size
            )
        )
    return tuple(groups)


def mla(pool: Any, want: Wanted) -> tuple[BufferGroup, ...]:
    """Return the groups of a `MLATokenToKVPool`: one latent row a token, which reports call K; V is a part of it.

    The index keys of sparse attention (DSA) are not covered.

    Raises:
        ValueError: the rows are spread over ranks, or not all layers keep them.
    """
    part = type(pool).__name__
    if pool._write_loc_dcp_span != 1:
        expected = "1: a slot has to be a row of this rank"
        raise ValueError(must_be(part, "decode context parallel size", expected, str(pool._write_loc_dcp_span)))
    slots = _final_slots(pool)
    _expect_rows(part, "kv_buffer", pool.kv_buffer, slots)
    names = [f"layer {i}" for i in _layer_ids(pool, want)]
    device = pool.kv_buffer[0].device
    parts = [("", pool.kv_buffer), ("scales", getattr(pool, "kv_scale_buffer", None))]
    return tuple(
        want.group(
            num_slots=slots,
            k=want.token_rows(layers, slots),
            v=None,
            layers=names,
            device=device,
            suffix=suffix,
            first_slot=pool.page_size,
        )
        for suffix, layers in parts
        if layers
    )


def deepseek_v4(pool: Any, want: Wanted) -> tuple[BufferGroup, ...]:
    """Return the groups of a `DeepSeekV4SingleKVPool`: pages of latent rows, which reports call K.

    A page holds the data of all its tokens and then the scales of all of them, 576 and 8 bytes a token, or each
    token's scales right behind its data, as the pool's layout says; what pads a page is nobody's.
    """
    data_width, scale_base, scale_width = pool.kv_layout.row_addressing(pool.page_size)
    parts = [("", data_width, 0)]
    if not pool.kv_layout.is_interleaved:
        parts.append(("scales", scale_width, scale_base))
    return tuple(_pages(pool, want, suffix=suffix, width=width, offset=offset) for suffix, width, offset in parts)


def deepseek_v4_uniform(pool: Any, want: Wanted) -> tuple[BufferGroup, ...]:
    """Return the group of a `DeepSeekV4UniformFP8KVPool`: pages of latent rows without scales."""
    return (_pages(pool, want, suffix="", width=pool.kv_cache_total_dim, offset=0),)


def _pages(pool: Any, want: Wanted, *, suffix: str, width: int, offset: int) -> BufferGroup:
    first = pool.kv_buffer[0]
    return want.group(
        num_slots=first.shape[0] * pool.page_size,
        k=want.source(pool.kv_buffer, page_size=pool.page_size, width=width, offset=offset),
        v=None,
        layers=[f"layer {i}" for i in _layer_ids(pool, want)],
        device=first.device,
        suffix=suffix,
        # The allocator keeps a page of its own, which may be more than one of these.
        first_slot=pool.page_size,
    )


def _by_head(pool: Any, want: Wanted, ids: Sequence[int]) -> BufferGroup:
    page, slots = pool.page_size, _final_slots(pool)
    pages = slots // page
    heads = range(pool.k_buffer[0].shape[1])

    def source(buffers: Sequence[torch.Tensor]) -> KvSource:
        views = [buffer[:pages, head] for buffer in buffers for head in heads]
        return want.source(views, page_size=page, width=views[0].shape[2] * views[0].element_size())

    return want.group(
        num_slots=slots,
        k=source(pool.k_buffer),
        v=source(pool.v_buffer),
        layers=[f"layer {i}, head {head}" for i in ids for head in heads],
        device=pool.k_buffer[0].device,
        first_slot=pool.page_size,
    )


def _final_slots(pool: Any) -> int:
    """Return how many slots a pool has memory for, its padding page included.

    Buffers may be longer: where an engine sizes its pools behind graph capture, only their front has memory.
    """
    owner = getattr(pool, "_post_capture_owner", None)
    if owner is not None and owner._final_num_tokens is None:
        raise ValueError(must_be(type(pool).__name__, "size", "final, behind graph capture", "not yet"))
    slots: int = pool.size + pool.page_size
    return slots


def _layer_ids(pool: Any, want: Wanted) -> Sequence[int]:
    if want.layer_ids is not None:
        return want.layer_ids
    ids: Sequence[int] = getattr(pool, "model_layer_ids", range(pool.start_layer, pool.start_layer + pool.layer_num))
    return ids


def _has_rows(layers: Sequence[torch.Tensor], slots: int) -> bool:
    return all(layer.shape[0] >= slots for layer in layers)


def _expect_rows(part: str, argument: str, layers: Sequence[torch.Tensor] | None, slots: int) -> None:
    if not layers:
        raise ValueError(must_be(part, argument, "a buffer for every layer", "none"))
    if not _has_rows(layers, slots):
        got = f"{min(layer.shape[0] for layer in layers)} rows"
        raise ValueError(must_be(part, argument, f"one row for each of {slots} slots, in every layer", got))
