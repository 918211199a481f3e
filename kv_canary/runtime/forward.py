"""One forward: what the adapter says about it, and the phases around the model."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch

from kv_canary import ops
from kv_canary.errors import must_be
from kv_canary.runtime.batch import ForwardBatch, ModelInputs, VerifiedEntries, num_read
from kv_canary.runtime.composition import BatchRequests, ForwardRequest, Int64s
from kv_canary.runtime.context import CanaryContext
from kv_canary.runtime.device_state import MOST_REPLAYED
from kv_canary.runtime.drain import Sheet
from kv_canary.runtime.host import copy_all, copy_front, front, on_device
from kv_canary.runtime.launches import MANY_ENTRIES, ForwardInputs, GroupLaunches, Places, PostedNumbers, Shape
from kv_canary.runtime.pools import BufferGroup
from kv_canary.runtime.repetition import Decodes, PlainForwards, Repetition
from kv_canary.runtime.replays import Attempts, Branch, Launch, layout_of, round_up, rounded
from kv_canary.runtime.steps import Steps
from kv_canary.runtime.tails import Advance
from kv_canary.specs.structures import WritePlan

# Sizes of decode steps, and of other forwards, that are kept for repetition.
_MOST_DECODES, _MOST_FORWARDS = 32, 64
# Steps after which one that was not repeated meanwhile may give its place to another one.
_LONG = 1024
_INTEGERS = (torch.int32, torch.int64)
# The requests of a forward that nothing is known of, or that is none.
_NOBODY = BatchRequests.of(())


@dataclass(frozen=True, kw_only=True, eq=False)
class CapturedForward:
    """The shape of a forward whose HEAD and TAIL were captured in a CUDA graph; see `SingleForwardManager.capturing`.

    Args:
        requests, tokens: what it was captured for; a batch may have fewer.
        tables: address, shape and strides of each group's table, by name.
        expects_tokens: whether the input ids to expect are among its inputs.
        is_given: whether rows and lengths are, as the attention backend is given them.
        has_table_rows: whether the requests' rows in the tables are.
    """

    requests: int
    tokens: int
    tables: Mapping[str, tuple[int, torch.Size, tuple[int, ...]]]
    expects_tokens: bool
    is_given: bool
    has_table_rows: bool = False


class Phase(Enum):
    """Where a forward stands."""

    IDLE = "idle"
    BEGUN = "begun"
    HEAD = "head"
    TAIL = "tail"
    # Goes by unwatched, until its end.
    SKIPPED = "skipped"


class SingleForwardManager:
    """The canary around one model forward: `begin`, `head`, the model, `tail`, `end`, in that order.

    `around(batch)` does all of it. A forward that raised is given up with `abort`, and the next one may begin. Where
    HEAD and TAIL were captured in a CUDA graph, the replay of the graph stands for both. In log mode none of these
    raises: where one of them fails, or finds its arguments wrong, the forward goes by unwatched up to its end, and the
    slots that it writes are marked as unverified (`CanaryManager.unverify`).

    Args:
        context: of the canary.
        steps: of the canary.
        name: of the forward; a step may have several of different names.
        groups: those that it reads and writes.
        inner: whether it runs inside a step on tokens that may yet be rejected, as a draft model's forwards do: its
            tails then advance over what it writes, on the device, and are given up at the end of the step.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        context: CanaryContext,
        steps: Steps,
        *,
        name: str,
        groups: Sequence[BufferGroup],
        inner: bool = False,
    ) -> None:
        self.name, self.inner, self.context = name, inner, context
        self._steps = steps
        self._phase = Phase.IDLE
        self._captured: CapturedForward | None = None
        self._batch: ForwardBatch | None = None
        self.groups = tuple(groups)
        self._parts = {part: f"forward {name}: {part}" for part in ("begin", "HEAD", "TAIL", "end")}
        # A step that is repeated allocates nothing, so that its parts may be entered again.
        self._begins, self._tails, self._ends = (
            context.guard.contain(self._parts[part], allocates=False) for part in ("begin", "TAIL", "end")
        )
        self._inputs = ForwardInputs(context)
        self._launches = [
            GroupLaunches(
                context,
                g,
                self._inputs,
                handed=steps.handed,
                inner=inner,
                checks_given=not number,
            )
            for number, g in enumerate(groups)
        ]
        # Whose batch is laid out by the launch that a repeated step begins with.
        self._laid_out = next((x for x in self._launches if x.takes_layout), self._launches[0])
        self._shape = Shape()
        self._num_requests = self._new_tokens = 0
        self._tails_status = torch.zeros(1, dtype=torch.int32, device=context.device)
        # A captured graph keeps the addresses of the buffers.
        self._sizes_are_final = False
        # The number of a composition whose rows have been checked.
        self._checked = 0
        # New tokens of each request, where none of them is below 0.
        self._checked_extend: Int64s | None = None
        # What brings rows up to their prefixes at HEAD, and further at TAIL; and which rows, as long as it has not been
        # launched.
        self._advance: Advance | None = None
        self._ahead: Advance | None = None
        self._rows_at_head: Int64s | None = None
        self._rows_at_tail: Int64s | None = None
        # Whether what the model is given is taken at TAIL, and whether its input ids are known.
        self._is_late = self._has_ids = False
        # Decode steps that may be repeated, by their rounded size, and other forwards, by theirs; the one that is; and
        # where it writes, asked where that matters.
        self._decodes: dict[Hashable, Repetition] = {}
        self._forwards: dict[Hashable, Repetition] = {}
        self._repetition: Repetition | None = None
        self._written: Callable[[], Mapping[str, torch.Tensor]] = dict
        # Captures of repetitions, by the step; what TAIL has copied a step's words to.
        self._attempts = Attempts()
        self._sheet: Sheet | None = None
        self._replays, self._branch = context.new_replays(), Branch()
        # Where HEAD of a decode runs while the model does, if that is worth its price; None: before it.
        self._beside = context.new_beside() if not inner and _may_be_beside(groups, steps) else None
        # Captures that failed: their graphs have no HEAD and TAIL, or not both.
        self._unusable: weakref.WeakSet[CapturedForward] = weakref.WeakSet()

    @contextmanager
    def around(self, batch: ForwardBatch) -> Iterator[None]:
        """Verify before the block, record and verify after it; if the block raises, give the forward up."""
        self.begin(batch)
        try:
            self.head()
            yield
            self.tail()
        except BaseException:
            self.abort()
            raise
        self.end()

    def warm_up(
        self,
        *,
        tables: Mapping[str, torch.Tensor],
        expects_tokens: bool | None = None,
        is_given: bool = False,
        has_table_rows: bool = False,
        graph_tokens: int | None = None,
    ) -> int:
        """Run HEAD and TAIL once on nothing for every size that they are rounded to, so that all kernels are compiled.

        Return how many sizes there are. Outside any graph; where launches are not rounded, nothing is done.

        Args:
            tables, expects_tokens, is_given, has_table_rows: see `capturing`.
            graph_tokens: of which the engine's largest decode graph has room, whose tensors are read in place; None:
                none is.

        Raises:
            RuntimeError: the last forward, or another one of the manager, was not ended.
            ValueError: tables are not of the forward's groups.
        """
        self._expect(Phase.IDLE, "warm_up")
        self._steps.expect_idle(f"forward {self.name}: warm_up")
        self._check_names(tables, tables)
        if not self._replays.rounds_up:
            return 0
        limits, expects = self.context.limits, self.context.config.check_inputs
        shapes = [
            Shape(
                requests=requests,
                tokens=tokens,
                expects_tokens=expects if expects_tokens is None else expects_tokens,
                is_given=is_given,
                has_table_rows=has_table_rows,
                has_pending=has_pending,
                advances=None if self.inner else (min(tokens, MOST_REPLAYED), requests),
            )
            for requests, tokens, has_pending in (
                *_sizes(limits.max_requests, limits.max_tokens, inner=self.inner),
                *_cut_short(limits.max_requests, limits.max_tokens, graph_tokens=graph_tokens),
            )
        ]
        self._steps.begin_launches(self)
        try:
            with torch.inference_mode(False):
                for launches in self._launches:
                    launches.table = tables[launches.group.name]
                # With few entries first, for which some kernels do more at once.
                for needed in (0, MANY_ENTRIES):
                    for shape in shapes:
                        if not (needed and shape.has_pending):
                            self._launch_nothing(shape, needed=needed)
        finally:
            self._advance = self._ahead = None
            self._steps.end_launches()
        return len(shapes)

    def _launch_nothing(self, shape: Shape, *, needed: int) -> None:
        """Run HEAD and TAIL on padding, with room for as many entries as are needed, if there may be so many."""
        self._shape, self._new_tokens, self._inputs.in_place = shape, 0, None
        self._advance = None if shape.advances is None else self.context.state.no_advance()
        self._ahead = self.context.state.no_advance() if shape.goes_ahead else None
        numbers = self._numbers(_NOBODY, has_table_rows=shape.has_table_rows)
        if shape.has_pending:
            numbers |= {"there": _NOBODY.prefix, "from_there": _NOBODY.extend}
        self._inputs.post(numbers, shape=shape, step=self.context.step, advance=self._advance, ahead=self._ahead)
        if shape.has_pending:
            self._inputs.mark_pending()
        for launches in self._launches:
            launches.prepare(
                needed=min(needed, launches.most_entries),
                has_pending=shape.has_pending,
                sizes_are_final=self._sizes_are_final,
            )
            launches.out_slots.zero_()
        if shape.advances is not None and not shape.has_pending:
            self._open_nothing(self._inputs.last, (1, MOST_REPLAYED))
        self._launch_head()
        self._launch_tail()

    @contextmanager
    def capturing(
        self,
        *,
        requests: int,
        tokens: int,
        tables: Mapping[str, torch.Tensor],
        expects_tokens: bool | None = None,
        is_given: bool = False,
        has_table_rows: bool = False,
    ) -> Iterator[CapturedForward]:
        """Prepare for a capture: inside the block call `head`, the model and `tail` under `torch.cuda.graph`.

        Buffers get their final sizes and never move again. HEAD and TAIL run once on nothing first, so that all kernels
        are compiled. The value is for `begin`, once per replay.

        Args:
            requests, tokens: the largest batch that the graph serves.
            tables: the engine's tables, by group name, where they will lie at every replay.
            expects_tokens: whether batches will say which input ids to expect; None: as `CanaryConfig.check_inputs` is.
            is_given: whether batches will say which rows and lengths the attention backend is given.
            has_table_rows: whether batches' requests may have a `table_row`.
        """
        self._expect(Phase.IDLE, "capturing")
        self._steps.expect_idle(f"forward {self.name}: capturing")
        limits = self.context.limits
        for argument, value, most in (
            ("requests", requests, limits.max_requests),
            ("tokens", tokens, limits.max_tokens),
        ):
            if not 0 < value <= most:
                raise ValueError(must_be(f"forward {self.name}", argument, f"in [1, {most}]", str(value)))
        self._check_names(tables, tables)
        expects_tokens = self.context.config.check_inputs if expects_tokens is None else expects_tokens
        captured = CapturedForward(
            requests=requests,
            tokens=tokens,
            tables={name: layout_of(table) for name, table in tables.items()},
            expects_tokens=expects_tokens,
            is_given=is_given,
            has_table_rows=has_table_rows,
        )
        try:
            self._phase = Phase.SKIPPED
            if not self.context.is_off:
                with self.context.guard.contain(f"forward {self.name}: capturing"):
                    self._prepare_capture(captured, tables)
                    self._phase = Phase.BEGUN
            yield captured
            if self.context.is_off:
                return
            if self._phase is Phase.SKIPPED:
                self._unusable.add(captured)
            else:
                self._expect(Phase.TAIL, "the end of capturing")
        finally:
            self._phase = Phase.IDLE
            self._steps.end_launches()

    def _prepare_capture(self, captured: CapturedForward, tables: Mapping[str, torch.Tensor]) -> None:
        """Give every buffer its final size, and run HEAD and TAIL of the captured shape on nothing."""
        self._batch = self._captured = self._repetition = None
        self._shape = self._shape_captured(captured)
        self._inputs.in_place = self._advance = self._ahead = None
        self._new_tokens, self._sizes_are_final = captured.tokens, True
        numbers = self._numbers(_NOBODY, has_table_rows=captured.has_table_rows)
        self._inputs.post(numbers, shape=self._shape, step=self.context.step)
        for launches in self._launches:
            launches.table = tables[launches.group.name]
            launches.out_slots.zero_()
            launches.finalize()
        self._steps.begin_launches(self)
        self.context.state.finalize_table(self.context.limits.max_len)
        self._launch_head()
        self._launch_tail()

    def begin(self, batch: ForwardBatch, *, captured: CapturedForward | None = None) -> None:
        """Drain the step before, bring the tails up to the prefix and copy the inputs. Outside any graph.

        Args:
            batch: what the model is about to run.
            captured: what `capturing` gave, where the graph is about to be replayed.

        Raises:
            CanaryViolationError: in raise mode, for what the step before found.
            RuntimeError: in raise mode, the last forward, or another one of the manager, was not ended.
            ValueError: in raise mode, the batch contradicts itself, the limits or the captured shape.
        """
        if self.context.is_off:
            self._phase = Phase.SKIPPED
            return
        if captured in self._unusable:
            self._steps.say_skipped(self.name, "a graph that HEAD and TAIL are not in: capturing it failed")
            self._skip(batch.out_slots, captured)
            return
        with self.context.guard.contain(self._parts["begin"]) as part:
            self._begin(batch, captured)
        if part.failed:
            self._skip(batch.out_slots, captured)

    def repeat(
        self,
        requests: BatchRequests,
        *,
        out_slots: Callable[[], Mapping[str, torch.Tensor]],
        given: Callable[[], ModelInputs] | None = None,
    ) -> bool:
        """Begin a forward that is like others before it, and run HEAD; instead of `begin` and `head`.

        Return False where it is not known to be, or more than that is to be done: nothing has been done then, and
        these are to be called. Batches like it, with the same tables, have been begun before. The list of requests may
        be another.

        Args:
            requests: of the forward.
            out_slots: returns the slots that it writes, by group name; asked where it is given up.
            given: returns what the model is given, which is copied now. None: it reads tensors that stay, as `tail` is
                told; of a decode step `newest` says the last token of each request.

        Raises:
            CanaryViolationError: in raise mode, for what the step before found.
            ValueError: in raise mode, the requests contradict the limits.
        """
        guard = self.context.guard
        if not guard.depth:
            # Its time is counted, too, where no adapter's part is around it.
            with self._begins:
                return self.repeat(requests, out_slots=out_slots, given=given)
        is_late, count = given is None, len(requests.rows)
        is_decode = is_late and requests.num_tokens == count
        if self._phase is not Phase.IDLE or not (self._decodes if is_decode else self._forwards):
            return False
        try:
            behind = None if is_decode else self.context.state.behind(requests)
            if is_decode:
                repetition = _valid_one(self._decodes, self._rounded(count))
            elif behind is None or (missing := _num_missing(requests, behind)) > MOST_REPLAYED:
                return False
            else:
                repetition = _valid_one(self._forwards, self._sizes_of(requests, missing=missing, is_late=is_late))
            if repetition is None:
                return False
            # What follows on numbers that were right, is.
            if requests.previous is None or requests.composition.number != self._checked:
                self._check_numbers(requests, None)
            if not repetition.begin(requests, behind):
                return False
            self._repetition, self._written, self._captured, self._is_late = repetition, out_slots, None, is_late
            self._batch, self._num_requests = repetition.batch, count
            if self._steps.shows_forwards:
                self._batch = dataclasses.replace(repetition.batch, requests=requests)
            self._advance, self._ahead = repetition.advance, repetition.ahead
            self._rows_at_head, self._rows_at_tail = requests.rows, None if is_decode else requests.rows
            self._shape, self._new_tokens, self._phase = repetition.shape, requests.num_tokens, Phase.BEGUN
            self._inputs.read_from(repetition.numbers, repetition.given)
            for launches in self._launches:
                launches.by_plans = launches.group.ring
            if given is not None:
                self._take_inputs(given())
            if is_decode and self._beside is not None and self._steps.host_has_time:
                self._beside.run(repetition.lap.head)
            else:
                if self._steps.timer is None:
                    repetition.lap.head()
                else:
                    self._timed(repetition.lap.head)
                self._rows_at_head = None
            self._phase = Phase.HEAD
            if not is_decode:
                # The number of the step is there by now.
                self._steps.admit(self, requests, repetition.batch.tables)
        except Exception as error:
            guard.take(self._parts["begin"], error)
            self._written = out_slots
            self._skip_written()
        return True

    def _sizes_of(self, requests: BatchRequests, *, missing: int, is_late: bool) -> Hashable:
        """Return what forwards are alike by.

        Args:
            requests: of one.
            missing: tokens of their prefixes that their rows are to be brought up by.
            is_late: whether what the model is given is taken at TAIL.
        """
        count, tokens = len(requests.rows), requests.num_tokens
        if self._replays.rounds_up:
            limits = self.context.limits
            count, tokens = round_up(count, limits.max_requests), round_up(tokens, limits.max_tokens)
            missing = round_up(missing, MOST_REPLAYED)
        return count, tokens, missing, _goes_ahead(requests), is_late

    @property
    def repeats(self) -> bool:
        """Whether the forward that is under way was begun by `repeat`, and has to be told at TAIL what was given."""
        return self._repetition is not None and self._is_late

    def skip(self, out_slots: Mapping[str, torch.Tensor], *, why: str) -> None:
        """Take in that a forward is about to run that nobody can describe, instead of `begin`, `head`, `tail`, `end`.

        It is counted (`CanarySummary.skipped`) and said once for each `why`; nothing is raised in any mode.

        Args:
            out_slots: of each group, the slots that it writes; a group that is left out may be written anywhere: all of
                its pool is unverified then.
            why: what is not known, for the log: "beam search".
        """
        context = self.context
        if context.is_off:
            return
        with context.guard.contain(f"forward {self.name}: skip"):
            self._steps.say_skipped(self.name, why)
            self._skip(out_slots, None)
        self._phase = Phase.IDLE

    def _begin(self, batch: ForwardBatch, captured: CapturedForward | None) -> None:
        self._repetition = self._sheet = None
        self._expect(Phase.IDLE, "begin")
        self._steps.expect_idle(f"forward {self.name}: begin")
        self._check(batch, captured)
        self._advance = self._ahead = self._rows_at_head = self._rows_at_tail = None
        self._has_ids = batch.input_ids is not None or not batch.arrays.num_tokens
        try:
            strides, advance = self._steps.begin_forward(
                self, batch.arrays, may_wait=captured is None and not self.inner
            )
            if advance is not None:
                self._advance, self._rows_at_head = advance, advance.rows
            if captured is None and not self.inner:
                self._go_ahead(batch.arrays)
            self._steps.take_in_gaps(self, batch)
            if not self.inner:
                self._steps.admit(self, batch.arrays, batch.tables)
            self._steps.perturb(batch)
            self._prepare(batch, captured, strides=strides)
        except BaseException:
            self._give_up_advance()
            self._steps.abort_forward(self)
            raise
        self._captured, self._batch = captured, batch
        self._phase = Phase.BEGUN

    def _skip(self, out_slots: Mapping[str, torch.Tensor], captured: CapturedForward | None) -> None:
        """Let the forward go by unwatched from here on."""
        self._batch, self._captured, self._phase = None, None, Phase.SKIPPED
        self._repetition = None
        with self.context.guard.contain(f"forward {self.name}: waiting for HEAD"):
            self._join_head()
        self._give_up_advance()
        if captured is not None:
            # The graph is about to be replayed: what it has of HEAD and TAIL must find nothing to do.
            with self.context.guard.contain(f"forward {self.name}: taking a batch back"):
                numbers = self._numbers(_NOBODY, has_table_rows=captured.has_table_rows)
                self._inputs.post(numbers, shape=self._shape_captured(captured), step=self.context.step)
        with self.context.guard.contain(f"forward {self.name}: skip"):
            self._steps.skip_forward(self, out_slots)

    def _prepare(self, batch: ForwardBatch, captured: CapturedForward | None, *, strides: Int64s) -> None:
        """Copy everything that HEAD and TAIL read from the host."""
        context, requests = self.context, batch.arrays
        self._num_requests, self._new_tokens = len(requests), requests.num_tokens
        expected = batch.expected_input_ids
        if expected is None and context.config.check_inputs:
            expected = context.oracle.expected(requests, offset=self.groups[0].token_offset)
        self._shape = self._shape_of(batch, captured, expects_tokens=expected is not None)
        self._inputs.post(
            self._numbers(requests, strides, has_table_rows=self._shape.has_table_rows),
            shape=self._shape,
            step=context.step,
            check_positions=batch.check_positions,
            advance=self._advance,
            ahead=self._ahead,
        )
        if self._shape.has_pending:
            self._inputs.mark_pending()
        self._inputs.in_place = None
        # HEAD needs none of it, but to hold the input ids against others, and for records of its own.
        has_heads_own = any(x.group.pool.head_records is not None for x in self._launches)
        self._is_late = batch.is_given_at_tail and captured is None and expected is None
        self._is_late = self._is_late and not (has_heads_own or self.inner)
        if not self._is_late:
            self._take_inputs(batch)
        if expected is not None:
            copy_front(self._inputs.known, expected)
        for launches in self._launches:
            name = launches.group.name
            if captured is None:
                launches.table = batch.tables[name]
            launches.prepare(
                needed=num_read(requests, launches.group),
                has_pending=self._shape.has_pending,
                sizes_are_final=self._sizes_are_final,
            )

    def _numbers(
        self, requests: BatchRequests, strides: Int64s | None = None, *, has_table_rows: bool
    ) -> dict[str, Int64s]:
        """Return what launches are told of each request, by name."""
        context = self.context
        numbers = {
            "rows": requests.rows,
            "owners": requests.owners,
            "prefix": requests.prefix,
            "extend": requests.extend,
        }
        if self._steps.budget.may_skip:
            numbers["strides"] = np.ones_like(requests.rows) if strides is None else strides
        if context.state.lookahead:
            numbers["known_lens"] = context.state.known_lens(requests)
        if has_table_rows:
            numbers["table_rows"] = requests.rows if requests.table_rows is None else requests.table_rows
        if requests.pending is not None:
            numbers["there"] = requests.there
            numbers["from_there"] = requests.prefix - requests.there + 1
        return numbers

    def _shape_of(self, batch: ForwardBatch, captured: CapturedForward | None, *, expects_tokens: bool) -> Shape:
        """Return the shape of the launches for a batch.

        Where they may be replayed, it is rounded up, so that few graphs serve all batches; what is past the batch is
        padding.
        """
        if captured is not None:
            return self._shape_captured(captured)
        requests, tokens, limits = len(batch.requests), self._new_tokens, self.context.limits
        advance, missing = self._advance, 0
        if advance is not None:
            missing = len(advance.flat)
        if self._replays.rounds_up:
            requests, tokens = round_up(requests, limits.max_requests), round_up(tokens, limits.max_tokens)
            missing = round_up(missing, MOST_REPLAYED)
        return Shape(
            requests=requests,
            tokens=tokens,
            expects_tokens=expects_tokens,
            has_pending=batch.arrays.pending is not None,
            has_table_rows=batch.arrays.table_rows is not None,
            is_given=batch.lengths is not None,
            advances=None if advance is None else (missing, requests),
            goes_ahead=self._ahead is not None,
        )

    def _shape_captured(self, captured: CapturedForward) -> Shape:
        """Return the shape of the launches that were captured."""
        return Shape(
            requests=captured.requests,
            tokens=captured.tokens,
            expects_tokens=captured.expects_tokens,
            has_table_rows=captured.has_table_rows,
            is_given=captured.is_given,
        )

    def head(self, *, input_ids: torch.Tensor | None = None, positions: torch.Tensor | None = None) -> None:
        """Resolve the slots that the model is about to read, and verify their records and bytes.

        Args:
            input_ids, positions: [tokens] on the device, where `begin` was not given them.
        """
        if self._phase is Phase.SKIPPED:
            return
        with self.context.guard.contain(self._parts["HEAD"]) as part:
            self._expect(Phase.BEGUN, "head")
            self._copy_inputs(input_ids, positions)
            key = ("head", *self._key(self._inputs.in_place))
            self._timed(lambda: self._replays.run(key, self._launch_head))
            self._rows_at_head, self._phase = None, Phase.HEAD
        if part.failed:
            self._skip_rest()

    def tail(self, *, input_ids: torch.Tensor | None = None, given: ModelInputs | None = None) -> None:
        """Record the tokens that the model has written, then verify the slots that HEAD resolved.

        Args:
            input_ids: [tokens] on the device, where the model was given others than HEAD.
            given: what the model has read, where the batch `is_given_at_tail`; None: the batch's own tensors. Always to
                be said behind `repeat`.
        """
        if self._phase is Phase.SKIPPED:
            return
        with self.context.guard.contain(self._parts["TAIL"]) if self._repetition is None else self._tails as part:
            self._tail(input_ids, given)
        if part.failed:
            self._skip_rest()

    def _tail(self, input_ids: torch.Tensor | None, given: ModelInputs | None) -> None:
        if self._phase is not Phase.HEAD:
            self._expect(Phase.HEAD, "tail")
        if self._beside is not None:
            self._join_head()
        repetition = self._repetition
        if repetition is not None and (given is repetition.given or not self._is_late):
            lap = repetition.lap
            if self._steps.timer is None:
                lap.tail()
            else:
                self._timed(lap.tail)
            self._sheet = lap.sheet
        else:
            if self._is_late and self._batch is not None:
                self._take_given(self._batch, given)
            self._copy_inputs(input_ids, None)
            if self._batch is not None and not (self._has_ids or self._is_late or self._captured is not None):
                raise ValueError(must_be(f"forward {self.name}", "input_ids", "given by TAIL", "nothing"))
            key = ("tail", *self._key(self._inputs.in_place))
            self._timed(lambda: self._replays.run(key, self._launch_tail))
        self._rows_at_tail, self._phase = None, Phase.TAIL

    def finish(self, *, given: ModelInputs | None = None) -> None:
        """Run TAIL and end the forward: `tail` and `end` in one, for a step in which nothing comes between them.

        Args:
            given: see `tail`.
        """
        guard = self.context.guard
        if self._repetition is None or not guard.depth:
            self.tail(given=given)
            self.end()
            return
        try:
            self._tail(None, given)
            self._end()
        except Exception as error:
            guard.take(self._parts["TAIL"], error)
            if self._phase is not Phase.IDLE:
                self._skip_rest()
            self._phase = Phase.IDLE

    def _join_head(self) -> None:
        """Let the forward's stream wait for a HEAD that runs beside the model."""
        if self._beside is not None and self._beside.join():
            self._rows_at_head = None

    def _timed(self, launch: Launch) -> None:
        """Launch, and let the device's time be taken in the steps in which it is."""
        timer = self._steps.timer
        if timer is None:
            launch()
            return
        with timer.span():
            launch()

    def _skip_rest(self) -> None:
        """Go on unwatched after HEAD or TAIL have failed."""
        if self._repetition is not None:
            self._skip_written()
        elif self._batch is not None:
            self._skip(self._batch.out_slots, self._captured)
        else:
            # Called out of turn, or while a graph is captured: nothing was to be written.
            self._phase = Phase.SKIPPED

    def _skip_written(self) -> None:
        """Go on unwatched in a forward that was begun by `repeat`."""
        written: Mapping[str, torch.Tensor] = {}
        with self.context.guard.contain(f"forward {self.name}: the slots that it writes"):
            written = self._written()
        self._skip(written, None)

    def _give_up_advance(self) -> None:
        """Take in that rows may not have been brought up to where they were to be."""
        moving = self._rows_at_head, self._rows_at_tail
        self._rows_at_head = self._rows_at_tail = None
        for rows in moving:
            if rows is not None:
                self.context.state.forget(rows)

    def _bring_up(self, lists: Sequence[torch.Tensor]) -> None:
        """Launch what brings rows up.

        Args:
            lists: flat tokens, offsets, rows and starts.
        """
        flat, offsets, rows, starts = lists
        ops.chain_tails(
            flat=flat,
            offsets=offsets,
            rows=rows,
            starts=starts,
            **self.context.state.together,
            status=self._tails_status,
            backend=self.context.backend,
        )

    def _open(self, there: Places, words: torch.Tensor, whole: torch.Tensor) -> None:
        """Launch what a repeated step begins with: its numbers go to `whole`, and rows are brought up.

        Args:
            there: the places of the numbers in `words`.
        """
        flat, offsets, rows, starts = there.advance
        ops.open_step(
            words=words,
            copy=whole,
            flat=flat,
            offsets=offsets,
            advance_rows=rows,
            starts=starts,
            **self.context.state.together,
            status=self._tails_status,
            **self._laid_out.layout(there),
            backend=self.context.backend,
        )

    def _open_nothing(self, numbers: PostedNumbers, tokens: Iterable[int]) -> None:
        """Begin steps of padding, whose rows are brought up by no token of so many, so that the kernel is compiled."""
        words, whole = torch.zeros_like(numbers.whole), torch.empty_like(numbers.whole)
        there = numbers.places(words)
        for count in tokens:
            self._open(there._replace(advance=[words.new_zeros(count), *there.advance[1:]]), words, whole)

    def _launch_head(self) -> None:
        if self._advance is not None:
            self._bring_up(self._inputs.advance)
        self._launch_groups_heads()

    def _opened_head(self, numbers: PostedNumbers, words: torch.Tensor) -> Launch:
        """Return what launches HEAD of steps whose numbers lie in `words`, from where they go to their places."""
        there = numbers.places(words)

        def launch() -> None:
            self._open(there, words, numbers.whole)
            self._launch_groups_heads(laid_out=self._laid_out)

        return launch

    def _launch_groups_heads(self, laid_out: GroupLaunches | None = None) -> None:
        self._steps.handed.begin()
        if self._shape.expects_tokens:
            self._inputs.complete_expected(self._shape.tokens)
        for launches in self._launches:
            launches.head(self._shape, is_laid_out=launches is laid_out)

    def _launch_tail(self) -> None:
        self._inputs.widen(self._shape)
        for launches in self._launches:
            launches.write(self._shape)
        try:
            # Either leaves most of a GPU idle.
            with self._branch.beside():
                for launches in self._launches:
                    launches.seal(self._shape)
            for launches in self._launches:
                launches.tail(self._shape)
        finally:
            # An engine's capture does not survive a branch that is left open.
            self._branch.join()
        if self.inner:
            self._advance_scratch()
        if self._ahead is not None:
            self._bring_up(self._inputs.ahead)

    def _key(self, in_place: ModelInputs | None) -> tuple[Hashable, ...]:
        """What tells whether HEAD and TAIL would launch the same as before, on the same memory."""
        tokens = self.context.state.token_pool
        where = () if tokens is None else layout_of(tokens)
        given = () if in_place is None else in_place.layout
        return self._shape, where, given, *(launches.memory for launches in self._launches)

    def end(self) -> None:
        """Hand the step's findings over, to be read one step later. Outside any graph."""
        if self._phase is Phase.SKIPPED:
            self._phase = Phase.IDLE
            return
        with self.context.guard.contain(self._parts["end"]) if self._repetition is None else self._ends as part:
            self._end()
        if part.failed:
            self._phase = Phase.IDLE

    def _end(self) -> None:
        # A replay runs HEAD and TAIL where the host does not see it; their launches are counted on the device.
        expected = Phase.TAIL if self._captured is None else Phase.BEGUN
        if self._phase is not expected:
            self._expect(expected, "end")
        self._phase = Phase.IDLE
        try:
            if self._steps.unverified.any_marked:
                for launches in self._launches:
                    self._steps.unverified.written(launches.group.pool, launches.out_slots[: self._new_tokens])
            if self._repetition is None:
                self._keep_repetition()
            self._repetition, self._is_late = None, False
            sheet, self._sheet = self._sheet, None
            self._steps.end_forward(self, self._batch, sheet=sheet)
        except BaseException:
            self._steps.abort_forward(self)
            raise

    def _rounded(self, requests: int) -> int:
        """Return how many requests launches are made for."""
        return round_up(requests, self.context.limits.max_requests) if self._replays.rounds_up else requests

    def _keep_repetition(self) -> None:
        """Keep what forwards may repeat, if this one was like most, and its launches come again and again."""
        batch, given, shape, advance = self._batch, self._inputs.in_place, self._shape, self._advance
        if batch is None or advance is None or self._captured is not None or self.inner:
            return
        if not self._attempts.may_try(self.context.step):
            return
        if not batch.check_positions or shape.has_pending or shape.expects_tokens:
            return
        requests = batch.arrays
        kind: type[Repetition]
        size: Hashable
        if self._is_late and given is None:
            return
        goes_ahead = _goes_ahead(requests)
        if self._is_late and not goes_ahead:
            one_each = len(requests) == len(advance.flat) == len(advance.rows)
            kept, size, kind = self._decodes, self._rounded(len(requests)), Decodes
            if not one_each or shape.requests != size:
                return
        else:
            kept, kind = self._forwards, PlainForwards
            size = self._sizes_of(requests, missing=len(advance.flat), is_late=self._is_late)
            # What goes ahead of them behind TAIL is a part of their launches.
            if not requests.is_composed or requests.drafts or goes_ahead != shape.goes_ahead:
                return
        keys = ("head", *self._key(None)), ("tail", *self._key(given))
        if size in kept or not all(map(self._replays.is_settled, keys)) or not self._has_room(kept):
            return
        numbers = self._inputs.last
        try:
            # What a capture calls launches what was launched before.
            self._open_nothing(numbers, [len(self._inputs.advance[0])])
            kept[size] = kind(
                self.context,
                self._steps,
                self,
                self._replays,
                numbers=numbers,
                batch=batch,
                given=given,
                shape=shape,
                launches=self._launches,
                advance=advance,
                ahead=self._ahead,
                head=functools.partial(self._opened_head, numbers),
                tail=self._launch_tail,
            )
        except Exception as error:
            self._attempts.failed(self.context.step)
            self.context.capture_failed(error)
        else:
            self._attempts.succeeded()

    def _has_room(self, kept: dict[Hashable, Repetition]) -> bool:
        """Return whether one more may be kept, once those are gone that are of no use any more.

        Where all are, that goes which was longest not repeated, if it is long.
        """
        most = _MOST_DECODES if kept is self._decodes else _MOST_FORWARDS
        if len(kept) >= most:
            for size in [size for size, repetition in kept.items() if not repetition.is_valid]:
                del kept[size]
        if len(kept) >= most:
            oldest = min(kept, key=lambda size: kept[size].last_used)
            if self.context.step - kept[oldest].last_used > _LONG:
                del kept[oldest]
        return len(kept) < most

    def _go_ahead(self, requests: BatchRequests) -> None:
        """Bring rows up behind a forward of several tokens each, so that decode steps find them where they expect."""
        if not _goes_ahead(requests) or not requests.is_composed or requests.drafts:
            return
        state = self.context.state
        with self.context.guard.contain("bringing rows up behind a forward") as part:
            self._ahead = state.go_ahead(requests)
            self._rows_at_tail = None if self._ahead is None else self._ahead.rows
        if part.failed:
            state.forget(requests.rows)

    def abort(self) -> None:
        """Give up a forward that raised; what it had found so far is kept."""
        phase, self._phase = self._phase, Phase.IDLE
        if phase in (Phase.IDLE, Phase.SKIPPED):
            return
        with self.context.guard.contain(f"forward {self.name}: abort"):
            try:
                self._join_head()
                self._give_up_advance()
                for launches in self._launches:
                    slots, pool = self._slots_of(launches), launches.group.pool
                    self._steps.doubt(pool, slots)
                    pool.take_back_head(slots)
                    pool.drop_seals(slots)
            finally:
                self._steps.abort_forward(self)

    @functools.cached_property
    def groups_of_statuses(self) -> Mapping[int, str]:
        """The names of the groups, by the numbers of the status words of their last plans."""
        return {status: group for group, status, _ in self.statuses}

    @functools.cached_property
    def statuses(self) -> list[tuple[str, int, int]]:
        """Of each group: its name, and the numbers of its status words: of the last plan, and of earlier ones."""
        return [(x.group.name, x.status, x.earlier_status) for x in self._launches]

    def forget_graphs(self) -> None:
        """Destroy the graphs that HEAD and TAIL are replayed from."""
        self._decodes.clear()
        self._forwards.clear()
        self._replays.forget()

    def verified(self, group: str, *, first: int = 0, end: int | None = None) -> VerifiedEntries:
        """Return entries [first, end) of what HEAD verified last in a group; good until its next HEAD.

        Raises:
            RuntimeError: there was no HEAD yet.
        """
        launches = next(x for x in self._launches if x.group.name == group)
        return launches.verified(first, end)

    @property
    def entry_capacities(self) -> dict[str, int]:
        """Entries that each group has room for now, by name."""
        return {x.group.name: x.room for x in self._launches}

    @property
    def write_plans(self) -> dict[str, WritePlan]:
        """The segments that HEAD planned last, by group name: static buffers, which its next HEAD fills anew."""
        return {x.group.name: x.write_plan for x in self._launches}

    @functools.cached_property
    def launches(self) -> Mapping[int, int]:
        """Launches of HEAD and TAIL together, by tag."""
        counts: dict[int, int] = {}
        for launches in self._launches:
            for tag, count in launches.launches.items():
                counts[tag] = counts.get(tag, 0) + count
        return counts

    def _take_inputs(self, source: ForwardBatch | ModelInputs) -> None:
        """Copy what the model is given."""
        inputs = self._inputs
        inputs.in_place = None
        pairs = [(x.copied_slots, source.out_slots[x.group.name]) for x in self._launches]
        for buffer, tensor in ((inputs.input_ids, source.input_ids), (inputs.positions, source.positions)):
            if tensor is not None:
                pairs.append((front(buffer, self._new_tokens), tensor))
        if source.lengths is not None:
            pairs.append((inputs.given_lens, source.lengths))
            pairs.append((inputs.given_rows, inputs.rows if source.rows is None else source.rows))
        copy_all(pairs)

    def _slots_of(self, launches: GroupLaunches) -> torch.Tensor:
        """Return the slots that a forward that is given up may have written."""
        if self._is_late and self._batch is not None:
            written = self._written() if self._repetition is not None else self._batch.out_slots
            return on_device(written[launches.group.name], self.context.device).to(torch.int64)
        return launches.out_slots[: self._new_tokens]

    def _take_given(self, batch: ForwardBatch, given: ModelInputs | None) -> None:
        """Read what the model was given in place, where it stays there, or copy it.

        Raises:
            ValueError: it is less than the batch has, or nothing where the batch does not say it either.
        """
        if given is None and self._repetition is not None:
            raise ValueError(must_be(f"forward {self.name}", "given", "said behind `repeat`", "nothing"))
        if given is None or not given.is_in_place:
            self._take_inputs(batch if given is None else given)
            return
        needed = self._num_requests, self._new_tokens
        for what, least, room in zip(("requests", "tokens"), needed, given.room, strict=True):
            if room < least:
                expected = f"of at least {least} {what}"
                raise ValueError(must_be(f"forward {self.name}", "given", expected, str(room)))
        if (given.lengths is None) != (batch.lengths is None):
            raise ValueError(must_be(f"forward {self.name}", "given rows", "as in the batch", "otherwise"))
        self._inputs.in_place = given

    def _copy_inputs(self, input_ids: torch.Tensor | None, positions: torch.Tensor | None) -> None:
        self._has_ids |= input_ids is not None
        for argument, buffer, tensor in (
            ("input_ids", self._inputs.input_ids, input_ids),
            ("positions", self._inputs.positions, positions),
        ):
            if tensor is None:
                continue
            if tensor.dim() != 1:
                got = str(list(tensor.shape))
                raise ValueError(must_be(f"forward {self.name}", argument, "of shape [tokens]", got))
            copy_front(buffer[: self._new_tokens], tensor)

    def _advance_scratch(self) -> None:
        """Let the tails of the requests go on over what this forward wrote, for the next one inside the step."""
        context, inputs, n = self.context, self._inputs, self._shape.requests
        by_offset = {x.group.token_offset: x for x in self._launches}
        for launches in by_offset.values():
            ops.chain_tails(
                flat=inputs.input_ids[: self._shape.tokens],
                offsets=launches.write_plan.offsets[: n + 1],
                rows=inputs.rows[:n],
                starts=inputs.lengths.prefix[:n],
                anchors=context.state.anchors,
                tails=launches.tails(),
                status=self._tails_status,
                backend=context.backend,
            )

    def _check(self, batch: ForwardBatch, captured: CapturedForward | None) -> None:
        limits = self.context.limits
        part = f"forward {self.name}"
        most = (limits.max_requests, limits.max_tokens) if captured is None else (captured.requests, captured.tokens)
        if len(batch.requests) > most[0]:
            raise ValueError(must_be(part, "requests", f"at most {most[0]} requests", str(len(batch.requests))))
        tokens = batch.arrays.num_tokens
        if tokens > most[1]:
            raise ValueError(must_be(part, "requests", f"at most {most[1]} new tokens", str(tokens)))
        self._check_names(batch.out_slots, batch.tables)
        self._check_longest(batch)
        if captured is not None:
            for name, layout in captured.tables.items():
                if layout_of(batch.tables[name]) != layout:
                    raise ValueError(must_be(part, f"tables[{name}]", "where it was captured", "another tensor"))
            expects = batch.expected_input_ids is not None or self.context.config.check_inputs
            if captured.expects_tokens != expects:
                expected = "given" if captured.expects_tokens else "left out"
                raise ValueError(must_be(part, "expected_input_ids", f"{expected}, as captured", "the other"))
            if batch.arrays.table_rows is not None and not captured.has_table_rows:
                raise ValueError(must_be(part, "table_row", "left out, as captured", "given"))
            if captured.is_given != (batch.lengths is not None):
                expected = "given" if captured.is_given else "left out"
                raise ValueError(must_be(part, "lengths", f"{expected}, as captured", "the other"))
        for tensor in (batch.input_ids, batch.positions, batch.expected_input_ids, *batch.out_slots.values()):
            if tensor is not None and (tensor.shape != (tokens,) or tensor.dtype not in _INTEGERS):
                self._complain_of_flat(batch, tokens)
        if batch.rows is not None and batch.lengths is None:
            raise ValueError(must_be(part, "lengths", "given where rows are", "None"))
        for argument, tensor in (("rows", batch.rows), ("lengths", batch.lengths)):
            if tensor is not None and tensor.shape != (len(batch.requests),):
                expected = f"of shape [{len(batch.requests)}] (the requests)"
                raise ValueError(must_be(part, argument, expected, str(list(tensor.shape))))
        self._check_numbers(batch.arrays, captured)
        # What a draft reads may be short, and is left out, as its status says.
        if captured is None and not self.inner:
            self._check_tables(batch)

    def _check_longest(self, batch: ForwardBatch) -> None:
        """Refuse a request that is longer than any table: its own tokens would be asked for first of all."""
        requests = batch.arrays
        if requests.longest <= self.context.limits.max_len:
            return
        widths = (batch.tables[x.group.name].shape[1] * x.group.page_size for x in self._launches)
        room = max(self.context.limits.max_len, *widths)
        if requests.longest > room:
            request = requests[int(requests.prefix.argmax())]
            expected = f"at most {room}, as many positions as a table has"
            raise ValueError(
                must_be(
                    f"forward {self.name}", f"prefix_len of {request.request_id}", expected, str(request.prefix_len)
                )
            )

    def _check_tables(self, batch: ForwardBatch) -> None:
        """Refuse tables that have not got a request's row, or not all of its positions."""
        part, requests = f"forward {self.name}", batch.arrays
        rows = requests.rows if requests.table_rows is None else requests.table_rows
        last = int(np.maximum.reduce(rows, initial=0))
        for launches in self._launches:
            group = launches.group
            argument, table = f"tables[{group.name}]", batch.tables[group.name]
            if table.dim() != 2 or table.dtype != torch.int32:
                got = f"{table.dtype} {list(table.shape)}"
                raise ValueError(must_be(part, argument, "int32 of shape [rows, entries]", got))
            if last >= table.shape[0]:
                which = "row" if requests.table_rows is None else "table_row"
                request = requests[int(rows.argmax())]
                expected = f"in [0, {table.shape[0]}), the rows of {argument}"
                raise ValueError(must_be(part, f"{which} of {request.request_id}", expected, str(last)))
            # A ring's positions go round.
            if not group.ring and requests.longest > table.shape[1] * group.page_size:
                request = requests[int(requests.prefix.argmax())]
                expected = f"at most {table.shape[1] * group.page_size}, as many positions as {argument} has"
                got = str(request.prefix_len)
                raise ValueError(must_be(part, f"prefix_len of {request.request_id}", expected, got))

    def _complain_of_flat(self, batch: ForwardBatch, tokens: int) -> None:
        """Raise for the flat tensor that is not as it must be."""
        flat = {
            "input_ids": batch.input_ids,
            "positions": batch.positions,
            "expected_input_ids": batch.expected_input_ids,
        }
        flat |= {f"out_slots[{name}]": slots for name, slots in batch.out_slots.items()}
        for argument, tensor in flat.items():
            if tensor is None:
                continue
            if tensor.shape != (tokens,):
                expected = f"of shape [{tokens}] (the sum of extend_len)"
                raise ValueError(must_be(f"forward {self.name}", argument, expected, str(list(tensor.shape))))
            if tensor.dtype not in _INTEGERS:
                got = str(tensor.dtype)
                raise TypeError(must_be(f"forward {self.name}", argument, "of dtype int32 or int64", got))

    def _check_numbers(self, requests: BatchRequests, captured: CapturedForward | None) -> None:
        """Check rows and lengths."""
        rows, prefix, number = requests.rows, requests.prefix, requests.composition.number
        if not len(rows):
            return
        if requests.pending is None and np.minimum.reduce(prefix) >= 0:
            extend = requests.extend
            if extend is self._checked_extend or np.minimum.reduce(extend) >= 0:
                self._checked_extend = extend
                if number == self._checked:
                    return
                # Of so few, a list is looked through sooner than an array.
                found = rows.tolist()
                if len(set(found)) == len(found) and min(found) > 0 and max(found) < self.context.limits.max_rows:
                    self._checked = number
                    return
        wrong = (prefix < 0) | (requests.extend < 0)
        if number != self._checked:
            if not _are_different(rows):
                expected = "different for every request"
                raise ValueError(must_be(f"forward {self.name}", "rows", expected, str(rows.tolist())))
            wrong |= (rows <= 0) | (rows >= self.context.limits.max_rows)
            self._checked = 0 if wrong.any() else number
        if requests.pending is not None:
            wrong |= (requests.pending < 0) | (requests.pending > (prefix if captured is None else 0))
        if wrong.any():
            request = requests[int(wrong.argmax())]
            raise ValueError(self._complaint(request, most_pending=request.prefix_len if captured is None else 0))

    def _complaint(self, request: ForwardRequest, *, most_pending: int) -> str:
        """Return what is wrong with a request."""
        max_rows = self.context.limits.max_rows
        wrong = (
            ("row", request.row, 0 < request.row < max_rows, f"in [1, {max_rows})"),
            ("prefix_len", request.prefix_len, request.prefix_len >= 0, "at least 0"),
            ("extend_len", request.extend_len, request.extend_len >= 0, "at least 0"),
            ("pending", request.pending, 0 <= request.pending <= most_pending, f"in [0, {most_pending}]"),
        )
        argument, value, _, expected = next(x for x in wrong if not x[2])
        return must_be(f"forward {self.name}", f"{argument} of {request.request_id}", expected, str(value))

    def _check_names(self, out_slots: Mapping[str, object], tables: Mapping[str, object]) -> None:
        names = {x.group.name for x in self._launches}
        if set(out_slots) != names or set(tables) != names:
            got = f"{sorted(out_slots)} and {sorted(tables)}"
            expected = f"given for the groups {sorted(names)}"
            raise ValueError(must_be(f"forward {self.name}", "out_slots and tables", expected, got))

    def _expect(self, phase: Phase, call: str) -> None:
        if self._phase is not phase:
            raise RuntimeError(
                f"kv-canary: forward {self.name}: {call} must come when the forward is {phase.value}, "
                f"got it when {self._phase.value}"
            )


