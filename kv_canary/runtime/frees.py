"""The frees whose steps may still be asked about: who has given slots back, and when."""

from __future__ import annotations

from collections import deque

from kv_canary.constants import OWNER_MASK

# Steps with frees that are remembered: no fewer than steps of which it is remembered what they wrote.
_MOST_STEPS = 64


class Frees:
    """The steps in which slots were freed, with who did it; frees by nobody in particular are left out."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, set[int]]] = deque(maxlen=_MOST_STEPS)

    def note(self, step: int, owner: int) -> None:
        """Take in that slots were freed by `owner` behind a step; 0: nobody says by whom."""
        if not owner:
            return
        if not self._steps or self._steps[-1][0] != step:
            self._steps.append((step, set()))
        self._steps[-1][1].add(owner & OWNER_MASK)

    def any_by(self, owner: int, step: int) -> bool:
        """Whether an owner has freed slots in a step, one of those that are remembered."""
        return any(owner & OWNER_MASK in owners for number, owners in self._steps if number == step)
