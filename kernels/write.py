"""write: the Triton kernels. A small batch takes one program; else one kernel reads every seed, and a second stores.

Work is laid out request by request: a tile is a run of tokens of the requests that are written, wherever in the flat
inputs they stand, so that a long chunk and many requests of one token fill tiles alike.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kv_canary.constants import CHAIN_MULTIPLIER, OWNER_MASK, Reason
from kv_canary.kernels.batches import plan_of
from kv_canary.kernels.hashing import (
    as_i64,
    as_u64,
    chain_inverse,
    chain_scale,
    identity,
    mix,
    next_chain,
    writer_word,
)
from kv_canary.kernels.launching import (
    begin,
    one_program_lanes,
    others_at_once,
    overlapping,
    persistent_grid,
    tiles_at_once,
)
from kv_canary.kernels.records import load_record, record_address, records_of, store_record
from kv_canary.kernels.reporting import log_of, report, tag_of
from kv_canary.kernels.sources import (
    MAX_BLOCK_WORDS,
    NARROW_BYTES,
    begin_fingerprint,
    covered_bytes,
    end_fingerprint,
    in_source,
    source_of,
)
from kv_canary.specs.structures import Endpoint, ViolationLog, WritePlan
from kv_canary.specs.write import TILE_TOKENS

# Bytes that one program fingerprints.
ONE_PROGRAM_BYTES = 1 << 17
NARROW_TILE = 128
# Elements that are taken at a time, by what they are.
TILES = {"tokens": NARROW_TILE}
# Words that one step takes of a wide fingerprint, by several threads for each token, and registers of each.
WIDE_WORDS = 64
WIDE_REGISTERS = 128
# Flat inputs that each token is compared with at a time by a program that has a lane for every token.
FEW_OTHERS = 8
# Requests that a program lays out at a time, where there are few and where there are more.
FEW_REQUESTS, MAX_REQUESTS = 128, 1024

_OWNER_MASK = tl.constexpr(OWNER_MASK)
_WRITE_TOKEN = tl.constexpr(int(Reason.WRITE_TOKEN))
_WRITE_POSITION = tl.constexpr(int(Reason.WRITE_POSITION))
_SLOT_RANGE = tl.constexpr(int(Reason.SLOT_RANGE))
_OVERWRITE = tl.constexpr(int(Reason.OVERWRITE))
_M = tl.constexpr(CHAIN_MULTIPLIER)
_PREFIX = tl.constexpr(int(Reason.PREFIX))
# A slot's mark: a flat input in the low bits, and so many bits of the step above.
_MARK_BITS = tl.constexpr(32)
_MARK_INPUTS = tl.constexpr((1 << 32) - 1)
_MARK_STEPS = tl.constexpr((1 << 31) - 1)
_BATCH = tl.constexpr(int(Reason.BATCH))


class Inputs(NamedTuple):
    """The tokens of a forward and the rows that they belong to, as a kernel is given them."""

    tokens: Any
    positions: Any
    slots: Any
    expected: Any
    given_rows: Any
    given_lens: Any
    size: Any
    tails: Any
    num_rows: Any
    step: Any
    check_positions: Any


@triton.jit
def _lay_out(plan, inputs, first, n, REQUESTS: tl.constexpr):
    """Return, of requests [first, first + REQUESTS): row, first token, tokens, those of requests before, and of all.

    Those past the first n of the plan, padding and rows out of range have no tokens.
    """
    r = first + tl.arange(0, REQUESTS).to(tl.int64)
    # r < capacity; offsets have capacity + 1 elements
    held = r < plan.capacity
    row = tl.load(plan.rows + r, mask=held, other=0)
    begin = tl.load(plan.offsets + r, mask=held, other=0)
    end = tl.load(plan.offsets + r + 1, mask=held, other=0)
    live = (r < n) & (row > 0) & (row < inputs.num_rows)
    # 0 <= token <= token + count <= size whatever the offsets hold, so that no difference wraps.
    token = tl.minimum(tl.maximum(begin, 0), inputs.size)
    count = tl.where(live, tl.maximum(tl.minimum(end, inputs.size), token) - token, 0)
    return row, token, count, tl.cumsum(count, axis=0) - count, tl.sum(count, axis=0)


@triton.jit
def _read_seeds(plan, inputs, records, first, row, count, REQUESTS: tl.constexpr):
    """Of requests [first, first + REQUESTS): prefix, seed slot, its record, the row's tail, and where both disagree."""
    r = first + tl.arange(0, REQUESTS).to(tl.int64)
    # r < capacity
    held = r < plan.capacity
    prefix = tl.load(plan.prefix_lens + r, mask=held, other=0)
    seed = tl.load(plan.seed_slots + r, mask=held, other=0)
    # 0 < seed < num_slots
    ident, chain, kv, writer = load_record(records, seed, (prefix > 0) & (seed > 0) & (seed < records.num_slots))
    # count > 0: 0 < row < num_rows
    tail = tl.load(inputs.tails + row, mask=count > 0, other=0)
    wrong = (count > 0) & ((ident | chain | kv | writer) != 0) & (chain != tail)
    return prefix, seed, ident, chain, kv, writer, tail, wrong


