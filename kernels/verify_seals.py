"""verify_seals: the Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kv_canary.constants import Reason
from kv_canary.kernels.hashing import as_i64, as_u64
from kv_canary.kernels.launching import begin, overlapping
from kv_canary.kernels.records import records_of
from kv_canary.kernels.reporting import log_of, report
from kv_canary.kernels.sealing import (
    band_word,
    launch_of,
    load_tile,
    seals_of,
    sources_of,
    span_of,
)
from kv_canary.specs.sealing import num_bands
from kv_canary.specs.structures import Endpoint, ViolationLog

_SEAL_K = tl.constexpr(int(Reason.SEAL_K))
_SEAL_V = tl.constexpr(int(Reason.SEAL_V))


@triton.jit(do_not_specialize=["total", "num_bands", "layers_per_band", "seed", "num_lists", "bands_at_once", "site"])
def _verify_seals(
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
    seals,
    step_ptr,
    ends_ptr,
    num_lists,
    # outputs
    log,
    checked_ptr,
    counts_ptr,
    site,
    bands_at_once,
    # constants
    SLOTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    first, count = span_of(span_ptr, tl.cast(total, tl.int64))
    tiles = (count + SLOTS - 1) // SLOTS
    key, wide, step = tl.cast(seed, tl.int64), tl.cast(layers_per_band, tl.int64), tl.load(step_ptr)
    if tl.program_id(0) == 0:
        tl.atomic_add(checked_ptr, 1)
    groups = (num_bands + bands_at_once - 1) // bands_at_once
    for work in range(tl.program_id(0).to(tl.int64), tiles * groups, tl.num_programs(0)):
        tile, first_band = work % tiles, (work // tiles) * bands_at_once
        slot, _readable, ident, chain, writer, live = load_tile(
            slots_ptr, first, tile, count, records, k, v, k_scales, v_scales, SLOTS
        )
        # live: 0 < slot < num_slots; band < num_bands
        seal_ptr = seals.ptr + slot * seals.stride
        sealed = live & (tl.load(seal_ptr, mask=live, other=0) == writer)
        sealed = sealed & (tl.load(seal_ptr + 1, mask=live, other=0) != 0)
        if first_band == 0:
            tl.atomic_add(checked_ptr + 1, tl.sum(sealed.to(tl.int64), axis=0))
            tl.atomic_add(checked_ptr + 2, tl.sum((live & (sealed == 0)).to(tl.int64), axis=0))
            if ends_ptr is not None:
                count_ptr, inside = _count_of(counts_ptr, ends_ptr, num_lists, first + tile * SLOTS, SLOTS)
                tl.atomic_add(count_ptr + tl.where(sealed, 0, 1), 1, mask=live & inside)
        for band in range(first_band, tl.minimum(first_band + bands_at_once, num_bands)):
            kept = tl.load(seal_ptr + 1 + band, mask=sealed, other=0)
            layer = band * wide
            found = as_i64(band_word(k, v, k_scales, v_scales, slot, sealed, layer, layer + wide, key, SLOTS))
            wrong = sealed & (kept != found)
            if tl.sum(wrong.to(tl.int32), axis=0) > 0:
                differs = as_u64(kept ^ found)
                reasons = tl.where((differs & 0xFFFFFFFF) != 0, _SEAL_K, 0)
                reasons += tl.where((differs >> 32) != 0, _SEAL_V, 0)
                zeros = tl.zeros([SLOTS], dtype=tl.int64)
                words = (
                    zeros + site,
                    reasons.to(tl.int64),
                    slot,
                    zeros,
                    (ident >> 32) & 0xFFFFFFFF,
                    ident,
                    zeros - 1,
                    chain,
                    zeros,
                    kept,
                    found,
                    writer,
                    zeros + step,
                    zeros,
                    zeros,
                    zeros + band,
                )
                report(log, wrong, words)
                tl.atomic_add(checked_ptr + 3, tl.sum(wrong.to(tl.int64), axis=0))
                if ends_ptr is not None:
                    count_ptr, inside = _count_of(counts_ptr, ends_ptr, num_lists, first + tile * SLOTS, SLOTS)
                    tl.atomic_add(count_ptr + 2, 1, mask=wrong & inside)


@triton.jit
def _count_of(counts_ptr, ends_ptr, num_lists, first, SLOTS: tl.constexpr):
    """Where the counts of the lists of entries [first, first + SLOTS) are, and which of these are of a list."""
    entry = first + tl.arange(0, SLOTS)
    of_list = tl.zeros([SLOTS], dtype=tl.int64)
    for number in range(num_lists):
        # number < lists
        of_list += (tl.load(ends_ptr + number) <= entry).to(tl.int64)
    # Where it is inside, 0 <= of_list < lists.
    return counts_ptr + of_list * 3, of_list < num_lists


def verify_seals(
    *,
    slots: torch.Tensor | None,
    span: torch.Tensor,
    endpoint: Endpoint,
    layers_per_band: int,
    seed: int,
    seals: torch.Tensor,
    step: torch.Tensor,
    violations: ViolationLog,
    checked: torch.Tensor,
    ends: torch.Tensor | None,
    counts: torch.Tensor | None,
) -> None:
    """Hold all bytes of slots against their seals; see specs/verify_seals.py."""
    total = len(endpoint.records) if slots is None else len(slots)
    bands = num_bands(endpoint, layers_per_band)
    grid, sizes = launch_of(endpoint, total, bands, span.device)
    _verify_seals[grid](
        # inputs
        slots,
        total,
        span,
        records_of(endpoint.records),
        *sources_of(endpoint),
        bands,
        layers_per_band,
        seed,
        seals_of(seals),
        step,
        ends,
        0 if ends is None else len(ends),
        # outputs
        log_of(violations),
        checked,
        counts,
        # constants
        site=endpoint.site,
        **sizes,
        **overlapping(span.device),
    )
