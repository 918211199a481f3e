"""Forwards that come again and again: other numbers, in the same launches on the same memory."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from kv_canary.runtime.batch import ForwardBatch, ModelInputs, WatchedForward, num_read
from kv_canary.runtime.composition import BatchRequests, Int64s
from kv_canary.runtime.context import CanaryContext
from kv_canary.runtime.drain import Sheet
from kv_canary.runtime.host import HostWords, Numbers
from kv_canary.runtime.launches import ADVANCE, AHEAD, GroupLaunches, PostedNumbers, Shape
from kv_canary.runtime.replays import Launch, Replays
from kv_canary.runtime.steps import Steps
from kv_canary.runtime.tails import Advance, ones

# A step's numbers are written over once the step is drained; the host runs ahead by one or two, and the words of some
# steps are read together.
_LAPS = 4

# Which requests' rows are not at their prefixes, and how far these have come.
Behind = tuple[Int64s, Int64s]

# Returns what launches HEAD of a step whose numbers lie in a tensor.
Head = Callable[[torch.Tensor], Launch]


class Lap:
    """The launches of every so many-th step: HEAD with the numbers that it is told, TAIL with the words that it leaves.

    Args:
        replays: runs the launches.
        whole: where the numbers go.
        sheet: where the words go.
        head: returns the launches of HEAD with numbers that lie somewhere.
        tail: the launches without the words.

    Attributes:
        head: sends the numbers of the step, and runs HEAD.
        tail: runs TAIL, and brings the step's words to the host.
    """

    def __init__(self, replays: Replays, whole: torch.Tensor, sheet: Sheet, *, head: Head, tail: Launch) -> None:
        # A graph reads what it sends.
        self._sent = sent = HostWords(len(whole), whole.device)
        self.numbers, self.sheet = sent.host.numpy(), sheet
        # The step that it was in last, the number of the composition that its numbers are of, and its strides.
        self.step, self.of = 0, 0
        self.strides: Int64s | None = None

        launch = head(sent.send())

        def begin() -> None:
            sent.send()
            launch()

        def end() -> None:
            tail()
            sheet.copy()

        self.head, self.tail = replays.settle(begin), replays.settle(end)


class Repetition(ABC):
    """The forwards of one name and of like sizes: what of them stays the same, and what is sent at each.

    Args:
        context, steps: of the canary.
        forward: whose steps they are.
        replays: runs the launches.
        numbers: the places of what is sent.
        batch: a batch of such a forward, whose requests are let go.
        given: what the model reads, in place; None: it is copied.
        shape: of the launches.
        launches: of each group.
        advance, ahead: what brings rows up to their prefixes, at HEAD, and what brings them further, at TAIL.
        head: returns the launches of HEAD with numbers that lie somewhere.
        tail: the launches of TAIL; all of the kernels of both have run on this memory.

    Attributes:
        lap: that the step under way, or the last one, is in.

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
        numbers: PostedNumbers,
        batch: ForwardBatch,
        given: ModelInputs | None,
        shape: Shape,
        launches: Sequence[GroupLaunches],
        advance: Advance,
        ahead: Advance | None,
        head: Head,
        tail: Launch,
    ) -> None:
        # The engine's own objects would live for as long as the launches.
        self.batch = dataclasses.replace(batch, requests=BatchRequests.of(()))
        self.given, self.shape, self.numbers = given, shape, numbers
        self.advance, self.ahead = advance, ahead
        self._steps, self._forward, self._state = steps, forward, context.state
        self._made = context.step
        self._laps = [Lap(replays, numbers.whole, steps.new_sheet(), head=head, tail=tail) for _ in range(_LAPS)]
        self.lap = self._laps[0]
        # The memory that the launches work on.
        self._token_pool = context.state.token_pool
        self._width = 0 if self._token_pool is None else self._token_pool.shape[1]
        self._memory = [(x, x.table, x.made) for x in launches]
        rooms = [x.room for x in launches if not x.group.window]
        self._num_full, self._least_room = len(rooms), min(rooms, default=0)
        self._windowed = [x for x in launches if x.group.window]

    @property
    def last_used(self) -> int:
        """The step that was repeated last, or that it was made in."""
        return max(self._made, *(lap.step for lap in self._laps))

    @property
    def is_valid(self) -> bool:
        """Whether the memory that the launches work on is still where it was."""
        for launches, table, made in self._memory:
            if launches.table is not table or launches.made != made:
                return False
        return self._state.token_pool is self._token_pool

    @abstractmethod
    def begin(self, requests: BatchRequests, behind: Behind | None = None) -> bool:
        """Begin a forward; return False, with nothing done, where it is no such one.

        Args:
            requests: of the forward.
            behind: what brings up their rows; None: it is one token each.

        Raises:
            CanaryViolationError: in raise mode, for what the step before found; nothing else is done then.
            ValueError: a request gives fewer tokens than it was asked for.
        """

    def _free_lap(self, requests: BatchRequests) -> Lap | None:
        """Return the launches of the next step; None: none are free, or they are of another kind."""
        lap, steps = self._laps[self._state.number % _LAPS], self._steps
        if requests.pending is not None:
            return None
        if lap.step > steps.drained:
            steps.look()
            if lap.step > steps.drained:
                return None
        return lap if (requests.table_rows is not None) == ("table_rows" in self.numbers.at) else None

    def _begin_step(self, requests: BatchRequests) -> bool:
        """Begin the step; return False, with nothing done, where there is no room or more is to be done."""
        relied_on = requests.num_cached * self._num_full
        if relied_on and requests.num_cached > self._least_room:
            return False
        for launches in self._windowed:
            read = num_read(requests, launches.group)
            if read > launches.room:
                return False
            relied_on += read
        return self._steps.repeat(self._forward, requests, relied_on=relied_on)

    def _give_up(self, requests: BatchRequests) -> None:
        """Take in that the step goes no further than its beginning."""
        self._state.forget(requests.rows)
        self._steps.abort_forward(self._forward)


