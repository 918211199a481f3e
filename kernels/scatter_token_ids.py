"""scatter_token_ids: the Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kv_canary.kernels.launching import max_programs
from kv_canary.kernels.reporting import store_status

BLOCK_TOKENS = 512
# Elements that are taken at a time, by what they are.
TILES = {"tokens": BLOCK_TOKENS}


@triton.jit(do_not_specialize=["total", "bs"])
def _scatter(
    # inputs
    flat_ptr,
    total,
    offsets_ptr,
    rows_ptr,
    starts_ptr,
    bs,
    num_rows,
    max_len,
    # outputs
    pool_ptr,
    pool_stride,
    status_ptr,
    # constants
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    if r == bs:
        if part == 0:
            store_status(rows_ptr, None, bs, num_rows, status_ptr)
        return
    # r < bs; offsets have bs + 1 elements
    row = tl.load(rows_ptr + r)
    begin = tl.load(offsets_ptr + r)
    end = tl.load(offsets_ptr + r + 1)
    start = row - row
    if starts_ptr is not None:
        start = tl.load(starts_ptr + r)
    if (row > 0) & (row < num_rows) & (start >= 0) & (start < max_len):
        # 0 <= first <= total whatever the offsets hold, so that first + part * BLOCK cannot wrap.
        first = tl.minimum(tl.maximum(begin, 0), total)
        last = tl.minimum(end, total)
        step = tl.num_programs(1).to(tl.int64) * BLOCK
        for at in range(first + part * BLOCK, last, step):
            j = at + tl.arange(0, BLOCK)
            k = j - begin
            # 0 <= first <= j < last <= total and 0 <= start + k < max_len; k wraps below 0 where begin is far below 0
            keep = (j < last) & (k >= 0) & (k < max_len - start)
            token = tl.load(flat_ptr + j, mask=keep, other=0)
            tl.store(pool_ptr + row * pool_stride + start + k, token.to(tl.int32), mask=keep)


def scatter_token_ids(
    *,
    flat: torch.Tensor,
    offsets: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor | None,
    pool: torch.Tensor,
    status: torch.Tensor,
) -> None:
    """Put each request's new tokens into its row of the token pool; see specs/scatter_token_ids.py."""
    bs, total = rows.shape[0], flat.shape[0]
    if bs == 0:
        status.zero_()
        return
    num_rows, max_len = pool.shape
    # Parts of a row that its tokens may fill, as long as there are programs for them; and one for the status.
    parts = triton.cdiv(max(1, min(total, max_len)), BLOCK_TOKENS)
    parts = min(parts, max(1, max_programs(flat.device) // bs))
    _scatter[(bs + 1, parts)](
        # inputs
        flat,
        total,
        offsets,
        rows,
        starts,
        bs,
        num_rows,
        max_len,
        # outputs
        pool,
        pool.stride(0),
        status,
        # constants
        BLOCK=BLOCK_TOKENS,
    )
