"""The steps that are remembered, so that what is found later can be told of the requests that it befell."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from kv_canary.constants import OWNER_MASK
from kv_canary.runtime.composition import BatchRequests, ForwardRequest
from kv_canary.runtime.host import on_device
from kv_canary.runtime.pools import BufferGroup

# Steps that are remembered.
REMEMBERED_STEPS = 64
# What is told of a step takes its place.
_NOTHING: Mapping[Any, Any] = MappingProxyType({})


class StepRecord:
    """A step, under way or remembered.

    Args:
        number: its number.
        forwards: the requests of each.
        statuses: numbers of the status words of its plans, with the names of their groups.
        launches: how many its forwards make, by tag.
        relied_on: cached positions that its forwards are about to read.
        broken: whether one of them was given up, so that its launches are not known.
        stride: how many steps a cached position waited for its turn at most, when it began.
        inner: by offset and row, how far inner forwards have brought the scratch tails.
        tables: of its forwards, by group; the engine's own, which change as it goes on.
    """

    __slots__ = ("broken", "forwards", "inner", "launches", "number", "relied_on", "statuses", "stride", "tables")

    def __init__(
        self,
        *,
        number: int,
        forwards: Iterable[BatchRequests] = (),
        statuses: Mapping[int, str] = _NOTHING,
        launches: Mapping[int, int] = _NOTHING,
        relied_on: int = 0,
        broken: bool = False,
        stride: int = 1,
        inner: Mapping[tuple[int, int], int] = _NOTHING,
        tables: Mapping[str, torch.Tensor] = _NOTHING,
    ) -> None:
        self.number, self.forwards = number, [*forwards]
        self.statuses, self.launches, self.relied_on = statuses, launches, relied_on
        self.broken, self.stride, self.inner, self.tables = broken, stride, inner, tables

    def request(self, row: int) -> ForwardRequest | None:
        """Return the request of a row, as the step's last forward had it."""
        return next((r for f in reversed(self.forwards) if (r := f.find(row)) is not None), None)

    @property
    def num_requests(self) -> int:
        """How many requests the step's forwards served."""
        if len(self.forwards) == 1:
            return len(self.forwards[0])
        return len({row for f in self.forwards for row in f.rows.tolist()})


