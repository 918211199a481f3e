"""What observers are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_canary.forward import ForwardBatch, SingleForwardManager
    from kv_canary.reports import ViolationReport


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """One drained step.

    Args:
        step: its number.
        requests: how many it served.
        relied_on: cached positions that its forwards were about to read.
        verified: those of them that were checked before.
        counters: (launches, entries) by tag, since the beginning.
        statuses: (group, status bits) of its plans that were incomplete.
        missing: launches that it should have made and did not, by the name of the tag.
    """

    step: int
    requests: int
    relied_on: int
    verified: int
    counters: tuple[tuple[int, ...], ...]
    statuses: tuple[tuple[str, int], ...]
    missing: Mapping[str, int]


class Observer:
    """Does nothing; subclasses do. What they raise is logged, and the canary goes on."""

    def on_forward(self, forward: SingleForwardManager, batch: ForwardBatch) -> None:
        """Called behind every forward, on its stream and outside any graph; must not wait for the device."""

    def on_step(self, facts: StepFacts) -> None:
        """Called once for every step, when its words have arrived: one step late, or more."""

    def on_report(self, report: ViolationReport) -> None:
        """Called with every violation that is written out."""
