"""Class C: tables that name what was there before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from kv_canary import ForwardBatch, Reason
from kv_canary.difftest.simulator import Call, Request
from kv_canary.difftest.simulator.groups import Group, LutGroup
from kv_canary.difftest.simulator.prefix_cache import PrefixCache
from kv_canary.difftest.simulator.scheduler_state import Room

from .harness import NOTHING, Scenario, model_scenario
from .served import CANARY, PAGE, ServedEngine, full, full_and_lut, group_config


class IgnoresWindows(ServedEngine):
    """A prefix hit does not ask whether the window's slots are still there."""

    matching = False

    @property
    def luts(self) -> list[LutGroup]:
        return [] if self.matching else super().luts

    def take_cached_prefix(self, request: Request) -> None:
        self.matching = True
        super().take_cached_prefix(request)
        self.matching = False
        for group in self.luts:
            gone = [p for p in request.pages if p not in group.resident]
            if gone:
                self.acted({group.name: self.gone_slots(group, gone)}, [request])

    def gone_slots(self, group: LutGroup, pages: Sequence[int]) -> list[int]:
        """Return what the LUT names for pages that have left the window: the padding slot."""
        return group.page_slots(pages)


class KeepsEntries(IgnoresWindows):
    """What left the window is still named by the LUT, so that it passes for resident."""

    def leave_windows(self, *, cached_too: bool = False) -> Iterator[Call]:
        before = [group.lookup.clone() for group in self.luts]
        yield from super().leave_windows(cached_too=cached_too)
        for group, lookup in zip(self.luts, before, strict=True):
            left = (group.lookup == 0) & (lookup != 0)
            if left.any():
                self.acted({})
            group.lookup[left] = lookup[left]


def hit_behind_window(engine: ServedEngine) -> None:
    """A cached prefix leaves the windows' pool under pressure, its slots are used by another, and it is hit."""
    first = engine.come(shared=12)
    engine.prefill(first)
    engine.decode(first)
    engine.leave(first)
    engine.go(engine.leave_windows(cached_too=True))
    other = engine.come(fresh=11)
    engine.prefill(other)
    again = engine.come(shared=12, fresh=2)
    engine.prefill(again)
    engine.decode(again, other, steps=3)


class KeepsMapping(ServedEngine):
    """What leaves the window stays mapped, and a page that is mapped is not mapped anew when it is handed out."""

    def leave_windows(self, *, cached_too: bool = False) -> Iterator[Call]:
        before = [group.lookup.clone() for group in self.luts]
        yield from super().leave_windows(cached_too=cached_too)
        for group, lookup in zip(self.luts, before, strict=True):
            left = (group.lookup == 0) & (lookup != 0)
            group.lookup[left] = lookup[left]

    def new_pages(self, count: int) -> list[int]:
        pages = self.pages.allocate(count)
        for group in self.luts:
            stale = [p for p in pages if group.lookup[self.pages.slots([p])].any()]
            group.map_pages([p for p in pages if p not in stale])
            slots = set(group.page_slots(stale))
            owners = [r for r in self.running if slots.intersection(group.page_slots(r.pages))]
            if stale:
                self.acted({group.name: sorted(slots)}, owners, shown_by=[])
        return pages

    def reserve(self, request: Request, end: int) -> Room:
        acts = len(self.life.acts)
        room = yield from super().reserve(request, end)
        for i, act in enumerate(self.life.acts[acts:], acts):
            # The one that is given the stale pages shows it, when it writes.
            name = frozenset([str(request.serial)])
            self.life.acts[i] = replace(act, requests=act.requests | name, shown_by=name)
        return room


def page_mapped_before(engine: ServedEngine) -> None:
    long = engine.come(fresh=20)
    for _ in range(5):
        engine.prefill(long, chunk=4)
    # It is given the slots that have left the window of the first.
    second = engine.come(fresh=7)
    engine.prefill(second)
    engine.leave(long)
    third = engine.come(fresh=16)
    engine.go(engine.step({second: 1, third: 16}))
    engine.decode(second, third, steps=3)


class LocalisesForOther(ServedEngine):
    """In a batch of several decodes the window's writes go to the full pool's slot numbers."""

    def forward_batch(self, extends: Mapping[Request, int]) -> ForwardBatch:
        batch = super().forward_batch(extends)
        if len(extends) < 2 or any(n > 1 for n in extends.values()):
            return batch
        wrong, right = (batch.out_slots[name].tolist() for name in ("full", "lut"))
        read = [s for r in self.running for s in self.kernel_reads(self.luts[0], r)]
        self.acted({"lut": [s for s in wrong if s in read]})
        # The others show nothing before they are handed out; what is missing in the right ones, the next step reads.
        self.acted({"lut": wrong}, shown_by=[])
        self.acted({"lut": right}, list(extends), later=True)
        return replace(batch, out_slots={**batch.out_slots, "lut": batch.out_slots["full"]})


