"""The error of raise mode."""

from __future__ import annotations

from collections.abc import Sequence

from kv_canary.reports.incidents import Incident
from kv_canary.reports.report import ViolationReport


class CanaryViolationError(RuntimeError):
    """The canary found corruption.

    `reports` says what, in full for the first violations; `incidents` says it by cause; `total` counts the violations.
    """

    def __init__(self, reports: Sequence[ViolationReport], total: int, incidents: Sequence[Incident] = ()) -> None:
        more = f" (and {total - len(reports)} more)" if total > len(reports) else ""
        first = reports[0].sentence if reports else "violations were counted, but their details did not fit the ring"
        super().__init__(f"kv-canary: {total} violation{'s' if total != 1 else ''}: {first}{more}")
        self.reports = tuple(reports)
        self.total = total
        self.incidents = tuple(incidents)
