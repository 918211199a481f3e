"""Device to host, one step late: a few words are copied behind each step and read when a later step begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kv_canary.runtime.device_state import FIRST_STATUS, NUM_COUNTERS, VIOLATION_COUNT, CanaryDeviceState
from kv_canary.runtime.host import HostWords
from kv_canary.specs.violation_row import ViolationRow


@dataclass(kw_only=True, slots=True)
class StepWords:
    """What one step left on the device, or several that follow each other, all with nothing to tell.

    Args:
        first, step: the numbers of the first and of the last of them.
        counters: launches, then entries, of each tag, since the beginning.
        statuses: of each group, the status words of its plans or-ed together, where that is not 0.
        launches: how many launches each step was to make, by tag; None where that is not known. Several have made them.
    """

    first: int
    step: int
    counters: list[int]
    statuses: list[tuple[str, int]]
    launches: Mapping[int, int] | None


@dataclass(kw_only=True, slots=True)
class Findings:
    """What was drained: violations, those of them whose rows fit the ring, and the words of each step, in order."""

    total: int = 0
    rows: list[ViolationRow] = field(default_factory=list)
    steps: list[StepWords] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class _Pending:
    step: int
    sheet: Sheet
    statuses: Mapping[int, str]
    launches: Mapping[int, int] | None


class Drain:
    """Reads counters, violations and status words without stopping the device.

    `push` copies the few words that say whether anything happened behind the step, to pinned memory; `poll` reads those
    copies that have arrived, and fetches violation rows only when there are new ones.

    The copy is on the forwards' own stream: what the next step changes is then behind it by itself. A stream of its own
    would need a copy on the device to read from, and five more calls of the driver a step.

    Args:
        state: what to drain.
        failed: told of what fails behind a read, so that what was read is not lost.
    """

    def __init__(self, state: CanaryDeviceState, *, failed: Callable[[Exception], None] = lambda error: None) -> None:
        self._state, self._failed = state, failed
        self._spare: list[Sheet] = []
        # The steps that have been pushed and not drained, oldest first.
        self.pending: deque[_Pending] = deque()
        self.counters = [0] * NUM_COUNTERS
        # The last step that was drained.
        self.drained = 0

    @property
    def is_empty(self) -> bool:
        """Whether the words of every step have been drained: the device is done with all of them."""
        return not self.pending

    def new_sheet(self) -> Sheet:
        """Return host memory for the words that stays with who asks, for `push`."""
        return Sheet(self._state.words, is_kept=True)

    def push(
        self,
        step: int,
        statuses: Mapping[int, str],
        *,
        launches: Mapping[int, int] | None,
        sheet: Sheet | None = None,
    ) -> None:
        """Copy the step's words to the host, behind everything the step has launched.

        Args:
            step: its number.
            statuses: numbers of its status words, with the names of their groups; they stay as they are.
            launches: see `StepWords`; likewise.
            sheet: what the words have been copied to by a launch; None: they are copied now.
        """
        if sheet is None:
            sheet = self._spare.pop() if self._spare else Sheet(self._state.words)
            sheet.copy()
        if sheet.arrived is not None:
            sheet.arrived.record()
        self.pending.append(_Pending(step=step, sheet=sheet, statuses=statuses, launches=launches))

    def poll(self, *, wait: bool = False, merges: bool = False) -> Findings:
        """Return what the steps found whose copies have arrived; with `wait`, of all steps.

        Args:
            wait: see there.
            merges: whether steps with nothing to tell may be told as one.
        """
        arrived = self._take_arrived(wait=wait)
        if merges and not wait and len(arrived) > 1 and (merged := self._merged(arrived)) is not None:
            return Findings(steps=[merged])
        found = False
        steps: list[StepWords] = []
        for its in arrived:
            self.drained = its.step
            words = its.sheet.values[: VIOLATION_COUNT + 1].tolist()
            found |= words.pop() > 0
            self.counters = words
            statuses = [] if its.sheet.is_quiet else self._statuses(its)
            steps.append(
                StepWords(first=its.step, step=its.step, counters=words, statuses=statuses, launches=its.launches)
            )
        if wait:
            # Also what a forward found that was given up before it could push.
            self.counters = self._state.counters.view(-1).tolist()
            found |= int(self._state.violations.count) > 0
        return self._fetch(steps) if found else Findings(steps=steps)

    def _take_arrived(self, *, wait: bool) -> list[_Pending]:
        """Return the steps whose copies have arrived, which are pending no more; with `wait`, all."""
        pending, count = self.pending, len(self.pending)
        while count:
            # From the newest on: on one stream, what was copied before it has arrived, too.
            event = pending[count - 1].sheet.arrived
            if event is None or event.query():
                break
            if wait:
                event.synchronize()
                break
            count -= 1
        arrived = [pending.popleft() for _ in range(count)]
        self._spare += [its.sheet for its in arrived if not its.sheet.is_kept]
        return arrived

    def _merged(self, arrived: Sequence[_Pending]) -> StepWords | None:
        """Return steps as one that have found nothing and made just the launches that they were to make, else None."""
        newest = arrived[-1]
        launches, words = newest.launches, newest.sheet.values[: VIOLATION_COUNT + 1].tolist()
        # Since the ring was emptied last: what a step had found, those behind it still count.
        if words.pop() or launches is None:
            return None
        for its in arrived:
            if its.launches is not launches or not its.sheet.is_quiet:
                return None
        for tag, count in launches.items():
            if words[2 * tag] - self.counters[2 * tag] != count * len(arrived):
                return None
        self.drained, self.counters = newest.step, words
        return StepWords(first=arrived[0].step, step=newest.step, counters=words, statuses=[], launches=launches)

    def _statuses(self, pending: _Pending) -> list[tuple[str, int]]:
        """Return the groups whose status words are not 0, with their bits."""
        bits: dict[str, int] = {}
        for number, group in pending.statuses.items():
            bits[group] = bits.get(group, 0) | int(pending.sheet.statuses[number])
        return [(group, found) for group, found in bits.items() if found]

    def _fetch(self, steps: list[StepWords]) -> Findings:
        """Read the rows and empty the ring; this waits for the device, which is fine once corruption was found."""
        log = self._state.violations
        total = int(log.count)
        rows = [ViolationRow._make(words) for words in log.ring[: min(total, log.ring.shape[0])].tolist()]
        # Behind the read just made, on the same stream: nothing falls between.
        log.count.zero_()
        try:
            self._drop_stale_counts()
        except Exception as error:
            # The ring is read once more, for nothing.
            self._failed(error)
        return Findings(total=total, rows=rows, steps=steps)

    def _drop_stale_counts(self) -> None:
        """Forget the counts that were copied before the ring was emptied; their rows have been read."""
        for pending in self.pending:
            if pending.sheet.arrived is not None:
                pending.sheet.arrived.synchronize()
            pending.sheet.values[VIOLATION_COUNT] = 0


class Sheet:
    """Host memory for the words, pinned for a GPU, with the event behind their arrival.

    Args:
        words: what is copied, on the device.
        is_kept: whether it stays with who asked for it.
    """

    def __init__(self, words: torch.Tensor, *, is_kept: bool = False) -> None:
        self._there, self._here = words, HostWords(len(words), words.device)
        self.is_kept, self.values = is_kept, self._here.host.numpy()
        self.statuses = self.values[FIRST_STATUS:].view("int32")
        # Compared as bytes: a reduction costs many times that where its code is not in the processor's cache.
        self._statuses = self.values[FIRST_STATUS:].data.cast("B")
        self._silence = bytes(len(self._statuses))
        self.arrived = torch.Event(words.device) if words.is_cuda else None

    @property
    def is_quiet(self) -> bool:
        """Whether all status words that have arrived are 0."""
        return self._statuses == self._silence

    def copy(self) -> None:
        """Copy the words, without waiting for them."""
        self._here.bring(self._there)
