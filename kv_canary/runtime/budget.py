"""How much of what is cached a step verifies: everything on admission, then a share of it in rotation."""

from __future__ import annotations

import functools
import statistics
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from kv_canary.config import CanaryConfig
from kv_canary.runtime.composition import BatchRequests, Int64s

# Steps whose times are remembered, and that pass between two changes of the stride.
_MEMORY = 16
# Steps that were timed on the device and are remembered.
_TIMINGS = 8


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """What the canary costs on its device, in seconds.

    Args:
        fixed: of a step in which nothing is cached.
        entry: of each cached position more that is verified.
    """

    fixed: float
    entry: float


class _Seen:
    """Of each row: whose it was in a forward, in which step last, and how many positions it had then."""

    def __init__(self, max_rows: int) -> None:
        self.owners, self.identities, self.lengths = (np.zeros(max_rows, np.int64) for _ in range(3))
        self.steps = np.full(max_rows, -2, np.int64)
        # The last composition, by its number, and the step that it was in.
        self.last = 0, -2
        # What was in it, where that is not noted row by row yet.
        self.at: BatchRequests | None = None

    def settle(self) -> None:
        """Note row by row what was in the last step."""
        at, self.at = self.at, None
        if at is not None:
            self.steps[at.rows], self.lengths[at.rows] = self.last[1], at.ends


@functools.lru_cache(maxsize=256)
def _all(count: int, stride: int) -> Int64s:
    strides = np.full(count, stride, np.int64)
    strides.setflags(write=False)
    return strides


class Budget:
    """The stride of each request in a step.

    A request that was in the step before has one `stride`-th of its positions verified, by blocks in rotation, so that
    `stride` steps verify all of them. One that was not (it is new, or it waited), or that has more in the cache than it
    has put there since, has all of them verified: the rotation goes by steps, and some have missed their turn.

    Args:
        config: a stride that is given there is kept; else it is chosen, by what `cost` says and `observe` sees.
        device: what the canary runs on.
        max_rows: rows, row 0 (padding) included.
    """

    def __init__(self, config: CanaryConfig, device: torch.device, *, max_rows: int) -> None:
        self.chooses = config.stride is None and device.type == "cuda"
        self.stride = config.stride or 1
        self.target, self.longest = config.overhead_target, config.max_stride
        self.cost: StepCost | None = None
        self._max_rows = max_rows
        self._seen: dict[str, _Seen] = {}
        self._last: float | None = None
        self._times: deque[float] = deque(maxlen=_MEMORY)
        self._entries: deque[int] = deque(maxlen=_MEMORY)
        self._since = 0
        # Of steps that were timed: what they took beside their entries.
        self._fixed: deque[float] = deque(maxlen=_TIMINGS)

    @property
    def may_skip(self) -> bool:
        """Whether positions may be skipped at all; it never changes, so that a graph can be captured with it."""
        return self.chooses or self.stride > 1

    def strides(self, forward: str, requests: BatchRequests, *, step: int) -> Int64s:
        """Return the stride of each request, and note that it is in this step."""
        if not self.may_skip:
            return np.ones(len(requests), np.int64)
        rows, number = requests.rows, requests.composition.number
        seen = self._seen.get(forward)
        if seen is None:
            seen = self._seen[forward] = _Seen(self._max_rows)
        if seen.at is not None and requests.previous is seen.at and seen.last == (number, step - 1):
            # As many as there are behind the last step.
            seen.at, seen.last = requests, (number, step)
            return _all(len(rows), self.stride)
        seen.settle()
        went_on = requests.prefix <= seen.lengths[rows]
        if seen.last != (number, step - 1):
            went_on &= (seen.owners[rows] == requests.owners) & (seen.steps[rows] >= step - 1)
            went_on &= seen.identities[rows] == requests.composition.identities
            seen.owners[rows], seen.identities[rows] = requests.owners, requests.composition.identities
        seen.last, seen.at = (number, step), requests
        return np.where(went_on, self.stride, 1)

    def forget(self, forward: str) -> None:
        """Take in that a forward was given up: what was its turn may not have been verified."""
        self._seen.pop(forward, None)

    def observe(self, *, relied_on: int, now: float) -> None:
        """Take in that a step is over, and choose the stride of the next ones by it.

        Args:
            relied_on: cached positions that its forwards were about to read.
            now: the time in seconds, of any clock that does not jump. Steps take as long as they follow each other;
                the median forgives an engine that pauses now and then.
        """
        last, self._last = self._last, now
        if not self.chooses or self.cost is None or last is None:
            return
        self._times.append(now - last)
        self._entries.append(relied_on)
        self._since += 1
        if self._since >= _MEMORY:
            self._since = 0
            self.stride = self._affordable(self.cost)

    def add_timing(self, seconds: float, *, entries: float) -> None:
        """Take in how long the device took in a step for so many entries: what the calibration has left out."""
        if self.cost is not None:
            self._fixed.append(max(0.0, seconds - entries * self.cost.entry))

    def _affordable(self, cost: StepCost) -> int:
        """Return the shortest stride, of those that are powers of two, with which the canary keeps to its target."""
        fixed = statistics.median(self._fixed) if self._fixed else cost.fixed
        room = self.target * statistics.median(self._times) - fixed
        stride, entries = 1, statistics.fmean(self._entries)
        while 2 * stride <= self.longest and entries * cost.entry / stride > room:
            stride *= 2
        return stride
