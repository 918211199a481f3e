"""Sweeps: verifying what no forward is about to read, outside the hot path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kv_canary import ops
from kv_canary.constants import UNCHECKED, WRITER_WORD
from kv_canary.errors import must_be
from kv_canary.pools import BufferGroup
from kv_canary.specs.structures import VerifyPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_canary.manager import CanaryManager

# Entries that one launch of a sweep takes.
CHUNK = 1 << 18


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


class Sweeper:
    """Verifies cached and freed slots in launches of their own."""

    def __init__(self, manager: CanaryManager) -> None:
        self._manager = manager

    def sweep(self, cached: Sequence[CachedSlots]) -> None:
        """Verify every slot of `cached`, with bytes, under the groups' SWEEP tags."""
        groups = {g.name: g for g in self._manager.groups}
        for part in cached:
            if part.group not in groups:
                raise ValueError(must_be("sweep", "group", f"one of {', '.join(groups)}", repr(part.group)))
            group = groups[part.group]
            known = self._manager.unverified.without_gaps(group.pool, part)
            self._verify(group, known.slots, known.positions, known.previous, freed_too=False)

    def quarantine(self) -> None:
        """Verify that the bytes of freed slots are those that were recorded, until somebody writes there again."""
        if not self._manager.config.quarantine:
            return
        done = set()
        for group in self._manager.groups:
            if group.pool in done:
                continue
            done.add(group.pool)
            records = group.pool.records[: group.pool.num_slots]
            freed, settled = records[:, WRITER_WORD] < 0, self._manager.unverified.settled(group.pool)
            freed = (freed if settled is None else freed & settled).nonzero().view(-1)
            positions = (records[freed, 0] >> 32) & 0xFFFFFFFF
            self._verify(group, freed, positions, torch.full_like(freed, UNCHECKED), freed_too=True)

    def _verify(
        self,
        group: BufferGroup,
        slots: torch.Tensor,
        positions: torch.Tensor,
        previous: torch.Tensor,
        *,
        freed_too: bool,
    ) -> None:
        manager = self._manager
        for start in range(0, len(slots), CHUNK):
            part = slice(start, start + CHUNK)
            n = len(slots[part])
            plan = VerifyPlan(
                slots=slots[part].to(manager.device),
                prev_slots=previous[part].to(manager.device),
                positions=positions[part].to(manager.device),
                tokens=torch.full((n,), -1, dtype=torch.int64, device=manager.device),
                rows=torch.zeros(n, dtype=torch.int32, device=manager.device),
                num_valid=torch.full((1,), n, dtype=torch.int32, device=manager.device),
                num_requested=torch.full((1,), n, dtype=torch.int64, device=manager.device),
            )
            ops.verify(
                verify_plan=plan,
                endpoint=manager.endpoint(group, group.sweep_tag, with_bytes=True),
                step=manager.state.step,
                track_lifetime=manager.config.track_lifetime and not freed_too,
                violations=manager.state.violations,
                counters=manager.state.counters,
                backend=manager.backend,
            )
