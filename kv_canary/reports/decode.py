"""Turns violation rows into reports: who, where, what is there, who wrote it, what was expected, likely why."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kv_canary.constants import MASK64, OWNER_BITS, OWNER_MASK, STEP_MASK, Reason, Tag
from kv_canary.errors import printable
from kv_canary.redact import Redactor
from kv_canary.reports.causes import Facts, cause_of_one
from kv_canary.reports.report import StoredRecord, ViolationReport
from kv_canary.runtime.pools import BufferGroup
from kv_canary.specs.violation_row import ViolationRow

# Only writes have these.
WRITES = Reason.WRITE_TOKEN | Reason.WRITE_POSITION | Reason.OVERWRITE | Reason.PREFIX | Reason.BATCH

# Found by holding all bytes of a slot against its seal.
SEALS = Reason.SEAL_K | Reason.SEAL_V


class Decoder:
    """Turns violation rows into reports.

    Args:
        groups: the buffer groups, for names and coverage.
        name_of_row: (step, row) -> request, as far as it is remembered.
        name_of_owner: owner number -> request, as far as it is remembered.
        redactor: hides tokens and names; None: they are told.
        intact_at: (row) -> the last step of which it is known that the bytes of a slot that was found damaged were
            those that were sealed; None: nobody can say.
        readers_since: (row, step) -> the requests that have had its slot in their rows behind that step.
        facts: what else causes are told from.
    """

    def __init__(
        self,
        groups: Sequence[BufferGroup],
        *,
        name_of_row: Callable[[int, int], str | None],
        name_of_owner: Callable[[int], str | None],
        redactor: Redactor | None = None,
        intact_at: Callable[[ViolationRow], int] | None = None,
        readers_since: Callable[[ViolationRow, int], Sequence[str]] = lambda row, step: (),
        facts: Facts | None = None,
    ) -> None:
        self._groups = groups
        self._intact_at, self._readers_since = intact_at, readers_since
        self._name_of_row, self._name_of_owner = name_of_row, name_of_owner
        self.redactor, self.facts = redactor, facts or Facts()

    def name_of_row(self, step: int, row: int) -> str | None:
        """Return how reports call the request that ran in a row at a step; None if that is forgotten."""
        name = self._name_of_row(step, row)
        return name if self.redactor is None else self.redactor.name(name)

    def name_of_owner(self, owner: int) -> str | None:
        """Return how reports call the request of an owner number; None if that is forgotten."""
        name = self._name_of_owner(owner)
        return name if self.redactor is None else self.redactor.name(name)

    def group_of(self, row: ViolationRow) -> BufferGroup:
        """Return the group that a violation row was found in; where it does not say, the first of its tag."""
        if 0 < row.group <= len(self._groups):
            return self._groups[row.group - 1]
        return next((g for g in self._groups if row.tag in g.tags), self._groups[0])

    def group_named(self, name: str) -> BufferGroup:
        """Return the group that reports call `name`."""
        return next(g for g in self._groups if g.name == name)

    def decode(self, row: ViolationRow) -> ViolationReport:
        """Decode one violation row."""
        tag, reasons = Tag(row.tag), Reason(row.reasons)
        group, found = self.group_of(row), row
        if self.redactor is not None:
            row = self.redactor.row(row)
        request_id = self.name_of_row(row.step, row.row)
        record = None
        if row.has_record and not reasons & (Reason.NEVER_WRITTEN | Reason.UNMAPPED):
            record = self.record(row.identity, row.chain, row.kv, row.writer)
        writing = is_write(row)
        intact_at, readers = None, list[str]()
        if reasons & SEALS and self._intact_at is not None:
            intact_at = self._intact_at(found)
            readers = list(self._readers_since(found, intact_at))
            if self.redactor is not None:
                readers = [self.redactor.name(name) or "" for name in readers]
        report: dict[str, Any] = {
            "reasons": reason_names(reasons),
            "tag": tag.name,
            "step": row.step,
            "group": group.name,
            "slot": row.slot,
            "row": row.row,
            "request_id": request_id,
            "position": row.position,
            "record": record,
            "expected_token": row.token if row.token >= 0 else None,
            "expected_chain": row.expected_chain & MASK64 if row.expected_chain else None,
            "observed_kv": row.observed_kv & MASK64 if row.observed_kv else None,
            "previous_slot": 0 if Reason.BATCH in reasons else row.previous,
            "given": (row.previous, row.given) if Reason.BATCH in reasons else None,
            "places": _places(group, reasons, record) + _sealed_places(group, reasons, found.given),
            "intact_at": intact_at,
            "readers": tuple(readers),
            # It names no token, and what is damaged shows in the words as they are.
            "cause": cause_of_one(reasons, found, record, request_id, group, is_write=writing, facts=self.facts),
        }
        return ViolationReport(**report, sentence=_sentence(report, writing))

    def record(self, identity: int, chain: int, kv: int, writer: int) -> StoredRecord:
        """Return the record of these four words."""
        owner, step = writer & OWNER_MASK, ((writer & MASK64) >> OWNER_BITS) & STEP_MASK
        retired = bool((writer & MASK64) >> 63)
        return StoredRecord(
            token=identity & 0xFFFFFFFF,
            position=(identity & MASK64) >> 32,
            chain=chain & MASK64,
            kv=kv & MASK64,
            owner=owner,
            step=step,
            retired=retired,
            request_id=self.name_of_owner(owner) if owner else None,
            handed_out=retired and self.facts.handed_out(step, owner),
        )


def is_write(row: ViolationRow) -> bool:
    """Whether a violation row was found by a write."""
    # Only writes name an owner, which adapters number from 1.
    return bool(Reason(row.reasons) & WRITES) or row.owner != 0


@functools.lru_cache(maxsize=1024)
def reason_names(reasons: int) -> tuple[str, ...]:
    """Return the names of the single reasons."""
    return tuple(r.name or str(r) for r in Reason if r & reasons)


# Who reads where no request does: a sweep, the scrub, a request's admission or completion.
NOBODY = "a check between forwards"


def who(request_id: str | None, row: int) -> str:
    """Return how a sentence calls the request behind a row."""
    if request_id:
        return f"request {printable(request_id)}"
    return f"row {row}" if row else NOBODY


def by_whom(record: StoredRecord) -> str:
    """Return how a sentence calls the writer of a record."""
    return f"request {printable(record.request_id)}" if record.request_id else f"owner {record.owner or 'unknown'}"


def is_nobodys(record: StoredRecord) -> bool:
    """Whether a record is of a slot that was freed, and nobody has said by whom."""
    return record.retired and not record.owner


def _places(group: BufferGroup, reasons: Reason, record: StoredRecord | None) -> tuple[str, ...]:
    """Say which layer and bytes of the slot the damaged halves cover."""
    places = []
    for half, reason, source in (("K", Reason.K, group.pool.k_source), ("V", Reason.V, group.pool.v_source)):
        if reason in reasons and source is not None and record is not None:
            layer, start, end = source.coverage(record.position)
            names = group.pool.layer_names
            name = names[layer] if layer < len(names) else f"layer {layer}"
            places.append(f"{half} of {name}, bytes {start} to {end}")
    return tuple(places)


def _sealed_places(group: BufferGroup, reasons: Reason, band: int) -> tuple[str, ...]:
    """Say which layers of the slot the damaged halves of a band of its seal are of."""
    pool = group.pool
    if not reasons & SEALS or pool.seals is None:
        return ()
    first = band * pool.seals.layers_per_band
    places = []
    for half, reason, source in (("K", Reason.SEAL_K, pool.k_source), ("V", Reason.SEAL_V, pool.v_source)):
        if reason in reasons and source is not None:
            last = min(first + pool.seals.layers_per_band, len(source.layers)) - 1
            names = [pool.layer_names[n] if n < len(pool.layer_names) else f"layer {n}" for n in (first, last)]
            places.append(
                f"{half} of {names[0]}" if first == last else f"{half} somewhere from {names[0]} to {names[1]}"
            )
    return tuple(places)


def _sentence(report: Mapping[str, Any], writing: bool) -> str:
    if report["given"] is not None:
        text = (
            f"step {report['step']} {report['tag']}: {who(report['request_id'], report['row'])} is given to the model: "
        )
        return f"{text}{' + '.join(report['reasons'])}.{details(report, writing)} Likely: {report['cause']}."
    doing = "writes" if writing else "reads"
    text = f"step {report['step']} {report['tag']}: {who(report['request_id'], report['row'])} {doing} "
    text += f"position {report['position']} in slot {report['slot']}"
    text += f" of {report['group']}: {' + '.join(report['reasons'])}."
    return f"{text}{details(report, writing)} Likely: {report['cause']}."


def details(report: Mapping[str, Any], writing: bool) -> str:
    """Return the sentences on what lies in the slot of a report and what was expected there; "" for none."""
    record: StoredRecord | None = report["record"]
    if report["given"] is not None:
        row, length = report["given"]
        return f" Given: row {row}, {length} tokens; its own: row {report['row']}, {report['position']} tokens."
    text = f" Changed: {'; '.join(report['places'])}." if report["places"] else ""
    if record is None:
        return text
    by = by_whom(record)
    if writing and "PREFIX" not in report["reasons"]:
        taken = "OVERWRITE" in report["reasons"] and record.step == report["step"]
        verb = "Not stored" if taken or "SLOT_RANGE" in report["reasons"] else "Stored"
        text += f" {verb}: token {record.token} at position {record.position}"
        if taken:
            return f"{text}: {by} writes there in the same step."
        return text + (f", over a record of {by} (step {record.step})." if record.owner else ".")
    how = "freed" if record.retired else "written"
    how = how if is_nobodys(record) else f"handed out to {by}" if record.handed_out else f"{how} by {by}"
    if set(report["reasons"]) <= {r.name for r in SEALS}:
        text += f" The slot holds token {record.token} of position {record.position}"
        text += f", written by {by} at step {record.step}; its bytes were sealed then"
        if report["tag"].startswith("TAIL"):
            return f"{text}, as the model handed them over."
        if report["intact_at"] is not None and report["intact_at"] > record.step:
            text += f", and the same at step {report['intact_at']}"
        names = ", ".join(printable(name) for name in report["readers"])
        return text + (f". Read since by {names}." if names else ".")
    known = report["expected_token"] is not None
    expected = f"token {report['expected_token']}" if known else "this request's token"
    text += f" The slot holds token {record.token} of position {record.position}"
    text += f", {how} at step {record.step}"
    return text + f"; expected {expected} of position {report['position']}."
