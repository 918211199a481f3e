"""What one forward launches: its inputs in static buffers, and the ops of HEAD and TAIL in each group."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kv_canary import ops
from kv_canary.constants import HEAD_OF_CHAIN
from kv_canary.runtime.batch import ModelInputs, VerifiedEntries
from kv_canary.runtime.context import CanaryContext
from kv_canary.runtime.device_state import MOST_REPLAYED
from kv_canary.runtime.handed import HandedOver
from kv_canary.runtime.host import Mailbox, Numbers, copy_all, front, let_go
from kv_canary.runtime.pools import BufferGroup
from kv_canary.runtime.replays import layout_of
from kv_canary.runtime.seals import seal_written
from kv_canary.runtime.tails import Advance, Tails
from kv_canary.specs.structures import Endpoint, ResolvedSlots, VerifyPlan, WritePlan
from kv_canary.specs.write import max_tiles

# Columns of numbers that the host sends of every request, at most.
_NUMBER_COLUMNS = 9
# What it sends of the launch that brings rows up before HEAD, and of the one that does behind TAIL.
ADVANCE = ("flat", "offsets", "its_rows", "starts")
AHEAD = tuple(f"ahead_{name}" for name in ADVANCE)

# Cuts of what is posted whose places are remembered.
_MOST_PLACES = 256

# Verify entries that a group has room for before a forward needs more.
_FEW_ENTRIES = 1024
# So many that kernels go about them as they do about any more.
MANY_ENTRIES = 1 << 17


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What of a forward's launches is fixed when they are made.

    Args:
        requests, tokens: how many they take; a batch may have fewer.
        expects_tokens: whether the input ids are held against those to expect.
        has_pending: whether some of a prefix is produced by this very forward.
        has_table_rows: whether requests have other rows in the tables than in the canary.
        is_given: whether lengths, and rows where there are any, are held against those that the model is given.
        advances: tokens and requests of the launch that brings rows up to their prefixes before HEAD; None: there is
            none.
        goes_ahead: whether a launch brings rows up behind TAIL, of as many tokens and requests as the others take.
    """

    requests: int = 0
    tokens: int = 0
    expects_tokens: bool = False
    has_pending: bool = False
    has_table_rows: bool = False
    is_given: bool = False
    advances: tuple[int, int] | None = None
    goes_ahead: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Lengths:
    """How many tokens of each request are cached, and how many come: int64 [requests] each."""

    prefix: torch.Tensor
    extend: torch.Tensor


class PostedNumbers(NamedTuple):
    """The places of the numbers that a forward sends.

    Attributes:
        whole: int64 [words] on the device, where they are sent to.
        at: the first word of each column by its name: `check_positions`, `step`, and `names`.
        views: where launches read them.
        names: of the columns of requests and of the launches that bring rows up, in order.
    """

    whole: torch.Tensor
    at: Mapping[str, int]
    views: Sequence[torch.Tensor]
    names: tuple[str, ...]

    def places(self, words: torch.Tensor) -> Places:
        """Return the places of what lies in int64 `words` as it does in `whole`."""
        views = [words[at : at + len(view)] for at, view in zip(self.at.values(), self.views, strict=True)]
        return Places.of(views, self.names)


