"""verify_resolved: the Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kv_canary.constants import HEAD_OF_CHAIN, RUN_ENTRIES, UNCHECKED
from kv_canary.kernels.batches import expected_token, tokens_of
from kv_canary.kernels.checking import begin_check, check_entries, of_run, sources_of, tile_options
from kv_canary.kernels.launching import begin, overlapping, persistent_grid
from kv_canary.kernels.records import records_of
from kv_canary.kernels.reporting import log_of, tag_of
from kv_canary.specs.structures import Endpoint, ResolvedSlots, ViolationLog

# Half of what other persistent grids have: the tiles are half as large, and a program is quickly done with one.
PROGRAMS_PER_SM = 32
# Elements that are taken at a time, by what they are.
TILES = {"entries": RUN_ENTRIES}

_HEAD_OF_CHAIN = tl.constexpr(HEAD_OF_CHAIN)
_UNCHECKED = tl.constexpr(UNCHECKED)


@triton.jit(do_not_specialize=["site"])
def _verify_resolved(
    # inputs
    rows_ptr,
    bs,
    tokens,
    entries_ptr,
    runs_ptr,
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
        pair = entry[:, None] * 2 + tl.arange(0, 2)[None, :]
        # entry < n <= capacity
        words = tl.load(entries_ptr + pair, mask=live[:, None], other=0)
        slot, position = tl.split(words.to(tl.int64))
        lane = tl.arange(0, BLOCK)
        begins = live & ((position < 0) | (lane == 0))
        position = tl.where(position < 0, -1 - position, position)
        begun = begin_check(slot, position, live, records, k_source, v_source)
        # begins: entry < n <= capacity; a request of -1 has no row
        words = tl.load(runs_ptr + pair, mask=begins[:, None], other=-1)
        previous, r = tl.split(words.to(tl.int64))
        before = tl.gather(slot, tl.maximum(lane - 1, 0), 0)
        # A slot code of another meaning, which no table gives.
        before = tl.where(before == _HEAD_OF_CHAIN, _UNCHECKED, before)
        previous = tl.where(begins, previous, before)
        if tokens is not None:
            r = of_run(r, begins, BLOCK)
        known = live & (r >= 0) & (r < bs)
        # known: 0 <= r < bs
        row = tl.load(rows_ptr + r, mask=known, other=0)
        check_entries(
            begun,
            slot,
            previous,
            position,
            expected_token(tokens, r, row, position, known),
            # As a plan holds it.
            row.to(tl.int32).to(tl.int64),
            begins,
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


def verify_resolved(
    *,
    rows: torch.Tensor,
    expected_tokens: torch.Tensor | None,
    expected_lens: torch.Tensor | None,
    token_offset: int,
    resolved: ResolvedSlots,
    endpoint: Endpoint,
    anchors: torch.Tensor | None,
    step: torch.Tensor,
    track_lifetime: bool,
    violations: ViolationLog,
    counters: torch.Tensor,
) -> None:
    """Check again the slots that a forward's prefixes were found in; see specs/verify_resolved.py."""
    capacity = resolved.entries.shape[0]
    # A tile is a block, whose first entry begins a run.
    tile = tile_options(endpoint, RUN_ENTRIES)
    grid = persistent_grid(triton.cdiv(capacity, tile["BLOCK"]), rows.device, PROGRAMS_PER_SM)
    _verify_resolved[grid](
        # inputs
        rows,
        rows.shape[0],
        tokens_of(expected_tokens, expected_lens, token_offset),
        resolved.entries,
        resolved.runs,
        resolved.num_valid,
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
        **overlapping(rows.device),
    )
