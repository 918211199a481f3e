"""Decode steps that come again and again: every request one token longer, in the same launches on the same memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from kv_canary.runtime.batch import ForwardBatch, ModelInputs, WatchedForward, num_read
from kv_canary.runtime.composition import BatchRequests, Int64s
from kv_canary.runtime.context import CanaryContext
from kv_canary.runtime.drain import Sheet
from kv_canary.runtime.host import pinned
from kv_canary.runtime.launches import DecodeNumbers, GroupLaunches, Shape
from kv_canary.runtime.replays import Launch, Replays
from kv_canary.runtime.steps import Steps
from kv_canary.runtime.tails import Advance, ones

# A step's numbers are written over once the step is drained, and the host runs ahead by one or two.
_LAPS = 3


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
        # The step that it was in last, the number of the composition that its numbers are of, and its strides.
        self.step, self.of = 0, 0
        self.strides: Int64s | None = None

        def begin() -> None:
            whole.copy_(numbers, non_blocking=True)
            head()

        def end() -> None:
            tail()
            sheet.copy()

        self.head, self.tail = replays.settle(begin), replays.settle(end)


class Repetition:
    """The decode steps of one forward and one rounded size: what of them stays the same, and what is sent at each.

    Args:
        context, steps: of the canary.
        forward: whose steps they are.
        replays: runs the launches.
        numbers: the places of what is sent.
        batch: a batch of such a step.
        given: what the model reads, in place.
        shape: of the launches.
        launches: of each group.
        advance: what brings rows up to their prefixes, at HEAD.
        head, tail: the launches, all of whose kernels have run on this memory.

    Raises:
        Exception: whatever a capture raises.
    """

    def __init__(
        self,
        context: CanaryContext,
        steps: Steps,
        forward: WatchedForward,
        replays: Replays,
        *,
        numbers: DecodeNumbers,
        batch: ForwardBatch,
        given: ModelInputs,
        shape: Shape,
        launches: Sequence[GroupLaunches],
        advance: Advance,
        head: Launch,
        tail: Launch,
    ) -> None:
        self.batch, self.given, self.shape, self.numbers, self.advance = batch, given, shape, numbers, advance
        self._steps, self._forward, self._state = steps, forward, context.state
        self._laps = [Lap(replays, numbers.whole, steps.new_sheet(), head=head, tail=tail) for _ in range(_LAPS)]
        self._lap = self._laps[0]
        # The memory that the launches work on.
        self._token_pool = context.state.token_pool
        self._width = 0 if self._token_pool is None else self._token_pool.shape[1]
        self._memory = [(x, x.table, x.made) for x in launches]
        self._full = [x.room for x in launches if not x.group.window]
        self._windowed = [x for x in launches if x.group.window]
        # The first words of what is sent at every step.
        at = numbers.at
        self._at = at["step"], at["prefix"], at["flat"], at["starts"]

    @property
    def sheet(self) -> Sheet:
        """What TAIL has copied the step's words to."""
        return self._lap.sheet

    @property
    def is_valid(self) -> bool:
        """Whether the memory that the launches work on is still where it was."""
        for launches, table, made in self._memory:
            if launches.table is not table or launches.made != made:
                return False
        return self._state.token_pool is self._token_pool

    def begin(self, requests: BatchRequests) -> bool:
        """Begin a step; return False, with nothing done, where it is no such step.

        Raises:
            CanaryViolationError: in raise mode, for what the step before found; nothing else is done then.
        """
        state, steps, newest = self._state, self._steps, requests.newest_of_all
        lap = self._laps[state.number % _LAPS]
        if newest is None or requests.pending is not None or lap.step > steps.drained:
            return False
        if (requests.table_rows is not None) != ("table_rows" in self.numbers.at):
            return False
        composition, count = requests.composition, len(newest)
        if requests.num_tokens != count or (self._width and requests.longest > self._width):
            return False
        starts = state.one_behind(requests)
        if starts is None:
            return False
        relied_on = requests.num_cached * len(self._full)
        if self._full and requests.num_cached > min(self._full):
            return False
        for launches in self._windowed:
            read = num_read(requests, launches.group)
            if read > launches.room:
                return False
            relied_on += read
        if not steps.repeat(self._forward, requests, relied_on=relied_on):
            return False
        try:
            state.went_on(requests)
            lap.step, self._lap = state.number, lap
            sent, at = lap.numbers, self.numbers.at
            if lap.of != composition.number:
                lap.of, lap.strides, sent[:] = composition.number, None, 0
                sent[at["check_positions"]] = 1
                unit, rows = ones(count), requests.rows
                columns = (("rows", rows), ("owners", requests.owners), ("extend", requests.extend), ("its_rows", rows))
                for name, column in (*columns, ("offsets", unit)):
                    sent[at[name] : at[name] + len(column)] = column
            step, begin_prefix, begin_flat, begin_starts = self._at
            sent[step] = state.number
            sent[begin_prefix : begin_prefix + count] = requests.prefix
            sent[begin_flat : begin_flat + count] = newest
            sent[begin_starts : begin_starts + count] = starts
            if requests.table_rows is not None:
                begin = at["table_rows"]
                sent[begin : begin + count] = requests.table_rows
            if "strides" in at:
                strides = steps.budget.strides(self._forward.name, requests, step=state.number)
                if strides is not lap.strides:
                    begin = at["strides"]
                    sent[begin : begin + count], lap.strides = strides, strides
            if steps.shows_forwards:
                self.batch = dataclasses.replace(self.batch, requests=requests)
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