@triton.jit
def _report_seeds(plan, inputs, log, first, row, seeds, site, REQUESTS: tl.constexpr):
    """Report PREFIX for each request whose seed is not the end of its row's prefix."""
    prefix, seed, ident, chain, kv, writer, tail, wrong = seeds
    if tl.sum(wrong.to(tl.int32), axis=0) > 0:
        zeros = tl.zeros([REQUESTS], tl.int64)
        # wrong: first + lane < n <= capacity
        owner = tl.load(plan.owners + first + tl.arange(0, REQUESTS), mask=wrong, other=0)
        report(
            log,
            wrong,
            (
                zeros + site,
                zeros + _PREFIX,
                seed,
                row,
                prefix - 1,
                ident,
                zeros - 1,
                chain,
                tail,
                kv,
                zeros,
                writer,
                zeros + tl.load(inputs.step),
                seed,
                owner,
                zeros,
            ),
        )


@triton.jit
def _report_given(plan, inputs, num_given, log, first, n, row, count, site, REQUESTS: tl.constexpr):
    """Report BATCH for each live request whose row or length is not the one that the model is given."""
    if inputs.given_rows is not None:
        r = first + tl.arange(0, REQUESTS).to(tl.int64)
        live = (r < n) & (r < num_given) & (row > 0) & (row < inputs.num_rows)
        # live: r < n <= capacity and r < num_given
        given_row = tl.load(inputs.given_rows + r, mask=live, other=0)
        given_len = tl.load(inputs.given_lens + r, mask=live, other=0)
        length = tl.load(plan.prefix_lens + r, mask=live, other=0) + count
        wrong = live & ((given_row != row) | (given_len != length))
        if tl.sum(wrong.to(tl.int32), axis=0) > 0:
            zeros = tl.zeros([REQUESTS], tl.int64)
            owner = tl.load(plan.owners + r, mask=wrong, other=0)
            report(
                log,
                wrong,
                (
                    zeros + site,
                    zeros + _BATCH,
                    zeros,
                    row,
                    length,
                    zeros,
                    zeros - 1,
                    zeros,
                    zeros,
                    zeros,
                    zeros,
                    zeros,
                    zeros + tl.load(inputs.step),
                    given_row,
                    owner,
                    given_len,
                ),
            )


@triton.jit
def _last_offset(plan, inputs, n):
    """The plan's last offset, 0 <= offset <= size."""
    # 0 <= n <= capacity; offsets have capacity + 1 elements
    return tl.minimum(tl.maximum(tl.load(plan.offsets + n), 0), inputs.size)


@triton.jit
def _share_slots(plan, inputs, records, n, slot, LANES: tl.constexpr):
    """Whether two flat inputs before the plan's last offset have one slot, asked by one program with a lane for each.

    Each lane leaves its number in its slot's record, looks whose is there then, and puts back what was there.
    """
    lane = tl.arange(0, LANES).to(tl.int64)
    # valid: 0 < slot < num_slots
    valid = (lane < _last_offset(plan, inputs, n)) & (slot > 0) & (slot < records.num_slots)
    word = record_address(records, slot)
    was = tl.load(word, mask=valid, other=0, cache_modifier=".cg")
    tl.debug_barrier()
    tl.store(word, lane, mask=valid)
    tl.debug_barrier()
    found = tl.load(word, mask=valid, other=0, cache_modifier=".cg")
    tl.debug_barrier()
    tl.store(word, was, mask=valid)
    tl.debug_barrier()
    return tl.sum((valid & (found != lane)).to(tl.int32), axis=0) > 0


