"""The state of an engine's scheduler: pages, rows, tables, tokens and the prefix cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch

from kv_canary.constants import ANCHOR, to_signed
from kv_canary.difftest.simulator.allocator import PageAllocator
from kv_canary.difftest.simulator.batch import Batch, Segments
from kv_canary.difftest.simulator.config import EngineConfig
from kv_canary.difftest.simulator.groups import Group, LutGroup, RingGroup, rows_apart
from kv_canary.difftest.simulator.kv_bytes import copy_slots
from kv_canary.difftest.simulator.op_calls import Call, int64, move_call, retire_call
from kv_canary.difftest.simulator.prefix_cache import PrefixCache
from kv_canary.difftest.simulator.requests import Request
from kv_canary.errors import must_be

VOCABULARY = 1 << 17

# Calls to be made on the way, then whether there was room.
Room = Generator[Call, None, bool]


class SchedulerState:
    """The state of a scheduler. Methods that change what is cached yield the calls that go with it."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.rng = np.random.default_rng(config.seed)
        self.step_number = config.first_step
        self.next_serial = config.first_owner
        self.restart()

    def restart(self) -> None:
        """Begin with an empty cache and no requests."""
        config = self.config
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.free_rows = list(range(config.max_rows - 1, 0, -1))
        # Of each row: whose tail it has, and of how many tokens.
        self.tail_lengths: dict[int, tuple[int, int]] = {}
        self.cache = PrefixCache(config.page_size)
        self.pages = PageAllocator(
            first_slot=config.first_slot, num_pages=config.num_pages, page_size=config.page_size, rng=self.rng
        )
        self.table = rows_apart(config.max_rows, config.max_len, config.gap, torch.int32)
        self.groups: list[Group] = []
        for group in config.groups:
            if group.kind == "lut":
                self.groups.append(LutGroup(group, pages=self.pages, table=self.table, rng=self.rng))
            elif group.kind == "ring":
                table = rows_apart(config.max_rows, config.max_len, config.gap, torch.int32)
                self.groups.append(RingGroup(group, pages=self.pages, table=table, rng=self.rng))
            else:
                self.groups.append(Group(group, pages=self.pages, table=self.table))
        self.anchors = torch.zeros(config.max_rows, dtype=torch.int64) if config.anchors else None

    @property
    def luts(self) -> list[LutGroup]:
        return [g for g in self.groups if isinstance(g, LutGroup)]

    @property
    def rings(self) -> list[RingGroup]:
        return [g for g in self.groups if isinstance(g, RingGroup)]

    def inputs(self, request: Request, start: int, end: int) -> list[int]:
        """Return what the model is given at positions [start, end)."""
        offset = self.config.token_offset
        return request.tokens[start + offset : end + offset]

    def remaining(self, request: Request) -> int:
        """Return how many tokens the request has that are not cached."""
        return len(request.tokens) - self.config.token_offset - request.cached

    def new_tokens(self, count: int) -> list[int]:
        return [int(t) for t in self.rng.integers(0, VOCABULARY, max(count, 0))]

    def check_integrity(self) -> None:
        """Check that pages, tables, windows and rings fit together. Holds between steps of a healthy engine.

        Raises:
            RuntimeError: they do not.
        """
        holders = Counter(p for r in self.running for p in r.pages)
        holders.update(self.cache.pages())
        self.pages.check_integrity(holders)
        rows = [r.row for r in self.running] + self.free_rows
        if sorted(rows) != list(range(1, self.config.max_rows)):
            raise RuntimeError(must_be("difftest engine", "rows", "used once or free", str(rows)))
        for request in self.running:
            named = self.table[request.row, : request.cached].tolist()
            if self.needs_pages and named != self.pages.slots(request.pages)[: request.cached]:
                raise RuntimeError(must_be("difftest engine", "table", "what the request holds", str(named)))
            for group in self.luts:
                if not set(request.pages[self.first_read(request, group) :]) <= set(group.resident):
                    raise RuntimeError(must_be("difftest engine", "window", "resident", str(request.pages)))
        for group in self.luts:
            group.check_integrity()
        for ring in self.rings:
            ring.own.check_integrity(Counter(ring.rings.values()))

    @property
    def needs_pages(self) -> bool:
        """Whether any group's tokens lie in pages."""
        return len(self.rings) < len(self.groups)

    def first_read(self, request: Request, group: Group) -> int:
        """Return the index of the first page that the request's next step reads in `group`."""
        window = group.config.window
        return max(request.cached - window, 0) // self.config.page_size if window else 0

    def take_cached_prefix(self, request: Request) -> None:
        """Give `request` the longest cached prefix whose windows are resident, so that one token or more is left."""
        config = self.config
        if self.anchors is not None:
            # Any fixed function of the identity will do.
            self.anchors[request.row] = to_signed(ANCHOR ^ (request.identity * 0x9E3779B97F4A7C15))
        if not config.prefix_cache or self.rings:
            return
        known = self.remaining(request)
        matched = self.cache.match(
            request.identity, self.inputs(request, 0, known if config.rewrite_matched else known - 1)
        )
        for count in range(len(matched), -1, -1):
            request.pages, request.cached = matched[:count], min(count * config.page_size, known - 1)
            if all(set(request.pages[self.first_read(request, g) :]) <= set(g.resident) for g in self.luts):
                break
        self.pages.hold(request.pages)
        self.fill_table(request)

    def fill_table(self, request: Request, first_page: int = 0) -> None:
        """Name the slots of the request's pages, from `first_page` on, in its row."""
        start = first_page * self.config.page_size
        slots = self.pages.slots(request.pages[first_page:])[: self.config.max_len - start]
        self.table[request.row, start : start + len(slots)] = torch.tensor(slots, dtype=torch.int32)

    def reserve(self, request: Request, end: int) -> Room:
        """Give `request` pages up to position `end`."""
        missing = -(-end // self.config.page_size) - len(request.pages)
        if self.needs_pages and missing > 0:
            if not (yield from self.make_room(missing)):
                return False
            first = len(request.pages)
            request.pages += self.new_pages(missing)
            self.fill_table(request, first)
        return True

    def make_room(self, count: int) -> Room:
        """Evict until `count` pages are free in every pool."""
        yield from self.evict(count - self.pages.num_free)
        if not all(g.can_map(count) for g in self.luts):
            yield from self.leave_windows(cached_too=True)
        return self.pages.num_free >= count and all(g.can_map(count) for g in self.luts)

    def new_pages(self, count: int) -> list[int]:
        pages = self.pages.allocate(count)
        for group in self.groups:
            group.map_pages(pages)
        return pages

    def evict(self, count: int) -> Iterator[Call]:
        """Drop up to `count` pages that only the prefix cache holds, those used longest ago first."""
        gone: list[int] = []
        for _ in range(count):
            page = self.cache.evict(idle=lambda p: self.pages.holders[p] == 1)
            if page is not None:
                gone.append(page)
        yield from self.release(gone, owner=0)

    def leave_windows(self, *, cached_too: bool = False) -> Iterator[Call]:
        """Free the places behind a LUT of pages that no running request reads, nor the prefix cache keeps."""
        for group in self.luts:
            read = {p for r in self.running for p in r.pages[self.first_read(r, group) :]}
            kept = set() if cached_too else set(self.cache.pages())
            slots = group.unmap_pages([p for p in group.resident if p not in read and p not in kept])
            yield from self.retire(group, slots, owner=0)

    def share(self, request: Request) -> Iterator[Call]:
        """Put the request's whole pages into the prefix cache, and use older pages of the same prefix instead."""
        if not self.config.prefix_cache or self.rings:
            return
        chosen, kept = self.cache.insert(
            request.identity,
            self.inputs(request, 0, request.cached),
            request.pages,
            usable=lambda page: all(page in g.resident for g in self.luts),
        )
        self.pages.hold(kept)
        own = request.pages[: len(chosen)]
        replaced = [o for o, c in zip(own, chosen, strict=True) if o != c]
        if replaced:
            self.pages.hold(c for o, c in zip(own, chosen, strict=True) if o != c)
            request.pages[: len(chosen)] = chosen
            self.fill_table(request)
            yield from self.release(replaced, owner=request.owner)

    def trim(self, request: Request) -> Iterator[Call]:
        """Release the pages past the cached positions."""
        whole = -(-request.cached // self.config.page_size)
        spare, request.pages = request.pages[whole:], request.pages[:whole]
        yield from self.release(spare, owner=request.owner)

    def release(self, pages: Sequence[int], *, owner: int) -> Iterator[Call]:
        """Let go of pages; the slots of those that are free now are retired, before their places are given up."""
        freed = self.pages.release(pages)
        for group in self.groups:
            yield from self.retire(group, group.unmap_pages(freed), owner=owner)

    def retire(self, group: Group, slots: Sequence[int], *, owner: int) -> Iterator[Call]:
        if slots:
            yield retire_call(group, slots=slots, owner=owner, step=self.step_number)

    def move(self, group: Group, src: Sequence[int], dst: Sequence[int], *, owner: int) -> Iterator[Call]:
        """Copy slots, and their records. The same destination twice, after a fault, is not copied to at all."""
        if src and len(set(dst)) == len(dst):
            for source in group.sources:
                copy_slots(source, src, dst)
            yield move_call(group, src=src, dst=dst, owner=owner, step=self.step_number)

    def segments(self, requests: Sequence[Request]) -> tuple[Segments, Segments]:
        """Return what brings the tails, and the tokens, of `requests` up to their prefixes; count it as done."""
        offset = self.config.token_offset
        inputs: list[list[int]] = []
        tokens: list[list[int]] = []
        starts = []
        for request in requests:
            serial, length = self.tail_lengths.get(request.row, (None, 0))
            start = length if serial == request.serial and length <= request.cached else 0
            inputs.append(self.inputs(request, start, request.cached))
            tokens.append(request.tokens[start + offset if start else 0 : request.cached + offset])
            starts.append(start)
            self.tail_lengths[request.row] = request.serial, request.cached
        rows = [r.row for r in requests]
        return _segments(inputs, rows, starts), _segments(tokens, rows, [s + offset if s else 0 for s in starts])

    def batch(self, extends: Mapping[Request, int], *, padding: int) -> Batch:
        """Return the forward that extends requests by so many tokens each, with `padding` rows behind them."""
        config, requests, none = self.config, list(extends), [0] * padding
        prefix = [r.cached for r in requests]
        input_ids = [t for r, n in extends.items() for t in self.inputs(r, r.cached, r.cached + n)]
        out_slots = {g.name: self.out_slots(g, extends) for g in self.groups}
        strides = [config.stride if r.steps else 1 for r in requests]
        return Batch(
            rows=int64([r.row for r in requests] + none),
            owners=int64([r.owner for r in requests] + none) if config.serial_owners else None,
            prefix_lens=int64(prefix + none),
            extend_lens=int64([*extends.values()] + [1] * padding),
            expected_lens=int64([p + config.token_offset for p in prefix] + none),
            strides=int64(strides + [1] * padding) if config.stride > 1 else None,
            input_ids=int64(input_ids + none),
            positions=int64([r.cached + k for r, n in extends.items() for k in range(n)] + none),
            expected_input_ids=int64(input_ids + none) if config.token_oracle else None,
            out_slots={name: int64(slots + none) for name, slots in out_slots.items()},
            step=int64([self.step_number]),
        )

    def out_slots(self, group: Group, extends: Mapping[Request, int]) -> list[int]:
        return [s for r, n in extends.items() for s in group.out_slots(r, r.cached, r.cached + n)]

    def without_collisions(self, extends: Mapping[Request, int]) -> dict[Request, int]:
        """Return `extends` less the requests that write a slot that another one, or they themselves, write too.

        What a slot holds after two writes in one step is undefined. Engines let two requests write one only where both
        repeat the last token of a prompt that is cached wholly; here the second waits. Others are faults.
        """
        seen: set[tuple[str, int]] = set()
        kept = {}
        for request, extend in extends.items():
            mine = [(g.name, s) for g in self.groups for s in self.out_slots(g, {request: extend}) if s > 0]
            if len(set(mine)) == len(mine) and not seen.intersection(mine):
                seen.update(mine)
                kept[request] = extend
        return kept


def _segments(parts: Sequence[Sequence[int]], rows: Sequence[int], starts: Sequence[int]) -> Segments:
    return Segments(
        flat=int64([t for part in parts for t in part]),
        offsets=int64([0, *accumulate(len(part) for part in parts)]),
        rows=int64(rows),
        starts=int64(starts),
    )
