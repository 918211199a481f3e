"""Rows and owners for engines that have none: a row per request in flight, a serial number per request."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from kv_canary.constants import OWNER_MASK
from kv_canary.errors import must_be

# Names of this many past requests are kept for the reports.
REMEMBERED_OWNERS = 65536


class OwnerNames(Protocol):
    """Knows whose an owner number is."""

    def name(self, owner: int) -> str | None:
        """Return the request that `owner` was given to, or None if that is not known."""


class RowTable:
    """Gives each request a row of the canary's tables, and an owner number for the records it writes.

    Rows are few: where none is free, the request longest unseen loses its row (its tail is then computed anew when it
    returns). An owner number stays with a request until `release`.

    Args:
        num_rows: rows of the tables; row 0 is padding and never given away.
    """

    def __init__(self, num_rows: int) -> None:
        if num_rows < 2:
            raise ValueError(must_be("RowTable", "num_rows", "at least 2", str(num_rows)))
        self.num_rows = num_rows
        self._free = list(range(num_rows - 1, 0, -1))
        self._rows: OrderedDict[str, int] = OrderedDict()
        self._owners: dict[str, int] = {}
        self._names: OrderedDict[int, str] = OrderedDict()
        self._last_owner = 0

    def row(self, request_id: str, *, keep: frozenset[str] | set[str] = frozenset()) -> int:
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

    def owner(self, request_id: str) -> int:
        """Return the request's owner number, which is never 0."""
        if request_id not in self._owners:
            self._last_owner = self._last_owner % OWNER_MASK + 1
            self._owners[request_id] = self._last_owner
            self._names[self._last_owner] = request_id
            if len(self._names) > REMEMBERED_OWNERS:
                self._names.popitem(last=False)
        return self._owners[request_id]

    def release(self, request_id: str) -> None:
        """Forget the request: its row is free, and it gets a new owner number if it comes again."""
        self._owners.pop(request_id, None)
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row)

    def release_all(self) -> None:
        """Forget every request."""
        for request_id in [*self._owners, *self._rows]:
            self.release(request_id)

    def name(self, owner: int) -> str | None:
        """Return the request that `owner` was given to, or None if that is forgotten."""
        return self._names.get(owner)
