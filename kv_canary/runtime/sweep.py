"""Sweeps: verifying what no forward is about to read, outside the hot path."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kv_canary import ops
from kv_canary.constants import UNCHECKED, WRITER_WORD
from kv_canary.errors import must_be
from kv_canary.runtime.cached import CachedSlots
from kv_canary.runtime.context import CanaryContext
from kv_canary.runtime.host import on_device
from kv_canary.runtime.listed import listed
from kv_canary.runtime.pools import BufferGroup
from kv_canary.runtime.unverified import Unverified
from kv_canary.specs.structures import VerifyPlan

# Entries that one launch of a sweep takes.
CHUNK = 1 << 18


class Sweeper:
    """Verifies cached and freed slots in launches of their own.

    Args:
        context: of the canary.
        unverified: says which slots have nothing to be held against.
        cached: walks the engine's prefix cache.
    """

    def __init__(
        self, context: CanaryContext, unverified: Unverified, *, cached: Callable[[], Sequence[CachedSlots]]
    ) -> None:
        self._context, self._unverified, self.cached = context, unverified, cached

    def sweep(self) -> None:
        """Verify everything that the prefix cache holds, with bytes, under the groups' SWEEP tags."""
        groups = {g.name: g for g in self._context.groups}
        for part in self.cached():
            if part.group not in groups:
                raise ValueError(must_be("sweep", "group", f"one of {', '.join(groups)}", repr(part.group)))
            group = groups[part.group]
            known = self._unverified.without_gaps(group.pool, part)
            self._verify(group, known.slots, known.positions, known.previous, freed_too=False)

    def quarantine(self) -> None:
        """Verify that the bytes of freed slots are those that were recorded, until somebody writes there again."""
        if not self._context.config.quarantine:
            return
        done = set()
        for group in self._context.groups:
            if group.pool in done:
                continue
            done.add(group.pool)
            records = group.pool.records[: group.pool.num_slots]
            freed, settled = records[:, WRITER_WORD] < 0, self._unverified.settled(group.pool)
            freed = (freed if settled is None else freed & settled).nonzero().view(-1)
            positions = (records[freed, 0] >> 32) & 0xFFFFFFFF
            self._verify(group, freed, positions, torch.full_like(freed, UNCHECKED), freed_too=True)

    def warm_up(self) -> None:
        """Verify nothing by every launch that may be made, so that all kernels are compiled."""
        nothing = torch.zeros(0, dtype=torch.int64, device=self._context.device)
        for group in self._context.groups:
            for freed_too in (False, True) if self._context.config.quarantine else (False,):
                self._launch(group, listed(nothing, nothing, nothing), freed_too=freed_too)

    def _verify(
        self,
        group: BufferGroup,
        slots: torch.Tensor,
        positions: torch.Tensor,
        previous: torch.Tensor,
        *,
        freed_too: bool,
    ) -> None:
        context = self._context
        for start in range(0, len(slots), CHUNK):
            part = slice(start, start + CHUNK)
            columns = (on_device(column[part], context.device) for column in (slots, previous, positions))
            self._launch(group, listed(*columns), freed_too=freed_too)

    def _launch(self, group: BufferGroup, plan: VerifyPlan, *, freed_too: bool) -> None:
        context = self._context
        ops.verify(
            verify_plan=plan,
            endpoint=context.endpoint(group, group.sweep_tag, with_bytes=True),
            step=context.state.step,
            track_lifetime=context.config.track_lifetime and not freed_too,
            violations=context.state.violations,
            counters=context.state.counters,
            backend=context.backend,
        )
