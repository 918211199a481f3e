"""verify_prefixes: the Triton kernels. One program plans the writes, many find and check the entries.

Where the entries are few, each program lays out the batch for itself, which saves a launch; else a launch before does,
for that takes as long as checking a tile of entries. Neither does where `open_step` has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kv_canary.constants import RUN_ENTRIES, Status
from kv_canary.kernels.batches import (
    BLOCK_REQUESTS,
    batch_of,
    find_entries,
    lay_out,
    lay_out_alone,
    layout_options,
    leave_counts,
    plan_of,
    plan_write,
    tables_of,
    tokens_of,
)
from kv_canary.kernels.checking import BLOCK_ENTRIES, begin_check, check_entries, sources_of, tile_options
from kv_canary.kernels.launching import begin, few_entries, overlapping, persistent_grid
from kv_canary.kernels.records import records_of
from kv_canary.kernels.reporting import log_of, tag_of
from kv_canary.specs.structures import Endpoint, ResolvedSlots, ViolationLog, WritePlan

_LUT_RANGE = tl.constexpr(int(Status.LUT_RANGE))
_RUN_ENTRIES = tl.constexpr(RUN_ENTRIES)
_INT32_MAX = tl.constexpr((1 << 31) - 1)

# Elements that are taken at a time, by what they are.
TILES = {"entries": BLOCK_ENTRIES, "requests": BLOCK_REQUESTS}


@triton.jit
def _fit(x):
    """int64 `x` as int32, the largest one where it is larger."""
    return tl.minimum(x, _INT32_MAX).to(tl.int32)


@triton.jit(do_not_specialize=["is_laid_out", "site"])
def _verify_prefixes(
    # inputs
    batch,
    owners_ptr,
    tables,
    tokens,
    capacity,
    records,
    k_source,
    v_source,
    anchors_ptr,
    num_anchors,
    step_ptr,
    is_laid_out,
    # outputs
    entry_offsets_ptr,
    longest_stride_ptr,
    num_valid_ptr,
    num_requested_ptr,
    status_ptr,
    plan,
    entries_ptr,
    runs_ptr,
    log,
    counters_ptr,
    site,
    # constants
    TRACK_LIFETIME: tl.constexpr,
    LAYS_OUT: tl.constexpr,
    BLOCK_REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    pid = tl.program_id(0).to(tl.int64)
    if LAYS_OUT:
        if is_laid_out:
            requested = tl.load(entry_offsets_ptr + batch.size)
        else:
            requested = lay_out(
                # inputs
                batch,
                tables,
                # outputs
                entry_offsets_ptr,
                longest_stride_ptr,
                # constants
                BLOCK_REQUESTS,
            )
            # Its own threads read what this program has stored.
            tl.debug_barrier()
    else:
        requested = tl.load(entry_offsets_ptr + batch.size)
    n = tl.minimum(requested, capacity)
    if pid == 0:
        if tables.lut is None:
            # With a LUT, where all programs may add to the status, the launch before has left it.
            leave_counts(requested, capacity, num_valid_ptr, num_requested_ptr, status_ptr)
            tl.debug_barrier()
        tl.atomic_add(counters_ptr + tag_of(site) * 2, 1)
        tl.atomic_add(counters_ptr + tag_of(site) * 2 + 1, n)
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
        step = tl.load(step_ptr)
        for first in range((pid - 1) * BLOCK, n, (tl.num_programs(0).to(tl.int64) - 1) * BLOCK):
            entry = first + tl.arange(0, BLOCK)
            live = entry < n
            r, row, slot, previous, position, token, begins, lut_bad = find_entries(
                batch, tables, tokens, entry_offsets_ptr, longest_stride_ptr, first, n, BLOCK
            )
            if tables.lut is not None and tl.sum(lut_bad.to(tl.int32), axis=0) > 0:
                tl.atomic_or(status_ptr, _LUT_RANGE)
            begun = begin_check(slot, position, live, records, k_source, v_source)
            begins = begins | (entry % _RUN_ENTRIES == 0)
            at = entry[:, None] * 2 + tl.arange(0, 2)[None, :]
            words = tl.join(_fit(slot), tl.where(begins, -1 - _fit(position), _fit(position)))
            # entry < n <= capacity of the resolved slots
            tl.store(entries_ptr + at, words, mask=live[:, None])
            tl.store(runs_ptr + at, tl.join(_fit(previous), r.to(tl.int32)), mask=(live & begins)[:, None])
            check_entries(
                begun,
                slot,
                previous,
                position,
                token,
                # As a plan holds it.
                row.to(tl.int32).to(tl.int64),
                None,
                live,
                # inputs
                records,
                k_source,
                v_source,
                anchors_ptr,
                num_anchors,
                step,
                # outputs
                log,
                # constants
                site,
                TRACK_LIFETIME,
                BLOCK,
            )


def verify_prefixes(
    *,
    rows: torch.Tensor,
    owners: torch.Tensor | None,
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    table_rows: torch.Tensor | None,
    page_size: int,
    window: int,
    lut: torch.Tensor | None,
    expected_tokens: torch.Tensor | None,
    expected_lens: torch.Tensor | None,
    token_offset: int,
    strides: torch.Tensor | None,
    step: torch.Tensor,
    endpoint: Endpoint,
    anchors: torch.Tensor | None,
    track_lifetime: bool,
    laid_out: torch.Tensor | None,
    laid_out_stride: torch.Tensor | None,
    resolved: ResolvedSlots,
    write_plan: WritePlan,
    status: torch.Tensor,
    violations: ViolationLog,
    counters: torch.Tensor,
    entry_offsets: torch.Tensor,
    longest_stride: torch.Tensor,
) -> None:
    """Check every cached position of a batch, straight from the tables; see specs/verify_prefixes.py."""
    capacity = resolved.entries.shape[0]
    tile = tile_options(endpoint)
    batch = batch_of(rows, table_rows, prefix_lens, extend_lens, strides, step)
    tables = tables_of(req_to_token, page_size, lut, window)
    counts = (resolved.num_valid, resolved.num_requested, status)
    # The status has one writer then: with a LUT, all programs may add to it.
    lays_out = capacity <= few_entries(rows.device) and batch.size <= BLOCK_REQUESTS and lut is None
    is_laid_out = laid_out is not None and lut is None
    offsets, stride = (laid_out, laid_out_stride) if is_laid_out else (entry_offsets, longest_stride)
    if not (lays_out or is_laid_out):
        options = layout_options(batch.size, rows.device)
        lay_out_alone[(1,)](batch, tables, capacity, offsets, stride, *counts, **options)
    (programs,) = persistent_grid(triton.cdiv(capacity, tile["BLOCK"]), rows.device)
    _verify_prefixes[(1 + programs,)](
        # inputs
        batch,
        owners,
        tables,
        tokens_of(expected_tokens, expected_lens, token_offset),
        capacity,
        records_of(endpoint.records),
        *sources_of(endpoint),
        anchors,
        0 if anchors is None else anchors.shape[0],
        step,
        int(is_laid_out),
        # outputs
        offsets,
        stride,
        *counts,
        plan_of(write_plan),
        resolved.entries,
        resolved.runs,
        log_of(violations),
        counters,
        # constants
        site=endpoint.site,
        TRACK_LIFETIME=track_lifetime,
        LAYS_OUT=lays_out,
        BLOCK_REQUESTS=BLOCK_REQUESTS,
        **tile,
        **overlapping(rows.device),
    )
