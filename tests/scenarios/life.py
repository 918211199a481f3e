"""What is seen of an engine's life: by the canary, and without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kv_canary import CanarySummary, Incident, ViolationReport


@dataclass(frozen=True, kw_only=True)
class Act:
    """A bug did something.

    Args:
        step: the forward that it happened in, or the next one.
        slots: per group, the slots that hold, or will be given, what they should not.
        requests: those that may be named because of it; None: whoever uses the slots.
        shown_by: those whose use of the slots shows it; None: all of the former.
        later: what it left is there for later forwards to read, as what happens while the model runs: HEAD has looked
            by then.
    """

    step: int
    slots: Mapping[str, frozenset[int]]
    requests: frozenset[str] | None
    shown_by: frozenset[str] | None = None
    later: bool = False


@dataclass(frozen=True, kw_only=True)
class Touch:
    """A forward was about to read, or to write, a slot for a request."""

    step: int
    request: str
    group: str
    slot: int
    kind: Literal["read", "write"]


@dataclass(kw_only=True)
class Life:
    """One engine's life.

    Args:
        reports: the canary's, all of them.
        incidents: likewise.
        summary: its own.
        acts: what the bug did.
        touches: which slots the forwards read and wrote, by the engine's own tables.
        texts: per request, (step, token) of everything that was generated.
        drafts: the same of a draft model.
    """

    reports: list[ViolationReport] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    summary: CanarySummary | None = None
    acts: list[Act] = field(default_factory=list)
    touches: list[Touch] = field(default_factory=list)
    texts: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    drafts: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    @property
    def acted(self) -> int:
        """The step of the bug's first act."""
        return min(act.step for act in self.acts)

    def first_visible(self) -> int | None:
        """Return the first step at which a forward used a slot that the bug had spoiled; None if none did."""
        return min((t.step for t in self.touches for act in self.acts if _uses(t, act)), default=None)

    def blames_rightly(self, report: ViolationReport) -> bool:
        """Whether a report names a slot that the bug has spoiled and a request that it may be named for.

        The record behind a foreign one has another chain before it: CHAIN alone may name it. BATCH names no slot.
        """
        if report.reasons == ("BATCH",):
            return any(act.requests is None or report.request_id in act.requests for act in self.acts)
        slots = {report.slot}
        if report.reasons == ("CHAIN",):
            slots.add(report.previous_slot)
        return any(
            (act.requests is None or report.request_id in act.requests)
            and any(slots & act.slots.get(group, frozenset()) for group in report.group.split(" or "))
            for act in self.acts
        )


def first_difference(
    healthy: Mapping[str, list[tuple[int, int]]], faulty: Mapping[str, list[tuple[int, int]]]
) -> int | None:
    """Return the step of the faulty life in which a request's text first differs; None if none does."""
    steps = [
        step
        for name, text in faulty.items()
        for (step, token), (_, right) in zip(text, healthy.get(name, []), strict=False)
        if token != right
    ]
    return min(steps, default=None)


def names(requests: Sequence[int]) -> frozenset[str]:
    """Return how reports call the requests of these serial numbers."""
    return frozenset(str(serial) for serial in requests)


def _uses(touch: Touch, act: Act) -> bool:
    in_time = touch.kind == "read" and touch.step > act.step if act.later else touch.step >= act.step
    by = act.requests if act.shown_by is None else act.shown_by
    return in_time and touch.slot in act.slots.get(touch.group, ()) and (by is None or touch.request in by)
