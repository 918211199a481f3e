"""Records that lay in a slot and lie there no more: told from those beside it, the steps remembered, and its seal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kv_canary import ops
from kv_canary.constants import MASK64, OWNER_BITS, OWNER_MASK, STEP_MASK, WRITER_WORD, Tag, to_signed
from kv_canary.hashing import next_chain
from kv_canary.reports.neighbourhood import own_tokens, slots_of
from kv_canary.runtime.history import StepHistory
from kv_canary.runtime.pools import BufferGroup, KvPool
from kv_canary.runtime.tails import anchor_of
from kv_canary.specs.structures import Endpoint, KvSource, ViolationLog
from kv_canary.specs.violation_row import ViolationRow

# Positions on each side among which records are looked for that bear witness.
SIDE = 64


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A record that lay in a slot and lies there no more.

    Args:
        step: when it was written.
        as_sealed: whether the bytes of K and V are those that were sealed with it; None: no seal of it is there.
    """

    step: int
    as_sealed: bool | None


@dataclass(frozen=True, kw_only=True)
class _Witness:
    """A record of the same request, beside the slot."""

    slot: int
    position: int
    chain: int
    owner: int
    step: int


@dataclass(frozen=True, kw_only=True)
class _Place:
    """A slot that something was found in, and what its request's own record there would be.

    Args:
        group, records: whose, as the launch read them that found it.
        row: what was found.
        identity, chain: of the own record.
        before, behind: the nearest own records; None where there is none near.
    """

    group: BufferGroup
    records: torch.Tensor
    row: ViolationRow
    identity: int
    chain: int
    before: _Witness | None
    behind: _Witness | None

    @property
    def witnesses(self) -> Iterator[_Witness]:
        """The own records beside it, the one behind first."""
        return (w for w in (self.behind, self.before) if w is not None)


class LostRecords:
    """Looks for records that are lost. Waits for the device, and is asked only once something was found.

    Args:
        steps: those that are remembered.
        group_of: (row) -> the group that it was found in.
        came: (row) -> the step behind which what lies in its slot came from elsewhere; None where that is not known.
    """

    def __init__(
        self,
        steps: StepHistory,
        *,
        group_of: Callable[[ViolationRow], BufferGroup],
        came: Callable[[ViolationRow], int | None],
    ) -> None:
        self._steps, self._group_of, self._came = steps, group_of, came

    def find(self, row: ViolationRow) -> Lost | None:
        """Return what is known of the record that lay in the slot of a violation; None: nothing says there was one.

        The records beside it alone do not say so: they are there too where a copy of this one never came, or where the
        table names another slot. A forward that is remembered has written it, and no other slot holds it; or the slot
        has a seal that was made when it was written.
        """
        is_gone = not row.has_record
        # What names a step that has not come was written by no forward.
        is_strange = is_gone or row.writer_step > row.step
        seal = self._seal(row)
        if not row.row or not (is_strange or seal):
            return None
        place = self._place(row)
        if place is None:
            return None
        written = self._written(place)
        sealed = seal if seal and _is_of(seal, place, written) else None
        as_sealed = None if sealed is None else _is_as_sealed(place, sealed)
        step = sealed >> OWNER_BITS & STEP_MASK if sealed is not None else written[1] if written is not None else None
        came = self._came(row)
        if step is None or (came is not None and came >= step):
            return None
        if sealed is not None and (is_gone or as_sealed):
            return Lost(step=step, as_sealed=as_sealed)
        if written is None or place.behind is None or not is_strange or _is_elsewhere(place, *written):
            return None
        return Lost(step=step, as_sealed=as_sealed)

    def named(self, row: ViolationRow) -> int | None:
        """Return the slot that the table of a violation's request names for its position; BAD_SLOT: it names none.

        None where the row of the table may be another request's by now, or is not known.
        """
        found, newest = self._steps.latest(row.step, row.row), self._steps.newest
        if found is None or newest is None or found[0].number != newest.number:
            return None
        group, (step, request) = self._group_of(row), found
        table = step.tables.get(group.name)
        if table is None or not 0 <= request.row_in_tables < table.shape[0]:
            return None
        return slots_of(group, table, request.row_in_tables, row.position, row.position + 1)[0]

    def _place(self, row: ViolationRow) -> _Place | None:
        """Return the slot with what lies beside it; None where the tables do not name it, or nothing bears witness."""
        found, then = self._steps.latest(row.step, row.row), self._steps.request(row.step, row.row)
        group = self._group_of(row)
        if found is None or then is None or group.name not in found[0].tables:
            return None
        step, request = found
        table, table_row = step.tables[group.name], request.row_in_tables
        # Steps that are repeated do not say their tables again.
        end = max(request.prefix_len + (0 if step.broken else request.extend_len), then.prefix_len)
        resident = max(0, end - group.window) if group.window else 0
        first, end = max(resident, row.position - SIDE), min(end, row.position + SIDE + 1)
        if not first <= row.position < end or not 0 <= table_row < table.shape[0]:
            return None
        slots = slots_of(group, table, table_row, first, end)
        records = group.endpoint(Tag(row.tag), with_bytes=False).records
        inside = [s if 0 < s < len(records) else 0 for s in slots]
        lines = records[torch.tensor(inside, device=records.device)].tolist()
        at = row.position - first
        words = [row.identity, row.chain, row.kv, row.writer] if row.has_record else [0] * 4
        if slots[at] != row.slot or lines[at] != words:
            return None
        tokens = own_tokens(request, first + group.token_offset, end + group.token_offset)
        own = [-1 if token < 0 else p << 32 | token for p, token in enumerate(map(int, tokens), first)]

        def nearest(which: range) -> int | None:
            return next((i for i in which if lines[i][0] & MASK64 == own[i] and lines[i][WRITER_WORD] > 0), None)

        def witness(i: int) -> _Witness:
            writer = lines[i][WRITER_WORD]
            return _Witness(
                slot=slots[i],
                position=first + i,
                chain=lines[i][1] & MASK64,
                owner=writer & OWNER_MASK,
                step=writer >> OWNER_BITS & STEP_MASK,
            )

        i, j = nearest(range(at - 1, -1, -1)), nearest(range(at + 1, len(own)))
        before, behind = None if i is None else witness(i), None if j is None else witness(j)
        if before is None and first > 0:
            return None
        chain = anchor_of(request.identity) & MASK64 if before is None else before.chain
        expected = 0
        for n in range(0 if i is None else i + 1, at + 1 if j is None else j + 1):
            if own[n] < 0:
                return None
            chain = next_chain(chain, own[n])
            expected = chain if n == at else expected
        if behind is not None and chain != behind.chain:
            return None
        return _Place(
            group=group, records=records, row=row, identity=own[at], chain=expected, before=before, behind=behind
        )

    def _written(self, place: _Place) -> tuple[int, int] | None:
        """Return the owner and the step of the forward that wrote the slot's position, and a record beside it."""
        for witness in place.witnesses:
            step = self._steps.written(witness.owner, place.row.position)
            if step is not None and self._is_in_place(place, witness):
                return witness.owner, step
        return None

    def _is_in_place(self, place: _Place, witness: _Witness) -> bool:
        """Whether a forward wrote a record beside the slot, and no copy has brought it since."""
        came = self._came(place.row._replace(slot=witness.slot))
        wrote = self._steps.wrote(witness.step, witness.owner, witness.position)
        return bool(wrote) and (came is None or came < witness.step)

    def _seal(self, row: ViolationRow) -> int:
        """Return WRITER of the record that a slot's seal was made for, where that is not the one that lies there.

        0 where there is none, or the slot was freed: its seal ends with that.
        """
        seals = self._group_of(row).pool.seals
        if seals is None or row.writer < 0 or not 0 < row.slot < len(seals.words):
            return 0
        word = int(seals.words[row.slot, 0])
        return word if word > 0 and word != row.writer else 0


