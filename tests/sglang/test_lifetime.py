"""Which slots the allocators of SGLang have let go of, and what becomes of their records."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kv_canary import CanaryConfig, CanaryManager
from kv_canary.constants import RECORD_WORDS, WRITER_WORD
from kv_canary.engines.patches import Patches
from kv_canary.engines.sglang import lifetime, pools
from kv_canary.runtime.capacities import CanaryLimits
from kv_canary.runtime.guard import Guard
from kv_canary.runtime.pools import BufferGroup

pytest.importorskip("sglang")

SLOTS, WINDOW_SLOTS = 128, 64
KINDS = [("token", 1), ("paged", 1), ("paged", 16), ("swa", 1), ("swa", 16), ("pure swa", 1)]


class Engine:
    """An allocator with real pools behind it, a canary's records for them, and a lifetime between the two."""

    def __init__(self, kind: str, page: int, *, need_sort: bool = False, draft: bool = False) -> None:
        self.page, self.kind = page, kind
        self.kv, self.allocator = make_allocator(kind, page, need_sort=need_sort)
        self.groups = list(pools.attach(self.kv, name="", read_bytes=16, window=8))
        if draft:
            self.groups += pools.attach(plain_pool(page), name="draft", read_bytes=16, token_offset=1)
        limits = CanaryLimits(max_rows=2, max_requests=1, max_tokens=1, max_len=1)
        self.manager = CanaryManager(
            self.groups, limits=limits, config=CanaryConfig(mode="log", backend="reference", track_lifetime=True)
        )
        self.clears = 0
        self.patches = Patches()
        self.lifetime = lifetime.Lifetime(self.allocator, self.groups, patches=self.patches, cleared=self.cleared)

    def cleared(self) -> None:
        self.clears += 1
        self.manager.clear()

    def alloc(self, pages: int) -> torch.Tensor | None:
        """Allocate whole pages, and write to all of their slots as a forward would; None if there is no room."""
        slots = self.take_slots(pages)
        self.retire()
        if slots is not None:
            for group in self.groups:
                mine = slots if group.lut is None else group.lut[slots]
                # As live as a record can be: somebody's, of step 1.
                group.pool.records[mine[mine > 0]] = torch.tensor([7, 7, 7, 1 << 24])
        return slots

    def take_slots(self, pages: int) -> torch.Tensor | None:
        n = pages * self.page
        if self.kind != "swa" or self.page == 1:
            return self.allocator.alloc(n)
        # One request of n tokens without a prefix.
        zero, length = torch.zeros(1, dtype=torch.int64), torch.tensor([n])
        return self.allocator.alloc_extend(zero, zero, length, length, torch.tensor([-1]), n)

    def retire(self) -> None:
        """What a forward does first."""
        for pool, slots, owner in self.lifetime.take():
            self.manager.retire(pool, slots, owner=owner)

    def live(self, group: BufferGroup) -> set[int]:
        """Slots whose records say that somebody owns them."""
        records = group.pool.records
        return set((records.ne(0).any(1) & (records[:, WRITER_WORD] >= 0)).nonzero().view(-1).tolist())

    def given_out(self, group: BufferGroup) -> set[int]:
        """Slots that the allocator does not call free, by its own lists."""
        half = self.allocator
        if self.kind in ("swa", "pure swa"):
            half = half.full_attn_allocator if group.lut is None else half.swa_attn_allocator
        free = half.get_all_free_pages()
        slots = (free[:, None] * half.page_size + torch.arange(half.page_size)).view(-1)
        last = half.num_pages * half.page_size if hasattr(half, "num_pages") else half.size
        return set(range(half.page_size, last + half.page_size)) - set(slots.tolist())

    def agree(self) -> None:
        for group in self.groups:
            assert self.live(group) == self.given_out(group), group.name


def plain_pool(page: int, slots: int = SLOTS) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return MHATokenToKVPool(
        slots, page, torch.float32, 2, 4, 2, "cpu", enable_memory_saver=False, enable_alt_stream=False
    )


