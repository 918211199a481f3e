"""Seals inside kernels: which slots a span takes, and the words of their seals.

Elements are held as [slots, words], one word of K or V each; what each adds to the sum of its slot needs two additions
and one multiplication of 32 bits, and sums are put together across threads once for a band.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kv_canary.kernels.hashing import as_u64, mix
from kv_canary.kernels.launching import divide, max_programs
from kv_canary.kernels.records import load_record
from kv_canary.kernels.sources import Source, covered, in_source, load_words, source_of
from kv_canary.specs.structures import Endpoint, KvSource

# Words of a token that are taken at a time, as few as there are; words of all slots of a tile together; its slots.
MAX_WORDS = 256
TILE_WORDS = 512
MAX_SLOTS = 32
WORD_BYTES = 8
# One warp has all of a tile, so that nothing is passed between warps.
NUM_WARPS = 1
# Bands that a program takes one after the other where there is work enough for all programs.
BANDS_AT_ONCE = 8


class Seals(NamedTuple):
    """A buffer of seals, as a kernel is given it: the address of the first, and words from one slot's to the next's."""

    ptr: Any
    stride: Any


def sources_of(endpoint: Endpoint) -> tuple[Source | None, ...]:
    """Return what a kernel is told of the bytes that seals are of: K, V, scales of K, scales of V."""
    sources = (endpoint.k_source, endpoint.v_source, endpoint.k_scales, endpoint.v_scales)
    return tuple(source_of(source, max_words=MAX_WORDS, whole=True) for source in sources)


def seals_of(seals: torch.Tensor) -> Seals:
    """Return what a kernel is told of int64 [num_slots, seal words]."""
    return Seals(seals, seals.stride(0))


def launch_of(endpoint: Endpoint, entries: int, bands: int, device: torch.device) -> tuple[tuple[int], dict[str, int]]:
    """Return the grid of a kernel that takes up to `entries` slots, and how many slots and bands a program takes."""
    given = [source for source in (endpoint.k_source, endpoint.v_source) if source is not None]
    # What is less aligned than words comes in pieces, each a register until it is part of one.
    words = TILE_WORDS if min(source.alignment for source in given) >= WORD_BYTES else TILE_WORDS // WORD_BYTES
    slots = min(MAX_SLOTS, max(1, words // max(block_words(source) for source in given)))
    tiles, programs = triton.cdiv(entries, slots), max_programs(device)
    together = max(1, min(BANDS_AT_ONCE, tiles * bands // programs))
    work = tiles * triton.cdiv(bands, together)
    return (max(1, min(work, programs)),), {"bands_at_once": together, "SLOTS": slots, "num_warps": NUM_WARPS}


def block_words(source: KvSource) -> int:
    """Return how many words of a token of `source` are taken at a time."""
    words: int = triton.next_power_of_2(-(-source.bytes_per_token // 8))
    return min(MAX_WORDS, words)


@triton.jit
def span_of(span_ptr, total):
    """The first entry that a span takes, and how many entries it does, of `total`; int64."""
    first, count = tl.load(span_ptr), tl.load(span_ptr + 1)
    inside = (first >= 0) & (first <= total)
    first = tl.where(inside, first, 0)
    return first, tl.where(inside, tl.minimum(tl.maximum(count, 0), total - first), 0)


@triton.jit
def load_tile(slots_ptr, first, number, count, records, k, v, k_scales, v_scales, SLOTS: tl.constexpr):
    """Tile `number` of a span: its slots, which of them are readable, and IDENTITY, CHAIN and WRITER of their records.

    Also whether there is a record that is not retired.
    """
    lane = number * SLOTS + tl.arange(0, SLOTS)
    slot = first + lane
    if slots_ptr is not None:
        # first + lane < first + count <= entries of the list
        slot = tl.load(slots_ptr + slot, mask=lane < count, other=0)
    readable = (lane < count) & (slot > 0) & (slot < records.num_slots) & in_source(k, slot)
    readable = readable & in_source(v, slot) & in_source(k_scales, slot) & in_source(v_scales, slot)
    ident, chain, kv, writer = load_record(records, slot, readable)
    live = readable & ((ident | chain | kv | writer) != 0) & (writer >= 0)
    return slot, readable, ident, chain, writer, live


@triton.jit
def band_word(k, v, k_scales, v_scales, slot, live, first, end, seed, SLOTS: tl.constexpr):
    """The word, uint64, of the band of layers [first, end) in the seal of each live slot, all of which are readable."""
    k_half = _half(k, k_scales, slot, live, first, end, seed, SLOTS)
    v_half = _half(v, v_scales, slot, live, first, end, seed, SLOTS)
    return k_half | (v_half << 32)


@triton.jit
def _half(source, scales, slot, live, first_layer, end_layer, seed, SLOTS: tl.constexpr):
    """The 32-bit hash, uint64, of K or V of each live slot in layers [first_layer, end_layer); 0 without a source."""
    half = tl.zeros([SLOTS], dtype=tl.uint64)
    if source is not None:
        total = _sum(source, slot, live, first_layer, end_layer, 0, seed, SLOTS)
        if scales is not None:
            beyond = (source.bytes_per_token + 7) // 8
            total += _sum(scales, slot, live, first_layer, end_layer, beyond, seed, SLOTS)
        half = mix(total) >> 32
        half = tl.where(half == 0, 1, half)
    return half


@triton.jit
def _sum(source, slot, live, first_layer, end_layer, first_word, seed, SLOTS: tl.constexpr):
    """The sum over the words of each live slot's token in layers [first_layer, end_layer), as far as there are any."""
    row, in_row = divide((slot - source.slot_bias).to(tl.uint32), source.page_size, source.page_bits, source.POWERS)
    place = row.to(tl.int64) * source.row_stride + source.offset_bytes + in_row.to(tl.int64) * source.token_stride
    width = tl.zeros_like(place) + source.bytes_per_token
    total = tl.zeros([SLOTS, source.BLOCK_WORDS], dtype=tl.uint64)
    end = tl.minimum(end_layer, source.num_layers)
    if source.ONE_STEP:
        total = _add_layers(total, source, place, width, live, first_layer, end, first_word, 0, seed)
    else:
        for first in range(0, (source.bytes_per_token + 7) // 8, source.BLOCK_WORDS):
            total = _add_layers(total, source, place, width, live, first_layer, end, first_word, first, seed)
    return tl.sum(total, axis=1)


@triton.jit
def _add_layers(total, source, place, width, live, first_layer, end_layer, first_word, first, seed):
    """Add to `total` what words [first, first + BLOCK_WORDS) of each live slot's token add in some layers."""
    j = first_word + first + tl.arange(0, source.BLOCK_WORDS).to(tl.int64)
    of_words = mix(as_u64(j + seed))[None, :]
    for layer in range(first_layer, end_layer):
        of_layer = mix(as_u64(-1 - (layer + seed)))
        # layer < num_layers: the table holds one address per layer.
        words = load_words(source, tl.load(source.table + layer) + place, width, first, live)
        low = words.to(tl.uint32) + of_words.to(tl.uint32) + of_layer.to(tl.uint32)
        high = (words >> 32).to(tl.uint32) + (of_words >> 32).to(tl.uint32) + (of_layer >> 32).to(tl.uint32)
        product = low.to(tl.uint64) * high.to(tl.uint64)
        if source.WHOLE_STEPS == 0:
            product = tl.where(covered(source, width, first, live), product, 0)
        total += product
    return total