def _is_of(seal: int, place: _Place, written: tuple[int, int] | None) -> bool:
    """Whether a seal was made for the own record of a slot, which was written by that owner, in that step."""
    owner, step = seal & OWNER_MASK, seal >> OWNER_BITS & STEP_MASK
    if written is not None:
        return written == (owner, step)
    # Forgotten: the records on either side were written before it and behind it.
    before, behind = place.before, place.behind
    if behind is None or owner not in {w.owner for w in place.witnesses}:
        return False
    return (0 if before is None else before.step) <= step <= behind.step


def _is_elsewhere(place: _Place, owner: int, step: int) -> bool:
    """Whether another slot holds the own record, or held it until it was freed: the table should name that one."""
    records = place.records
    alike = (records[:, 0] == to_signed(place.identity)) & (records[:, 1] == to_signed(place.chain))
    alike[place.row.slot] = False
    writers = records[:, WRITER_WORD][alike].tolist()
    return any(writer < 0 or writer == step << OWNER_BITS | owner for writer in writers)


def _is_as_sealed(place: _Place, writer: int) -> bool | None:
    """Whether the bytes of a slot are those that were sealed with the record of that WRITER; None: no look was made."""
    pool, slot = place.group.pool, place.row.slot
    if pool.seals is None:
        return None
    there, k_source, v_source = _alone(pool, slot)
    device, words = pool.records.device, pool.seals.words
    # A record that the seal is of, with nothing but that slot.
    records = torch.zeros(there + 1, place.records.shape[1], dtype=torch.int64, device=device)
    records[there] = torch.tensor([to_signed(place.identity), to_signed(place.chain), 0, writer], device=device)
    seals = torch.zeros(there + 1, words.shape[1], dtype=torch.int64, device=device)
    seals[there] = words[slot]
    log = ViolationLog.allocate(ring_cap=1, device=device)
    checked = torch.zeros(4, dtype=torch.int64, device=device)
    ops.verify_seals(
        slots=torch.tensor([there], device=device),
        span=torch.tensor([0, 1], device=device),
        endpoint=Endpoint(tag=Tag(place.row.tag), records=records, k_source=k_source, v_source=v_source),
        layers_per_band=pool.seals.layers_per_band,
        seed=pool.seals.seed,
        seals=seals,
        step=torch.zeros(1, dtype=torch.int64, device=device),
        violations=log,
        checked=checked,
        # One slot, once: a kernel would have to be compiled for it.
        backend="reference",
    )
    return int(log.count) == 0 if int(checked[1]) else None


def _alone(pool: KvPool, slot: int) -> tuple[int, KvSource | None, KvSource | None]:
    """Return sources of nothing but the rows that a slot lies in, and the number that it has there."""
    k_source, v_source = pool.k_source, pool.v_source
    k_at, v_at = (0 if s is None else (slot - s.slot_bias) % s.page_size for s in (k_source, v_source))
    there = max(k_at, v_at) + 1
    return there, _one_row(k_source, slot, there - k_at), _one_row(v_source, slot, there - v_at)


def _one_row(source: KvSource | None, slot: int, bias: int) -> KvSource | None:
    """Return a source of the row of a slot alone."""
    if source is None:
        return None
    row = (slot - source.slot_bias) // source.page_size
    layers: Sequence[torch.Tensor] = [layer[row : row + 1] for layer in source.layers]
    return dataclasses.replace(source, layers=tuple(layers), slot_bias=bias)
