"""Class A: KV that is freed while somebody still reads or writes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from kv_canary import CanaryConfig, ForwardBatch, Reason
from kv_canary.difftest.simulator import Call, EngineConfig, Request
from kv_canary.difftest.simulator.groups import Group
from kv_canary.difftest.simulator.kv_bytes import fill_slots
from kv_canary.difftest.simulator.prefix_cache import PrefixCache
from kv_canary.difftest.simulator.scheduler_state import Room

from .harness import Scenario, model_scenario
from .served import CANARY, PAGE, ServedEngine, full
from .tiers import HostTierEngine


class ReceivingEngine(ServedEngine):
    """The KV of some prompts comes from a prefill process: a page lands before each forward."""

    def __init__(self, config: EngineConfig, *, canary: CanaryConfig = CANARY) -> None:
        self.landing: deque[tuple[Request, int]] = deque()
        self.network = np.random.default_rng(1)
        super().__init__(config, canary=canary)

    def receive(self, *, fresh: int) -> Request:
        """Give a request pages for its whole prompt, and let their content come."""
        request = self.come(fresh=fresh)
        self.go(self.reserve(request, fresh))
        self.landing += [(request, page) for page in request.pages]
        return request

    def abort(self, request: Request) -> None:
        """Give up a request whose KV may still be on the way."""
        self.wait_for_transfer(request)
        self.leave(request, keep=False)

    def wait_for_transfer(self, request: Request) -> None:
        while any(r is request for r, _ in self.landing):
            self.land()

    def land(self) -> None:
        """Let the next page land."""
        _, page = self.landing.popleft()
        for group in self.groups:
            for source in group.sources:
                fill_slots(source, group.page_slots([page]), self.network)

    def _step_calls(self, extends: Mapping[Request, int], *, padding: int) -> Iterator[Call]:
        if self.landing:
            self.land()
        yield from super()._step_calls(extends, padding=padding)


class FreesWhileLanding(ReceivingEngine):
    def wait_for_transfer(self, request: Request) -> None:
        pass

    def land(self) -> None:
        request, page = self.landing[0]
        spoiled = [s for s in self.pages.slots([page]) if self.users_of(s) and page not in request.pages]
        super().land()
        if spoiled:
            self.acted({"full": spoiled})


def aborted_transfer(engine: ReceivingEngine) -> None:
    other = engine.come(fresh=9)
    engine.prefill(other)
    aborted = engine.receive(fresh=12)
    engine.decode(other)
    engine.abort(aborted)
    # It gets the pages that are still being written.
    victim = engine.come(fresh=11)
    engine.prefill(victim)
    engine.decode(victim, other, steps=4)


class OverlappedEngine(HostTierEngine):
    """The host goes on scheduling between preparing a forward and the moment it runs.

    What a request that has ended meanwhile computes is thrown away; its pages are free once the forward has run.
    """

    def __init__(self, config: EngineConfig, *, canary: CanaryConfig = CANARY) -> None:
        self.meanwhile: Callable[[], None] | None = None
        self.in_flight = False
        # What follows the forward in flight on its stream, and the pages that are let go of then.
        self.behind: list[Callable[[], None]] = []
        self.deferred: list[tuple[list[int], int]] = []
        super().__init__(config, canary=canary)

    def release(self, pages: Sequence[int], *, owner: int) -> Iterator[Call]:
        if self.in_flight:
            self.deferred.append((list(pages), owner))
        else:
            yield from super().release(pages, owner=owner)

    def retire(self, group: Group, slots: Sequence[int], *, owner: int) -> Iterator[Call]:
        self.enqueue(lambda: self.go(HostTierEngine.retire(self, group, slots, owner=owner)))
        yield from ()

    def carry(self, src: Sequence[int], dst: Sequence[int], *, owner: int) -> None:
        self.enqueue(lambda: HostTierEngine.carry(self, src, dst, owner=owner))

    def enqueue(self, launch: Callable[[], None]) -> None:
        """Launch behind the forward in flight, if there is one."""
        if self.in_flight:
            self.behind.append(launch)
        else:
            launch()

    def forward_batch(self, extends: Mapping[Request, int]) -> ForwardBatch:
        batch = super().forward_batch(extends)
        requests = [
            replace(described, discarded=lambda request=request: request not in self.running)
            for described, request in zip(batch.requests, extends, strict=True)
        ]
        # The forward has copies: rows may change hands meanwhile.
        return replace(batch, requests=requests, tables={n: t.clone() for n, t in batch.tables.items()})

    def watch(self, batch: ForwardBatch, extends: Mapping[Request, int]) -> None:
        super().watch(batch, extends)
        self.in_flight = True
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()

    def _step_calls(self, extends: Mapping[Request, int], *, padding: int) -> Iterator[Call]:
        yield from super()._step_calls(extends, padding=padding)
        self.in_flight = False
        while self.behind:
            self.behind.pop(0)()
        while self.deferred:
            pages, owner = self.deferred.pop(0)
            yield from self.release(pages, owner=owner)


class FreesInFlight(OverlappedEngine):
    def release(self, pages: Sequence[int], *, owner: int) -> Iterator[Call]:
        yield from HostTierEngine.release(self, pages, owner=owner)

    def kernel_writes(self, group: Group, slots: Sequence[int]) -> list[int]:
        spoiled = [(s, r) for s in slots for r, _ in self.users_of(s) if s not in self.pages.slots(r.pages)[r.cached :]]
        if spoiled:
            self.acted({"full": [s for s, _ in spoiled]}, [r for _, r in spoiled])
        return super().kernel_writes(group, slots)


def ended_in_flight(engine: OverlappedEngine) -> None:
    stored = engine.come(fresh=10)
    engine.prefill(stored)
    engine.decode(stored, steps=2)
    engine.offload(stored)
    ending = engine.come(fresh=9)
    engine.prefill(ending)
    engine.decode(ending)

    def meanwhile() -> None:
        engine.leave(ending, keep=False)
        engine.restore(stored)

    engine.meanwhile = meanwhile
    engine.decode(ending)
    engine.decode(stored, steps=3)


class FlushingEngine(HostTierEngine):
    """What a retracted request had is flushed to the host behind the next forward."""

    def keep_until_stored(self, pages: list[int], hosts: list[int], owner: int) -> None:
        self.pages.hold(pages)
        row = next(r.row for r in self.running if r.pages == pages)

        def flush() -> None:
            slots = self.flushed_slots(row, pages)
            for device, host in zip(self.layers, self.host_layers, strict=True):
                host[[h * PAGE + i for h in hosts for i in range(PAGE)]] = device[slots]
            HostTierEngine.carry(self, slots, self.host_records(hosts), owner=owner)
            self.go(self.release(pages, owner=owner))

        self.stores.append(flush)

    def carry(self, src: Sequence[int], dst: Sequence[int], *, owner: int) -> None:
        # Storing is not asked for yet; the flush carries the records.
        if src[0] >= self.pool.num_slots:
            super().carry(src, dst, owner=owner)

    def flushed_slots(self, row: int, pages: Sequence[int]) -> list[int]:
        """Return the slots to flush."""
        return self.pages.slots(pages)


class FlushesByRow(FlushingEngine):
    def flushed_slots(self, row: int, pages: Sequence[int]) -> list[int]:
        right = super().flushed_slots(row, pages)
        slots = self.table[row, : len(right)].tolist()
        self.wrong = [i for i, (a, b) in enumerate(zip(slots, right, strict=True)) if a != b]
        self.acted({})
        return slots

    def restore(self, request: Request) -> None:
        super().restore(request)
        slots = self.pages.slots(request.pages)
        self.acted({"full": [slots[i] for i in self.wrong]}, [request])


def reused_row(engine: FlushingEngine) -> None:
    first = engine.come(fresh=10)
    engine.prefill(first)
    engine.decode(first)
    engine.offload(first)
    # It gets the row, and runs before the flush.
    second = engine.come(fresh=13)
    engine.prefill(second)
    engine.decode(second)
    engine.restore(first)
    engine.decode(first, second, steps=3)


class ReservingEngine(ServedEngine):
    """Prompts get all their pages at once, before the first chunk."""

    def admit(self, request: Request) -> bool:
        if not super().admit(request):
            return False
        self.go(self.reserve(request, len(request.tokens)))
        return True

    def trim(self, request: Request) -> Iterator[Call]:
        if self.remaining(request) <= 0:
            yield from super().trim(request)


class CachesUnfilled(ReservingEngine):
    def finish(self, request: Request, *, keep: bool = True) -> Iterator[Call]:
        filled, request.cached = request.cached, min(len(request.pages) * PAGE, len(request.tokens))
        if keep and filled < request.cached:
            self.acted({"full": self.pages.slots(request.pages)[filled:]})
        yield from super().finish(request, keep=keep)


def aborted_prefill(engine: ReservingEngine, *, churn: bool) -> None:
    if churn:
        before = engine.come(fresh=20)
        engine.prefill(before)
        engine.leave(before)
        engine.go(engine.evict(5))
    aborted = engine.come(shared=12, fresh=5)
    engine.prefill(aborted, chunk=4)
    engine.leave(aborted)
    again = engine.come(shared=12, fresh=5)
    engine.prefill(again)
    engine.decode(again, steps=2)


class KeepsEvicted(ServedEngine):
    """Evicted pages are freed and can still be found."""

    def restart(self) -> None:
        super().restart()
        self.cache = ForgetsNothing(self.config.page_size)
        self.evicted: set[int] = set()

    def release(self, pages: Sequence[int], *, owner: int) -> Iterator[Call]:
        listed = [p for p in pages if self.pages.holders[p] == 1 and p in self.cache.pages()]
        if listed:
            self.evicted.update(listed)
            self.acted({})
        yield from super().release(pages, owner=owner)

    def take_cached_prefix(self, request: Request) -> None:
        super().take_cached_prefix(request)
        gone = [p for p in request.pages if p in self.evicted]
        if gone:
            self.acted(self.slots_of(gone), [request])


class ForgetsNothing(PrefixCache):
    def evict(self, *, idle: Callable[[int], bool]) -> int | None:
        leaves = [n for n in self._nodes() if not n.children and idle(n.page)]
        return min(leaves, key=lambda n: n.used).page if leaves else None


def hit_after_eviction(engine: ServedEngine) -> None:
    first = engine.come(shared=8)
    engine.prefill(first)
    engine.decode(first, steps=2)
    engine.leave(first)
    engine.go(engine.evict(1))
    again = engine.come(shared=8, fresh=3)
    engine.prefill(again)
    other = engine.come(fresh=9)
    engine.prefill(other)
    engine.decode(again, other, steps=3)


def hit_after_churn(engine: ServedEngine) -> None:
    first = engine.come(shared=8)
    engine.prefill(first)
    engine.leave(first)
    # Of eight pages it needs seven.
    churning = engine.come(fresh=21)
    engine.prefill(churning)
    engine.decode(churning, steps=6)
    again = engine.come(shared=8, fresh=3)
    engine.leave(churning, keep=False)
    engine.prefill(again)
    engine.decode(again, steps=2)


class FreesShared(ServedEngine):
    def retract(self, request: Request) -> Iterator[Call]:
        shared = [p for p in request.pages if self.pages.holders[p] > 1]
        for page in shared:
            self.pages.holders[page] = 1
        self.acted(self.slots_of(shared))
        yield from super().retract(request)


def retracted_sharer(engine: ServedEngine) -> None:
    first = engine.come(shared=8, fresh=2)
    engine.prefill(first)
    second = engine.come(shared=8, fresh=3)
    engine.prefill(second)
    engine.take_back(second)
    engine.decode(first)
    other = engine.come(stem=1, shared=16)
    engine.prefill(other)
    engine.decode(first, other, steps=3)


class HandsOutTwice(ServedEngine):
    """Two prompts that come at once are given the same page."""

    twice: int | None = None

    def new_pages(self, count: int) -> list[int]:
        pages = super().new_pages(count)
        if self.twice is None:
            self.twice = pages[-1]
            self.pages.free_held(self.twice)
        return pages

    def reserve(self, request: Request, end: int) -> Room:
        room = yield from super().reserve(request, end)
        owners = [r for r in self.running if self.twice in r.pages]
        if len(owners) > 1 and not self.life.acts:
            self.acted({"full": self.pages.slots([self.twice])}, owners, shown_by=[request])
        return room


def cold_prefills(engine: ServedEngine) -> None:
    both = [engine.come(fresh=8), engine.come(fresh=12)]
    engine.prefill(*both)
    engine.prefill(*[r for r in both if not r.cached] or both)
    engine.decode(*both, steps=3)


PLAIN = "full attention"

SCENARIOS: tuple[Scenario, ...] = (
    model_scenario(
        name="freed-while-landing",
        fault="A",
        example="sglang#24527",
        doc="an aborted request's pages are freed while its KV is still arriving",
        engine="receives KV, no prefix cache",
        expected=Reason.K | Reason.V,
        life=aborted_transfer,
        config=lambda: full(prefix_cache=False),
        healthy=ReceivingEngine,
        faulty=FreesWhileLanding,
    ),
    model_scenario(
        name="freed-in-flight",
        fault="A",
        example="vllm#45357",
        doc="pages of a step in flight are freed, and loaded into before it runs",
        engine="overlapped scheduling, host tier",
        expected=Reason.K | Reason.V,
        life=ended_in_flight,
        config=lambda: full(prefix_cache=False),
        healthy=OverlappedEngine,
        faulty=FreesInFlight,
    ),
    model_scenario(
        name="flushed-by-row",
        fault="A",
        example="sglang#38179",
        doc="a retracted request's KV is flushed through its row, which is another's by then",
        engine="host tier, flushed one step late",
        expected=Reason.TOKEN,
        life=reused_row,
        config=lambda: full(prefix_cache=False),
        healthy=FlushingEngine,
        faulty=FlushesByRow,
    ),
    *(
        model_scenario(
            name=f"cached-unfilled-{name}",
            fault="A",
            example="TGI#2489",
            doc=f"a prompt aborted in mid-prefill leaves pages in the prefix cache that were never filled ({pool})",
            engine=f"{PLAIN}, prefix cache",
            expected=expected,
            life=lambda engine, churn=churn: aborted_prefill(engine, churn=churn),
            config=full,
            healthy=ReservingEngine,
            faulty=CachesUnfilled,
        )
        for name, pool, churn, expected in (
            ("new", "a new pool", False, Reason.NEVER_WRITTEN),
            ("recycled", "recycled pages", True, Reason.FREED),
        )
    ),
    model_scenario(
        name="evicted-but-listed",
        fault="A",
        example="vllm#4761",
        doc="an evicted page stays in the prefix cache, and is hit before it is reused",
        engine=f"{PLAIN}, prefix cache",
        expected=Reason.FREED,
        life=hit_after_eviction,
        config=full,
        faulty=KeepsEvicted,
    ),
    model_scenario(
        name="evicted-and-reused",
        fault="A",
        example="vllm#4761",
        doc="the same in a tight pool: a long request churns between a prefix and its reuse",
        engine=f"{PLAIN}, prefix cache, eight pages",
        expected=Reason.TOKEN | Reason.FREED,
        life=hit_after_churn,
        config=lambda: full(num_pages=8),
        faulty=KeepsEvicted,
    ),
    model_scenario(
        name="shared-page-freed",
        fault="A",
        example="mini-sglang#142",
        doc="retracting a request frees pages that another one shares",
        engine=f"{PLAIN}, prefix cache",
        expected=Reason.FREED,
        life=retracted_sharer,
        config=full,
        faulty=FreesShared,
    ),
    model_scenario(
        name="handed-out-twice",
        fault="A",
        example="concurrent cold prefills",
        doc="two prompts that are prefilled cold at once are given one page",
        engine=f"{PLAIN}, no prefix cache",
        expected=Reason.OVERWRITE,
        life=cold_prefills,
        config=lambda: full(prefix_cache=False),
        faulty=HandsOutTwice,
    ),
)
