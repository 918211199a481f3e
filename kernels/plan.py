"""plan: the Triton kernels. One program lays out the requests, then many fill the entries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kv_canary.constants import BAD_SLOT, HEAD_OF_CHAIN, STRIDE_BLOCK, UNCHECKED, Status
from kv_canary.kernels.launching import persistent_grid
from kv_canary.specs.structures import VerifyPlan, WritePlan

BLOCK_REQUESTS = 256
BLOCK_ENTRIES = 256

_BAD_SLOT = tl.constexpr(BAD_SLOT)
_HEAD_OF_CHAIN = tl.constexpr(HEAD_OF_CHAIN)
_UNCHECKED = tl.constexpr(UNCHECKED)
_STRIDE_BLOCK = tl.constexpr(STRIDE_BLOCK)
_OVERFLOW = tl.constexpr(int(Status.OVERFLOW))
_ROW_RANGE = tl.constexpr(int(Status.ROW_RANGE))
_LENGTH_RANGE = tl.constexpr(int(Status.LENGTH_RANGE))
_LUT_RANGE = tl.constexpr(int(Status.LUT_RANGE))


@triton.jit
def _look_up(req_to_token_ptr, row_stride, row, position, valid, lut_ptr, lut_len):
    """The slot of each valid (row, position), both in range, and whether the LUT was asked out of range."""
    slot = tl.load(req_to_token_ptr + row * row_stride + position, mask=valid, other=0).to(tl.int64)
    # Without a LUT nothing is asked out of range.
    bad = slot != slot
    if lut_ptr is not None:
        bad = valid & ((slot < 0) | (slot >= lut_len))
        # 0 <= slot < lut_len
        slot = tl.where(bad, _BAD_SLOT, tl.load(lut_ptr + slot, mask=valid & (bad == 0), other=0))
    return tl.where(slot < 0, _BAD_SLOT, slot), bad


@triton.jit
def _first_position(prefix, extend, window, AFTER_WRITE: tl.constexpr):
    """The first position of a request that is verified."""
    first_read = prefix + extend - 1 if AFTER_WRITE else prefix
    return tl.where(window > 0, tl.maximum(first_read - window, 0), 0)


@triton.jit
def _kept_blocks(start, prefix, stride, step):
    """For a non-empty strided request: its first kept block, how many it keeps, entries cut off in front and behind
    by [start, prefix), and whether the last position must be added because its block is not kept."""
    n = tl.maximum(stride, 1)
    # Blocks b with b mod n = -step mod n are kept; -step itself may not fit 64 bits.
    ahead = step % n
    ahead = tl.where(ahead < 0, ahead + n, ahead)
    wanted = tl.where(ahead == 0, 0, n - ahead)
    first_block = start // _STRIDE_BLOCK
    last_block = (prefix - 1) // _STRIDE_BLOCK
    skip = wanted - first_block % n
    skip = tl.where(skip < 0, skip + n, skip)
    none = skip > last_block - first_block
    kept_first = first_block + tl.where(none, 0, skip)
    kept_count = tl.where(none, 0, (last_block - kept_first) // n + 1)
    kept_last = kept_first + (kept_count - 1) * n
    front = tl.where((kept_count > 0) & (kept_first == first_block), start % _STRIDE_BLOCK, 0)
    last_kept = (kept_count > 0) & (kept_last == last_block)
    back = tl.where(last_kept, (last_block + 1) * _STRIDE_BLOCK - prefix, 0)
    return kept_first, kept_count, front, back, (last_kept == 0)


@triton.jit
def _lay_out(
    # inputs
    rows_ptr,
    owners_ptr,
    prefix_lens_ptr,
    extend_lens_ptr,
    strides_ptr,
    step_ptr,
    bs,
    req_to_token_ptr,
    row_stride,
    num_rows,
    max_len,
    window,
    lut_ptr,
    lut_len,
    capacity,
    # outputs
    entry_offsets_ptr,
    out_rows_ptr,
    out_owners_ptr,
    out_offsets_ptr,
    out_prefix_lens_ptr,
    out_seed_slots_ptr,
    num_requests_ptr,
    num_valid_ptr,
    num_requested_ptr,
    status_ptr,
    # constants
    AFTER_WRITE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    status = tl.zeros([BLOCK], dtype=tl.int32)
    entries = tl.zeros([1], dtype=tl.int64)
    tokens = tl.zeros([1], dtype=tl.int64)
    for first in range(0, bs, BLOCK):
        r = first + tl.arange(0, BLOCK).to(tl.int64)
        inside = r < bs
        # r < bs
        row = tl.load(rows_ptr + r, mask=inside, other=0)
        prefix_in = tl.load(prefix_lens_ptr + r, mask=inside, other=0)
        extend_in = tl.load(extend_lens_ptr + r, mask=inside, other=0)
        row_ok = (row >= 0) & (row < num_rows)
        extend_ok = (extend_in >= 0) & (extend_in <= 0x7FFFFFFF)
        lens_ok = (prefix_in >= 0) & (prefix_in <= max_len) & extend_ok
        status |= tl.where(inside & (row_ok == 0), _ROW_RANGE, 0) | tl.where(inside & (lens_ok == 0), _LENGTH_RANGE, 0)
        live = inside & row_ok & lens_ok & (row != 0)
        prefix = tl.where(live, prefix_in, 0)
        extend = tl.where(inside & extend_ok, extend_in, 0)

        start = _first_position(prefix, extend, window, AFTER_WRITE)
        count = tl.maximum(prefix - start, 0)
        if strides_ptr is not None:
            stride = tl.load(strides_ptr + r, mask=inside, other=1)
            _, kept, front, back, add_last = _kept_blocks(start, prefix, stride, tl.load(step_ptr))
            strided = kept * _STRIDE_BLOCK - front - back + add_last.to(tl.int64)
            count = tl.where((count > 0) & (stride > 1), strided, count)
        ends = entries + tl.cumsum(count, axis=0)
        # entry_offsets and offsets have bs + 1 elements
        tl.store(entry_offsets_ptr + r + 1, ends, mask=inside)
        tl.store(out_offsets_ptr + r + 1, tokens + tl.cumsum(extend, axis=0), mask=inside)
        entries += tl.sum(count, axis=0)
        tokens += tl.sum(extend, axis=0)

        seeded = live & (prefix > 0)
        # seeded: 0 < row < num_rows, 0 <= prefix - 1 < max_len
        seed, _ = _look_up(req_to_token_ptr, row_stride, row, prefix - 1, seeded, lut_ptr, lut_len)
        owner = row
        if owners_ptr is not None:
            owner = tl.load(owners_ptr + r, mask=inside, other=0)
        # bs <= capacity of the write plan, checked on the host
        tl.store(out_rows_ptr + r, tl.where(live, row, 0), mask=inside)
        tl.store(out_owners_ptr + r, owner, mask=inside)
        tl.store(out_prefix_lens_ptr + r, prefix_in, mask=inside)
        tl.store(out_seed_slots_ptr + r, tl.where(seeded, seed, _HEAD_OF_CHAIN), mask=inside)
    requested = tl.sum(entries, axis=0)
    tl.store(entry_offsets_ptr, 0)
    tl.store(out_offsets_ptr, 0)
    tl.store(num_requests_ptr, bs)
    tl.store(num_requested_ptr, requested)
    tl.store(num_valid_ptr, tl.minimum(requested, capacity).to(tl.int32))
    bits = tl.where(requested > capacity, _OVERFLOW, 0)
    bits |= tl.max(status & _ROW_RANGE, axis=0) | tl.max(status & _LENGTH_RANGE, axis=0)
    tl.store(status_ptr, bits)


@triton.jit
def _fill_entries(
    # inputs
    entry_offsets_ptr,
    rows_ptr,
    prefix_lens_ptr,
    extend_lens_ptr,
    strides_ptr,
    step_ptr,
    bs,
    search_steps,
    req_to_token_ptr,
    row_stride,
    window,
    lut_ptr,
    lut_len,
    expected_tokens_ptr,
    token_row_stride,
    token_rows,
    token_len,
    expected_lens_ptr,
    token_offset,
    num_valid_ptr,
    # outputs
    slots_ptr,
    prev_slots_ptr,
    positions_ptr,
    tokens_ptr,
    out_rows_ptr,
    status_ptr,
    # constants
    AFTER_WRITE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = tl.load(num_valid_ptr).to(tl.int64)
    pid = tl.program_id(0).to(tl.int64)
    for first in range(pid * BLOCK, n, tl.num_programs(0).to(tl.int64) * BLOCK):
        entry = first + tl.arange(0, BLOCK)
        valid = entry < n
        # The request whose entries hold this one: the last r with entry_offsets[r] <= entry.
        r = tl.zeros([BLOCK], dtype=tl.int64)
        high = tl.zeros([BLOCK], dtype=tl.int64) + bs
        for _ in range(search_steps):
            middle = (r + high) // 2
            # r < high keeps 0 <= middle < bs
            below = tl.load(entry_offsets_ptr + middle, mask=valid, other=0) <= entry
            narrow = high - r > 1
            r = tl.where(narrow & below, middle, r)
            high = tl.where(narrow & (below == 0), middle, high)
        # 0 <= r < bs; the request is live, so its row and lengths are in range
        row = tl.load(rows_ptr + r, mask=valid, other=0)
        prefix = tl.load(prefix_lens_ptr + r, mask=valid, other=0)
        extend = tl.load(extend_lens_ptr + r, mask=valid, other=0)
        k = entry - tl.load(entry_offsets_ptr + r, mask=valid, other=0)
        start = _first_position(prefix, extend, window, AFTER_WRITE)
        position = start + k
        if strides_ptr is not None:
            stride = tl.load(strides_ptr + r, mask=valid, other=1)
            kept_first, kept, front, back, _ = _kept_blocks(start, prefix, stride, tl.load(step_ptr))
            nth = k + front
            in_blocks = (kept_first + nth // _STRIDE_BLOCK * stride) * _STRIDE_BLOCK + nth % _STRIDE_BLOCK
            strided = tl.where(nth < kept * _STRIDE_BLOCK - back, in_blocks, prefix - 1)
            position = tl.where(stride > 1, strided, position)

        # valid: 0 <= start <= position < prefix <= max_len
        slot, lut_bad = _look_up(req_to_token_ptr, row_stride, row, position, valid, lut_ptr, lut_len)
        has_previous = valid & (position > start)
        previous, _ = _look_up(req_to_token_ptr, row_stride, row, position - 1, has_previous, lut_ptr, lut_len)
        previous = tl.where(position == start, _UNCHECKED, previous)
        previous = tl.where(position == 0, _HEAD_OF_CHAIN, previous)
        token = tl.full([BLOCK], -1, tl.int64)
        if expected_tokens_ptr is not None:
            index = position + token_offset
            length = tl.minimum(tl.load(expected_lens_ptr + r, mask=valid, other=0), token_len)
            # 0 <= index < token_len, 0 < row < token_rows
            known = valid & (index >= 0) & (index < length) & (row < token_rows)
            looked_up = tl.load(expected_tokens_ptr + row * token_row_stride + index, mask=known, other=-1)
            token = looked_up.to(tl.int64)
        # entry < n <= capacity of the verify plan
        tl.store(slots_ptr + entry, slot, mask=valid)
        tl.store(prev_slots_ptr + entry, previous, mask=valid)
        tl.store(positions_ptr + entry, position, mask=valid)
        tl.store(tokens_ptr + entry, token, mask=valid)
        tl.store(out_rows_ptr + entry, row.to(tl.int32), mask=valid)
        if tl.sum(lut_bad.to(tl.int32), axis=0) > 0:
            tl.atomic_or(status_ptr, _LUT_RANGE)


def plan(
    *,
    rows: torch.Tensor,
    owners: torch.Tensor | None,
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    window: int,
    after_write: bool,
    lut: torch.Tensor | None,
    expected_tokens: torch.Tensor | None,
    expected_lens: torch.Tensor | None,
    token_offset: int,
    strides: torch.Tensor | None,
    step: torch.Tensor | None,
    verify_plan: VerifyPlan,
    write_plan: WritePlan,
    status: torch.Tensor,
    entry_offsets: torch.Tensor,
) -> None:
    """Turn a batch's rows and lengths into the entries to verify and the segments to write; see specs/plan.py."""
    bs = rows.shape[0]
    capacity = verify_plan.slots.shape[0]
    num_rows, max_len = req_to_token.shape
    lut_len = 0 if lut is None else lut.shape[0]
    _lay_out[(1,)](
        # inputs
        rows,
        owners,
        prefix_lens,
        extend_lens,
        strides,
        step,
        bs,
        req_to_token,
        req_to_token.stride(0),
        num_rows,
        max_len,
        window,
        lut,
        lut_len,
        capacity,
        # outputs
        entry_offsets,
        write_plan.rows,
        write_plan.owners,
        write_plan.offsets,
        write_plan.prefix_lens,
        write_plan.seed_slots,
        write_plan.num_requests,
        verify_plan.num_valid,
        verify_plan.num_requested,
        status,
        # constants
        AFTER_WRITE=after_write,
        BLOCK=BLOCK_REQUESTS,
    )
    if bs == 0 or capacity == 0:
        return
    token_rows, token_len = (0, 0) if expected_tokens is None else expected_tokens.shape
    grid = persistent_grid(triton.cdiv(capacity, BLOCK_ENTRIES), rows.device)
    _fill_entries[grid](
        # inputs
        entry_offsets,
        rows,
        prefix_lens,
        extend_lens,
        strides,
        step,
        bs,
        bs.bit_length(),
        req_to_token,
        req_to_token.stride(0),
        window,
        lut,
        lut_len,
        expected_tokens,
        0 if expected_tokens is None else expected_tokens.stride(0),
        token_rows,
        token_len,
        expected_lens,
        token_offset,
        verify_plan.num_valid,
        # outputs
        verify_plan.slots,
        verify_plan.prev_slots,
        verify_plan.positions,
        verify_plan.tokens,
        verify_plan.rows,
        status,
        # constants
        AFTER_WRITE=after_write,
        BLOCK=BLOCK_ENTRIES,
    )
