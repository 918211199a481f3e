"""Decodes on a CPU as where SGLang replays them from a CUDA graph: what the model reads stays where it is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from kv_canary.engines.sglang import graphs
from kv_canary.runtime.batch import ModelInputs
from kv_canary.runtime.pools import BufferGroup

# Requests that a batch may have.
_MOST = 512


class Graphs(graphs.Graphs):
    """Every decode is the replay of a graph, whose tensors are filled before it.

    Attributes:
        ns: nanoseconds that filling them took, which an engine does in any case.
    """

    def __init__(self) -> None:
        super().__init__()
        self._batch: Any = None
        self._tensors = {n: torch.zeros(_MOST, dtype=torch.int64) for n in ("ids", "at", "slots", "rows", "lens")}
        self._given: ModelInputs | None = None
        self.ns = 0

    def may_replay(self, runner: Any, forward_batch: Any) -> bool:
        self._batch = forward_batch
        return bool(forward_batch.forward_mode.is_decode())

    def inputs_of(
        self, runner: Any, result: Any, groups: Sequence[BufferGroup], *, count: int, positions: torch.Tensor
    ) -> ModelInputs | None:
        batch = self._batch
        if not batch.forward_mode.is_decode():
            return None
        began = time.perf_counter_ns()
        values = (batch.input_ids, batch.positions, batch.out_cache_loc, batch.req_pool_indices, batch.seq_lens)
        for tensor, value in zip(self._tensors.values(), values, strict=True):
            tensor.zero_()[: len(value)] = value
        if self._given is None:
            ids, at, slots, rows, lens = self._tensors.values()
            out_slots = {g.name: slots for g in groups}
            self._given = ModelInputs(
                input_ids=ids, positions=at, out_slots=out_slots, rows=rows, lengths=lens, stays=True
            )
        self.ns += time.perf_counter_ns() - began
        return self._given