def make_allocator(kind: str, page: int, *, need_sort: bool = False) -> tuple[Any, Any]:
    """Return a pool of SGLang and its allocator."""
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.swa import PureSWATokenToKVPoolAllocator, SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    common: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "need_sort": need_sort}
    if kind == "token":
        kv = plain_pool(1)
        return kv, TokenToKVPoolAllocator(SLOTS, kvcache=kv, **common)
    if kind == "paged":
        kv = plain_pool(page)
        return kv, PagedTokenToKVPoolAllocator(SLOTS, page, kvcache=kv, **common)
    pure = kind == "pure swa"
    kv = SWAKVPool(
        size=0 if pure else SLOTS,
        size_swa=WINDOW_SLOTS,
        page_size=page,
        dtype=torch.float32,
        head_num=2,
        head_dim=4,
        swa_attention_layer_ids=[0, 1] if pure else [0],
        full_attention_layer_ids=[] if pure else [1],
        device="cpu",
        enable_alt_stream=False,
    )
    if pure:
        return kv, PureSWATokenToKVPoolAllocator(WINDOW_SLOTS, page, kvcache=kv, **common)
    return kv, SWATokenToKVPoolAllocator(SLOTS, WINDOW_SLOTS, page, kvcache=kv, **common)


@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize(("kind", "page"), KINDS)
def test_after_any_run_of_calls_the_records_of_free_slots_are_retired(kind, page, need_sort):
    rng = random.Random(f"{kind} {page} {need_sort}")
    engine = Engine(kind, page, need_sort=need_sort)
    held: list[tuple[torch.Tensor, bool]] = []
    frees = 0
    for _ in range(300):
        action = rng.choice(["alloc", "alloc", "free", "free", "segment", "window", "group"])
        if action == "alloc":
            slots = engine.alloc(rng.randint(1, 2))
            if slots is not None:
                held.append((slots, True))
        elif held and action == "group":
            engine.allocator.free_group_begin()
            for _ in range(rng.randint(1, min(3, len(held)))):
                give_back(engine, held, rng, rng.choice(["free", "segment", "window"]))
            engine.allocator.free_group_end()
            frees += 1
        elif held:
            give_back(engine, held, rng, action)
            frees += 1
        if rng.random() < 0.7:
            engine.retire()
            engine.agree()
    engine.retire()
    engine.agree()
    assert frees > 50
    engine.patches.undo_all()
    assert not {"free", "clear", "_release_page_ids", "get_cpu_copy", "load_cpu_copy"} & set(vars(engine.allocator))


