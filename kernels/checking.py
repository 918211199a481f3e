"""What one entry's check is: a slot's record against its predecessor's, its position, its token and the K/V bytes."""

from __future__ import annotations

import triton
import triton.language as tl

from kv_canary.constants import ANCHOR, HEAD_OF_CHAIN, Reason
from kv_canary.kernels.hashing import as_i64, as_u64, next_chain
from kv_canary.kernels.records import load_record, record_address
from kv_canary.kernels.reporting import claim_rows
from kv_canary.kernels.sources import fingerprint, in_source

# Entries of a tile: one for each thread, so that nothing has to be passed between them.
BLOCK_ENTRIES = 128

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


@triton.jit
def check_entries(
    # the entries of a tile
    slot,
    previous,
    position,
    token,
    row,
    live,
    # inputs
    records,
    k_source,
    v_source,
    anchors_ptr,
    num_anchors,
    step,
    # outputs
    ring_ptr,
    ring_cap,
    count_ptr,
    # constants
    TAG: tl.constexpr,
    TRACK_LIFETIME: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Report what is wrong with each live entry of a tile; entries are int64 [BLOCK], of any value."""
    in_range = (slot >= 0) & (slot < records.num_slots) & in_source(k_source, slot) & in_source(v_source, slot)
    unmapped = live & (slot == 0)
    out_of_range = live & (slot != 0) & (in_range == 0)
    readable = live & (slot != 0) & in_range
    # readable: 0 < slot < num_slots
    ident, chain, kv, writer = load_record(records, slot, readable)
    present = (ident | chain | kv | writer) != 0
    never_written = readable & (present == 0)
    checked = readable & present
    freed = checked & (writer < 0)
    if TRACK_LIFETIME:
        checked = checked & (freed == 0)

    stored_token = ident & 0xFFFFFFFF
    stored_position = (ident >> 32) & 0xFFFFFFFF
    reasons = tl.where(unmapped, _UNMAPPED, 0) + tl.where(out_of_range, _SLOT_RANGE, 0)
    reasons += tl.where(never_written, _NEVER_WRITTEN, 0)
    if TRACK_LIFETIME:
        reasons += tl.where(freed, _FREED, 0)
    reasons += tl.where(checked & (stored_position != position), _POSITION, 0)
    reasons += tl.where(checked & (token >= 0) & (stored_token != token), _TOKEN, 0)

    # The predecessor's chain. Most predecessors are what the lane before has just read; the others' records are read.
    lane = tl.arange(0, BLOCK)
    before = tl.maximum(lane - 1, 0)
    beside = (lane > 0) & (tl.gather(tl.where(readable, slot, 0), before, 0) == previous) & (previous > 0)
    previous_chain = tl.gather(chain, before, 0)
    previous_present = tl.gather(present.to(tl.int32), before, 0) != 0
    apart = checked & (beside == 0) & (previous > 0) & (previous < records.num_slots)
    # apart: 0 < previous < num_slots
    address = record_address(records, previous)
    read_chain = tl.load(address + 1, mask=apart, other=0)
    # A chain of 0 may be a record's that is all zero, or another's.
    doubtful = apart & (read_chain == 0)
    others = tl.load(address, mask=doubtful, other=0) | tl.load(address + 2, mask=doubtful, other=0)
    others |= tl.load(address + 3, mask=doubtful, other=0)
    follows = tl.where(beside, previous_present, apart & ((read_chain | others) != 0))
    head = previous == _HEAD_OF_CHAIN
    anchor = tl.full([BLOCK], _ANCHOR, tl.int64)
    if anchors_ptr is not None:
        # 0 < row < num_anchors
        anchored = checked & head & (row > 0) & (row < num_anchors)
        anchor = tl.where(anchored, tl.load(anchors_ptr + row, mask=anchored, other=0), anchor)
    previous_chain = tl.where(head, anchor, tl.where(beside, previous_chain, read_chain))
    chain_checked = checked & (head | follows)
    expected_chain = as_i64(next_chain(as_u64(previous_chain), as_u64(ident)))
    reasons += tl.where(chain_checked & (chain != expected_chain), _CHAIN, 0)

    k_print = fingerprint(k_source, slot, stored_position, checked)
    v_print = fingerprint(v_source, slot, stored_position, checked)
    if k_source is not None:
        reasons += tl.where(checked & ((as_u64(kv) & 0xFFFFFFFF) != k_print), _K, 0)
    if v_source is not None:
        reasons += tl.where(checked & ((as_u64(kv) >> 32) != v_print), _V, 0)

    bad = reasons != 0
    if tl.sum(bad.to(tl.int32), axis=0) > 0:
        out_ptr, fits = claim_rows(bad, count_ptr, ring_ptr, ring_cap)
        zeros = tl.zeros([BLOCK], dtype=tl.int64)
        tl.store(out_ptr, zeros + TAG, mask=fits)
        tl.store(out_ptr + 1, reasons.to(tl.int64), mask=fits)
        tl.store(out_ptr + 2, slot, mask=fits)
        tl.store(out_ptr + 3, row, mask=fits)
        tl.store(out_ptr + 4, position, mask=fits)
        tl.store(out_ptr + 5, ident, mask=fits)
        tl.store(out_ptr + 6, token, mask=fits)
        tl.store(out_ptr + 7, chain, mask=fits)
        tl.store(out_ptr + 8, tl.where(chain_checked, expected_chain, 0), mask=fits)
        tl.store(out_ptr + 9, kv, mask=fits)
        tl.store(out_ptr + 10, as_i64(k_print | (v_print << 32)), mask=fits)
        tl.store(out_ptr + 11, writer, mask=fits)
        tl.store(out_ptr + 12, zeros + step, mask=fits)
        tl.store(out_ptr + 13, previous, mask=fits)
        tl.store(out_ptr + 14, zeros, mask=fits)
        tl.store(out_ptr + 15, zeros, mask=fits)
