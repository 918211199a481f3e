"""The verdict of all ranks together, and the error that all of them raise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_canary.errors import printable
from kv_canary.reports import CanaryViolationError

if TYPE_CHECKING:
    from kv_canary.ranks.compare import RankReport


@dataclass(frozen=True, kw_only=True)
class RankVerdict:
    """The findings of one rank since it told the others last.

    Args:
        rank: its number within the group of ranks.
        total: violations.
        sentence: the first of them, for a person, in the words of that rank.
    """

    rank: int
    total: int
    sentence: str


class RankViolationError(CanaryViolationError):
    """Some rank found corruption, or ranks differ: raised by all of them before the same step.

    `reports` and `incidents` are what this rank found, `verdicts` which ranks found what, `differences` where they
    differ; `total` counts the violations of all of them.

    Args:
        step: the step that none of them begins.
        own: what this rank would have raised alone.
        verdicts, differences: what all of them know.
    """

    def __init__(
        self,
        *,
        step: int,
        own: Sequence[CanaryViolationError],
        verdicts: Sequence[RankVerdict],
        differences: Sequence[RankReport],
    ) -> None:
        reports, incidents = [r for e in own for r in e.reports], [i for e in own for i in e.incidents]
        super().__init__(reports, sum(v.total for v in verdicts), incidents)
        found = [f"rank {v.rank} found {v.total}, first {printable(v.sentence)}" for v in verdicts]
        found += [d.sentence for d in differences]
        self.args = (f"kv-canary: all ranks stop before step {step}: {' | '.join(found)}",)
        self.step, self.verdicts, self.differences = step, tuple(verdicts), tuple(differences)