@triton.jit
def _mark_slots(plan, inputs, num_slots, marks_ptr, n, first, programs, TILE: tl.constexpr):
    """Leave in each slot's mark the last flat input before the plan's last offset that has it, and the step.

    Whatever the marks held: one that is of this step afterwards is of no input before the slot's last one.
    """
    end, step = _last_offset(plan, inputs, n), (tl.load(inputs.step) & _MARK_STEPS) << _MARK_BITS
    for begin_ in range(first * TILE, end, programs * TILE):
        j = begin_ + tl.arange(0, TILE)
        slot = tl.load(inputs.slots + j, mask=j < end, other=0)
        # marked: 0 < slot < num_slots
        marked = (j < end) & (slot > 0) & (slot < num_slots)
        tl.atomic_max(marks_ptr + slot, step | j, mask=marked, sem="relaxed")


@triton.jit
def _last_marked(plan, inputs, marks_ptr, n, slot, j, storable, OTHERS: tl.constexpr, TILE: tl.constexpr):
    """What `_last_with_slot` returns, by the marks of the slots; one by one where a mark is of something else."""
    end = _last_offset(plan, inputs, n)
    mark = tl.load(marks_ptr + slot, mask=storable, other=0)
    # Of this step, and so not below any input of the slot; of this slot, and so one of them.
    marked = mark & _MARK_INPUTS
    known = storable & ((mark >> _MARK_BITS) == (tl.load(inputs.step) & _MARK_STEPS)) & (marked < end)
    # known: 0 <= marked < end <= size
    known = known & (tl.load(inputs.slots + marked, mask=known, other=0) == slot)
    last = tl.where(known, tl.maximum(j, marked), j)
    if tl.sum((storable & (known == 0) & (j < end)).to(tl.int32), axis=0) > 0:
        last = _last_with_slot(plan, inputs, n, slot, j, storable, OTHERS, TILE)
    return last


@triton.jit
def _last_with_slot(plan, inputs, n, slot, j, storable, OTHERS: tl.constexpr, TILE: tl.constexpr):
    """The last flat input before the plan's last offset that has a token's slot, if that is behind it; else itself."""
    end = _last_offset(plan, inputs, n)
    lasts = tl.full([TILE, OTHERS], -1, tl.int32)
    for at in range(tl.min(tl.where(storable, j, end), axis=0), end, OTHERS):
        other = at + tl.arange(0, OTHERS)
        # 0 <= j <= other < end <= size; what is masked has the padding slot, which no storable token has
        theirs = tl.load(inputs.slots + other, mask=other < end, other=0)
        same = storable[:, None] & (slot[:, None] == theirs[None, :])
        lasts = tl.where(same, other[None, :].to(tl.int32), lasts)
    return tl.maximum(j, tl.max(lasts, axis=1))


@triton.jit
def _requests_of(plan, inputs, n, tokens):
    """Of each of these flat inputs the live request that it is of, the last such one; -1 for none."""
    requests = tokens - tokens - 1
    for r in range(n - n, n):
        # r < n <= capacity; offsets have capacity + 1 elements
        row = tl.load(plan.rows + r)
        begin, end = tl.load(plan.offsets + r), tl.load(plan.offsets + r + 1)
        mine = (tokens >= begin) & (tokens < end) & (row > 0) & (row < inputs.num_rows)
        requests = tl.where(mine, r, requests)
    return requests


@triton.jit
def _chains_at(plan, inputs, requests, tokens, wanted):
    """The chain, uint64, of each wanted one of these flat inputs, which are of these live requests; token by token."""
    # wanted: 0 <= request < n <= capacity, 0 < row < num_rows, begin <= token < size
    row = tl.load(plan.rows + requests, mask=wanted, other=0)
    chain = as_u64(tl.load(inputs.tails + row, mask=wanted, other=0))
    begin = tl.maximum(tl.load(plan.offsets + requests, mask=wanted, other=0), 0)
    length = tl.max(tl.where(wanted, tokens - begin + 1, 0), axis=0)
    for k in range(length - length, length):
        its = wanted & (begin + k <= tokens)
        input_id = tl.load(inputs.tokens + begin + k, mask=its, other=0)
        position = tl.load(inputs.positions + begin + k, mask=its, other=0)
        chain = tl.where(its, next_chain(chain, identity(input_id, position)), chain)
    return chain


