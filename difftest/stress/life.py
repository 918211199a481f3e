"""One life of a real engine in a campaign, with a fault in it or without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

Act = TypeVar("Act")


@dataclass(frozen=True, kw_only=True)
class Life(Generic[Act]):
    """The outcome of one life.

    Args:
        outputs: the tokens that each request generated.
        act: what the fault did; None where none was to come.
        acted_at: steps of the engine before the fault.
        steps: of the engine, in all.
        ended: what ended the life early, in words.
    """

    outputs: dict[str, list[int]]
    act: Act | None
    acted_at: int
    steps: int
    ended: str = ""
