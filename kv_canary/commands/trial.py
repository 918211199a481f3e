"""A trial of what a decode step costs on this machine: a canary around an engine that does nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kv_canary.config import CanaryConfig
from kv_canary.runtime.batch import ForwardBatch, ModelInputs
from kv_canary.runtime.capacities import CanaryLimits
from kv_canary.runtime.composition import BatchRequests, Composition, Int64s
from kv_canary.runtime.cost import TIMED_EVERY, CanaryCost
from kv_canary.runtime.manager import CanaryManager
from kv_canary.runtime.pools import BufferGroup, KvPool
from kv_canary.specs.structures import KvSource

# Requests of the trial, and tokens that each has in the cache at first.
REQUESTS, CACHED = 64, 256
# Steps on a GPU, some of which are timed there; and on a CPU, where each is slow.
_STEPS, _CPU_STEPS = 3 * TIMED_EVERY, 24
_BYTES = 256


class _Sevens:
    """Requests all of whose tokens are 7."""

    def name(self, member: Any) -> str:
        return str(member)

    def tokens(self, member: Any, start: int, end: int) -> Sequence[int]:
        return [7] * (end - start)

    def newest(self, members: Sequence[Any], ends: Int64s) -> Int64s | None:
        return np.full(len(members), 7, np.int64)

    def discarded(self, member: Any, length: int) -> bool:
        return False


def measure_cost() -> CanaryCost | None:
    """Return what a decode step costs on the GPU, or the CPU where there is none; None where it could not be measured.

    64 requests with 256 cached tokens each go on by one token at every step, with one group of two layers.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    steps = _STEPS if device.type == "cuda" else _CPU_STEPS
    width, slots = CACHED + steps + 1, REQUESTS * (CACHED + steps) + 1
    k, v = (
        KvSource(
            layers=tuple(torch.zeros(slots, _BYTES, dtype=torch.uint8, device=device) for _ in range(2)),
            page_size=1,
            bytes_per_token=_BYTES,
            read_bytes=16,
        )
        for _ in range(2)
    )
    pool = KvPool(name="trial", num_slots=slots, k_source=k, v_source=v, device=device)
    limits = CanaryLimits(max_rows=REQUESTS + 1, max_requests=REQUESTS, max_tokens=REQUESTS * CACHED, max_len=width)
    config = CanaryConfig(backend="triton" if device.type == "cuda" else "reference")
    manager = CanaryManager([BufferGroup(name="trial", pool=pool)], limits=limits, config=config)
    try:
        _run(manager, torch.arange(REQUESTS * (width - 1)).view(REQUESTS, -1).to(device, torch.int32) + 1, steps=steps)
        return manager.summary().cost if not manager.guard.failures else None
    finally:
        manager.close()


def _run(manager: CanaryManager, slots: torch.Tensor, *, steps: int) -> None:
    """Prefill every request, and decode; `slots` [requests, length] are theirs."""
    forward, device = manager.forward(), manager.device
    table = torch.zeros(REQUESTS + 1, slots.shape[1] + 1, dtype=torch.int32, device=device)
    table[1:, : slots.shape[1]] = slots
    rows = np.arange(1, REQUESTS + 1)
    source = _Sevens()
    composition = Composition(rows.tolist(), rows=rows, owners=rows, source=source)
    on_device = torch.from_numpy(rows).to(device)
    ones = np.ones(REQUESTS, np.int64)
    names = ("input_ids", "positions", "rows", "lengths")
    tensors = {name: torch.full((REQUESTS,), 7, dtype=torch.int64, device=device) for name in names}
    out_slots = torch.zeros(REQUESTS, dtype=torch.int64, device=device)
    given = ModelInputs(**tensors, out_slots={"trial": out_slots}, stays=True)
    for step in range(steps):
        cached = 0 if not step else CACHED + step - 1
        extend = ones if step else ones * CACHED
        prefix = np.full(REQUESTS, cached)
        requests = BatchRequests(
            composition, prefix=prefix, extend=extend, newest=source.newest(composition.members, prefix)
        )
        written = slots[:, cached : cached + int(extend[0])].long()
        positions = torch.arange(cached, cached + int(extend[0]), device=device).repeat(REQUESTS)
        if step and forward.repeat(requests, out_slots=dict):
            pass
        else:
            forward.begin(
                ForwardBatch(
                    requests=requests,
                    input_ids=torch.full_like(positions, 7),
                    positions=positions,
                    out_slots={"trial": written.flatten()},
                    tables={"trial": table},
                    rows=on_device,
                    lengths=on_device * 0 + cached + int(extend[0]),
                    is_given_at_tail=step > 0,
                )
            )
            forward.head()
        if step:
            given.positions.copy_(positions)
            given.out_slots["trial"].copy_(written.flatten())
            tensors["rows"].copy_(on_device)
            tensors["lengths"].fill_(cached + 1)
        forward.tail(given=given if step else None)
        forward.end()
    manager.flush()
