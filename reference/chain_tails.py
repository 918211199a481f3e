"""chain_tails: the reference."""

from __future__ import annotations

import torch

from kv_canary.constants import ANCHOR, Status
from kv_canary.reference.hashing import identity, walk_chains
from kv_canary.reference.segments import elements


def chain_tails(
    *,
    flat: torch.Tensor,
    offsets: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    anchors: torch.Tensor | None,
    tails: torch.Tensor,
    pool: torch.Tensor | None,
    status: torch.Tensor,
) -> None:
    """Advance each row's chain over the request's own tokens, and keep these; see specs/chain_tails.py."""
    row_ok, start_ok = (rows >= 0) & (rows < len(tails)), starts >= 0
    bits = Status.ROW_RANGE if bool((~row_ok).any()) else 0
    bits |= Status.LENGTH_RANGE if bool((~start_ok).any()) else 0
    live = row_ok & start_ok & (rows != 0)
    row, start, offset = rows[live], starts[live], offsets[:-1][live]
    first = offset.clamp(0, len(flat))
    lengths = torch.maximum(offsets[1:][live].clamp(max=len(flat)), first) - first
    segment, index = elements(first, lengths)

    begun = torch.full_like(row, ANCHOR) if anchors is None else anchors[row]
    chain = torch.where(start == 0, begun, tails[row])
    chains = walk_chains(chain, lengths, identity(flat[index], (start - offset)[segment] + index))
    moved = lengths > 0
    chain[moved] = chains[(lengths.cumsum(0) - 1)[moved]]
    tails[row] = chain
    if pool is not None:
        # Where a segment begins before `flat`, its first token here is a later one of the request.
        place = (start - offset).take(segment) + index
        inside = (place >= 0) & (place < pool.shape[1])
        pool[row.take(segment)[inside], place[inside]] = flat.take(index)[inside].to(torch.int32)
    status[0] = bits
