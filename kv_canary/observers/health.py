"""Is the canary running? Missing launches are an error; when the last step was seen can be asked from outside."""

from __future__ import annotations

import time
from collections.abc import Callable

from kv_canary.observers.base import Observer, StepFacts
from kv_canary.output import logger
from kv_canary.ratelimit import RateLimit


class HealthCheck(Observer):
    """Logs launches that are missing, and knows when the last step was drained.

    An engine that goes on without calling the canary cannot be seen from in here: nothing is called then. It is seen
    by who asks from outside: `step` stands still and `age` grows while the engine makes tokens.

    Args:
        limit: of the log's lines.
        clock: seconds that only grow.
    """

    wants_quiet_steps = False

    def __init__(self, *, limit: RateLimit | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit or RateLimit()
        self._clock = clock
        self._seen: tuple[int, float] | None = None

    @property
    def step(self) -> int:
        """Number of the last drained step; 0 before the first. A step is drained when a later one begins."""
        return 0 if self._seen is None else self._seen[0]

    def age(self) -> float | None:
        """Return the seconds since the last step was drained, or None before the first; from any thread."""
        seen = self._seen
        return None if seen is None else self._clock() - seen[1]

    def drained(self, step: int) -> None:
        """Take in that a step has been drained."""
        self._seen = step, self._clock()

    def on_step(self, facts: StepFacts) -> None:
        self.drained(facts.step)
        if not facts.missing:
            return
        missing = ", ".join(f"{count} of {tag}" for tag, count in sorted(facts.missing.items()))
        line = self._limit.line(
            tuple(sorted(facts.missing)),
            f"kv-canary: step {facts.step} went by with launches missing: {missing}. The canary saw less than it "
            "seems to: a CUDA graph was replayed that it is not in, or was not replayed",
        )
        if line is not None:
            logger.error("%s", line)
