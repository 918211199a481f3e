"""scatter_token_ids: the reference."""

from __future__ import annotations

import torch

from kv_canary.constants import Status


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
    bounds = offsets.tolist()
    row_starts = [0] * len(rows) if starts is None else starts.tolist()
    bits = 0
    for r, row in enumerate(rows.tolist()):
        if not 0 <= row < num_rows:
            bits |= Status.ROW_RANGE
        elif row > 0 and 0 <= row_starts[r] < max_len:
            # flat[first] would land at `start`; what lies outside flat, or past the row's end, is left out.
            first, start = bounds[r], row_starts[r]
            low = max(first, 0)
            high = min(bounds[r + 1], len(flat), first + max_len - start)
            if low < high:
                at = start + low - first
                pool[row, at : at + high - low] = flat[low:high].to(torch.int32)
    status[0] = bits
