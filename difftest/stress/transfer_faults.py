"""Faults between prefill and decode: one request, the target, is hit in one pool, by one fault at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from kv_canary.difftest.simulator.transfer import PAGE, Copy, PlacedRequest, TransferEngine

BEFORE = ("a K byte changed", "a V byte changed", "freed too early")
ON_THE_WAY = (
    "the end cut off",
    "the second half lost",
    "the beginning cut off",
    "the first half lost",
    "a page lost",
    "a page of one layer lost",
    "half of each page",
    "too few pages",
    "too many pages",
    "pages swapped",
    "pages of one layer swapped",
    "another request's pages",
    "nothing sent",
)
AFTER = ("read in the old layout", "overwritten before landing")
FAULTS = (*BEFORE, *ON_THE_WAY, *AFTER)

# What no fingerprint taken on arrival can see.
SILENT = ("a K byte changed",)
# Whose violations a fault causes, where they are not the target's alone.
BLAMED = {"too many pages": {"ahead"}, "overwritten before landing": {"target", "intruder"}}


def damage_before(engine: TransferEngine, target: PlacedRequest, *, fault: str, pool: str) -> None:
    """Do what happens to the target on the prefill side, behind TAIL and before the transfer."""
    position = target.cached - 3
    group = next(group for group in engine.groups if group.name == pool)
    slot = engine.slot_of(group, target, position)
    if fault == "a K byte changed":
        engine.flip(group, "K", slot, position)
    elif fault == "a V byte changed":
        engine.flip(group, "V", slot, position)
    elif fault == "freed too early":
        engine.retire(target, pool)


def damage_on_the_way(
    copies: list[Copy], *, fault: str, pool: str, ahead: dict[str, dict[int, int]], other: dict[str, dict[int, int]]
) -> list[Copy]:
    """Return what is sent of these messages instead.

    Args:
        copies: the target's.
        fault: one of `FAULTS`; those that happen elsewhere change nothing here.
        pool: whose messages are damaged.
        ahead: the receiver's pages of a request that is decoding, by pool and place.
        other: the sender's pages of a request that is as long as the target.
    """
    mine = [c for c in copies if c.pool == pool]
    half = len(mine) // 2

    def only(copy: Copy, kept: Sequence[int]) -> Copy:
        return dataclasses.replace(copy, src=tuple(copy.src[i] for i in kept), dst=tuple(copy.dst[i] for i in kept))

    def swapped(copy: Copy) -> Copy:
        first, second, *rest = copy.dst
        return dataclasses.replace(copy, dst=(second, first, *rest))

    pages = len(mine[0].src)
    but_second = [i for i in range(pages) if i != 1]
    beyond = list(ahead.get(pool, {}).values())[-2:-1]
    strange = list(other[pool].values())
    changed = {
        "the end cut off": lambda: mine[:-2],
        "the second half lost": lambda: mine[:half],
        "the beginning cut off": lambda: mine[2:],
        "the first half lost": lambda: mine[half:],
        "a page lost": lambda: [only(c, but_second) for c in mine],
        "a page of one layer lost": lambda: [only(c, but_second) if c.buffer == 1 else c for c in mine],
        # What comes of one length of a page in the tables and another in the pool.
        "half of each page": lambda: [dataclasses.replace(c, share=2) for c in mine],
        "too few pages": lambda: [only(c, range(-(-pages // 2))) for c in mine],
        "too many pages": lambda: [
            dataclasses.replace(c, src=(*c.src, strange[0]), dst=(*c.dst, *beyond)) for c in mine
        ],
        "pages swapped": lambda: [swapped(c) for c in mine],
        "pages of one layer swapped": lambda: [swapped(c) if c.buffer == 1 else c for c in mine],
        "another request's pages": lambda: [dataclasses.replace(c, src=tuple(strange)) for c in mine],
        "nothing sent": list,
    }.get(fault, lambda: mine)()
    return [c for c in copies if c.pool != pool] + changed


def overwrite(engine: TransferEngine, target: PlacedRequest, *, pool: str) -> None:
    """Make another request's forward write into one of the target's pages."""
    intruder = engine.arrive("intruder", range(1, PAGE + 1))
    page = list(target.places[pool].values())[1]

    def damage(out_slots: dict[str, torch.Tensor]) -> None:
        out_slots[pool] = engine.slots(page)

    engine.extend((intruder, PAGE), damage=damage)
    engine.free(intruder)


def in_the_old_layout(message: torch.Tensor, *, token_bytes: int) -> torch.Tensor:
    """Return uint8 [pages, item_bytes] K or V of a message as if its pages were ordered by head, and not by token."""
    return message.view(-1, PAGE, 2, token_bytes // 2).transpose(1, 2).reshape(message.shape)
