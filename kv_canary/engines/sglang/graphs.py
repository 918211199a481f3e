"""The CUDA graphs that SGLang decodes with, and the tensors that they read, which stay where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kv_canary.runtime.batch import ModelInputs
from kv_canary.runtime.pools import BufferGroup

# Modules of models that count their positions on in the tensor that a graph reads them from, inside the graph.
_WRITE_POSITIONS = ("gemma3_mm", "gemma3n_mm", "gemma4_mm")


class Graphs:
    """What is known of the graphs of each model runner."""

    def __init__(self) -> None:
        # By runner: the buffers, and what of them the canary reads.
        self._inputs: dict[Any, tuple[Any, ModelInputs]] = {}

    def may_replay(self, runner: Any, forward_batch: Any) -> bool:
        """Return whether a forward may be the replay of a graph; its result says whether it was."""
        return bool(forward_batch.forward_mode.is_decode()) and _buffers(runner) is not None

    def tokens_of(self, runner: Any) -> int | None:
        """Return how many tokens the graphs of a decode have room for; None where there are none."""
        buffers = _buffers(runner)
        return None if buffers is None else len(buffers.out_cache_loc)

    def inputs_of(
        self, runner: Any, result: Any, groups: Sequence[BufferGroup], *, count: int, positions: torch.Tensor
    ) -> ModelInputs | None:
        """Return what the graph of a decode of `count` requests has read; None where none was replayed.

        Args:
            positions: that the graph's were copied from.
        """
        buffers = _buffers(runner)
        if buffers is None or not getattr(result, "can_run_graph", False):
            return None
        known = self._inputs.get(runner)
        if known is None or known[0] is not buffers:
            is_written = _writes_positions(runner)
            if is_written or any(g.lut is not None for g in groups):
                # Slots that are looked up lie nowhere.
                slots = buffers.out_cache_loc[:count]
                return ModelInputs(
                    input_ids=buffers.input_ids[:count],
                    positions=(positions if is_written else buffers.positions)[:count],
                    out_slots={g.name: slots if g.lut is None else g.lut[slots] for g in groups},
                    rows=buffers.req_pool_indices[:count],
                    lengths=buffers.seq_lens[:count],
                )
            inputs = ModelInputs(
                input_ids=buffers.input_ids,
                positions=buffers.positions,
                out_slots={g.name: buffers.out_cache_loc for g in groups},
                rows=buffers.req_pool_indices,
                lengths=buffers.seq_lens,
                stays=True,
            )
            known = self._inputs[runner] = buffers, inputs
        return known[1]


def _writes_positions(runner: Any) -> bool:
    kinds = type(getattr(runner, "model", None)).__mro__
    return any(kind.__module__.rpartition(".")[2] in _WRITE_POSITIONS for kind in kinds)


def _buffers(runner: Any) -> Any:
    return getattr(getattr(runner, "decode_cuda_graph_runner", None), "buffers", None)
