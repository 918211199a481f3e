"""The check of one entry: a slot's record against its predecessor's, its position, its token and the K/V bytes."""

from __future__ import annotations

import triton
import triton.language as tl

from kv_canary.constants import ANCHOR, HEAD_OF_CHAIN, Reason
from kv_canary.kernels.hashing import as_i64, as_u64, next_chain
from kv_canary.kernels.records import load_record, record_address
from kv_canary.kernels.reporting import report
from kv_canary.kernels.sources import (
    MAX_BLOCK_WORDS,
    NARROW_BYTES,
    Source,
    begin_fingerprint,
    covered_bytes,
    end_fingerprint,
    fingerprint,
    in_source,
    source_of,
)
from kv_canary.specs.structures import Endpoint

# Entries of a tile: one for each thread, so that nothing has to be passed between them.
BLOCK_ENTRIES = 128
# Words that one step takes of a fingerprint of more than NARROW_BYTES, and registers of each thread then.
WIDE_WORDS = 16
WIDE_REGISTERS = 128

_ANCHOR = tl.constexpr(ANCHOR)
_HEAD_OF_CHAIN = tl.constexpr(HEAD_OF_CHAIN)
_CHAIN = tl.constexpr(int(Reason.CHAIN))
_POSITION = tl.constexpr(int(Reason.POSITION))
_K = tl.constexpr(int(Reason.K))
_V = tl.constexpr(int(Reason.V))
_TOKEN = tl.constexpr(int(Reason.TOKEN))
_UNMAPPED = tl.constexpr(int(Reason.UNMAPPED))
_SLOT_RANGE = tl.constexpr(int(Reason.SLOT_RANGE))
_NEVER_WRITTEN = tl.constexpr(int(Reason.NEVER_WRITTEN))
_FREED = tl.constexpr(int(Reason.FREED))


def sources_of(endpoint: Endpoint) -> tuple[Source | None, Source | None]:
    """Return what a kernel that checks entries is told of K and V."""
    words = WIDE_WORDS if _wide(endpoint) else MAX_BLOCK_WORDS
    return source_of(endpoint.k_source, max_words=words), source_of(endpoint.v_source, max_words=words)


