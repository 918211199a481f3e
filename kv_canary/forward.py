"""One forward: what the adapter says about it, and the phases around the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch

from kv_canary import ops
from kv_canary.errors import must_be
from kv_canary.pools import BufferGroup
from kv_canary.specs.structures import VerifyPlan, WritePlan
from kv_canary.specs.write import max_tiles

if TYPE_CHECKING:
    from kv_canary.manager import CanaryManager


@dataclass(frozen=True, kw_only=True)
class ForwardRequest:
    """One request of a forward.

    Args:
        request_id: how reports call it.
        row: its row in the tables, in [1, max_rows).
        owner: its serial number, stamped on the records it writes.
        prefix_len: tokens it has in the cache before this forward.
        extend_len: tokens this forward writes for it.
        tokens: returns the request's OWN tokens [start, end), from its prompt and output, never from the engine's
            input buffers: they are what the cache is held against.
    """

    request_id: str
    row: int
    owner: int
    prefix_len: int
    extend_len: int
    tokens: Callable[[int, int], Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """One forward, as the engine is about to run it. The flat tensors may be on any device, int32 or int64.

    Args:
        requests: in the order of the flat inputs.
        input_ids: [tokens] the model is given.
        positions: [tokens] the model is given.
        out_slots: [tokens] per group name: the slot each token's KV goes to, 0 where it is discarded.
        tables: int32 [rows, length] per group name: the slot of each cached position of a row.
    """

    requests: Sequence[ForwardRequest]
    input_ids: torch.Tensor
    positions: torch.Tensor
    out_slots: Mapping[str, torch.Tensor]
    tables: Mapping[str, torch.Tensor]


class Phase(Enum):
    """Where a forward stands."""

    IDLE = "idle"
    BEGUN = "begun"
    HEAD = "head"
    TAIL = "tail"


class _GroupBuffers:
    """One group's static inputs and plans within a forward."""

    def __init__(self, group: BufferGroup, *, max_requests: int, max_tokens: int, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.out_slots = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.write_plan = WritePlan.allocate(write_cap=max_requests, device=device)
        self.spare_writes = WritePlan.allocate(write_cap=max_requests, device=device) if group.ring else None
        self.status, self.spare_status = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
        self.table = torch.zeros(1, 1, dtype=torch.int32, device=device)
        # Scratch, allocated once: nothing is allocated between HEAD and TAIL.
        self.entry_offsets = torch.zeros(max_requests + 1, dtype=torch.int64, device=device)
        tiles = max_tiles({"num_tokens": max_tokens})
        self.tile_sums = torch.zeros(max_requests, tiles, dtype=torch.int64, device=device)
        self.reserve(1024)

    def reserve(self, entries: int) -> None:
        """Make room for `entries` verify entries."""
        self.verify_plan = VerifyPlan.allocate(verify_cap=entries, device=self.device)
        # What a ring still holds after the step is planned at HEAD too: tables are read once a step. That second
        # plan's segments and status say nothing new.
        self.tail_plan = VerifyPlan.allocate(verify_cap=entries, device=self.device) if self.group.ring else None

    @property
    def capacity(self) -> int:
        return self.verify_plan.slots.shape[0]


class SingleForwardManager:
    """The canary around one model forward: `begin`, `head`, the model, `tail`, `end`, in that order.

    `around(batch)` does all of it. A forward that raised is given up with `abort`, and the next one may begin.
    """

    def __init__(self, manager: CanaryManager, *, name: str) -> None:
        self.name = name
        self._manager = manager
        self._phase = Phase.IDLE
        device, limits = manager.device, manager.limits
        n, t = limits.max_requests, limits.max_tokens
        self._rows, self._owners, self._prefix_lens, self._extend_lens = (
            torch.zeros(n, dtype=torch.int64, device=device) for _ in range(4)
        )
        self._input_ids, self._positions = (torch.zeros(t, dtype=torch.int64, device=device) for _ in range(2))
        self._check_positions = torch.ones(1, dtype=torch.int32, device=device)
        self._groups = [_GroupBuffers(g, max_requests=n, max_tokens=t, device=device) for g in manager.groups]
        self._requests = self._tokens = 0

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

    def begin(self, batch: ForwardBatch) -> None:
        """Drain the step before, bring the tails up to the prefix and copy the inputs. Outside any graph.

        Raises:
            RuntimeError: the last forward was not ended.
            ValueError: the batch contradicts itself or the limits.
            CanaryViolationError: in raise mode, for what the step before found.
        """
        self._expect(Phase.IDLE, "begin")
        self._check(batch)
        manager = self._manager
        manager.begin_step(batch.requests)
        n, t = len(batch.requests), len(batch.input_ids)
        self._requests, self._tokens = n, t
        for buffer, values in (
            (self._rows, [r.row for r in batch.requests]),
            (self._owners, [r.owner for r in batch.requests]),
            (self._prefix_lens, [r.prefix_len for r in batch.requests]),
            (self._extend_lens, [r.extend_len for r in batch.requests]),
        ):
            buffer[:n].copy_(torch.tensor(values, dtype=torch.int64), non_blocking=True)
            buffer[n:].zero_()
        self._input_ids[:t].copy_(batch.input_ids, non_blocking=True)
        self._positions[:t].copy_(batch.positions, non_blocking=True)
        needed = sum(r.prefix_len for r in batch.requests)
        for buffers in self._groups:
            name = buffers.group.name
            buffers.out_slots[:t].copy_(batch.out_slots[name], non_blocking=True)
            buffers.table = batch.tables[name]
            if needed > buffers.capacity:
                buffers.reserve(max(needed, 2 * buffers.capacity))
        self._phase = Phase.BEGUN

    def head(self) -> None:
        """Resolve the slots that the model is about to read, and verify their records and bytes."""
        self._expect(Phase.BEGUN, "head")
        for buffers in self._groups:
            group = buffers.group
            self._plan(buffers, buffers.verify_plan, buffers.write_plan, buffers.status, after_write=False)
            if buffers.tail_plan is not None and buffers.spare_writes is not None:
                self._plan(buffers, buffers.tail_plan, buffers.spare_writes, buffers.spare_status, after_write=True)
            self._verify(buffers.verify_plan, group, at_tail=False)
        self._phase = Phase.HEAD

    def tail(self) -> None:
        """Record the tokens that the model has written, then verify the slots that HEAD resolved."""
        self._expect(Phase.HEAD, "tail")
        manager, t = self._manager, self._tokens
        for buffers in self._groups:
            group = buffers.group
            ops.write(
                write_plan=buffers.write_plan,
                input_ids=self._input_ids[:t],
                positions=self._positions[:t],
                out_slots=buffers.out_slots[:t],
                endpoint=manager.endpoint(group, group.tail_tag, with_bytes=True),
                tails=manager.state.tails,
                step=manager.state.step,
                check_positions=self._check_positions,
                track_lifetime=manager.config.track_lifetime,
                violations=manager.state.violations,
                counters=manager.state.counters,
                tile_sums=buffers.tile_sums,
                backend=manager.backend,
            )
        for buffers in self._groups:
            self._verify(buffers.tail_plan or buffers.verify_plan, buffers.group, at_tail=True)
        self._phase = Phase.TAIL

    def end(self) -> None:
        """Hand the step's findings over, to be read one step later. Outside any graph."""
        self._expect(Phase.TAIL, "end")
        self._phase = Phase.IDLE
        self._manager.end_step([(b.group, b.status) for b in self._groups])

    def abort(self) -> None:
        """Give up a forward that raised; what it had found so far is kept."""
        self._phase = Phase.IDLE

    def _plan(
        self,
        buffers: _GroupBuffers,
        verify_plan: VerifyPlan,
        write_plan: WritePlan,
        status: torch.Tensor,
        *,
        after_write: bool,
    ) -> None:
        manager, n = self._manager, self._requests
        tokens = manager.state.token_pool
        ops.plan(
            rows=self._rows[:n],
            owners=self._owners[:n],
            prefix_lens=self._prefix_lens[:n],
            extend_lens=self._extend_lens[:n],
            req_to_token=buffers.table,
            window=buffers.group.window,
            after_write=after_write,
            lut=buffers.group.lut,
            expected_tokens=tokens,
            expected_lens=None if tokens is None else self._prefix_lens[:n],
            verify_plan=verify_plan,
            write_plan=write_plan,
            status=status,
            entry_offsets=buffers.entry_offsets[: n + 1],
            backend=manager.backend,
        )

    def _verify(self, plan: VerifyPlan, group: BufferGroup, *, at_tail: bool) -> None:
        manager = self._manager
        tag = group.tail_tag if at_tail else group.head_tag
        with_bytes = not at_tail or manager.config.verify_bytes_at_tail
        ops.verify(
            verify_plan=plan,
            endpoint=manager.endpoint(group, tag, with_bytes=with_bytes),
            step=manager.state.step,
            # A request that ends while its last step runs may have its slots freed before TAIL.
            track_lifetime=manager.config.track_lifetime and not at_tail,
            violations=manager.state.violations,
            counters=manager.state.counters,
            backend=manager.backend,
        )

    def _check(self, batch: ForwardBatch) -> None:
        limits = self._manager.limits
        part = f"forward {self.name}"
        if len(batch.requests) > limits.max_requests:
            expected = f"at most {limits.max_requests} requests"
            raise ValueError(must_be(part, "requests", expected, str(len(batch.requests))))
        tokens = sum(r.extend_len for r in batch.requests)
        if tokens > limits.max_tokens:
            raise ValueError(must_be(part, "requests", f"at most {limits.max_tokens} new tokens", str(tokens)))
        names = {b.group.name for b in self._groups}
        if set(batch.out_slots) != names or set(batch.tables) != names:
            got = f"{sorted(batch.out_slots)} and {sorted(batch.tables)}"
            raise ValueError(must_be(part, "out_slots and tables", f"given for the groups {sorted(names)}", got))
        flat = {"input_ids": batch.input_ids, "positions": batch.positions}
        flat |= {f"out_slots[{name}]": slots for name, slots in batch.out_slots.items()}
        for argument, tensor in flat.items():
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

    def _expect(self, phase: Phase, call: str) -> None:
        if self._phase is not phase:
            raise RuntimeError(
                f"kv-canary: forward {self.name}: {call} must come when the forward is {phase.value}, "
                f"got it when {self._phase.value}"
            )
