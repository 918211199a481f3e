"""Likely causes, by pattern: of one violation, and of an incident, whose shape says more."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kv_canary.constants import BAD_SLOT, CHAIN_MULTIPLIER, HEAD_OF_CHAIN, MASK64, Reason, Tag
from kv_canary.errors import printable
from kv_canary.hashing import mix
from kv_canary.reports.clusters import BYTES, CONTENT, Member
from kv_canary.reports.lost import Lost
from kv_canary.reports.report import StoredRecord, ViolationReport
from kv_canary.runtime.pools import BufferGroup
from kv_canary.specs.structures import KvSource
from kv_canary.specs.violation_row import ViolationRow

_TAILS = (Tag.TAIL_FULL, Tag.TAIL_SWA)
# Tokens over which a chain is followed back to where it may have been damaged; slots of an incident that are asked of.
_MOST_TOKENS, _MOST_ASKED = 1024, 8
_INVERSE = pow(CHAIN_MULTIPLIER, -1, 1 << 64)
_BITS = frozenset(1 << n for n in range(64))
# Plain numbers: a storm brings many reports.
_K, _V, _TOKEN, _CHAIN, _PREFIX = (int(r) for r in (Reason.K, Reason.V, Reason.TOKEN, Reason.CHAIN, Reason.PREFIX))
_FREED, _NEVER_WRITTEN, _CONTENT, _BYTES = int(Reason.FREED), int(Reason.NEVER_WRITTEN), int(CONTENT), int(BYTES)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What can be asked about a slot that something was found in; None: nobody can say.

    Args:
        wrote: (step, owner, position) -> whether a forward of that step wrote it.
        came: (row) -> the step behind which what lies in its slot came from elsewhere.
        freed: (step, owner) -> whether the owner freed any slot in that step, or was handed one in use.
        handed_out: (step, owner) -> whether the owner was handed slots in use in that step, and freed none.
        whole: (step) -> whether it verified all that its requests had in the cache.
        token: (row) -> the request's own token of its position, as the engine has it now.
        lost: (row) -> the record that lay in its slot, where another lies by now, or none.
        own: (row) -> the last step behind which its request's position was seen to be the request's own.
        named: (row) -> the slot that the table of its request names for its position, BAD_SLOT for none.
    """

    wrote: Callable[[int, int, int], bool | None] = lambda step, owner, position: None
    came: Callable[[ViolationRow], int | None] = lambda row: None
    freed: Callable[[int, int], bool | None] = lambda step, owner: None
    handed_out: Callable[[int, int], bool] = lambda step, owner: False
    whole: Callable[[int], bool | None] = lambda step: None
    token: Callable[[ViolationRow], int | None] = lambda row: None
    lost: Callable[[ViolationRow], Lost | None] = lambda row: None
    own: Callable[[ViolationRow], int | None] = lambda row: None
    named: Callable[[ViolationRow], int | None] = lambda row: None


class EarlyFree(NamedTuple):
    """Slots that were found to be freed while they were read: by whom (an owner), at which steps, in which incident."""

    owner: int
    steps: tuple[int, ...]
    incident: int


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """The facts around an incident that its cause is told from.

    Args:
        group: where it happened.
        arrived: the first step of the request that reads; None if that is forgotten.
        overwritten: (step, incident) in which another request was seen to write to one of the slots.
        freed: that the request was found to read the slots when they were freed, and not written yet.
        facts: what else can be asked.
        name_of_owner: returns the request of an owner's number; None where that is forgotten.
    """

    group: BufferGroup
    arrived: int | None = None
    overwritten: tuple[int, int] | None = None
    freed: EarlyFree | None = None
    facts: Facts = field(default_factory=Facts)
    name_of_owner: Callable[[int], str | None] = lambda owner: None


