"""Device to host, one step late: a few words are copied behind each step and read when a later step begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kv_canary.constants import Tag
from kv_canary.state import CanaryDeviceState


@dataclass(frozen=True, kw_only=True)
class StepFindings:
    """What was drained: violations, those of them whose rows fit the ring, and plan status words by group index."""

    total: int = 0
    rows: list[list[int]] = field(default_factory=list)
    statuses: list[tuple[int, int]] = field(default_factory=list)


class Drain:
    """Reads counters, violations and status words without stopping the device.

    `push` copies the few words that say whether anything happened behind the step, to pinned memory; `poll` reads
    those copies that have arrived, and fetches violation rows only when there are new ones.

    Args:
        state: what to drain.
        groups: number of status words that each push brings.
    """

    def __init__(self, state: CanaryDeviceState, *, groups: int) -> None:
        self._state = state
        self._words = 1 + state.counters.numel() + groups
        self._outbox = torch.zeros(self._words, dtype=torch.int64, device=state.device)
        self._spare: list[torch.Tensor] = []
        self._pending: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()
        self.counters: list[list[int]] = [[0, 0] for _ in Tag]

    def push(self, statuses: Sequence[torch.Tensor]) -> None:
        """Copy the step's words to the host, behind everything the step has launched."""
        counters = self._state.counters
        self._outbox[:1].copy_(self._state.violations.count)
        self._outbox[1 : 1 + counters.numel()].copy_(counters.view(-1))
        for i, status in enumerate(statuses):
            self._outbox[1 + counters.numel() + i :][:1].copy_(status)
        on_gpu = self._outbox.is_cuda
        host = self._spare.pop() if self._spare else torch.zeros(self._words, dtype=torch.int64, pin_memory=on_gpu)
        host.copy_(self._outbox, non_blocking=True)
        event = None
        if on_gpu:
            event = torch.cuda.Event()
            event.record()
        self._pending.append((host, event))

    def poll(self, *, wait: bool = False) -> StepFindings:
        """Return what the steps found whose copies have arrived; with `wait`, of all steps."""
        found = False
        statuses: list[tuple[int, int]] = []
        while self._pending:
            host, event = self._pending[0]
            if event is not None:
                if wait:
                    event.synchronize()
                elif not event.query():
                    break
            self._pending.popleft()
            words = host.tolist()
            self._spare.append(host)
            found |= words[0] > 0
            self._set_counters(words[1 : 1 + 2 * len(Tag)])
            statuses += [(i, bits) for i, bits in enumerate(words[1 + 2 * len(Tag) :]) if bits]
        if wait:
            # Also what a forward found that was given up before it could push.
            self._set_counters(self._state.counters.view(-1).tolist())
            found |= int(self._state.violations.count) > 0
        return self._fetch(statuses) if found else StepFindings(statuses=statuses)

    def _set_counters(self, flat: list[int]) -> None:
        self.counters = [flat[2 * i : 2 * i + 2] for i in range(len(Tag))]

    def _fetch(self, statuses: list[tuple[int, int]]) -> StepFindings:
        """Read the rows and empty the ring; this waits for the device, which is fine once corruption was found."""
        log = self._state.violations
        total = int(log.count)
        rows: list[list[int]] = log.ring[: min(total, log.ring.shape[0])].tolist()
        # Behind the read just made, on the same stream: nothing falls between.
        log.count.zero_()
        self._drop_stale_counts()
        return StepFindings(total=total, rows=rows, statuses=statuses)

    def _drop_stale_counts(self) -> None:
        """Forget the counts that were copied before the ring was emptied; their rows have been read."""
        for host, event in self._pending:
            if event is not None:
                event.synchronize()
            host[0] = 0
