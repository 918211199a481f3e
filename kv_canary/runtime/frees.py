"""The frees whose steps may still be asked about: who has given slots back, or was handed them, and when."""

from __future__ import annotations

from collections import deque

from kv_canary.constants import OWNER_MASK

# Requests that are told apart in what was freed before a forward: each is launches of its own.
MOST_FREERS = 4
# Steps with frees that are remembered: no fewer than steps of which it is remembered what they wrote.
_MOST_STEPS = 64


class Frees:
    """The steps in which slots were freed, with who did it, and in which slots in use were handed out, with to whom.

    Frees by nobody in particular are left out.
    """

    def __init__(self) -> None:
        # (step, who freed, who was handed slots).
        self._steps: deque[tuple[int, set[int], set[int]]] = deque(maxlen=_MOST_STEPS)

    def note(self, step: int, owner: int, *, handed_out: bool = False) -> None:
        """Take in that slots were freed by `owner` behind a step, or handed out to it; 0: nobody says by whom."""
        if not owner:
            return
        if not self._steps or self._steps[-1][0] != step:
            self._steps.append((step, set(), set()))
        _, freed, handed = self._steps[-1]
        (handed if handed_out else freed).add(owner & OWNER_MASK)

    def any_by(self, owner: int, step: int) -> bool:
        """Whether an owner has freed slots in a step, one of those that are remembered, or was handed some."""
        own = owner & OWNER_MASK
        return any(own in freed or own in handed for number, freed, handed in self._steps if number == step)

    def handed_out(self, owner: int, step: int) -> bool:
        """Whether an owner was handed slots in use in a step, one of those that are remembered, and freed none."""
        own = owner & OWNER_MASK
        return any(own in handed and own not in freed for number, freed, handed in self._steps if number == step)
