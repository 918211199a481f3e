"""The fuzzer's own score: how long it takes to find bugs that were planted on purpose."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kv_canary.difftest.campaign import Campaign, CampaignResult, Finding, run_campaign
from kv_canary.difftest.mutation.planted import PLANTED_BUGS, PlantedBug, find_planted

# A score is about finding: what is found is shrunk for so long only.
SHRINK_S = 12.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """The score of one planted bug.

    Args:
        found_after_s: from the start of each campaign, processes and imports included; None where the time was up.
        cases: drawn until then, by the job that found it.
        finding: the last campaign's, shrunk and saved.
    """

    bug: PlantedBug
    found_after_s: tuple[float | None, ...]
    cases: tuple[int, ...]
    finding: Finding | None

    @property
    def found(self) -> bool:
        """Whether every campaign found it."""
        return None not in self.found_after_s

    @property
    def median_s(self) -> float | None:
        times = [t for t in self.found_after_s if t is not None]
        return statistics.median(times) if self.found else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.bug.name,
            "kind": self.bug.kind,
            "file": self.bug.file,
            "found_after_s": [None if t is None else round(t, 2) for t in self.found_after_s],
            "median_s": None if self.median_s is None else round(self.median_s, 2),
            "cases_of_the_job": list(self.cases),
            "says": None if self.finding is None else self.finding.says,
        }


def score(
    names: Sequence[str] = (),
    *,
    repeats: int,
    limit_s: float,
    jobs: int,
    seed: int,
    findings: Path,
    device: str = "cpu",
    on_change: Callable[[PlantedBug, int, CampaignResult], None] = lambda bug, repeat, result: None,
) -> list[Score]:
    """Fuzz with each planted bug in turn, every op, `repeats` times with other seeds, and time what is found first.

    Raises:
        ValueError: a name is unknown, or a bug no longer fits its source.
    """
    bugs = [find_planted(name) for name in names] or list(PLANTED_BUGS)
    scores = []
    for bug in bugs:
        times: list[float | None] = []
        cases: list[int] = []
        last = None
        for repeat in range(repeats):
            campaign = Campaign(
                minutes=limit_s / 60,
                jobs=jobs,
                device=device,
                seed=seed + repeat,
                findings=findings / bug.name,
                plant=bug.name,
                max_findings=1,
                shrink_s=SHRINK_S,
            )
            result = run_campaign(campaign, on_change=functools.partial(on_change, bug, repeat))
            first = min(result.findings.values(), key=lambda f: f.found_after_s, default=None)
            times.append(None if first is None else first.found_after_s)
            cases.append(result.cases if first is None else first.cases_before)
            last = first or last
        scores.append(Score(bug=bug, found_after_s=tuple(times), cases=tuple(cases), finding=last))
    return scores