def _may_be_beside(groups: Sequence[BufferGroup], steps: Steps) -> bool:
    """Return whether HEAD may run beside the model: neither changes what the other one reads."""
    return not steps.handed.is_on and not any(g.ring or g.pool.head_records is not None for g in groups)


def _sizes(max_requests: int, max_tokens: int, *, inner: bool) -> Iterator[tuple[int, int, bool]]:
    """Yield requests, tokens, and whether some of a prefix is pending, of every shape that batches are rounded to.

    A forward with pending positions verifies by plans, whose kernels ask for the requests alone.
    """
    for requests in rounded(max_requests):
        sizes = [tokens for tokens in rounded(max_tokens) if tokens >= min(requests, max_tokens)]
        if not inner:
            yield requests, sizes[0], True
    for requests in rounded(max_requests):
        for tokens in rounded(max_tokens):
            if tokens >= min(requests, max_tokens):
                yield requests, tokens, False


def _cut_short(max_requests: int, max_tokens: int, *, graph_tokens: int | None) -> Iterator[tuple[int, int, bool]]:
    """Yield the shape of decodes that are rounded to more tokens than the tensors of their graph have, as `_sizes`."""
    if graph_tokens is None:
        return
    most = min(graph_tokens, max_requests)
    if most > 0 and graph_tokens < round_up(most, max_tokens):
        yield round_up(most, max_requests), graph_tokens, False


def _valid_one(kept: dict[Hashable, Repetition], size: Hashable) -> Repetition | None:
    """Return what a forward of a size may repeat; None: there is none, or none any more."""
    repetition = kept.get(size)
    if repetition is not None and not repetition.is_valid:
        del kept[size]
        return None
    return repetition


def _num_missing(requests: BatchRequests, behind: tuple[Int64s, Int64s]) -> int:
    """Return how many tokens bring rows up to their prefixes."""
    which, starts = behind
    return int(np.add.reduce(requests.prefix[which]) - np.add.reduce(starts))


def _goes_ahead(requests: BatchRequests) -> bool:
    """Whether a forward writes several tokens of a request."""
    return requests.num_tokens != len(requests)


def _are_different(numbers: Int64s) -> bool:
    """Whether no number comes twice."""
    ordered = np.sort(numbers)
    return not np.logical_or.reduce(ordered[1:] == ordered[:-1])
