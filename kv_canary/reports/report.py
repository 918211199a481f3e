"""Violations once they are decoded: records and reports."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StoredRecord:
    """A slot record as read, or as it was about to be stored.

    One that is `retired` names who freed its slot, or, where it was `handed_out`, who was handed it while another
    request had it.
    """

    token: int
    position: int
    chain: int
    kv: int
    owner: int
    step: int
    retired: bool
    request_id: str | None
    handed_out: bool = False


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
    # SEAL_K, SEAL_V: the last step of which it is known that the bytes were those that were sealed, and who has had
    # the slot in its row since, as far as that is remembered.
    intact_at: int | None = None
    readers: tuple[str, ...] = ()
    cause: str
    sentence: str

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON-ready values."""
        return asdict(self)
