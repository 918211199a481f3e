"""What SGLang's prefix caches hold, by themselves and in a scheduler that runs; and what a sweep makes of it."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kv_canary.constants import HEAD_OF_CHAIN, UNCHECKED, WRITER_WORD
from kv_canary.engines.sglang import pools, radix, session
from kv_canary.runtime.pools import BufferGroup

from . import engine
from .test_lifetime import make_allocator, plain_pool

pytest.importorskip("sglang")

CORES = ["rust", "python"]
TREES = ["radix", *CORES]


class Tree:
    """A prefix cache of SGLang, with requests' work done by hand."""

    def __init__(self, kind: str, page: int, *, pairs: bool = False, swa: bool = False, disable: bool = False) -> None:
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.pure_swa_radix_cache import PureSWARadixCache
        from sglang.srt.mem_cache.radix_cache import RadixCache
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        pure = kind == "pure swa"
        self.page, self.swa = page, swa
        name = kind if pure else "swa" if swa else "paged" if page > 1 else "token"
        self.kv, self.allocator = make_allocator(name, page)
        parts = (ComponentType.FULL, ComponentType.SWA) if swa else (ComponentType.FULL,)
        params = CacheInitParams(
            disable=disable,
            req_to_token_pool=ReqToTokenPool(8, 128, "cpu", False),
            token_to_kv_pool_allocator=self.allocator,
            page_size=page,
            is_eagle=pairs,
            sliding_window_size=4 if swa or pure else None,
            tree_components=parts,
            tree_core_backend=kind if kind in CORES else None,
        )
        classes = {"radix": RadixCache, "pure swa": PureSWARadixCache}
        self.cache = classes.get(kind, UnifiedRadixCache)(params)
        self.groups = pools.attach(self.kv, name="", read_bytes=16, window=4)
        self.pairs = pairs
        self.sequences: list[list[int]] = []

    def key(self, tokens: Sequence[int]) -> Any:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(array("q", tokens))

    def path(self, tokens: Sequence[int]) -> list[int]:
        """The slots that the cache names for the longest prefix of `tokens` that it has."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        found = self.cache.match_prefix(MatchPrefixParams(key=self.key(tokens)))
        slots: list[int] = self.cache.path_device_indices(found.last_device_node).tolist()
        return slots

    def add(self, tokens: list[int]) -> bool:
        """Do what a request does: use what is cached, allocate the rest, hand it over, and free what is twice there."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        have = torch.tensor(self.path(tokens), dtype=torch.int64)
        want = len(tokens) - len(tokens) % self.page
        new = self.alloc(want - len(have))
        if new is None:
            return False
        value = torch.cat([have, new])
        result = self.cache.insert(InsertParams(key=self.key(tokens[:want]), value=value, prev_prefix_len=len(have)))
        kept = want - 1 if self.pairs else want
        kept -= kept % self.page
        if hasattr(self.cache, "tree_core"):
            left = value[kept:]
        else:
            left = torch.cat([value[len(have) : result.prefix_len], value[max(kept, len(have)) :]])
        self.allocator.free(left[~torch.isin(left, have)])
        self.sequences.append(tokens[:want])
        return True

    def alloc(self, n: int) -> torch.Tensor | None:
        if n == 0:
            return torch.zeros(0, dtype=torch.int64)
        if self.page == 1 or not self.swa:
            slots: torch.Tensor | None = self.allocator.alloc(n)
            return slots
        zero, length = torch.zeros(1, dtype=torch.int64), torch.tensor([n])
        given: torch.Tensor | None = self.allocator.alloc_extend(zero, zero, length, length, torch.tensor([-1]), n)
        return given

    def evict(self, full: int = 0, window: int = 0) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.cache.evict(EvictParams(num_tokens=full, swa_num_tokens=window))

    def cached(self, *, anchored: bool = False) -> dict[str, set[tuple[int, int, int]]]:
        """What `radix.cached` says, by group: slot, position and slot before."""
        found = {}
        for part in radix.cached(self.cache, self.groups, anchored=anchored):
            rows = list(zip(part.slots.tolist(), part.positions.tolist(), part.previous.tolist(), strict=True))
            assert len(set(rows)) == len(rows)
            found[part.group] = set(rows)
        return found

    def held(self) -> set[tuple[int, int, int]]:
        """What the cache holds, from asking it for every sequence that it was ever given."""
        found = set()
        for tokens in self.sequences:
            # A key of pairs ends a token before what it is asked for.
            path = self.path([*tokens, 0] if self.pairs else tokens)
            found |= {(slot, p, path[p - 1] if p else HEAD_OF_CHAIN) for p, slot in enumerate(path)}
        return found


