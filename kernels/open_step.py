"""open_step: the Triton kernel. One program lays the batch out, one a segment advances a chain, the last ones copy.

Each reads the numbers where they come from; none waits for what another one leaves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kv_canary.kernels.batches import batch_of, lay_out, tables_of
from kv_canary.kernels.chain_tails import LANE_TOKENS, MAX_LANES, advance_chain
from kv_canary.kernels.launching import begin, overlapping
from kv_canary.kernels.reporting import store_status

# Lanes of a program where no segment may have more tokens than these take at a time; more of them else. Few numbers, as
# each is a kernel to compile.
LEAST_LANES = 256
# Requests that are laid out at a time: in memory of the host's, a second look takes as long as all else.
BLOCK_REQUESTS = 512
# Elements that are taken at a time, by what they are.
TILES = {"tokens": LANE_TOKENS * MAX_LANES, "requests": BLOCK_REQUESTS}


@triton.jit(do_not_specialize=["num_words", "total", "num_advances"])
def _open_step(
    # inputs
    words_ptr,
    num_words,
    flat_ptr,
    total,
    offsets_ptr,
    advance_rows_ptr,
    starts_ptr,
    anchors_ptr,
    num_advances,
    num_chains,
    max_len,
    batch,
    tables,
    # outputs
    copy_ptr,
    tails_ptr,
    pool_ptr,
    pool_stride,
    status_ptr,
    entry_offsets_ptr,
    longest_stride_ptr,
    # constants
    LANES: tl.constexpr,
    LANE_BITS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_REQUESTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    pid = tl.program_id(0).to(tl.int64)
    r = pid - 2
    if pid == 0:
        lay_out(
            # inputs
            batch,
            tables,
            # outputs
            entry_offsets_ptr,
            longest_stride_ptr,
            # constants
            BLOCK_REQUESTS,
        )
    elif pid == 1:
        store_status(advance_rows_ptr, starts_ptr, num_advances, num_chains, status_ptr)
    elif r < num_advances:
        advance_chain(
            r,
            # inputs
            flat_ptr,
            total,
            offsets_ptr,
            advance_rows_ptr,
            starts_ptr,
            anchors_ptr,
            num_chains,
            max_len,
            # outputs
            tails_ptr,
            pool_ptr,
            pool_stride,
            # constants
            LANES,
            LANE_BITS,
            TOKENS,
            True,
        )
    else:
        at = (r - num_advances) * LANES + tl.arange(0, LANES)
        inside = at < num_words
        tl.store(copy_ptr + at, tl.load(words_ptr + at, mask=inside), mask=inside)


def open_step(
    *,
    words: torch.Tensor,
    copy: torch.Tensor,
    flat: torch.Tensor,
    offsets: torch.Tensor,
    advance_rows: torch.Tensor,
    starts: torch.Tensor,
    anchors: torch.Tensor | None,
    tails: torch.Tensor,
    pool: torch.Tensor | None,
    status: torch.Tensor,
    rows: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    table_rows: torch.Tensor | None,
    page_size: int,
    window: int,
    strides: torch.Tensor | None,
    step: torch.Tensor | None,
    entry_offsets: torch.Tensor,
    longest_stride: torch.Tensor,
) -> None:
    """Take in a step's numbers, advance chains, and lay the batch out; see specs/open_step.py."""
    num_words, total, num_advances = words.shape[0], flat.shape[0], advance_rows.shape[0]
    lanes = LEAST_LANES if total <= LEAST_LANES * LANE_TOKENS else MAX_LANES
    _open_step[(2 + num_advances + triton.cdiv(num_words, lanes),)](
        # inputs
        words,
        num_words,
        flat,
        total,
        offsets,
        advance_rows,
        starts,
        anchors,
        num_advances,
        tails.shape[0],
        0 if pool is None else pool.shape[1],
        batch_of(rows, table_rows, prefix_lens, extend_lens, strides, step),
        tables_of(req_to_token, page_size, None, window),
        # outputs
        copy,
        tails,
        pool,
        0 if pool is None else pool.stride(0),
        status,
        entry_offsets,
        longest_stride,
        # constants
        LANES=lanes,
        LANE_BITS=lanes.bit_length() - 1,
        TOKENS=LANE_TOKENS,
        BLOCK_REQUESTS=BLOCK_REQUESTS,
        num_warps=lanes // 32,
        **overlapping(words.device),
    )
