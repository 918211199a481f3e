"""The slots to which KV has come from elsewhere, by copies that no forward made, and when: asked of what is found."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from kv_canary.runtime.pools import KvPool
from kv_canary.specs.violation_row import ViolationRow

# Arrivals that are remembered until somebody asks.
_MOST = 256


class Arrivals:
    """What has come to pools, and to the tiers of theirs."""

    def __init__(self) -> None:
        # On the device, as they were given: nothing waits for them until somebody asks.
        self._noted: deque[tuple[int, KvPool, torch.Tensor]] = deque(maxlen=_MOST)
        # The step in which KV came to each slot last, 0 where none is remembered.
        self._steps: dict[KvPool, npt.NDArray[np.int64]] = {}
        self._tiers: dict[KvPool, Callable[[ViolationRow], int | None]] = {}

    def note(self, step: int, pool: KvPool, slots: torch.Tensor) -> None:
        """Take in that KV came to int64 `slots` of a pool behind a step."""
        self._noted.append((step, pool, slots))

    def watch(self, pool: KvPool, came: Callable[[ViolationRow], int | None]) -> None:
        """Ask a tier of its own slots: the step in which what is wrong came there; None: it was right then."""
        self._tiers[pool] = came

    def step_of(self, pool: KvPool, row: ViolationRow) -> int | None:
        """Return the step behind which KV came to the slot of a violation last; None where none is remembered.

        Waits for the device.
        """
        if pool in self._tiers:
            return self._tiers[pool](row)
        while self._noted:
            step, its, slots = self._noted.popleft()
            steps = self._steps.setdefault(its, np.zeros(its.num_slots, np.int64))
            numbers = slots.cpu().numpy()
            steps[numbers[(numbers > 0) & (numbers < len(steps))]] = step
        found = self._steps.get(pool)
        return None if found is None or not 0 < row.slot < len(found) else int(found[row.slot]) or None