def sequences(rng: random.Random) -> Iterator[list[int]]:
    """Sequences of tokens that share beginnings, and end anywhere."""
    known: list[list[int]] = [[]]
    while True:
        start = rng.choice(known)
        tokens = start[: rng.randint(0, len(start))] + [rng.randrange(3) for _ in range(rng.randint(1, 9))]
        known.append(tokens)
        yield tokens


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("kind", TREES)
def test_cached_is_what_the_tree_holds_after_any_run_of_calls(kind, page, pairs):
    rng = random.Random(f"{kind} {page} {pairs}")
    tree = Tree(kind, page, pairs=pairs)
    most = 0
    for tokens in (s for s, _ in zip(sequences(rng), range(60), strict=False)):
        if not tree.add(tokens) or rng.random() < 0.1:
            tree.evict(full=rng.randint(1, 24))
        found = tree.cached()
        assert set(found) == {"full"}
        assert found["full"] == tree.held()
        # No request is left, so what the allocator has given out is what the cache holds.
        slots = {slot for slot, _, _ in found["full"]}
        assert len(slots) == len(found["full"]) == tree.allocator.size - tree.allocator.available_size()
        most = max(most, len(slots))
    assert most > 20


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("kind", CORES)
def test_of_windowed_layers_only_what_is_resident_is_cached(kind, page):
    rng = random.Random(f"swa {kind} {page}")
    tree = Tree(kind, page, swa=True)
    full, window = tree.groups
    assert (full.name, window.name) == ("full", "swa")
    gone = 0
    for tokens in (s for s, _ in zip(sequences(rng), range(80), strict=False)):
        if not tree.add(tokens) or rng.random() < 0.1:
            tree.evict(full=rng.randint(1, 12))
        if rng.random() < 0.4:
            tree.evict(window=rng.randint(1, 12))
        found = tree.cached()
        lut = [0 if slot < 0 else slot for slot in window.lut.tolist()]
        halves = tree.allocator.full_attn_allocator, tree.allocator.swa_attn_allocator
        given_out = [half.size - half.available_size() for half in halves]
        assert [len(found["full"]), len(found["swa"])] == given_out
        expected = set()
        for slot, position, before in found["full"]:
            if lut[slot]:
                previous = HEAD_OF_CHAIN if position == 0 else lut[before] or UNCHECKED
                expected.add((lut[slot], position, previous))
        assert found["swa"] == expected
        gone += len(found["full"]) > len(found["swa"]) > 0
    assert gone > 5


def test_a_cache_of_windowed_layers_alone_is_walked_by_its_own_slots():
    tree = Tree("pure swa", 1)
    [group] = tree.groups
    assert group.name == "swa"
    tree.add([1, 2, 3, 4])
    tree.add([1, 2, 5])
    assert tree.cached() == {"swa": tree.held()}
    assert len(tree.held()) == 5


@pytest.mark.parametrize("kind", TREES)
def test_a_disabled_cache_and_an_empty_one_hold_nothing(kind):
    for disable in (False, True):
        tree = Tree(kind, 1, disable=disable)
        [part] = radix.cached(tree.cache, tree.groups, anchored=False)
        assert len(part.slots) == len(part.positions) == len(part.previous) == 0
    tree = Tree("pure swa", 1, disable=True)
    assert tree.cached() == {"swa": set()}


@pytest.mark.parametrize("kind", TREES)
def test_where_there_are_identities_the_first_position_follows_nothing(kind):
    tree = Tree(kind, 1)
    tree.add([1, 2, 3])
    plain, anchored = tree.cached()["full"], tree.cached(anchored=True)["full"]
    assert {previous for _, position, previous in plain if position == 0} == {HEAD_OF_CHAIN}
    assert {previous for _, position, previous in anchored if position == 0} == {UNCHECKED}
    assert {row for row in plain if row[1]} == {row for row in anchored if row[1]}


