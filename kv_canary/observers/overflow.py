"""Plans that were incomplete: what they left out was not verified."""

from __future__ import annotations

from kv_canary.constants import Status
from kv_canary.observers.base import Observer, StepFacts
from kv_canary.output import logger
from kv_canary.ratelimit import RateLimit

_MEANINGS = {
    Status.OVERFLOW: "more positions than the plan had room for (verify_capacity); those beyond it were left out",
    Status.ROW_RANGE: "a row that the table does not have; its request was left out",
    Status.LENGTH_RANGE: "a length that the table does not have; its request was left out",
    Status.LUT_RANGE: "an index that the LUT does not have; its slot is reported",
}


class OverflowWarner(Observer):
    """Logs incomplete plans: which, how, and how much was verified all the same.

    Args:
        limit: of the log's lines.
    """

    wants_quiet_steps = False

    def __init__(self, *, limit: RateLimit | None = None) -> None:
        self._limit = limit or RateLimit()

    def on_step(self, facts: StepFacts) -> None:
        for group, bits in facts.statuses:
            names = " + ".join(names_of(bits))
            meanings = "; ".join(meaning for bit, meaning in _MEANINGS.items() if bit in Status(bits))
            at_stride = f", at stride {facts.stride}" if facts.stride > 1 else ""
            line = self._limit.line(
                (group, bits),
                f"kv-canary: group {group}: the plan of step {facts.step} was incomplete: {names}: {meanings}. "
                f"Of {facts.relied_on} positions that the step relied on, {facts.verified} were verified{at_stride}",
            )
            if line is not None:
                logger.warning("%s", line)


def names_of(bits: int) -> list[str]:
    """Return the names of the status bits that are set."""
    return [bit.name or str(bit) for bit in Status if bit in Status(bits)]
