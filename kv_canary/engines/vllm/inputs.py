"""What the model of a worker is given in a step, where its kernels read it: model runners V1 and V2."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, repeat
from operator import ne
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kv_canary.engines.vllm.pools import AttachedGroup
from kv_canary.engines.vllm.requests import by_name
from kv_canary.runtime.batch import ModelInputs
from kv_canary.runtime.composition import Int64s, one_each
from kv_canary.runtime.host import send


@dataclass(frozen=True, kw_only=True, eq=False)
class StepInputs:
    """One forward.

    Args:
        names: of its requests, in the order of the flat inputs.
        prefix, extend: int64 [requests].
        given: what the model reads; behind the requests and tokens of the forward is padding.
    """

    names: Sequence[str]
    prefix: Int64s
    extend: Int64s
    given: ModelInputs

    @functools.cached_property
    def num_tokens(self) -> int:
        return int(self.extend.sum())

    @property
    def input_ids(self) -> torch.Tensor:
        """[tokens] that the model is given."""
        return self.given.input_ids[: self.num_tokens]

    @property
    def positions(self) -> torch.Tensor:
        """[tokens] likewise."""
        return self.given.positions[: self.num_tokens]

    @property
    def lengths(self) -> torch.Tensor | None:
        """int32 [requests] as the attention backend is given them."""
        return None if self.given.lengths is None else self.given.lengths[: len(self.names)]

    def out_slots(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return int64 [tokens] slots that the forward writes, of groups by their names."""
        return {name: self.given.out_slots[name][: self.num_tokens] for name in names}

    def only(self, which: Int64s) -> StepInputs:
        """Return those of some requests, by their places, copied."""
        chosen = np.zeros(len(self.names), bool)
        chosen[which] = True
        tokens, requests = send(self.positions.device, np.repeat(chosen, self.extend).nonzero()[0], which)
        return StepInputs(
            names=[self.names[i] for i in which.tolist()],
            prefix=self.prefix[which],
            extend=self.extend[which],
            given=ModelInputs(
                input_ids=self.input_ids[tokens],
                positions=self.positions[tokens],
                out_slots={name: slots[tokens] for name, slots in self.given.out_slots.items()},
                lengths=None if self.lengths is None else self.lengths[requests],
            ),
        )

    def with_input_ids(self, input_ids: torch.Tensor) -> StepInputs:
        """Return the same with [tokens] other tokens, as copies are."""
        return replace(self, given=replace(self.given, input_ids=input_ids, stays=False))


@functools.lru_cache(maxsize=64)
def numbers(count: int) -> Int64s:
    """Return int64 [count] 0, 1, 2 and so on: what batches are in the order of is their tables' rows."""
    found = np.arange(count, dtype=np.int64)
    found.setflags(write=False)
    return found


def _extend(names: Sequence[str], scheduled: Any, places: Mapping[str, int]) -> Int64s:
    """Return int64 new tokens of a step's requests, in the order of their names: most have one.

    Args:
        names: of the requests.
        scheduled: vLLM's `SchedulerOutput`.
        places: of the requests, by name.
    """
    of = scheduled.num_scheduled_tokens
    if len(of) != len(names):
        return by_name(names, of)
    extend = np.ones(len(names), np.int64)
    for name in compress(of, map(ne, of.values(), repeat(1))):
        extend[places[name]] = of[name]
    return extend


class _Runner:
    """What is read of a model runner.

    Args:
        runner: vLLM's `GPUModelRunner`, whose KV cache is there.
        groups: that are covered.
    """

    def __init__(self, runner: Any, groups: Sequence[AttachedGroup]) -> None:
        self._runner, self._groups = runner, groups

    def decode(self, scheduled: Any, batch: Any) -> tuple[Sequence[str], npt.NDArray[np.integer[Any]]] | None:
        """Return whose one token each the step that is about to run is of, and their prefixes, to be read only.

        None where it is another one, or the model reads something else than what is `given`.

        Args:
            scheduled, batch: see `read`.
        """
        raise NotImplementedError

    @property
    def given(self) -> ModelInputs:
        """What every forward reads, where it reads it."""
        raise NotImplementedError


