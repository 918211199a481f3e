"""The engine: requests come, are prefilled and decoded, share prefixes, fork, wait and go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from kv_canary.difftest.simulator.config import EngineConfig
from kv_canary.difftest.simulator.faults import Change, with_changes
from kv_canary.difftest.simulator.groups import LutGroup, RingGroup
from kv_canary.difftest.simulator.kv_bytes import fill_slots
from kv_canary.difftest.simulator.memory import Memory
from kv_canary.difftest.simulator.op_calls import Call, StepCalls
from kv_canary.difftest.simulator.requests import Request
from kv_canary.difftest.simulator.scheduler_state import VOCABULARY, SchedulerState
from kv_canary.specs import get_spec


class Engine(SchedulerState):
    """An engine's bookkeeping. What changes it yields op calls, each to be made before the next is asked for.

    A healthy engine's calls find no violations. `memories` are those that its calls are made on: faults damage all of
    them alike.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.memories: list[Memory] = []
        self.healthy = True
        # Faults of the next step's calls.
        self.changes: list[Change] = []
        super().__init__(config)

    def new_memory(self) -> Memory:
        """Return another memory for the engine's calls, to be made before the first of them."""
        self.memories.append(Memory(self.config))
        return self.memories[-1]

    def arrive(self, *, stem: int, shared: int, fresh: int, identity: int = 0) -> Request:
        """Queue a request whose prompt is `shared` tokens of a text that others begin with too, then `fresh` ones."""
        config = self.config
        text = np.random.default_rng([config.seed, stem]).integers(0, VOCABULARY, config.max_len)
        prompt = [int(t) for t in text[:shared]] + self.new_tokens(max(fresh, int(shared == 0)))
        tokens = prompt[: config.max_len - 1] + self.new_tokens(config.token_offset)
        request = self._new_request(tokens, identity=identity if config.anchors else 0)
        self.waiting.append(request)
        return request

    def admit(self, request: Request) -> bool:
        """Give a waiting request a row and what the prefix cache has of it; return whether there was room."""
        if not self.free_rows or not all(ring.own.num_free for ring in self.rings):
            return False
        self.waiting.remove(request)
        self._take_row(request)
        request.steps = 0
        self.take_cached_prefix(request)
        return True

    def step(
        self, work: Mapping[Request, int], *, accepted: Mapping[Request, int] | None = None, padding: int = 0
    ) -> Iterator[Call]:
        """Run one forward, which extends each running request by so many tokens, with `padding` rows behind them.

        Requests that find no room, and those that would write what another one writes, are left out. Where tokens are
        drafts, only the first so many of `accepted` stay.
        """
        config, offset = self.config, self.config.token_offset
        extends: dict[Request, int] = {}
        for request, wanted in work.items():
            extend = min(wanted, config.max_len - request.cached)
            # A row that is full gets nothing more.
            if extend > 0 and (yield from self.reserve(request, request.cached + extend)):
                # What the request has not got, the model has generated.
                request.tokens += self.new_tokens(request.cached + extend + offset - len(request.tokens))
                extends[request] = extend
        extends = self.without_collisions(extends)
        calls = self._step_calls(extends, padding=padding)
        changes, self.changes = self.changes, []
        for call in calls:
            faulty = with_changes(call, changes)
            if self.healthy or get_spec(faulty.op).has_one_outcome(faulty.arguments(self.memories[0])):
                yield faulty
        for request, extend in extends.items():
            kept = min(extend, (accepted or {}).get(request, extend))
            request.cached += kept
            request.steps += 1
            if kept < extend:
                del request.tokens[request.cached + offset :]
            yield from self.trim(request)
            yield from self.share(request)
        yield from self.leave_windows()
        self.step_number += 1

    def finish(self, request: Request, *, keep: bool = True) -> Iterator[Call]:
        """End a running request; with `keep` its whole pages stay in the prefix cache."""
        if keep:
            yield from self.share(request)
        self.running.remove(request)
        self.free_rows.append(request.row)
        for ring in self.rings:
            yield from self.retire(ring, ring.dismiss(request), owner=request.owner)
        pages, request.pages = request.pages, []
        yield from self.release(pages, owner=request.owner)
        request.row, request.cached = 0, 0

    def retract(self, request: Request) -> Iterator[Call]:
        """Take a running request's row and pages away and let it wait; it will be prefilled again."""
        yield from self.finish(request, keep=False)
        self.waiting.insert(0, request)

    def fork(self, parent: Request) -> Iterator[Call]:
        """Start a request that continues where `parent` stands: whole pages are shared, a partial one is copied."""
        whole = parent.cached // self.config.page_size
        shared, copied = parent.pages[:whole], parent.pages[whole:]
        if not self.free_rows or not all(ring.own.num_free for ring in self.rings):
            return
        # Held before anything is evicted to make room for the copy.
        self.pages.hold(shared)
        if not (yield from self.make_room(len(copied))):
            yield from self.release(shared, owner=parent.owner)
            return
        child = self._new_request(list(parent.tokens), identity=parent.identity)
        self._take_row(child)
        child.cached, child.steps = parent.cached, parent.steps
        child.pages = shared + self.new_pages(len(copied))
        if self.anchors is not None:
            self.anchors[child.row] = self.anchors[parent.row]
        self.fill_table(child)
        for group in self.groups:
            if isinstance(group, RingGroup):
                src, dst = group.ring_slots(parent), group.ring_slots(child)
            else:
                src, dst = group.page_slots(copied), group.page_slots(child.pages[whole:])
            yield from self.move(group, src, dst, owner=child.owner)

    def compact(self, request: Request) -> Iterator[Call]:
        """Move the pages that only `request` holds elsewhere, as defragmentation does."""
        mine = [p for p in request.pages if self.pages.holders[p] == 1][: self.pages.num_free]
        if not mine or self.rings:
            return
        new = self.pages.allocate(len(mine))
        for group in self.groups:
            if isinstance(group, LutGroup):
                # Its slots stay where they are, under other names.
                group.rename(mine, new)
            else:
                yield from self.move(group, group.page_slots(mine), group.page_slots(new), owner=request.owner)
        names = dict(zip(mine, new, strict=True))
        request.pages = [names.get(p, p) for p in request.pages]
        self.fill_table(request)
        yield from self.release(mine, owner=request.owner)

    def flush(self) -> None:
        """Forget everything, in every memory too. The engine is healthy again."""
        for memory in self.memories:
            memory.clear()
        self.restart()
        self.changes.clear()
        self.healthy = True

    def _new_request(self, tokens: list[int], *, identity: int) -> Request:
        serial, self.next_serial = self.next_serial, self.next_serial + 1
        return Request(name=f"request {serial}", serial=serial, owner=serial, identity=identity, tokens=tokens)

    def _take_row(self, request: Request) -> None:
        request.row = self.free_rows.pop()
        if not self.config.serial_owners:
            request.owner = request.row
        for ring in self.rings:
            ring.admit(request)
        self.running.append(request)

    def _step_calls(self, extends: Mapping[Request, int], *, padding: int) -> Iterator[Call]:
        batch = self.batch(extends, padding=padding)
        calls = StepCalls(config=self.config, batch=batch, anchors=self.anchors)
        tails, tokens = self.segments(list(extends))
        yield from calls.bring_up(tails, tokens if self.config.token_pool else None)
        for group in self.groups:
            yield from calls.head(group)
        for group in self.groups:
            for source in group.sources:
                fill_slots(source, batch.out_slots[group.name].tolist(), self.rng)
        for group in self.groups:
            yield from calls.tail(group)
