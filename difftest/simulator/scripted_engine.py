"""An engine without a model or a scheduler: whoever drives it says which request gets how many tokens, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kv_canary.config import CanaryConfig
from kv_canary.difftest.simulator.requests import Request, forward_batch
from kv_canary.reports import ViolationReport
from kv_canary.runtime.batch import ForwardBatch
from kv_canary.runtime.capacities import CanaryLimits
from kv_canary.runtime.manager import CanaryManager
from kv_canary.runtime.pools import BufferGroup
from kv_canary.runtime.rows import RowTable
from kv_canary.specs.structures import KvSource


def kv_source(
    num_slots: int,
    token_bytes: int,
    *,
    layers: int = 2,
    page_size: int = 1,
    read_bytes: int | None = None,
    device: torch.device | str = "cpu",
    random: torch.Generator | None = None,
) -> KvSource:
    """Return layers of random bytes: `page_size` tokens a row, all of whose bytes are covered unless told otherwise."""
    shape = (num_slots // page_size, page_size * token_bytes)
    return KvSource(
        layers=tuple(
            torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=random) for _ in range(layers)
        ),
        page_size=page_size,
        bytes_per_token=token_bytes,
        read_bytes=token_bytes if read_bytes is None else read_bytes,
    )


class ScriptedEngine:
    """Groups, tables and requests around one `CanaryManager`; where K and V would go it writes random bytes.

    Slots are handed out in order and never again; subclasses do otherwise by `map`.

    Args:
        groups: each with K and V whose rows hold nothing but tokens.
        config: the canary's.
        limits: of rows, requests, tokens and lengths; tables are as large.
        random: where bytes come from; None: PyTorch's own.
        options: of `CanaryManager`.
    """

    def __init__(
        self,
        groups: Sequence[BufferGroup],
        config: CanaryConfig,
        *,
        limits: CanaryLimits,
        random: torch.Generator | None = None,
        **options: Any,
    ) -> None:
        self.groups, self.config, self.random = list(groups), config, random
        self.device = groups[0].pool.records.device
        self.rows = RowTable(limits.max_rows)
        self.manager = CanaryManager(self.groups, limits=limits, config=config, rows=self.rows, **options)
        # The canary's own failures are to be seen here, in log mode too.
        self.manager.guard.contains = False
        self.forward = self.manager.forward()
        self.tables = {
            g.name: torch.zeros(limits.max_rows, limits.max_len, dtype=torch.int32, device=self.device)
            for g in self.groups
        }
        self.next_slot: dict[Any, int] = {}
        self.requests: dict[str, Request] = {}
        self.rings: dict[tuple[str, str], int] = {}

    def add(self, name: str, tokens: Sequence[int] | int, *, row: int | None = None) -> Request:
        """Return a new request with its own tokens, or so many arbitrary ones."""
        if isinstance(tokens, int):
            tokens = [1000 * (len(name) + ord(name[0])) + i for i in range(tokens)]
        row = self.rows.row(name) if row is None else row
        self.requests[name] = Request(name=name, owner=self.rows.owner(name), tokens=list(tokens), row=row)
        return self.requests[name]

    def allocate(self, key: Any, count: int) -> int:
        """Return the first of `count` new slots of a pool, or of whatever else `key` stands for."""
        first = self.next_slot.get(key, 1)
        self.next_slot[key] = first + count
        return first

    def slot_of(self, group: BufferGroup, request: Request, position: int) -> int:
        """Return the pool slot that the group's table names for a position; 0 where there is none."""
        slot = int(self.tables[group.name][request.row, position])
        return slot if group.lut is None else int(group.lut[slot])

    def map(self, request: Request, start: int, end: int) -> None:
        """Give the positions [start, end) slots, in every group."""
        for group in self.groups:
            table = self.tables[group.name][request.row]
            if group.ring:
                size = group.window + 1
                key = (group.name, request.name)
                if key not in self.rings:
                    self.rings[key] = self.allocate(group.pool, size)
                for p in range(start, end):
                    table[p] = self.rings[key] + p % size
            elif group.lut is not None:
                # Its tables hold the full group's slots, which the LUT translates.
                table[start:end] = self.tables[self.groups[0].name][request.row, start:end]
            else:
                first = self.allocate(group.pool, end - start)
                table[start:end] = torch.arange(first, first + end - start)

    def batch(self, *work: tuple[Request, int], map_new: bool = True) -> ForwardBatch:
        """Return the forward that extends each request by so many tokens, which get slots unless they have them."""
        for request, count in work if map_new else ():
            self.map(request, request.cached, request.cached + count)
        out_slots = {}
        for group in self.groups:
            table = self.tables[group.name]
            parts = [table[request.row, request.cached : request.cached + count] for request, count in work]
            slots = torch.cat([torch.zeros(0, dtype=torch.int32, device=self.device), *parts]).long()
            out_slots[group.name] = slots if group.lut is None else group.lut[slots]
        return forward_batch(work, out_slots=out_slots, tables=self.tables)

    def write_bytes(self, batch: ForwardBatch) -> None:
        """Put K and V into the slots of the new tokens, as a model does."""
        for group in self.groups:
            slots = batch.out_slots[group.name]
            for source in (group.pool.k_source, group.pool.v_source):
                for layer in () if source is None else source.layers:
                    tokens = layer.view(-1, source.bytes_per_token)  # type: ignore[union-attr]
                    shape = (len(slots), tokens.shape[1])
                    tokens[slots] = torch.randint(
                        0, 256, shape, dtype=torch.uint8, device=self.device, generator=self.random
                    )

    def step(self, *work: tuple[Request, int], map_new: bool = True) -> ForwardBatch:
        """Run one forward, and count its tokens as cached."""
        batch = self.batch(*work, map_new=map_new)
        self.run(batch)
        for request, count in work:
            request.cached += count
        return batch

    def run(self, batch: ForwardBatch) -> None:
        """Run a forward."""
        with self.forward.around(batch):
            self.write_bytes(batch)

    def flip(self, group: BufferGroup, half: str, slot: int, position: int) -> None:
        """Flip a bit of a byte that the fingerprint of a position covers; a second time flips it back."""
        source = group.pool.k_source if half == "K" else group.pool.v_source
        if source is not None:
            layer, first, _ = source.coverage(position)
            source.layers[layer].view(-1, source.bytes_per_token)[slot, first] ^= 1

    def found(self) -> list[ViolationReport]:
        """Flush, and return every report since the last call."""
        self.manager.flush()
        reports = list(self.manager.reports)
        self.manager.reports.clear()
        return reports
