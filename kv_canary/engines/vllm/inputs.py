"""What the model of a worker is given in a step, where its kernels read it: model runners V1 and V2."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kv_canary.engines.vllm.pools import AttachedGroup
from kv_canary.engines.vllm.requests import by_name
from kv_canary.runtime.composition import Int64s, one_each
from kv_canary.runtime.host import send


@dataclass(frozen=True, kw_only=True, eq=False)
class StepInputs:
    """One forward.

    Args:
        names: of its requests, in the order of the flat inputs.
        prefix, extend: int64 [requests].
        input_ids, positions: [tokens].
        out_slots: int64 [tokens] by group.
        lengths: int32 [requests] as the attention backend is given them.
    """

    names: Sequence[str]
    prefix: Int64s
    extend: Int64s
    input_ids: torch.Tensor
    positions: torch.Tensor
    out_slots: Mapping[str, torch.Tensor]
    lengths: torch.Tensor

    def only(self, which: Int64s) -> StepInputs:
        """Return those of some requests, by their places."""
        chosen = np.zeros(len(self.names), bool)
        chosen[which] = True
        tokens, requests = send(self.lengths.device, np.repeat(chosen, self.extend).nonzero()[0], which)
        return StepInputs(
            names=[self.names[i] for i in which.tolist()],
            prefix=self.prefix[which],
            extend=self.extend[which],
            input_ids=self.input_ids[tokens],
            positions=self.positions[tokens],
            out_slots={name: slots[tokens] for name, slots in self.out_slots.items()},
            lengths=self.lengths[requests],
        )


@functools.lru_cache(maxsize=64)
def numbers(count: int) -> Int64s:
    """Return int64 [count] 0, 1, 2 and so on: what batches are in the order of is their tables' rows."""
    found = np.arange(count, dtype=np.int64)
    found.setflags(write=False)
    return found


class _Runner:
    """What is read of a model runner.

    Args:
        runner: vLLM's `GPUModelRunner`, whose KV cache is there.
        groups: that are covered.
    """

    def __init__(self, runner: Any, groups: Sequence[AttachedGroup]) -> None:
        self._runner, self._groups = runner, groups


class RunnerV1(_Runner):
    """Reads model runner V1, whose rows move from step to step."""

    @property
    def tables(self) -> dict[str, torch.Tensor]:
        """int32 [requests, blocks] by group, where the attention backend reads them."""
        tables = self._runner.input_batch.block_table
        return {g.group.name: tables[g.number].block_table.gpu for g in self._groups}

    def read(self, scheduled: Any, _: Any = None) -> StepInputs:
        """Return the inputs of the step that is about to run.

        Args:
            scheduled: vLLM's `SchedulerOutput`.
        """
        runner = self._runner
        batch = runner.input_batch
        count, tokens = batch.num_reqs, scheduled.total_num_scheduled_tokens
        names = batch.req_ids[:count]
        extend = one_each(count) if tokens == count else by_name(names, scheduled.num_scheduled_tokens)
        return StepInputs(
            names=names,
            prefix=batch.num_computed_tokens_cpu[:count].astype(np.int64),
            extend=extend,
            input_ids=runner.input_ids.gpu[:tokens],
            positions=runner.positions[:tokens],
            out_slots={g.group.name: batch.block_table[g.number].slot_mapping.gpu[:tokens] for g in self._groups},
            lengths=runner.seq_lens[:count],
        )


class RunnerV2(_Runner):
    """Reads model runner V2, which gathers its tables in the order of the batch."""

    @property
    def tables(self) -> dict[str, torch.Tensor]:
        """int32 [requests, blocks] by group, where the attention backend reads them."""
        return {g.group.name: self._runner.block_tables.input_block_tables[g.number] for g in self._groups}

    def read(self, scheduled: Any, batch: Any) -> StepInputs:
        """Return the inputs of the step that is about to run.

        Args:
            scheduled: vLLM's `SchedulerOutput`.
            batch: its `InputBatch`.

        Raises:
            ValueError: the batch has fewer tokens than were scheduled.
        """
        count, tokens = batch.num_reqs, batch.num_tokens
        extend = one_each(count) if tokens == count else batch.num_scheduled_tokens.astype(np.int64)
        if int(extend.sum()) != tokens:
            raise ValueError(f"kv-canary: vllm adapter: tokens must be {int(extend.sum())}, as scheduled, got {tokens}")
        slots = self._runner.block_tables.slot_mappings
        return StepInputs(
            names=batch.req_ids,
            prefix=batch.num_computed_tokens_np[:count].astype(np.int64),
            extend=extend,
            input_ids=batch.input_ids[:tokens],
            positions=batch.positions[:tokens],
            out_slots={g.group.name: slots[g.number, :tokens] for g in self._groups},
            lengths=batch.seq_lens[:count],
        )
