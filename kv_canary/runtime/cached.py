"""The content of an engine's prefix cache, as sweeps take it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kv_canary.errors import must_be


@dataclass(frozen=True, kw_only=True, eq=False)
class CachedSlots:
    """The content of a prefix cache for one group: the slot of every cached position, once each.

    Args:
        group: name of the group.
        slots: int64 [n] slots of the group's pool; of a windowed group the resident ones only.
        positions: int64 [n] the position whose KV each holds.
        previous: int64 [n] the slot of the position before, HEAD_OF_CHAIN for position 0, or UNCHECKED: where the cache
            keys carry an identity, and where the position before is not resident.
    """

    group: str
    slots: torch.Tensor
    positions: torch.Tensor
    previous: torch.Tensor

    def __post_init__(self) -> None:
        for name in ("slots", "positions", "previous"):
            tensor = getattr(self, name)
            if tensor.dtype != torch.int64 or tensor.shape != self.slots.shape or tensor.dim() != 1:
                expected = f"int64 of shape {list(self.slots.shape)}"
                raise ValueError(must_be("CachedSlots", name, expected, f"{tensor.dtype} {list(tensor.shape)}"))
