"""The retirement of freed slots: a launch between two forwards, replayed where it comes at every step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kv_canary import ops
from kv_canary.constants import OWNER_MASK
from kv_canary.runtime.context import CanaryContext
from kv_canary.runtime.host import aligned
from kv_canary.runtime.pools import KvPool
from kv_canary.runtime.replays import round_up, rounded

# Slots of a launch that may be replayed.
MOST_REPLAYED = 32768


class Retirement:
    """Marks the records of freed slots.

    Args:
        context: of the canary.
    """

    def __init__(self, context: CanaryContext) -> None:
        self._context, self._replays = context, context.new_replays()
        # Slots that are retired by a replay, by how many there are room for; and slot 0, which has no record, behind.
        self._slots, self._padding = (
            torch.zeros(MOST_REPLAYED, dtype=torch.int64, device=context.device) for _ in range(2)
        )
        # Who has freed those of a launch; and as it is on the host.
        self._owner, self._owner_there = torch.zeros(1, dtype=torch.int64, device=context.device), 0
        self._rooms = {room: self._slots[:room] for room in rounded(MOST_REPLAYED)}

    def retire(self, pool: KvPool, slots: Sequence[torch.Tensor], *, owner: int) -> None:
        """Mark the records of int64 `slots` of `pool`, which lie on the canary's device, as freed by `owner`.

        Args:
            pool: whose slots they are.
            slots: one tensor or more, which one launch takes together.
            owner: who has freed them; 0: nobody in particular.
        """
        count = sum(map(len, slots))
        # The bits that a record holds: a larger number may be none of 64 bits.
        owner &= OWNER_MASK
        if owner != self._owner_there:
            self._owner.fill_(owner)
            self._owner_there = owner
        if count > MOST_REPLAYED or not self._replays.rounds_up:
            self._launch(pool, aligned(slots[0] if len(slots) == 1 else torch.cat(list(slots))))
            return
        room = round_up(count, MOST_REPLAYED)
        padded = self._rooms[room]
        torch.cat((*slots, self._padding[: room - count]), out=padded)
        # The step is brought there before, outside of any graph.
        step = self._context.state.step
        self._replays.run((pool, room, step.data_ptr()), lambda: self._launch(pool, padded))

    def warm_up(self) -> None:
        """Retire nothing, by every launch that may be made for some slots, so that all kernels are compiled."""
        nowhere = torch.zeros(MOST_REPLAYED + 1, dtype=torch.int64, device=self._context.device)
        for pool in self._context.pools:
            for count in [*rounded(MOST_REPLAYED), MOST_REPLAYED + 1]:
                self._launch(pool, nowhere[:count])

    def forget_graphs(self) -> None:
        """Destroy the graphs that launches are replayed from."""
        self._replays.forget()

    def _launch(self, pool: KvPool, slots: torch.Tensor) -> None:
        ops.retire(
            slots=slots,
            owner=self._owner,
            step=self._context.state.step,
            records=pool.buffers,
            backend=self._context.backend,
        )
