"""Rows and owners for engines that have none: a row per request in flight, a serial number per request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Set
from typing import Protocol

from kv_canary.constants import OWNER_MASK
from kv_canary.errors import must_be, short_name

# Names of this many past requests are kept for the reports.
REMEMBERED_OWNERS = 65536


class OwnerNames(Protocol):
    """Knows whose an owner number is."""

    def name(self, owner: int) -> str | None:
        """Return the request that `owner` was given to, or None if that is not known."""


class OwnerNumbers:
    """Gives out owner numbers and remembers whose they were.

    Records hold the low 24 bits of a number. Numbers count on beyond that, and those whose low bits are 0, which stands
    for nobody, or those of a number still in use, are left out: a request may outlive millions of others.
    """

    def __init__(self) -> None:
        self._last = 0
        # By low bits: the number in use that has them, and whose the last number with them was.
        self._in_use: dict[int, int] = {}
        self._names: OrderedDict[int, str] = OrderedDict()

    def new(self, name: str) -> int:
        """Return a number for a request of this name, which is in use from now on."""
        while True:
            self._last += 1
            low = self._last & OWNER_MASK
            if low and low not in self._in_use:
                break
        self._in_use[low] = self._last
        self._names.pop(low, None)
        self._names[low] = short_name(name)
        if len(self._names) > REMEMBERED_OWNERS:
            self._names.popitem(last=False)
        return self._last

    def release(self, number: int) -> None:
        """Take in that a number is in use no more."""
        if self._in_use.get(number & OWNER_MASK) == number:
            del self._in_use[number & OWNER_MASK]

    def name(self, owner: int) -> str | None:
        """Return the request that a number, or its low bits, were given to last; None if that is forgotten."""
        return self._names.get(owner & OWNER_MASK)


class RowTable:
    """Gives each request a row of the canary's tables, and an owner number for the records it writes.

    Rows are few: where none is free, the request longest unseen loses its row (its tail is then computed anew when it
    returns). An owner number stays with a request until `release`. Requests are told apart by the engine's ids, which
    need not be strings; reports call them by the ids' text.

    Args:
        num_rows: rows of the tables; row 0 is padding and never given away.
    """

    def __init__(self, num_rows: int) -> None:
        if num_rows < 2:
            raise ValueError(must_be("RowTable", "num_rows", "at least 2", str(num_rows)))
        self.num_rows = num_rows
        self._free = list(range(num_rows - 1, 0, -1))
        self._rows: OrderedDict[Hashable, int] = OrderedDict()
        self._owners: dict[Hashable, int] = {}
        self._numbers = OwnerNumbers()

    def row(self, request_id: Hashable, *, keep: Set[Hashable] = frozenset()) -> int:
        """Return the request's row; a row that it takes from another is never one of a request in `keep`."""
        if request_id in self._rows:
            self._rows.move_to_end(request_id)
            return self._rows[request_id]
        if not self._free:
            victim = next((r for r in self._rows if r not in keep), None)
            if victim is None:
                raise RuntimeError(f"kv-canary: RowTable: requests of one step must be at most {self.num_rows - 1}")
            self._free.append(self._rows.pop(victim))
        self._rows[request_id] = row = self._free.pop()
        return row

    def owner(self, request_id: Hashable) -> int:
        """Return the request's owner number, which is never 0."""
        if request_id not in self._owners:
            self._owners[request_id] = self._numbers.new(str(request_id))
        return self._owners[request_id]

    def release(self, request_id: Hashable) -> None:
        """Forget the request: its row is free, and it gets a new owner number if it comes again."""
        owner = self._owners.pop(request_id, None)
        if owner is not None:
            self._numbers.release(owner)
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row)

    def release_all(self) -> None:
        """Forget every request."""
        for request_id in [*self._owners, *self._rows]:
            self.release(request_id)

    def name(self, owner: int) -> str | None:
        """Return the request that `owner` was given to, or None if that is forgotten."""
        return self._numbers.name(owner)
