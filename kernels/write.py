"""write: the Triton kernels. The first reads every seed and sums up chain tiles; the second stores the records."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kv_canary.constants import OWNER_MASK, Reason
from kv_canary.kernels.hashing import (
    as_i64,
    as_u64,
    chain_scale,
    chain_terms,
    identity,
    writer_word,
)
from kv_canary.kernels.launching import max_programs
from kv_canary.kernels.records import load_record, record_address, records_of
from kv_canary.kernels.reporting import claim_rows
from kv_canary.kernels.sources import fingerprint, in_source, source_of
from kv_canary.specs.structures import Endpoint, ViolationLog, WritePlan
from kv_canary.specs.write import TILE_TOKENS

_OWNER_MASK = tl.constexpr(OWNER_MASK)
_WRITE_TOKEN = tl.constexpr(int(Reason.WRITE_TOKEN))
_WRITE_POSITION = tl.constexpr(int(Reason.WRITE_POSITION))
_SLOT_RANGE = tl.constexpr(int(Reason.SLOT_RANGE))
_OVERWRITE = tl.constexpr(int(Reason.OVERWRITE))
_PREFIX = tl.constexpr(int(Reason.PREFIX))


@triton.jit
def _segment(r, rows_ptr, offsets_ptr, num_requests_ptr, capacity, num_rows, num_tokens):
    """The row of request r, the token its segment begins at, and the tokens [first, last) of it that exist.

    Empty where the request is past the plan or padding, or its row is out of range.
    """
    n = tl.minimum(tl.maximum(tl.load(num_requests_ptr), 0).to(tl.int64), capacity)
    planned = r < n
    # r < n <= capacity; offsets have capacity + 1 elements
    row = tl.load(rows_ptr + r, mask=planned, other=0)
    begin = tl.load(offsets_ptr + r, mask=planned, other=0)
    end = tl.load(offsets_ptr + r + 1, mask=planned, other=0)
    live = planned & (row > 0) & (row < num_rows)
    # 0 <= first <= last <= num_tokens whatever the offsets hold, so that last - first cannot wrap.
    first = tl.minimum(tl.maximum(begin, 0), num_tokens)
    last = tl.where(live, tl.maximum(tl.minimum(end, num_tokens), first), first)
    return row, begin, first, last


@triton.jit
def _prepare(
    # inputs
    rows_ptr,
    owners_ptr,
    offsets_ptr,
    prefix_lens_ptr,
    seed_slots_ptr,
    num_requests_ptr,
    capacity,
    input_ids_ptr,
    positions_ptr,
    num_tokens,
    records,
    tails_ptr,
    num_rows,
    step_ptr,
    # outputs
    tile_sums_ptr,
    tile_sums_stride,
    ring_ptr,
    ring_cap,
    count_ptr,
    counters_ptr,
    # constants
    TAG: tl.constexpr,
    TILE: tl.constexpr,
    TILE_BITS: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    row, _, first, last = _segment(r, rows_ptr, offsets_ptr, num_requests_ptr, capacity, num_rows, num_tokens)
    if (r == 0) & (part == 0):
        tl.atomic_add(counters_ptr + TAG * 2, 1)

    if (part == 0) & (first < last):
        # r < capacity; 0 < row < num_rows
        prefix = tl.load(prefix_lens_ptr + r)
        seed = tl.load(seed_slots_ptr + r)
        tail = tl.load(tails_ptr + row)
        readable = (prefix > 0) & (seed > 0) & (seed < records.num_slots)
        # readable: 0 < seed < num_slots
        seed_ptr = record_address(records, seed)
        ident = tl.load(seed_ptr, mask=readable, other=0)
        chain = tl.load(seed_ptr + 1, mask=readable, other=0)
        kv = tl.load(seed_ptr + 2, mask=readable, other=0)
        writer = tl.load(seed_ptr + 3, mask=readable, other=0)
        if readable & ((ident | chain | kv | writer) != 0) & (chain != tail):
            index = tl.atomic_add(count_ptr, 1)
            fits = (index >= 0) & (index < ring_cap)
            out_ptr = ring_ptr + index * 16
            zero = tail - tail
            tl.store(out_ptr, zero + TAG, mask=fits)
            tl.store(out_ptr + 1, zero + _PREFIX, mask=fits)
            tl.store(out_ptr + 2, seed, mask=fits)
            tl.store(out_ptr + 3, row, mask=fits)
            tl.store(out_ptr + 4, prefix - 1, mask=fits)
            tl.store(out_ptr + 5, ident, mask=fits)
            tl.store(out_ptr + 6, zero - 1, mask=fits)
            tl.store(out_ptr + 7, chain, mask=fits)
            tl.store(out_ptr + 8, tail, mask=fits)
            tl.store(out_ptr + 9, kv, mask=fits)
            tl.store(out_ptr + 10, zero, mask=fits)
            tl.store(out_ptr + 11, writer, mask=fits)
            tl.store(out_ptr + 12, tl.load(step_ptr), mask=fits)
            tl.store(out_ptr + 13, seed, mask=fits)
            tl.store(out_ptr + 14, tl.load(owners_ptr + r), mask=fits)
            tl.store(out_ptr + 15, zero, mask=fits)

    # The sum of every tile that another one of the same request follows.
    num_tiles = (last - first + TILE - 1) // TILE
    for tile in range(part, num_tiles - 1, tl.num_programs(1).to(tl.int64)):
        lane = tl.arange(0, TILE).to(tl.int64)
        j = first + tile * TILE + lane
        # 0 <= first <= j < last <= num_tokens: not the last tile, so all lanes are inside
        ident = identity(tl.load(input_ids_ptr + j), tl.load(positions_ptr + j))
        terms = chain_terms(ident, lane, lane >= 0, TILE_BITS)
        # r < capacity, tile < tiles of num_tokens: inside tile_sums
        tl.store(tile_sums_ptr + r * tile_sums_stride + tile, as_i64(tl.sum(terms, axis=0)))


@triton.jit
def _store(
    # inputs
    rows_ptr,
    owners_ptr,
    offsets_ptr,
    prefix_lens_ptr,
    seed_slots_ptr,
    num_requests_ptr,
    capacity,
    input_ids_ptr,
    positions_ptr,
    out_slots_ptr,
    expected_input_ids_ptr,
    num_tokens,
    records,
    tails_ptr,
    num_rows,
    step_ptr,
    check_positions_ptr,
    tile_sums_ptr,
    tile_sums_stride,
    k_source,
    v_source,
    # outputs
    ring_ptr,
    ring_cap,
    count_ptr,
    counters_ptr,
    # constants
    TAG: tl.constexpr,
    TRACK_LIFETIME: tl.constexpr,
    TILE: tl.constexpr,
    TILE_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    row, begin, first, last = _segment(r, rows_ptr, offsets_ptr, num_requests_ptr, capacity, num_rows, num_tokens)
    if first < last:
        # r < capacity; 0 < row < num_rows
        owner = tl.load(owners_ptr + r)
        prefix = tl.load(prefix_lens_ptr + r)
        seed = tl.load(seed_slots_ptr + r)
        step = tl.load(step_ptr)
        check_positions = tl.load(check_positions_ptr) != 0
        # The chain before the tile: the tail, carried over every tile before it.
        carry = as_u64(tl.load(tails_ptr + row))
        carried = part - part
        num_tiles = (last - first + TILE - 1) // TILE
        for tile in range(part, num_tiles, tl.num_programs(1).to(tl.int64)):
            whole_tile = tl.max(chain_scale(tl.full([1], TILE, tl.int64), TILE_BITS), axis=0)
            for before in range(carried, tile):
                # before < tile < tiles of num_tokens: inside tile_sums
                carry = whole_tile * (carry + as_u64(tl.load(tile_sums_ptr + r * tile_sums_stride + before)))
            carried = tile
            lane = tl.arange(0, BLOCK).to(tl.int64)
            j = first + tile * TILE + lane
            live = (j < last) & (lane < TILE)
            # live: 0 <= j < last <= num_tokens
            token = tl.load(input_ids_ptr + j, mask=live, other=0)
            position = tl.load(positions_ptr + j, mask=live, other=0)
            slot = tl.load(out_slots_ptr + j, mask=live, other=0)
            ident = identity(token, position)
            sums = carry + tl.cumsum(chain_terms(ident, lane, live, TILE_BITS), axis=0)
            chain = chain_scale(lane + 1, TILE_BITS) * sums

            in_range = (slot >= 0) & (slot < records.num_slots) & in_source(k_source, slot) & in_source(v_source, slot)
            stored = live & in_range & (slot != 0)
            where = as_i64(ident >> 32)
            kv = fingerprint(k_source, slot, where, stored) | (fingerprint(v_source, slot, where, stored) << 32)

            # stored: 0 < slot < num_slots
            record_ptr = record_address(records, slot)
            expected_position = prefix + j - begin
            reasons = tl.where(live & (in_range == 0) & (slot != 0), _SLOT_RANGE, 0)
            reasons += tl.where(live & check_positions & (position != expected_position), _WRITE_POSITION, 0)
            expected_input = tl.full([BLOCK], -1, tl.int64)
            if expected_input_ids_ptr is not None:
                expected_input = tl.load(expected_input_ids_ptr + j, mask=live, other=0)
                reasons += tl.where(live & (token != expected_input), _WRITE_TOKEN, 0)
            if TRACK_LIFETIME:
                old_ident, old_chain, old_kv, old_writer = load_record(records, slot, stored)
                in_use = stored & ((old_ident | old_chain | old_kv | old_writer) != 0) & (old_writer >= 0)
                foreign = (old_writer & _OWNER_MASK) != (owner & _OWNER_MASK)
                differs = (as_u64(old_ident) != ident) | (as_u64(old_chain) != chain)
                reasons += tl.where(in_use & foreign & differs, _OVERWRITE, 0)
            bad = reasons != 0
            if tl.sum(bad.to(tl.int32), axis=0) > 0:
                old_writer_word = tl.load(record_ptr + 3, mask=stored & bad, other=0)
                out_ptr, fits = claim_rows(bad, count_ptr, ring_ptr, ring_cap)
                zeros = tl.zeros([BLOCK], dtype=tl.int64)
                tl.store(out_ptr, zeros + TAG, mask=fits)
                tl.store(out_ptr + 1, reasons.to(tl.int64), mask=fits)
                tl.store(out_ptr + 2, slot, mask=fits)
                tl.store(out_ptr + 3, zeros + row, mask=fits)
                tl.store(out_ptr + 4, expected_position, mask=fits)
                tl.store(out_ptr + 5, as_i64(ident), mask=fits)
                tl.store(out_ptr + 6, expected_input, mask=fits)
                tl.store(out_ptr + 7, as_i64(chain), mask=fits)
                tl.store(out_ptr + 8, zeros, mask=fits)
                tl.store(out_ptr + 9, as_i64(kv), mask=fits)
                tl.store(out_ptr + 10, zeros, mask=fits)
                tl.store(out_ptr + 11, old_writer_word, mask=fits)
                tl.store(out_ptr + 12, zeros + step, mask=fits)
                tl.store(out_ptr + 13, zeros + seed, mask=fits)
                tl.store(out_ptr + 14, zeros + owner, mask=fits)
                tl.store(out_ptr + 15, zeros, mask=fits)

            tl.store(record_ptr, as_i64(ident), mask=stored)
            tl.store(record_ptr + 1, as_i64(chain), mask=stored)
            tl.store(record_ptr + 2, as_i64(kv), mask=stored)
            tl.store(record_ptr + 3, tl.zeros([BLOCK], tl.int64) + as_i64(writer_word(step, owner)), mask=stored)
            tl.atomic_add(counters_ptr + TAG * 2 + 1, tl.sum(stored.to(tl.int64), axis=0))


def write(
    *,
    write_plan: WritePlan,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    out_slots: torch.Tensor,
    endpoint: Endpoint,
    tails: torch.Tensor,
    step: torch.Tensor,
    check_positions: torch.Tensor,
    expected_input_ids: torch.Tensor | None,
    track_lifetime: bool,
    violations: ViolationLog,
    counters: torch.Tensor,
    tile_sums: torch.Tensor,
) -> None:
    """Record the new tokens in the slots that the forward wrote them to; see specs/write.py."""
    capacity, num_tokens = write_plan.rows.shape[0], input_ids.shape[0]
    records = records_of(endpoint.records)
    # One program per request and part of its tiles; at least one program, which counts the launch.
    num_requests = max(1, capacity)
    tiles = max(1, triton.cdiv(num_tokens, TILE_TOKENS))
    grid = (num_requests, min(tiles, max(1, max_programs(step.device) // num_requests)))
    plan_arguments = (
        write_plan.rows,
        write_plan.owners,
        write_plan.offsets,
        write_plan.prefix_lens,
        write_plan.seed_slots,
        write_plan.num_requests,
        capacity,
    )
    _prepare[grid](
        # inputs
        *plan_arguments,
        input_ids,
        positions,
        num_tokens,
        records,
        tails,
        tails.shape[0],
        step,
        # outputs
        tile_sums,
        tile_sums.stride(0),
        violations.ring,
        violations.ring.shape[0],
        violations.count,
        counters,
        # constants
        TAG=int(endpoint.tag),
        TILE=TILE_TOKENS,
        TILE_BITS=TILE_TOKENS.bit_length(),
    )
    if num_tokens == 0 or capacity == 0:
        return
    # A decode batch has one token per request: small blocks then, the chain is the same.
    block = min(TILE_TOKENS, max(16, triton.next_power_of_2(num_tokens)))
    _store[grid](
        # inputs
        *plan_arguments,
        input_ids,
        positions,
        out_slots,
        expected_input_ids,
        num_tokens,
        records,
        tails,
        tails.shape[0],
        step,
        check_positions,
        tile_sums,
        tile_sums.stride(0),
        source_of(endpoint.k_source),
        source_of(endpoint.v_source),
        # outputs
        violations.ring,
        violations.ring.shape[0],
        violations.count,
        counters,
        # constants
        TAG=int(endpoint.tag),
        TRACK_LIFETIME=track_lifetime,
        TILE=TILE_TOKENS,
        TILE_BITS=TILE_TOKENS.bit_length(),
        BLOCK=block,
        # No more threads than lanes: Triton 3.6 fails to compile some blocks that its threads would share.
        num_warps=max(1, min(4, block // 32)),
    )
