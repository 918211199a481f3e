"""A stand-in for what vLLM's OffloadingConnector copies with on a GPU, and what goes wrong in it.

The connector, its scheduler and its manager of host memory are vLLM's own. Only the worker's copies, which want CUDA
streams, are made here: a store at once, a load some steps later.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

# Times that a load is asked after before it is there.
_DELAY = 2

# What goes wrong with the next copy, if anything does; taken by the first one that it is of.
FAULTS: list[Fault] = []
# The worker that was made last.
WORKERS: list[Worker] = []


class Fault:
    """A mistake of one copy.

    Args:
        of: "store" or "load".
        do: makes the copy wrong: given the worker, the blocks on the device, the places on the host, and whether the
            copy is already made; returns whether it is left out.
        seed: of its choices.
    """

    def __init__(self, of: str, do: Callable[[Worker, Any, Any, bool, random.Random], bool], seed: int) -> None:
        self.of, self.do, self.rng = of, do, random.Random(seed)


def settings(*, size: int, per_chunk: int = 1, block: int = 32) -> dict[str, Any]:
    """Return vLLM's `kv_transfer_config` for the connector.

    Args:
        size: bytes of host memory.
        per_chunk: blocks of a chunk.
        block: tokens of a block.
    """
    FAULTS.clear()
    WORKERS.clear()
    extra = {"spec_name": "Spec", "spec_module_path": __name__, "cpu_bytes_to_use": size}
    if per_chunk > 1:
        extra["block_size"] = per_chunk * block
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


class Spec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's, for a worker on a CPU."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return Worker(kv_caches, self)


class Handler:
    """The tensors that loads are between, as vLLM's has them."""

    def __init__(self, on_host: list[torch.Tensor], on_device: list[torch.Tensor]) -> None:
        self.src_tensors, self.dst_tensors = on_host, on_device


class _Places:
    """Blocks on the host by their number: between those of a chunk and the next others lie.

    Args:
        chunks: int8 [chunks, blocks, bytes].
    """

    def __init__(self, chunks: torch.Tensor) -> None:
        self._chunks, self.dtype = chunks, chunks.dtype

    def __getitem__(self, key: Any) -> torch.Tensor:
        return self._chunks[self._at(key)]

    def __setitem__(self, key: Any, value: torch.Tensor) -> None:
        self._chunks[self._at(key)] = value

    def _at(self, key: Any) -> tuple[Any, ...]:
        number, *rest = key if isinstance(key, tuple) else (key,)
        return (number // self._chunks.shape[1], number % self._chunks.shape[1], *rest)


class Worker(OffloadingWorker):  # type: ignore[misc]
    """Copies of blocks between tensors on the CPU.

    Args:
        kv_caches: vLLM's, of the device.
        spec: of the host's memory.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, spec: Spec) -> None:
        self.device = [found.tensor for found in kv_caches.tensors]
        self._per_chunk = spec.blocks_per_chunk
        self.host = self.memory(spec)
        self.loaded = 0
        self._of_group = [sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs]
        self._load_handler = Handler(self.host, self.device)
        self._done: list[int] = []
        self._loads: list[tuple[int, int, list[tuple[int, np.ndarray, np.ndarray]]]] = []
        WORKERS[:] = [self]

    def memory(self, spec: Spec) -> list[torch.Tensor]:
        """Return int8 [chunks, bytes] for each tensor; those of a chunk lie side by side, as in vLLM's own memory."""
        widths = [t.shape[1] * self._per_chunk for t in self.device]
        memory = torch.zeros(spec.num_chunks, spec.kv_bytes_per_chunk, dtype=torch.int8)
        return list(memory[:, : sum(widths)].split(widths, dim=1))

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._copy("store", self._pairs(src_spec, dst_spec.block_ids))
        self._done.append(job_id)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._loads.append((job_id, _DELAY, self._pairs(dst_spec, src_spec.block_ids)))
        return True

    def get_finished(self) -> list[TransferResult]:
        waiting = []
        for job, left, pairs in self._loads:
            if left:
                waiting.append((job, left - 1, pairs))
            else:
                self._load(job, pairs)
        self._loads = waiting
        done, self._done = self._done, []
        return [TransferResult(job_id=job, success=True) for job in done]

    def wait(self, job_ids: set[int]) -> None:
        for job, _, pairs in [load for load in self._loads if load[0] in job_ids]:
            self._load(job, pairs)
        self._loads = [load for load in self._loads if load[0] not in job_ids]

    def rows(self, side: str, tensor: int) -> Any:
        """Return int8 [blocks, bytes] of one tensor on the device or on the host, to be read and written by block."""
        device: torch.Tensor = self.device[tensor]
        if side == "device":
            return device
        return _Places(self.host[tensor].view(-1, self._per_chunk, device.shape[1]))

    def _load(self, job: int, pairs: list[tuple[int, np.ndarray, np.ndarray]]) -> None:
        self.loaded += sum(len(blocks) for _, blocks, _ in pairs)
        self._copy("load", pairs)
        self._done.append(job)

    def _pairs(self, on_device: Any, chunks: np.ndarray) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """Return, of each group with any, its number, its blocks and their places on the host."""
        found, block, chunk = [], 0, 0
        for group, (count, index) in enumerate(zip(on_device.group_sizes, on_device.block_indices, strict=True)):
            if not count:
                continue
            skipped = index % self._per_chunk
            used = -(-(count + skipped) // self._per_chunk)
            its = np.asarray(chunks[chunk : chunk + used], np.int64)
            places = (its[:, None] * self._per_chunk + np.arange(self._per_chunk)).ravel()[skipped : skipped + count]
            found.append((group, np.asarray(on_device.block_ids[block : block + count], np.int64), places))
            block, chunk = block + count, chunk + used
        return found

    def _copy(self, what: str, pairs: list[tuple[int, np.ndarray, np.ndarray]]) -> None:
        for group, blocks, places in pairs:
            fault = next((f for f in FAULTS if f.of == what and len(blocks) > 1), None)
            if fault is not None:
                FAULTS.remove(fault)
                if fault.do(self, blocks, places, False, fault.rng):
                    continue
            for tensor in self._of_group[group]:
                device, host = self.rows("device", tensor), self.rows("host", tensor)
                if what == "store":
                    host[places] = device[blocks]
                else:
                    device[blocks] = host[places]
            if fault is not None:
                fault.do(self, blocks, places, True, fault.rng)
