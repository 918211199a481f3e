"""chain_tails: the reference."""

from __future__ import annotations

import torch

from kv_canary.constants import ANCHOR, Status, to_signed
from kv_canary.reference.hashing import identity, walk_chain


def chain_tails(
    *,
    flat: torch.Tensor,
    offsets: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    anchors: torch.Tensor | None,
    tails: torch.Tensor,
    status: torch.Tensor,
) -> None:
    """Advance each row's chain over the request's own tokens; see specs/chain_tails.py."""
    bounds, row_starts = offsets.tolist(), starts.tolist()
    bits = 0
    for r, row in enumerate(rows.tolist()):
        if not 0 <= row < len(tails):
            bits |= Status.ROW_RANGE
        if row_starts[r] < 0:
            bits |= Status.LENGTH_RANGE
        if not 0 < row < len(tails) or row_starts[r] < 0:
            continue
        chain = int(tails[row])
        if row_starts[r] == 0:
            chain = ANCHOR if anchors is None else int(anchors[row])
        low, high = max(bounds[r], 0), min(bounds[r + 1], len(flat))
        if low < high:
            tokens = flat[low:high]
            first = to_signed(row_starts[r] + low - bounds[r])
            positions = first + torch.arange(len(tokens), device=flat.device)
            chain = walk_chain(chain, identity(tokens, positions))[-1]
        tails[row] = chain
    status[0] = bits