def two_decodes(engine: ServedEngine) -> None:
    requests = [engine.come(fresh=n) for n in (13, 14, 15)]
    engine.prefill(*requests)
    engine.decode(*requests)
    for request in requests:
        engine.decode(request)


class PhantomHits(ServedEngine):
    """Hits are looked up in an index that evictions do not reach."""

    def restart(self) -> None:
        super().restart()
        self.cache = Index(self.config.page_size)

    def evict(self, count: int) -> Iterator[Call]:
        if count > 0:
            self.acted({})
        yield from super().evict(count)

    def take_cached_prefix(self, request: Request) -> None:
        super().take_cached_prefix(request)
        kept = PrefixCache.match(self.cache, request.identity, request.tokens)
        if request.pages[len(kept) :]:
            self.acted(self.slots_of(request.pages[len(kept) :]), [request])


class Index(PrefixCache):
    def __init__(self, page_size: int) -> None:
        super().__init__(page_size)
        self._index: dict[tuple[int, ...], int] = {}

    def insert(
        self, identity: int, tokens: Sequence[int], pages: Sequence[int], *, usable: Callable[[int], bool]
    ) -> tuple[list[int], list[int]]:
        for i, page in enumerate(pages[: len(tokens) // self.page_size], 1):
            self._index.setdefault(tuple(tokens[: i * self.page_size]), page)
        return super().insert(identity, tokens, pages, usable=usable)

    def match(self, identity: int, tokens: Sequence[int]) -> list[int]:
        found = []
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            page = self._index.get(tuple(tokens[:end]))
            if page is None:
                break
            found.append(page)
        return found


def phantom(engine: ServedEngine) -> None:
    """Another prompt of the same length gets the evicted pages, in the same order."""
    first = engine.come(shared=8)
    engine.prefill(first)
    engine.leave(first)
    engine.go(engine.evict(2))
    other = engine.come(fresh=8)
    engine.prefill(other)
    again = engine.come(shared=8, fresh=3)
    engine.prefill(again)
    engine.decode(again, steps=2)


class ForgetsNewPage(ServedEngine):
    """Where a request's length is a whole number of pages, the new page is not entered into its row."""

    def reserve(self, request: Request, end: int) -> Room:
        before = self.table[request.row].clone()
        pages = len(request.pages)
        room = yield from super().reserve(request, end)
        if request.cached and request.cached % PAGE == 0 and len(request.pages) > pages:
            self.table[request.row] = before
            # This forward writes to the right slot; the next one reads the wrong one.
            self.acted({"full": before[request.cached : request.cached + PAGE].tolist()}, [request], later=True)
        return room


def whole_pages(engine: ServedEngine) -> None:
    before = engine.come(fresh=14)
    engine.prefill(before)
    engine.leave(before)
    # It gets the row, and its prompt fills two pages.
    request = engine.come(fresh=8)
    engine.prefill(request)
    engine.decode(request, steps=3)


class LeavesTooEarly(ServedEngine):
    """Where a window begins with a page, that page has left already."""

    def leave_windows(self, *, cached_too: bool = False) -> Iterator[Call]:
        self.leaving = True
        needed = [
            (g, r, r.pages[super(LeavesTooEarly, self).first_read(r, g) :]) for g in self.luts for r in self.running
        ]
        slots = [(g, r, g.page_slots([p for p in pages if p in g.resident])) for g, r, pages in needed]
        yield from super().leave_windows(cached_too=cached_too)
        self.leaving = False
        for group, request, before in slots:
            gone = [s for s in before if s not in group.page_slots(request.pages)]
            if gone:
                # The positions map to the padding slot now.
                self.acted({group.name: [0, *gone]}, [request])

    leaving = False

    def first_read(self, request: Request, group: Group) -> int:
        start = request.cached - group.config.window
        return super().first_read(request, group) + (self.leaving and start > 0 and start % PAGE == 0)


def window_of_pages(engine: ServedEngine) -> None:
    """A window of two pages, and a prompt of whole pages."""
    request = engine.come(fresh=12)
    engine.prefill(request)
    engine.decode(request, steps=3)


class WrapsEarly(ServedEngine):
    """New tokens go round a ring that is one slot shorter than the table has it."""

    def out_slots(self, group: Group, extends: Mapping[Request, int]) -> list[int]:
        right = super().out_slots(group, extends)
        positions = [r.cached + k for r, n in extends.items() for k in range(n)]
        rings = [group.ring_slots(r) for r, n in extends.items() for _ in range(n)]
        if any(n > 1 for n in extends.values()):
            return right
        return [ring[p % (len(ring) - 1)] for p, ring in zip(positions, rings, strict=True)]

    def watch(self, batch: ForwardBatch, extends: Mapping[Request, int]) -> None:
        super().watch(batch, extends)
        wrong = batch.out_slots["ring"].tolist()
        right = [s for r, n in extends.items() for s in self.rings[0].out_slots(r, r.cached, r.cached + n)]
        if wrong != right:
            self.acted({"ring": wrong}, list(extends))
            self.acted({"ring": right}, list(extends), later=True)


def round_the_ring(engine: ServedEngine) -> None:
    requests = [engine.come(fresh=7), engine.come(fresh=5)]
    engine.prefill(*requests)
    engine.decode(*requests, steps=4)


class RecachesLeft(IgnoresWindows):
    """The prefix cache takes pages as whole whose window slots have left already."""


def recached(engine: ServedEngine) -> None:
    first = engine.come(shared=16)
    for _ in range(4):
        engine.prefill(first, chunk=4)
    engine.go(engine.leave_windows(cached_too=True))
    engine.leave(first)
    # It shares three pages, of which the window of the fourth reads two.
    again = engine.come(shared=12, fresh=3)
    engine.prefill(again)
    engine.decode(again, steps=3)


LUT = "full and sliding attention, LUT"

SCENARIOS: tuple[Scenario, ...] = (
    model_scenario(
        name="stale-lut-entry",
        fault="C",
        example="vllm#42273",
        doc="what left the window stays in the table, and passes for resident at a prefix hit",
        engine=LUT,
        expected=Reason.TOKEN | Reason.CHAIN,
        life=hit_behind_window,
        config=full_and_lut,
        faulty=KeepsEntries,
    ),
    model_scenario(
        name="stale-mapping",
        fault="C",
        example="sglang#25834",
        doc="a page handed out anew keeps the mapping that it had: two requests share window slots",
        engine=f"{LUT}, no prefix cache",
        expected=Reason.OVERWRITE,
        life=page_mapped_before,
        config=lambda: full_and_lut(prefix_cache=False, window=11),
        faulty=KeepsMapping,
    ),
    model_scenario(
        name="recached-after-window",
        fault="C",
        example="sglang#31486",
        doc="the prefix cache keeps pages whose window slots were evicted, as if they were whole",
        engine=LUT,
        expected=Reason.UNMAPPED,
        life=recached,
        config=full_and_lut,
        faulty=RecachesLeft,
    ),
    *(
        model_scenario(
            name=f"other-groups-slots-{name}",
            fault="C",
            example="vllm#57260",
            doc=f"a batch's slot mapping for the window's pool is the full pool's; the slots are {doc}",
            engine=f"{LUT}, no prefix cache",
            expected=expected,
            beyond=beyond,
            life=two_decodes,
            config=lambda seed=seed: full_and_lut(prefix_cache=False, num_pages=12, window_pages=12, seed=seed),
            faulty=LocalisesForOther,
        )
        for name, doc, seed, expected, beyond in (
            ("used", "in use", 1, Reason.TOKEN, NOTHING),
            ("free", "free", 15, Reason.NEVER_WRITTEN, Reason.NEVER_WRITTEN),
        )
    ),
    model_scenario(
        name="left-a-page-early",
        fault="C",
        example="sglang#31486's kind, at whole pages",
        doc="where a window begins with a page, that page is evicted",
        engine=LUT,
        expected=Reason.UNMAPPED,
        life=window_of_pages,
        config=lambda: full_and_lut(prefix_cache=False, window=8),
        faulty=LeavesTooEarly,
    ),
    model_scenario(
        name="ring-wraps-early",
        fault="C",
        example="vllm#57260's kind, in a ring",
        doc="the slots of new tokens wrap one slot too early",
        engine="sliding attention, rings",
        expected=Reason.POSITION,
        life=round_the_ring,
        config=lambda: full(groups=(group_config("ring", 1 + 4 * 7, window=6),), prefix_cache=False),
        faulty=WrapsEarly,
    ),
    model_scenario(
        name="phantom-hit",
        fault="C",
        example="local-inference-lab/vllm#480",
        doc="a prefix that was evicted is hit: its pages hold another's whole, self-consistent prefix",
        engine="full attention, prefix cache, no token table",
        expected=Reason.PREFIX,
        life=phantom,
        config=full,
        canary=replace(CANARY, check_tokens=False),
        faulty=PhantomHits,
    ),
    model_scenario(
        name="row-not-filled",
        fault="C",
        example="vllm#42273's kind, at a whole number of pages",
        doc="a new page is not entered into its row, which still names the row's last user's",
        engine="full attention, prefix cache",
        expected=Reason.TOKEN,
        life=whole_pages,
        config=full,
        faulty=ForgetsNewPage,
    ),
)
