"""seal: the Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kv_canary.constants import OWNER_BITS, STEP_MASK
from kv_canary.kernels.hashing import as_i64
from kv_canary.kernels.launching import begin, overlapping
from kv_canary.kernels.records import records_of
from kv_canary.kernels.sealing import (
    band_word,
    launch_of,
    load_tile,
    seals_of,
    sources_of,
    span_of,
)
from kv_canary.specs.sealing import num_bands
from kv_canary.specs.structures import Endpoint

_OWNER_BITS = tl.constexpr(OWNER_BITS)
_STEP_MASK = tl.constexpr(STEP_MASK)


@triton.jit(do_not_specialize=["total", "num_bands", "layers_per_band", "seed", "bands_at_once"])
def _seal(
    # inputs
    slots_ptr,
    total,
    span_ptr,
    records,
    k,
    v,
    k_scales,
    v_scales,
    num_bands,
    layers_per_band,
    seed,
    step_ptr,
    # outputs
    seals,
    bands_at_once,
    # constants
    SLOTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    first, count = span_of(span_ptr, tl.cast(total, tl.int64))
    tiles = (count + SLOTS - 1) // SLOTS
    key, wide = tl.cast(seed, tl.int64), tl.cast(layers_per_band, tl.int64)
    groups = (num_bands + bands_at_once - 1) // bands_at_once
    for work in range(tl.program_id(0).to(tl.int64), tiles * groups, tl.num_programs(0)):
        tile, first_band = work % tiles, (work // tiles) * bands_at_once
        slot, readable, _ident, _chain, writer, live = load_tile(
            slots_ptr, first, tile, count, records, k, v, k_scales, v_scales, SLOTS
        )
        if step_ptr is not None:
            of_step = ((writer >> _OWNER_BITS) & _STEP_MASK) == (tl.load(step_ptr) & _STEP_MASK)
            readable, live = readable & of_step, live & of_step
        # readable: 0 < slot < num_slots; band < num_bands
        seal_ptr = seals.ptr + slot * seals.stride
        if first_band == 0:
            tl.store(seal_ptr, tl.where(live, writer, 0), mask=readable)
        for band in range(first_band, tl.minimum(first_band + bands_at_once, num_bands)):
            layer = band * wide
            word = as_i64(band_word(k, v, k_scales, v_scales, slot, live, layer, layer + wide, key, SLOTS))
            tl.store(seal_ptr + 1 + band, tl.where(live, word, 0), mask=readable)


def seal(
    *,
    slots: torch.Tensor | None,
    span: torch.Tensor,
    endpoint: Endpoint,
    layers_per_band: int,
    seed: int,
    written_in: torch.Tensor | None,
    seals: torch.Tensor,
) -> None:
    """Keep a hash of all bytes of slots; see specs/seal.py."""
    total = len(endpoint.records) if slots is None else len(slots)
    if total == 0:
        return
    bands = num_bands(endpoint, layers_per_band)
    grid, sizes = launch_of(endpoint, total, bands, span.device)
    _seal[grid](
        # inputs
        slots,
        total,
        span,
        records_of(endpoint.records),
        *sources_of(endpoint),
        bands,
        layers_per_band,
        seed,
        written_in,
        # outputs
        seals_of(seals),
        # constants
        **sizes,
        **overlapping(span.device),
    )
