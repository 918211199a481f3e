"""Audits: all bytes of a request held against their seals, before its first forward and behind its last."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kv_canary.errors import must_be
from kv_canary.observers import RequestVerdict
from kv_canary.runtime.composition import BatchRequests
from kv_canary.runtime.context import CanaryContext
from kv_canary.runtime.host import HostWords, on_device
from kv_canary.runtime.pools import BufferGroup, KvPool
from kv_canary.runtime.seals import LIST_COUNTS, MOST_LISTS, SEAL_COUNTS, ListedSlots
from kv_canary.runtime.summary import AuditFacts

# A request that has ended: what verdicts call it, and by group int64 slots.
Ended = tuple[str, Mapping[str, torch.Tensor]]

# Requests that have ended and whose verdicts are kept until they are asked for, at most; and launches whose counts are
# under way: the oldest are waited for then.
_MOST_UNDER_WAY = 1024
# Arrivals behind one step whose slots are marked; what is marked no more is looked at again.
_MOST_CAME = 1024


class Audits:
    """Holds requests against the seals of their slots.

    All on the stream of the forwards, between them: a seal that is read while the model writes is a false alarm. What
    is found is reported with the findings of the next step.

    Args:
        context: of the canary.
    """

    def __init__(self, context: CanaryContext) -> None:
        self._context = context
        sealed = [g for g in context.groups if g.pool.seals is not None]
        self.admits, self.completes = (
            bool(sealed) and asked for asked in (context.config.admission, context.config.completion)
        )
        # Of each group: whose each row was when its prefix was looked at.
        self._owners = {g.name: np.zeros(context.limits.max_rows, np.int64) for g in sealed}
        self._groups = {g.name: g for g in context.groups}
        self._layers = {g.name: _layers(g.pool) for g in sealed}
        self._listed = ListedSlots(context)
        # What is counted of requests that come, and of those that end, since the beginning; of these, also by their
        # places among those that have ended at a time.
        self._admitted, self._ended = (
            torch.zeros(SEAL_COUNTS, dtype=torch.int64, device=context.device) for _ in range(2)
        )
        self._counts = torch.zeros(MOST_LISTS, LIST_COUNTS, dtype=torch.int64, device=context.device)
        self._seen = HostWords(SEAL_COUNTS, context.device)
        # Of each pool: the slots that KV has come to behind the step of this number, and has been held against its
        # seals, all of them marked.
        self._came: dict[KvPool, tuple[int, list[torch.Tensor]]] = {}
        self._marks: dict[KvPool, torch.Tensor] = {}
        self._under_way: deque[_Completion] = deque()
        # Verdicts that have arrived and that nobody has asked for yet; of too many the newest.
        self._arrived: deque[RequestVerdict] = deque(maxlen=_MOST_UNDER_WAY)
        self._spare: list[_Counts] = []
        # As it was before the oldest of those that are under way.
        self._counted = np.zeros((MOST_LISTS, LIST_COUNTS), np.int64)
        self._completed = self._verified = self._unsealed = 0

    def admit(self, groups: Sequence[BufferGroup], requests: BatchRequests, tables: Mapping[str, torch.Tensor]) -> None:
        """Hold the cached prefixes of requests that come new to a forward against their seals.

        Args:
            groups: of the forward.
            requests: of the forward.
            tables: of the groups, by name.
        """
        rows, owners, there = requests.rows, requests.owners, requests.there
        table_rows = rows if requests.table_rows is None else requests.table_rows
        verified = set[KvPool]()
        # What a group without a window reads of a pool is all that another reads of it.
        for group in sorted(groups, key=lambda g: g.window > 0):
            known = self._owners.get(group.name)
            if known is None or not (new := known[rows] != owners).any():
                continue
            known[rows] = owners
            which = (new & (there > 0)).nonzero()[0].tolist()
            if which and group.pool not in verified:
                verified.add(group.pool)
                spans = [(int(table_rows[i]), int(there[i])) for i in which]
                slots, count = self._without_what_came(group.pool, slots_of(group, tables[group.name], spans))
                self._listed.verify(group, slots, checked=self._admitted, count=count, seen=self._seen)
        if self._came:
            for pool in {group.pool for group in groups}:
                self._forget_what_came(pool)

    def _without_what_came(
        self, pool: KvPool, parts: Sequence[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor | None]:
        """Return slots but for those that KV has come to just now, and how many these are, int64 [1]; None: all."""
        step, _ = self._came.get(pool, (-1, []))
        # Behind a later step, whoever has written there has done so since they were looked at.
        if step < self._context.step - 1:
            return parts, None
        marks = self._marks[pool]
        named = (parts[0] if len(parts) == 1 else torch.cat(list(parts))).to(torch.int64)
        is_left = ~marks[pool.inside(named)]
        # To the front: how many there are the device alone knows, and who is left out goes where nobody looks.
        ends = is_left.cumsum(0)
        left = torch.zeros(len(named) + 1, dtype=torch.int64, device=named.device)
        left.scatter_(0, torch.where(is_left, ends - 1, len(named)), named)
        return (left[:-1],), ends[-1:]

    def _forget_what_came(self, pool: KvPool) -> None:
        _, slots = self._came.pop(pool, (-1, []))
        for its in slots:
            self._marks[pool].index_fill_(0, its, 0)

    def _note_what_came(self, pool: KvPool, slots: torch.Tensor) -> None:
        """Mark int64 slots that have been looked at as they came: who reads them at once need not look again."""
        step, parts = self._came.get(pool, (-1, []))
        if step != self._context.step or len(parts) >= _MOST_CAME:
            self._forget_what_came(pool)
        if pool not in self._marks:
            self._marks[pool] = torch.zeros(len(pool.records), dtype=torch.bool, device=self._context.device)
        slots = pool.inside(slots)
        self._came.setdefault(pool, (self._context.step, []))[1].append(slots)
        self._marks[pool].index_fill_(0, slots, 1)

    def complete(self, ended: Sequence[Ended]) -> None:
        """Hold the slots of requests that have ended against their seals; the verdicts come by `poll`.

        Args:
            ended: the requests, before anybody else is given their slots.

        Raises:
            ValueError: there is no such group.
        """
        for _, slots in ended:
            for name in slots:
                if name not in self._groups:
                    groups = f"of the groups {', '.join(self._groups)}"
                    raise ValueError(must_be("complete", "slots", groups, repr(name)))
        for those in self._at_once(ended):
            self._complete(those)

    def _at_once(self, ended: Sequence[Ended]) -> Iterator[Sequence[Ended]]:
        """Yield the requests, as many as one launch for each group takes at a time."""
        first, counts = 0, dict[str, int]()
        for number, (_, slots) in enumerate(ended):
            for name, its in slots.items():
                counts[name] = counts.get(name, 0) + len(its)
            is_full = number - first == MOST_LISTS or max(counts.values(), default=0) > self._listed.room
            if is_full and number > first:
                yield ended[first:number]
                first, counts = number, {name: len(its) for name, its in slots.items()}
        if first < len(ended):
            yield ended[first:]

    def _complete(self, ended: Sequence[Ended]) -> None:
        """Hold the slots of requests that have ended against their seals, by one launch for each group."""
        if len(self._under_way) > _MOST_UNDER_WAY:
            # Requests end, and no step begins, which would take what has arrived.
            self._arrived.extend(self._poll(wait=False))
        layers, is_whole = [0] * len(ended), False
        try:
            for name, deep in self._layers.items():
                found = [slots.get(name) for _, slots in ended]
                lengths = [0 if its is None else len(its) for its in found]
                layers = [max(most, deep) if length else most for most, length in zip(layers, lengths, strict=True)]
                self._listed.verify_lists(
                    self._groups[name],
                    self._sent([its for its in found if its is not None and len(its)]),
                    list(accumulate(lengths)),
                    checked=self._ended,
                    counts=self._counts,
                )
            is_whole = True
        finally:
            counts = self._spare.pop() if self._spare else _Counts(self._context.device)
            counts.bring(self._counts)
            names = [name for name, _ in ended]
            self._under_way.append(_Completion(names, self._context.step, layers, counts, is_whole))

    def _sent(self, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return int64 slots on the device; those that all come from the host by one copy."""
        if len(parts) > 1 and all(its.device.type == "cpu" for its in parts):
            parts = (torch.cat(list(parts)),)
        return [on_device(its, self._context.device).to(torch.int64) for its in parts]

    @property
    def is_idle(self) -> bool:
        """Whether no verdict is under way, or waits to be asked for."""
        return not (self._under_way or self._arrived)

    def poll(self, *, wait: bool = False) -> list[RequestVerdict]:
        """Return the verdicts that have arrived; with `wait`, all."""
        found = [*self._arrived, *self._poll(wait=wait)]
        self._arrived.clear()
        return found

    def _poll(self, *, wait: bool) -> list[RequestVerdict]:
        """Take the verdicts that have arrived from those under way, of which there are no more than so many then."""
        found = []
        while self._under_way:
            completion = self._under_way[0]
            wait_for_it = wait or len(self._under_way) > _MOST_UNDER_WAY
            counted = completion.counts.arrived(wait=wait_for_it)
            if counted is None:
                break
            self._under_way.popleft()
            self._spare.append(completion.counts)
            # One after the other, on one stream: what has been added is theirs.
            added, self._counted = (counted - self._counted).tolist(), counted
            if not completion.is_whole:
                continue
            each = zip(completion.request_ids, completion.layers, added, strict=False)
            for name, layers, (slots, unsealed, damaged) in each:
                self._completed += 1
                self._verified += slots
                self._unsealed += unsealed
                found.append(
                    RequestVerdict(
                        request_id=name,
                        step=completion.step,
                        slots=slots,
                        layers=layers,
                        unsealed=unsealed,
                        damaged=damaged,
                    )
                )
        return found

    @property
    def facts(self) -> AuditFacts | None:
        """What audits have done, as of some steps ago; None where there are none."""
        if not (self.admits or self.completes):
            return None
        _, admitted, unsealed, _ = self._seen.host.tolist()
        return AuditFacts(
            admitted=admitted, completed=self._completed, verified=self._verified, unsealed=unsealed + self._unsealed
        )

    def arrived(self, pool: KvPool, slots: torch.Tensor) -> None:
        """Hold int64 `slots` of `pool`, whose bytes come from elsewhere with their seals, against these."""
        group = next((g for g in self._context.groups if g.pool is pool), None)
        if self.admits and group is not None and len(slots):
            slots = on_device(slots, self._context.device)
            self._listed.verify(group, (slots,), checked=self._admitted, seen=self._seen)
            self._note_what_came(pool, slots)

    def forget_row(self, row: int) -> None:
        """Take in that the request of a row has given its slots back: whoever is there next comes new."""
        for owners in self._owners.values():
            owners[row] = 0

    def forget(self) -> None:
        """Take in that the engine emptied its cache: every request comes new."""
        for owners in self._owners.values():
            owners[:] = 0
        for pool in list(self._came):
            self._forget_what_came(pool)

    def forget_graphs(self) -> None:
        """Destroy the graphs that launches are replayed from."""
        self._listed.forget_graphs()


