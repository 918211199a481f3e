"""Changes of SGLang's slots without a forward: freed, cleared, and brought back from host memory.

A slot's content can be reached no more once the allocator has it back: the prefix cache gives back what it evicts, and
what it has twice, through the same allocator, and keeps what requests hand over to it. So this is where to look.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from kv_canary.engines.patches import Patches
from kv_canary.runtime.frees import MOST_FREERS
from kv_canary.runtime.pools import BufferGroup, KvPool

logger = logging.getLogger("kv_canary")


class _Freed(NamedTuple):
    """Slots that were freed at once, by their numbers or by those of their pages, and by whom: 0 for nobody."""

    owner: int
    numbers: torch.Tensor
    # Slots of a page; 1 where the numbers are those of slots.
    page_size: int

    @property
    def slots(self) -> torch.Tensor:
        """The int64 slots, on the current stream."""
        numbers, size = self.numbers, self.page_size
        if size == 1:
            return numbers.to(torch.int64)
        offsets = torch.arange(size, dtype=torch.int64, device=numbers.device)
        return (numbers.to(torch.int64)[:, None] * size + offsets).view(-1)


class Lifetime:
    """Follows an allocator: which slots were freed, when all of them were, and which came back from the host.

    `tracks` says whether frees are followed. Where they are not, which is logged, nothing may be made of whose a record
    is (`CanaryConfig.track_lifetime` off); the rest is followed all the same.

    Args:
        allocator: the scheduler's `token_to_kv_pool_allocator`.
        groups: the groups whose slots it gives out, those of draft models included: they share its slot numbers.
        patches: what its methods are wrapped with.
        cleared: called when the engine has emptied the allocator, and with it the cache: no record means anything now.
        unverify: called with a pool and int64 slots whose content nobody can say.
        arrived: called with a pool, int64 slots whose bytes and records are back, and the seals that they had.
        keeps: called with tensors that were made on the scheduler's stream, before launches on the forwards' read them.
        following: gives the context, by what is done, of a part of the canary that may fail where the engine must not;
            where it did, no slot's record may be relied on. With `allocates=False` it makes no tensors.

    Attributes:
        freer: serial number of the request whose slots are being given back; 0 where nobody says whose they are, as of
            what the prefix cache evicts.
    """

    def __init__(
        self,
        allocator: Any,
        groups: Sequence[BufferGroup],
        *,
        patches: Patches,
        cleared: Callable[[], None],
        unverify: Callable[[KvPool, torch.Tensor], None] = lambda pool, slots: None,
        arrived: Callable[[KvPool, torch.Tensor, torch.Tensor | None], None] = lambda pool, slots, seals: None,
        keeps: Callable[[Sequence[torch.Tensor]], None] = lambda tensors: None,
        following: Callable[..., AbstractContextManager[Any]] = lambda part, **_: nullcontext(),
    ) -> None:
        self._cleared, self._unverify, self._arrived, self._following = cleared, unverify, arrived, following
        self._keeps = keeps
        # By allocator, in order.
        self._freed: dict[int, list[_Freed]] = {}
        self.freer = 0
        # By allocator: what is held back until a group of frees ends: whose, and how many numbers.
        self._held: dict[int, list[tuple[int, int]]] = {}
        # The same, of the group that is just ending: what is freed meanwhile is what it held back.
        self._ending: list[tuple[int, int]] = []
        # By owner of the slots: the pools that they are slots of.
        self._pools: dict[int, list[KvPool]] = {}
        # The pools whose bytes the engine keeps on the host for requests that it puts off, with their luts.
        self._kept = {g.pool: g.lut for g in groups if g.token_offset == 0}
        self._kept_records = WeakTensorKeyDictionary()
        patches.wrap(allocator, "clear", self._clear)
        patches.wrap(allocator, "get_cpu_copy", self._copy_to_host)
        patches.wrap(allocator, "load_cpu_copy", self._copy_back)
        halves = _halves(allocator)
        self.tracks = halves is not None
        if halves is None:
            logger.warning(
                "kv-canary: sglang adapter: running without lifetime tracking, because frees of %s cannot be followed: "
                "reads of freed slots are seen only once they are reused, and a slot with two owners by its reader",
                type(allocator).__name__,
            )
            return
        full, windowed = halves
        for half in {id(h): h for h in halves}.values():
            mine = [g.pool for g in groups if half is (full if g.lut is None else windowed)]
            self._pools[id(half)] = list(dict.fromkeys(mine))
            self._watch(half, patches)
        for holder in {id(h): h for h in (allocator, *halves)}.values():
            self._hold(holder, patches)

    @property
    def has_freed(self) -> bool:
        """Whether slots were freed since the last `take`."""
        return bool(self._freed)

    def take(self) -> list[tuple[KvPool, list[torch.Tensor], int]]:
        """Return the slots that were freed since the last call, int64 tensors, with their pools and who freed them.

        They lie on the allocator's device. Where many requests have freed some, nobody is named.

        To be called, and the slots to be retired, on the stream of the forwards: before a forward begins, and before
        anything else gives records to slots that may have been freed and handed out again. Does not wait for the
        device. A slot that was freed twice is there twice.
        """
        freed, self._freed = self._freed, {}
        result: list[tuple[KvPool, list[torch.Tensor], int]] = []
        for half, told in freed.items():
            for owner, slots in _by_owner(told).items():
                result += [(pool, slots, owner) for pool in self._pools[half]]
            self._keeps([its.numbers for its in told])
        return result

    def forget(self) -> None:
        """Drop the slots that `take` would return: some of them may have been handed out again since."""
        self._freed.clear()

    def _watch(self, half: Any, patches: Patches) -> None:
        """Follow one allocator of slots or of pages. Frees of a group come when the group ends, and are free then."""

        def free(original: Callable[..., Any], free_index: torch.Tensor) -> Any:
            held_back = getattr(half, "free_group", None) is not None
            result = original(free_index)
            with self._following("what is freed"):
                if not held_back:
                    self._note_slots(half, free_index)
            return result

        def release(original: Callable[..., Any], *page_ids: torch.Tensor) -> Any:
            result = original(*page_ids)
            with self._following("what is freed", allocates=False):
                for pages in page_ids:
                    # As they are, which the allocator keeps too. Their slots are computed when somebody asks: here the
                    # device may have nothing to do, and a batch waits for the host.
                    self._note(half, pages, page_size=half.page_size)
            return result

        # All ways to free pages end there; slots have but one way.
        if hasattr(half, "_release_page_ids"):
            patches.wrap(half, "_release_page_ids", release)
        else:
            patches.wrap(half, "free", free)

    def _hold(self, holder: Any, patches: Patches) -> None:
        """Follow whose slots an allocator holds back until a group of frees ends, as far as it says so."""

        def hold(original: Callable[..., Any], numbers: torch.Tensor) -> Any:
            self._held.setdefault(id(holder), []).append((self.freer, numbers.numel()))
            return original(numbers)

        def begin(original: Callable[..., Any]) -> Any:
            # Of one that never ended.
            self._held.pop(id(holder), None)
            return original()

        def end(original: Callable[..., Any]) -> Any:
            outer, self._ending = self._ending, self._held.pop(id(holder), self._ending)
            try:
                return original()
            finally:
                self._ending = outer

        if hasattr(holder, "_copy_for_free_group") and hasattr(holder, "free_group_end"):
            patches.wrap(holder, "_copy_for_free_group", hold)
            patches.wrap(holder, "free_group_begin", begin)
            patches.wrap(holder, "free_group_end", end)

    def _note_slots(self, half: Any, slots: torch.Tensor) -> None:
        """Take in that slots were freed, in a tensor of any integers, by whom `_note` says."""
        if not slots.numel():
            return
        # As they are where all of the memory is theirs, like what the prefix cache held: a copy would be a launch more.
        # Else it may be a part of a request's row, which is another's soon.
        is_whole = slots.dtype == torch.int64 and slots.untyped_storage().nbytes() == slots.nbytes
        self._note(half, slots if is_whole else slots.to(torch.int64, copy=True), in_order=True)

    def _note(self, half: Any, numbers: torch.Tensor, *, page_size: int = 1, in_order: bool = False) -> None:
        """Take in that slots were freed: by whom the engine names, or by those whose frees were held back until now.

        Args:
            half: that has them back.
            numbers: of slots; or of pages, of so many slots each.
            page_size: see there.
            in_order: whether those that were held back lie in the order in which they were.
        """
        held = self._ending
        owners = {owner for owner, _ in held} or {self.freer}
        told = self._freed.setdefault(id(half), [])
        if len(owners) == 1:
            told.append(_Freed(owners.pop(), numbers, page_size))
        elif in_order and sum(count for _, count in held) == len(numbers):
            parts = numbers.split([count for _, count in held])
            told += (_Freed(owner, part, page_size) for (owner, _), part in zip(held, parts, strict=True))
        else:
            # Of several, in an order that is not theirs.
            told.append(_Freed(0, numbers, page_size))

    def _clear(self, original: Callable[..., Any]) -> Any:
        result = original()
        with self._following("an emptied cache"):
            self.forget()
            self._cleared()
        return result

    def _copy_to_host(self, original: Callable[..., Any], indices: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        copy = original(indices, *args, **kwargs)
        with self._following("what is copied to the host"):
            self._keep(copy, indices)
        return copy

    def _copy_back(
        self, original: Callable[..., Any], copy: Any, indices: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        result = original(copy, indices, *args, **kwargs)
        with self._following("what comes back from the host"):
            self._bring_back(copy, indices)
        return result

    def _keep(self, copy: Any, indices: torch.Tensor) -> None:
        """Keep the records of slots whose bytes are now on the host, for as long as the engine keeps that copy.

        The engine has waited for the device.
        """
        key = _first_tensor(copy)
        if key is not None:
            kept = {pool: _translate(indices, lut) for pool, lut in self._kept.items()}
            self._kept_records[key] = {
                pool: ([records[slots] for records in pool.buffers], pool.take_seals(slots))
                for pool, slots in kept.items()
            }

    def _bring_back(self, copy: Any, indices: torch.Tensor) -> None:
        """Give kept records to the slots that the bytes have come back to; the engine has waited for the device."""
        key = _first_tensor(copy)
        kept = {} if key is None else self._kept_records.pop(key, {})
        for pool, lut in self._kept.items():
            slots = _translate(indices, lut)
            self._unfree(pool, slots)
            if pool not in kept:
                # Copied when nobody could follow it.
                self._unverify(pool, slots)
                continue
            parts, seals = kept[pool]
            for records, part in zip(pool.buffers, parts, strict=True):
                records[slots] = part
                # Slots that are not mapped any more, or not yet, were all taken for this one.
                records[0] = 0
            # There was no record to keep where nobody had looked: see CanaryManager.unverify.
            self._unverify(pool, slots[(parts[0] == 0).all(dim=1)])
            self._arrived(pool, slots, seals)

    def _unfree(self, pool: KvPool, slots: torch.Tensor) -> None:
        """Forget that `slots` were freed: they have been handed out again, and have new records already."""
        for half, told in self._freed.items():
            if pool in self._pools[half]:
                self._freed[half] = [
                    _Freed(its.owner, freed[~torch.isin(freed, slots)], 1) for its in told for freed in (its.slots,)
                ]


def _by_owner(told: Sequence[_Freed]) -> dict[int, list[torch.Tensor]]:
    """Return the int64 slots that each owner has freed; where many have, nobody is named."""
    named = len({its.owner for its in told}) <= MOST_FREERS
    slots: dict[int, list[torch.Tensor]] = {}
    pages: dict[tuple[int, int], list[torch.Tensor]] = {}
    for owner, numbers, page_size in told:
        owner = owner if named else 0
        if page_size == 1 and numbers.dtype == torch.int64:
            slots.setdefault(owner, []).append(numbers)
        else:
            pages.setdefault((owner, page_size), []).append(numbers)
    for (owner, page_size), its in pages.items():
        # By few launches, however many there are.
        together = _Freed(owner, torch.cat(its) if len(its) > 1 else its[0], page_size)
        slots.setdefault(owner, []).append(together.slots)
    return slots


def _halves(allocator: Any) -> tuple[Any, Any] | None:
    """Return what gives out the slots of full and of windowed layers, or None where the kind is not known."""
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.swa import PureSWATokenToKVPoolAllocator, SWATokenToKVPoolAllocator

    halves = (allocator, allocator)
    if type(allocator) in (SWATokenToKVPoolAllocator, PureSWATokenToKVPoolAllocator):
        if allocator.swa_req_ring:
            # A window's slots belong to the request's row, and are never freed.
            return None
        halves = (allocator.full_attn_allocator, allocator.swa_attn_allocator)
    known = (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator)
    return halves if all(type(half) in known for half in halves) else None


def _translate(indices: torch.Tensor, lut: torch.Tensor | None) -> torch.Tensor:
    slots = indices.to(torch.int64)
    return slots if lut is None else lut[slots]


def _first_tensor(copy: Any) -> torch.Tensor | None:
    """Return the first tensor in nested lists and dicts, which lives for as long as they do."""
    if isinstance(copy, torch.Tensor):
        return copy
    parts = copy.values() if isinstance(copy, dict) else copy if isinstance(copy, list | tuple) else ()
    return next((found for found in map(_first_tensor, parts) if found is not None), None)
