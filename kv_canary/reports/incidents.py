"""Incidents: one cause, told once, however many violations it makes and however long it goes on."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from kv_canary.constants import Reason, Tag
from kv_canary.errors import printable
from kv_canary.reports.causes import Circumstances, EarlyFree, cause_of_many, damages_of
from kv_canary.reports.clusters import CONTENT, Cluster, Kind, Member, clusters_of
from kv_canary.reports.decode import NOBODY, Decoder, by_whom, details, is_nobodys, is_write, reason_names
from kv_canary.reports.neighbourhood import Neighbourhood
from kv_canary.reports.report import ViolationReport
from kv_canary.specs.violation_row import ViolationRow

# Incidents that are remembered; beyond that, the one not seen for longest is forgotten, and would be new again.
MOST_REMEMBERED = 128
# Of one incident: names that are kept, names that are known again so that they are not counted twice, positions and
# slots that are kept of each kind. Of all of them: places of damage that are known again.
MOST_NAMES = 16
MOST_KNOWN_NAMES = 1024
MOST_PLACES = 4096
MOST_DAMAGES = 1 << 16
# Characters that are kept of a request's name, which a client may have chosen.
_NAME_LENGTH = 256
# Other slots of the same request and kind belong to an incident that was seen at most so many steps ago: a strided
# canary takes that many steps to come round.
GROWS_WITHIN = 64

Ranges = tuple[tuple[int, int], ...]
News = Literal["new", "grows", "again"]


@dataclass(frozen=True, kw_only=True)
class Incident:
    """Violations that have one cause, as far as they have been found.

    Args:
        number: its number in this run; the first is 1.
        group: name of the buffer group.
        tags: the launches that found it.
        reasons: what was found.
        requests: who reads or writes there, the first MOST_NAMES; none where only a sweep has found it.
        num_requests: how many those are; some may be counted again where they are more than MOST_KNOWN_NAMES.
        writer: who wrote the records that were found, or holds the slot that is written; None where it does not matter.
        positions: (first, last) of every run of positions.
        slots: likewise.
        followers: positions whose chain breaks only because one of `positions` stands before them.
        first_step, last_step: when it was found.
        count: violations.
        first: the report of the first of them.
        cause: the likely one.
        sentence: all of it in one line.
        neighbourhood: what lies around it; None where that could not be had.
    """

    number: int
    group: str
    tags: tuple[str, ...]
    reasons: tuple[str, ...]
    requests: tuple[str, ...]
    num_requests: int = 0
    writer: str | None
    positions: Ranges
    slots: Ranges
    followers: Ranges
    first_step: int
    last_step: int
    count: int
    first: ViolationReport
    cause: str
    sentence: str
    neighbourhood: Neighbourhood | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the incident as JSON-ready values."""
        return asdict(self)


@dataclass(kw_only=True)
class _Open:
    """An incident that may go on."""

    number: int
    kind: Kind
    leading: Member
    group: str
    first: ViolationReport
    cause: str
    first_step: int
    last_step: int
    count: int = 0
    reasons: Reason = field(default_factory=lambda: Reason(0))
    tags: set[Tag] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)
    num_requests: int = 0
    known_names: OrderedDict[str, None] = field(default_factory=OrderedDict)
    positions: set[int] = field(default_factory=set)
    slots: set[int] = field(default_factory=set)
    # Of slots that were read when they were freed: by whom, and at which step.
    frees: dict[int, tuple[int, int]] = field(default_factory=dict)
    followers: set[int] = field(default_factory=set)
    neighbourhood: Neighbourhood | None = None

    def add_request(self, name: str) -> None:
        """Take in who reads or writes there."""
        name = name[:_NAME_LENGTH]
        if name in self.known_names:
            self.known_names.move_to_end(name)
            return
        self.known_names[name] = None
        if len(self.known_names) > MOST_KNOWN_NAMES:
            self.known_names.popitem(last=False)
        self.num_requests += 1
        if len(self.requests) < MOST_NAMES:
            self.requests.append(name)

    def is_of(self, name: str | None) -> bool:
        """Whether a request of this name reads or writes there; None: whether only sweeps do."""
        return not self.num_requests if name is None else name[:_NAME_LENGTH] in self.known_names


