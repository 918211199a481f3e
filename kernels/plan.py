"""plan: the Triton kernels. One program lays out the requests; then many fill the entries, and one plans the writes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kv_canary.constants import Status
from kv_canary.kernels.batches import (
    BLOCK_REQUESTS,
    batch_of,
    find_entries,
    lay_out_alone,
    layout_options,
    plan_of,
    plan_write,
    tables_of,
    tokens_of,
)
from kv_canary.kernels.launching import begin, overlapping, persistent_grid
from kv_canary.specs.structures import VerifyPlan, WritePlan

BLOCK_ENTRIES = 256
# Elements that are taken at a time, by what they are.
TILES = {"entries": BLOCK_ENTRIES, "requests": BLOCK_REQUESTS}

_LUT_RANGE = tl.constexpr(int(Status.LUT_RANGE))


@triton.jit
def _fill_entries(
    # inputs
    batch,
    owners_ptr,
    tables,
    tokens,
    entry_offsets_ptr,
    num_valid_ptr,
    # outputs
    plan,
    slots_ptr,
    prev_slots_ptr,
    positions_ptr,
    tokens_ptr,
    rows_ptr,
    status_ptr,
    # constants
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    pid = tl.program_id(0).to(tl.int64)
    if pid == 0:
        plan_write(
            # inputs
            batch,
            owners_ptr,
            tables,
            # outputs
            plan,
            status_ptr,
            # constants
            BLOCK,
        )
    else:
        n = tl.load(num_valid_ptr).to(tl.int64)
        for first in range((pid - 1) * BLOCK, n, (tl.num_programs(0).to(tl.int64) - 1) * BLOCK):
            entry = first + tl.arange(0, BLOCK)
            valid = entry < n
            _, row, slot, previous, position, token, _begins, lut_bad = find_entries(
                batch, tables, tokens, entry_offsets_ptr, None, first, n, BLOCK
            )
            # entry < n <= capacity of the verify plan
            tl.store(slots_ptr + entry, slot, mask=valid)
            tl.store(prev_slots_ptr + entry, previous, mask=valid)
            tl.store(positions_ptr + entry, position, mask=valid)
            tl.store(tokens_ptr + entry, token, mask=valid)
            tl.store(rows_ptr + entry, row.to(tl.int32), mask=valid)
            if tl.sum(lut_bad.to(tl.int32), axis=0) > 0:
                tl.atomic_or(status_ptr, _LUT_RANGE)


def plan(
    *,
    rows: torch.Tensor,
    owners: torch.Tensor | None,
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    table_rows: torch.Tensor | None,
    page_size: int,
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
    capacity = verify_plan.slots.shape[0]
    batch = batch_of(rows, table_rows, prefix_lens, extend_lens, strides, step)
    tables = tables_of(req_to_token, page_size, lut, window, after_write=after_write)
    lay_out_alone[(1,)](
        # inputs
        batch,
        tables,
        capacity,
        # outputs
        entry_offsets,
        None,
        verify_plan.num_valid,
        verify_plan.num_requested,
        status,
        # constants
        **layout_options(batch.size, rows.device),
    )
    (programs,) = persistent_grid(triton.cdiv(capacity, BLOCK_ENTRIES), rows.device)
    _fill_entries[(1 + programs,)](
        # inputs
        batch,
        owners,
        tables,
        tokens_of(expected_tokens, expected_lens, token_offset),
        entry_offsets,
        verify_plan.num_valid,
        # outputs
        plan_of(write_plan),
        verify_plan.slots,
        verify_plan.prev_slots,
        verify_plan.positions,
        verify_plan.tokens,
        verify_plan.rows,
        status,
        # constants
        BLOCK=BLOCK_ENTRIES,
        **overlapping(rows.device),
    )
