"""The summary of a canary: what it has done so far, and how well it sees."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from kv_canary.output import logger
from kv_canary.runtime.cost import CanaryCost

# Steps for which something incomplete makes watching partial.
RECENT_STEPS = 64
# Names of requests that a summary has, and that its sentence shows.
MOST_NAMES, _MOST_SHOWN = 16, 4


class Watching(StrEnum):
    """Words for whether a canary sees, from good to bad; they say nothing of what it has found."""

    #: No step yet, or the canary is off.
    OFF = "off"
    #: Every step was verified as configured.
    COMPLETE = "complete"
    #: Some of the last `RECENT_STEPS` steps went by unwatched or were verified in part, or the ranks are not compared.
    PARTIAL = "partial"
    #: Launches are missing, so that the canary sees less than it seems to.
    STALE = "stale"


@dataclass(frozen=True, kw_only=True)
class ScrubFacts:
    """What scrubs have done.

    Args:
        verified: slots held against their seals, each as often as it was.
        unsealed: slots with a record and no seal of it that were met.
        rounds: times that every pool was gone through.
        oldest: seconds since the byte that was looked at longest ago; None before the first round is over.
    """

    verified: int = 0
    unsealed: int = 0
    rounds: int = 0
    oldest: float | None = None

    def __or__(self, other: ScrubFacts) -> ScrubFacts:
        """Return what two scrubs have done of different pools: as old as the older of them."""
        ages = (self.oldest, other.oldest)
        return ScrubFacts(
            verified=self.verified + other.verified,
            unsealed=self.unsealed + other.unsealed,
            rounds=min(self.rounds, other.rounds),
            oldest=None if None in ages else max(age for age in ages if age is not None),
        )


@dataclass(frozen=True, kw_only=True)
class AuditFacts:
    """What audits have done.

    Args:
        admitted: slots of cached prefixes that were held against their seals before their requests' first forwards.
        completed: requests that ended, and whose verdicts are known.
        verified: their slots that were held against their seals.
        unsealed: slots that either met with a record and no seal.
    """

    admitted: int = 0
    completed: int = 0
    verified: int = 0
    unsealed: int = 0

    def __or__(self, other: AuditFacts) -> AuditFacts:
        """Return what two canaries have done together."""
        return AuditFacts(
            admitted=self.admitted + other.admitted,
            completed=self.completed + other.completed,
            verified=self.verified + other.verified,
            unsealed=self.unsealed + other.unsealed,
        )


@dataclass(frozen=True, kw_only=True)
class WriteFacts:
    """What became of what models have handed over to be cached.

    Args:
        forwards: whose writes were held against it, by groups.
        slots: that were.
        differ: bands of layers of slots in which something else lay.
        unknown: forwards, by groups, of which not all layers were handed over.
    """

    forwards: int = 0
    slots: int = 0
    differ: int = 0
    unknown: int = 0

    def __or__(self, other: WriteFacts) -> WriteFacts:
        """Return what two canaries have seen together."""
        return WriteFacts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


@dataclass(frozen=True, kw_only=True)
class CanarySummary:
    """The canary's account of itself, as of the last drained step: whether it is watching, and what it has found.

    `str` of it is one sentence: the verdict, and what that rests on.

    Args:
        watching: whether it sees.
        steps: steps begun.
        positions_relied_on: cached positions that forwards were about to read.
        positions_verified: those of them that were checked before.
        bytes_held: how the bytes of these are held against what they were: "by sample", or "sealed", every one of
            them; "" where that is not known.
        violations: found and reported, or counted where there were too many to report.
        incidents: causes that these were grouped by.
        requests: names of requests that read or wrote where they were found, the first `MOST_NAMES`.
        discarded: found in rows whose result the engine threw away.
        uncovered: positions that came from elsewhere and were fingerprinted on arrival: what befell their bytes on the
            way cannot be seen.
        reasons: violations by reason.
        launches: launches by tag.
        stride: how many steps a cached position waits for its turn at most.
        incomplete: plans that left something out, by status bit.
        skipped: forwards that went by unwatched: nobody could describe them, or the canary failed in them.
        unverified: positions that were taken in anew where such a forward had written.
        failures: what went wrong inside the canary and was contained, by part and kind of exception.
        cost: what a step takes, and the canary of it; None before the second step.
        scrub: what going round the pools has seen; None where nothing is sealed.
        audits: what requests were held against when they came and when they ended; None where nothing is sealed.
        writes: what was held against what models have handed over; None where nothing is. As of now: it is waited for.
        memory: bytes on the device: of the engine's K and V, records, seals, the table of tokens, scratch.
        dropped: log lines, events and bundles of this process that were dropped, because nobody took them in time.
    """

    watching: Watching
    steps: int = 0
    positions_relied_on: int = 0
    positions_verified: int = 0
    bytes_held: str = ""
    violations: int = 0
    incidents: int = 0
    requests: tuple[str, ...] = ()
    discarded: int = 0
    uncovered: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    launches: dict[str, int] = field(default_factory=dict)
    stride: int = 1
    incomplete: dict[str, int] = field(default_factory=dict)
    skipped: int = 0
    unverified: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    dropped: int = 0
    cost: CanaryCost | None = field(default=None, compare=False)
    scrub: ScrubFacts | None = field(default=None, compare=False)
    audits: AuditFacts | None = field(default=None, compare=False)
    writes: WriteFacts | None = field(default=None, compare=False)
    memory: dict[str, int] = field(default_factory=dict, compare=False)

    @property
    def is_clean(self) -> bool:
        """Whether nothing was found; that says as much as `watching` lets it."""
        return not self.violations

    @property
    def verdict(self) -> str:
        """What was found: "clean", or the incidents and the requests that they befell; "no verdict" before any step."""
        if self.is_clean:
            # Nothing that was not looked at is clean.
            return "clean" if self.steps and self.watching is not Watching.OFF else "no verdict"
        names = ", ".join(self.requests[:_MOST_SHOWN])
        more = " and more" if len(self.requests) > _MOST_SHOWN else ""
        befell = f", requests {names}{more}" if names else ""
        # Of a storm not all violations are grouped.
        incidents = f"{_count(self.incidents, 'incident')}, " if self.incidents else ""
        return f"CORRUPTION: {incidents}{_count(self.violations, 'violation')}{befell}"

    def __str__(self) -> str:
        if self.watching is Watching.OFF:
            seen = "watched nothing"
        else:
            seen = (
                f"watching {self.watching.value}, {self.positions_verified:,} of {self.positions_relied_on:,} cached "
                f"positions verified in {_count(self.steps, 'step')}"
            )
            if self.bytes_held:
                seen += f", bytes {self.bytes_held}"
        troubles = [
            _count(count, what)
            for count, what in (
                (self.skipped, "forward unwatched"),
                (sum(self.incomplete.values()), "plan incomplete"),
                (sum(self.failures.values()), "failure of the canary's own"),
            )
            if count
        ]
        return f"{self.verdict}; {seen}" + "".join(f", {trouble}" for trouble in troubles)

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as JSON-ready values."""
        told = {"watching": self.watching.value, "verdict": self.verdict, "requests": list(self.requests)}
        return {**asdict(self), **told}

    def __add__(self, other: CanarySummary) -> CanarySummary:
        """Return the summary of two canaries together; they are as well as the worse of them."""
        sums: dict[str, Any] = {}
        for name in (f.name for f in fields(self)):
            mine, theirs = getattr(self, name), getattr(other, name)
            sums[name] = dict(Counter(mine) + Counter(theirs)) if isinstance(mine, dict) else None
            if isinstance(mine, int):
                sums[name] = mine + theirs
        held = {summary.bytes_held for summary in (self, other)} - {""}
        sums["bytes_held"] = min(held, default="")
        sums["watching"] = max(self.watching, other.watching, key=list(Watching).index)
        sums["requests"] = tuple(dict.fromkeys([*self.requests, *other.requests]))[:MOST_NAMES]
        # A stride is no count, and what was dropped is of the whole process.
        costs = [cost for cost in (self.cost, other.cost) if cost is not None]
        sums["cost"] = costs[0] | costs[-1] if costs else None
        scrubs = [scrub for scrub in (self.scrub, other.scrub) if scrub is not None]
        sums["scrub"] = functools.reduce(ScrubFacts.__or__, scrubs) if scrubs else None
        audits = [audit for audit in (self.audits, other.audits) if audit is not None]
        sums["audits"] = functools.reduce(AuditFacts.__or__, audits) if audits else None
        writes = [write for write in (self.writes, other.writes) if write is not None]
        sums["writes"] = functools.reduce(WriteFacts.__or__, writes) if writes else None
        sums["stride"], sums["dropped"] = max(self.stride, other.stride), max(self.dropped, other.dropped)
        return CanarySummary(**sums)


def say_verdict(summary: CanarySummary) -> None:
    """Log the last line of a canary: an error where something was found, a warning where it did not see all."""
    line = "kv-canary: verdict: %s"
    if not summary.is_clean:
        logger.error(line, summary)
    elif summary.watching is Watching.COMPLETE:
        logger.info(line, summary)
    else:
        logger.warning(line, summary)


def _count(count: int, what: str) -> str:
    """Return so many of it in words; the first word of `what` is counted."""
    first, *rest = what.split(" ")
    return " ".join([f"{count:,}", first if count == 1 else f"{first}s", *rest])
