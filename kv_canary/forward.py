"""One forward: what the adapter says about it, and the phases around the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch

from kv_canary import ops
from kv_canary.capacities import CanaryLaunchCapacities
from kv_canary.constants import HEAD_OF_CHAIN
from kv_canary.errors import must_be
from kv_canary.host import fill, let_go
from kv_canary.pools import BufferGroup
from kv_canary.specs.structures import VerifyPlan, WritePlan
from kv_canary.specs.write import max_tiles

if TYPE_CHECKING:
    from kv_canary.manager import CanaryManager
    from kv_canary.state import Tails


@dataclass(frozen=True, kw_only=True)
class ForwardRequest:
    """One request of a forward.

    Args:
        request_id: how reports call it.
        row: its row in the tables, in [1, max_rows).
        owner: its serial number, stamped on the records it writes.
        prefix_len: tokens it has in the cache before this forward, those `pending` included.
        extend_len: tokens this forward writes for it.
        tokens: returns the request's OWN tokens [start, end), from its prompt and output, never from the engine's
            input buffers: they are what the cache is held against.
        pending: how many of the prefix's last tokens another request of this very forward produces. They are verified
            behind the model only, where they are first there to be read; never with a captured graph.
        identity: a 64-bit word of what else its KV depends on (adapter, image, cache salt, weights), from a stable
            hash; 0 for nothing. The same tokens under another identity are another chain.
        discarded: says, once the forward is over, whether the engine has thrown this request's result away; what such
            a row has found is counted and not reported.
    """

    request_id: str
    row: int
    owner: int
    prefix_len: int
    extend_len: int
    tokens: Callable[[int, int], Sequence[int]]
    pending: int = 0
    identity: int = 0
    discarded: Callable[[], bool] | None = None


def relied_on(request: ForwardRequest, group: BufferGroup) -> int:
    """Return how many cached positions a forward of `request` is about to read in `group`."""
    return max(0, _read(request, group) - request.pending)


@dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """One forward, as the engine is about to run it. The flat tensors may be on any device, int32 or int64.

    Args:
        requests: in the order of the flat inputs.
        input_ids: [tokens] the model is given; None where they are known at HEAD only.
        positions: [tokens] the model is given; None likewise.
        out_slots: [tokens] per group name: the slot each token's KV goes to, 0 where it is discarded.
        tables: int32 [rows, length] per group name: the slot of each cached position of a row.
        expected_input_ids: [tokens] that the model should be given, for WRITE_TOKEN; -1 where that is not known. None:
            the requests' own tokens where `CanaryConfig.check_inputs` is on, else not checked.
        check_positions: whether positions must continue the prefix; not so in a warm-up.
    """

    requests: Sequence[ForwardRequest]
    input_ids: torch.Tensor | None
    positions: torch.Tensor | None
    out_slots: Mapping[str, torch.Tensor]
    tables: Mapping[str, torch.Tensor]
    expected_input_ids: torch.Tensor | None = None
    check_positions: bool = True


@dataclass(frozen=True, kw_only=True, eq=False)
class CapturedForward:
    """The shape of a forward whose HEAD and TAIL were captured in a CUDA graph; see `SingleForwardManager.capturing`.

    Args:
        requests, tokens: what it was captured for; a batch may have fewer.
        tables: address, shape and strides of each group's table, by name.
        expects_tokens: whether the input ids to expect are among its inputs.
    """

    requests: int
    tokens: int
    tables: Mapping[str, tuple[int, torch.Size, tuple[int, ...]]]
    expects_tokens: bool


class Phase(Enum):
    """Where a forward stands."""

    IDLE = "idle"
    BEGUN = "begun"
    HEAD = "head"
    TAIL = "tail"


# Rows of a forward's static host inputs.
_ROWS, _OWNERS, _PREFIX_LENS, _EXTEND_LENS, _KNOWN_LENS, _STRIDES, _THERE_LENS, _FROM_THERE = range(8)


class _GroupBuffers:
    """One group's static inputs and plans within a forward."""

    def __init__(self, group: BufferGroup, *, capacities: CanaryLaunchCapacities, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.capacities = capacities
        requests, tokens = capacities.requests, capacities.tokens
        self.out_slots = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.write_plan = WritePlan.allocate(write_cap=requests, device=device)
        self.tail_plan: VerifyPlan | None = None
        self.spare_writes: WritePlan | None = None
        self.status, self.spare_status = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
        self.table = torch.zeros(1, 1, dtype=torch.int32, device=device)
        # Scratch, allocated once: nothing is allocated between HEAD and TAIL.
        self.entry_offsets = torch.zeros(requests + 1, dtype=torch.int64, device=device)
        tiles = max_tiles({"num_tokens": tokens})
        self.tile_sums = torch.zeros(requests, tiles, dtype=torch.int64, device=device)
        self.verify_plan = VerifyPlan.allocate(verify_cap=min(1024, capacities.entries), device=device)
        if group.ring:
            self.plan_twice()

    def reserve(self, entries: int) -> None:
        """Make room for `entries` verify entries."""
        _let_go(self.verify_plan)
        self.verify_plan = VerifyPlan.allocate(verify_cap=entries, device=self.device)
        if self.tail_plan is not None:
            _let_go(self.tail_plan)
            self.tail_plan = VerifyPlan.allocate(verify_cap=entries, device=self.device)

    def plan_twice(self) -> None:
        """Make room for a plan of TAIL's own: what a ring still holds after the step, what a request only then has.

        It is made at HEAD too: tables are read once a step. One of the two plans' segments are not used.
        """
        if self.spare_writes is None:
            self.tail_plan = VerifyPlan.allocate(verify_cap=self.room, device=self.device)
            self.spare_writes = WritePlan.allocate(write_cap=self.capacities.requests, device=self.device)

    @property
    def room(self) -> int:
        return self.verify_plan.slots.shape[0]


class SingleForwardManager:
    """The canary around one model forward: `begin`, `head`, the model, `tail`, `end`, in that order.

    `around(batch)` does all of it. A forward that raised is given up with `abort`, and the next one may begin. Where
    HEAD and TAIL were captured in a CUDA graph, the replay of the graph stands for both.

    Args:
        manager: the canary.
        name: of the forward; a step may have several of different names.
        groups: those that it reads and writes.
        inner: whether it runs inside a step on tokens that may yet be rejected, as a draft model's forwards do: its
            tails then advance over what it writes, on the device, and are given up at the end of the step.
    """

    def __init__(
        self, manager: CanaryManager, *, name: str, groups: Sequence[BufferGroup], inner: bool = False
    ) -> None:
        self.name, self.inner = name, inner
        self._manager = manager
        self._phase = Phase.IDLE
        self._captured: CapturedForward | None = None
        self._batch: ForwardBatch | None = None
        device, limits = manager.device, manager.limits
        n, t = limits.max_requests, limits.max_tokens
        self._numbers = torch.zeros(8, n, dtype=torch.int64, device=device)
        self._is_pending = torch.zeros(n, dtype=torch.bool, device=device)
        # Of the tokens: what the model is given, what of that the host knows, and what is expected of it.
        self._input_ids, self._positions, self._known, self._expected = (
            torch.zeros(t, dtype=torch.int64, device=device) for _ in range(4)
        )
        self._check_positions = torch.ones(1, dtype=torch.int32, device=device)
        self._status = torch.zeros(1, dtype=torch.int32, device=device)
        self.groups = tuple(groups)
        self._groups = [_GroupBuffers(g, capacities=manager.capacities(g), device=device) for g in groups]
        self._requests = self._tokens = 0
        self._expects_tokens = self._has_pending = False
        # A captured graph keeps the addresses of the plans.
        self._sizes_are_final = False

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

    @contextmanager
    def capturing(
        self, *, requests: int, tokens: int, tables: Mapping[str, torch.Tensor], expects_tokens: bool | None = None
    ) -> Iterator[CapturedForward]:
        """Prepare for a capture: inside the block call `head`, the model and `tail` under `torch.cuda.graph`.

        Buffers get their final sizes and never move again. HEAD and TAIL run once on nothing first, so that all kernels
        are compiled. The value is for `begin`, once per replay.

        Args:
            requests, tokens: the largest batch that the graph serves.
            tables: the engine's tables, by group name, where they will lie at every replay.
            expects_tokens: whether batches will say which input ids to expect; None: as `CanaryConfig.check_inputs` is.
        """
        self._expect(Phase.IDLE, "capturing")
        self._manager.expect_idle(f"forward {self.name}: capturing")
        limits = self._manager.limits
        for argument, value, most in (
            ("requests", requests, limits.max_requests),
            ("tokens", tokens, limits.max_tokens),
        ):
            if not 0 < value <= most:
                raise ValueError(must_be(f"forward {self.name}", argument, f"in [1, {most}]", str(value)))
        self._check_names(tables, tables)
        expects_tokens = self._manager.config.check_inputs if expects_tokens is None else expects_tokens
        self._requests, self._tokens, self._expects_tokens = requests, tokens, expects_tokens
        self._has_pending, self._sizes_are_final = False, True
        self._numbers.zero_()
        for buffers in self._groups:
            buffers.table = tables[buffers.group.name]
            buffers.out_slots.zero_()
            if buffers.room < buffers.capacities.entries:
                buffers.reserve(buffers.capacities.entries)
        self._manager.begin_capture(self)
        captured = CapturedForward(
            requests=requests,
            tokens=tokens,
            tables={name: _layout(table) for name, table in tables.items()},
            expects_tokens=expects_tokens,
        )
        try:
            self._phase = Phase.BEGUN
            self.head()
            self.tail()
            self._phase = Phase.BEGUN
            yield captured
            self._expect(Phase.TAIL, "the end of capturing")
        finally:
            self._phase = Phase.IDLE
            self._manager.end_capture()

    def begin(self, batch: ForwardBatch, *, captured: CapturedForward | None = None) -> None:
        """Drain the step before, bring the tails up to the prefix and copy the inputs. Outside any graph.

        Args:
            batch: what the model is about to run.
            captured: what `capturing` gave, where the graph is about to be replayed.

        Raises:
            RuntimeError: the last forward, or another one of the manager, was not ended.
            ValueError: the batch contradicts itself, the limits or the captured shape.
            CanaryViolationError: in raise mode, for what the step before found.
        """
        self._expect(Phase.IDLE, "begin")
        self._manager.expect_idle(f"forward {self.name}: begin")
        self._check(batch, captured)
        try:
            strides = self._manager.begin_forward(self, batch.requests)
            self._manager.perturb(batch)
            self._prepare(batch, captured, strides=strides)
        except BaseException:
            self._manager.abort_forward(self)
            raise
        self._captured, self._batch = captured, batch
        self._phase = Phase.BEGUN

    def _prepare(self, batch: ForwardBatch, captured: CapturedForward | None, *, strides: list[int]) -> None:
        """Copy everything that HEAD and TAIL read from the host."""
        manager, requests = self._manager, batch.requests
        n, t = len(requests), sum(r.extend_len for r in requests)
        fill(
            self._numbers,
            [r.row for r in requests],
            [r.owner for r in requests],
            [r.prefix_len for r in requests],
            [r.extend_len for r in requests],
            manager.state.known_lens(requests),
            strides,
            [r.prefix_len - r.pending for r in requests],
            [r.pending + 1 for r in requests],
        )
        self._has_pending = any(r.pending for r in requests)
        if self._has_pending:
            torch.ne(self._numbers[_PREFIX_LENS], self._numbers[_THERE_LENS], out=self._is_pending)
        self._check_positions.fill_(int(batch.check_positions))
        self._requests, self._tokens = (n, t) if captured is None else (captured.requests, captured.tokens)
        expected = batch.expected_input_ids
        if expected is None and manager.config.check_inputs:
            expected = manager.oracle.expected(requests, offset=self.groups[0].token_offset)
        self._expects_tokens = expected is not None
        self._copy_inputs(batch.input_ids, batch.positions)
        if expected is not None:
            _copy(self._known[: self._tokens], expected)
        for buffers in self._groups:
            name = buffers.group.name
            _copy(buffers.out_slots[: self._tokens], batch.out_slots[name])
            if captured is None:
                buffers.table = batch.tables[name]
            if self._has_pending:
                buffers.plan_twice()
            if not self._sizes_are_final:
                needed = sum(_read(r, buffers.group) for r in requests)
                most = manager.config.verify_capacity or max(needed, 2 * buffers.room)
                if needed > buffers.room < most:
                    buffers.reserve(min(max(needed, 2 * buffers.room), most))

    def head(self, *, input_ids: torch.Tensor | None = None, positions: torch.Tensor | None = None) -> None:
        """Resolve the slots that the model is about to read, and verify their records and bytes.

        Args:
            input_ids, positions: [tokens] on the device, where `begin` was not given them.
        """
        self._expect(Phase.BEGUN, "head")
        self._copy_inputs(input_ids, positions)
        if self._expects_tokens:
            # What nobody knows is as it should be.
            torch.where(self._known < 0, self._input_ids, self._known, out=self._expected)
        for buffers in self._groups:
            group = buffers.group
            self._plan_head_and_tail(buffers)
            self._verify(buffers.verify_plan, group, at_tail=False)
            if group.pool.head_records is not None:
                self._write(buffers, at_tail=False)
        self._phase = Phase.HEAD

    def tail(self, *, input_ids: torch.Tensor | None = None) -> None:
        """Record the tokens that the model has written, then verify the slots that HEAD resolved.

        Args:
            input_ids: [tokens] on the device, where the model was given others than HEAD.
        """
        self._expect(Phase.HEAD, "tail")
        self._copy_inputs(input_ids, None)
        for buffers in self._groups:
            self._write(buffers, at_tail=True)
        for buffers in self._groups:
            own = buffers.tail_plan if buffers.group.ring or self._has_pending else None
            self._verify(own or buffers.verify_plan, buffers.group, at_tail=True)
        if self.inner:
            self._advance_scratch()
        self._phase = Phase.TAIL

    def end(self) -> None:
        """Hand the step's findings over, to be read one step later. Outside any graph."""
        # A replay runs HEAD and TAIL where the host does not see it; their launches are counted on the device.
        self._expect(Phase.TAIL if self._captured is None else Phase.BEGUN, "end")
        self._phase = Phase.IDLE
        self._manager.end_forward(self, self._batch)

    def abort(self) -> None:
        """Give up a forward that raised; what it had found so far is kept."""
        begun, self._phase = self._phase is not Phase.IDLE, Phase.IDLE
        if not begun:
            return
        try:
            for buffers in self._groups:
                self._manager.doubt(buffers.group.pool, buffers.out_slots[: self._tokens])
                buffers.group.pool.take_back_head(buffers.out_slots[: self._tokens])
        finally:
            self._manager.abort_forward(self)

    @property
    def statuses(self) -> list[tuple[str, torch.Tensor]]:
        """Status words of the forward's plans, with the names of their groups; the next forward assigns them anew."""
        return [(b.group.name, b.status) for b in self._groups]

    @property
    def manager(self) -> CanaryManager:
        """The canary that it belongs to."""
        return self._manager

    @property
    def plans(self) -> dict[str, VerifyPlan]:
        """What HEAD verified last, by group name: static buffers on the device, which its next HEAD fills anew."""
        return {b.group.name: b.verify_plan for b in self._groups}

    @property
    def write_plans(self) -> dict[str, WritePlan]:
        """The segments that HEAD planned last, by group name: static buffers, as those of `plans`."""
        return {b.group.name: b.write_plan for b in self._groups}

    @property
    def launches(self) -> dict[int, int]:
        """Launches of HEAD and TAIL together, by tag."""
        counts: dict[int, int] = {}
        for buffers in self._groups:
            group = buffers.group
            for tag, count in ((group.head_tag, 1), (group.tail_tag, 2)):
                counts[tag] = counts.get(tag, 0) + count
        return counts

    def _copy_inputs(self, input_ids: torch.Tensor | None, positions: torch.Tensor | None) -> None:
        for buffer, tensor in ((self._input_ids, input_ids), (self._positions, positions)):
            if tensor is not None:
                _copy(buffer[: self._tokens], tensor)

    def _tails(self, group: BufferGroup) -> torch.Tensor:
        tails: Tails = self._manager.state.tails[group.token_offset]
        return tails.scratch if self.inner else tails.chains

    def _plan_head_and_tail(self, buffers: _GroupBuffers) -> None:
        head = (buffers.verify_plan, buffers.write_plan, buffers.status)
        if buffers.tail_plan is None or buffers.spare_writes is None or not (buffers.group.ring or self._has_pending):
            self._plan(buffers, *head)
        elif not self._has_pending:
            self._plan(buffers, *head)
            self._plan(buffers, buffers.tail_plan, buffers.spare_writes, buffers.spare_status, after_write=True)
        else:
            # What is there already; as if all from there on were written, so that windows begin where they do.
            lens = (_THERE_LENS, _FROM_THERE)
            self._plan(
                buffers, buffers.verify_plan, buffers.spare_writes, buffers.spare_status, lens=lens, after_write=True
            )
            ring = buffers.group.ring
            self._plan(buffers, buffers.tail_plan, buffers.write_plan, buffers.status, after_write=ring)
            # The seed's record is still that of another token.
            n = self._requests
            buffers.write_plan.seed_slots[:n].masked_fill_(self._is_pending[:n], HEAD_OF_CHAIN)

    def _plan(
        self,
        buffers: _GroupBuffers,
        verify_plan: VerifyPlan,
        write_plan: WritePlan,
        status: torch.Tensor,
        *,
        lens: tuple[int, int] = (_PREFIX_LENS, _EXTEND_LENS),
        after_write: bool = False,
    ) -> None:
        manager, n = self._manager, self._requests
        tokens = manager.state.token_pool
        ops.plan(
            rows=self._numbers[_ROWS, :n],
            owners=self._numbers[_OWNERS, :n],
            prefix_lens=self._numbers[lens[0], :n],
            extend_lens=self._numbers[lens[1], :n],
            req_to_token=buffers.table,
            window=buffers.group.window,
            after_write=after_write,
            lut=buffers.group.lut,
            expected_tokens=tokens,
            expected_lens=None if tokens is None else self._numbers[_KNOWN_LENS, :n],
            token_offset=buffers.group.token_offset,
            strides=self._numbers[_STRIDES, :n] if manager.budget.may_skip else None,
            step=manager.state.step if manager.budget.may_skip else None,
            verify_plan=verify_plan,
            write_plan=write_plan,
            status=status,
            entry_offsets=buffers.entry_offsets[: n + 1],
            backend=manager.backend,
        )

    def _write(self, buffers: _GroupBuffers, *, at_tail: bool) -> None:
        manager, group, t = self._manager, buffers.group, self._tokens
        tag = group.tail_tag if at_tail else group.head_tag
        ops.write(
            write_plan=buffers.write_plan,
            input_ids=self._input_ids[:t],
            positions=self._positions[:t],
            out_slots=buffers.out_slots[:t],
            endpoint=manager.endpoint(group, tag, with_bytes=True),
            tails=self._tails(group),
            step=manager.state.step,
            check_positions=self._check_positions,
            expected_input_ids=self._expected[:t] if self._expects_tokens else None,
            track_lifetime=manager.config.track_lifetime,
            violations=manager.state.violations,
            # HEAD's own writes are counted apart: what HEAD verified is what its tag counts.
            counters=manager.state.counters if at_tail else manager.state.head_writes,
            tile_sums=buffers.tile_sums,
            backend=manager.backend,
        )

    def _verify(self, plan: VerifyPlan, group: BufferGroup, *, at_tail: bool) -> None:
        manager = self._manager
        tag = group.tail_tag if at_tail else group.head_tag
        with_bytes = not at_tail or manager.config.verify_bytes_at_tail or group.pool.head_records is not None
        ops.verify(
            verify_plan=plan,
            endpoint=manager.endpoint(group, tag, with_bytes=with_bytes),
            anchors=manager.state.anchors,
            step=manager.state.step,
            # A request that ends while its last step runs may have its slots freed before TAIL.
            track_lifetime=manager.config.track_lifetime and not at_tail,
            violations=manager.state.violations,
            counters=manager.state.counters,
            backend=manager.backend,
        )

    def _advance_scratch(self) -> None:
        """Let the tails of the requests go on over what this forward wrote, for the next one inside the step."""
        manager, n = self._manager, self._requests
        for offset in {b.group.token_offset for b in self._groups}:
            buffers = next(b for b in self._groups if b.group.token_offset == offset)
            ops.chain_tails(
                flat=self._input_ids[: self._tokens],
                offsets=buffers.write_plan.offsets[: n + 1],
                rows=self._numbers[_ROWS, :n],
                starts=self._numbers[_PREFIX_LENS, :n],
                anchors=manager.state.anchors,
                tails=manager.state.tails[offset].scratch,
                status=self._status,
                backend=manager.backend,
            )

    def _check(self, batch: ForwardBatch, captured: CapturedForward | None) -> None:
        limits = self._manager.limits
        part = f"forward {self.name}"
        most = (limits.max_requests, limits.max_tokens) if captured is None else (captured.requests, captured.tokens)
        if len(batch.requests) > most[0]:
            raise ValueError(must_be(part, "requests", f"at most {most[0]} requests", str(len(batch.requests))))
        tokens = sum(r.extend_len for r in batch.requests)
        if tokens > most[1]:
            raise ValueError(must_be(part, "requests", f"at most {most[1]} new tokens", str(tokens)))
        self._check_names(batch.out_slots, batch.tables)
        if captured is not None:
            for name, layout in captured.tables.items():
                if _layout(batch.tables[name]) != layout:
                    raise ValueError(must_be(part, f"tables[{name}]", "where it was captured", "another tensor"))
            expects = batch.expected_input_ids is not None or self._manager.config.check_inputs
            if captured.expects_tokens != expects:
                expected = "given" if captured.expects_tokens else "left out"
                raise ValueError(must_be(part, "expected_input_ids", f"{expected}, as captured", "the other"))
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
                raise ValueError(must_be(part, argument, expected, str(list(tensor.shape))))
            if tensor.dtype not in (torch.int32, torch.int64):
                raise TypeError(must_be(part, argument, "of dtype int32 or int64", str(tensor.dtype)))
        rows = [r.row for r in batch.requests]
        if len(set(rows)) != len(rows):
            raise ValueError(must_be(part, "rows", "different for every request", str(rows)))
        for r in batch.requests:
            if not 0 < r.row < limits.max_rows:
                raise ValueError(must_be(part, f"row of {r.request_id}", f"in [1, {limits.max_rows})", str(r.row)))
            for argument, length in (("prefix_len", r.prefix_len), ("extend_len", r.extend_len)):
                if length < 0:
                    raise ValueError(must_be(part, f"{argument} of {r.request_id}", "at least 0", str(length)))
            most_pending = r.prefix_len if captured is None else 0
            if not 0 <= r.pending <= most_pending:
                expected = f"in [0, {most_pending}]"
                raise ValueError(must_be(part, f"pending of {r.request_id}", expected, str(r.pending)))

    def _check_names(self, out_slots: Mapping[str, object], tables: Mapping[str, object]) -> None:
        names = {b.group.name for b in self._groups}
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


def _read(request: ForwardRequest, group: BufferGroup) -> int:
    """Return how many positions of its prefix a forward of `request` reads in `group`."""
    return min(request.prefix_len, group.window) if group.window else request.prefix_len


def _layout(table: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return table.data_ptr(), table.shape, table.stride()


def _copy(buffer: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy `tensor` into the front of `buffer` and zero the rest, without waiting for the device."""
    n = min(len(tensor), len(buffer))
    buffer[:n].copy_(tensor[:n], non_blocking=True)
    if n < len(buffer):
        buffer[n:].zero_()


def _let_go(plan: VerifyPlan) -> None:
    let_go(*(getattr(plan, field.name) for field in dataclasses.fields(plan)))