def tile_options(endpoint: Endpoint, entries: int = BLOCK_ENTRIES) -> dict[str, int]:
    """Return the options of a launch whose kernel checks entries: entries of a tile, warps and registers."""
    options = {"BLOCK": entries, "num_warps": entries // 32}
    return {**options, "maxnreg": WIDE_REGISTERS} if _wide(endpoint) else options


def _wide(endpoint: Endpoint) -> bool:
    return covered_bytes(endpoint.k_source) + covered_bytes(endpoint.v_source) > NARROW_BYTES


@triton.jit
def of_run(words, begins, BLOCK: tl.constexpr):
    """The value of `words` where the run of each entry of a tile begins; the tile's first entry begins one."""
    begin = tl.associative_scan(tl.where(begins, tl.arange(0, BLOCK), 0), 0, _later)
    return tl.gather(words, begin, 0)


@triton.jit
def _later(left, right):
    return tl.maximum(left, right)


@triton.jit
def begin_check(slot, position, live, records, k_source, v_source):
    """Send for the records and the bytes of a tile's entries, int64 [BLOCK], of any value, without waiting for any.

    Those of the bytes go by the position that the record should have.
    """
    # 0 < slot < num_slots where readable
    in_range = (slot < records.num_slots) & in_source(k_source, slot) & in_source(v_source, slot)
    readable = live & (slot > 0) & in_range
    k_begun = begin_fingerprint(k_source, slot, position, readable)
    v_begun = begin_fingerprint(v_source, slot, position, readable)
    ident, chain, kv, writer = load_record(records, slot, readable)
    return readable, k_begun, v_begun, ident, chain, kv, writer


@triton.jit
def check_entries(
    # what `begin_check` returned
    begun,
    # the entries of a tile
    slot,
    previous,
    position,
    token,
    row,
    begins,
    live,
    # inputs
    records,
    k_source,
    v_source,
    anchors_ptr,
    num_anchors,
    step,
    # outputs
    log,
    site,
    # constants
    TRACK_LIFETIME: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Report what is wrong with each live entry of a tile; entries are int64 [BLOCK], of any value.

    Every load that can be is under way before the first is waited for. Where a record has another position than it
    should, there is something to report, and the bytes are read again.

    begins: where runs begin, and rows are given for these entries alone, as are heads of chains; or None.
    """
    readable, k_begun, v_begun, ident, chain, kv, writer = begun
    # The predecessor's record. Most predecessors are what the lane before reads; the others are read here.
    lane = tl.arange(0, BLOCK)
    before = tl.maximum(lane - 1, 0)
    beside = (lane > 0) & (tl.gather(tl.where(readable, slot, 0), before, 0) == previous) & (previous > 0)
    apart = readable & (beside == 0) & (previous > 0) & (previous < records.num_slots)
    # apart: 0 < previous < num_slots
    previous_ptr = record_address(records, previous)
    read_chain = tl.load(previous_ptr + 1, mask=apart, other=0)
    previous_chain = tl.where(beside, tl.gather(chain, before, 0), read_chain)
    # A chain of 0 may be a record's that is all zero, or another's.
    follows = beside | apart
    doubtful = follows & (previous_chain == 0)
    others = tl.load(previous_ptr, mask=doubtful, other=0) | tl.load(previous_ptr + 2, mask=doubtful, other=0)
    others |= tl.load(previous_ptr + 3, mask=doubtful, other=0)
    follows = follows & ((doubtful == 0) | (others != 0))
    head = previous == _HEAD_OF_CHAIN
    if anchors_ptr is None:
        previous_chain = tl.where(head, _ANCHOR, previous_chain)
    else:
        # 0 < row < num_anchors
        anchored = readable & head & (row > 0) & (row < num_anchors)
        anchor = tl.load(anchors_ptr + row, mask=anchored, other=_ANCHOR)
        previous_chain = tl.where(head, anchor, previous_chain)
    expected_chain = as_i64(next_chain(as_u64(previous_chain), as_u64(ident)))

    k_print = end_fingerprint(k_source, k_begun, readable)
    v_print = end_fingerprint(v_source, v_begun, readable)
    present = (ident | chain | kv | writer) != 0
    checked = readable & present
    if TRACK_LIFETIME:
        checked = checked & (writer >= 0)
    chain_checked = checked & (head | follows)
    stored_token, stored_position = ident & 0xFFFFFFFF, (ident >> 32) & 0xFFFFFFFF
    # Almost always all is well, which takes no more than this; what is wrong is told apart below.
    wrong = (checked == 0) | (stored_position != position) | ((token >= 0) & (stored_token != token))
    wrong = wrong | (chain_checked & (chain != expected_chain))
    if k_source is not None:
        wrong = wrong | ((as_u64(kv) & 0xFFFFFFFF) != k_print)
    if v_source is not None:
        wrong = wrong | ((as_u64(kv) >> 32) != v_print)
    wrong = wrong & live
    if tl.sum(wrong.to(tl.int32), axis=0) > 0:
        if begins is not None:
            row = of_run(row, begins, BLOCK)
        out_of_range = live & (slot != 0) & (readable == 0)
        reasons = tl.where(live & (slot == 0), _UNMAPPED, 0) + tl.where(out_of_range, _SLOT_RANGE, 0)
        reasons += tl.where(readable & (present == 0), _NEVER_WRITTEN, 0)
        if TRACK_LIFETIME:
            reasons += tl.where(readable & present & (writer < 0), _FREED, 0)
        reasons += tl.where(checked & (stored_position != position), _POSITION, 0)
        reasons += tl.where(checked & (token >= 0) & (stored_token != token), _TOKEN, 0)
        reasons += tl.where(chain_checked & (chain != expected_chain), _CHAIN, 0)
        moved = checked & (stored_position != position)
        k_print = tl.where(moved, fingerprint(k_source, slot, stored_position, moved), tl.where(checked, k_print, 0))
        v_print = tl.where(moved, fingerprint(v_source, slot, stored_position, moved), tl.where(checked, v_print, 0))
        if k_source is not None:
            reasons += tl.where(checked & ((as_u64(kv) & 0xFFFFFFFF) != k_print), _K, 0)
        if v_source is not None:
            reasons += tl.where(checked & ((as_u64(kv) >> 32) != v_print), _V, 0)
        zeros = tl.zeros([BLOCK], dtype=tl.int64)
        words = (
            zeros + site,
            reasons.to(tl.int64),
            slot,
            row,
            position,
            ident,
            token,
            chain,
            tl.where(chain_checked, expected_chain, 0),
            kv,
            as_i64(k_print | (v_print << 32)),
            writer,
            zeros + step,
            previous,
            zeros,
            zeros,
        )
        report(log, reasons != 0, words)
