"""How right the causes are that incidents tell of faults: judged by hand, fault by fault, by parts of what is said.

A fault names the parts of causes that say what happened (`right`), and those that are true and do not say all of it
(`half`). What says neither is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

GRADES = ("right", "half", "wrong")

# A copy has brought what it should not have; from the wrong place; or has not come at all.
CAME_WRONG = ("are not those that were to come there",)
FROM_ELSEWHERE = ("is another's, or of other positions", *CAME_WRONG)
NEVER_CAME = ("nothing ever wrote there", "is missing")
# Nor has anything else been written there, where something lay before.
NEVER_FILLED = ("a copy or load that never came",)
# Bytes have changed without a forward; in one layer alone; or are zero.
STRAY = ("changed after they were written", "only one layer's bytes changed")
CHANGED = (*STRAY, "changed with no record")
ZEROED = ("they were zeroed after they were written", "are all zero")
# What was found is not the request's own.
WRONG_PREFIX = ("a stale or wrong prefix hit",)
WRONG_ENTRY = (
    "a wrong or stale table entry",
    "a stale or wrong table entry",
    "the table is off by one",
    "the table is shifted",
    "a wrong block",
)
# Who owns a slot is at odds: two do, or nobody.
TWO_OWNERS = ("two owners", "reused while in use")
WRONG_MAPPING = ("entry of the slot mapping",)
FREED = ("use after free",)
# A forward wrote something else than it was given.
WRITTEN_WRONG = ("is not what the model handed over",)
# Said of a page that something lies over, whatever brought it.
UNRECORDED = ("changed with no record",)


class Fault(Protocol):
    """A fault, with parts of causes; see the module."""

    @property
    def name(self) -> str: ...

    @property
    def right(self) -> Sequence[str]: ...

    @property
    def half(self) -> Sequence[str]: ...


def grade(right: Sequence[str], half: Sequence[str], says: str) -> str:
    """Return how right a cause is that was told of a fault: "right", "half" or "wrong"; "" where none was.

    Args:
        right, half: of the fault, see the module.
        says: the cause.
    """
    if not says:
        return ""
    if any(part in says for part in right):
        return "right"
    return "half" if any(part in says for part in half) else "wrong"


def graded(fault: Fault | None, causes: Iterable[str]) -> dict[str, int]:
    """Return how many causes of a fault's lives are how right; none where nothing goes wrong."""
    grades = [] if fault is None else [grade(fault.right, fault.half, cause) for cause in causes]
    return {name: grades.count(name) for name in GRADES}


def first_cause(manager: Any, *, behind: int = 0) -> str:
    """Return what a canary's first incident behind one with a number says of its cause, "" where there is none."""
    return next((incident.cause for incident in manager.incidents if incident.number > behind), "")


def last_incident(manager: Any) -> int:
    """Return the number of a canary's last incident; 0 where there was none."""
    return max((incident.number for incident in manager.incidents), default=0)
