"""scatter_token_ids: the reference."""

from __future__ import annotations

import torch

from kv_canary.constants import Status
from kv_canary.reference.segments import elements


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
    num_rows, max_len = pool.shape
    row_ok = (rows >= 0) & (rows < num_rows)
    start = torch.zeros_like(rows) if starts is None else starts
    live = row_ok & (rows != 0) & (start >= 0) & (start < max_len)
    # flat[offset] would land at `start`; what lies outside flat, or past the row's end, is left out.
    row, start, offset, end = rows[live], start[live], offsets[:-1][live], offsets[1:][live]
    first = offset.clamp(0, len(flat))
    last = torch.minimum(end, offset + max_len - start).clamp(max=len(flat))
    segment, index = elements(first, torch.maximum(last, first) - first)
    pool[row.take(segment), (start - offset).take(segment) + index] = flat.take(index).to(torch.int32)
    status[0] = Status.ROW_RANGE if bool((~row_ok).any()) else 0
