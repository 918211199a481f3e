"""chain_tails: the Triton kernel. One program per request, which takes a tile of its tokens at a time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kv_canary.constants import ANCHOR, Status
from kv_canary.kernels.hashing import as_i64, as_u64, chain_scale, chain_terms, identity

TILE_TOKENS = 1024

_ANCHOR = tl.constexpr(ANCHOR)
_ROW_RANGE = tl.constexpr(int(Status.ROW_RANGE))
_LENGTH_RANGE = tl.constexpr(int(Status.LENGTH_RANGE))


@triton.jit
def _chain_tails(
    # inputs
    flat_ptr,
    total,
    offsets_ptr,
    rows_ptr,
    starts_ptr,
    anchors_ptr,
    num_rows,
    # outputs
    tails_ptr,
    status_ptr,
    # constants
    TILE: tl.constexpr,
    TILE_BITS: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    # r < bs; offsets have bs + 1 elements
    row = tl.load(rows_ptr + r)
    start = tl.load(starts_ptr + r)
    begin = tl.load(offsets_ptr + r)
    end = tl.load(offsets_ptr + r + 1)
    row_ok = (row >= 0) & (row < num_rows)
    if row_ok == 0:
        tl.atomic_or(status_ptr, _ROW_RANGE)
    if start < 0:
        tl.atomic_or(status_ptr, _LENGTH_RANGE)
    if row_ok & (row > 0) & (start >= 0):
        # 0 < row < num_rows
        tail = tl.load(tails_ptr + row)
        anchor = tail - tail + _ANCHOR
        if anchors_ptr is not None:
            anchor = tl.load(anchors_ptr + row)
        chain = as_u64(tl.where(start == 0, anchor, tail))
        # 0 <= first <= total whatever the offsets hold.
        first = tl.minimum(tl.maximum(begin, 0), total)
        last = tl.minimum(end, total)
        lane = tl.arange(0, TILE).to(tl.int64)
        for at in range(first, last, TILE):
            j = at + lane
            live = j < last
            # live: 0 <= first <= j < last <= total
            token = tl.load(flat_ptr + j, mask=live, other=0)
            terms = chain_terms(identity(token, start + (j - begin)), lane, live, TILE_BITS)
            count = tl.minimum(last - at, TILE)
            scale = tl.max(chain_scale(tl.zeros([1], tl.int64) + count, TILE_BITS), axis=0)
            chain = scale * (chain + tl.sum(terms, axis=0))
        tl.store(tails_ptr + row, as_i64(chain))


def chain_tails(
    *,
    flat: torch.Tensor,
    offsets: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    anchors: torch.Tensor | None,
    tails: torch.Tensor,
    status: torch.Tensor,
) -> None:
    """Advance each row's chain over the request's own tokens; see specs/chain_tails.py."""
    bs = rows.shape[0]
    status.zero_()
    if bs == 0:
        return
    _chain_tails[(bs,)](
        # inputs
        flat,
        flat.shape[0],
        offsets,
        rows,
        starts,
        anchors,
        tails.shape[0],
        # outputs
        tails,
        status,
        # constants
        TILE=TILE_TOKENS,
        TILE_BITS=TILE_TOKENS.bit_length(),
    )
