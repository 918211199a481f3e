"""The content of SGLang's prefix cache, for sweeps; and which of its prefix caches the adapter can follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kv_canary.constants import HEAD_OF_CHAIN, UNCHECKED
from kv_canary.errors import must_be
from kv_canary.runtime.cached import CachedSlots
from kv_canary.runtime.pools import BufferGroup


def check(tree_cache: Any) -> None:
    """See that KV comes into the cached slots by forwards, or from a host tier (see `hicache`).

    Raises:
        ValueError: it may come from outside as well: such slots would have no records, and reading them would look like
            corruption. The text names the setting to turn off.
    """
    from sglang.srt.mem_cache.pure_swa_radix_cache import PureSWARadixCache
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    if type(tree_cache) not in (UnifiedRadixCache, RadixCache, PureSWARadixCache):
        expected = "UnifiedRadixCache, RadixCache or PureSWARadixCache"
        raise ValueError(must_be("sglang adapter", "the prefix cache", expected, type(tree_cache).__name__))
    if getattr(tree_cache, "linker", None) is not None:
        expected = "on the device only (enable_unified_cache_external_linker off)"
        raise ValueError(must_be("sglang adapter", "the prefix cache", expected, "one linked to an external store"))


def cached(tree_cache: Any, groups: Sequence[BufferGroup], *, anchored: bool) -> list[CachedSlots]:
    """Return what the prefix cache holds for each of `groups`, those in use by requests included, on the CPU.

    Waits for the device where a group's slots are translated: the engine may change the table right after.

    Args:
        tree_cache: of the scheduler; one that is disabled holds nothing.
        groups: of the target, and of draft models; the latter's records hold the token after their position, so that
            they are left out where cache keys do not (keys of pairs do).
        anchored: whether requests have had identities, so that the first position follows nothing that is known.
    """
    first = UNCHECKED if anchored else HEAD_OF_CHAIN
    pairs = bool(getattr(tree_cache, "tree_core", tree_cache).is_eagle)
    everything = _walk(tree_cache, resident=False)
    resident = _walk(tree_cache, resident=True) if any(g.lut is not None for g in groups) else everything
    result = []
    for group in groups:
        if group.token_offset and not pairs:
            continue
        slots, positions, previous = everything if group.lut is None else resident
        before = previous > 0
        if group.lut is not None:
            slots, previous = _look_up(group.lut, torch.stack([slots, previous.clamp(min=0)]))
            if not tree_cache.supports_swa():
                # The cache does not know which windows it still holds.
                slots, positions, previous, before = (t[slots > 0] for t in (slots, positions, previous, before))
        previous = torch.where(before & (previous > 0), previous, UNCHECKED)
        previous = torch.where(positions == 0, first, previous)
        result.append(CachedSlots(group=group.name, slots=slots, positions=positions, previous=previous))
    return result


def _walk(tree_cache: Any, *, resident: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return slot, position and slot of the position before (-1 for the first), int64 on the CPU, of what is cached.

    With `resident`, those only whose KV of windowed layers is still there, if the cache knows.
    """
    core = getattr(tree_cache, "tree_core", None)
    if core is not None:
        walked = core.walk_for_kv_canary(unlocked_only=False, swa_resident_only=resident)
        found = walked.slot_indices, walked.positions, walked.prev_slot_indices
    else:
        found = _walk_nodes(tree_cache.root_node)
    slots, positions, previous = (t.to("cpu", torch.int64) for t in found)
    return slots, positions, previous


def _walk_nodes(root: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walk a tree whose nodes hold the slots of consecutive positions."""
    none = torch.zeros(0, dtype=torch.int64)
    slots, positions, previous = [none], [none], [none]
    # Nodes to visit, with the position they begin at and the slot before.
    left = [(child, 0, torch.full((1,), -1)) for child in root.children.values()]
    while left:
        node, start, before = left.pop()
        value = node.value.to("cpu", torch.int64)
        slots.append(value)
        positions.append(torch.arange(start, start + len(value)))
        previous += [before, value[:-1]]
        left += [(child, start + len(value), value[-1:]) for child in node.children.values()]
    return torch.cat(slots), torch.cat(positions), torch.cat(previous)


def _look_up(lut: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return lut[slots.to(lut.device)].to("cpu", torch.int64)
