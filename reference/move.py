"""move: the reference."""

from __future__ import annotations

import torch

from kv_canary.reference.hashing import writer


def move(
    *,
    src: torch.Tensor,
    dst: torch.Tensor,
    owner: int,
    step: torch.Tensor,
    records: tuple[torch.Tensor, ...],
    staged: torch.Tensor,
) -> None:
    """Carry records along when KV is copied from slot to slot; see specs/move.py."""
    for buffer in records:
        new = torch.zeros(len(src), 4, dtype=torch.int64, device=buffer.device)
        readable = (src > 0) & (src < len(buffer))
        new[readable] = buffer[src[readable]]
        alive = (new != 0).any(dim=1) & (new[:, 3] >= 0)
        new[~alive] = 0
        new[alive, 3] = writer(step, owner)
        writable = (dst > 0) & (dst < len(buffer))
        buffer[dst[writable]] = new[writable]