@triton.jit
def _load_inputs(inputs, j, valid):
    """Slot, position and token of each valid j of the flat inputs, 0 <= j < size."""
    slot = tl.load(inputs.slots + j, mask=valid, other=0)
    position = tl.load(inputs.positions + j, mask=valid, other=0)
    return slot, position, tl.load(inputs.tokens + j, mask=valid, other=0)


@triton.jit
def _read_tile(
    # inputs
    plan,
    inputs,
    k_source,
    v_source,
    records,
    first,
    n,
    token,
    starts,
    total,
    entry,
    carry,
    early,
    share,
    marks_ptr,
    # constants
    TRACK_LIFETIME: tl.constexpr,
    RING: tl.constexpr,
    OTHERS: tl.constexpr,
    REQUESTS: tl.constexpr,
    REQUEST_BITS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_BITS: tl.constexpr,
):
    """Return, of tokens [entry, entry + TILE) of requests laid out from `first` on, what is wrong, and what to store.

    carry: the chain before the tile, which counts where its first token is not the first of its request; or None.
    early: the flat inputs from `entry` on, which in most decode batches are the tile's tokens; or None.
    share: whether two flat inputs may have one slot; None: the slots' marks say it.
    """
    lane = tl.arange(0, TILE)
    live = entry + lane < total
    # The request of each token is the last one that begins at or before it.
    begins = tl.minimum(tl.maximum(starts - entry, 0), TILE).to(tl.int32)
    at = tl.zeros([TILE], tl.int32)
    alike = False
    if REQUESTS == TILE:
        # In most decode batches every request has one token; behind the last one the next request would begin.
        alike = tl.sum(((begins != lane) & (entry + lane <= total)).to(tl.int32), axis=0) == 0
    if alike:
        at = lane
    else:
        for bit in tl.static_range(REQUEST_BITS):
            # at is a sum of other powers of two below REQUESTS, so that at + this one stays below.
            later = at + (REQUESTS >> (bit + 1))
            at = tl.where(tl.gather(begins, later, 0) <= lane, later, at)
    begin = tl.gather(begins, at, 0)
    j = tl.gather(token - starts, at, 0) + entry + lane
    r = first + at
    # live: 0 <= j < size, r < n <= capacity, 0 < row < num_rows
    if early is None:
        slot, position, input_id = _load_inputs(inputs, j, live)
    else:
        slot, position, input_id = early
        elsewhere = live & (j != entry + lane)
        other_slot, other_position, other_id = _load_inputs(inputs, j, elsewhere)
        slot = tl.where(elsewhere, other_slot, slot)
        position = tl.where(elsewhere, other_position, position)
        input_id = tl.where(elsewhere, other_id, input_id)
    row = tl.load(plan.rows + r, mask=live, other=0)
    owner = tl.load(plan.owners + r, mask=live, other=0)
    expected_position = tl.load(plan.prefix_lens + r, mask=live, other=0) + j
    expected_position -= tl.load(plan.offsets + r, mask=live, other=0)
    tail = as_u64(tl.load(inputs.tails + row, mask=live, other=0))

    in_range = (slot >= 0) & (slot < records.num_slots) & in_source(k_source, slot) & in_source(v_source, slot)
    storable = live & in_range & (slot != 0)
    ident = identity(input_id, position)
    where = as_i64(ident >> 32)
    k_begun = begin_fingerprint(k_source, slot, where, storable)
    v_begun = begin_fingerprint(v_source, slot, where, storable)
    last = j
    if share is None:
        last = _last_marked(plan, inputs, marks_ptr, n, slot, j, storable, OTHERS, TILE)
    elif share:
        last = _last_with_slot(plan, inputs, n, slot, j, storable, OTHERS, TILE)
    first_come = storable & (last > j)
    stored = storable & (last <= j)
    if TRACK_LIFETIME:
        # stored: 0 < slot < num_slots
        old_ident, old_chain, old_kv, old_writer = load_record(records, slot, stored)
    kv = end_fingerprint(k_source, k_begun, storable) | (end_fingerprint(v_source, v_begun, storable) << 32)

    if carry is not None:
        spilled = tl.max(tl.where(starts <= entry, starts, 0), axis=0) < entry
        tail = tl.where(spilled & (begin == 0), carry, tail)
    inverse = chain_inverse(lane, TILE_BITS)
    terms = tl.where(live, mix(ident) * inverse, 0)
    sums = tl.cumsum(terms, axis=0)
    # What the request's chain has besides the tile's sums, known in its first lane: its tail, and nothing of others.
    besides = tail * _M * inverse - (sums - terms)
    chain = chain_scale(lane, TILE_BITS) * (sums + tl.gather(besides, begin, 0))

    reasons = tl.where(live & (in_range == 0) & (slot != 0), _SLOT_RANGE, 0)
    check_positions = tl.load(inputs.check_positions) != 0
    reasons += tl.where(live & check_positions & (position != expected_position), _WRITE_POSITION, 0)
    expected_id = tl.full([TILE], -1, tl.int64)
    if inputs.expected is not None:
        expected_id = tl.load(inputs.expected + j, mask=live, other=0)
        reasons += tl.where(live & (input_id != expected_id), _WRITE_TOKEN, 0)
    if TRACK_LIFETIME:
        in_use = stored & ((old_ident | old_chain | old_kv | old_writer) != 0) & (old_writer >= 0)
        foreign = (old_writer & _OWNER_MASK) != (owner & _OWNER_MASK)
        differs = (as_u64(old_ident) != ident) | (as_u64(old_chain) != chain)
        reasons += tl.where(in_use & foreign & differs, _OVERWRITE, 0)
    taker = owner - owner
    if tl.sum(first_come.to(tl.int32), axis=0) > 0:
        its = _requests_of(plan, inputs, n, tl.where(first_come, last, -1))
        # first_come: 0 <= last < size; owned: 0 <= its < n <= capacity
        owned = first_come & (its >= 0)
        taker = tl.load(plan.owners + its, mask=owned, other=0)
        if TRACK_LIFETIME:
            equal = owned & (
                identity(
                    tl.load(inputs.tokens + last, mask=first_come, other=0),
                    tl.load(inputs.positions + last, mask=first_come, other=0),
                )
                == ident
            )
            own = owned & ((taker & _OWNER_MASK) == (owner & _OWNER_MASK))
            may_share = equal & (own == 0)
            if tl.sum(may_share.to(tl.int32), axis=0) > 0:
                shared = may_share & (_chains_at(plan, inputs, its, last, may_share) == chain)
            else:
                shared = may_share
            # Of a ring's tokens the later ones take the slots of earlier ones.
            same = own if RING else own & equal
            reasons += tl.where(first_come & (same == 0) & (shared == 0), _OVERWRITE, 0)
    return r, row, slot, expected_position, ident, expected_id, chain, kv, owner, reasons, stored, first_come, taker