class ForwardInputs:
    """What the host says of a forward, and what the model is given, where launches read it.

    Attributes:
        rows, owners, known_lens, strides, table_rows: int64 [requests]; the last two may be None.
        lengths: of the prefixes and of what comes.
        arriving: of what is there before the forward, and of what is not yet: all that `pending` says, and one more.
        is_pending: bool [requests], where some of the prefix is yet to come.
        check_positions: int32 [1].
        step: int64 [1], its number.
        advance, ahead: flat tokens, offsets, rows and starts of the launches that bring rows up, or nothing.
        input_ids, positions: int64 [max_tokens] that the model is given.
        given_rows, given_lens: int64 [max_requests] likewise.
        in_place: what TAIL reads instead of copies, where it is int64; None: the copies.
        known, expected: int64 [max_tokens] that it should be given: what is known of it, -1 elsewhere; and all of it.
    """

    def __init__(self, context: CanaryContext) -> None:
        n, t, device = context.limits.max_requests, context.limits.max_tokens, context.device
        self._state = context.state
        # It never grows: graphs keep its address.
        self._mailbox = Mailbox(device, words=(_NUMBER_COLUMNS + 6) * (n + 2) + MOST_REPLAYED + t + 6)
        self.is_pending = torch.zeros(n, dtype=torch.bool, device=device)
        self._unknown = torch.zeros(t, dtype=torch.bool, device=device)
        self.input_ids, self.positions, self.known, self.expected = (
            torch.zeros(t, dtype=torch.int64, device=device) for _ in range(4)
        )
        self.given_rows, self.given_lens = (torch.zeros(n, dtype=torch.int64, device=device) for _ in range(2))
        self.in_place: ModelInputs | None = None
        self._posted: Sequence[torch.Tensor] = ()
        self._names: tuple[str, ...] = ()
        self._places: dict[tuple[int, tuple[str, ...]], Places] = {}
        self.arriving: Lengths | None = None

    def post(
        self,
        numbers: Mapping[str, Numbers],
        *,
        shape: Shape,
        step: int,
        check_positions: bool = True,
        advance: Advance | None = None,
        ahead: Advance | None = None,
    ) -> None:
        """Send the numbers of a batch, zeros (padding) behind them: requests of row 0.

        Args:
            numbers: of each request, by name: `rows`, `owners`, `prefix`, `extend`; and `strides`, `known_lens` where
                they are not the prefixes, `there` and `from_there` (what `arriving` holds), as far as they are needed.
            shape: of the launches.
            step: its number.
            check_positions: whether positions must continue the prefix.
            advance, ahead: what is launched before HEAD and behind TAIL, where the shape says so.
        """
        names, requests, lists = tuple(numbers), shape.requests, list[Numbers](numbers.values())
        widths = [2, 2] + [requests] * len(numbers)
        if advance is not None and shape.advances is not None:
            flat, its = shape.advances
            names, lists, widths = names + ADVANCE, [*lists, *advance], [*widths, flat, its + 1, its, its]
        if ahead is not None:
            names, lists = names + AHEAD, [*lists, *ahead]
            widths += [shape.tokens, requests + 1, requests, requests]
        # First what lies in the same place whatever the sizes are.
        posted = self._mailbox.post((int(check_positions),), (step,), *lists, widths=widths)
        # It mostly lies where it lay before.
        if posted is not self._posted or names != self._names:
            self._posted, self._names = posted, names
            self._find(posted)
        self._state.take_step(self.step)

    def _find(self, posted: Sequence[torch.Tensor]) -> None:
        """Take in where it lies."""
        # Prefills and decodes come by turns, each in places of its own.
        key = id(posted), self._names
        found = self._places.get(key)
        if found is None or found.posted is not posted:
            if len(self._places) >= _MOST_PLACES:
                self._places.clear()
            found = self._places[key] = Places.of(posted, self._names)
        self.step, self.check_positions = found.step, found.check_positions
        self.advance, self.ahead = found.advance, found.ahead
        self.rows, self.owners, self.lengths = found.rows, found.owners, found.lengths
        self.table_rows, self.known_lens, self.strides = found.table_rows, found.known_lens, found.strides
        if found.arriving is not None:
            self.arriving = found.arriving

    @property
    def last(self) -> PostedNumbers:
        """The places of what was posted last."""
        whole, starts = self._mailbox.last
        names = ("check_positions", "step", *self._names)
        return PostedNumbers(whole, dict(zip(names, starts, strict=True)), self._posted, self._names)

    def read_from(self, numbers: PostedNumbers, in_place: ModelInputs | None) -> None:
        """Let launches read what lies in other places, as it did when it was posted, and what the model is given."""
        self.in_place = in_place
        # Columns of other names may lie in the same places.
        if numbers.views is not self._posted or numbers.names != self._names:
            self._posted, self._names = numbers.views, numbers.names
            self._find(numbers.views)
        self._state.take_step(self.step)

    def mark_pending(self) -> None:
        """Set `is_pending`."""
        n = len(self.rows)
        if self.arriving is not None:
            torch.ne(self.lengths.prefix, self.arriving.prefix, out=self.is_pending[:n])

    @property
    def of_model(self) -> _OfModel:
        """What TAIL reads of what the model is given."""
        own = _OfModel(self.input_ids, self.positions, self.given_rows, self.given_lens)
        if self.in_place is None:
            return own
        given = _OfModel.of(self.in_place)
        return _OfModel(
            own.input_ids if _is_narrow(given.input_ids) else given.input_ids,
            own.positions if _is_narrow(given.positions) else given.positions,
            own.rows if _is_narrow(given.rows) else given.rows,
            own.lengths if _is_narrow(given.lengths) else given.lengths,
        )

    def widen(self, shape: Shape) -> None:
        """Copy what TAIL would read in place and is not int64."""
        if self.in_place is None:
            return
        counts = shape.tokens, shape.tokens, shape.requests, shape.requests
        own = self.input_ids, self.positions, self.given_rows, self.given_lens
        copy_all(
            [
                (front(buffer, count), tensor)
                for buffer, tensor, count in zip(own, _OfModel.of(self.in_place), counts, strict=True)
                if tensor is not None and _is_narrow(tensor)
            ]
        )

    def complete_expected(self, tokens: int) -> None:
        """Set what the model should be given: what nobody knows is as it is."""
        unknown, ids, known = self._unknown[:tokens], self.input_ids[:tokens], self.known[:tokens]
        torch.lt(known, 0, out=unknown)
        torch.where(unknown, ids, known, out=self.expected[:tokens])


