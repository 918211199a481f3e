"""The op calls of a step and between steps, each a function of an implementation's own memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kv_canary.constants import to_signed
from kv_canary.difftest.simulator.batch import Batch, Segments
from kv_canary.difftest.simulator.config import EngineConfig
from kv_canary.difftest.simulator.groups import Group
from kv_canary.difftest.simulator.memory import GroupMemory, Memory
from kv_canary.specs import get_spec

# The ops that engines call.
ENGINE_OPS = (
    *("plan", "verify", "verify_prefixes", "verify_resolved"),
    *("write", "move", "retire", "scatter_token_ids", "chain_tails"),
)
Arguments = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One op call, to be made by every implementation on its own memory.

    Args:
        op: name of the op.
        make: the arguments for a memory, less scratch.
        change: what is done to the complete arguments; it gives back others and leaves these as they are.
    """

    op: str
    make: Callable[[Memory], Arguments]
    change: Callable[[Arguments], Arguments] | None = None

    def arguments(self, memory: Memory) -> Arguments:
        """Return the complete arguments of the call on `memory`: outputs are the memory's own tensors."""
        bound = get_spec(self.op).bind(self.make(memory))
        return bound if self.change is None else self.change(bound)


@dataclass(frozen=True, kw_only=True)
class StepCalls:
    """Makes the calls of one step of `config`'s engine."""

    config: EngineConfig
    batch: Batch
    anchors: torch.Tensor | None

    def bring_up(self, tails: Segments, tokens: Segments | None) -> Iterator[Call]:
        """Yield the calls that bring tails and tokens up to the prefix; by one call where both are the same tokens."""
        together = tokens is not None and not self.config.token_offset
        yield Call(
            op="chain_tails",
            make=lambda memory: {
                "flat": tails.flat,
                "offsets": tails.offsets,
                "rows": tails.rows,
                "starts": tails.starts,
                "anchors": self.anchors,
                "tails": memory.tails,
                "pool": memory.token_pool if together else None,
                "status": memory.status,
            },
        )
        if tokens is not None and not together:
            yield Call(
                op="scatter_token_ids",
                make=lambda memory: {
                    "flat": tokens.flat,
                    "offsets": tokens.offsets,
                    "rows": tokens.rows,
                    "starts": tokens.starts,
                    "pool": memory.token_pool,
                    "status": memory.status,
                },
            )

    def head(self, group: Group) -> Iterator[Call]:
        """Yield the calls before the model: plans, verify, and where HEAD has records of its own, their write."""
        if self._fused(group):
            yield self._verify_prefixes(group)
        else:
            yield self._plan(group, 0)
            if group.config.planned_twice:
                yield self._plan(group, 1)
            yield self._verify(group, 0, at_tail=False)
        if self.config.two_records:
            yield self._write(group, at_tail=False)

    def tail(self, group: Group) -> Iterator[Call]:
        """Yield the calls after the model: write, then verify."""
        yield self._write(group, at_tail=True)
        if self._fused(group):
            yield self._verify_resolved(group)
        else:
            yield self._verify(group, int(group.config.planned_twice), at_tail=True)

    def _fused(self, group: Group) -> bool:
        return self.config.fused and not group.config.planned_twice

    def _plan(self, group: Group, which: int) -> Call:
        batch = self.batch

        def make(memory: Memory) -> Arguments:
            mine = memory.groups[group.name]
            return {
                **self._prefixes(group),
                **self._tokens(memory),
                "after_write": which == 1,
                "step": None if batch.strides is None else batch.step,
                "verify_plan": mine.verify_plans[which],
                "write_plan": mine.write_plans[which],
                "status": memory.status,
            }

        return Call(op="plan", make=make)

    def _verify(self, group: Group, which: int, *, at_tail: bool) -> Call:
        def make(memory: Memory) -> Arguments:
            return {
                "verify_plan": memory.groups[group.name].verify_plans[which],
                **self._check(group, memory, at_tail=at_tail),
            }

        return Call(op="verify", make=make)

    def _verify_prefixes(self, group: Group) -> Call:
        def make(memory: Memory) -> Arguments:
            mine = memory.groups[group.name]
            return {
                **self._prefixes(group),
                **self._tokens(memory),
                **self._check(group, memory, at_tail=False),
                "resolved": mine.resolved,
                "write_plan": mine.write_plans[0],
                "status": memory.status,
            }

        return Call(op="verify_prefixes", make=make)

    def _verify_resolved(self, group: Group) -> Call:
        def make(memory: Memory) -> Arguments:
            return {
                "rows": self.batch.rows,
                **self._tokens(memory),
                "resolved": memory.groups[group.name].resolved,
                **self._check(group, memory, at_tail=True),
            }

        return Call(op="verify_resolved", make=make)

    def _prefixes(self, group: Group) -> Arguments:
        """The arguments that say where cached positions lie."""
        batch = self.batch
        return {
            "rows": batch.rows,
            "owners": batch.owners,
            "prefix_lens": batch.prefix_lens,
            "extend_lens": batch.extend_lens,
            "req_to_token": group.table,
            "window": group.config.window,
            "lut": group.lut,
            "strides": batch.strides,
        }

    def _tokens(self, memory: Memory) -> Arguments:
        """The arguments that say which tokens to expect there."""
        known = self.config.token_pool
        return {
            "expected_tokens": memory.token_pool if known else None,
            "expected_lens": self.batch.expected_lens if known else None,
            "token_offset": self.config.token_offset,
        }

    def _check(self, group: Group, memory: Memory, *, at_tail: bool) -> Arguments:
        """The arguments that records are checked against, and where that is told."""
        mine = memory.groups[group.name]
        return {
            "endpoint": mine.tail if at_tail else mine.head,
            "anchors": self.anchors,
            "step": self.batch.step,
            "track_lifetime": self.config.track_lifetime,
            "violations": memory.violations,
            "counters": memory.counters,
        }

    def _write(self, group: Group, *, at_tail: bool) -> Call:
        batch = self.batch

        def make(memory: Memory) -> Arguments:
            mine = memory.groups[group.name]
            return {
                "write_plan": mine.write_plans[0],
                "input_ids": batch.input_ids,
                "positions": batch.positions,
                "out_slots": batch.out_slots[group.name],
                "endpoint": mine.tail if at_tail else mine.head,
                "tails": memory.tails,
                "step": batch.step,
                "check_positions": torch.tensor([int(self.config.check_positions)], dtype=torch.int32),
                "expected_input_ids": batch.expected_input_ids,
                "track_lifetime": self.config.track_lifetime,
                "violations": memory.violations,
                "counters": memory.counters,
            }

        return Call(op="write", make=make)


def move_call(group: Group, *, src: Sequence[int], dst: Sequence[int], owner: int, step: int) -> Call:
    """Return the call that carries records of `group` from `src` to `dst`."""
    given = {"src": int64(src), "dst": int64(dst), "owner": owner, "step": int64([step])}
    return Call(op="move", make=lambda memory: {**given, "records": _records(memory, group).records})


def retire_call(group: Group, *, slots: Sequence[int], owner: int, step: int) -> Call:
    """Return the call that retires the records of freed `slots` of `group`."""
    given = {"slots": int64(slots), "owner": int64([owner]), "step": int64([step])}
    return Call(op="retire", make=lambda memory: {**given, "records": _records(memory, group).records})


def int64(values: Sequence[int]) -> torch.Tensor:
    """Return an int64 tensor of `values`, each taken mod 2**64."""
    return torch.tensor([to_signed(v) for v in values], dtype=torch.int64)


def _records(memory: Memory, group: Group) -> GroupMemory:
    return memory.groups[group.name]
