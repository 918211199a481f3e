"""A batch inside kernels: its requests, their tables, and the entries that their cached positions make."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kv_canary.constants import BAD_SLOT, HEAD_OF_CHAIN, STRIDE_BLOCK, UNCHECKED, Status
from kv_canary.kernels.launching import begin, divide, overlapping
from kv_canary.specs.plan import longest_prefix
from kv_canary.specs.structures import WritePlan

# Requests that one program lays out at a time, at least and at most, and that are counted at once to find an entry's.
BLOCK_REQUESTS, MAX_BLOCK_REQUESTS = 256, 1024
COUNTED_REQUESTS = tl.constexpr(512)

_BAD_SLOT = tl.constexpr(BAD_SLOT)
_HEAD_OF_CHAIN = tl.constexpr(HEAD_OF_CHAIN)
_UNCHECKED = tl.constexpr(UNCHECKED)
_STRIDE_BLOCK = tl.constexpr(STRIDE_BLOCK)
_OVERFLOW = tl.constexpr(int(Status.OVERFLOW))
_ROW_RANGE = tl.constexpr(int(Status.ROW_RANGE))
_LENGTH_RANGE = tl.constexpr(int(Status.LENGTH_RANGE))


class Batch(NamedTuple):
    """The requests of a forward, as a kernel is given them."""

    rows: Any
    table_rows: Any
    prefix_lens: Any
    extend_lens: Any
    strides: Any
    step: Any
    size: Any


class Plan(NamedTuple):
    """A `WritePlan`, as a kernel is given it."""

    rows: Any
    owners: Any
    offsets: Any
    prefix_lens: Any
    seed_slots: Any
    num_requests: Any
    capacity: Any


class Tables(NamedTuple):
    """The tables of cached positions, and the position from which on they are read, as a kernel is given them.

    Where a page has POWERS-of-two slots, `page_bits` is the logarithm of their number; PAGED: it has more than one.
    """

    req_to_token: Any
    row_stride: Any
    num_rows: Any
    max_len: Any
    page_size: Any
    page_bits: Any
    lut: Any
    lut_len: Any
    window: Any
    AFTER_WRITE: Any
    PAGED: Any
    POWERS: Any


class Tokens(NamedTuple):
    """The tokens to expect, as a kernel is given them."""

    ptr: Any
    row_stride: Any
    num_rows: Any
    length: Any
    known_lens: Any
    offset: Any


def batch_of(
    rows: torch.Tensor,
    table_rows: torch.Tensor | None,
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    strides: torch.Tensor | None,
    step: torch.Tensor | None,
) -> Batch:
    """Return what a kernel is told of the requests of a forward."""
    return Batch(rows, table_rows, prefix_lens, extend_lens, strides, step, rows.shape[0])


def layout_options(size: int, device: torch.device) -> dict[str, Any]:
    """Return the options of `lay_out_alone` for so many requests."""
    block = min(MAX_BLOCK_REQUESTS, max(BLOCK_REQUESTS, triton.next_power_of_2(size)))
    return {"BLOCK": block, "num_warps": min(16, block // 32), **overlapping(device)}


def tables_of(
    req_to_token: torch.Tensor, page_size: int, lut: torch.Tensor | None, window: int, *, after_write: bool = False
) -> Tables:
    """Return what a kernel is told of the tables of a group."""
    num_rows, num_pages = req_to_token.shape
    return Tables(
        req_to_token=req_to_token,
        row_stride=req_to_token.stride(0),
        num_rows=num_rows,
        max_len=longest_prefix(num_pages, page_size),
        page_size=page_size,
        page_bits=page_size.bit_length() - 1,
        lut=lut,
        lut_len=0 if lut is None else lut.shape[0],
        window=window,
        AFTER_WRITE=tl.constexpr(after_write),
        PAGED=tl.constexpr(page_size > 1),
        POWERS=tl.constexpr(page_size & (page_size - 1) == 0),
    )


def plan_of(plan: WritePlan) -> Plan:
    """Return what a kernel is told of a write plan."""
    return Plan(
        rows=plan.rows,
        owners=plan.owners,
        offsets=plan.offsets,
        prefix_lens=plan.prefix_lens,
        seed_slots=plan.seed_slots,
        num_requests=plan.num_requests,
        capacity=plan.rows.shape[0],
    )


def tokens_of(expected: torch.Tensor | None, known_lens: torch.Tensor | None, offset: int) -> Tokens | None:
    """Return what a kernel is told of the tokens to expect, if anything."""
    if expected is None:
        return None
    num_rows, length = expected.shape
    return Tokens(expected, expected.stride(0), num_rows, length, known_lens, offset)


@triton.jit
def look_up(tables, row, position, valid):
    """The slot of each valid (row of the table, position), in range, and whether the LUT was asked out of range."""
    column, inside = position, position - position
    if tables.PAGED:
        # Positions fit 32 bits where they are valid.
        page, in_page = divide(position.to(tl.uint32), tables.page_size, tables.page_bits, tables.POWERS)
        column, inside = page.to(tl.int64), in_page.to(tl.int64)
    slot = tl.load(tables.req_to_token + row * tables.row_stride + column, mask=valid, other=0).to(tl.int64)
    if tables.PAGED:
        slot = tl.where(slot < 0, slot, slot * tables.page_size + inside)
    # Without a LUT nothing is asked out of range.
    bad = slot != slot
    if tables.lut is not None:
        bad = valid & ((slot < 0) | (slot >= tables.lut_len))
        # 0 <= slot < lut_len
        slot = tl.where(bad, _BAD_SLOT, tl.load(tables.lut + slot, mask=valid & (bad == 0), other=0))
    return tl.where(slot < 0, _BAD_SLOT, slot), bad


@triton.jit
def _first_position(tables, prefix, extend):
    """The first position of a request that is verified."""
    first_read = prefix + extend - 1 if tables.AFTER_WRITE else prefix
    return tl.where(tables.window > 0, tl.maximum(first_read - tables.window, 0), 0)


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
def lay_out(
    # inputs
    batch,
    tables,
    # outputs
    entry_offsets_ptr,
    longest_stride_ptr,
    # constants
    BLOCK: tl.constexpr,
):
    """Find where each request's entries begin, and return how many there are.

    Several programs may do it at once, for what they find is the same. What of a request is read is known before any of
    it is: it may lie in memory of the host's.
    """
    entries = tl.zeros([1], dtype=tl.int64)
    longest = tl.full([1], 1, tl.int64)
    for first in range(0, batch.size, BLOCK):
        r = first + tl.arange(0, BLOCK).to(tl.int64)
        inside = r < batch.size
        if batch.strides is not None:
            stride = tl.load(batch.strides + r, mask=inside, other=1)
            step = tl.load(batch.step)
        _row, _at, _in, prefix, extend, _live, _row_ok, _lens_ok = _requests(batch, tables, r, inside)
        start = _first_position(tables, prefix, extend)
        count = tl.maximum(prefix - start, 0)
        if batch.strides is not None:
            longest = tl.maximum(longest, tl.max(stride, axis=0))
            if tl.max(stride, axis=0) > 1:
                _first, kept, front, back, last_alone = _kept_blocks(start, prefix, stride, step)
                strided = kept * _STRIDE_BLOCK - front - back + last_alone.to(tl.int64)
                count = tl.where((count > 0) & (stride > 1), strided, count)
        # entry_offsets has size + 1 elements
        tl.store(entry_offsets_ptr + r + 1, entries + tl.cumsum(count, axis=0), mask=inside)
        entries += tl.sum(count, axis=0)
    requested = tl.sum(entries, axis=0)
    tl.store(entry_offsets_ptr, 0)
    if longest_stride_ptr is not None:
        tl.store(longest_stride_ptr, tl.max(longest, axis=0))
    return requested


@triton.jit
def leave_counts(requested, capacity, num_valid_ptr, num_requested_ptr, status_ptr):
    """Leave how many entries there are, and the status but for what `plan_write` and the LUT add to it."""
    tl.store(num_requested_ptr, requested)
    tl.store(num_valid_ptr, tl.minimum(requested, capacity).to(tl.int32))
    tl.store(status_ptr, tl.where(requested > capacity, _OVERFLOW, 0))


@triton.jit
def _requests(batch, tables, r, inside):
    """Row, row of the table, prefix as given, prefix and extend as they count, and whether it lives, its rows are such
    and its lengths can be, of each request."""
    # r < size
    row = tl.load(batch.rows + r, mask=inside, other=0)
    prefix_in = tl.load(batch.prefix_lens + r, mask=inside, other=0)
    extend_in = tl.load(batch.extend_lens + r, mask=inside, other=0)
    table_row = row
    row_ok = (row >= 0) & (row <= 0x7FFFFFFF)
    if batch.table_rows is not None:
        table_row = tl.load(batch.table_rows + r, mask=inside, other=0)
    row_ok = row_ok & (table_row >= 0) & (table_row < tables.num_rows)
    extend_ok = (extend_in >= 0) & (extend_in <= 0x7FFFFFFF)
    lens_ok = (prefix_in >= 0) & (prefix_in <= tables.max_len) & extend_ok
    live = inside & row_ok & lens_ok & (row != 0)
    prefix = tl.where(live, prefix_in, 0)
    extend = tl.where(inside & extend_ok, extend_in, 0)
    return row, table_row, prefix_in, prefix, extend, live, row_ok, lens_ok


@triton.jit
def plan_write(
    # inputs
    batch,
    owners_ptr,
    tables,
    # outputs
    plan,
    status_ptr,
    # constants
    BLOCK: tl.constexpr,
):
    """Leave what `write` is to be told of the batch's requests, and add to the status what is wrong with these.

    One program does, once the status is what `leave_counts` leaves.
    """
    tokens = tl.zeros([1], dtype=tl.int64)
    for first in range(0, batch.size, BLOCK):
        r = first + tl.arange(0, BLOCK).to(tl.int64)
        inside = r < batch.size
        row, table_row, prefix_in, prefix, extend, live, row_ok, lens_ok = _requests(batch, tables, r, inside)
        seeded = live & (prefix > 0)
        # seeded: 0 <= table_row < num_rows, 0 <= prefix - 1 < max_len
        seed, _bad = look_up(tables, table_row, prefix - 1, seeded)
        owner = row
        if owners_ptr is not None:
            owner = tl.load(owners_ptr + r, mask=inside, other=0)
        # size <= capacity of the write plan, checked on the host; its offsets have one element more
        tl.store(plan.offsets + r + 1, tokens + tl.cumsum(extend, axis=0), mask=inside)
        tokens += tl.sum(extend, axis=0)
        tl.store(plan.rows + r, tl.where(live, row, 0), mask=inside)
        tl.store(plan.owners + r, owner, mask=inside)
        tl.store(plan.prefix_lens + r, prefix_in, mask=inside)
        tl.store(plan.seed_slots + r, tl.where(seeded, seed, _HEAD_OF_CHAIN), mask=inside)
        bad_row, bad_length = inside & (row_ok == 0), inside & (lens_ok == 0)
        if tl.sum((bad_row | bad_length).to(tl.int32), axis=0) > 0:
            bits = tl.max(tl.where(bad_row, _ROW_RANGE, 0), axis=0)
            tl.atomic_or(status_ptr, bits | tl.max(tl.where(bad_length, _LENGTH_RANGE, 0), axis=0))
    tl.store(plan.offsets, 0)
    tl.store(plan.num_requests, batch.size)


@triton.jit
def lay_out_alone(
    # inputs
    batch,
    tables,
    capacity,
    # outputs
    entry_offsets_ptr,
    longest_stride_ptr,
    num_valid_ptr,
    num_requested_ptr,
    status_ptr,
    # constants
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """`lay_out` and `leave_counts` as a launch of their own, of one program, before those that find the entries."""
    begin(OVERLAPS)
    requested = lay_out(
        # inputs
        batch,
        tables,
        # outputs
        entry_offsets_ptr,
        longest_stride_ptr,
        # constants
        BLOCK,
    )
    leave_counts(requested, capacity, num_valid_ptr, num_requested_ptr, status_ptr)


@triton.jit
def find_entries(batch, tables, tokens, entry_offsets_ptr, longest_stride_ptr, first, n, BLOCK: tl.constexpr):
    """Request, row, slot, previous slot, position and expected token of the entries from `first` on, of n in all, which
    of them do not follow the entry before, and where the LUT was too short.

    All int64 [BLOCK]; entry_offsets, and longest_stride where it is given, are what `lay_out` left. What is past the
    last entry is anything.
    """
    entry = first + tl.arange(0, BLOCK)
    valid = entry < n
    r = _find_requests(batch, entry_offsets_ptr, first, n, BLOCK)
    # 0 <= r < size; the request is live, so its row and lengths are in range
    row = tl.load(batch.rows + r, mask=valid, other=0)
    table_row = row
    if batch.table_rows is not None:
        table_row = tl.load(batch.table_rows + r, mask=valid, other=0)
    prefix = tl.load(batch.prefix_lens + r, mask=valid, other=0)
    extend = tl.load(batch.extend_lens + r, mask=valid, other=0)
    k = entry - tl.load(entry_offsets_ptr + r, mask=valid, other=0)
    start = _first_position(tables, prefix, extend)
    position = start + k
    begins = k == 0
    if batch.strides is not None:
        stride = tl.load(batch.strides + r, mask=valid, other=1)
        longest = tl.max(stride, axis=0) if longest_stride_ptr is None else tl.load(longest_stride_ptr)
        # Divisions, which most batches do without.
        if longest > 1:
            kept_first, kept, front, back, _alone = _kept_blocks(start, prefix, stride, tl.load(batch.step))
            nth = k + front
            in_blocks = (kept_first + nth // _STRIDE_BLOCK * stride) * _STRIDE_BLOCK + nth % _STRIDE_BLOCK
            in_block = nth < kept * _STRIDE_BLOCK - back
            position = tl.where(stride > 1, tl.where(in_block, in_blocks, prefix - 1), position)
            # The last position alone may follow the last kept block.
            next_block = kept_first + (kept - 1) * stride + 1
            apart = tl.where(in_block, nth % _STRIDE_BLOCK == 0, position != next_block * _STRIDE_BLOCK)
            begins = begins | ((stride > 1) & apart)

    # What says how the batch is laid out may be another batch's: such a position is looked up nowhere.
    inside = valid & (position >= start) & (position < prefix)
    # inside: 0 <= start <= position < prefix <= max_len
    slot, lut_bad = look_up(tables, table_row, position, inside)
    has_previous = inside & (position > start)
    previous, _ = look_up(tables, table_row, position - 1, has_previous)
    previous = tl.where(position == start, _UNCHECKED, previous)
    previous = tl.where(position == 0, _HEAD_OF_CHAIN, previous)
    return r, row, slot, previous, position, expected_token(tokens, r, row, position, valid), begins, lut_bad


@triton.jit
def _find_requests(batch, entry_offsets_ptr, first, n, BLOCK: tl.constexpr):
    """The request that each of the entries from `first` on belongs to: the last r with entry_offsets[r] <= entry."""
    entry = first + tl.arange(0, BLOCK)
    valid = entry < n
    least = first - first
    most = least + batch.size
    if batch.size <= COUNTED_REQUESTS:
        # Most tiles are of one request: count those that end before the tile's first entry, and before its last.
        r = tl.arange(0, COUNTED_REQUESTS)
        inside = r < batch.size
        end = tl.load(entry_offsets_ptr + 1 + r, mask=inside, other=0)
        last = tl.minimum(first + BLOCK, n) - 1
        both = (inside & (end <= first)).to(tl.int32) + ((inside & (end <= last)).to(tl.int32) << 16)
        counts = tl.sum(both, axis=0)
        least = (counts & 0xFFFF).to(tl.int64)
        most = (counts >> 16).to(tl.int64) + 1
    width = most - least
    low = tl.zeros([BLOCK], dtype=tl.int64) + least
    high = tl.zeros([BLOCK], dtype=tl.int64) + most
    while width > 1:
        middle = (low + high) // 2
        # low < high keeps 0 <= middle < size
        below = tl.load(entry_offsets_ptr + middle, mask=valid, other=0) <= entry
        narrow = high - low > 1
        low = tl.where(narrow & below, middle, low)
        high = tl.where(narrow & (below == 0), middle, high)
        width = width - width // 2
    # A request past the batch is that of no valid entry.
    return tl.minimum(low, batch.size - 1)


@triton.jit
def expected_token(tokens, r, row, position, valid):
    """The token that each valid entry should hold, or -1; r and row may be anything."""
    token = tl.full(position.shape, -1, tl.int64)
    if tokens is not None:
        index = position + tokens.offset
        length = tl.minimum(tl.load(tokens.known_lens + r, mask=valid, other=0), tokens.length)
        # 0 <= index < length of a row, 0 < row < rows
        known = valid & (index >= 0) & (index < length) & (row > 0) & (row < tokens.num_rows)
        token = tl.load(tokens.ptr + row * tokens.row_stride + index, mask=known, other=-1).to(tl.int64)
    return token
