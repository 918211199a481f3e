"""The naive implementation's arithmetic: records, chains, fingerprints and reports, in Python integers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kv_canary.specs.structures import Endpoint, KvSource, ViolationLog

MASK_32 = (1 << 32) - 1
MASK_64 = (1 << 64) - 1
ANCHOR = 0x6B765F63616E6172
MULTIPLIER = 0x9E3779B97F4A7C15
RETIRED = 1 << 63
NO_RECORD = (0, 0, 0, 0)

HEAD_OF_CHAIN, UNCHECKED, BAD_SLOT = -1, -2, -3

Record = Sequence[int]


def signed(value: int) -> int:
    """The int64 of the same bits, mod 2**64."""
    value &= MASK_64
    return value - (1 << 64) if value >> 63 else value


def mix(x: int) -> int:
    """Splitmix64 (Steele, Lea & Flood 2014)."""
    z = (x + 0x9E3779B97F4A7C15) & MASK_64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK_64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK_64
    return z ^ z >> 31


def identity_of(token: int, position: int) -> int:
    return (position & MASK_32) << 32 | token & MASK_32


def advance(chain: int, identity: int) -> int:
    return (chain * MULTIPLIER + mix(identity)) & MASK_64


def writer_of(step: int, owner: int) -> int:
    return step % (1 << 39) << 24 | owner % (1 << 24)


def segment_of(offsets: list[int], request: int, total: int) -> list[tuple[int, int]]:
    """The indices of a request's segment that exist in a flat input of `total`, each with its place in the segment."""
    begin, end = offsets[request], offsets[request + 1]
    return [(j, j - begin) for j in range(max(begin, 0), min(end, total))]


def read_record(records: torch.Tensor, slot: int) -> Record:
    """The record of a slot in range, its words unsigned."""
    return [word & MASK_64 for word in records[slot].tolist()]


def store_record(records: torch.Tensor, slot: int, words: Record) -> None:
    for i, word in enumerate(words):
        records[slot, i] = signed(word)


def stores(endpoint: Endpoint, slot: int) -> bool:
    """Whether a slot has a record and, in every source, bytes."""
    sources = [source for source in (endpoint.k_source, endpoint.v_source) if source is not None]
    return 0 <= slot < endpoint.records.shape[0] and all(
        0 <= (slot - source.slot_bias) // source.page_size < source.layers[0].shape[0] for source in sources
    )


def previous_chain(records: torch.Tensor, predecessor: int, *, row: int, anchors: torch.Tensor | None) -> int | None:
    """The chain that an entry's own follows, or None where it is not to be checked."""
    if predecessor == HEAD_OF_CHAIN:
        return int(anchors[row]) if anchors is not None and 0 < row < anchors.shape[0] else ANCHOR
    if not 0 < predecessor < records.shape[0]:
        return None
    record = read_record(records, predecessor)
    return record[1] if any(record) else None


def kv_word(endpoint: Endpoint, slot: int, position: int) -> int:
    """The fingerprints of a slot's K and V bytes, for a token at `position`."""
    halves = [
        0 if source is None else fingerprint(source, slot, position)
        for source in (endpoint.k_source, endpoint.v_source)
    ]
    return halves[0] | halves[1] << 32


def fingerprint(source: KvSource, slot: int, position: int) -> int:
    num_layers = len(source.layers)
    num_windows = -(-source.bytes_per_token // source.read_bytes)
    window = position // num_layers % num_windows
    window_begin = window * source.read_bytes
    window_end = min(window_begin + source.read_bytes, source.bytes_per_token)

    row, place = divmod(slot - source.slot_bias, source.page_size)
    token_begin = source.offset_bytes + place * source.token_stride_bytes
    row_bytes = source.layers[position % num_layers][row].reshape(-1).view(torch.uint8)
    covered = bytes(row_bytes[token_begin + window_begin : token_begin + window_end].tolist())

    total = 0
    for j, first in enumerate(range(0, len(covered), 8)):
        # A shorter last word is as good as zero-padded: its bytes are the low ones.
        total += mix(int.from_bytes(covered[first : first + 8], "little") ^ mix(j))
    total &= MASK_64
    return (total ^ total >> 32) & MASK_32


def report(violations: ViolationLog, words: list[int]) -> None:
    """Append a violation row; one past the capacity is counted and dropped."""
    count = int(violations.count)
    if 0 <= count < violations.ring.shape[0]:
        for i, word in enumerate(words):
            violations.ring[count, i] = signed(word)
    violations.count[0] = signed(count + 1)


def count_launch(counters: torch.Tensor, tag: int, number: int) -> None:
    """Add one launch and `number` entries or records to a tag's counters."""
    counters[tag, 0] = signed(int(counters[tag, 0]) + 1)
    counters[tag, 1] = signed(int(counters[tag, 1]) + number)