@triton.jit
def _store_tile(
    # inputs
    plan,
    inputs,
    tile,
    # outputs
    records,
    log,
    counters_ptr,
    site,
    # constants
    TILE: tl.constexpr,
):
    """Report and store what `_read_tile` found."""
    r, row, slot, expected_position, ident, expected_id, chain, kv, owner, reasons, stored, first_come, taker = tile
    zeros = tl.zeros([TILE], tl.int64)
    step = zeros + tl.load(inputs.step)
    bad = reasons != 0
    if tl.sum(bad.to(tl.int32), axis=0) > 0:
        # stored: 0 < slot < num_slots; bad: r < n <= capacity
        replaced = tl.load(record_address(records, slot) + 3, mask=stored & bad, other=0)
        replaced = tl.where(first_come, as_i64(writer_word(step, taker)), replaced)
        seed = tl.load(plan.seed_slots + r, mask=bad, other=0)
        report(
            log,
            bad,
            (
                zeros + site,
                reasons.to(tl.int64),
                slot,
                row,
                expected_position,
                as_i64(ident),
                expected_id,
                as_i64(chain),
                zeros,
                as_i64(kv),
                zeros,
                replaced,
                step,
                seed,
                owner,
                zeros,
            ),
        )
    # Every thread has read what another one may store.
    tl.debug_barrier()
    # stored: 0 < slot < num_slots
    store_record(records, slot, as_i64(ident), as_i64(chain), as_i64(kv), as_i64(writer_word(step, owner)), stored)
    tl.atomic_add(counters_ptr + tag_of(site) * 2 + 1, tl.sum(stored.to(tl.int64), axis=0))


