"""open_step: the reference. What it means of chains is what `chain_tails` means, and of entries what `plan` does."""

from __future__ import annotations

import torch

from kv_canary.reference.chain_tails import chain_tails
from kv_canary.reference.plan import Table, cached_entries


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
    copy.copy_(words)
    chain_tails(
        flat=flat,
        offsets=offsets,
        rows=advance_rows,
        starts=starts,
        anchors=anchors,
        tails=tails,
        pool=pool,
        status=status,
    )
    request, _, _ = cached_entries(
        rows=rows,
        prefix_lens=prefix_lens,
        extend_lens=extend_lens,
        table=Table(req_to_token, rows if table_rows is None else table_rows, page_size=page_size, lut=None),
        window=window,
        after_write=False,
        strides=strides,
        step=step,
    )
    entry_offsets[0] = 0
    entry_offsets[1:] = request.bincount(minlength=len(rows)).cumsum(0)
    longest_stride.fill_(1)
    if strides is not None and len(strides):
        longest_stride.clamp_(min=strides.max())
