"""The hash that seals are made of: NH, the universal hash of UMAC, over all bytes of a band of layers.

Black, Halevi, Krawczyk, Krovetz, Rogaway: UMAC: Fast and Secure Message Authentication (CRYPTO 1999). Word j of a
token in layer l, of halves (low, high), adds (low + a) * (high + b) to the sum, where a and b, mod 2**32, are the
halves of the keys of j and of l added up. Whatever changes, the sum stays the same with a chance of about 2**-32.
"""

from __future__ import annotations

import torch

from kv_canary.constants import to_signed
from kv_canary.reference.hashing import LOW_32, in_source, mix, runs, shift_right
from kv_canary.specs.sealing import num_bands
from kv_canary.specs.structures import Endpoint, KvSource


def chosen_slots(
    slots: torch.Tensor | None, span: torch.Tensor, endpoint: Endpoint
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the entries of a span whose slots have a record and bytes, and these slots; see specs/sealing.py."""
    total = len(endpoint.records) if slots is None else len(slots)
    first, count = (int(word) for word in span)
    first, count = (first, min(max(count, 0), total - first)) if 0 <= first <= total else (0, 0)
    entries = torch.arange(first, first + count, device=span.device)
    chosen = entries if slots is None else slots[first : first + count]
    inside = (chosen > 0) & (chosen < len(endpoint.records))
    for source in (endpoint.k_source, endpoint.v_source, endpoint.k_scales, endpoint.v_scales):
        inside &= in_source(source, chosen)
    return entries[inside], chosen[inside]


def band_words(endpoint: Endpoint, slots: torch.Tensor, *, layers_per_band: int, seed: int) -> torch.Tensor:
    """Return int64 [n, bands]: the words of the seals of int64 [n] slots, all inside every source."""
    bands = num_bands(endpoint, layers_per_band)
    k = _halves(endpoint.k_source, endpoint.k_scales, slots, bands, layers_per_band, seed)
    v = _halves(endpoint.v_source, endpoint.v_scales, slots, bands, layers_per_band, seed)
    return k | (v << 32)


def _halves(
    source: KvSource | None, scales: KvSource | None, slots: torch.Tensor, bands: int, layers_per_band: int, seed: int
) -> torch.Tensor:
    """Return int64 [n, bands]: the 32-bit hash of K or V in each band, never 0; 0 without a source."""
    if source is None:
        return torch.zeros(len(slots), bands, dtype=torch.int64, device=slots.device)
    sums = torch.zeros(bands, len(slots), dtype=torch.int64, device=slots.device)
    for layer in range(len(source.layers)):
        band = sums[layer // layers_per_band]
        band += _sum_of_layer(source, slots, layer, 0, seed)
        if scales is not None:
            band += _sum_of_layer(scales, slots, layer, -(-source.bytes_per_token // 8), seed)
    halves = shift_right(mix(sums.T), 32)
    return torch.where(halves == 0, 1, halves)


def _sum_of_layer(source: KvSource, slots: torch.Tensor, layer: int, first_word: int, seed: int) -> torch.Tensor:
    """Return the sum over the words of each slot's token in a layer, which count from `first_word` on."""
    if not len(slots):
        # There may be no row at all.
        return torch.zeros_like(slots)
    offset, width = slots - source.slot_bias, source.bytes_per_token
    row, token = offset // source.page_size, offset % source.page_size
    begins = row * source.row_stride_bytes + source.offset_bytes + token * source.token_stride_bytes
    data = torch.zeros(len(slots), -(-width // 8) * 8, dtype=torch.uint8, device=slots.device)
    data[:, :width] = runs(source.layers[layer], width).index_select(0, begins)
    words = data.view(torch.int64)
    j = torch.arange(first_word, first_word + words.shape[1], device=slots.device)
    of_words, of_layer = mix(j + to_signed(seed)), mix(torch.full_like(j[:1], to_signed(~(layer + seed))))
    low = words + of_words + of_layer
    high = shift_right(words, 32) + shift_right(of_words, 32) + shift_right(of_layer, 32)
    return ((low & LOW_32) * (high & LOW_32)).sum(dim=1)