def cause_of_one(
    reasons: Reason,
    row: ViolationRow,
    record: StoredRecord | None,
    request_id: str | None,
    group: BufferGroup,
    *,
    is_write: bool,
    facts: Facts,
) -> str:
    """Guess the cause of one violation from its reasons.

    Args:
        reasons: of the row.
        row: of the violation.
        record: that was read, or is replaced.
        request_id: who reads or writes.
        group: where.
        is_write: whether a write has found it.
        facts: what else can be asked.
    """
    position = row.position
    if (own := _own_damage(reasons, row, facts)) is not None:
        return own.cause
    if Reason.BATCH in reasons:
        if row.previous != row.row:
            return "the batch on the device is of other requests than that on the host: rows swapped, or stale"
        return f"the length on the device is off by {row.given - position}: stale, or advanced too early or too late"
    if Reason.PREFIX in reasons:
        return (
            "the row's cached prefix is not this request's own: a stale or wrong prefix hit, or a table row that "
            "names another request's blocks"
        )
    if Reason.SLOT_RANGE in reasons:
        if is_write:
            return "the forward was told to write outside the pool"
        if row.slot == BAD_SLOT:
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
        if (named := facts.named(row)) not in (None, row.slot):
            other = "no slot" if named == BAD_SLOT else f"slot {named}"
            return (
                f"the forward wrote to slot {row.slot} where the table names {other}: a wrong or stale entry of the "
                "slot mapping"
            )
        return "two owners: the slot was handed out while another request still used it"
    if Reason.UNMAPPED in reasons:
        if group.lut is not None:
            return "a live position maps to the padding slot: its window entry was evicted, or the LUT lost it"
        return "a live position maps to the padding slot: evicted, cleared or never mapped"
    if (lost := _lost(reasons, [row], facts)) is not None:
        return lost
    if Reason.NEVER_WRITTEN in reasons:
        return "mapped, but nothing ever wrote there: a missing copy or load, or a wrong table entry"
    if Reason.FREED in reasons:
        if _was_freed_as_another(row):
            return _never_filled("there")
        if facts.handed_out(row.writer_step, row.writer_owner):
            return "two owners: the slot was handed out while a request still reads it"
        return "use after free: the slot was freed while a request still reads it"
    if record is None:
        return "unknown"
    # A record of a step of which no forward wrote it was copied, loaded or taken in.
    wrote = facts.wrote(record.step, record.owner, record.position)
    if not reasons & CONTENT:
        if row.tag in _TAILS and not reasons & (Reason.K | Reason.V):
            return (
                "what lies there is not what the model handed over: it was written elsewhere, in another layer, as the "
                "other half or not at all, or something else wrote there in the same forward"
            )
        zeroed = _zeroed(reasons, record, row.observed_kv, group)
        if wrote is False:
            return _came_otherwise("the slot", [record.step], zeroed=zeroed)
        if zeroed:
            return "the bytes are all zero: the slot or its page was zeroed after it was written"
        return "the K/V bytes changed after they were written: a stray write, a copy race or memory corruption"
    foreign = record.request_id != request_id or record.request_id is None
    window = _window_cause(group, record.position - position, foreign=foreign)
    if window is not None and Reason.POSITION in reasons:
        return window
    if Reason.POSITION in reasons and abs(record.position - position) == 1 and not foreign:
        return "the table is off by one, or holds an entry of the position beside it"
    if foreign and reasons & (Reason.POSITION | Reason.TOKEN):
        if reasons & BYTES:
            return "the slot was reused while in use, and its bytes changed as well"
        return "a wrong or stale table entry, or a slot reused while in use: it holds another request's token"
    if Reason.POSITION in reasons:
        return "a stale or wrong table entry: the slot holds another position of the same request"
    if Reason.TOKEN in reasons and wrote:
        return (
            f"the forward that wrote it at step {record.step} was given another token than the request's own: a wrong "
            f"input, or an old branch of the text{_or_our_table(row, facts)}"
        )
    if Reason.TOKEN in reasons:
        return "the slot holds another token of this position: an old branch of the text, or a wrong prefix"
    return "the right token after another prefix: the entry before it, or the whole prefix, is another's"


def _never_filled(where: str) -> str:
    """Say that slots were freed by somebody else, and not written for who reads them."""
    return (
        f"nobody has written {where} since it was freed with another token: handed out or cached and never filled, a "
        "copy or load that never came, or a wrong table entry"
    )


