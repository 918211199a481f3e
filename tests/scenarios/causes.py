"""What each scenario's first incident says of its cause, and how right that is; judged by hand, held by a test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Grade = Literal["right", "half"]


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The judgement of what an incident says.

    Args:
        says: part of its cause.
        lacks: what it should say and does not; "" where it names what happened.
    """

    says: str
    lacks: str = ""

    @property
    def grade(self) -> Grade:
        """How right the cause is: it names what happened, or what is true and not all of it."""
        return "half" if self.lacks else "right"


_STRAY = Judged(says="a stray write, a copy race or memory corruption")
_CAME = Judged(says="are not those that a copy or load was to bring")
_NOTHING = Judged(says="nothing ever wrote there")
_FREED = Judged(says="use after free")
_HIT = Judged(says="a stale or wrong prefix hit")
_EVICTED = Judged(says="its window entry was evicted")

CAUSES = {
    "freed-while-landing": _STRAY,
    "freed-in-flight": _CAME,
    "flushed-by-row": Judged(
        says="a stale or wrong prefix hit", lacks="KV was copied for a request that had left its row"
    ),
    "cached-unfilled-new": _NOTHING,
    "cached-unfilled-recycled": Judged(says="handed out or cached and never filled"),
    "evicted-but-listed": _FREED,
    "evicted-and-reused": _FREED,
    "shared-page-freed": Judged(says="use after free: 8 slots freed by request 2"),
    "handed-out-twice": Judged(says="two owners"),
    "loaded-before-stored": _STRAY,
    "freed-before-stored": _CAME,
    "buffer-overwritten": _CAME,
    "one-layer-page": _STRAY,
    "one-layer-page-one-token": _STRAY,
    "live-page-zeroed": Judged(says="they were zeroed after they were written"),
    "logical-page-length": _CAME,
    "stale-lut-entry": Judged(says="a wrong or stale table entry"),
    "stale-mapping": Judged(says="two owners"),
    "recached-after-window": _EVICTED,
    "other-groups-slots-used": Judged(
        says="a slot reused while in use", lacks="the slot mapping of the write was another pool's"
    ),
    "other-groups-slots-free": Judged(
        says="nothing ever wrote there", lacks="the write went to the slots of another pool's mapping"
    ),
    "left-a-page-early": _EVICTED,
    "ring-wraps-early": Judged(says="the slot holds another position of the same request"),
    "phantom-hit": _HIT,
    "row-not-filled": Judged(says="a wrong or stale table entry"),
    "adapter-not-in-key": _HIT,
    "image-hash-truncated": _HIT,
    "weights-updated": _HIT,
    "draft-positions": Judged(says="the forward's positions are off by one"),
    "rotated-chunk": Judged(says="was given another token than the request's own"),
    "rotated-chunk-told": Judged(says="the forward was given another token"),
    "draft-never-written": _NOTHING,
    "draft-layer-overwritten": _STRAY,
    "draft-layer-overwritten-one-token": _STRAY,
    "padding-in-last-slot": _STRAY,
    "padding-for-a-token": Judged(says="told to write outside the pool"),
    "stale-write-slots": _STRAY,
    "rows-swapped": Judged(says="rows swapped"),
    "length-short": Judged(says="the length on the device is off by -1"),
    "overflow-on-write": _STRAY,
    "moved-from-next": Judged(
        says="the table is off by one", lacks="the cells were moved by one, not the table's entries"
    ),
    "moved-without-tokens": Judged(
        says="the table is off by one", lacks="the cells were moved by one, not the table's entries"
    ),
    "moved-over-itself": _CAME,
    "transformers-shared-block-freed": Judged(says="use after free: 3 whole pages freed by request second"),
    "transformers-loaded-before-stored": Judged(says="the copy or load that was to bring them"),
    "transformers-phantom-hit": _HIT,
    "transformers-weights-updated": _HIT,
}
