"""Violation rows of one step, put together: rows on one slot become a member, members of one kind a cluster."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from kv_canary.constants import Reason, Tag
from kv_canary.specs.violation_row import ViolationRow

CONTENT = Reason.POSITION | Reason.TOKEN | Reason.CHAIN | Reason.PREFIX
BYTES = Reason.K | Reason.V | Reason.SEAL_K | Reason.SEAL_V
# Found of a slot and not of the row that reads it: every request that shares the slot finds it too.
_SHARED = CONTENT | BYTES | Reason.FREED | Reason.NEVER_WRITTEN
_CONTENT, _BYTES, _OWNED = int(CONTENT), int(BYTES), int(Reason.FREED | Reason.OVERWRITE)
_SWA = (Tag.HEAD_SWA, Tag.TAIL_SWA, Tag.SWEEP_SWA)

# What makes violations of one kind: (windowed, reasons or their class, writer, offset).
Kind = tuple[bool, int, int, int]


@dataclass(frozen=True, kw_only=True)
class Member:
    """The finding about one slot and position of one row in one step.

    Args:
        first: the first violation row.
        reasons: of all its rows: TAIL may see other things than HEAD.
        tags: the launches that found it.
        count: its rows.
    """

    first: ViolationRow
    reasons: Reason
    tags: tuple[Tag, ...]
    count: int

    @property
    def slot(self) -> int:
        return self.first.slot

    @property
    def row(self) -> int:
        return self.first.row

    @property
    def position(self) -> int:
        return self.first.position

    @property
    def stored_position(self) -> int:
        """Position in the record that was read, or was about to be stored."""
        return self.first.stored_position

    @property
    def writer(self) -> int:
        """Owner in the record that was read, or is replaced."""
        return self.first.writer_owner

    @property
    def writer_step(self) -> int:
        return self.first.writer_step

    @functools.cached_property
    def kind(self) -> Kind:
        """The key that it has in common with others of one cause."""
        # Plain numbers: a drain may bring a thousand rows, at every step.
        windowed, reasons = self.first.tag in _SWA, int(self.reasons)
        rest = reasons & ~(_CONTENT | _BYTES)
        if rest:
            off = self.stored_position - self.position if rest & int(Reason.WRITE_POSITION) else 0
            owned = rest & _OWNED
            return (windowed, rest, self.writer if owned else -1, off)
        if reasons & _CONTENT:
            return (windowed, _CONTENT | reasons & _BYTES, self.writer, 0)
        return (windowed, reasons, -1, 0)

    @property
    def damage(self) -> int:
        """A number that is the same where the same damage is found again, by whatever row or in whatever step."""
        first = self.first
        place = (self.slot, self.position, first.identity, first.chain, first.writer)
        if not self.reasons & ~BYTES:
            # HEAD and a seal, each of which looks at other bytes of what lies there.
            return hash((first.group, place))
        return hash((self.kind, place, -1 if self.is_shared else self.row, first.kv))

    @property
    def is_shared(self) -> bool:
        """Whether every row that reads the slot finds it."""
        return not self.reasons & ~_SHARED


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Violations of one row in one step that have one cause.

    Args:
        kind: theirs.
        row: that found them; 0 for a sweep.
        members: in order of position.
        followers: entries whose chain breaks only because a member stands before them.
        count: violations.
    """

    kind: Kind
    row: int
    members: tuple[Member, ...]
    followers: tuple[Member, ...]
    count: int


def clusters_of(rows: Sequence[ViolationRow]) -> list[Cluster]:
    """Return the clusters of the violation rows of one step; every row counts in exactly one."""
    by_row: dict[tuple[bool, int], list[Member]] = {}
    for member in _members(rows):
        by_row.setdefault((member.kind[0], member.row), []).append(member)
    return [cluster for members in by_row.values() for cluster in _clusters_of_row(members)]


def _members(rows: Sequence[ViolationRow]) -> list[Member]:
    """Merge the rows on one (row, slot, position): HEAD, TAIL and a sweep may each find the same."""
    found: dict[tuple[bool, int, int, int], Member] = {}
    for row in rows:
        tag = Tag(row.tag)
        key = (tag in _SWA, row.row, row.slot, row.position)
        before = found.get(key)
        if before is None:
            found[key] = Member(first=row, reasons=Reason(row.reasons), tags=(tag,), count=1)
        else:
            tags = before.tags if tag in before.tags else (*before.tags, tag)
            reasons = before.reasons | Reason(row.reasons)
            found[key] = Member(first=before.first, reasons=reasons, tags=tags, count=before.count + 1)
    return list(found.values())


def _clusters_of_row(members: Sequence[Member]) -> list[Cluster]:
    """Group what one row found by kind; a chain that breaks behind a wrong entry is part of that entry's cluster."""
    at = {(m.slot, m.position): m for m in members}
    kinds: dict[Kind, list[Member]] = {}
    behind: list[Member] = []
    for member in members:
        if _leader(member, at) is None:
            kinds.setdefault(member.kind, []).append(member)
        else:
            behind.append(member)
    followers: dict[Kind, list[Member]] = {}
    for member in behind:
        leader = member
        while (before := _leader(leader, at)) is not None:
            leader = before
        followers.setdefault(leader.kind, []).append(member)
    _join_early_frees(kinds, followers)
    return [
        Cluster(
            kind=kind,
            row=group[0].row,
            members=tuple(sorted(group, key=lambda m: m.position)),
            followers=tuple(sorted(followers.get(kind, ()), key=lambda m: m.position)),
            count=sum(m.count for m in (*group, *followers.get(kind, ()))),
        )
        for kind, group in kinds.items()
    ]


def _join_early_frees(kinds: dict[Kind, list[Member]], followers: dict[Kind, list[Member]]) -> None:
    """Put what has been written to slots since they were freed to those beside them that have not been written yet.

    A page that is freed too early is handed on as one, and taken slot by slot.
    """
    for kind in [k for k in kinds if k[1] & int(Reason.FREED)]:
        freed = kinds[kind]
        since = min(m.writer_step for m in freed)
        places = {(m.slot, m.position) for m in freed}
        for other in [k for k in kinds if k[1] & ~_BYTES == _CONTENT]:
            # From the freed ones on outwards, in order of position both ways.
            ordered = sorted(kinds[other], key=lambda m: m.position)
            taken = []
            for way, step in ((reversed(ordered), 1), (ordered, -1)):
                for m in way:
                    is_beside = (m.slot + step, m.position + step) in places
                    if is_beside and m.writer_step >= since and (m.slot, m.position) not in places:
                        places.add((m.slot, m.position))
                        taken.append(m)
            if not taken:
                continue
            freed += taken
            kinds[other] = [m for m in kinds[other] if m not in taken]
            if not kinds[other]:
                del kinds[other]
                followers.setdefault(kind, []).extend(followers.pop(other, ()))


def _leader(member: Member, at: dict[tuple[int, int], Member]) -> Member | None:
    """Return the wrong entry right before one that has nothing wrong but its chain; None where it has its own fault."""
    before = at.get((member.first.previous, member.position - 1)) if member.reasons == Reason.CHAIN else None
    return before if before is not None and before.reasons & CONTENT else None
