"""How much of what is cached a step verifies: everything on admission, then a share of it in rotation."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kv_canary.config import CanaryConfig

if TYPE_CHECKING:
    from kv_canary.forward import ForwardRequest

# Steps whose times are remembered, and that pass between two changes of the stride.
_MEMORY = 16


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """What the canary costs on its device, in seconds.

    Args:
        fixed: of a step in which nothing is cached.
        entry: of each cached position more that is verified.
    """

    fixed: float
    entry: float


class Budget:
    """The stride of each request in a step.

    A request that was in the step before has one `stride`-th of its positions verified, by blocks in rotation, so that
    `stride` steps verify all of them. One that was not (it is new, or it waited), or that has more in the cache than it
    has put there since, has all of them verified: the rotation goes by steps, and some have missed their turn.

    Args:
        config: a stride that is given there is kept; else it is chosen, by what `cost` says and `observe` sees.
        device: what the canary runs on.
    """

    def __init__(self, config: CanaryConfig, device: torch.device) -> None:
        self.chooses = config.stride is None and device.type == "cuda"
        self.stride = config.stride or 1
        self.target, self.longest = config.overhead_target, config.max_stride
        self.cost: StepCost | None = None
        # Of each forward and row: whose it was, in which step last, and how many positions it had then.
        self._seen: dict[str, dict[int, tuple[int, int, int, int]]] = {}
        self._last: float | None = None
        self._times: deque[float] = deque(maxlen=_MEMORY)
        self._entries: deque[int] = deque(maxlen=_MEMORY)
        self._since = 0

    @property
    def may_skip(self) -> bool:
        """Whether positions may be skipped at all; it never changes, so that a graph can be captured with it."""
        return self.chooses or self.stride > 1

    def strides(self, forward: str, requests: Iterable[ForwardRequest], *, step: int) -> list[int]:
        """Return the stride of each request, and note that it is in this step."""
        if not self.may_skip:
            return [1 for _ in requests]
        seen = self._seen.setdefault(forward, {})
        result = []
        for r in requests:
            owner, identity, last, length = seen.get(r.row, (0, 0, 0, 0))
            went_on = (owner, identity) == (r.owner, r.identity) and step - last <= 1 and r.prefix_len <= length
            result.append(self.stride if went_on else 1)
            seen[r.row] = (r.owner, r.identity, step, r.prefix_len + r.extend_len)
        return result

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

    def _affordable(self, cost: StepCost) -> int:
        """Return the shortest stride, of those that are powers of two, with which the canary keeps to its target."""
        room = self.target * statistics.median(self._times) - cost.fixed
        stride = 1
        while 2 * stride <= self.longest and statistics.mean(self._entries) * cost.entry / stride > room:
            stride *= 2
        return stride
