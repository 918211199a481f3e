"""chain_tails: the Triton kernel. One program per request, whose lanes advance over every so-manyth of its tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kv_canary.constants import ANCHOR
from kv_canary.kernels.hashing import as_i64, as_u64, chain_scale, identity, mix
from kv_canary.kernels.reporting import store_status

# Tokens that a lane takes at a time, and most lanes of a program.
LANE_TOKENS = 8
MAX_LANES = 512
# Elements that are taken at a time, by what they are.
TILES = {"tokens": LANE_TOKENS * MAX_LANES}

_ANCHOR = tl.constexpr(ANCHOR)


@triton.jit
def advance_chain(
    r,
    # inputs
    flat_ptr,
    total,
    offsets_ptr,
    rows_ptr,
    starts_ptr,
    anchors_ptr,
    num_rows,
    max_len,
    # outputs
    tails_ptr,
    pool_ptr,
    pool_stride,
    # constants
    LANES: tl.constexpr,
    LANE_BITS: tl.constexpr,
    TOKENS: tl.constexpr,
    FAR: tl.constexpr,
):
    """Advance the chain of the r-th segment's row, and put its tokens into its row of the pool.

    FAR: the lists lie in memory of the host's. Of segments of one token each, the token is then read along with what
    says where it is.
    """
    # r < segments; offsets have an element more
    row = tl.load(rows_ptr + r)
    start = tl.load(starts_ptr + r)
    begin = tl.load(offsets_ptr + r)
    end = tl.load(offsets_ptr + r + 1)
    guess = begin - begin
    if FAR:
        guess = tl.load(flat_ptr + r, mask=r < total, other=0)
        # Not moved behind what asks for the row: they would come later then.
        tl.debug_barrier()
    if (row > 0) & (row < num_rows) & (start >= 0):
        # 0 < row < num_rows
        tail = tl.load(tails_ptr + row)
        anchor = tail - tail + _ANCHOR
        if anchors_ptr is not None:
            anchor = tl.load(anchors_ptr + row)
        chain = as_u64(tl.where(start == 0, anchor, tail))
        # 0 <= first <= last <= total whatever the offsets hold.
        first = tl.minimum(tl.maximum(begin, 0), total)
        last = tl.maximum(tl.minimum(end, total), first)
        unread = first
        if FAR:
            unread = tl.where((begin == r) & (end == r + 1), last, first)
        # Each lane's share of the chain, of every LANES-th token; the last step ends at the last token.
        lane = tl.arange(0, LANES).to(tl.int64)
        share = tl.zeros([LANES], tl.uint64)
        stride = chain_scale(tl.full([1], LANES, tl.int64), LANE_BITS + 1)
        steps = (last - first + LANES * TOKENS - 1) // (LANES * TOKENS)
        for at in range(last - steps * (LANES * TOKENS), last, LANES * TOKENS):
            for nth in tl.static_range(TOKENS):
                j = at + nth * LANES + lane
                # at least first: 0 <= j < last <= total
                token = tl.load(flat_ptr + j, mask=j >= unread, other=guess)
                term = tl.where(j >= first, mix(identity(token, start + (j - begin))), 0)
                share = share * stride + term
                if pool_ptr is not None:
                    k = j - begin
                    # 0 <= start + k < max_len; k wraps below 0 where begin is far below 0
                    keep = (j >= first) & (k >= 0) & (k < max_len - start)
                    tl.store(pool_ptr + row * pool_stride + start + k, token.to(tl.int32), mask=keep)
        shares = tl.sum(share * chain_scale(LANES - 1 - lane, LANE_BITS), axis=0)
        length = tl.zeros([1], tl.int64) + (last - first)
        chain = tl.max(chain_scale(length, 32), axis=0) * chain + shares
        tl.store(tails_ptr + row, as_i64(chain))


@triton.jit(do_not_specialize=["total", "bs"])
def _chain_tails(
    # inputs
    flat_ptr,
    total,
    offsets_ptr,
    rows_ptr,
    starts_ptr,
    anchors_ptr,
    bs,
    num_rows,
    max_len,
    # outputs
    tails_ptr,
    pool_ptr,
    pool_stride,
    status_ptr,
    # constants
    LANES: tl.constexpr,
    LANE_BITS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    if r == bs:
        store_status(rows_ptr, starts_ptr, bs, num_rows, status_ptr)
    else:
        advance_chain(
            r,
            # inputs
            flat_ptr,
            total,
            offsets_ptr,
            rows_ptr,
            starts_ptr,
            anchors_ptr,
            num_rows,
            max_len,
            # outputs
            tails_ptr,
            pool_ptr,
            pool_stride,
            # constants
            LANES,
            LANE_BITS,
            TOKENS,
            False,
        )


def chain_tails(
    *,
    flat: torch.Tensor,
    offsets: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    anchors: torch.Tensor | None,
    tails: torch.Tensor,
    pool: torch.Tensor | None,
    status: torch.Tensor,
) -> None:
    """Advance each row's chain over the request's own tokens, and keep these; see specs/chain_tails.py."""
    bs, total = rows.shape[0], flat.shape[0]
    if bs == 0:
        status.zero_()
        return
    # As many lanes as one request may need that has all tokens: those of many may be shared out unevenly.
    lanes = min(MAX_LANES, max(32, triton.next_power_of_2(triton.cdiv(total, LANE_TOKENS))))
    _chain_tails[(bs + 1,)](
        # inputs
        flat,
        total,
        offsets,
        rows,
        starts,
        anchors,
        bs,
        tails.shape[0],
        0 if pool is None else pool.shape[1],
        # outputs
        tails,
        pool,
        0 if pool is None else pool.stride(0),
        status,
        # constants
        LANES=lanes,
        LANE_BITS=lanes.bit_length() - 1,
        TOKENS=LANE_TOKENS,
        num_warps=lanes // 32,
    )
