"""A forward that repeats the one before: the same requests, each grown by one token, in the same launches."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from kv_canary.runtime.batch import ForwardBatch, ModelInputs, WatchedForward, num_read
from kv_canary.runtime.composition import BatchRequests
from kv_canary.runtime.context import CanaryContext
from kv_canary.runtime.drain import Sheet
from kv_canary.runtime.host import pinned
from kv_canary.runtime.launches import LastPosted
from kv_canary.runtime.replays import Launch, Replays
from kv_canary.runtime.steps import Steps
from kv_canary.runtime.tails import Advance

# Laps of a ring: a step's numbers are written over when the step is drained, and the host runs ahead by one or two.
_LAPS = 3

_numbers = itertools.count(1)


class Lap:
    """The launches of every so many-th step: HEAD with the numbers that it is told, TAIL with the words that it leaves.

    Args:
        replays: runs the launches.
        whole: where the numbers go.
        sheet: where the words go.
        head, tail: the launches without either.
    """

    def __init__(self, replays: Replays, whole: torch.Tensor, sheet: Sheet, *, head: Launch, tail: Launch) -> None:
        numbers = pinned(len(whole), whole.device)
        self.numbers, self.sheet = numbers.numpy(), sheet
        # The step that it was in last, and the number of the repetition whose numbers it has.
        self.step, self.of = 0, 0

        def begin() -> None:
            whole.copy_(numbers, non_blocking=True)
            head()

        def end() -> None:
            tail()
            sheet.copy()

        self.head, self.tail = replays.settle(begin), replays.settle(end)


def new_laps(replays: Replays, steps: Steps, last: LastPosted, *, head: Launch, tail: Launch) -> Sequence[Lap]:
    """Return the launches of forwards that repeat one whose launches are settled.

    Args:
        replays: runs the launches.
        steps: of the canary.
        last: what was posted of the forward.
        head, tail: its launches.
    """
    return [Lap(replays, last.whole, steps.new_sheet(), head=head, tail=tail) for _ in range(_LAPS)]


class Repetition:
    """What stays the same from one decode step to the next, so that a step costs the host little more than its lengths.

    Valid until anything else is begun, posted or allocated for the forward; who makes it sees to that.

    Args:
        context, steps: of the canary.
        forward: whose step it repeats.
        laps: the launches, which other repetitions of the same shape have too.
        last: what was posted of the forward that is repeated.
        step: where launches read the step's number.
        requests, batch: of that forward.
        given: what the model reads, in place.
        rooms: verify entries that each group has room for.
        advance: what brings rows up to their prefixes, at HEAD.
    """

    def __init__(
        self,
        context: CanaryContext,
        steps: Steps,
        forward: WatchedForward,
        *,
        laps: Sequence[Lap],
        last: LastPosted,
        step: torch.Tensor,
        requests: BatchRequests,
        batch: ForwardBatch,
        given: ModelInputs,
        rooms: Mapping[str, int],
        advance: Advance,
    ) -> None:
        self.batch, self.given, self.advance = batch, given, advance
        self._number, self._step = next(_numbers), step
        self._steps, self._forward, self._laps, self._last = steps, forward, laps, last
        self._lap = laps[0]
        self._state, self._token_pool = context.state, context.state.token_pool
        self._composition, self._extend = requests.composition, requests.extend
        self._longest = int(requests.prefix.max(initial=0))
        self._width = self._longest if self._token_pool is None else self._token_pool.shape[1]
        self._full = [rooms[g.name] for g in forward.groups if not g.window]
        self._windowed = [(g, rooms[g.name]) for g in forward.groups if g.window]

    @property
    def sheet(self) -> Sheet:
        """What TAIL has copied the step's words to."""
        return self._lap.sheet

    def begin(self, requests: BatchRequests) -> bool:
        """Begin the step; return False, with nothing done, where this is no repetition.

        Raises:
            CanaryViolationError: in raise mode, for what the step before found; nothing else is done then.
        """
        state, steps = self._state, self._steps
        lap = self._laps[state.number % _LAPS]
        if (
            requests.newest_of_all is None
            or requests.composition is not self._composition
            or requests.pending is not None
            or state.token_pool is not self._token_pool
            or lap.step > steps.drained
            or not (requests.extend is self._extend or np.array_equal(requests.extend, self._extend))
        ):
            return False
        self._longest += 1
        if self._token_pool is not None and self._longest > self._width:
            return False
        starts = state.one_behind(requests)
        if starts is None:
            return False
        relied_on = requests.num_cached * len(self._full)
        if self._full and requests.num_cached > min(self._full):
            return False
        for group, room in self._windowed:
            read = num_read(requests, group)
            if read > room:
                return False
            relied_on += read
        if not steps.repeat(self._forward, requests, relied_on=relied_on):
            return False
        try:
            state.went_on(requests)
            numbers, last, count = lap.numbers, self._last, len(starts)
            lap.step = state.number
            if lap.of != self._number:
                lap.of, numbers[:] = self._number, last.values
            numbers[last.prefix : last.prefix + count] = requests.prefix
            numbers[last.flat : last.flat + count] = requests.newest_of_all
            numbers[last.starts : last.starts + count] = starts
            numbers[last.step] = state.number
            state.take_step(self._step)
            if last.strides is not None:
                strides = steps.budget.strides(self._forward.name, requests, step=state.number)
                numbers[last.strides : last.strides + count] = strides
            if steps.shows_forwards:
                self.batch = dataclasses.replace(self.batch, requests=requests)
            self._lap = lap
        except BaseException:
            state.forget(requests.rows)
            steps.abort_forward(self._forward)
            raise
        return True

    def head(self) -> None:
        """Send the numbers of the step, and run HEAD."""
        self._lap.head()

    def tail(self) -> None:
        """Run TAIL, and bring the step's words to the host."""
        self._lap.tail()
