"""Violations once they are decoded: records, reports, and the error of raise mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kv_canary.reports.incidents import Incident


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


@dataclass(frozen=True, kw_only=True)
class StoredRecord:
    """A slot record as read, or as it was about to be stored."""

    token: int
    position: int
    chain: int
    kv: int
    owner: int
    step: int
    retired: bool
    request_id: str | None


@dataclass(frozen=True, kw_only=True)
class ViolationReport:
    """One violation, decoded. Words that do not apply are None."""

    reasons: tuple[str, ...]
    tag: str
    step: int
    group: str
    slot: int
    row: int
    request_id: str | None
    position: int
    record: StoredRecord | None
    expected_token: int | None
    expected_chain: int | None
    observed_kv: int | None
    previous_slot: int
    # BATCH: the row and the length that the model was given.
    given: tuple[int, int] | None = None
    places: tuple[str, ...]
    cause: str
    sentence: str

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON-ready values."""
        return asdict(self)