class RunnerV1(_Runner):
    """Reads model runner V1, whose rows move from step to step."""

    @property
    def tables(self) -> dict[str, torch.Tensor]:
        """int32 [requests, blocks] by group, where the attention backend reads them."""
        tables = self._runner.input_batch.block_table
        return {g.group.name: tables[g.number].block_table.gpu for g in self._groups}

    def decode(self, scheduled: Any, _: Any = None) -> tuple[Sequence[str], npt.NDArray[np.integer[Any]]] | None:
        """Return whose decode it is, and their prefixes; see `_Runner`."""
        batch = self._runner.input_batch
        names = batch.req_ids
        count = len(names)
        if scheduled.total_num_scheduled_tokens != count:
            return None
        return names, batch.num_computed_tokens_cpu[:count]

    def read(self, scheduled: Any, _: Any = None) -> StepInputs:
        """Return the inputs of the step that is about to run.

        Args:
            scheduled: vLLM's `SchedulerOutput`.
        """
        batch = self._runner.input_batch
        count, names = batch.num_reqs, batch.req_ids
        names = names if len(names) == count else names[:count]
        is_decode = scheduled.total_num_scheduled_tokens == count
        return StepInputs(
            names=names,
            prefix=batch.num_computed_tokens_cpu[:count].astype(np.int64),
            extend=one_each(count) if is_decode else _extend(names, scheduled, batch.req_id_to_index),
            given=self.given,
        )

    @functools.cached_property
    def given(self) -> ModelInputs:
        """What every forward reads, where it reads it."""
        runner = self._runner
        tables = runner.input_batch.block_table
        return ModelInputs(
            input_ids=runner.input_ids.gpu,
            positions=runner.positions,
            out_slots={g.group.name: tables[g.number].slot_mapping.gpu for g in self._groups},
            lengths=runner.seq_lens,
            stays=True,
        )


class RunnerV2(_Runner):
    """Reads model runner V2, which gathers its tables in the order of the batch."""

    @property
    def tables(self) -> dict[str, torch.Tensor]:
        """int32 [requests, blocks] by group, where the attention backend reads them."""
        return {g.group.name: self._runner.block_tables.input_block_tables[g.number] for g in self._groups}

    def decode(self, scheduled: Any, batch: Any) -> tuple[Sequence[str], npt.NDArray[np.integer[Any]]] | None:
        """Return whose decode it is, and their prefixes; see `_Runner`."""
        count = batch.num_reqs
        if batch.num_tokens != count or not self._is_given(batch):
            return None
        return batch.req_ids, batch.num_computed_tokens_np[:count]

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
        given = self.given
        if not self._is_given(batch):
            # The model reads others than those of the runner.
            given = replace(
                given, input_ids=batch.input_ids, positions=batch.positions, lengths=batch.seq_lens, stays=False
            )
        return StepInputs(
            names=batch.req_ids,
            prefix=batch.num_computed_tokens_np[:count].astype(np.int64),
            extend=extend,
            given=given,
        )

    def _is_given(self, batch: Any) -> bool:
        """Whether a batch has the front of what every forward reads."""
        theirs = batch.input_ids.data_ptr(), batch.positions.data_ptr(), batch.seq_lens.data_ptr()
        return theirs == self._addresses

    @functools.cached_property
    def _addresses(self) -> tuple[int, ...]:
        return tuple(tensor.data_ptr() for tensor in self._of_batches)

    @functools.cached_property
    def _of_batches(self) -> tuple[torch.Tensor, ...]:
        """The front of which batches have."""
        buffers = self._runner.input_buffers
        return buffers.input_ids, buffers.positions, buffers.seq_lens

    @functools.cached_property
    def given(self) -> ModelInputs:
        """What every forward reads, where it reads it."""
        (input_ids, positions, lengths), slots = self._of_batches, self._runner.block_tables.slot_mappings
        return ModelInputs(
            input_ids=input_ids,
            positions=positions,
            out_slots={g.group.name: slots[g.number] for g in self._groups},
            lengths=lengths,
            stays=True,
        )
