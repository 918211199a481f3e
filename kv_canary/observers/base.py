"""The interface of observers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kv_canary.ranks import RankReport
    from kv_canary.reports import Incident, ViolationReport
    from kv_canary.runtime.batch import ForwardBatch, WatchedForward
    from kv_canary.runtime.cost import CanaryCost
    from kv_canary.runtime.summary import AuditFacts, CanarySummary, ScrubFacts, Watching


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """One drained step.

    Args:
        step: its number.
        watching: whether the canary sees, as of this step, as in `CanarySummary`.
        requests: how many it served.
        relied_on: cached positions that its forwards were about to read.
        verified: those of them that were checked before.
        counters: (launches, entries) by tag, since the beginning.
        statuses: (group, status bits) of its plans that were incomplete.
        missing: launches that it should have made and did not, by the name of the tag.
        violations, incidents: all that were found so far, those of the same drain included.
        found: those of them whose details fit the ring, by (group, reason), 0 where there are none; one of
            two reasons counts under each.
        discarded: found so far in rows whose result the engine threw away.
        stride: how many steps a cached position waits for its turn at most.
        cost: what a step takes, and the canary of it; None before the second step.
        scrub, audits: what of the pools has been held against its seals so far, as in `CanarySummary`; None where
            nothing is sealed.
    """

    step: int
    watching: Watching
    requests: int
    relied_on: int
    verified: int
    counters: tuple[tuple[int, ...], ...]
    statuses: tuple[tuple[str, int], ...]
    missing: Mapping[str, int]
    violations: int
    found: Mapping[tuple[str, str], int]
    discarded: int
    stride: int
    incidents: int = 0
    cost: CanaryCost | None = None
    scrub: ScrubFacts | None = None
    audits: AuditFacts | None = None


@dataclass(frozen=True, kw_only=True)
class RequestVerdict:
    """What became of all bytes of K and V that a request which has ended rested on.

    Args:
        request_id: how reports call it.
        step: the last one before it was looked at.
        slots: held against their seals, in all groups.
        layers: of K and V, all bytes of which were looked at in each.
        unsealed: its slots with a record and no seal, so that nobody can say.
        damaged: bands of layers of its slots whose bytes are not those that were sealed; each is a violation too.
    """

    request_id: str
    step: int
    slots: int
    layers: int
    unsealed: int
    damaged: int

    @property
    def verdict(self) -> str:
        """ "damaged", "partial" where some slots have no seal, or "intact"."""
        return "damaged" if self.damaged else "partial" if self.unsealed else "intact"

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        counts = {"slots": self.slots, "layers": self.layers, "unsealed": self.unsealed, "damaged": self.damaged}
        return {"request_id": self.request_id, "step": self.step, "verdict": self.verdict, **counts}


class Observer:
    """Does nothing; subclasses do. What they raise is logged, and the canary goes on.

    Attributes:
        wants_quiet_steps: whether `on_step` is called for steps in which no launch is missing and no plan was
            incomplete. Where no observer wants that, they cost less.
    """

    wants_quiet_steps = True

    def on_forward(self, forward: WatchedForward, batch: ForwardBatch) -> None:
        """Called behind every forward, on its stream and outside any graph; must not wait for the device."""

    def on_incident(self, incident: Incident) -> None:
        """Called with every new incident, as far as it is known then, before the reports of its drain."""

    def on_report(self, report: ViolationReport) -> None:
        """Called with every violation that is written out."""

    def on_request(self, verdict: RequestVerdict) -> None:
        """Called once for every request that has ended, where seals are kept: what became of its K and V is known."""

    def on_step(self, facts: StepFacts) -> None:
        """Called once for every step, when its words have arrived: one step late, or more, behind its reports."""

    def on_ranks(self, report: RankReport) -> None:
        """Called with every difference between ranks, on each of them."""

    def on_end(self, summary: CanarySummary) -> None:
        """Called once, before `close`, with what the canary has done and found in all."""

    def close(self) -> None:
        """Called once when the canary is closed: give back files, ports and the like. News may still come later."""
