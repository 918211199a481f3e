"""The meeting of ranks that came apart: in a thread of their own, while the steps of the engine go on."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from kv_canary.errors import must_be, printable, said_by
from kv_canary.output import logger
from kv_canary.ranks.group import RankGroup, gather

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroupGloo

# The first and the longest pause between two looks at whether all ranks have come, in seconds: one question to the
# store each.
_FIRST_LOOK, _LONGEST_LOOK = 0.1, 5.0
# Seconds that ranks which have all come wait for each other at most; above the longest pause between two looks.
_MEETING_SECONDS = 20.0
# The first and the longest delay of a rank before it comes again, where ranks met in vain or came apart again soon, in
# seconds; and how many timeouts they stay together where that is not soon.
_FIRST_DELAY, _LONGEST_DELAY, _LASTING = 0.5, 120.0, 10
# The step at which ranks go on together lies as many seconds ahead, at the pace of the steps, and as many steps.
_MARGIN_SECONDS, _LEAST_MARGIN = 0.5, 4
# Doublings of that at most, where some rank was past the step before it heard of it.
_MOST_DOUBLINGS = 4
# Steps that ranks of one engine may be apart when they say where they are: so many, and those of as many seconds.
_SPREAD, _SPREAD_SECONDS = 2, 0.01
# How often ranks that wait for each other try to go on together before they give it up.
_MOST_TRIALS = 4
# Steps that the pace is taken from.
_PACE_STEPS = 16
# Seconds that the end of the process waits for the thread.
_JOIN_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The terms that the ranks have agreed on.

    Args:
        group: new, and of all ranks.
        step: at whose beginning every rank goes on with it.
        spread: how many steps the ranks were apart when they agreed.
        in_step: whether that is no more than ranks may be apart which have run the same steps.
    """

    group: ProcessGroupGloo
    step: int
    spread: int
    in_step: bool