class _OfModel(NamedTuple):
    """What the model is given of tokens, and of requests."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor | None
    lengths: torch.Tensor | None

    @classmethod
    def of(cls, given: ModelInputs) -> _OfModel:
        return cls(given.input_ids, given.positions, given.rows, given.lengths)


def _is_narrow(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.dtype != torch.int64


class Places(NamedTuple):
    """Where launches read what was posted, by the names of `ForwardInputs`."""

    posted: Sequence[torch.Tensor]
    step: torch.Tensor
    check_positions: torch.Tensor
    advance: Sequence[torch.Tensor]
    ahead: Sequence[torch.Tensor]
    rows: torch.Tensor
    owners: torch.Tensor
    lengths: Lengths
    table_rows: torch.Tensor | None
    known_lens: torch.Tensor
    strides: torch.Tensor | None
    arriving: Lengths | None

    @classmethod
    def of(cls, posted: Sequence[torch.Tensor], names: Sequence[str]) -> Places:
        """Return the places of what was posted by these names."""
        check, at, *rest = posted
        there = dict(zip(names, rest, strict=True))
        is_pending = "there" in there
        return cls(
            posted=posted,
            step=at[:1],
            check_positions=check.view(torch.int32)[:1],
            advance=[there[name] for name in ADVANCE if name in there],
            ahead=[there[name] for name in AHEAD if name in there],
            rows=there["rows"],
            owners=there["owners"],
            lengths=Lengths(prefix=there["prefix"], extend=there["extend"]),
            table_rows=there.get("table_rows"),
            known_lens=there.get("known_lens", there["prefix"]),
            strides=there.get("strides"),
            arriving=Lengths(prefix=there["there"], extend=there["from_there"]) if is_pending else None,
        )


class GroupLaunches:
    """The launches of HEAD and TAIL in one group, and the static buffers that they work on.

    HEAD finds each cached position's slot and verifies it in one launch, which leaves the slots for TAIL. Where TAIL
    verifies others than HEAD (what a ring still holds after the step; what a request only then has), both are planned
    at HEAD, because tables are read once a step.

    Args:
        context: of the canary.
        group: the group.
        inputs: of the forward.
        inner: see `SingleForwardManager`.
        checks_given: whether it is this group's write that holds rows and lengths against those that were given.
        handed: what the model hands over.
    """

    def __init__(
        self,
        context: CanaryContext,
        group: BufferGroup,
        inputs: ForwardInputs,
        *,
        handed: HandedOver,
        inner: bool,
        checks_given: bool,
    ) -> None:
        self.group = group
        self._context, self._inputs, self._inner, self._checks_given = context, inputs, inner, checks_given
        self._handed = handed
        self._capacities = context.capacities(group)
        requests, tokens = self._capacities.requests, self._capacities.tokens
        device = context.device
        self.copied_slots = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.table = torch.zeros(1, 1, dtype=torch.int32, device=device)
        self.write_plan = WritePlan.allocate(write_cap=requests, device=device)
        self.room = min(_FEW_ENTRIES, self._capacities.entries)
        self._resolved: ResolvedSlots | None = None
        self._plans: _TwoPlans | None = None
        # Numbers of status words: of the last plan, and of earlier ones in the same step.
        self.status, self.earlier_status = context.state.new_status(), context.state.new_status()
        self._status = context.state.status(self.status)
        # Scratch, allocated once: nothing is allocated between HEAD and TAIL.
        self._entry_offsets = torch.zeros(requests + 1, dtype=torch.int64, device=device)
        self._longest_stride = torch.zeros(1, dtype=torch.int64, device=device)
        self._tile_sums = torch.zeros(requests, max_tiles({"num_tokens": tokens}), dtype=torch.int64, device=device)
        self.made, self.by_plans = 0, False

    def prepare(self, *, needed: int, has_pending: bool, sizes_are_final: bool) -> None:
        """Make the buffers that launches need. Outside any graph.

        Args:
            needed: verify entries that the forward asks for.
            has_pending: see `Shape`.
            sizes_are_final: whether a graph keeps the addresses of buffers.
        """
        if not sizes_are_final:
            # A power of two: kernels are compiled apart for numbers that are no multiples of 16.
            wanted = 1 << (max(needed, 2 * self.room) - 1).bit_length()
            most = self._context.config.verify_capacity or wanted
            if needed > self.room < most:
                self.room = min(wanted, most)
        self.by_plans = self._plans_for(has_pending)
        if self.by_plans:
            if self._plans is None or self._plans.room < self.room:
                _let_go(self._plans)
                self._plans = _TwoPlans.allocate(
                    entries=self.room, requests=self._capacities.requests, device=self._context.device
                )
                self.made += 1
        elif self._resolved is None or self._resolved.entries.shape[0] < self.room:
            _let_go(self._resolved)
            self._resolved = ResolvedSlots.allocate(entry_cap=self.room, device=self._context.device)
            self.made += 1

    def finalize(self) -> None:
        """Make buffers for all that the engine's limits allow: graphs will keep their addresses."""
        self.room = max(self.room, self._capacities.entries)
        self.prepare(needed=0, has_pending=False, sizes_are_final=True)

    @property
    def most_entries(self) -> int:
        """Verify entries that a forward may ask for."""
        return self._capacities.entries

    @property
    def out_slots(self) -> torch.Tensor:
        """The slots that the forward writes, where launches read them."""
        in_place = self._inputs.in_place
        return self.copied_slots if in_place is None else in_place.out_slots[self.group.name]

    @property
    def memory(self) -> Hashable:
        """What tells whether launches would work on the same memory as before."""
        return self.made, layout_of(self.table)

    def verified(self, first: int, end: int | None) -> VerifiedEntries:
        """Return entries [first, end) of what the last HEAD verified; all from `first` on without `end`."""
        part = slice(first, end)
        if self.by_plans and self._plans is not None:
            plan = self._plans.head
            slots, positions, rows = plan.slots[part], plan.positions[part], plan.rows[part].long()
            return VerifiedEntries(
                slots=slots, positions=positions, rows=rows, valid=_valid(first, slots, plan.num_valid)
            )
        if self._resolved is None:
            raise RuntimeError(f"kv-canary: group {self.group.name}: HEAD must have run, got none yet")
        slots, _, positions, requests = self._resolved.unfold(first, end)
        rows = self.write_plan.rows[requests.clamp(0, len(self.write_plan.rows) - 1)]
        valid = _valid(first, slots, self._resolved.num_valid)
        return VerifiedEntries(slots=slots, positions=positions, rows=rows, valid=valid)

    @property
    def launches(self) -> Mapping[int, int]:
        """Launches of HEAD and TAIL, by tag."""
        return {self.group.head_tag: 1, self.group.tail_tag: 2}

    @property
    def takes_layout(self) -> bool:
        """Whether HEAD asks for no launch that lays its batch out where `open_step` has."""
        return not self.group.ring and self.group.lut is None

    def layout(self, there: Places) -> dict[str, Any]:
        """Return what `open_step` lays the batch out by whose numbers lie there, and where it leaves that."""
        n = len(there.rows)
        return {
            "rows": there.rows,
            "prefix_lens": there.lengths.prefix,
            "extend_lens": there.lengths.extend,
            **self._tables(n, there.table_rows),
            "strides": there.strides,
            "step": None if there.strides is None else there.step,
            "entry_offsets": self._entry_offsets[: n + 1],
            "longest_stride": self._longest_stride,
        }

    def head(self, shape: Shape, *, is_laid_out: bool = False) -> None:
        """Resolve the slots that the model is about to read, and verify their records and bytes.

        Args:
            shape: of the launches.
            is_laid_out: whether `open_step` has laid the batch out.
        """
        if self._plans_for(shape.has_pending):
            self._head_by_plans(shape)
        else:
            self._verify_prefixes(shape, is_laid_out=is_laid_out)
        if self.group.pool.head_records is not None:
            self._write(shape, at_tail=False)

    def write(self, shape: Shape) -> None:
        """Record the tokens that the model has written."""
        self._write(shape, at_tail=True)

    def seal(self, shape: Shape) -> None:
        """Seal the tokens that have been recorded."""
        if self.group.pool.seals is not None:
            slots = self.out_slots[: min(shape.tokens, len(self.out_slots))]
            seal_written(self._context, self.group, slots, step=self._inputs.step)
            if self._handed.is_on:
                # Of as many requests as there are launches for, the padding among them has no tokens.
                count = self.write_plan.offsets[shape.requests : shape.requests + 1]
                self._handed.check(self.group, slots, self._inputs.step, count=count)

    def tail(self, shape: Shape) -> None:
        """Verify the slots that HEAD resolved."""
        if self._plans_for(shape.has_pending):
            if self._plans is not None:
                self._verify(self._plans.tail, at_tail=True)
        else:
            self._verify_resolved(shape)

    def tails(self) -> torch.Tensor:
        """The chains that what this forward writes goes on from."""
        tails: Tails = self._context.state.tails[self.group.token_offset]
        return tails.scratch if self._inner else tails.chains

    def _plans_for(self, has_pending: bool) -> bool:
        """Whether TAIL verifies others than HEAD."""
        return self.group.ring or has_pending

    def _verify_prefixes(self, shape: Shape, *, is_laid_out: bool) -> None:
        context, inputs, n = self._context, self._inputs, shape.requests
        entry_offsets = self._entry_offsets[: n + 1]
        ops.verify_prefixes(
            rows=inputs.rows[:n],
            owners=inputs.owners[:n],
            prefix_lens=inputs.lengths.prefix[:n],
            extend_lens=inputs.lengths.extend[:n],
            **self._tables(n, inputs.table_rows),
            lut=self.group.lut,
            **self._tokens(n),
            strides=inputs.strides,
            step=inputs.step,
            endpoint=self._endpoint(at_tail=False),
            anchors=context.state.anchors,
            track_lifetime=context.config.track_lifetime,
            laid_out=entry_offsets if is_laid_out else None,
            laid_out_stride=self._longest_stride if is_laid_out else None,
            resolved=self._resolved,
            write_plan=self.write_plan,
            status=self._status,
            violations=context.state.violations,
            counters=context.state.counters,
            entry_offsets=entry_offsets,
            longest_stride=self._longest_stride,
            backend=context.backend,
        )

    def _verify_resolved(self, shape: Shape) -> None:
        context, n = self._context, shape.requests
        ops.verify_resolved(
            rows=self._inputs.rows[:n],
            **self._tokens(n),
            resolved=self._resolved,
            endpoint=self._endpoint(at_tail=True),
            anchors=context.state.anchors,
            step=self._inputs.step,
            # A request that ends while its last step runs may have its slots freed before TAIL.
            track_lifetime=False,
            violations=context.state.violations,
            counters=context.state.counters,
            backend=context.backend,
        )

    def _head_by_plans(self, shape: Shape) -> None:
        plans, inputs, n = self._plans, self._inputs, shape.requests
        if plans is None:
            raise RuntimeError(f"kv-canary: group {self.group.name}: plans must be made before HEAD, got none")
        ring = self.group.ring
        if not shape.has_pending:
            self._plan(n, plans.head, self.write_plan, self._status)
            self._plan(n, plans.tail, plans.spare_writes, plans.spare_status, after_write=True)
        else:
            # What is there already; as if all from there on were written, so that windows begin where they do.
            there = inputs.arriving
            self._plan(n, plans.head, plans.spare_writes, plans.spare_status, lengths=there, after_write=True)
            self._plan(n, plans.tail, self.write_plan, self._status, after_write=ring)
            # The seed's record is still that of another token.
            self.write_plan.seed_slots[:n].masked_fill_(inputs.is_pending[:n], HEAD_OF_CHAIN)
        self._verify(plans.head, at_tail=False)

    def _plan(
        self,
        n: int,
        verify_plan: VerifyPlan,
        write_plan: WritePlan,
        status: torch.Tensor,
        *,
        lengths: Lengths | None = None,
        after_write: bool = False,
    ) -> None:
        context, inputs = self._context, self._inputs
        lengths = lengths or inputs.lengths
        ops.plan(
            rows=inputs.rows[:n],
            owners=inputs.owners[:n],
            prefix_lens=lengths.prefix[:n],
            extend_lens=lengths.extend[:n],
            **self._tables(n, inputs.table_rows),
            after_write=after_write,
            lut=self.group.lut,
            **self._tokens(n),
            strides=inputs.strides,
            step=None if inputs.strides is None else inputs.step,
            verify_plan=verify_plan,
            write_plan=write_plan,
            status=status,
            entry_offsets=self._entry_offsets[: n + 1],
            backend=context.backend,
        )

    def _verify(self, plan: VerifyPlan, *, at_tail: bool) -> None:
        context = self._context
        ops.verify(
            verify_plan=plan,
            endpoint=self._endpoint(at_tail=at_tail),
            anchors=context.state.anchors,
            step=self._inputs.step,
            # As in `_verify_resolved`.
            track_lifetime=context.config.track_lifetime and not at_tail,
            violations=context.state.violations,
            counters=context.state.counters,
            backend=context.backend,
        )

    def _write(self, shape: Shape, *, at_tail: bool) -> None:
        context, inputs = self._context, self._inputs
        tag = self.group.tail_tag if at_tail else self.group.head_tag
        # Tensors of the model's may be shorter than a rounded shape, and hold all tokens.
        t = min(shape.tokens, len(self.out_slots))
        input_ids, positions, rows, lens = inputs.of_model
        if rows is None and lens is not None:
            # Nobody says them.
            known = min(len(inputs.rows), len(lens))
            rows, lens = inputs.rows[:known], lens[:known]
        is_given = shape.is_given and at_tail and self._checks_given
        ops.write(
            write_plan=self.write_plan.first(shape.requests),
            input_ids=input_ids[:t],
            positions=positions[:t],
            out_slots=self.out_slots[:t],
            endpoint=context.endpoint(self.group, tag, with_bytes=True),
            tails=self.tails(),
            step=inputs.step,
            check_positions=inputs.check_positions,
            expected_input_ids=inputs.expected[:t] if shape.expects_tokens else None,
            given_rows=rows if is_given else None,
            given_lens=lens if is_given else None,
            track_lifetime=context.config.track_lifetime,
            ring=self.group.ring,
            violations=context.state.violations,
            # HEAD's own writes are counted apart: what HEAD verified is what its tag counts.
            counters=context.state.counters if at_tail else context.state.head_writes,
            tile_sums=self._tile_sums[: shape.requests],
            slot_marks=context.slot_marks(self.group.pool),
            backend=context.backend,
        )

    def _endpoint(self, *, at_tail: bool) -> Endpoint:
        context, group = self._context, self.group
        tag = group.tail_tag if at_tail else group.head_tag
        with_bytes = not at_tail or context.config.verify_bytes_at_tail or group.pool.head_records is not None
        return context.endpoint(group, tag, with_bytes=with_bytes)

    def _tables(self, n: int, table_rows: torch.Tensor | None) -> dict[str, Any]:
        """Where cached positions lie, and which are read, as ops take it."""
        return {
            "req_to_token": self.table,
            "table_rows": None if table_rows is None else table_rows[:n],
            "page_size": self.group.page_size,
            "window": self.group.window,
        }

    def _tokens(self, n: int) -> dict[str, Any]:
        """The tokens to expect, as ops take them."""
        table = self._context.state.token_pool
        return {
            "expected_tokens": table,
            "expected_lens": None if table is None else self._inputs.known_lens[:n],
            "token_offset": self.group.token_offset,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class _TwoPlans:
    """A plan for HEAD and one for TAIL; the segments that one of them makes are not used."""

    head: VerifyPlan
    tail: VerifyPlan
    spare_writes: WritePlan
    spare_status: torch.Tensor

    @property
    def room(self) -> int:
        return self.head.slots.shape[0]

    @classmethod
    def allocate(cls, *, entries: int, requests: int, device: torch.device) -> _TwoPlans:
        head, tail = (VerifyPlan.allocate(verify_cap=entries, device=device) for _ in range(2))
        spare_writes = WritePlan.allocate(write_cap=requests, device=device)
        spare_status = torch.zeros(1, dtype=torch.int32, device=device)
        return cls(head=head, tail=tail, spare_writes=spare_writes, spare_status=spare_status)


def _valid(first: int, entries: torch.Tensor, num_valid: torch.Tensor) -> torch.Tensor:
    """Return which of `entries`, the first of which has the number `first`, count."""
    return torch.arange(first, first + len(entries), device=entries.device) < num_valid


def _let_go(structure: Any) -> None:
    """Let the memory of a structure of tensors go, if there is one."""
    if isinstance(structure, torch.Tensor):
        let_go(structure)
    elif structure is not None:
        for field in dataclasses.fields(structure):
            _let_go(getattr(structure, field.name))
