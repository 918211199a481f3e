"""A canary over SGLang's real pools and allocators, driven without a model; the pools are in pool_kinds.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import torch
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.runtime_context import get_parallel

import kv_canary as kc
from kv_canary.difftest.simulator.requests import Request
from kv_canary.difftest.simulator.scripted_engine import ScriptedEngine
from kv_canary.engines.sglang.pools import attach

MAX_ROWS, MAX_LEN, SIZE, WINDOW = 5, 128, 512, 12
WHOLE = 1 << 20

# Writes what a model's layer would: (pool, layer id, slots, slots of the sliding window's part).
Write = Callable[[Any, int, torch.Tensor, torch.Tensor | None], None]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of pool.

    Args:
        make: returns the pool, for a page size.
        write: what a layer of the model does.
        layer_ids: of the layers that write.
        cells: by group and half, in the order of the layers that its reports name: (pool, layer, slot) -> the token's
            bytes, uint8 [n], found without the code under test.
        pages: page sizes that it has.
    """

    make: Callable[[int], Any]
    write: Write
    layer_ids: tuple[int, ...]
    cells: dict[tuple[str, str], Callable[[Any, int, int], torch.Tensor]]
    pages: tuple[int, ...] = (1, 16)

    @property
    def windowed(self) -> bool:
        return any("swa" in group for group, _ in self.cells)


class PoolEngine(ScriptedEngine):
    """A canary over a real pool, its allocator and `req_to_token`.

    Args:
        kind: of pool.
        page: tokens in a page.
        read_bytes: that fingerprints cover.
        config: fields of `CanaryConfig`.
    """

    def __init__(
        self, kind: Kind, page: int, *, read_bytes: int = WHOLE, config: Mapping[str, Any] | None = None
    ) -> None:
        torch.manual_seed(0)
        self.kind, self.page = kind, page
        with one_rank():
            self.pool = kind.make(page)
            self.allocator = make_allocator(self.pool, page)
            table = memory_pool.ReqToTokenPool(MAX_ROWS - 1, MAX_LEN, "cpu", False).req_to_token
            groups = attach(self.pool, name="", read_bytes=read_bytes, window=WINDOW)
        super().__init__(
            groups,
            kc.CanaryConfig(**{"backend": "reference", "max_reports_per_step": 1000, **(config or {})}),
            limits=kc.CanaryLimits(max_rows=MAX_ROWS, max_requests=4, max_tokens=128, max_len=MAX_LEN),
        )
        self.table = table
        self.tables = dict.fromkeys(self.tables, table)

    def group(self, name: str) -> kc.BufferGroup:
        return next(g for g in self.groups if g.name == name)

    def share(self, request: Request, other: Request, count: int) -> None:
        """Let a request begin with the cached prefix of another."""
        self.table[request.row, :count] = self.table[other.row, :count]
        request.cached = count

    def map(self, request: Request, start: int, end: int) -> None:
        self.table[request.row, start:end] = self._allocate(request, end - start).int()

    def write_bytes(self, batch: kc.ForwardBatch) -> None:
        slots = batch.out_slots[next(g.name for g in self.groups if g.lut is None)]
        lut = getattr(self.pool, "full_to_swa_index_mapping", None)
        for layer_id in self.kind.layer_ids if len(slots) else ():
            self.kind.write(self.pool, layer_id, slots, None if lut is None else lut[slots])

    def run(self, batch: kc.ForwardBatch) -> None:
        # FP4's quantisation would be compiled first.
        with one_rank(), torch.compiler.set_stance("force_eager"):
            super().run(batch)

    def leave_window(self, request: Request, *, retire: bool = True) -> torch.Tensor:
        """Let the allocator take back the window's slots that no token to come will read; return them."""
        end = max(0, request.cached - WINDOW) // self.page * self.page
        full = self.table[request.row, :end].long()
        lut = self.pool.full_to_swa_index_mapping
        full = full[lut[full] > 0]
        gone = lut[full].clone()
        if retire:
            self.retire(self.group("swa"), gone, owner=request.owner)
        self.allocator.free_swa(full)
        return gone

    def finish(self, request: Request, *, keep: int = 0) -> None:
        """Free everything of a request behind its first `keep` tokens."""
        full = self.table[request.row, keep : request.cached].long()
        for group in self.groups:
            slots = full if group.lut is None else group.lut[full]
            self.retire(group, slots[slots > 0], owner=request.owner)
        if self.kind.windowed:
            # Its `free` wants slots whose window is still there.
            lut = self.pool.full_to_swa_index_mapping
            self.allocator.free_swa(full[lut[full] > 0])
            self.allocator.free_full(full)
        else:
            self.allocator.free(full)
        self.rows.release(request.name)

    def retire(self, group: kc.BufferGroup, slots: torch.Tensor, *, owner: int) -> None:
        self.manager.retire(group.pool, slots, owner=owner)

    def _allocate(self, request: Request, count: int) -> torch.Tensor:
        if not count:
            return torch.zeros(0, dtype=torch.int64)
        if self.page == 1:
            slots = self.allocator.alloc(count)
        else:
            start, end = torch.tensor([request.cached]), torch.tensor([request.cached + count])
            last = self.table[request.row, request.cached - 1 : request.cached].long()
            last = last if request.cached else torch.tensor([-1])
            slots = self.allocator.alloc_extend(start, start, end, end, last, count)
        assert slots is not None, "the pool is full"
        return slots.long()


def lived_in(kind: Kind, page: int, **options: Any) -> tuple[PoolEngine, Request]:
    """Return an engine with one long request behind a prefill, a chunk, shared prefixes, frees and decodes."""
    engine = PoolEngine(kind, page, **options)
    a, b = engine.add("a", MAX_LEN), engine.add("b", 60)
    engine.step((a, 37), (b, 5))
    engine.step((a, 20), (b, 1))
    for _ in range(3):
        engine.step((a, 1), (b, 1))
    # Whole pages are shared.
    shared = 32 // page * page
    c = engine.add("c", [*a.tokens[:shared], *range(7000, 7040)])
    engine.share(c, a, shared)
    engine.step((c, 11), (a, 1))
    engine.finish(b)
    engine.finish(c, keep=shared)
    d = engine.add("d", 60)
    engine.step((d, 25), (a, 1))
    engine.step((d, 1), (a, 1))
    return engine, a


@contextmanager
def one_rank() -> Iterator[None]:
    """Tell the engine's pools that rows are not spread over ranks."""
    with get_parallel().override(dcp_enabled=False, attn_dcp_size=1, attn_dcp_rank=0):
        yield


def make_allocator(pool: Any, page: int) -> Any:
    """Return the allocator that SGLang would make for the pool."""
    if hasattr(pool, "swa_kv_pool"):
        swa = getattr(pool, "size_swa", SIZE)
        return SWATokenToKVPoolAllocator(SIZE, swa, page, torch.float32, "cpu", pool, False)
    if page == 1:
        return TokenToKVPoolAllocator(SIZE, torch.float32, "cpu", pool, False)
    return PagedTokenToKVPoolAllocator(SIZE, page, torch.float32, "cpu", pool, False)
