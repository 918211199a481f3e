"""How much of what is cached a step verifies: everything on admission, then a share of it in rotation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from kv_canary.config import CanaryConfig

if TYPE_CHECKING:
    from kv_canary.forward import ForwardRequest

# Steps over which the measured share is averaged, and that pass between two changes of the stride.
_MEMORY = 16


class Budget:
    """The stride of each request in a step.

    A request that was in the step before has one `stride`-th of its positions verified, by blocks in rotation, so that
    `stride` steps verify all of them. One that was not (it is new, or it waited) has all of them verified: the rotation
    goes by steps, and it has missed some.

    Args:
        config: a stride that is given there is kept; else it is chosen, by what `measured` says.
        device: what the canary runs on.
    """

    def __init__(self, config: CanaryConfig, device: torch.device) -> None:
        self.chooses = config.stride is None and device.type == "cuda"
        self.stride = config.stride or 1
        self.target, self.longest = config.overhead_target, config.max_stride
        # Of each forward and row: whose it was, and in which step last.
        self._seen: dict[str, dict[int, tuple[int, int, int]]] = {}
        self._share: float | None = None
        self._since = 0

    @property
    def may_skip(self) -> bool:
        """Whether positions may be skipped at all; it never changes, so that a graph can be captured with it."""
        return self.chooses or self.stride > 1

    def strides(self, forward: str, requests: Iterable[ForwardRequest], *, step: int) -> list[int]:
        """Return the stride of each request, and note that it is in this step."""
        before = self._seen.get(forward, {})
        result, now = [], {}
        for r in requests:
            went_on = before.get(r.row) == (r.owner, r.identity, step - 1)
            result.append(self.stride if went_on else 1)
            now[r.row] = (r.owner, r.identity, step)
        self._seen[forward] = now
        return result

    def measured(self, share: float) -> None:
        """Take in which share of a step's time the canary took, and choose the stride by it."""
        if not self.chooses:
            return
        self._share = share if self._share is None else self._share + (share - self._share) / _MEMORY
        self._since += 1
        if self._since < _MEMORY:
            return
        if self._share > self.target and self.stride < self.longest:
            self.stride = min(2 * self.stride, self.longest)
        elif self._share < self.target / 3 and self.stride > 1:
            self.stride //= 2
        else:
            return
        self._since, self._share = 0, None