class IncidentTracker:
    """Groups violation rows into incidents, and knows again those that it has seen.

    Args:
        decoder: gives reports, names and groups.
        arrived: (step, row) -> the first step of the request in that row, as far as it is remembered.
        numbers: of new incidents; None: from 1 on.

    Attributes:
        count: incidents so far, forgotten ones too.
        befallen: names of requests that read or wrote where something was found, the first MOST_NAMES.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        arrived: Callable[[int, int], int | None],
        numbers: Iterator[int] | None = None,
    ) -> None:
        self._decoder = decoder
        self._arrived = arrived
        self._numbers = itertools.count(1) if numbers is None else numbers
        self.count = 0
        self.befallen: list[str] = []
        self._open: OrderedDict[int, _Open] = OrderedDict()
        # The incident that a place of damage was last found in.
        self._damages: OrderedDict[int, int] = OrderedDict()

    def take(self, rows: Iterable[ViolationRow]) -> dict[int, News]:
        """Take in violation rows; return the numbers of the incidents they belong to, and what is new of each.

        "new": not seen before; "grows": found in more slots; "again": found where it was found before.
        """
        steps: dict[int, list[ViolationRow]] = {}
        for row in rows:
            steps.setdefault(row.step, []).append(row)
        news: dict[int, News] = {}
        for step in sorted(steps):
            # The ring's order is free on a GPU. HEAD leads, and sweeps, whose row is 0, come last.
            ordered = sorted(steps[step], key=lambda r: (r.row == 0, r.row, r.position, r.tag, r.slot))
            for cluster in clusters_of(ordered):
                opened, fresh = self._place(cluster, step)
                before = news.get(opened.number)
                if before is None or (before == "again" and fresh != "again"):
                    news[opened.number] = fresh
        return news

    def incident(self, number: int) -> Incident:
        """Return the incident of this number as it stands; KeyError where it is forgotten."""
        opened = self._open[number]
        positions, slots, followers = (ranges(s) for s in (opened.positions, opened.slots, opened.followers))
        record = opened.first.record
        return Incident(
            number=number,
            group=opened.group,
            tags=tuple(t.name for t in sorted(opened.tags)),
            reasons=reason_names(opened.reasons),
            requests=tuple(opened.requests),
            num_requests=opened.num_requests,
            writer=None if record is None or opened.kind[2] < 0 or is_nobodys(record) else by_whom(record),
            positions=positions,
            slots=slots,
            followers=followers,
            first_step=opened.first_step,
            last_step=opened.last_step,
            count=opened.count,
            first=opened.first,
            cause=opened.cause,
            sentence=_sentence(opened, positions, slots, followers),
            neighbourhood=opened.neighbourhood,
        )

    def knows(self, number: int) -> bool:
        """Whether an incident is remembered."""
        return number in self._open

    def incidents(self) -> list[Incident]:
        """Return every incident that is remembered, oldest first."""
        return [self.incident(number) for number in sorted(self._open)]

    def attach(self, number: int, neighbourhood: Neighbourhood | None) -> None:
        """Keep what lies around an incident."""
        self._open[number].neighbourhood = neighbourhood

    def _place(self, cluster: Cluster, step: int) -> tuple[_Open, News]:
        """Put a cluster into the incident that it belongs to, or make one."""
        damages = [m.damage for m in cluster.members]
        name = self._name(cluster.row, step)
        numbers = [self._damages.get(d, 0) for d in damages]
        known = next((self._open[n] for n in numbers if n in self._open), None)
        opened = known or self._grown(cluster, name, step)
        fresh: News = "new" if opened is None else "grows"
        if opened is None:
            opened = self._begin(cluster, step)
        elif all(n == opened.number for n in numbers):
            fresh = "again"
        follows = fresh != "new" and _is_behind(cluster, opened)
        opened.last_step = step
        opened.count += cluster.count
        if name is not None:
            opened.add_request(name)
            if len(self.befallen) < MOST_NAMES and name[:_NAME_LENGTH] not in self.befallen:
                self.befallen.append(name[:_NAME_LENGTH])
        for members, places in (
            (cluster.members, opened.followers if follows else opened.positions),
            (cluster.followers, opened.followers),
        ):
            for m in members:
                opened.reasons |= m.reasons
                opened.tags.update(m.tags)
                if len(places) < MOST_PLACES:
                    places.add(m.position)
        if not follows and len(opened.slots) < MOST_PLACES:
            opened.slots.update(m.slot for m in cluster.members)
            if cluster.kind[1] & Reason.FREED:
                freed = (m for m in cluster.members if Reason.FREED in m.reasons)
                opened.frees.update({m.slot: (m.writer, m.writer_step) for m in freed})
        for damage in (*damages, *(m.damage for m in cluster.followers)):
            self._damages[damage] = opened.number
            self._damages.move_to_end(damage)
        while len(self._damages) > MOST_DAMAGES:
            self._damages.popitem(last=False)
        self._open.move_to_end(opened.number)
        if len(self._open) > MOST_REMEMBERED:
            self._open.popitem(last=False)
        return opened, fresh

    def _begin(self, cluster: Cluster, step: int) -> _Open:
        damages = damages_of(cluster.members, self._decoder.facts)
        leading = cluster.members[damages.index(None) if None in damages else 0]
        first = self._decoder.decode(leading.first)
        slots = {m.slot for m in cluster.members}
        overwritten = next(
            (
                (o.last_step, o.number)
                for o in reversed(self._open.values())
                if o.kind[0] == cluster.kind[0] and o.kind[1] & Reason.OVERWRITE and o.slots & slots
            ),
            None,
        )
        around = Circumstances(
            group=self._decoder.group_of(leading.first),
            arrived=self._arrived(step, leading.row),
            overwritten=overwritten,
            freed=self._freed_before(cluster, first.group, self._name(cluster.row, step)),
            name_of_owner=self._decoder.name_of_owner,
            facts=self._decoder.facts,
        )
        self.count += 1
        number = next(self._numbers)
        self._open[number] = opened = _Open(
            number=number,
            kind=cluster.kind,
            leading=leading,
            group=first.group,
            first=first,
            cause=cause_of_many(cluster.members, damages, first, around),
            first_step=step,
            last_step=step,
        )
        return opened

    def _freed_before(self, cluster: Cluster, group: str, name: str | None) -> EarlyFree | None:
        """Return who freed the slots of a cluster, where the same request was found to read them behind that."""
        slots = {m.slot for m in cluster.members}
        for opened in reversed(self._open.values()):
            if opened.group != group or not opened.frees or not opened.is_of(name) or not slots <= opened.slots:
                continue
            frees = [opened.frees[slot] for slot in slots if slot in opened.frees]
            if frees:
                return EarlyFree(owner=frees[0][0], steps=tuple(step for _, step in frees), incident=opened.number)
        return None

    def _grown(self, cluster: Cluster, name: str | None, step: int) -> _Open | None:
        """Return the incident that the cluster is more of: the same request and kind, or a chain broken behind it.

        What is wrong with a batch is so for all of its requests.
        """
        for opened in reversed(self._open.values()):
            if step - opened.last_step > GROWS_WITHIN or opened.kind[0] != cluster.kind[0]:
                continue
            if cluster.kind[1] == Reason.BATCH and opened.kind == cluster.kind:
                return opened
            if opened.is_of(name) and (opened.kind == cluster.kind or _is_behind(cluster, opened)):
                return opened
        return None

    def _name(self, row: int, step: int) -> str | None:
        """Return how sentences call the request in a row; None for a sweep."""
        return (self._decoder.name_of_row(step, row) or f"row {row}") if row else None


def _is_behind(cluster: Cluster, opened: _Open) -> bool:
    """Whether nothing is wrong with a cluster but the chain, right behind a wrong entry of an incident."""
    leading = cluster.members[0]
    after = leading.first.previous in opened.slots and leading.position - 1 in opened.positions
    return leading.reasons == Reason.CHAIN and after and bool(opened.kind[1] & CONTENT)


def ranges(numbers: Iterable[int]) -> Ranges:
    """Return (first, last) of every run of consecutive numbers."""
    result: list[tuple[int, int]] = []
    for n in sorted(numbers):
        if result and n == result[-1][1] + 1:
            result[-1] = (result[-1][0], n)
        else:
            result.append((n, n))
    return tuple(result)


def ranges_text(noun: str, parts: Ranges, *, most: int = 8) -> str:
    """Return "position 3", or "positions 16 to 31, 40"; beyond `most` runs, how many more there are."""
    runs = [str(a) if a == b else f"{a} to {b}" for a, b in parts[:most]]
    more = f" and {len(parts) - most} runs more" if len(parts) > most else ""
    many = len(parts) > 1 or any(a != b for a, b in parts)
    return f"{noun}{'s' if many else ''} {', '.join(runs)}{more}"


def goes_on(incident: Incident) -> str:
    """Return the line that tells of an incident that was told before."""
    text = f"incident {incident.number} goes on: {incident.count} violations in steps {incident.first_step} to "
    text += f"{incident.last_step}, {ranges_text('position', incident.positions)} of {incident.group}"
    return f"{text}: {' + '.join(incident.reasons)}. Likely: {incident.cause}."


def requests_text(names: Sequence[str], *, count: int | None = None, most: int = 4) -> str:
    """Return "request a", "requests a, b", `NOBODY` where there is none; `count` of them, some without a name."""
    if not names:
        return NOBODY
    if len(names) == 1:
        return names[0] if names[0].startswith("row ") else f"request {printable(names[0])}"
    count = max(len(names), count or 0)
    more = f" and {count - min(len(names), most)} more" if count > most else ""
    return f"requests {', '.join(map(printable, names[:most]))}{more}"


def _sentence(opened: _Open, positions: Ranges, slots: Ranges, followers: Ranges) -> str:
    first = opened.first
    writing = is_write(opened.leading.first)
    names = opened.requests
    verb = "write" if writing else "read"
    text = f"incident {opened.number}: step {opened.first_step} {' + '.join(t.name for t in sorted(opened.tags))}: "
    if Reason.BATCH in opened.reasons:
        text += f"{requests_text(names, count=opened.num_requests)} {'is' if len(names) < 2 else 'are'}"
        text += f" given to the model: {' + '.join(reason_names(opened.reasons))}"
        text += f" ({opened.count} violations)." if opened.count > 1 else "."
        return f"{text}{details(vars(first), writing)} Likely: {opened.cause}."
    text += f"{requests_text(names, count=opened.num_requests)} {verb}{'s' if len(names) < 2 else ''} "
    text += f"{ranges_text('position', positions)} in "
    text += f"{ranges_text('slot', slots)} of {opened.group}: {' + '.join(reason_names(opened.reasons))}"
    text += f" ({opened.count} violations)." if opened.count > 1 else "."
    if followers:
        text += f" Behind it the chain breaks at {ranges_text('position', followers)}."
    told = details(vars(first), writing)
    if len(opened.positions) > 1 and told:
        text += f" At position {first.position}:"
    return f"{text}{told} Likely: {opened.cause}."
