"""The common part of transformers' versions of continuous batching: where KV is kept, and when it is let go of.

A layout knows the pools, the groups and the numbering of slots of one version, and tells the adapter three things as
they happen: blocks freed, blocks copied, requests forgotten. Record slots are dense: block * page + offset, shifted
by one where the engine's slot 0 is real.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kv_canary.constants import HEAD_OF_CHAIN, UNCHECKED
from kv_canary.engines.patches import Patches
from kv_canary.errors import must_be
from kv_canary.output import logger
from kv_canary.runtime.cached import CachedSlots
from kv_canary.runtime.pools import BufferGroup, KvPool

# What the engine calls the requests by which it warms up.
WARMUP_PREFIX = "__warmup_"


@dataclass(frozen=True, kw_only=True)
class Events:
    """Callbacks from a layout to the adapter. Slots are record slots.

    Args:
        freed: (pool, blocks, request): nothing names their content any more, because of that request if one is named.
        copied: (pool, source slots, destination slots, request): the engine copied them, for that request.
        request_ended: (request): it has ended, and its blocks are about to be freed.
        request_freed: (request): the engine forgot its blocks.
        all_freed: every request was forgotten.
        reused: (pool, slots): their memory now holds what another pool's slots name.
        cleared: the cache was emptied.
        before_copy: frees up to here happened before what is copied next.
        written: returns how many positions of a request forwards have written.
    """

    freed: Callable[[KvPool, Sequence[int], Hashable | None], None]
    copied: Callable[[KvPool, torch.Tensor, torch.Tensor, Hashable], None]
    request_ended: Callable[[Hashable], None]
    request_freed: Callable[[Hashable], None]
    all_freed: Callable[[], None]
    reused: Callable[[KvPool, torch.Tensor], None]
    cleared: Callable[[], None]
    before_copy: Callable[[], None]
    written: Callable[[Hashable], int]


class _Place(NamedTuple):
    """The place of a block when the prefix cache took it in: the engine's keys do not tell.

    Args:
        at: its place in its request's table.
        key: what it was found by then.
        previous: the block before it, None for the first.
        previous_key: what that one was found by.
    """

    at: int
    key: object
    previous: int | None
    previous_key: object


class Layout(ABC):
    """One version's cache. `groups` are in the order of the engine's index tensors, `page` is theirs all."""

    groups: tuple[BufferGroup, ...]
    page: int

    def __init__(self, processor: Any, *, read_bytes: int) -> None:
        self.processor = processor
        self.cache = processor.cache
        self.read_bytes = read_bytes
        # The request whose blocks are being freed right now.
        self.freeing: Hashable | None = None
        # By group and block; only what stands there of blocks that the prefix cache holds is meant.
        self._places: dict[tuple[int, int], _Place] = {}

    @abstractmethod
    def to_slots(self, group: int, indices: torch.Tensor) -> torch.Tensor:
        """Turn the engine's int64 slot indices into record slots: 0 for trash, BAD_SLOT for what no group may name."""

    @abstractmethod
    def watch(self, patches: Patches, events: Events) -> None:
        """Wrap what frees, copies and clears."""

    @abstractmethod
    def empty(self) -> bool:
        """Make the cache forget what no request uses; return whether it is empty then."""

    @abstractmethod
    def host_blocks(self, request_id: Hashable) -> Mapping[KvPool, list[tuple[int, list[int]]]]:
        """Return the request's host-tier blocks: per pool, (group, block ids) in order; empty if it has none."""

    @abstractmethod
    def block_table(self, group: int) -> dict[Hashable, list[int]]:
        """Return the live block table of a group."""

    @abstractmethod
    def block_slots(self, pool: KvPool, blocks: list[int], *, host: bool = False) -> torch.Tensor:
        """Return the record slots, int64, of whole blocks, in order; of the host tier's blocks with `host`."""

    @abstractmethod
    def cached_blocks(self, group: int) -> list[int]:
        """Return the blocks of a group that later requests can find."""

    @abstractmethod
    def key(self, group: int, block: int) -> object:
        """Return what later requests find a block of a group by; None if they cannot."""

    def cached(self, *, anchored: bool) -> list[CachedSlots]:
        """Return what the prefix cache holds, used or idle.

        Args:
            anchored: whether chains start from identities, so that the first position follows nothing that is known.
        """
        return [
            self._cached(g, placed, anchored=anchored)
            for g in range(len(self.groups))
            if (placed := [b for b in self.cached_blocks(g) if self._is_placed(g, b)])
        ]

    def note_cached(self, request_id: Hashable, *, written: int, new: int) -> None:
        """Note where the blocks of a request stand that the prefix cache has taken in.

        Args:
            request_id: the request.
            written: positions of it that hold KV. With asynchronous batching, 5.17 also takes in a block that it has
                allocated for the next forward, under a key that no prompt will ever have.
            new: how many of the last of these the cache has just taken in, at most.
        """
        for g in range(len(self.groups)):
            table = self.block_table(g).get(request_id, [])
            count = min(len(table), written // self.page)
            # What stands before one that is noted already, for whatever request, was noted with it.
            for i in range(count - 1, -1, -1):
                key = self.key(g, table[i])
                if key is None:
                    continue
                previous = table[i - 1] if i else None
                place = _Place(i, key, previous, None if previous is None else self.key(g, previous))
                if i < count - new and self._places.get((g, table[i])) == place:
                    break
                self._places[g, table[i]] = place

    def _is_placed(self, group: int, block: int) -> bool:
        """Whether it is known where a block stands that later requests can find."""
        place = self._places.get((group, block))
        return place is not None and place.key == self.key(group, block)

    def _cached(self, group: int, blocks: list[int], *, anchored: bool) -> CachedSlots:
        pool = self.groups[group].pool
        places = [self._places[group, block] for block in blocks]
        slots = self.block_slots(pool, blocks).view(-1, self.page)
        first = torch.tensor([p.at for p in places], dtype=torch.int64, device="cpu") * self.page
        ends = self.block_slots(pool, [p.previous or 0 for p in places]).view(-1, self.page)[:, -1]
        # A block may outlive the one before it, whose slots then hold something else.
        codes = [
            (UNCHECKED if anchored else HEAD_OF_CHAIN)
            if p.previous is None
            else (0 if p.previous_key is not None and self.key(group, p.previous) == p.previous_key else UNCHECKED)
            for p in places
        ]
        code = torch.tensor(codes, dtype=torch.int64, device="cpu")
        previous = torch.cat([torch.where(code == 0, ends, code)[:, None], slots[:, :-1]], dim=1)
        return CachedSlots(
            group=self.groups[group].name,
            slots=slots.reshape(-1),
            positions=(first[:, None] + torch.arange(self.page, device="cpu")).reshape(-1),
            previous=previous.reshape(-1),
        )

    def watch_offloading(self, patches: Patches, events: Events) -> None:
        """Carry records to the host tier and back. Records are moved before the freed blocks are retired."""
        offloading = self.processor.offloading_manager

        def offload(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            events.before_copy()
            tables = [{r: list(b) for r, b in self.block_table(g).items()} for g in range(len(self.groups))]
            known = set(offloading._request_id_to_cpu_blocks)
            result = original(*args, **kwargs)
            for request_id in set(offloading._request_id_to_cpu_blocks) - known:
                for pool, parts in self.host_blocks(request_id).items():
                    for group, host in parts:
                        blocks = tables[group][request_id][: len(host)]
                        src, dst = self.block_slots(pool, blocks), self.block_slots(pool, host, host=True)
                        events.copied(pool, src, dst, request_id)
            return result

        def restore(original: Callable[..., Any], requests_in_batch: list[Any]) -> Any:
            events.before_copy()
            ids = [f.state.request_id for f in requests_in_batch if f.state.is_cpu_offloaded]
            hosts = {request_id: self.host_blocks(request_id) for request_id in ids}
            result = original(requests_in_batch)
            for request_id, pools in hosts.items():
                for pool, parts in pools.items():
                    for group, host in parts:
                        blocks = self.block_table(group).get(request_id, [])[: len(host)]
                        src = self.block_slots(pool, host[: len(blocks)], host=True)
                        events.copied(pool, src, self.block_slots(pool, blocks), request_id)
            return result

        patches.wrap(offloading, "offload_requests", offload)
        patches.wrap(offloading, "restore_scheduled_requests", restore)

    def watch_writes(self, patches: Patches, handed: Callable[[KvPool, int, torch.Tensor, torch.Tensor], None]) -> None:
        """Hand on what the model hands over to be cached, by `CanaryManager.handed`; not known how in all versions."""
        logger.warning("kv-canary: transformers adapter: check_writes does not cover this version's cache")

    def watch_requests(self, patches: Patches, events: Events, *, marks: str) -> None:
        """Watch requests being forgotten, and the prefix cache taking blocks in, by the cache's method `marks`."""

        def free(original: Callable[..., Any], request_id: Hashable, *args: Any, **kwargs: Any) -> Any:
            # Otherwise it is put off, and comes again.
            if not (args or kwargs.get("no_cache")):
                events.request_ended(request_id)
            self.freeing = request_id
            try:
                result = original(request_id, *args, **kwargs)
            finally:
                self.freeing = None
            events.request_freed(request_id)
            return result

        def free_all(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            events.all_freed()
            return result

        def mark(original: Callable[..., Any], state: Any, complete: Any) -> Any:
            result = original(state, complete)
            if complete:
                # Newer versions count for each attention type.
                new = max(complete.values()) if isinstance(complete, dict) else complete
                self.note_cached(state.request_id, written=events.written(state.request_id), new=new)
            return result

        patches.wrap(self.cache, "free_blocks", free)
        patches.wrap(self.cache, "free_all_requests", free_all)
        patches.wrap(self.cache, marks, mark)

    def copied(self, events: Events, group: int, pool: KvPool, pairs: list[tuple[int, int]]) -> None:
        """Report copied blocks, grouped by the request that each destination now belongs to."""
        owners = {block: request for request, blocks in self.block_table(group).items() for block in blocks}
        by_request: dict[Hashable, list[tuple[int, int]]] = {}
        for src, dst in pairs:
            by_request.setdefault(owners[dst], []).append((src, dst))
        for request, mine in by_request.items():
            src_slots = self.block_slots(pool, [s for s, _ in mine])
            events.copied(pool, src_slots, self.block_slots(pool, [d for _, d in mine]), request)


def buffer_group(name: str, pool: KvPool, sliding_window: int | None) -> BufferGroup:
    """Return the group of layers that read `pool` with the model's `sliding_window`, None for full attention."""
    if sliding_window is None:
        return BufferGroup(name=name, pool=pool)
    if sliding_window < 2:
        expected = "at least 2, so that something of the past is read"
        raise ValueError(must_be("transformers adapter", "sliding_window", expected, str(sliding_window)))
    return BufferGroup(name=name, pool=pool, window=sliding_window - 1, ring=True)


def page_slots(blocks: list[int], page: int, first: int) -> torch.Tensor:
    """Return the slots, int64, of blocks of `page` tokens that lie one after the other from slot `first` on."""
    starts = torch.tensor(blocks, dtype=torch.int64, device="cpu") * page + first
    return (starts[:, None] + torch.arange(page, device="cpu")).reshape(-1)
