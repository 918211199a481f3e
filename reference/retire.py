"""retire: the reference."""

from __future__ import annotations

import torch

from kv_canary.reference.hashing import writer


def retire(*, slots: torch.Tensor, owner: torch.Tensor, step: torch.Tensor, records: tuple[torch.Tensor, ...]) -> None:
    """Mark the records of freed slots; see specs/retire.py."""
    for buffer in records:
        freed = slots[(slots > 0) & (slots < len(buffer))]
        freed = freed[(buffer[freed] != 0).any(dim=1)]
        buffer[freed, 3] = writer(step, owner, retired=True)
