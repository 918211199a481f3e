"""The places of KV in transformers' continuous batching, by version."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from kv_canary.constants import BAD_SLOT
from kv_canary.engines.patches import Patches
from kv_canary.engines.transformers_base import Events, Layout, buffer_group, page_slots
from kv_canary.errors import must_be
from kv_canary.runtime.pools import KvPool
from kv_canary.specs.structures import KvSource

__all__ = ["BlockLayout", "Layout", "SectorLayout", "layout_class"]


class SectorLayout(Layout):
    """From 5.19: one byte tensor cut into sectors; a pool and a group per attention type, blocks numbered per pool."""

    def __init__(self, processor: Any, *, read_bytes: int) -> None:
        super().__init__(processor, read_bytes=read_bytes)
        cache = self.cache
        self.allocators = list(cache.cache_allocators.values())
        # The engine makes every allocator with the one page size of its configuration.
        self.page = self.allocators[0].tokens_per_page
        cpu_sectors = getattr(processor.offloading_manager, "_num_cpu_sectors", 0)
        groups = []
        for allocator in self.allocators:
            page, stride = self.page, allocator.block_physical_stride
            num_blocks = (cache.num_sectors + 2) * allocator.blocks_per_sector
            views = [allocator._kv_token_views[layer] for layer in allocator.layer_indices]
            pool = KvPool(
                name=allocator.layer_type,
                num_slots=num_blocks * page,
                k_source=self._source([k for k, _ in views], num_blocks, page, stride),
                v_source=self._source([v for _, v in views], num_blocks, page, stride),
                # The first two sectors are trash.
                first_slot=2 * allocator.blocks_per_sector * page,
                extra_slots=cpu_sectors * allocator.blocks_per_sector * page,
                layer_names=tuple(f"layer {i}" for i in allocator.layer_indices),
                device=cache.device,
            )
            groups.append(buffer_group(allocator.layer_type, pool, getattr(allocator, "sliding_window", None)))
        self.groups = tuple(groups)

    def _source(self, views: list[torch.Tensor], num_blocks: int, page: int, stride: int) -> KvSource:
        # A block's tokens of one layer lie together; the next block's lie `stride` token rows further.
        width = views[0][0].numel()
        layers = tuple(v.as_strided((num_blocks, page * width), (stride * width, 1)) for v in views)
        bytes_per_token = width * views[0].element_size()
        return KvSource(
            layers=layers,
            page_size=page,
            bytes_per_token=bytes_per_token,
            read_bytes=min(self.read_bytes, bytes_per_token),
        )

    def to_slots(self, group: int, indices: torch.Tensor) -> torch.Tensor:
        allocator = self.allocators[group]
        stride = allocator.block_physical_stride
        block = indices.div(stride, rounding_mode="floor")
        slots = torch.sub(indices, block, alpha=stride - self.page)
        # An offset past the page is another layer's memory.
        slots.masked_fill_(torch.sub(indices, block, alpha=stride) >= self.page, BAD_SLOT)
        # The first two sectors are trash.
        return slots.masked_fill_(block.div_(2 * allocator.blocks_per_sector, rounding_mode="floor") == 0, 0)

    def watch(self, patches: Patches, events: Events) -> None:
        pool, by_index = self.cache.pool, {a.index: g.pool for a, g in zip(self.allocators, self.groups, strict=True)}

        def free(original: Callable[..., Any], index: int, block_ids: list[int]) -> Any:
            result = original(index, block_ids)
            events.freed(by_index[index], block_ids, self.freeing)
            return result

        def allocate(original: Callable[..., Any], index: int) -> Any:
            # A sector may have been another attention type's before.
            sector = pool.free_sectors[-1]
            result = original(index)
            for allocator, group in zip(self.allocators, self.groups, strict=True):
                if allocator.index != index:
                    count = allocator.blocks_per_sector
                    blocks = list(range(sector * count, (sector + 1) * count))
                    events.reused(group.pool, self.block_slots(group.pool, blocks))
            return result

        def reset(original: Callable[..., Any]) -> Any:
            result = original()
            events.cleared()
            return result

        def copy(original: Callable[..., Any], copies: dict[str, tuple[list[int], list[int]]]) -> Any:
            events.before_copy()
            result = original(copies)
            for g, allocator in enumerate(self.allocators):
                src, dst = copies.get(allocator.layer_type, ([], []))
                self.copied(events, g, self.groups[g].pool, list(zip(src, dst, strict=True)))
            return result

        patches.wrap(pool, "free_blocks", free)
        patches.wrap(pool, "allocate_sector", allocate)
        patches.wrap(pool, "reset", reset)
        patches.wrap(self.cache, "perform_cache_copy", copy)
        self.watch_requests(patches, events, marks="mark_complete_blocks")
        self.watch_offloading(patches, events)

    def watch_writes(self, patches: Patches, handed: Callable[[KvPool, int, torch.Tensor, torch.Tensor], None]) -> None:
        places = {
            layer: (group.pool, number)
            for allocator, group in zip(self.allocators, self.groups, strict=True)
            for number, layer in enumerate(allocator.layer_indices)
        }

        def update(
            original: Callable[..., Any],
            key_states: torch.Tensor,
            value_states: torch.Tensor,
            layer_idx: int,
            kwargs: dict[str, Any],
        ) -> Any:
            # A kernel that takes block tables writes by itself.
            if kwargs.get("block_table") is None:
                pool, number = places[layer_idx]
                # [1, heads, tokens, dim]
                k, v = (x.squeeze(0).transpose(0, 1) for x in (key_states, value_states))
                handed(pool, number, k, v)
            return original(key_states, value_states, layer_idx, kwargs)

        patches.wrap(self.cache, "update", update)

    def empty(self) -> bool:
        if any(a.block_table for a in self.allocators):
            return False
        self.cache.evict_cached_blocks()
        return True

    def host_blocks(self, request_id: Hashable) -> Mapping[KvPool, list[tuple[int, list[int]]]]:
        hosts = self.processor.offloading_manager._request_id_to_cpu_blocks.get(request_id, {})
        return {
            self.groups[g].pool: [(g, hosts[a.layer_type])]
            for g, a in enumerate(self.allocators)
            if a.layer_type in hosts
        }

    def block_table(self, group: int) -> dict[Hashable, list[int]]:
        table: dict[Hashable, list[int]] = self.allocators[group].block_table
        return table

    def block_slots(self, pool: KvPool, blocks: list[int], *, host: bool = False) -> torch.Tensor:
        return page_slots(blocks, self.page, pool.num_slots if host else 0)

    def cached_blocks(self, group: int) -> list[int]:
        return list(self.allocators[group].ledger.block_to_hash)

    def key(self, group: int, block: int) -> object:
        return self.allocators[group].ledger.block_to_hash.get(block)


class BlockLayout(Layout):
    """5.17: key and value tensors that all groups share, blocks numbered over all of them; slot 0 is a real slot."""

    def __init__(self, processor: Any, *, read_bytes: int) -> None:
        super().__init__(processor, read_bytes=read_bytes)
        cache = self.cache
        self.managers = list(cache.group_cache_managers)
        self.num_blocks, self.page = cache.num_blocks, cache.block_size
        members: list[list[int]] = [[] for _ in cache.key_cache]
        for layer, (_, j) in sorted(cache.layer_index_to_group_indices.items()):
            members[j].append(layer)
        self.pool = KvPool(
            name="blocks",
            num_slots=self.num_blocks * self.page + 1,
            k_source=self._source(cache.key_cache),
            v_source=self._source(cache.value_cache),
            extra_slots=getattr(processor.offloading_manager, "_num_cpu_blocks", 0) * self.page,
            layer_names=tuple(f"layer {' or '.join(map(str, layers))}" for layers in members),
            device=cache.device,
        )
        windows = [getattr(m, "sliding_window", None) for m in self.managers]
        names = [f"{'full' if w is None else 'sliding'}_attention_{i}" for i, w in enumerate(windows)]
        self.groups = tuple(buffer_group(n, self.pool, w) for n, w in zip(names, windows, strict=True))

    def _source(self, tensors: list[torch.Tensor]) -> KvSource:
        bytes_per_token = tensors[0][0].numel() * tensors[0].element_size()
        return KvSource(
            layers=tuple(tensors),
            page_size=1,
            bytes_per_token=bytes_per_token,
            read_bytes=min(self.read_bytes, bytes_per_token),
            slot_bias=1,
        )

    def to_slots(self, group: int, indices: torch.Tensor) -> torch.Tensor:
        real = self.num_blocks * self.page
        slots = indices + 1
        slots.masked_fill_(slots > real, 0)
        # Two pages of trash are behind those that hold KV, and nothing is behind these.
        return slots.masked_fill_(indices.div(real + 2 * self.page, rounding_mode="floor") != 0, BAD_SLOT)

    def watch(self, patches: Patches, events: Events) -> None:
        blocks = self.cache._block_manager

        def freed(ids: list[int]) -> None:
            events.freed(self.pool, ids, self.freeing)

        def take(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            # Under pressure a cached block loses its key right here, just before it is handed out.
            result = original(*args, **kwargs)
            freed(list(result or []))
            return result

        def free(original: Callable[..., Any], ids: list[int], shareable: bool) -> Any:
            ids = list(ids)
            result = original(ids, shareable=shareable)
            freed([b for b in ids if not shareable or b not in blocks._id_to_block])
            return result

        def drop(original: Callable[..., Any], block_id: int) -> Any:
            result = original(block_id)
            freed([block_id])
            return result

        def copy(original: Callable[..., Any], src: list[int], dst: list[int]) -> Any:
            events.before_copy()
            result = original(src, dst)
            pairs = list(zip(src, dst, strict=True))
            for g in range(len(self.groups)):
                mine = {b for table in self.block_table(g).values() for b in table}
                self.copied(events, g, self.pool, [(s, d) for s, d in pairs if d in mine])
            return result

        patches.wrap(blocks, "get_free_blocks", take)
        patches.wrap(blocks, "free_blocks", free)
        patches.wrap(blocks, "uninitialize_unshared_block", drop)
        patches.wrap(self.cache, "copy_cache", copy)
        self.watch_requests(patches, events, marks="mark_shareable_blocks_as_complete")
        self.watch_offloading(patches, events)

    def empty(self) -> bool:
        if any(m.block_table for m in self.managers):
            return False
        # Asking for every block makes the manager forget what it kept for prefix hits.
        blocks = self.cache._block_manager
        blocks.has_enough_free_blocks(blocks.num_free_blocks)
        return True

    def host_blocks(self, request_id: Hashable) -> Mapping[KvPool, list[tuple[int, list[int]]]]:
        offloading = self.processor.offloading_manager
        hosts = list(offloading._request_id_to_cpu_blocks.get(request_id, []))
        parts = []
        for group, count in enumerate(offloading._request_id_to_group_block_counts.get(request_id, [])):
            parts.append((group, hosts[:count]))
            hosts = hosts[count:]
        return {self.pool: parts} if parts else {}

    def block_table(self, group: int) -> dict[Hashable, list[int]]:
        table: dict[Hashable, list[int]] = self.managers[group].block_table
        return table

    def block_slots(self, pool: KvPool, blocks: list[int], *, host: bool = False) -> torch.Tensor:
        return page_slots(blocks, self.page, pool.num_slots if host else 1)

    def cached_blocks(self, group: int) -> list[int]:
        return [b for b in self.cache._block_manager._hash_to_id.values() if self.key(group, b) is not None]

    def key(self, group: int, block: int) -> object:
        blocks = self.cache._block_manager
        known = blocks._id_to_block.get(block)
        # One that was evicted, but not handed out again yet, still has its hash.
        if known is None or known.group_id != group or blocks._hash_to_id.get(known.hash) != block:
            return None
        return known.hash


# The versions that were run, by (major, minor): sectors are another thing in 5.18.
_LAYOUTS: dict[tuple[int, int], type[Layout]] = {(5, 17): BlockLayout, **{(5, n): SectorLayout for n in range(19, 25)}}


def layout_class(version: str) -> type[Layout]:
    """Return the layout of a transformers version.

    Raises:
        ValueError: the adapter does not know that version.
    """
    parts = version.split(".")
    key = (int(parts[0]), int(parts[1])) if len(parts) > 1 and parts[0].isdigit() and parts[1].isdigit() else None
    if key not in _LAYOUTS:
        known = ", ".join(f"{major}.{minor}" for major, minor in _LAYOUTS)
        raise ValueError(must_be("transformers adapter", "transformers version", f"one of {known}", version))
    return _LAYOUTS[key]
