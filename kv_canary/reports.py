"""Violations as a person can act on them: who, where, what is there, who wrote it, what was expected, likely why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kv_canary.constants import (
    BAD_SLOT,
    MASK64,
    OWNER_BITS,
    OWNER_MASK,
    STEP_MASK,
    Reason,
    Tag,
)
from kv_canary.hashing import mix
from kv_canary.pools import BufferGroup
from kv_canary.specs.structures import KvSource


class CanaryViolationError(RuntimeError):
    """The canary found corruption. `reports` says what, in full for the first ones; `total` counts them all."""

    def __init__(self, reports: Sequence[ViolationReport], total: int) -> None:
        more = f" (and {total - len(reports)} more)" if total > len(reports) else ""
        first = reports[0].sentence if reports else "violations were counted, but their details did not fit the ring"
        super().__init__(f"kv-canary: {total} violation{'s' if total != 1 else ''}: {first}{more}")
        self.reports = tuple(reports)
        self.total = total


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
    places: tuple[str, ...]
    cause: str
    sentence: str

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON-ready values."""
        return asdict(self)


class Decoder:
    """Turns violation rows into reports.

    Args:
        groups: the buffer groups, for names and coverage.
        name_of_row: (step, row) -> request, as far as it is remembered.
        name_of_owner: owner number -> request, as far as it is remembered.
    """

    def __init__(
        self,
        groups: Sequence[BufferGroup],
        *,
        name_of_row: Callable[[int, int], str | None],
        name_of_owner: Callable[[int], str | None],
    ) -> None:
        self._groups = groups
        self._name_of_row = name_of_row
        self._name_of_owner = name_of_owner

    def decode(self, words: Sequence[int]) -> ViolationReport:
        """Decode one violation row of 16 words; see the data layout in docs/data-layout.md."""
        tag, reasons = Tag(words[0]), Reason(words[1])
        writes = Reason.WRITE_TOKEN | Reason.WRITE_POSITION | Reason.OVERWRITE | Reason.PREFIX
        # Only writes name an owner, which adapters number from 1.
        is_write = bool(reasons & writes) or words[14] != 0
        groups = [g for g in self._groups if tag in (g.head_tag, g.tail_tag)] or list(self._groups)
        request_id = self._name_of_row(words[12], words[3])
        record = None
        if any(words[i] for i in (5, 7, 9, 11)) and not reasons & (Reason.NEVER_WRITTEN | Reason.UNMAPPED):
            record = self._record(words)
        expected_token = words[6] if words[6] >= 0 else None
        places = _places(groups[0], reasons, record)
        cause = _cause(reasons, words, record, request_id, groups[0], is_write=is_write)
        report: dict[str, Any] = {
            "reasons": tuple(r.name or str(r) for r in Reason if r in reasons),
            "tag": tag.name,
            "step": words[12],
            "group": " or ".join(g.name for g in groups),
            "slot": words[2],
            "row": words[3],
            "request_id": request_id,
            "position": words[4],
            "record": record,
            "expected_token": expected_token,
            "expected_chain": words[8] & MASK64 if words[8] else None,
            "observed_kv": words[10] & MASK64 if words[10] else None,
            "previous_slot": words[13],
            "places": places,
            "cause": cause,
        }
        return ViolationReport(**report, sentence=_sentence(report, is_write))

    def _record(self, words: Sequence[int]) -> StoredRecord:
        writer = words[11] & MASK64
        owner = writer & OWNER_MASK
        return StoredRecord(
            token=words[5] & 0xFFFFFFFF,
            position=(words[5] & MASK64) >> 32,
            chain=words[7] & MASK64,
            kv=words[9] & MASK64,
            owner=owner,
            step=(writer >> OWNER_BITS) & STEP_MASK,
            retired=bool(writer >> 63),
            request_id=self._name_of_owner(owner) if owner else None,
        )


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