def _layers(pool: KvPool) -> int:
    """Return how many layers' bytes a pool has."""
    return max((len(source.layers) for source in (pool.k_source, pool.v_source) if source is not None), default=0)


def slots_of(group: BufferGroup, table: torch.Tensor, spans: Sequence[tuple[int, int]]) -> Sequence[torch.Tensor]:
    """Return the slots of the last positions that requests may still read, as tables name them now, in pieces.

    Slots behind a request's last one may be among them, of the page that it lies in; 0 or less: there is none.

    Args:
        group: whose table it is.
        table: int32 [rows, pages].
        spans: of each request, its row in the table and how many positions it has.
    """
    page = group.page_size
    parts = [
        table[row, (max(0, count - group.window) if group.window else 0) // page : -(-count // page)]
        for row, count in spans
    ]
    if page == 1 and group.lut is None:
        return parts
    named = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(torch.int64)
    if page > 1:
        inside = torch.arange(page, device=named.device)
        named = torch.where(named[:, None] < 0, -1, named[:, None] * page + inside).view(-1)
    if group.lut is not None:
        inside_lut = (named >= 0) & (named < len(group.lut))
        named = torch.where(inside_lut, group.lut[torch.where(inside_lut, named, 0)], 0)
    return (named,)


class _Completion(NamedTuple):
    """Requests that have ended, and whose verdicts are under way."""

    request_ids: Sequence[str]
    step: int
    # Of each, how many layers' bytes were looked at.
    layers: Sequence[int]
    counts: _Counts
    # False: some of it was not looked at, so that nothing is said of them.
    is_whole: bool


class _Counts:
    """What `verify_seals` had counted when requests had been looked at, on its way to the host."""

    def __init__(self, device: torch.device) -> None:
        self._here = HostWords(MOST_LISTS * LIST_COUNTS, device)
        self._arrived = torch.Event(device) if device.type == "cuda" else None

    def bring(self, there: torch.Tensor) -> None:
        """Copy int64 `there` [lists, counts] to the host, without waiting for it."""
        self._here.bring(there.view(-1))
        if self._arrived is not None:
            self._arrived.record()

    def arrived(self, *, wait: bool) -> npt.NDArray[np.int64] | None:
        """Return what was brought; None: it has not arrived, and is not waited for."""
        if self._arrived is not None:
            if wait:
                self._arrived.synchronize()
            elif not self._arrived.query():
                return None
        # A copy: the memory is another's next.
        return self._here.host.numpy().reshape(MOST_LISTS, LIST_COUNTS).copy()