@triton.jit(do_not_specialize=["site", "num_given"])
def _write_at_once(
    # inputs
    plan,
    inputs,
    k_source,
    v_source,
    # outputs
    records,
    log,
    counters_ptr,
    site,
    num_given,
    # constants
    TRACK_LIFETIME: tl.constexpr,
    RING: tl.constexpr,
    OTHERS: tl.constexpr,
    REQUESTS: tl.constexpr,
    REQUEST_BITS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_BITS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One program, for at most REQUESTS requests, which has read every seed before it stores."""
    begin(OVERLAPS)
    early = _load_inputs(inputs, tl.arange(0, TILE), tl.arange(0, TILE) < inputs.size)
    n = tl.minimum(tl.maximum(tl.load(plan.num_requests), 0).to(tl.int64), plan.capacity)
    zero = n - n
    tl.atomic_add(counters_ptr + tag_of(site) * 2, 1)
    row, token, count, starts, total = _lay_out(plan, inputs, zero, n, REQUESTS)
    seeds = _read_seeds(plan, inputs, records, zero, row, count, REQUESTS)
    share = _share_slots(plan, inputs, records, n, early[0], TILE)
    tile = _read_tile(
        plan,
        inputs,
        k_source,
        v_source,
        records,
        zero,
        n,
        token,
        starts,
        total,
        zero,
        None,
        early,
        share,
        None,
        TRACK_LIFETIME,
        RING,
        OTHERS,
        REQUESTS,
        REQUEST_BITS,
        TILE,
        TILE_BITS,
    )
    # Only now, so that seeds are read beside the first tile.
    _report_given(plan, inputs, num_given, log, zero, n, row, count, site, REQUESTS)
    _report_seeds(plan, inputs, log, zero, row, seeds, site, REQUESTS)
    _store_tile(plan, inputs, tile, records, log, counters_ptr, site, TILE)
    # More tokens than inputs: only where segments overlap.
    if total > TILE:
        carry = _last_chain(tile, TILE)
        for entry in range(TILE, total, TILE):
            next_tile = _read_tile(
                plan,
                inputs,
                k_source,
                v_source,
                records,
                zero,
                n,
                token,
                starts,
                total,
                entry,
                carry,
                None,
                share,
                None,
                TRACK_LIFETIME,
                RING,
                OTHERS,
                REQUESTS,
                REQUEST_BITS,
                TILE,
                TILE_BITS,
            )
            _store_tile(plan, inputs, next_tile, records, log, counters_ptr, site, TILE)
            carry = _last_chain(next_tile, TILE)


@triton.jit
def _last_chain(tile, TILE: tl.constexpr):
    """The chain in a tile's last lane."""
    return tl.sum(tl.where(tl.arange(0, TILE) == TILE - 1, tile[6], 0), axis=0)


@triton.jit(do_not_specialize=["site", "num_given"])
def _prepare(
    # inputs
    plan,
    inputs,
    records,
    # outputs
    tile_sums_ptr,
    marks_ptr,
    log,
    counters_ptr,
    site,
    num_given,
    # constants
    REQUESTS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_BITS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Check every seed, mark slots, and leave what each tile adds to the chain of who goes on behind it."""
    begin(OVERLAPS)
    pid, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    n = tl.minimum(tl.maximum(tl.load(plan.num_requests), 0).to(tl.int64), plan.capacity)
    _mark_slots(plan, inputs, records.num_slots, marks_ptr, n, pid, programs, TILE)
    if pid == 0:
        tl.atomic_add(counters_ptr + tag_of(site) * 2, 1)
    lane = tl.arange(0, TILE)
    inverse = chain_inverse(lane, TILE_BITS)
    # Tiles of requests laid out before, and the first of these requests' tiles that is this program's.
    tiles_before, own = pid - pid, pid
    for first in range(tiles_before, n, REQUESTS):
        row, token, count, starts, total = _lay_out(plan, inputs, first, n, REQUESTS)
        if own == 0:
            seeds = _read_seeds(plan, inputs, records, first, row, count, REQUESTS)
            _report_given(plan, inputs, num_given, log, first, n, row, count, site, REQUESTS)
            _report_seeds(plan, inputs, log, first, row, seeds, site, REQUESTS)
        tiles = (total + TILE - 1) // TILE
        for tile in range(own, tiles - 1, programs):
            end = tile * TILE + TILE
            # The request of the last token goes on behind the tile unless another one begins there.
            last = tl.sum((starts < end).to(tl.int32), axis=0) - 1
            if tl.sum((starts <= end).to(tl.int32), axis=0) - 1 == last:
                its = tl.arange(0, REQUESTS) == last
                start = tl.sum(tl.where(its, starts, 0), axis=0)
                entry = tile * TILE + lane
                j = tl.sum(tl.where(its, token, 0), axis=0) - start + entry
                # start <= entry < end < total: 0 <= j < size
                input_id = tl.load(inputs.tokens + j, mask=entry >= start, other=0)
                position = tl.load(inputs.positions + j, mask=entry >= start, other=0)
                # 0 < row < num_rows
                tail = as_u64(tl.load(inputs.tails + tl.sum(tl.where(its, row, 0), axis=0)))
                terms = mix(identity(input_id, position)) + tl.where(entry == start, tail * _M, 0)
                terms = tl.where(entry >= start, terms * inverse, 0)
                # tile_sums hold as many tiles of all tokens as there are requests
                tl.store(tile_sums_ptr + tiles_before + tile, as_i64(tl.sum(terms, axis=0)))
        tiles_before += tiles
        own = (own + programs - tiles % programs) % programs


@triton.jit(do_not_specialize=["site"])
def _store(
    # inputs
    plan,
    inputs,
    k_source,
    v_source,
    tile_sums_ptr,
    marks_ptr,
    # outputs
    records,
    log,
    counters_ptr,
    site,
    # constants
    TRACK_LIFETIME: tl.constexpr,
    RING: tl.constexpr,
    OTHERS: tl.constexpr,
    REQUESTS: tl.constexpr,
    REQUEST_BITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    AT_ONCE_BITS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_BITS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Report and store every token, each tile from the chain that the tiles before it lead to."""
    begin(OVERLAPS)
    pid, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    n = tl.minimum(tl.maximum(tl.load(plan.num_requests), 0).to(tl.int64), plan.capacity)
    tiles_before, own = pid - pid, pid
    for first in range(tiles_before, n, REQUESTS):
        _, token, _, starts, total = _lay_out(plan, inputs, first, n, REQUESTS)
        tiles = (total + TILE - 1) // TILE
        for number in range(own, tiles, programs):
            entry = number * TILE
            first_tile = tl.max(tl.where(starts <= entry, starts, 0), axis=0) // TILE
            tile = _read_tile(
                plan,
                inputs,
                k_source,
                v_source,
                records,
                first,
                n,
                token,
                starts,
                total,
                entry,
                _chain_before(tile_sums_ptr + tiles_before, first_tile, number, AT_ONCE, AT_ONCE_BITS, TILE, TILE_BITS),
                None,
                None,
                marks_ptr,
                TRACK_LIFETIME,
                RING,
                OTHERS,
                REQUESTS,
                REQUEST_BITS,
                TILE,
                TILE_BITS,
            )
            _store_tile(plan, inputs, tile, records, log, counters_ptr, site, TILE)
        tiles_before += tiles
        own = (own + programs - tiles % programs) % programs


@triton.jit
def _chain_before(
    tile_sums_ptr,
    first_tile,
    tile,
    # constants
    AT_ONCE: tl.constexpr,
    AT_ONCE_BITS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_BITS: tl.constexpr,
):
    """The chain before `tile` of a request whose first token is in `first_tile`; anything if that is `tile` itself."""
    chain = tl.zeros([1], tl.uint64)
    block = tl.arange(0, AT_ONCE).to(tl.int64)
    # M ** (TILE - 1) for the last token of a tile, once more M ** TILE for each tile further back.
    scale = chain_scale(block * TILE + (TILE - 1), TILE_BITS + AT_ONCE_BITS)
    further = chain_scale(tl.full([1], AT_ONCE * TILE, tl.int64), TILE_BITS + AT_ONCE_BITS + 1)
    for back in range(0, tile - first_tile, AT_ONCE):
        before = tile - 1 - back - block
        # first_tile <= before < tile: left by `_prepare`
        sums = as_u64(tl.load(tile_sums_ptr + before, mask=before >= first_tile, other=0))
        chain += tl.sum(scale * sums, axis=0)
        scale *= further
    return tl.max(chain, axis=0)


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
    given_rows: torch.Tensor | None,
    given_lens: torch.Tensor | None,
    track_lifetime: bool,
    ring: bool,
    violations: ViolationLog,
    counters: torch.Tensor,
    tile_sums: torch.Tensor,
    slot_marks: torch.Tensor,
) -> None:
    """Record the new tokens in the slots that the forward wrote them to; see specs/write.py."""
    capacity, num_tokens = write_plan.rows.shape[0], input_ids.shape[0]
    plan = plan_of(write_plan)
    inputs = Inputs(
        tokens=input_ids,
        positions=positions,
        slots=out_slots,
        expected=expected_input_ids,
        given_rows=given_rows,
        given_lens=given_lens,
        size=num_tokens,
        tails=tails,
        num_rows=tails.shape[0],
        step=step,
        check_positions=check_positions,
    )
    num_given = 0 if given_rows is None else given_rows.shape[0]
    outputs = records_of(endpoint.records), log_of(violations), counters
    site, token_bytes = endpoint.site, covered_bytes(endpoint.k_source) + covered_bytes(endpoint.v_source)

    # A lane for each token and for each request, a thread for each lane.
    lanes = one_program_lanes(max(capacity, num_tokens), step.device)
    if lanes and num_tokens * token_bytes <= ONE_PROGRAM_BYTES:
        _write_at_once[(1,)](
            plan,
            inputs,
            source_of(endpoint.k_source),
            source_of(endpoint.v_source),
            *outputs,
            # constants
            site=site,
            num_given=num_given,
            TRACK_LIFETIME=track_lifetime,
            RING=ring,
            OTHERS=FEW_OTHERS,
            REQUESTS=lanes,
            REQUEST_BITS=lanes.bit_length() - 1,
            TILE=lanes,
            TILE_BITS=lanes.bit_length() - 1,
            num_warps=lanes // 32,
            **overlapping(step.device),
        )
        return

    narrow = token_bytes <= NARROW_BYTES
    tile = NARROW_TILE if narrow else TILE_TOKENS
    requests = FEW_REQUESTS if capacity <= FEW_REQUESTS else MAX_REQUESTS
    at_once = tiles_at_once(step.device)
    grid = persistent_grid(triton.cdiv(num_tokens, tile) + triton.cdiv(capacity, requests), step.device)
    constants = {"site": site, "REQUESTS": requests, "TILE": tile, "TILE_BITS": tile.bit_length() - 1}
    constants |= overlapping(step.device)
    _prepare[grid](plan, inputs, outputs[0], tile_sums, slot_marks, *outputs[1:], num_given=num_given, **constants)
    _store[grid](
        plan,
        inputs,
        source_of(endpoint.k_source, max_words=MAX_BLOCK_WORDS if narrow else WIDE_WORDS),
        source_of(endpoint.v_source, max_words=MAX_BLOCK_WORDS if narrow else WIDE_WORDS),
        tile_sums,
        slot_marks,
        *outputs,
        **constants,
        TRACK_LIFETIME=track_lifetime,
        RING=ring,
        OTHERS=others_at_once(step.device),
        REQUEST_BITS=requests.bit_length() - 1,
        AT_ONCE=at_once,
        AT_ONCE_BITS=at_once.bit_length() - 1,
        num_warps=4 if narrow else tile // 4,
        maxnreg=None if narrow else WIDE_REGISTERS,
    )