def _cause(
    reasons: Reason,
    words: Sequence[int],
    record: StoredRecord | None,
    request_id: str | None,
    group: BufferGroup,
    *,
    is_write: bool,
) -> str:
    """Guess the cause from the pattern of reasons."""
    position = words[4]
    if Reason.PREFIX in reasons:
        return (
            "the row's cached prefix is not this request's own: a stale or wrong prefix hit, or a table row that "
            "names another request's blocks"
        )
    if Reason.SLOT_RANGE in reasons:
        if is_write:
            return "the forward was told to write outside the pool"
        if words[2] == BAD_SLOT:
            return "the table or the LUT holds an index that no pool has"
        return "the table holds a slot outside the pool"
    if Reason.WRITE_POSITION in reasons and record is not None:
        off = record.position - position
        if abs(off) == 1:
            return "the forward's positions are off by one"
        return f"the forward's positions are off by {off}"
    if Reason.WRITE_TOKEN in reasons:
        return "the forward was given another token than the one that was sampled"
    if Reason.OVERWRITE in reasons:
        return "two owners: the slot was handed out while another request still used it"
    if Reason.UNMAPPED in reasons:
        return "a live position maps to the padding slot: evicted, cleared or never mapped"
    if Reason.NEVER_WRITTEN in reasons:
        return "mapped, but nothing ever wrote there: a missing copy or load, or a wrong table entry"
    if Reason.FREED in reasons:
        return "use after free: the slot was freed while a request still reads it"
    if record is None:
        return "unknown"
    moved = reasons & (Reason.POSITION | Reason.TOKEN | Reason.CHAIN)
    if not moved:
        zeroed = _zero_fingerprints(group, reasons, record)
        if zeroed and all(words[10] >> shift & 0xFFFFFFFF == value for shift, value in zeroed.items()):
            return "the bytes are all zero: the slot or its page was zeroed after it was written"
        return "the K/V bytes changed after they were written: a stray write, a copy race or memory corruption"
    foreign = record.request_id != request_id or record.request_id is None
    if Reason.POSITION in reasons and abs(record.position - position) == 1 and not foreign:
        return "the table is off by one, or holds an entry of the position beside it"
    if foreign and (Reason.POSITION in reasons or Reason.TOKEN in reasons):
        if Reason.K in reasons or Reason.V in reasons:
            return "the slot was reused while in use, and its bytes changed as well"
        return "a wrong or stale table entry, or a slot reused while in use: it holds another request's token"
    if Reason.POSITION in reasons:
        return "a stale or wrong table entry: the slot holds another position of the same request"
    if Reason.TOKEN in reasons:
        return "the slot holds another token of this position: an old branch of the text, or a wrong prefix"
    return "the right token after another prefix: the entry before it, or the whole prefix, is another's"


def _zero_fingerprints(group: BufferGroup, reasons: Reason, record: StoredRecord) -> dict[int, int]:
    """Return the fingerprints that zero bytes would have, by their shift in the KV word, for the damaged halves."""
    result = {}
    for shift, reason, source in ((0, Reason.K, group.pool.k_source), (32, Reason.V, group.pool.v_source)):
        if reason in reasons and source is not None:
            result[shift] = _zero_fingerprint(source, record.position)
    return result


def _zero_fingerprint(source: KvSource, position: int) -> int:
    _, start, end = source.coverage(position)
    x = sum(mix(mix(j)) for j in range(-(-(end - start) // 8))) & MASK64
    return (x ^ (x >> 32)) & 0xFFFFFFFF


def _sentence(report: Mapping[str, Any], is_write: bool) -> str:
    record: StoredRecord | None = report["record"]
    who = f"request {report['request_id']}" if report["request_id"] else f"row {report['row']}"
    doing = "writes" if is_write else "reads"
    text = (
        f"step {report['step']} {report['tag']}: {who} {doing} position {report['position']} in slot {report['slot']}"
    )
    text += f" of {report['group']}: {' + '.join(report['reasons'])}."
    if report["places"]:
        text += f" Changed: {'; '.join(report['places'])}."
    if record is not None:
        by = f"request {record.request_id}" if record.request_id else f"owner {record.owner or 'unknown'}"
        if is_write and "PREFIX" not in report["reasons"]:
            verb = "Not stored" if "SLOT_RANGE" in report["reasons"] else "Stored"
            text += f" {verb}: token {record.token} at position {record.position}"
            text += f", over a record of {by} (step {record.step})." if record.owner else "."
        else:
            how = "freed" if record.retired else "written"
            text += f" The slot holds token {record.token} of position {record.position}"
            text += f", {how} by {by} at step {record.step}"
            expected = (
                f"token {report['expected_token']}" if report["expected_token"] is not None else "this request's token"
            )
            text += f"; expected {expected} of position {report['position']}."
    return f"{text} Likely: {report['cause']}."
