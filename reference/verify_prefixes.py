"""verify_prefixes: the reference. What it means is what `plan` and `verify` mean, one after the other."""

from __future__ import annotations

import torch

from kv_canary.constants import RUN_ENTRIES
from kv_canary.reference.plan import Table, cached_entries, plan
from kv_canary.reference.verify import verify
from kv_canary.specs.structures import Endpoint, ResolvedSlots, VerifyPlan, ViolationLog, WritePlan

INT32_MAX = (1 << 31) - 1


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
    verify_plan = VerifyPlan.allocate(verify_cap=len(resolved.entries), device=rows.device)
    plan(
        rows=rows,
        owners=owners,
        prefix_lens=prefix_lens,
        extend_lens=extend_lens,
        req_to_token=req_to_token,
        table_rows=table_rows,
        page_size=page_size,
        window=window,
        after_write=False,
        lut=lut,
        expected_tokens=expected_tokens,
        expected_lens=expected_lens,
        token_offset=token_offset,
        strides=strides,
        step=step,
        verify_plan=verify_plan,
        write_plan=write_plan,
        status=status,
        entry_offsets=entry_offsets,
    )
    verify(
        verify_plan=verify_plan,
        endpoint=endpoint,
        anchors=anchors,
        step=step,
        track_lifetime=track_lifetime,
        violations=violations,
        counters=counters,
    )
    n = int(verify_plan.num_valid)
    request, _, _ = cached_entries(
        rows=rows,
        prefix_lens=prefix_lens,
        extend_lens=extend_lens,
        table=Table(req_to_token, rows if table_rows is None else table_rows, page_size=page_size, lut=lut),
        window=window,
        after_write=False,
        strides=strides,
        step=step,
    )
    request, position = request[:n], verify_plan.positions[:n].clamp(max=INT32_MAX)
    follows = (request == request.roll(1)) & (verify_plan.positions[:n] == verify_plan.positions[:n].roll(1) + 1)
    begins = ~follows | (torch.arange(n, device=rows.device) % RUN_ENTRIES == 0)
    entries = verify_plan.slots[:n].clamp(max=INT32_MAX), torch.where(begins, ~position, position)
    runs = verify_plan.prev_slots[:n].clamp(max=INT32_MAX), request
    resolved.entries[:n] = torch.stack(entries, dim=1).to(torch.int32)
    resolved.runs[:n][begins] = torch.stack(runs, dim=1).to(torch.int32)[begins]
    resolved.num_valid.copy_(verify_plan.num_valid)
    resolved.num_requested.copy_(verify_plan.num_requested)
