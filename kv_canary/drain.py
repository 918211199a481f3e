"""Device to host, one step late: a few words are copied behind each step and read when a later step begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kv_canary.constants import Tag
from kv_canary.state import CanaryDeviceState

_COUNTERS = 2 * len(Tag)


@dataclass(frozen=True, kw_only=True)
class StepWords:
    """What one step left on the device.

    Args:
        step: its number.
        counters: [launches, entries] by tag, since the beginning.
        statuses: of each group, the status words of its plans or-ed together, where that is not 0.
        launches: how many launches the step was to make, by tag; None where that is not known.
    """

    step: int
    counters: list[list[int]]
    statuses: list[tuple[str, int]]
    launches: dict[int, int] | None


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What was drained: violations, those of them whose rows fit the ring, and the words of each step, in order."""

    total: int = 0
    rows: list[list[int]] = field(default_factory=list)
    steps: list[StepWords] = field(default_factory=list)


@dataclass(kw_only=True)
class _Pending:
    step: int
    host: torch.Tensor
    event: torch.cuda.Event | None
    launches: dict[int, int] | None


class Drain:
    """Reads counters, violations and status words without stopping the device.

    `push` copies the few words that say whether anything happened behind the step, on a stream of its own, to pinned
    memory; `poll` reads those copies that have arrived, and fetches violation rows only when there are new ones.

    Args:
        state: what to drain.
        groups: names of the groups whose plans have status words.
    """

    def __init__(self, state: CanaryDeviceState, *, groups: Sequence[str]) -> None:
        self._state = state
        self._places = {name: 1 + _COUNTERS + i for i, name in enumerate(groups)}
        self._words = 1 + _COUNTERS + len(groups)
        # Two: the copy of one is under way while the next step fills the other.
        self._outboxes = [torch.zeros(self._words, dtype=torch.int64, device=state.device) for _ in range(2)]
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._side = torch.cuda.Stream(state.device) if state.device.type == "cuda" else None
        self._next = 0
        self._spare: list[torch.Tensor] = []
        self._pending: deque[_Pending] = deque()
        self.counters: list[list[int]] = [[0, 0] for _ in Tag]

    def push(self, step: int, statuses: Sequence[tuple[str, torch.Tensor]], *, launches: dict[int, int] | None) -> None:
        """Copy the step's words to the host, behind everything the step has launched.

        Args:
            step: its number.
            statuses: status words, with the names of their groups.
            launches: see `StepWords`.
        """
        outbox, sent = self._outboxes[self._next], self._sent[self._next]
        if sent is not None:
            # Its last copy, two steps ago, is over by now; this makes it certain.
            torch.cuda.current_stream(self._state.device).wait_event(sent)
        counters = self._state.counters
        outbox[:1].copy_(self._state.violations.count)
        outbox[1 : 1 + _COUNTERS].copy_(counters.view(-1))
        outbox[1 + _COUNTERS :].zero_()
        for name, status in statuses:
            outbox[self._places[name] :][:1].bitwise_or_(status)
        host = (
            self._spare.pop() if self._spare else torch.zeros(self._words, dtype=torch.int64, pin_memory=outbox.is_cuda)
        )
        event = None
        if self._side is None:
            host.copy_(outbox)
        else:
            self._side.wait_stream(torch.cuda.current_stream(self._state.device))
            with torch.cuda.stream(self._side):
                host.copy_(outbox, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
        self._sent[self._next] = event
        self._next = 1 - self._next
        self._pending.append(_Pending(step=step, host=host, event=event, launches=launches))

    def poll(self, *, wait: bool = False) -> Findings:
        """Return what the steps found whose copies have arrived; with `wait`, of all steps."""
        found = False
        steps: list[StepWords] = []
        while self._pending:
            first = self._pending[0]
            if first.event is not None:
                if wait:
                    first.event.synchronize()
                elif not first.event.query():
                    break
            self._pending.popleft()
            words = first.host.tolist()
            self._spare.append(first.host)
            found |= words[0] > 0
            self._set_counters(words[1 : 1 + _COUNTERS])
            statuses = [(name, words[place]) for name, place in self._places.items() if words[place]]
            steps.append(StepWords(step=first.step, counters=self.counters, statuses=statuses, launches=first.launches))
        if wait:
            # Also what a forward found that was given up before it could push.
            self._set_counters(self._state.counters.view(-1).tolist())
            found |= int(self._state.violations.count) > 0
        return self._fetch(steps) if found else Findings(steps=steps)

    def _set_counters(self, flat: list[int]) -> None:
        self.counters = [flat[2 * i : 2 * i + 2] for i in range(len(Tag))]

    def _fetch(self, steps: list[StepWords]) -> Findings:
        """Read the rows and empty the ring; this waits for the device, which is fine once corruption was found."""
        log = self._state.violations
        total = int(log.count)
        rows: list[list[int]] = log.ring[: min(total, log.ring.shape[0])].tolist()
        # Behind the read just made, on the same stream: nothing falls between.
        log.count.zero_()
        self._drop_stale_counts()
        return Findings(total=total, rows=rows, steps=steps)

    def _drop_stale_counts(self) -> None:
        """Forget the counts that were copied before the ring was emptied; their rows have been read."""
        for pending in self._pending:
            if pending.event is not None:
                pending.event.synchronize()
            pending.host[0] = 0