class Decodes(Repetition):
    """Decode steps of tensors that stay: every request is one token longer, and of most steps the list is the same."""

    def begin(self, requests: BatchRequests, behind: Behind | None = None) -> bool:
        """Begin a step, of which the host knows the newest token of each request; see `Repetition.begin`."""
        state, steps, newest = self._state, self._steps, requests.newest_of_all
        lap = self._free_lap(requests)
        if lap is None or newest is None:
            return False
        composition, count = requests.composition, len(newest)
        if requests.num_tokens != count or (self._width and requests.longest > self._width):
            return False
        starts = state.one_behind(requests)
        if starts is None or not self._begin_step(requests):
            return False
        try:
            state.went_on(requests)
            lap.step, self.lap = state.number, lap
            sent, at = lap.numbers, self.numbers.at
            if lap.of != composition.number:
                lap.of, lap.strides, sent[:] = composition.number, None, 0
                sent[at["check_positions"]] = 1
                unit, rows = ones(count), requests.rows
                columns = (("rows", rows), ("owners", requests.owners), ("extend", requests.extend), ("its_rows", rows))
                for name, column in (*columns, ("offsets", unit)):
                    sent[at[name] : at[name] + len(column)] = column
            sent[at["step"]] = state.number
            for name, column in (("prefix", requests.prefix), ("flat", newest), ("starts", starts)):
                begin = at[name]
                sent[begin : begin + count] = column
            if requests.table_rows is not None:
                begin = at["table_rows"]
                sent[begin : begin + count] = requests.table_rows
            if "strides" in at:
                strides = steps.budget.strides(self._forward.name, requests, step=state.number)
                if strides is not lap.strides:
                    begin = at["strides"]
                    sent[begin : begin + count], lap.strides = strides, strides
        except BaseException:
            self._give_up(requests)
            raise
        return True


class PlainForwards(Repetition):
    """Forwards of any new tokens that the host knows: prefills, with or without decodes among them."""

    def begin(self, requests: BatchRequests, behind: Behind | None = None) -> bool:
        """Begin a forward; see `Repetition.begin`."""
        state, steps, shape = self._state, self._steps, self.shape
        lap = self._free_lap(requests)
        # Who is shown forwards is shown tensors, too, which are others here.
        if lap is None or behind is None or steps.shows_forwards or not requests.is_composed or requests.drafts:
            return False
        if self._width and int(requests.ends.max(initial=0)) > self._width:
            return False
        if not self._begin_step(requests):
            return False
        try:
            advance = state.bring_up(requests, *behind)
            columns: dict[str, Numbers] = {
                "step": (state.number,),
                "check_positions": (1,),
                "rows": requests.rows,
                "owners": requests.owners,
                "prefix": requests.prefix,
                "extend": requests.extend,
                **dict(zip(ADVANCE, advance, strict=True)),
            }
            if shape.goes_ahead:
                ahead = state.go_ahead(requests)
                # Their rows are brought up behind the next forward's, where one launch does not do it.
                columns |= {} if ahead is None else dict(zip(AHEAD, ahead, strict=True))
            if requests.table_rows is not None:
                columns["table_rows"] = requests.table_rows
            if "strides" in self.numbers.at:
                columns["strides"] = steps.budget.strides(self._forward.name, requests, step=state.number)
            lap.step, self.lap = state.number, lap
            sent, at = lap.numbers, self.numbers.at
            # What is past the batch is padding: requests of row 0.
            sent[:] = 0
            for name, column in columns.items():
                begin = at[name]
                sent[begin : begin + len(column)] = column
        except BaseException:
            self._give_up(requests)
            raise
        return True
