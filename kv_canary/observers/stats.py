"""A line of statistics in the log, every so many steps."""

from __future__ import annotations

from kv_canary.constants import Tag
from kv_canary.observers.base import Observer, StepFacts
from kv_canary.output import logger


class StatsLogger(Observer):
    """Logs, at level INFO, what the canary did since the line before.

    Args:
        every: steps from one line to the next.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._steps = self._requests = self._relied_on = self._verified = self._violations = 0
        self._entries = [0] * len(Tag)

    def on_step(self, facts: StepFacts) -> None:
        self._steps += 1
        self._requests += facts.requests
        self._relied_on += facts.relied_on
        self._verified += facts.verified
        if self._steps < self._every:
            return
        entries = [pair[1] for pair in facts.counters]
        grown = {tag.name: entries[tag] - self._entries[tag] for tag in Tag if entries[tag] > self._entries[tag]}
        coverage = f" ({self._verified / self._relied_on:.2%})" if self._relied_on else ""
        logger.info(
            "kv-canary: statistics: %d steps up to %d: requests=%d relied_on=%d verified=%d%s violations=%d stride=%d"
            " watching=%s entries: %s",
            self._steps,
            facts.step,
            self._requests,
            self._relied_on,
            self._verified,
            coverage,
            facts.violations - self._violations,
            facts.stride,
            facts.watching,
            " ".join(f"{name}={count}" for name, count in grown.items()) or "none",
        )
        self._steps = self._requests = self._relied_on = self._verified = 0
        self._violations, self._entries = facts.violations, entries