class Meeting:
    """Brings ranks that came apart together again: in a new group, from a step on that none of them has begun.

    Meetings are numbered, and every rank comes to each of them once, which is counted in the store through which the
    group of torch.distributed was made. So nothing is tried before all have come, and a rank that died costs the others
    a question to the store now and then. Those that have come make a group, hold their settings against each other, and
    agree on the step.

    All that can wait is done by a daemon thread, with a connection to the store of its own; it lives while this rank is
    alone.

    Args:
        ranks: the group that may come apart.
        settings: what has to be the same on all ranks, by name.
        waits: whether the steps of a rank wait for the others, so that going on together cannot be tried at will.
        redacts: whether the texts of what is raised are left out of the log.
    """

    def __init__(self, ranks: RankGroup, settings: Mapping[str, int], *, waits: bool, redacts: bool = False) -> None:
        self._ranks, self._settings, self._waits, self._redacts = ranks, dict(settings), waits, redacts
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        # What the lock guards: when the last steps began, the number of the last one, and what the ranks agreed on.
        self._lock = threading.Lock()
        self._begun: deque[float] = deque(maxlen=_PACE_STEPS)
        self._step = 0
        self._agreed: Agreement | None = None
        # Meetings that this rank has come to; those that did not last; how often ranks have tried to go on together
        # since they last were; and since when they are.
        self._number = self._in_vain = self._trials = 0
        self._together: float | None = None
        # Why this rank stays alone for good.
        self._over: str | None = None

    def seek(self, number: int) -> None:
        """Leave the group that came apart, and look for the other ranks from step `number` on."""
        self._ranks.leave()
        if self._together is not None and time.monotonic() - self._together > _LASTING * self._ranks.timeout:
            self._in_vain = 0
        self._together = None
        with self._lock:
            self._step, self._agreed = number, None
            self._begun.clear()
        if self._waits and self._trials >= _MOST_TRIALS:
            self._give_up(f"they met {self._trials} times, and lost each other before the next step")
        if self._ended.is_set():
            return
        self._thread = threading.Thread(target=self._run, name="kv-canary-ranks", daemon=True)
        self._thread.start()

    def take(self, number: int) -> Agreement | None:
        """Return what the ranks have agreed on if all of them go on together with step `number`, which begins now."""
        with self._lock:
            self._begun.append(time.monotonic())
            self._step, agreed = number, self._agreed
            if agreed is None or number < agreed.step:
                return None
            self._agreed = None
        self._ranks.carry(agreed.group)
        if number > agreed.step:
            # Steps were left out.
            self.seek(number)
            return None
        self._trials += 1
        return agreed

    def together(self) -> None:
        """Take in that the ranks are together."""
        self._trials, self._together = 0, time.monotonic()

    def end(self) -> None:
        """End the thread, waiting for it no longer than a moment."""
        self._ended.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        try:
            # What is under way there is waited for: it fails or is over within the timeout.
            self._ranks.forget_left()
            store = self._ranks.store()
            self._look(store)
            if self._over is not None and not store.check(["over"]):
                # So that no other waits for this one.
                store.set("over", f"rank {self._ranks.rank}: {self._over}")
        except Exception as error:
            self._give_up(said_by(error, redacts=self._redacts))

    def _look(self, store: Store) -> None:
        """Come to meetings until the ranks agree, or this one gives it up."""
        while self._over is None:
            if self._in_vain:
                self._ended.wait(min(_LONGEST_DELAY, _FIRST_DELAY * 2.0 ** (self._in_vain - 1)))
            if self._ended.is_set() or not self._come(store):
                return
            try:
                if self._meet(store):
                    return
            except ValueError as error:
                self._give_up(str(error))

    def _come(self, store: Store) -> bool:
        """Come to the next meeting, and return whether all ranks have; False only where there is to be no other."""
        self._number += 1
        self._in_vain += 1
        everyone = f"{self._number}/everyone"
        if store.add(f"{self._number}/come", 1) == self._ranks.size:
            store.set(everyone, "")
        pause = _FIRST_LOOK
        while not store.check([everyone]):
            if store.check(["over"]):
                self._give_up(store.get("over").decode(errors="replace"))
                return False
            if self._ended.wait(pause):
                return False
            pause = min(1.5 * pause, _LONGEST_LOOK)
        return True

    def _meet(self, store: Store) -> bool:
        """Meet the ranks, all of which have come; return whether they agree on a step that this one has not begun.

        Raises:
            ValueError: the ranks are configured differently.
        """
        import torch.distributed as dist

        seconds = timedelta(seconds=_MEETING_SECONDS)
        try:
            place = dist.PrefixStore(f"{self._number}/group", store)  # type: ignore[attr-defined]
            group = dist.ProcessGroupGloo(place, self._ranks.rank, self._ranks.size, seconds)
            check_same(self._settings, self._all(group, list(self._settings.values())))
            # Nothing that takes its time is between this and the agreement.
            steps, margins, spreads = zip(*self._all(group, [self._step, *self._margins()]), strict=True)
        except RuntimeError as error:
            # Some rank died or stopped while they met.
            logger.debug("kv-canary: ranks: a meeting came to nothing: %s", said_by(error, redacts=self._redacts))
            return False
        spread, margin = max(steps) - min(steps), max(margins)
        with self._lock:
            # A rank that is past the step stays away, which the others see when they use the group.
            if self._step < max(steps) + margin:
                self._agreed = Agreement(
                    group=group, step=max(steps) + margin, spread=spread, in_step=spread <= max(spreads)
                )
            return self._agreed is not None

    def _all(self, group: ProcessGroupGloo, words: Sequence[int]) -> list[list[int]]:
        """Return the words of every rank."""
        received, work = gather(group, torch.tensor(words, dtype=torch.int64), seconds=_MEETING_SECONDS)
        work.wait()
        return received.tolist()

    def _margins(self) -> tuple[int, int]:
        """Return how many steps ahead ranks should go on together, so that all have heard of it; and `_SPREAD`."""
        with self._lock:
            rate = len(self._begun) / (time.monotonic() - self._begun[0]) if self._begun else 0.0
        doublings = min(self._in_vain - 1, _MOST_DOUBLINGS)
        margin = max(_LEAST_MARGIN, math.ceil(rate * _MARGIN_SECONDS)) << doublings
        return margin, _SPREAD + math.ceil(rate * _SPREAD_SECONDS)

    def _give_up(self, why: str) -> None:
        if self._over is not None or self._ended.is_set():
            return
        self._over = why
        logger.error(
            "kv-canary: ranks: rank %d stays alone for good: it cannot meet the others again (%s)",
            self._ranks.rank,
            printable(why),
        )


def check_same(settings: Mapping[str, int], ranks: Sequence[Sequence[int]]) -> None:
    """Check what every rank said of its `settings`.

    Raises:
        ValueError: they differ.
    """
    for name, values in zip(settings, zip(*ranks, strict=True), strict=True):
        if len(set(values)) > 1:
            raise ValueError(must_be("CanaryManager", name, "the same on all ranks", ", ".join(map(str, values))))