def _was_freed_as_another(row: ViolationRow) -> bool:
    """Whether a slot that was freed held another token than the one that is expected there."""
    return row.has_record and row.token >= 0 and row.identity & 0xFFFFFFFF != row.token & 0xFFFFFFFF


def _came_otherwise(where: str, steps: Sequence[int], *, zeroed: bool) -> str:
    """Say that bytes are not those that were copied, loaded or taken in."""
    when = f"at step {_span(steps)}"
    if zeroed:
        return f"the bytes of {where} are all zero: the copy or load that was to bring them {when} never came in full"
    return (
        f"the bytes of {where} are not those that a copy or load was to bring {when}: it came late, took them from "
        "another place or too early, or something has written over them since"
    )


def _or_our_table(row: ViolationRow, facts: Facts) -> str:
    """Say what else may be wrong with a token that differs in one bit, where the request itself cannot be asked."""
    is_one_bit = (row.identity ^ row.token) & 0xFFFFFFFF in _BITS
    return ", or one bit of the canary's own table of tokens" if is_one_bit and facts.token(row) is None else ""


def _lost(reasons: Reason, rows: Sequence[ViolationRow], facts: Facts) -> str | None:
    """Say that the canary's own records lay in slots and lie there no more; None where nothing bears that out.

    Args:
        reasons: that were found of all of these slots.
        rows: the first of each slot.
        facts: what else can be asked.
    """
    number = int(reasons)
    is_gone = number == _NEVER_WRITTEN
    if not (is_gone or number == _FREED or (number & _CONTENT and not number & ~(_CONTENT | _BYTES))):
        return None
    found = []
    for row in rows[:: -(-len(rows) // _MOST_ASKED)]:
        lost = facts.lost(row)
        if lost is None:
            return None
        found.append(lost)
    one = len(rows) == 1
    what = "the canary's own record is" if one else f"the canary's own records of {len(rows)} slots are"
    step = f"at step {_span([x.step for x in found])}"
    if all(x.as_sealed for x in found):
        return f"{what} {'gone' if is_gone else 'overwritten'}: the KV is as it was sealed {step}"
    if any(x.as_sealed is not None for x in found):
        both = "something has written over both"
        return f"{what} {'gone' if is_gone else 'overwritten'}, and the KV is not as it was sealed {step}: {both}"
    if is_gone:
        return (
            f"{what} gone, or a copy or load to where the table points now never came: a forward wrote "
            f"what should be there {step}, as the records beside it bear out"
        )
    return (
        f"{what} overwritten, by what is none: a forward wrote the right one {step}, as the records beside it bear "
        "out; the KV is probably as it was"
    )


class Damage(NamedTuple):
    """Damage to one of the canary's own words.

    Args:
        what: the word.
        where: what of it.
    """

    what: str
    where: str = "one bit"

    @property
    def cause(self) -> str:
        return f"the canary's own {self.what} is damaged, in {self.where}: the KV is probably as it was"


_RECORD, _TABLE, _START, _TAIL = "record", "table of tokens", "start of this row's chain", "tail of this row"


def _own_damage(reasons: Reason, row: ViolationRow, facts: Facts, *, are_all: bool = False) -> Damage | None:
    """Return which of the canary's own words is damaged, where others bear out what it should be.

    Another token, position or prefix, and other bytes, change a hash in every other bit, and not in one alone.

    Args:
        reasons, row: what was found.
        facts: what else can be asked.
        are_all: whether nothing else was found of the slot in its step.
    """
    number = int(reasons)
    if number == _FREED:
        return _damaged_mark(row, facts)
    if number in (_K, _V):
        is_one_bit = (row.kv ^ row.observed_kv) & MASK64 in _BITS
        return Damage(what=_RECORD, where="one bit of its fingerprint") if is_one_bit else None
    if not row.expected_chain or not number & _CONTENT or number & ~(_CONTENT | _BYTES):
        return None
    if number == _TOKEN:
        return _damaged_table(row, facts)
    if number in (_PREFIX, _CHAIN, _PREFIX | _CHAIN):
        is_sure = are_all and number != _PREFIX | _CHAIN and bool(facts.whole(row.step))
        return _damaged_chain(row, is_alone=is_sure)
    # Which bytes are covered goes by the position.
    return _damaged_identity(row) if number & _CHAIN else None


def _damaged_mark(row: ViolationRow, facts: Facts) -> Damage | None:
    """Return the damage of a record that a forward wrote and nobody freed: whoever frees a slot is stamped on it."""
    is_own = row.stored_position == row.position and not _was_freed_as_another(row)
    step, owner = row.writer_step, row.writer_owner
    if not is_own or not owner or not facts.wrote(step, owner, row.position) or facts.freed(step, owner) is not False:
        return None
    came = facts.came(row)
    return None if came is not None and came >= step else Damage(what=_RECORD, where="the bit that marks freed slots")


def _damaged_table(row: ViolationRow, facts: Facts) -> Damage | None:
    """Return the damage of the table that says which token was expected, where the request says that of the record."""
    stored = row.identity & 0xFFFFFFFF
    is_one_bit = row.token >= 0 and (stored ^ row.token) in _BITS
    return Damage(what=_TABLE) if is_one_bit and facts.token(row) == stored else None


def _damaged_identity(row: ViolationRow) -> Damage | None:
    """Return the damage of a token or position in a record, where its chain bears out the right one."""
    identity = row.identity & MASK64
    token = row.token if row.token >= 0 else identity & 0xFFFFFFFF
    own = (row.position << 32 | (token & 0xFFFFFFFF)) & MASK64
    apart = own ^ identity
    if not apart or (apart >= 1 << 32 and apart not in _BITS):
        return None
    # What the chain would be behind the same prefix, had the slot the identity that it should have.
    if (row.expected_chain - mix(identity) + mix(own)) & MASK64 != row.chain & MASK64:
        return None
    what = "token" if apart < 1 << 32 else "position"
    return Damage(what=_RECORD, where=f"{'one bit of ' if apart in _BITS else ''}its {what}")


def _damaged_chain(row: ViolationRow, *, is_alone: bool) -> Damage | None:
    """Return the damage of a chain: of a record's, of the row's tail, or of what its chain starts from.

    Args:
        row: of CHAIN or PREFIX.
        is_alone: whether that is all that was found, though all of the request was verified.
    """
    ago = _tokens_ago(row)
    if ago is None:
        return None
    # A tail is the chain of a prefix, which goes on over the request's own tokens.
    if row.reasons & _PREFIX:
        return Damage(what=_TAIL if ago or is_alone else f"{_TAIL}, or the record's chain,")
    if not ago:
        return Damage(what=_RECORD, where="one bit of its chain")
    if row.previous == HEAD_OF_CHAIN and ago == 1:
        return Damage(what=_START)
    return Damage(what=_TAIL if ago > 1 or is_alone else f"{_TAIL}, or the chain before it,")


def _tokens_ago(row: ViolationRow) -> int | None:
    """Return before how many tokens a chain differed from what was expected in one bit; None where it never did."""
    chain, expected = row.chain & MASK64, row.expected_chain & MASK64
    if chain ^ expected in _BITS:
        return 0
    own = mix(row.identity & MASK64)
    if ((chain - own) * _INVERSE ^ (expected - own) * _INVERSE) & MASK64 in _BITS:
        return 1
    # Farther back it is known how much the two differed, which of one bit is a power of two.
    apart = (chain - expected) * _INVERSE & MASK64
    for ago in range(2, min(_MOST_TOKENS, row.position + 2)):
        apart = apart * _INVERSE & MASK64
        if apart in _BITS or MASK64 + 1 - apart in _BITS:
            return ago
    return None


def damages_of(members: Sequence[Member], facts: Facts) -> list[Damage | None]:
    """Return of each member of an incident the damage to the canary's own words that it is; None: it is none.

    Where the first is none, the others are not looked at.
    """
    first = _own_damage(members[0].reasons, members[0].first, facts, are_all=True)
    if first is None:
        return [None] * len(members)
    return [first, *(_own_damage(m.reasons, m.first, facts, are_all=True) for m in members[1:])]


def _damage_of_all(found: Sequence[Damage]) -> str:
    """Say that the canary's own words are damaged that stand for the slots of an incident."""
    kinds, count = {damage.what for damage in found}, len(found)
    # A tail goes on from there.
    if count == 1 or kinds == {_START, _TAIL}:
        return found[0].cause
    each = ", in one bit each" if all(" bit" in damage.where for damage in found) else ""
    if kinds == {_TABLE}:
        return f"the canary's own table of tokens is damaged at {count} positions{each}: the KV is probably as it was"
    what = "records of" if kinds == {_RECORD} else "words about"
    return f"the canary's own {what} {count} slots are damaged{each}: the KV is probably as it was"


def cause_of_many(
    members: Sequence[Member], damages: Sequence[Damage | None], first: ViolationReport, around: Circumstances
) -> str:
    """Guess the cause of an incident from its shape: how its slots lie in pages, who wrote them, and when.

    Args:
        members: what was found, less the entries that only follow a wrong one; in order of position.
        damages: theirs, of `damages_of`.
        first: the report of the first that is none, or of the first of them.
        around: what else is known.
    """
    if None not in damages:
        return _damage_of_all([damage for damage in damages if damage is not None])
    members = [m for m, damage in zip(members, damages, strict=True) if damage is None]
    reasons = functools.reduce(Reason.__or__, (m.reasons for m in members))
    pages = _Pages.of(members, around.group)
    if (handed_on := _handed_on(members, first, around, pages)) is not None:
        return handed_on
    if (lost := _lost(reasons, [m.first for m in members], around.facts)) is not None:
        return lost
    if Reason.PREFIX in reasons and members[0].position == 0 and len(members) > 1:
        last = members[-1].position
        return (
            f"the whole prefix, positions 0 to {last}, is not this request's own: a stale or wrong prefix hit, or a "
            "table row that names another request's blocks"
        )
    if (steps := _came_wrong(members, reasons, around)) is not None:
        return _wrong_copy(pages.text if pages.whole else _counted(members), steps, bytes_alone=not reasons & CONTENT)
    if Reason.FREED in reasons and len(members) > 1:
        return _freed_cause(members, around, pages)
    if reasons & CONTENT and reasons != Reason.PREFIX:
        return _content_cause(members, first, around, pages)
    if len(members) == 1:
        return first.cause
    if Reason.NEVER_WRITTEN in reasons and pages.aligned:
        return f"mapped, but nothing ever wrote there: the copy or load of {pages.text} is missing"
    if reasons and not reasons & ~BYTES:
        return _bytes_cause(members, reasons, around, pages)
    return first.cause


def _came_wrong(members: Sequence[Member], reasons: Reason, around: Circumstances) -> list[int] | None:
    """Return the steps in which what is wrong came from elsewhere as it is; None where not all of it did so."""
    if not reasons & (CONTENT | BYTES) or reasons & ~(CONTENT | BYTES):
        return None
    steps = []
    for member in members:
        came = around.facts.came(member.first)
        # All bytes are looked at when they come: what is found later has changed since.
        if (
            came is None
            or member.writer_step > came
            or not (reasons & CONTENT or came <= member.first.step <= came + 1)
        ):
            return None
        steps.append(came)
    return steps


def _wrong_copy(where: str, steps: Sequence[int], *, bytes_alone: bool) -> str:
    """Say that a copy has brought what should not have come."""
    when = f"at step {_span(steps)}"
    if bytes_alone:
        return (
            f"the bytes of {where} are not those that were to come there {when}: the copy was left out, came too early "
            "or took others, or they had changed where they came from"
        )
    return (
        f"what came to {where} {when} is another's, or of other positions: the copy took it from the wrong place, or "
        "to the wrong one"
    )


def _counted(members: Sequence[Member]) -> str:
    return f"{len(members)} slot{'s' if len(members) != 1 else ''}"


def _freed_cause(members: Sequence[Member], around: Circumstances, pages: _Pages) -> str:
    """Say who freed slots that are still read, and who has written to them since."""
    freed = [m for m in members if Reason.FREED in m.reasons]
    if len(freed) == len(members) and all(_was_freed_as_another(m.first) for m in freed):
        return _never_filled(f"to any of {pages.text if pages.whole else f'{len(members)} slots'}")
    what = pages.text if pages.whole else f"{len(members)} slots"
    text = _given_away(what, freed[0].writer, [m.writer_step for m in freed], around)
    taken = [m for m in members if Reason.FREED not in m.reasons]
    if taken:
        takers = dict.fromkeys(_name(m.writer, around) or "somebody" for m in taken)
        text += f"; {', '.join(takers)} has written to {len(taken)} of these slots since"
    return text


def _given_away(what: str, owner: int, steps: Sequence[int], around: Circumstances) -> str:
    """Say that slots which a request still reads were freed, and by whom, or handed out, and to whom.

    Args:
        what: the slots.
        owner: who is stamped on them.
        steps: at which.
        around: what else is known.
    """
    by, when = _name(owner, around), f"at step {_span(steps)} while a request still reads there"
    if all(around.facts.handed_out(step, owner) for step in steps):
        return f"two owners: {what} handed out to {by} {when}"
    return f"use after free: {what} freed{f' by {by}' if by else ''} {when}"


def _name(owner: int, around: Circumstances) -> str:
    """Return how a sentence calls an owner; "" for nobody."""
    name = around.name_of_owner(owner) if owner else None
    return f"request {printable(name)}" if name else f"owner {owner}" if owner else ""


def _handed_on(members: Sequence[Member], first: ViolationReport, around: Circumstances, pages: _Pages) -> str | None:
    """Say who freed slots that another request has written since; None where they were not found to be freed."""
    record, freed = first.record, around.freed
    if freed is None or record is None or not all(m.reasons & CONTENT for m in members):
        return None
    steps = [m.writer_step for m in members]
    if record.request_id == first.request_id is not None or min(steps) < min(freed.steps):
        return None
    what = pages.text if pages.whole else _counted(members)
    takers = dict.fromkeys(_name(m.writer, around) or "somebody" for m in members)
    return (
        f"{_given_away(what, freed.owner, freed.steps, around)} (incident {freed.incident}), and handed on: "
        f"{', '.join(takers)} has written there at step {_span(steps)}"
    )


def _content_cause(members: Sequence[Member], first: ViolationReport, around: Circumstances, pages: _Pages) -> str:
    """Guess why slots hold tokens, positions or chains that are not the request's."""
    record = first.record
    if record is None:
        return first.cause
    foreign = record.request_id != first.request_id or record.request_id is None
    by = f"request {printable(record.request_id)}" if record.request_id else f"owner {record.owner or 'unknown'}"
    if foreign and around.overwritten is not None:
        step, number = around.overwritten
        return f"reused while in use: {by} was seen to overwrite it at step {step} (incident {number})"
    shifts = {m.stored_position - m.position for m in members}
    if len(members) > 1 and len(shifts) == 1:
        shift = shifts.pop()
        window = _window_cause(around.group, shift, foreign=foreign)
        if window is not None and shift:
            return window
        if shift in (-1, 1):
            return f"the table is off by one from position {members[0].position} on"
        if shift and not foreign:
            return f"the table is shifted by {shift} positions from position {members[0].position} on"
    if len(members) == 1 or not foreign or not pages.aligned:
        return first.cause
    steps = [m.writer_step for m in members]
    if around.group.lut is not None:
        return f"the LUT is stale: {pages.text} of the window already belong to {by}"
    if around.arrived is not None and max(steps) < around.arrived:
        return (
            f"a wrong block from position {members[0].position} on: the table names what {by} wrote before this "
            "request came: a stale or wrong prefix hit"
        )
    # Newest first: what is forgotten of one need not be asked of the others.
    asked = sorted(members, key=lambda m: m.writer_step, reverse=True)[:_MOST_ASKED]
    if all((own := around.facts.own(m.first)) is not None and m.writer_step <= own for m in asked):
        return (
            f"a wrong block from position {members[0].position} on: the table names what {by} wrote when this "
            "request's own was in place: a wrong or stale table entry"
        )
    if pages.whole:
        return f"a page reused while in use: {by} wrote {pages.text} at step {_span(steps)}"
    return (
        f"a wrong block from position {members[0].position} on: the table names a page of {by}, or the page was handed "
        "on while in use"
    )


def _bytes_cause(members: Sequence[Member], reasons: Reason, around: Circumstances, pages: _Pages) -> str:
    """Guess why the bytes of several slots are not those that were recorded."""
    group, where = around.group, pages.text if pages.whole else f"{len(members)} slots"
    zeroed = all(_zeroed_member(m, group) for m in members)
    if all(around.facts.wrote(m.writer_step, m.writer, m.stored_position) is False for m in members):
        return _came_otherwise(where, [m.writer_step for m in members], zeroed=zeroed)
    if zeroed:
        return f"the bytes of {where} are all zero: they were zeroed after they were written"
    sources = [s for r, s in ((Reason.K, group.pool.k_source), (Reason.V, group.pool.v_source)) if r in reasons and s]
    layers = {m.stored_position % len(s.layers) for m in members for s in sources}
    if len(sources) == 1 and len(layers) == 1 and len(sources[0].layers) > 1:
        return f"only one layer's bytes changed, in {where}: a stray write of that layer"
    if pages.whole:
        return f"the bytes of {where} changed with no record: a copy or load over them, or one that came late"
    return f"the bytes of {where} changed after they were written: a stray write, a copy race or memory corruption"


def _window_cause(group: BufferGroup, shift: int, *, foreign: bool) -> str | None:
    """Guess why a slot of a window holds another position of the same request; None where it is no window's fault."""
    if not group.ring or foreign or shift % (group.window + 1):
        return None
    if shift > 0:
        return "a stale window entry: the ring has gone round, and a later position of the request lies there"
    return "a stale window entry: the ring's slot still holds an earlier round; the write of this one is missing"


@dataclass(frozen=True, kw_only=True)
class _Pages:
    """The lie of an incident's slots in pages: whether they are pages from their beginnings on, and to their ends.

    Of a page, a few may be missing: they hold another's tokens, which happen to be the right ones.
    """

    count: int
    aligned: bool
    whole: bool

    @classmethod
    def of(cls, members: Sequence[Member], group: BufferGroup) -> _Pages:
        source = group.pool.k_source or group.pool.v_source
        page = 1 if source is None else source.page_size
        places = sorted({m.slot - (0 if source is None else source.slot_bias) for m in members})
        if page == 1:
            return cls(count=len(places), aligned=False, whole=False)
        found: dict[int, list[int]] = {}
        for place in places:
            found.setdefault(place // page, []).append(place % page)
        # A token or two of a page may be right by chance.
        aligned = all(2 * len(mine) > mine[-1] + 1 and (not mine[0] or mine[-1] == page - 1) for mine in found.values())
        whole = aligned and all(mine[-1] == page - 1 for mine in found.values())
        return cls(count=len(found), aligned=aligned, whole=whole)

    @property
    def text(self) -> str:
        kind = "whole page" if self.whole else "page"
        return f"{self.count} {kind}{'s' if self.count != 1 else ''}"


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _zeroed_member(member: Member, group: BufferGroup) -> bool:
    return _zero_at(member.reasons, member.stored_position, member.first.observed_kv, group)


def _zeroed(reasons: Reason, record: StoredRecord, observed: int, group: BufferGroup) -> bool:
    return _zero_at(reasons, record.position, observed, group)


def _zero_at(reasons: Reason, position: int, observed: int, group: BufferGroup) -> bool:
    """Whether the damaged halves have the fingerprints of zero bytes."""
    halves = ((0, Reason.K, group.pool.k_source), (32, Reason.V, group.pool.v_source))
    wanted = {shift: _zero_fingerprint(s, position) for shift, r, s in halves if r in reasons and s is not None}
    return bool(wanted) and all(observed >> shift & 0xFFFFFFFF == value for shift, value in wanted.items())


def _zero_fingerprint(source: KvSource, position: int) -> int:
    _, start, end = source.coverage(position)
    return _zeros(-(-(end - start) // 8))


@functools.lru_cache(maxsize=64)
def _zeros(num_words: int) -> int:
    x = sum(mix(mix(j)) for j in range(num_words)) & MASK64
    return (x ^ (x >> 32)) & 0xFFFFFFFF
