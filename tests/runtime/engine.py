"""An engine without a model: it allocates slots, fills tables and writes random bytes where K and V would go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import kv_canary as kc
from kv_canary.rows import RowTable

MAX_ROWS = 8
MAX_LEN = 128
LAYERS = 2
BYTES = 32


def make_pool(num_slots: int = 128, *, name: str = "pool", read_bytes: int = BYTES) -> kc.KvPool:
    """Return a pool of random bytes: 2 layers of 32 bytes a token, covered wholly by default."""
    k, v = (
        kc.KvSource(
            layers=tuple(torch.randint(0, 256, (num_slots, BYTES), dtype=torch.uint8) for _ in range(LAYERS)),
            page_size=1,
            bytes_per_token=BYTES,
            read_bytes=read_bytes,
        )
        for _ in range(2)
    )
    names = tuple(f"layer {i}" for i in range(LAYERS))
    return kc.KvPool(name=name, num_slots=num_slots, k_source=k, v_source=v, layer_names=names, device="cpu")


@dataclass
class Request:
    """A request: its own tokens, and how many of them are cached."""

    name: str
    row: int
    owner: int
    tokens: list[int]
    cached: int = 0


@dataclass
class Engine:
    """Groups, tables and requests around one `CanaryManager`, on the reference backend."""

    groups: Sequence[kc.BufferGroup]
    config: kc.CanaryConfig = field(default_factory=lambda: kc.CanaryConfig(backend="reference"))
    on_report: Callable[[kc.ViolationReport], None] | None = None

    def __post_init__(self) -> None:
        self.rows = RowTable(MAX_ROWS)
        self.manager = kc.CanaryManager(
            self.groups,
            limits=kc.CanaryLimits(max_rows=MAX_ROWS, max_requests=4, max_tokens=64, max_len=MAX_LEN),
            config=self.config,
            rows=self.rows,
            on_report=self.on_report,
        )
        # A test is to see the canary's own failures, in log mode too.
        self.manager.guard.contains = False
        self.forward = self.manager.forward()
        self.tables = {g.name: torch.zeros(MAX_ROWS, MAX_LEN, dtype=torch.int32) for g in self.groups}
        self.next_slot: dict[Any, int] = {}
        self.requests: dict[str, Request] = {}
        self.rings: dict[tuple[str, str], int] = {}

    def add(self, name: str, tokens: Sequence[int] | int, *, row: int | None = None) -> Request:
        """Return a new request with its own tokens, or so many arbitrary ones."""
        if isinstance(tokens, int):
            tokens = [1000 * (len(name) + ord(name[0])) + i for i in range(tokens)]
        owner = self.rows.owner(name)
        self.requests[name] = Request(name, self.rows.row(name) if row is None else row, owner, list(tokens))
        return self.requests[name]

    def allocate(self, key: Any, count: int) -> int:
        first = self.next_slot.get(key, 1)
        self.next_slot[key] = first + count
        return first

    def slot_of(self, group: kc.BufferGroup, request: Request, position: int) -> int:
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

    def batch(self, *work: tuple[Request, int], map_new: bool = True) -> kc.ForwardBatch:
        """Return the forward that extends each request by so many tokens."""
        requests, ids, positions = [], [], []
        out: dict[str, list[int]] = {g.name: [] for g in self.groups}
        for request, count in work:
            start, end = request.cached, request.cached + count
            if map_new:
                self.map(request, start, end)
            requests.append(
                kc.ForwardRequest(
                    request_id=request.name,
                    row=request.row,
                    owner=request.owner,
                    prefix_len=start,
                    extend_len=count,
                    tokens=lambda a, b, request=request: request.tokens[a:b],
                )
            )
            ids += request.tokens[start:end]
            positions += range(start, end)
            for group in self.groups:
                out[group.name] += [self.slot_of(group, request, p) for p in range(start, end)]
        return kc.ForwardBatch(
            requests=requests,
            input_ids=torch.tensor(ids, dtype=torch.int32),
            positions=torch.tensor(positions, dtype=torch.int32),
            out_slots={name: torch.tensor(slots, dtype=torch.int64) for name, slots in out.items()},
            tables=self.tables,
        )

    def write_bytes(self, batch: kc.ForwardBatch) -> None:
        """Do what the model does: put K and V into the slots of the new tokens."""
        for group in self.groups:
            slots = batch.out_slots[group.name]
            for source in (group.pool.k_source, group.pool.v_source):
                for layer in source.layers:
                    layer[slots] = torch.randint(0, 256, (len(slots), BYTES), dtype=torch.uint8)

    def step(self, *work: tuple[Request, int], map_new: bool = True) -> kc.ForwardBatch:
        """Run one forward, and count its tokens as cached."""
        batch = self.batch(*work, map_new=map_new)
        self.run(batch)
        for request, count in work:
            request.cached += count
        return batch

    def run(self, batch: kc.ForwardBatch) -> None:
        with self.forward.around(batch):
            self.write_bytes(batch)

    def found(self) -> list[kc.ViolationReport]:
        """Flush, and return every report since the last call."""
        self.manager.flush()
        reports = list(self.manager.reports)
        self.manager.reports.clear()
        return reports


def full_engine(**options: Any) -> Engine:
    """Return an engine with one full-attention group."""
    return Engine([kc.BufferGroup(name="full", pool=make_pool())], kc.CanaryConfig(backend="reference", **options))
