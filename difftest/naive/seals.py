"""The plain implementation of seals: one slot, one band, one word of its bytes at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kv_canary.difftest.naive.records import (
    MASK_32,
    MASK_64,
    RETIRED,
    Record,
    mix,
    read_record,
    report,
    signed,
)
from kv_canary.specs.structures import Endpoint, KvSource, ViolationLog

SEAL_K, SEAL_V = 16384, 32768
STEP_MASK = (1 << 39) - 1


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
    """Keep a hash of all bytes of slots, so that any later change of one of them is seen."""
    for _, slot in _taken(slots, span, endpoint):
        record = read_record(endpoint.records, slot)
        if written_in is not None and (record[3] >> 24) & STEP_MASK != int(written_in) & STEP_MASK:
            continue
        bands = range(_bands(endpoint, layers_per_band))
        words = [record[3], *(_word(endpoint, slot, band, layers_per_band, seed) for band in bands)]
        for i, word in enumerate(words):
            seals[slot, i] = signed(word) if _is_live(record) else 0


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
    """Hold all bytes of slots against their seals."""

    def count(what: int, entry: int) -> None:
        checked[what] = signed(int(checked[what]) + 1)
        if ends is not None and counts is not None:
            of_list = sum(end <= entry for end in ends.tolist())
            if of_list < len(ends):
                counts[of_list, what - 1] = signed(int(counts[of_list, what - 1]) + 1)

    checked[0] = signed(int(checked[0]) + 1)
    for entry, slot in _taken(slots, span, endpoint):
        record = read_record(endpoint.records, slot)
        if not _is_live(record):
            continue
        header, *kept = [word & MASK_64 for word in seals[slot].tolist()]
        if header != record[3] or not kept[0]:
            count(2, entry)
            continue
        count(1, entry)
        for band, old in enumerate(kept[: _bands(endpoint, layers_per_band)]):
            new = _word(endpoint, slot, band, layers_per_band, seed)
            reasons = SEAL_K * (old & MASK_32 != new & MASK_32) + SEAL_V * (old >> 32 != new >> 32)
            if reasons:
                site = endpoint.tag + 256 * endpoint.group
                position = record[0] >> 32
                row = [site, reasons, slot, 0, position, record[0], -1, record[1], 0, old, new, record[3], int(step)]
                report(violations, [*row, 0, 0, band])
                count(3, entry)


def _taken(slots: torch.Tensor | None, span: torch.Tensor, endpoint: Endpoint) -> Iterator[tuple[int, int]]:
    """The entries of a span, with their slots, that have a record and, in every source, bytes."""
    entries = list(range(endpoint.records.shape[0])) if slots is None else slots.tolist()
    first, count = span.tolist()
    sources = [s for s in (endpoint.k_source, endpoint.v_source, endpoint.k_scales, endpoint.v_scales) if s is not None]
    if not 0 <= first <= len(entries):
        return
    for entry, slot in list(enumerate(entries))[first:][: max(count, 0)]:
        if 0 < slot < endpoint.records.shape[0] and all(_place(source, slot) is not None for source in sources):
            yield entry, slot


def _bands(endpoint: Endpoint, layers_per_band: int) -> int:
    """The bands that the layers make, the last of which may have fewer."""
    counts = [len(source.layers) for source in (endpoint.k_source, endpoint.v_source) if source is not None]
    return (max(counts) + layers_per_band - 1) // layers_per_band


def _is_live(record: Record) -> bool:
    return any(record) and not record[3] & RETIRED


def _place(source: KvSource, slot: int) -> tuple[int, int] | None:
    """The row of a slot's token in each layer, and its first byte there; None where there is none."""
    row, token = divmod(slot - source.slot_bias, source.page_size)
    if not 0 <= row < source.layers[0].shape[0]:
        return None
    return row, source.offset_bytes + token * source.token_stride_bytes


def _word(endpoint: Endpoint, slot: int, band: int, layers_per_band: int, seed: int) -> int:
    halves = []
    for source, scales in ((endpoint.k_source, endpoint.k_scales), (endpoint.v_source, endpoint.v_scales)):
        if source is None:
            halves.append(0)
            continue
        total = 0
        for layer in range(len(source.layers)):
            if layer // layers_per_band == band:
                words = list(_words(source, slot, layer)) + (
                    [] if scales is None else list(_words(scales, slot, layer))
                )
                total += sum(_added(word, j, layer, seed) for j, word in enumerate(words))
        half = mix(total & MASK_64) >> 32
        halves.append(half or 1)
    return halves[0] | halves[1] << 32


def _words(source: KvSource, slot: int, layer: int) -> Iterator[int]:
    """The words of a slot's token in a layer; a shorter last one is as good as zero-padded."""
    place = _place(source, slot)
    if place is not None:
        row, begin = place
        whole = source.layers[layer][row].reshape(-1).view(torch.uint8)
        token = bytes(whole[begin : begin + source.bytes_per_token].tolist())
        for first in range(0, len(token), 8):
            yield int.from_bytes(token[first : first + 8], "little")


def _added(word: int, j: int, layer: int, seed: int) -> int:
    """What word `j` of a token in `layer` adds: the product of its halves, each moved by keys of both."""
    of_word, of_layer = mix((j + seed) & MASK_64), mix(~(layer + seed) & MASK_64)
    low = (word & MASK_32) + (of_word & MASK_32) + (of_layer & MASK_32)
    high = (word >> 32) + (of_word >> 32) + (of_layer >> 32)
    return (low & MASK_32) * (high & MASK_32)