@pytest.mark.parametrize("kind", TREES)
def test_draft_pools_are_swept_where_keys_say_the_next_token_too(kind):
    for pairs in (False, True):
        tree = Tree(kind, 1, pairs=pairs)
        tree.groups += pools.attach(plain_pool(1), name="draft", read_bytes=16, token_offset=1)
        tree.add([1, 2, 3, 4])
        found = tree.cached()
        assert set(found) == ({"full", "draft"} if pairs else {"full"})
        assert len(found["full"]) == (3 if pairs else 4)
        assert all(rows == found["full"] for rows in found.values())


def test_caches_with_an_external_store_and_unknown_ones_are_refused():
    tree = Tree("python", 1)
    radix.check(tree.cache)
    radix.check(Tree("radix", 1).cache)
    radix.check(Tree("pure swa", 1).cache)
    tree.cache.linker = object()
    with pytest.raises(ValueError, match="external store"):
        radix.check(tree.cache)
    with pytest.raises(ValueError, match="got SimpleNamespace"):
        radix.check(SimpleNamespace())


@contextmanager
def watching(model: str, *, core: str = "rust", config: dict[str, Any] | None = None, **args: Any) -> Iterator[Any]:
    """Yield a scheduler with the canary in it, which sweeps again and again."""
    settings = {"mode": "log", "backend": "reference", "sweep_every": 3, "quarantine": 1, **(config or {})}
    variables = {f"KV_CANARY_{name.upper()}": str(value) for name, value in settings.items()}
    variables |= {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": core, "SGLANG_ON_CPU": "hybrid_swa"}
    with engine.overriding(**variables):
        scheduler = engine.build_scheduler(model, **args)
    canary = session.current()
    try:
        yield SimpleNamespace(scheduler=scheduler, canary=canary, manager=canary.manager)
    finally:
        canary.close()


def given_out(scheduler: Any, group: BufferGroup) -> set[int]:
    """Slots that the scheduler's allocator does not call free, by its own lists."""
    half = scheduler.token_to_kv_pool_allocator
    if hasattr(half, "full_attn_allocator"):
        half = half.full_attn_allocator if group.lut is None else half.swa_attn_allocator
    free, page = half.get_all_free_pages(), half.page_size
    slots = (free[:, None] * page + torch.arange(page)).view(-1)
    return set(range(page, half.size // page * page + page)) - set(slots.tolist())


def expect_agreement(watched: Any) -> int:
    """See that no free slot has a live record, and that cached slots have one; return how many records are live."""
    lives = 0
    for pool, slots, owner in watched.canary._lifetime.take():
        watched.manager.retire(pool, slots, owner=owner)
    cached = {c.group: c for c in radix.cached(watched.scheduler.tree_cache, watched.manager.groups, anchored=False)}
    for group in watched.manager.groups:
        records = group.pool.records
        live = set((records.any(1) & (records[:, WRITER_WORD] >= 0)).nonzero().view(-1).tolist())
        used = given_out(watched.scheduler, group)
        assert live <= used, group.name
        slots = set(cached[group.name].slots.tolist())
        assert slots <= live, group.name
        lives += len(live)
    return lives


def prompts_of(rng: random.Random) -> list[list[int]]:
    shared = [rng.randrange(3, 1000) for _ in range(70)]
    fresh = [[rng.randrange(3, 1000) for _ in range(n)] for n in (7, 90, 40, 9, 100, 33)]
    return [shared + fresh[0], fresh[1], shared[:48] + fresh[2], *fresh[3:]]


def sweeps(watched: Any) -> dict[str, int]:
    """How many slots the sweeps have verified, by group."""
    counters = watched.manager.state.counters
    return {g.name: int(counters[g.sweep_tag, 1]) for g in watched.manager.groups}


def count_evictions(watched: Any) -> list[int]:
    """Return a list that will get, at each of the cache's evictions, how many slots it has let go of."""
    cache, evicted = watched.scheduler.tree_cache, []
    evict = cache._evict

    def counted(*args: Any, **kwargs: Any) -> Any:
        result = evict(*args, **kwargs)
        evicted.append(result.num_tokens_evicted + result.swa_num_tokens_evicted)
        return result

    cache._evict = counted
    return evicted


RUNS = [
    {"core": "rust", "page_size": 1, "max_total_tokens": 300},
    {"core": "python", "page_size": 16, "max_total_tokens": 320},
    {"core": "python", "page_size": 1, "max_total_tokens": 300, "disable_overlap_schedule": False},
    {"core": "rust", "page_size": 16, "max_total_tokens": 2048, "disable_overlap_schedule": False},
    {"core": "rust", "page_size": 16, "max_total_tokens": 2048, "disable_radix_cache": True},
]


@pytest.mark.parametrize("args", RUNS, ids=lambda args: "-".join(f"{k}={v}" for k, v in args.items()))
@pytest.mark.parametrize("model", ["llama", "mellum"])
def test_a_run_keeps_records_as_the_engine_keeps_slots_and_finds_nothing(model, args, request, monkeypatch):
    tight = args["max_total_tokens"] < 1000
    # Every so often the engine puts a request back that it has begun.
    monkeypatch.setattr("sglang.srt.managers.scheduler.TEST_RETRACT", True)
    monkeypatch.setattr("sglang.srt.managers.scheduler.TEST_RETRACT_INTERVAL", 7)
    with watching(request.getfixturevalue(model), **args) as watched:
        scheduler, lives, done = watched.scheduler, [], []
        evicted = count_evictions(watched)
        waves = [prompts_of(random.Random(seed)) for seed in (1, 2, 1)]

        def before_step(iteration: int) -> bool:
            if iteration % 15 == 0 and waves:
                done.extend(engine.submit(scheduler, p, 16) for p in waves.pop())
            lives.append(expect_agreement(watched))
            return bool(waves)

        engine.run_all(scheduler, before_step)
        watched.canary.idle()
        expect_agreement(watched)
        assert [r.sentence for r in watched.manager.reports] == []
        assert watched.canary.off == ""
        assert len(done) == 18
        assert all(req.finished() for req in done)
        assert max(lives) > 200
        assert any(req.retraction_count for req in done)
        assert not tight or sum(evicted) > 0
        assert tight or args.get("disable_radix_cache") or any(req.cached_tokens > 48 for req in done)
        assert scheduler.flush_cache()
        assert not any(g.pool.records.any() for g in watched.manager.groups)


def serve(watched: Any, *, prompts: int = 3) -> None:
    """Serve some requests, whose KV is idle in the cache then."""
    for prompt in prompts_of(random.Random(3))[:prompts]:
        engine.submit(watched.scheduler, prompt, 8)
    engine.run_all(watched.scheduler)
    watched.canary.idle()
    assert not watched.manager.reports


def idle_slot(watched: Any, group: BufferGroup, position: int) -> int:
    """A slot of `group` that the cache holds for `position`, or for one further back that it still holds."""
    [part] = [
        c
        for c in radix.cached(watched.scheduler.tree_cache, watched.manager.groups, anchored=False)
        if c.group == group.name
    ]
    return next(int(s) for s, p in zip(part.slots, part.positions, strict=True) if p >= position)


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("model", ["llama", "mellum"])
def test_a_byte_that_changes_in_an_idle_slot_is_found_there(model, page, core, request):
    with watching(request.getfixturevalue(model), core=core, page_size=page, config={"read_bytes": 4096}) as watched:
        serve(watched)
        for group in watched.manager.groups:
            watched.manager.reports.clear()
            slot = idle_slot(watched, group, 33)
            source = group.pool.v_source
            # With a row of a token covered wholly, the position decides which layer is.
            position = int(group.pool.records[slot, 0] >> 32)
            layer = source.layers[position % len(source.layers)]
            layer[slot].view(torch.uint8).view(-1)[5] ^= 1
            watched.manager.scrub()
            [report] = watched.manager.reports
            assert (report.group, report.slot, report.position) == (group.name, slot, position)
            assert (report.reasons, report.tag) == (("V",), group.sweep_tag.name)
            layer[slot].view(torch.uint8).view(-1)[5] ^= 1
        watched.manager.reports.clear()
        watched.manager.scrub()
        assert not watched.manager.reports


def test_a_window_that_loses_a_slot_is_found(mellum):
    with watching(mellum) as watched:
        serve(watched)
        window = watched.manager.groups[1]
        resident = radix.cached(watched.scheduler.tree_cache, [window], anchored=False)[0]
        full_slot = int((window.lut == resident.slots[5]).nonzero())
        window.lut[full_slot] = 0
        watched.manager.scrub()
        [report] = watched.manager.reports
        assert (report.group, report.slot, report.reasons) == ("swa", 0, ("UNMAPPED",))
        assert report.position == resident.positions[5]


def test_a_cached_slot_that_is_freed_is_found(llama):
    with watching(llama, page_size=16) as watched:
        serve(watched)
        engine.submit(watched.scheduler, [5, 6, 7], 8)
        assert engine.step(watched.scheduler)
        slot = idle_slot(watched, watched.manager.groups[0], 20)
        watched.scheduler.token_to_kv_pool_allocator.free(torch.tensor([slot]))
        assert engine.step(watched.scheduler)
        watched.manager.scrub()
        page = set(range(slot // 16 * 16, slot // 16 * 16 + 16))
        assert {(r.slot, *r.reasons, r.tag) for r in watched.manager.reports} == {
            (s, "FREED", "SWEEP_FULL") for s in page
        }


@pytest.mark.parametrize(("model", "page"), [("llama", 1), ("llama", 16), ("mellum", 1), ("mellum", 16)])
def test_a_page_that_is_freed_under_a_request_is_found_before_it_is_reused_and_after(model, page, request):
    with watching(
        request.getfixturevalue(model), page_size=page, config={"sweep_every": 0, "quarantine": 0}
    ) as watched:
        scheduler = watched.scheduler
        victim = engine.submit(scheduler, list(range(10, 50)), 40)
        for _ in range(5):
            assert engine.step(scheduler)
        # What no cache key names yet: its output.
        row = scheduler.req_to_token_pool.req_to_token[victim.kv.req_pool_idx]
        slot = int(row[43 // page * page])
        scheduler.token_to_kv_pool_allocator.free(row[43 // page * page : 44])
        assert engine.step(scheduler)
        watched.manager.flush()
        freed = [r for r in watched.manager.reports if r.slot == slot and r.tag == "HEAD_FULL"]
        assert [(r.reasons, r.request_id) for r in freed] == [(("FREED",), victim.rid)]
        watched.manager.reports.clear()
        allocator = scheduler.token_to_kv_pool_allocator
        free = getattr(allocator, "full_attn_allocator", allocator)
        free.free_pages = free.free_pages.flip(0) if page == 1 else free.free_pages
        engine.submit(scheduler, list(range(100, 160)), 2)
        for _ in range(3):
            assert engine.step(scheduler)
        watched.manager.flush()
        found = [r for r in watched.manager.reports if r.slot == slot and r.request_id == victim.rid]
        assert {r.tag for r in found} >= {"HEAD_FULL", "TAIL_FULL"}
        assert all({"POSITION", "CHAIN"} <= set(r.reasons) for r in found)


def test_a_free_that_is_not_seen_would_fail_the_run(llama, monkeypatch):
    from kv_canary.engines.sglang.lifetime import Lifetime

    monkeypatch.setattr(Lifetime, "take", lambda self: [])
    with watching(llama, page_size=16) as watched:
        # They finish within a page, which the cache does not take.
        serve(watched)
        with pytest.raises(AssertionError):
            expect_agreement(watched)


def test_a_walk_that_goes_wrong_would_be_reported(llama, monkeypatch):
    walk = radix._walk

    def shifted(tree_cache: Any, *, resident: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        slots, positions, previous = walk(tree_cache, resident=resident)
        return slots, positions + 1, previous

    with watching(llama) as watched:
        serve(watched)
        monkeypatch.setattr(radix, "_walk", shifted)
        watched.manager.scrub()
        assert {r.reasons for r in watched.manager.reports} == {("POSITION",)}


def test_who_freed_what_another_request_still_reads_is_named(llama):
    with watching(llama, config={"sweep_every": 0, "quarantine": 0}) as watched:
        scheduler = watched.scheduler
        victim = engine.submit(scheduler, list(range(10, 50)), 40)
        culprit = engine.submit(scheduler, list(range(60, 100)), 6)
        for _ in range(4):
            assert engine.step(scheduler)
        table = scheduler.req_to_token_pool.req_to_token
        slot = int(table[victim.kv.req_pool_idx, 41])
        assert slot
        # When the one ends, a slot of the other's goes back as well.
        release = scheduler.tree_cache.free_kv_row

        def mistaken(kv: Any, ranges: Any) -> Any:
            if kv.req_pool_idx == culprit.kv.req_pool_idx:
                scheduler.token_to_kv_pool_allocator.free(torch.tensor([slot]))
            return release(kv, ranges)

        scheduler.tree_cache.free_kv_row = mistaken
        for _ in range(6):
            assert engine.step(scheduler)
        watched.manager.flush()
        [first, *_] = watched.manager.incidents
        assert first.reasons == ("FREED",)
        assert f"freed by request {culprit.rid}" in first.sentence
        assert first.requests == (victim.rid,)
