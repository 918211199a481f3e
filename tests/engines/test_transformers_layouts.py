"""Where KV lies in the caches of transformers' versions: what an index names, and what their prefix caches hold."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kv_canary
from kv_canary.constants import BAD_SLOT, HEAD_OF_CHAIN, UNCHECKED
from kv_canary.engines.patches import Patches
from kv_canary.engines.transformers_base import Events
from kv_canary.engines.transformers_layouts import BlockLayout

from .scenarios import PAGE, Prompts, make_model, serve

BLOCKS, SMALL_PAGE = 8, 4


def test_an_index_one_past_a_block_s_tokens_is_another_layer_s_memory() -> None:
    model = make_model("llama")
    canary = kv_canary.install(model, backend="reference")
    with serve(model) as server:
        processor = server.manager.batch_processor
        if not hasattr(processor.cache, "cache_allocators"):
            pytest.skip("5.17 numbers the slots of each layer by themselves")
        (allocator,) = processor.cache.cache_allocators.values()
        run, steps = processor.model_runner.compute_batch, []

        def one_past(model: Any, batch_data: dict[str, Any]) -> Any:
            steps.append(1)
            if len(steps) == 3:
                batch_data["read_index"][0][3] = 5 * allocator.block_physical_stride + PAGE
            return run(model, batch_data)

        processor.model_runner.compute_batch = one_past
        server.run([Prompts().random(PAGE + 4)], new_tokens=4)
        canary.flush()
        found = {(r.tag, r.position, r.reasons) for r in canary.reports}
    canary.uninstall()
    # Read before the model and after it.
    assert found == {(tag, 3, ("SLOT_RANGE",)) for tag in ("HEAD_FULL", "TAIL_FULL")}


class OldBlocks:
    """Stands for the block manager of 5.17: blocks that hold nothing, and those that later requests can find."""

    def __init__(self) -> None:
        self._uninit_block_ids, self._init_block_ids = deque(range(BLOCKS)), dict[int, None]()
        self._hash_to_id: dict[int, int] = {}
        self._id_to_block: dict[int, Any] = {}

    @property
    def num_free_blocks(self) -> int:
        return len(self._uninit_block_ids) + len(self._init_block_ids)

    def has_enough_free_blocks(self, count: int) -> bool:
        while len(self._uninit_block_ids) < count and self._init_block_ids:
            # The newest first; what it was found by stays in it.
            block, _ = self._init_block_ids.popitem()
            del self._hash_to_id[self._id_to_block[block].hash]
            self._uninit_block_ids.append(block)
        return len(self._uninit_block_ids) >= count

    def get_free_blocks(self, count: int, last: int | None, shareable: bool, group_id: int) -> list[int] | None:
        if not self.has_enough_free_blocks(count):
            return None
        blocks = [self._uninit_block_ids.popleft() for _ in range(count)]
        self._id_to_block |= {block: SimpleNamespace(group_id=group_id, hash=None) for block in blocks}
        return blocks

    def free_blocks(self, blocks: list[int], shareable: bool) -> None:
        self._init_block_ids |= dict.fromkeys(blocks)

    def uninitialize_unshared_block(self, block: int) -> None:
        del self._id_to_block[block]


class OldCache:
    """Stands for the cache of 5.17 with one layer of full attention."""

    device = "cpu"

    def __init__(self) -> None:
        self.num_blocks, self.block_size = BLOCKS, SMALL_PAGE
        shape = ((BLOCKS + 2) * SMALL_PAGE, 1, 2)
        self.key_cache, self.value_cache = [torch.zeros(shape)], [torch.zeros(shape)]
        self.layer_index_to_group_indices = {0: (0, 0)}
        self._block_manager = OldBlocks()
        self.table: dict[str, list[int]] = {}
        self.group_cache_managers = [SimpleNamespace(block_table=self.table)]
        self.copies: list[tuple[list[int], list[int]]] = []

    def copy_cache(self, src: list[int], dst: list[int]) -> None:
        self.copies.append((src, dst))

    def free_blocks(self, request_id: str) -> None:
        self._block_manager.free_blocks(self.table.pop(request_id), shareable=True)

    def free_all_requests(self) -> None:
        self.table.clear()

    def mark_shareable_blocks_as_complete(self, state: Any, complete: int) -> None:
        for block in self.table[state.request_id][:complete]:
            self._block_manager._id_to_block[block].hash = 100 + block
            self._block_manager._hash_to_id[100 + block] = block

    def offload_requests(self) -> None:
        """Nothing goes to the host here."""

    restore_scheduled_requests = offload_requests


class Followed:
    """A layout of 5.17 over a stand-in of its cache, and what it tells the adapter."""

    def __init__(self) -> None:
        self.cache = OldCache()
        self.layout = BlockLayout(
            SimpleNamespace(cache=self.cache, offloading_manager=self.cache),
            read_bytes=8,
        )
        self.told: list[tuple[Any, ...]] = []
        told = self.told
        events = Events(
            freed=lambda pool, slots, request: None,
            copied=lambda pool, src, dst, request: told.append(("copied", src.tolist(), dst.tolist(), request)),
            request_ended=lambda request: None,
            request_freed=lambda request: None,
            all_freed=lambda: None,
            reused=lambda pool, slots: None,
            cleared=lambda: None,
            before_copy=lambda: told.append(("before a copy",)),
            written=lambda request: BLOCKS * SMALL_PAGE,
        )
        self.layout.watch(Patches(), events)

    def serve(self, name: str, blocks: int) -> list[int]:
        """Let a request have so many blocks, all of them filled; return them."""
        found = self.cache._block_manager.get_free_blocks(blocks, None, True, 0)
        assert found is not None
        self.cache.table[name] = found
        self.cache.mark_shareable_blocks_as_complete(SimpleNamespace(request_id=name), blocks)
        return found


def slots_of(block: int) -> list[int]:
    """Return the slots of a block of 5.17, whose first slot is 1."""
    return [block * SMALL_PAGE + 1 + i for i in range(SMALL_PAGE)]


def test_of_5_17_the_two_blocks_of_padding_are_slot_0_and_what_lies_beyond_is_no_slot() -> None:
    layout, end = Followed().layout, BLOCKS * SMALL_PAGE
    indices = torch.tensor([-1, 0, end - 1, end, end + 2 * SMALL_PAGE - 1, end + 2 * SMALL_PAGE, 1 << 40])
    assert layout.to_slots(0, indices).tolist() == [BAD_SLOT, 1, end, 0, 0, BAD_SLOT, BAD_SLOT]


def test_records_go_along_where_5_17_copies_blocks() -> None:
    followed = Followed()
    (parent,), (child,) = followed.serve("parent", 1), followed.serve("child", 1)
    followed.cache.copy_cache([parent], [child])
    assert followed.cache.copies == [([parent], [child])]
    assert followed.told == [("before a copy",), ("copied", slots_of(parent), slots_of(child), "child")]


def test_a_cache_of_5_17_without_requests_is_emptied_and_one_with_requests_is_not() -> None:
    followed = Followed()
    followed.serve("a", 2)
    assert not followed.layout.empty()
    assert followed.layout.cached_blocks(0) != []
    followed.cache.free_blocks("a")
    assert followed.layout.empty()
    assert followed.layout.cached_blocks(0) == []


def test_of_5_17_a_block_that_outlives_the_one_before_it_follows_nothing_known() -> None:
    followed = Followed()
    first, second = followed.serve("a", 2)
    (cached,) = followed.layout.cached(anchored=False)
    assert cached.slots.tolist() == slots_of(first) + slots_of(second)
    assert cached.previous.tolist() == [HEAD_OF_CHAIN, *slots_of(first), *slots_of(second)[:-1]]
    # The first block is evicted, which has not been handed out to anybody else yet.
    followed.cache._block_manager._init_block_ids[first] = None
    assert followed.cache._block_manager.has_enough_free_blocks(BLOCKS - 1)
    (cached,) = followed.layout.cached(anchored=False)
    assert cached.slots.tolist() == slots_of(second)
    assert cached.previous.tolist() == [UNCHECKED, *slots_of(second)[:-1]]


def computed_again(followed: Followed) -> list[int]:
    """Let another request compute what was in the first of three blocks elsewhere, and share the others; return its."""
    first, second, third = followed.serve("a", 3)
    blocks = followed.cache._block_manager
    key = blocks._id_to_block[first].hash
    blocks._init_block_ids[first] = None
    assert blocks.has_enough_free_blocks(BLOCKS - 2)
    (again,) = blocks.get_free_blocks(1, None, True, 0) or [0]
    blocks._id_to_block[again].hash, blocks._hash_to_id[key] = key, again
    followed.cache.table["b"] = [again, second, third]
    return [again, second, third]


def test_a_block_that_comes_to_follow_another_one_is_noted_anew() -> None:
    followed = Followed()
    again, second, _ = computed_again(followed)
    # The last one is told of.
    followed.layout.note_cached("b", written=3 * SMALL_PAGE, new=1)
    (cached,) = followed.layout.cached(anchored=False)
    previous = dict(zip(cached.slots.tolist(), cached.previous.tolist(), strict=True))
    assert (previous[slots_of(again)[0]], previous[slots_of(second)[0]]) == (HEAD_OF_CHAIN, slots_of(again)[-1])


def test_what_the_cache_has_just_taken_in_is_noted_whatever_stands_behind_it() -> None:
    followed = Followed()
    again, second, third = computed_again(followed)
    # All three were filled by one forward, and the third one follows the second one, as before.
    followed.layout.note_cached("b", written=3 * SMALL_PAGE, new=3)
    (cached,) = followed.layout.cached(anchored=False)
    assert sorted(cached.slots.tolist()) == sorted(slots_of(again) + slots_of(second) + slots_of(third))


def test_of_a_request_s_blocks_those_that_are_noted_are_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    followed = Followed()
    table = followed.serve("a", BLOCKS - 1)
    true, looked_at = followed.layout.key, set[int]()

    def key(group: int, block: int) -> object:
        looked_at.add(block)
        return true(group, block)

    monkeypatch.setattr(followed.layout, "key", key)
    followed.layout.note_cached("a", written=(BLOCKS - 1) * SMALL_PAGE, new=1)
    # The new one, the one before it, which is noted, and what that follows.
    assert looked_at == set(table[-3:])