def give_back(engine: Engine, held: list[tuple[torch.Tensor, bool]], rng: random.Random, action: str) -> None:
    """Free what is held in one of the ways that the engine has."""
    slots, has_window = held.pop(rng.randrange(len(held)))
    allocator, half = engine.allocator, engine.kind == "swa"
    if half and not has_window:
        allocator.free_full_segment(slots, start_pos=0) if action == "segment" else allocator.free_full(slots)
    elif half and action == "window":
        allocator.free_swa_segment(slots, start_pos=0) if rng.random() < 0.5 else allocator.free_swa(slots)
        held.append((slots, False))
    elif action == "segment":
        # A page counts as freed with any part of it.
        allocator.free_segment(slots[: len(slots) - engine.page // 2], start_pos=0)
    else:
        # As they stand in a request's row, which is another's soon.
        row = slots.to(torch.int32)
        allocator.free(row)
        row.zero_()


@pytest.mark.parametrize(("kind", "page"), KINDS)
def test_what_a_group_holds_back_is_live_until_it_ends(kind, page):
    engine = Engine(kind, page)
    slots = engine.alloc(2)
    engine.allocator.free_group_begin()
    engine.allocator.free(slots)
    assert engine.lifetime.take() == []
    engine.allocator.free_group_end()
    engine.retire()
    engine.agree()
    assert not any(engine.live(g) for g in engine.groups)


@pytest.mark.parametrize("page", [1, 16])
def test_records_of_draft_pools_are_retired_and_cleared_too(page):
    engine = Engine("paged" if page > 1 else "token", page, draft=True)
    assert [g.name for g in engine.groups] == ["full", "draft"]
    slots, kept = engine.alloc(2), engine.alloc(1)
    engine.allocator.free(slots)
    engine.retire()
    assert [engine.live(g) for g in engine.groups] == [set(kept.tolist())] * 2
    engine.allocator.clear()
    assert not any(g.pool.records.any() for g in engine.groups)


@pytest.mark.parametrize(("kind", "page"), [("token", 1), ("paged", 16)])
def test_a_slot_that_is_freed_twice_is_retired(kind, page):
    engine = Engine(kind, page)
    slots = engine.alloc(1)
    engine.allocator.free(slots)
    engine.allocator.free(slots)
    engine.retire()
    assert not engine.live(engine.groups[0])


@pytest.mark.parametrize(("kind", "page"), KINDS)
def test_a_clear_drops_all_records_and_what_was_freed_before_it(kind, page):
    engine = Engine(kind, page)
    slots = engine.alloc(2)
    engine.alloc(1)
    engine.allocator.free(slots)
    engine.allocator.clear()
    assert engine.clears == 1
    assert engine.lifetime.take() == []
    assert not any(g.pool.records.any() for g in engine.groups)
    again = engine.alloc(1)
    engine.allocator.free(again)
    engine.retire()
    engine.agree()


def test_the_window_is_translated_before_the_engine_forgets_where_it_was():
    engine = Engine("swa", 16)
    full, window = engine.groups
    slots = engine.alloc(2)
    mine = set(window.lut[slots].tolist())
    engine.allocator.free_swa(slots)
    assert not window.lut[slots].any()
    [(pool, freed, owner)] = engine.lifetime.take()
    assert owner == 0
    assert pool is window.pool
    assert numbers_of(freed) == mine
    assert engine.live(full) == set(slots.tolist())


def test_a_window_that_passes_to_another_owner_is_live():
    engine = Engine("swa", 1)
    full, window = engine.groups
    kept, incoming = engine.alloc(4), engine.alloc(4)
    engine.allocator.free_swa(kept)
    owned = window.lut[incoming].clone()
    engine.allocator.clear_full_to_swa_mapping(incoming)
    engine.allocator.set_full_to_swa_mapping(kept, owned)
    engine.allocator.free_full(incoming)
    engine.retire()
    engine.agree()
    assert engine.live(full) == set(kept.tolist())
    assert engine.live(window) == set(owned.tolist())


def test_what_is_freed_is_told_with_who_had_it_where_few_have():
    engine = Engine("paged", 16)
    [group] = engine.groups
    given = {owner: engine.alloc(1) for owner in (3, 5, 0)}
    for owner, slots in given.items():
        engine.lifetime.freer = owner
        engine.allocator.free(slots)
    taken = {owner: numbers_of(slots) for pool, slots, owner in engine.lifetime.take() if pool is group.pool}
    assert taken == {owner: set(slots.tolist()) for owner, slots in given.items()}
    # Each is launches of its own: of many, nobody is named.
    many = {owner: engine.alloc(1) for owner in range(1, 8)}
    for owner, slots in many.items():
        engine.lifetime.freer = owner
        engine.allocator.free(slots)
    [(_, slots, owner)] = engine.lifetime.take()
    assert owner == 0
    assert numbers_of(slots) == {slot for its in many.values() for slot in its.tolist()}


def test_where_pages_are_freed_nothing_is_computed():
    """The device may have nothing to do then, while the scheduler makes up its mind about the next batch."""

    class Computed(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    counted = []
    for is_watched in (False, True):
        engine = Engine("paged", 16)
        slots = engine.alloc(2)
        if not is_watched:
            engine.patches.undo_all()
        with Computed() as computed:
            engine.allocator.free_segment(slots, start_pos=0)
        counted.append(computed.names)
    assert counted[0] == counted[1] != []
    engine.retire()
    engine.agree()


@pytest.mark.parametrize("kind", ["token", "swa"])
def test_a_slot_is_freed_for_good_whatever_becomes_of_the_row_that_named_it(kind: str) -> None:
    engine = Engine(kind, 1)
    slots, kept = engine.alloc(4), engine.alloc(2)
    row = torch.cat([slots, slots])
    engine.allocator.free(row[:4])
    row[:] = torch.cat([kept, kept, kept, kept])
    engine.retire()
    assert engine.live(engine.groups[0]) == set(kept.tolist())


def test_what_the_prefix_cache_held_is_not_copied_on_its_way_out() -> None:
    engine = Engine("token", 1)
    held = engine.alloc(4).clone()
    engine.allocator.free(held)
    [(_, parts, _)] = engine.lifetime.take()
    assert [part.data_ptr() for part in parts] == [held.data_ptr()]


def test_what_was_freed_of_a_page_is_retired_where_a_part_of_it_comes_back():
    engine = Engine("paged", 16)
    [group] = engine.groups
    slots = engine.alloc(2)
    copy = engine.allocator.get_cpu_copy(slots[:20])
    engine.allocator.free(slots)
    # The same two pages, before anybody has retired what was in them.
    again = engine.take_slots(2)
    assert set(again.tolist()) == set(slots.tolist())
    engine.allocator.load_cpu_copy(copy, again[:20])
    engine.retire()
    assert engine.live(group) == set(again[:20].tolist())


@pytest.mark.parametrize(("kind", "page"), KINDS)
def test_of_a_group_they_are_told_apart_where_its_order_is_kept(kind, page):
    engine = Engine(kind, page)
    for owners in ((4, 4), (4, 5)):
        given = [(owner, engine.alloc(1)) for owner in owners]
        engine.allocator.free_group_begin()
        for owner, slots in given:
            engine.lifetime.freer = owner
            engine.allocator.free(slots)
        engine.lifetime.freer = 0
        engine.allocator.free_group_end()
        taken = [
            (owner, slot)
            for pool, slots, owner in engine.lifetime.take()
            for slot in numbers_of(slots)
            if pool is engine.groups[0].pool
        ]
        assert {slot for _, slot in taken} == {slot for _, slots in given for slot in slots.tolist()}
        right = {slot: owner for owner, slots in given for slot in slots.tolist()}
        # Whoever is named is the one who had it.
        assert all(owner in (0, right[slot]) for owner, slot in taken)
        named = {owner for owner, _ in taken}
        assert named == {4} if owners == (4, 4) else kind != "token" or named == {4, 5}


def test_what_is_freed_beside_a_group_is_not_laid_to_those_in_it():
    engine = Engine("swa", 1)
    [full, window] = engine.groups
    held, left = engine.alloc(2), engine.alloc(2)
    behind = set(window.lut[left].tolist())
    engine.allocator.free_group_begin()
    engine.lifetime.freer = 4
    engine.allocator.free(held)
    # A window moves on meanwhile: another request's, which nobody names.
    engine.lifetime.freer = 0
    engine.allocator.free_swa(left)
    engine.allocator.free_group_end()
    told = {(pool, owner): numbers_of(slots) for pool, slots, owner in engine.lifetime.take()}
    assert not any(slots & behind for (pool, owner), slots in told.items() if pool is window.pool and owner)
    assert set(held.tolist()) == told[full.pool, 4]


def test_an_allocator_that_is_not_known_is_not_tracked_and_says_so(caplog):
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

    class Other(TokenToKVPoolAllocator):
        pass

    kv = plain_pool(1)
    allocator = Other(SLOTS, torch.float32, "cpu", kv, False)
    cleared: list[None] = []
    with caplog.at_level(logging.WARNING, logger="kv_canary"):
        life = lifetime.Lifetime(
            allocator,
            pools.attach(kv, name="", read_bytes=16),
            patches=Patches(),
            cleared=lambda: cleared.append(None),
        )
    assert not life.tracks
    assert "without lifetime tracking, because frees of Other" in caplog.text
    allocator.free(allocator.alloc(3))
    assert life.take() == []
    allocator.clear()
    assert len(cleared) == 1


def test_a_window_that_is_a_ring_of_the_row_is_not_tracked():
    engine = Engine("swa", 1)
    engine.allocator._swa_req_ring = True
    life = lifetime.Lifetime(engine.allocator, engine.groups, patches=Patches(), cleared=lambda: None)
    assert not life.tracks
    assert Engine("swa", 1).lifetime.tracks


def numbers_of(parts: Sequence[torch.Tensor]) -> set[int]:
    """Return the numbers in these tensors."""
    return {number for part in parts for number in part.tolist()}


def mark(engine: Engine, slots: torch.Tensor) -> None:
    """Give every slot a record that names it."""
    for group in engine.groups:
        mine = slots if group.lut is None else group.lut[slots]
        group.pool.records[mine] = mine[:, None] * 1000 + torch.arange(RECORD_WORDS)
        group.pool.records[0] = 0


@pytest.mark.parametrize(("kind", "page"), [("token", 1), ("paged", 16), ("swa", 1), ("swa", 16)])
def test_records_go_to_the_host_and_back_with_the_bytes(kind, page):
    engine = Engine(kind, page)
    n = 2 * page - page // 2
    slots = engine.alloc(2)[:n]
    mark(engine, slots)
    before = [g.pool.records[slots if g.lut is None else g.lut[slots]].clone() for g in engine.groups]
    copy = engine.allocator.get_cpu_copy(slots)
    engine.allocator.free(slots)
    # The slots come back to another owner, or the same; either way nobody may call them freed.
    again = engine.take_slots(2)[:n]
    engine.allocator.load_cpu_copy(copy, again)
    engine.retire()
    after = [g.pool.records[again if g.lut is None else g.lut[again]] for g in engine.groups]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not any(g.pool.records[0].any() for g in engine.groups)
    assert not engine.lifetime._kept_records


def test_slots_outside_the_window_come_back_without_records():
    engine = Engine("swa", 1)
    full, window = engine.groups
    slots = engine.alloc(8)
    mark(engine, slots)
    engine.allocator.free_swa(slots[:3])
    engine.retire()
    copy = engine.allocator.get_cpu_copy(slots)
    engine.allocator.free_full(slots[:3])
    engine.allocator.free(slots[3:])
    again = engine.take_slots(8)
    engine.allocator.free_swa(again[:1])
    engine.retire()
    engine.allocator.load_cpu_copy(copy, again)
    engine.retire()
    assert engine.live(full) == set(again.tolist())
    assert engine.live(window) == set(window.lut[again[3:]].tolist())
    assert not window.pool.records[0].any()


def test_the_rest_of_a_page_that_was_brought_back_stays_freed():
    engine = Engine("paged", 16)
    slots = engine.alloc(1)
    mark(engine, slots)
    copy = engine.allocator.get_cpu_copy(slots[:5])
    engine.allocator.free(slots)
    while (again := engine.take_slots(1)) is not None and again[0] != slots[0]:
        pass
    engine.allocator.load_cpu_copy(copy, again[:5])
    engine.retire()
    assert engine.live(engine.groups[0]) == set(again[:5].tolist())


def test_its_own_faults_go_no_further_and_are_told():
    kv, allocator = make_allocator("token", 1)
    groups, guard, lost = pools.attach(kv, name="", read_bytes=16), Guard(contains=True), []

    @contextlib.contextmanager
    def following(what: str, **_: Any) -> Iterator[None]:
        with guard.contain(what) as part:
            yield
        if part.failed:
            lost.append(what)

    def cleared() -> None:
        raise RuntimeError("of its own")

    life = lifetime.Lifetime(allocator, groups, patches=Patches(), cleared=cleared, following=following)
    copy = allocator.get_cpu_copy(allocator.alloc(3))
    groups[0].pool.records = groups[0].pool.records[:, :3]
    allocator.load_cpu_copy(copy, torch.tensor([4, 5, 6]))
    life._note = None
    slots = allocator.alloc(5)
    allocator.free(slots)
    assert allocator.available_size() == SLOTS - 3
    allocator.clear()
    assert allocator.available_size() == SLOTS
    assert lost == ["what comes back from the host", "what is freed", "an emptied cache"]
    assert guard.failures.total() == 3


def test_what_comes_back_without_records_counts_as_unverified():
    engine = Engine("token", 1)
    slots, unverified = engine.alloc(6), []
    engine.lifetime._unverify = lambda pool, slots: unverified.append((pool, slots.tolist()))
    pool = engine.groups[0].pool
    pool.records[slots[4:]] = 0
    copy, unseen = engine.allocator.get_cpu_copy(slots), engine.allocator.get_cpu_copy(slots[:2])
    engine.lifetime._kept_records.pop(lifetime._first_tensor(unseen))
    again = engine.alloc(6)
    engine.allocator.load_cpu_copy(copy, again)
    engine.allocator.load_cpu_copy(unseen, again[:2])
    assert unverified == [(pool, again[4:].tolist()), (pool, again[:2].tolist())]


def test_kept_records_go_with_the_copy():
    engine = Engine("token", 1)
    copy = engine.allocator.get_cpu_copy(engine.alloc(3))
    assert len(engine.lifetime._kept_records) == 1
    del copy
    assert not engine.lifetime._kept_records


def test_a_broken_hook_would_be_seen(monkeypatch):
    note = lifetime.Lifetime._note

    def forgets(self: Any, half: Any, numbers: torch.Tensor, **more: Any) -> None:
        note(self, half, numbers[:-1], **more)

    monkeypatch.setattr(lifetime.Lifetime, "_note", forgets)
    engine = Engine("paged", 16)
    engine.allocator.free(engine.alloc(1))
    engine.retire()
    with pytest.raises(AssertionError):
        engine.agree()
