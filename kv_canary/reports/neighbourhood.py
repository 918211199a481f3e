"""The surroundings of a fault: the positions beside it, who wrote them and when, and what a verify says of each now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kv_canary import ops
from kv_canary.constants import BAD_SLOT, HEAD_OF_CHAIN, OWNER_BITS, OWNER_MASK, STEP_MASK, UNCHECKED, Reason, Tag
from kv_canary.runtime.listed import listed
from kv_canary.runtime.pools import BufferGroup
from kv_canary.runtime.tails import anchor_of
from kv_canary.specs.structures import Endpoint, ViolationLog
from kv_canary.specs.violation_row import ViolationRow

if TYPE_CHECKING:
    from kv_canary.runtime.composition import ForwardRequest

# Verdict on a position that the window has left: its slot may be anybody's by now.
LEFT = "LEFT_WINDOW"


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """One position, or one slot where a sweep found the fault.

    Args:
        position: of the request; of the record, for a sweep.
        slot: where the table says it lies; BAD_SLOT where it names none.
        token, stored_position: in the record; None where there is none to read.
        expected_token: the request's own, where it is known.
        writer: who wrote the record, freed the slot or was handed it, by name; None where that is forgotten.
        owner: likewise, by number; 0 for none.
        step: when.
        retired: whether the slot was freed.
        verdict: reasons, or LEFT_WINDOW; none: all is well.
        handed_out: whether nobody freed the slot: the writer was handed it while another request had it.
    """

    position: int
    slot: int
    token: int | None
    stored_position: int | None
    expected_token: int | None
    writer: str | None
    owner: int
    step: int
    retired: bool
    verdict: tuple[str, ...]
    handed_out: bool = False


@dataclass(frozen=True, kw_only=True)
class Neighbourhood:
    """The positions around a fault, read when it was reported.

    Args:
        as_of_step: the latest step that had begun: tables and records are as that step left them, which is later than
            the fault was found.
        request: whose positions they are; None: slots that lie side by side, of whatever request.
        group: name of the buffer group.
        moved: whether the table names another slot for the fault's position by now.
        rows: in order of position, or of slot.
    """

    as_of_step: int
    request: str | None
    group: str
    moved: bool
    rows: tuple[Neighbour, ...]


@dataclass(frozen=True, kw_only=True)
class SlotReader:
    """Reads records and verifies them into a log of its own; it waits for the device.

    Args:
        backend: who verifies.
        track_lifetime: whether freed slots are reported.
        name_of_owner: owner number -> request.
        handed_out: (step, owner) -> whether the owner was handed slots in use in that step.
    """

    backend: str
    track_lifetime: bool
    name_of_owner: Callable[[int], str | None]
    handed_out: Callable[[int, int], bool]

    def positions(
        self, group: BufferGroup, tag: Tag, table: torch.Tensor, request: ForwardRequest, *, within: range, written: int
    ) -> tuple[Neighbour, ...]:
        """Return what lies at a request's positions.

        Args:
            group, tag: where the fault was found.
            table: [rows, length] of the group.
            request: as it ran last.
            within: the positions wanted.
            written: positions that are in the cache.
        """
        first, end = max(within.start, 0), min(within.stop, written)
        row = request.row_in_tables
        if first >= end or not 0 <= row < table.shape[0]:
            return ()
        resident = max(0, written - group.window) if group.window else 0
        slots = slots_of(group, table, row, first - 1, end)
        positions = list(range(first, end))
        before = zip(positions, slots[:-1], strict=True)
        previous = [HEAD_OF_CHAIN if p == 0 else UNCHECKED if p <= resident else s for p, s in before]
        tokens = own_tokens(request, first + group.token_offset, end + group.token_offset)
        here = [i for i, p in enumerate(positions) if p >= resident]
        found = self._read(
            group.endpoint(tag, with_bytes=True),
            positions=[positions[i] for i in here],
            slots=[slots[i + 1] for i in here],
            previous=[previous[i] for i in here],
            tokens=[tokens[i] for i in here],
            anchor=anchor_of(request.identity),
        )
        gone = [_unread(p, slots[i + 1], tokens[i]) for i, p in enumerate(positions) if p < resident]
        return (*gone, *found)

    def slots(self, group: BufferGroup, tag: Tag, *, within: range) -> tuple[Neighbour, ...]:
        """Return what lies in slots side by side, of those that were ever written; positions are as recorded."""
        endpoint = group.endpoint(tag, with_bytes=True)
        slots = range(max(within.start, 1), min(within.stop, group.pool.num_slots))
        identities = endpoint.records[slots.start : slots.stop].tolist()
        written = [(s, words) for s, words in zip(slots, identities, strict=True) if any(words)]
        return self._read(
            endpoint,
            positions=[(words[0] >> 32) & 0xFFFFFFFF for _, words in written],
            slots=[s for s, _ in written],
            previous=[UNCHECKED] * len(written),
            tokens=[-1] * len(written),
            anchor=0,
        )

    def _read(
        self,
        endpoint: Endpoint,
        *,
        positions: Sequence[int],
        slots: Sequence[int],
        previous: Sequence[int],
        tokens: Sequence[int],
        anchor: int,
    ) -> tuple[Neighbour, ...]:
        if not slots:
            return ()
        records = endpoint.records
        log = self._verify(endpoint, slots, previous, positions, tokens, anchor=anchor)
        rows = [ViolationRow._make(words) for words in log.ring[: int(log.count)].tolist()]
        found = {(row.slot, row.position): Reason(row.reasons) for row in rows}
        inside = torch.tensor([s if 0 < s < len(records) else 0 for s in slots], device=records.device)
        return tuple(
            self._neighbour(p, s, t, words if 0 < s < len(records) else [0] * 4, found.get((s, p), Reason(0)))
            for p, s, t, words in zip(positions, slots, tokens, records[inside].tolist(), strict=True)
        )

    def warm_up(self, group: BufferGroup) -> None:
        """Verify nothing by every launch that may be made, so that all kernels are compiled."""
        for anchor in (0, 1):
            self._verify(group.endpoint(group.sweep_tag, with_bytes=True), (), (), (), (), anchor=anchor)

    def _verify(
        self,
        endpoint: Endpoint,
        slots: Sequence[int],
        previous: Sequence[int],
        positions: Sequence[int],
        tokens: Sequence[int],
        *,
        anchor: int,
    ) -> ViolationLog:
        """Return what is wrong with records; each is told of once at most."""
        device = endpoint.records.device

        def column(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        plan = listed(*map(column, (slots, previous, positions, tokens)))
        plan.rows.fill_(1)
        log = ViolationLog.allocate(ring_cap=len(plan.slots), device=device)
        ops.verify(
            verify_plan=plan,
            endpoint=endpoint,
            anchors=column([0, anchor]) if anchor else None,
            step=column([0]),
            track_lifetime=self.track_lifetime,
            violations=log,
            counters=torch.zeros(len(Tag), 2, dtype=torch.int64, device=device),
            backend=self.backend,
        )
        return log

    def _neighbour(self, position: int, slot: int, expected: int, words: Sequence[int], reasons: Reason) -> Neighbour:
        owner, written = words[3] & OWNER_MASK, any(words)
        step, retired = (words[3] >> OWNER_BITS) & STEP_MASK, words[3] < 0
        return Neighbour(
            position=position,
            slot=slot,
            token=words[0] & 0xFFFFFFFF if written else None,
            stored_position=(words[0] >> 32) & 0xFFFFFFFF if written else None,
            expected_token=expected if expected >= 0 else None,
            writer=self.name_of_owner(owner) if owner else None,
            owner=owner,
            step=step,
            retired=retired,
            verdict=tuple(r.name or str(r) for r in Reason if r in reasons),
            handed_out=retired and self.handed_out(step, owner),
        )


def _unread(position: int, slot: int, expected: int) -> Neighbour:
    return Neighbour(
        position=position,
        slot=slot,
        token=None,
        stored_position=None,
        expected_token=expected if expected >= 0 else None,
        writer=None,
        owner=0,
        step=0,
        retired=False,
        verdict=(LEFT,),
    )


def slots_of(group: BufferGroup, table: torch.Tensor, row: int, first: int, end: int) -> list[int]:
    """Return the slots of positions [first, end) of a table's row, as `plan` resolves them; BAD_SLOT for -1."""
    known_end = min(end, table.shape[1] * group.page_size)
    known = group.slots_named(table, row, torch.arange(max(first, 0), max(first, 0, known_end), device=table.device))
    if group.lut is not None and len(group.lut):
        inside = (known >= 0) & (known < len(group.lut))
        translated = group.lut[known.to(group.lut.device).clamp(0, len(group.lut) - 1)].to(known.device)
        known = torch.where(inside, translated, BAD_SLOT)
    slots = [s if s >= 0 else BAD_SLOT for s in known.tolist()]
    return [BAD_SLOT] * (max(first, 0) - first) + slots + [BAD_SLOT] * (end - max(first, 0) - len(slots))


def own_tokens(request: ForwardRequest, start: int, end: int) -> list[int]:
    """Return the request's own tokens, -1 for those that it does not know."""
    try:
        known = list(request.tokens(start, end))[: end - start]
    except Exception:
        # The request is the engine's, and may be over.
        known = []
    return known + [-1] * (end - start - len(known))