class StepHistory:
    """The steps that are remembered, oldest first; the newest may be under way."""

    def __init__(self) -> None:
        self._steps: deque[StepRecord] = deque(maxlen=REMEMBERED_STEPS)

    def append(self, step: StepRecord) -> None:
        """Remember a step; the oldest is forgotten where there are too many."""
        self._steps.append(step)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self._steps)

    def __reversed__(self) -> Iterator[StepRecord]:
        return reversed(self._steps)

    @property
    def newest(self) -> StepRecord | None:
        """The newest step, or None before the first."""
        return self._steps[-1] if self._steps else None

    def find(self, number: int) -> StepRecord | None:
        """Return the step of this number, or None if it is forgotten."""
        for step in reversed(self._steps):
            if step.number == number:
                return step
        return None

    def relied_on(self, first: int, last: int) -> int:
        """Return how many cached positions the forwards of steps [first, last] were about to read, if remembered."""
        total = 0
        for step in reversed(self._steps):
            if step.number < first:
                break
            if step.number <= last:
                total += step.relied_on
        return total

    def request(self, number: int, row: int) -> ForwardRequest | None:
        """Return the request that ran in `row` at step `number`, or None if that is forgotten."""
        step = self.find(number)
        return None if step is None else step.request(row)

    def owned(self, owner: int) -> ForwardRequest | None:
        """Return the latest request whose records are stamped with `owner`, or None if it is forgotten."""
        forwards = (f for s in reversed(self._steps) for f in reversed(s.forwards))
        return next((r for f in forwards if (r := f.find_owner(owner)) is not None), None)

    def wrote(self, number: int, owner: int, position: int) -> bool | None:
        """Whether a forward of step `number` wrote this position of the request with `owner`; None: it is forgotten.

        What has a record of that step and was not written by its forwards was copied, loaded or taken in.
        """
        step = self.find(number)
        if step is None or step.broken:
            return None
        return _has_written(step, owner, position)

    def written(self, owner: int, position: int) -> int | None:
        """Return the latest step whose forwards wrote this position of the request with `owner`, if one is known."""
        steps = (s.number for s in reversed(self._steps) if not s.broken and _has_written(s, owner, position))
        return next(steps, None)

    def own(self, number: int, row: int, position: int, *, window: int) -> int | None:
        """Return the last step before one behind which a position in the cache was seen to be its request's own.

        Its forwards wrote it, or the step behind it verified all that the request had in the cache. None: no such step
        is remembered.

        Args:
            number, row: a step, and the row in which the request ran.
            position: of the request.
            window: how many positions are read; 0: all.
        """
        then = self.request(number, row)
        if then is None:
            return None
        for step in reversed(self._steps):
            if step.number >= number or step.broken:
                continue
            if _has_written(step, then.owner, position):
                return step.number
            seen = step.request(row) if step.stride == 1 else None
            if seen is None or seen.owner != then.owner:
                continue
            end = seen.prefix_len - seen.pending
            if (end - window if window else 0) <= position < end:
                return step.number - 1
        return None

    def latest(self, number: int, row: int) -> tuple[StepRecord, ForwardRequest] | None:
        """Return the latest step with the request that ran in `row` at step `number`, and how it ran there.

        Steps whose tables are not known are left out.
        """
        then = self.request(number, row)
        if then is None:
            return None
        for step in reversed(self._steps):
            request = step.request(row)
            if request is not None and request.owner == then.owner and step.tables:
                return step, request
        return None

    def readers(self, group: BufferGroup, slot: int, *, after: int, most: int) -> list[str]:
        """Return the names of requests whose rows name a slot, as tables are now, in remembered steps behind one.

        Waits for the device.

        Args:
            group: whose tables they are.
            slot: of its pool.
            after: a step's number.
            most: so many names at most, those of the newest steps first.
        """
        names: list[str] = []
        seen = set[int]()
        # Steps that are repeated do not say it again.
        tables = (step.tables[group.name] for step in reversed(self._steps) if group.name in step.tables)
        table = next(tables, None)
        for step in reversed(self._steps) if table is not None else ():
            if step.number <= after or len(names) >= most:
                break
            for forward in reversed(step.forwards):
                # Not those whose rows have others in them now, or were those of another batch.
                fresh = [i for i, row in enumerate(forward.rows.tolist()) if row not in seen]
                seen.update(forward.rows.tolist())
                is_gone = forward.table_rows is not None and step is not self._steps[-1]
                if table is not None and fresh and not is_gone:
                    names += [forward[i].request_id for i in _naming(group, table, forward, fresh, slot)]
        return list(dict.fromkeys(names))[:most]

    def arrived(self, number: int, row: int) -> int | None:
        """Return the first step of the request in `row`; None where it may have come before any that is remembered."""
        then = self.request(number, row)
        if then is None:
            return None
        came = next((s.number for s in self._steps if (r := s.request(row)) and r.owner == then.owner), None)
        return came if came != self._steps[0].number or came == 1 else None


def _has_written(step: StepRecord, owner: int, position: int) -> bool:
    """Whether a forward of a step wrote a position of the request whose records are stamped with `owner`."""
    for forward in step.forwards:
        for i in (forward.owners & OWNER_MASK == owner & OWNER_MASK).nonzero()[0].tolist():
            if 0 <= position - int(forward.prefix[i]) < int(forward.extend[i]):
                return True
    return False


def _naming(group: BufferGroup, table: torch.Tensor, forward: BatchRequests, which: list[int], slot: int) -> list[int]:
    """Return which of these requests' rows name a slot, up to where a forward has written; one look at the device."""
    device, longest = table.device, table.shape[1] * group.page_size
    rows = (forward.rows if forward.table_rows is None else forward.table_rows)[which]
    ends = on_device(torch.from_numpy(forward.ends[which]).clamp(max=longest), device)[:, None]
    positions = torch.arange(min(int(forward.ends[which].max()), longest), device=device)[None, :]
    named = group.slots_named(table, on_device(torch.from_numpy(rows), device)[:, None], positions)
    if group.lut is not None:
        inside = (named >= 0) & (named < len(group.lut))
        named = torch.where(inside, group.lut[torch.where(inside, named, 0)], 0)
    read = (positions < ends) & (positions >= ends - group.window if group.window else positions >= 0)
    found: list[int] = ((named == slot) & read).any(dim=1).nonzero().view(-1).tolist()
    return [which[n] for n in found]
