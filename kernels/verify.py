"""verify: the Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kv_canary.constants import ANCHOR, HEAD_OF_CHAIN, Reason
from kv_canary.kernels.hashing import as_i64, as_u64, fingerprint, next_chain, source_arguments, source_row
from kv_canary.kernels.launching import persistent_grid
from kv_canary.kernels.reporting import claim_rows
from kv_canary.specs.structures import Endpoint, VerifyPlan, ViolationLog

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
def _verify(
    # inputs
    slots_ptr,
    prev_slots_ptr,
    positions_ptr,
    tokens_ptr,
    rows_ptr,
    num_valid_ptr,
    capacity,
    records_ptr,
    record_stride,
    num_slots,
    anchors_ptr,
    num_anchors,
    step_ptr,
    k_table_ptr,
    k_num_layers,
    k_num_rows,
    k_row_stride,
    k_page_size,
    k_bytes_per_token,
    k_read_bytes,
    k_num_windows,
    k_offset_bytes,
    k_slot_bias,
    v_table_ptr,
    v_num_layers,
    v_num_rows,
    v_row_stride,
    v_page_size,
    v_bytes_per_token,
    v_read_bytes,
    v_num_windows,
    v_offset_bytes,
    v_slot_bias,
    # outputs
    ring_ptr,
    ring_cap,
    count_ptr,
    counters_ptr,
    # constants
    TAG: tl.constexpr,
    TRACK_LIFETIME: tl.constexpr,
    HAS_K: tl.constexpr,
    HAS_V: tl.constexpr,
    K_LOAD_BYTES: tl.constexpr,
    K_BLOCK_WORDS: tl.constexpr,
    V_LOAD_BYTES: tl.constexpr,
    V_BLOCK_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = tl.minimum(tl.maximum(tl.load(num_valid_ptr), 0).to(tl.int64), capacity)
    step = tl.load(step_ptr)
    pid = tl.program_id(0).to(tl.int64)
    if pid == 0:
        tl.atomic_add(counters_ptr + TAG * 2, 1)
        tl.atomic_add(counters_ptr + TAG * 2 + 1, n)
    for first in range(pid * BLOCK, n, tl.num_programs(0).to(tl.int64) * BLOCK):
        entry = first + tl.arange(0, BLOCK)
        live = entry < n
        # entry < n <= capacity
        slot = tl.load(slots_ptr + entry, mask=live, other=0)
        previous = tl.load(prev_slots_ptr + entry, mask=live, other=0)
        position = tl.load(positions_ptr + entry, mask=live, other=0)
        token = tl.load(tokens_ptr + entry, mask=live, other=-1)
        row = tl.load(rows_ptr + entry, mask=live, other=0).to(tl.int64)

        in_range = (slot >= 0) & (slot < num_slots)
        if HAS_K:
            k_row = source_row(slot, k_slot_bias, k_page_size)
            in_range = in_range & (k_row >= 0) & (k_row < k_num_rows)
        if HAS_V:
            v_row = source_row(slot, v_slot_bias, v_page_size)
            in_range = in_range & (v_row >= 0) & (v_row < v_num_rows)
        unmapped = live & (slot == 0)
        out_of_range = live & (slot != 0) & (in_range == 0)
        readable = live & (slot != 0) & in_range
        # readable: 0 < slot < num_slots
        record_ptr = records_ptr + slot * record_stride
        ident = tl.load(record_ptr, mask=readable, other=0)
        chain = tl.load(record_ptr + 1, mask=readable, other=0)
        kv = tl.load(record_ptr + 2, mask=readable, other=0)
        writer = tl.load(record_ptr + 3, mask=readable, other=0)
        never_written = readable & ((ident | chain | kv | writer) == 0)
        checked = readable & (never_written == 0)
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

        # The predecessor's chain: from its record, or at the head of a chain from the row's anchor.
        head = previous == _HEAD_OF_CHAIN
        follows = checked & (previous > 0) & (previous < num_slots)
        previous_ptr = records_ptr + previous * record_stride
        # follows: 0 < previous < num_slots
        previous_chain = tl.load(previous_ptr + 1, mask=follows, other=0)
        previous_other = tl.load(previous_ptr, mask=follows, other=0)
        previous_other |= tl.load(previous_ptr + 2, mask=follows, other=0)
        previous_other |= tl.load(previous_ptr + 3, mask=follows, other=0)
        follows = follows & ((previous_chain | previous_other) != 0)
        anchor = tl.full([BLOCK], _ANCHOR, tl.int64)
        if anchors_ptr is not None:
            # 0 < row < num_anchors
            anchored = checked & head & (row > 0) & (row < num_anchors)
            anchor = tl.where(anchored, tl.load(anchors_ptr + row, mask=anchored, other=0), anchor)
        previous_chain = tl.where(head, anchor, previous_chain)
        chain_checked = checked & (head | follows)
        expected_chain = as_i64(next_chain(as_u64(previous_chain), as_u64(ident)))
        reasons += tl.where(chain_checked & (chain != expected_chain), _CHAIN, 0)

        observed_kv = tl.zeros([BLOCK], dtype=tl.uint64)
        if HAS_K:
            k_print = fingerprint(
                slot,
                stored_position,
                checked,
                k_table_ptr,
                k_num_layers,
                k_row_stride,
                k_page_size,
                k_bytes_per_token,
                k_read_bytes,
                k_num_windows,
                k_offset_bytes,
                k_slot_bias,
                K_LOAD_BYTES,
                K_BLOCK_WORDS,
            )
            observed_kv = observed_kv | k_print
            reasons += tl.where(checked & ((as_u64(kv) & 0xFFFFFFFF) != k_print), _K, 0)
        if HAS_V:
            v_print = fingerprint(
                slot,
                stored_position,
                checked,
                v_table_ptr,
                v_num_layers,
                v_row_stride,
                v_page_size,
                v_bytes_per_token,
                v_read_bytes,
                v_num_windows,
                v_offset_bytes,
                v_slot_bias,
                V_LOAD_BYTES,
                V_BLOCK_WORDS,
            )
            observed_kv = observed_kv | (v_print << 32)
            reasons += tl.where(checked & ((as_u64(kv) >> 32) != v_print), _V, 0)

        bad = reasons != 0
        if tl.sum(bad.to(tl.int32), axis=0) > 0:
            out_ptr, fits = claim_rows(bad, count_ptr, ring_ptr, ring_cap)
            tl.store(out_ptr, tl.full([BLOCK], TAG, tl.int64), mask=fits)
            tl.store(out_ptr + 1, reasons.to(tl.int64), mask=fits)
            tl.store(out_ptr + 2, slot, mask=fits)
            tl.store(out_ptr + 3, row, mask=fits)
            tl.store(out_ptr + 4, position, mask=fits)
            tl.store(out_ptr + 5, ident, mask=fits)
            tl.store(out_ptr + 6, token, mask=fits)
            tl.store(out_ptr + 7, chain, mask=fits)
            tl.store(out_ptr + 8, tl.where(chain_checked, expected_chain, 0), mask=fits)
            tl.store(out_ptr + 9, kv, mask=fits)
            tl.store(out_ptr + 10, as_i64(observed_kv), mask=fits)
            tl.store(out_ptr + 11, writer, mask=fits)
            tl.store(out_ptr + 12, tl.zeros([BLOCK], tl.int64) + step, mask=fits)
            tl.store(out_ptr + 13, previous, mask=fits)
            tl.store(out_ptr + 14, tl.zeros([BLOCK], tl.int64), mask=fits)
            tl.store(out_ptr + 15, tl.zeros([BLOCK], tl.int64), mask=fits)


def verify(
    *,
    verify_plan: VerifyPlan,
    endpoint: Endpoint,
    anchors: torch.Tensor | None,
    step: torch.Tensor,
    track_lifetime: bool,
    violations: ViolationLog,
    counters: torch.Tensor,
) -> None:
    """Check the planned records against neighbours, positions and K/V bytes; see specs/verify.py."""
    records = endpoint.records
    capacity = verify_plan.slots.shape[0]
    grid = persistent_grid(triton.cdiv(capacity, BLOCK_ENTRIES), records.device)
    _verify[grid](
        # inputs
        verify_plan.slots,
        verify_plan.prev_slots,
        verify_plan.positions,
        verify_plan.tokens,
        verify_plan.rows,
        verify_plan.num_valid,
        capacity,
        records,
        records.stride(0),
        records.shape[0],
        anchors,
        0 if anchors is None else anchors.shape[0],
        step,
        # outputs
        ring_ptr=violations.ring,
        ring_cap=violations.ring.shape[0],
        count_ptr=violations.count,
        counters_ptr=counters,
        # constants
        TAG=int(endpoint.tag),
        TRACK_LIFETIME=track_lifetime,
        HAS_K=endpoint.k_source is not None,
        HAS_V=endpoint.v_source is not None,
        BLOCK=BLOCK_ENTRIES,
        **source_arguments(endpoint.k_source, "k"),
        **source_arguments(endpoint.v_source, "v"),
    )
