"""scatter_token_ids: the Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kv_canary.constants import Status
from kv_canary.kernels.launching import max_programs

BLOCK_TOKENS = 512

_ROW_RANGE = tl.constexpr(int(Status.ROW_RANGE))


@triton.jit
def _scatter(
    # inputs
    flat_ptr,
    total,
    offsets_ptr,
    rows_ptr,
    starts_ptr,
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
    # r < bs; offsets have bs + 1 elements
    row = tl.load(rows_ptr + r)
    begin = tl.load(offsets_ptr + r)
    end = tl.load(offsets_ptr + r + 1)
    start = row - row
    if starts_ptr is not None:
        start = tl.load(starts_ptr + r)
    row_ok = (row >= 0) & (row < num_rows)
    if (part == 0) & (row_ok == 0):
        tl.atomic_or(status_ptr, _ROW_RANGE)
    if row_ok & (row > 0) & (start >= 0) & (start < max_len):
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
    status.zero_()
    if bs == 0:
        return
    parts = min(triton.cdiv(max(total, 1), BLOCK_TOKENS), max(1, max_programs(flat.device) // bs))
    num_rows, max_len = pool.shape
    _scatter[(bs, parts)](
        # inputs
        flat,
        total,
        offsets,
        rows,
        starts,
        num_rows,
        max_len,
        # outputs
        pool,
        pool.stride(0),
        status,
        # constants
        BLOCK=BLOCK_TOKENS,
    )
