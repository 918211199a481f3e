"""verify: the Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kv_canary.kernels.checking import BLOCK_ENTRIES, begin_check, check_entries, sources_of, tile_options
from kv_canary.kernels.launching import begin, overlapping, persistent_grid
from kv_canary.kernels.records import records_of
from kv_canary.kernels.reporting import log_of, tag_of
from kv_canary.specs.structures import Endpoint, VerifyPlan, ViolationLog

# Elements that are taken at a time, by what they are.
TILES = {"entries": BLOCK_ENTRIES}


@triton.jit(do_not_specialize=["site"])
def _verify(
    # inputs
    slots_ptr,
    prev_slots_ptr,
    positions_ptr,
    tokens_ptr,
    rows_ptr,
    num_valid_ptr,
    capacity,
    records,
    k_source,
    v_source,
    anchors_ptr,
    num_anchors,
    step_ptr,
    # outputs
    log,
    counters_ptr,
    site,
    # constants
    TRACK_LIFETIME: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    n = tl.minimum(tl.maximum(tl.load(num_valid_ptr), 0).to(tl.int64), capacity)
    step = tl.load(step_ptr)
    pid = tl.program_id(0).to(tl.int64)
    if pid == 0:
        tl.atomic_add(counters_ptr + tag_of(site) * 2, 1)
        tl.atomic_add(counters_ptr + tag_of(site) * 2 + 1, n)
    for first in range(pid * BLOCK, n, tl.num_programs(0).to(tl.int64) * BLOCK):
        entry = first + tl.arange(0, BLOCK)
        live = entry < n
        # entry < n <= capacity
        slot = tl.load(slots_ptr + entry, mask=live, other=0)
        position = tl.load(positions_ptr + entry, mask=live, other=0)
        check_entries(
            begin_check(slot, position, live, records, k_source, v_source),
            slot,
            tl.load(prev_slots_ptr + entry, mask=live, other=0),
            position,
            tl.load(tokens_ptr + entry, mask=live, other=-1),
            tl.load(rows_ptr + entry, mask=live, other=0).to(tl.int64),
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


def verify(
    *,
    verify_plan: VerifyPlan,
    endpoint: Endpoint,
    anchors: torch.Tensor | None,
    step: torch.Tensor,
    track_lifetime: bool,
    violations: ViolationLog,
    counters: torch.Tensor,
) -> None:
    """Check the planned records against neighbours, positions and K/V bytes; see specs/verify.py."""
    capacity = verify_plan.slots.shape[0]
    tile = tile_options(endpoint)
    grid = persistent_grid(triton.cdiv(capacity, tile["BLOCK"]), step.device)
    _verify[grid](
        # inputs
        verify_plan.slots,
        verify_plan.prev_slots,
        verify_plan.positions,
        verify_plan.tokens,
        verify_plan.rows,
        verify_plan.num_valid,
        capacity,
        records_of(endpoint.records),
        *sources_of(endpoint),
        anchors,
        0 if anchors is None else anchors.shape[0],
        step,
        # outputs
        log_of(violations),
        counters,
        # constants
        site=endpoint.site,
        TRACK_LIFETIME=track_lifetime,
        **tile,
        **overlapping(step.device),
    )
