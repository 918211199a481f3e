"""The requests of a forward in arrays: who they are, which seldom changes, and how long they are, which always does."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, overload

import numpy as np
import numpy.typing as npt

from kv_canary.constants import OWNER_MASK
from kv_canary.errors import must_be
from kv_canary.output import logger

Int64s = npt.NDArray[np.int64]
_MASK = (1 << 64) - 1
_numbers = itertools.count(1)


@functools.lru_cache(maxsize=256)
def one_each(count: int) -> Int64s:
    """Return int64 [count] ones: the new tokens of a decode step's requests. To be read only."""
    ones = np.ones(count, np.int64)
    ones.setflags(write=False)
    return ones


@dataclass(frozen=True, kw_only=True)
class ForwardRequest:
    """One request of a forward.

    Args:
        request_id: how reports call it.
        row: its row with the canary, in [1, max_rows), for as long as it lives.
        owner: its serial number, stamped on the records it writes.
        prefix_len: tokens it has in the cache before this forward, those `pending` included.
        extend_len: tokens this forward writes for it.
        tokens: returns the request's OWN tokens [start, end), from its prompt and output, never from the engine's
            input buffers: they are what the cache is held against.
        pending: how many of the prefix's last tokens another request of this very forward produces. They are verified
            behind the model only, where they are first there to be read; never with a captured graph.
        identity: a 64-bit word of what else its KV depends on (adapter, image, cache salt, weights), from a stable
            hash; 0 for nothing. The same tokens under another identity are another chain.
        table_row: its row in the tables of this forward, which may be any; None: `row`.
        discarded: says, once the forward is over, whether the engine has thrown this request's result away; what such
            a row has found is counted and not reported.
    """

    request_id: str
    row: int
    owner: int
    prefix_len: int
    extend_len: int
    tokens: Callable[[int, int], Sequence[int]]
    pending: int = 0
    identity: int = 0
    table_row: int | None = None
    discarded: Callable[[], bool] | None = None

    @property
    def row_in_tables(self) -> int:
        """Its row in the tables of this forward."""
        return self.row if self.table_row is None else self.table_row


class Newest(NamedTuple):
    """The newest own tokens of requests, several of each, as a step of drafts has them at hand.

    Args:
        base: int64 [requests], the place in its text of the first column of each.
        first: int64 [requests], the place of its first token that is there: `base` or later.
        end: int64 [requests], the place behind its last.
        tokens: int64 [requests, most].
    """

    base: Int64s
    first: Int64s
    end: Int64s
    tokens: Int64s

    def covers(self, which: Int64s, firsts: Int64s, lasts: Int64s) -> npt.NDArray[np.bool_]:
        """Return of which of these requests all tokens [first, last) are there."""
        covers: npt.NDArray[np.bool_] = (firsts >= self.first[which]) & (lasts <= self.end[which])
        return covers

    def spans(self, which: Int64s, firsts: Int64s, counts: Int64s) -> Int64s:
        """Return so many tokens of each from its first on, one behind the other; all of them have to be there."""
        before = np.add.accumulate(counts) - counts
        places = np.arange(int(np.add.reduce(counts))) - np.repeat(before, counts)
        at = np.repeat(firsts - self.base[which], counts) + places
        flat: Int64s = self.tokens[np.repeat(which, counts), at]
        return flat


class RequestSource(Protocol):
    """Answers of an engine about its own request objects, which the canary keeps and never looks into."""

    def name(self, member: Any) -> str:
        """Return how reports call a request."""

    def tokens(self, member: Any, start: int, end: int) -> Sequence[int]:
        """Return a request's own tokens [start, end), from its prompt and output."""

    def newest(self, members: Sequence[Any], ends: Int64s) -> Int64s | None:
        """Return the own token before each of these ends, all in one pass; None: they have to be asked for one by one.

        Called at every decode step: what it costs for each request is what the canary costs for each request.
        """

    def discarded(self, member: Any, length: int) -> bool:
        """Whether the engine has thrown away the result of a forward up to which a request had `length` tokens."""


class Composition:
    """Who takes part in a forward, in the order of its flat inputs; the same object for as long as the list is.

    Args:
        members: the engine's own request objects.
        rows: int64 [requests], with the canary, each in [1, max_rows).
        owners: int64 [requests], stamped on what they write.
        identities: uint64 or int64 [requests] of what else their KV depends on; None: nothing.
        source: answers for the members.
    """

    __slots__ = ("identities", "members", "number", "owners", "rows", "source")

    def __init__(
        self,
        members: Sequence[Any],
        *,
        rows: Int64s,
        owners: Int64s,
        source: RequestSource,
        identities: npt.NDArray[Any] | None = None,
    ) -> None:
        self.number = next(_numbers)
        self.members, self.source = tuple(members), source
        self.rows, self.owners = rows, owners
        self.identities = np.zeros(len(rows), np.int64) if identities is None else identities.view(np.int64)

    def __len__(self) -> int:
        return len(self.rows)


class BatchRequests(Sequence[ForwardRequest]):
    """The requests of one forward: who they are, and their lengths; a `ForwardRequest` is made where one is asked for.

    Args:
        composition: who they are.
        prefix: int64 [requests] tokens in the cache before the forward, those pending included.
        extend: int64 [requests] tokens that it writes.
        pending: int64 [requests]; None: none is. See `ForwardRequest`.
        table_rows: int64 [requests], of the tables of this forward; None: the rows.
        newest: int64 [requests] own token before each prefix, where the adapter has them at hand; None: it is asked.
        drafts: whether guesses are among the new tokens, which may yet be rejected: each is only sure to own its first.
        recent: several of the newest own tokens of each, where the adapter has them at hand; None: it is asked.

    Attributes:
        rows, owners: those of the composition.
        num_tokens: that the forward writes, of all requests together.
        num_cached: tokens of all prefixes together.
        longest: tokens of the longest prefix.
        ends: int64 [requests] tokens in the cache behind the forward.
        previous: the same requests a decode step ago, each with one token less; None: that is not known, or known no
            more, which it is not of those that are `previous` themselves.
    """

    # Made when they are first asked for, see `__getattr__`: most steps read them several times.
    num_tokens: int
    num_cached: int
    longest: int
    ends: Int64s
    prefix: Int64s

    __slots__ = (
        "_first",
        "composition",
        "drafts",
        "ends",
        "extend",
        "longest",
        "newest_of_all",
        "num_cached",
        "num_tokens",
        "owners",
        "pending",
        "prefix",
        "previous",
        "recent",
        "rows",
        "table_rows",
    )

    def __init__(
        self,
        composition: Composition,
        *,
        prefix: Int64s,
        extend: Int64s,
        pending: Int64s | None = None,
        newest: Int64s | None = None,
        table_rows: Int64s | None = None,
        drafts: bool = False,
        recent: Newest | None = None,
    ) -> None:
        self.drafts, self.recent = drafts, recent
        self.composition, self.prefix, self.extend, self.pending = composition, prefix, extend, pending
        self.table_rows = table_rows
        self.newest_of_all, self.rows, self.owners = newest, composition.rows, composition.owners
        self.previous: BatchRequests | None = None
        # The first of the decode steps that follow each other up to this one, and how many there are between.
        self._first: tuple[BatchRequests, int] | None = None

    def following(self, newest: Int64s) -> BatchRequests:
        """Return the same requests in the next decode step, one token longer each, in the same rows of the tables.

        Args:
            newest: int64 [requests] own token before each of their prefixes.

        Raises:
            ValueError: these do not write one token each.
        """
        count = len(self.rows)
        if self.num_tokens != count or self.pending is not None:
            raise ValueError("kv-canary: requests: following must be asked of a decode step, got another")
        following = BatchRequests(
            self.composition, prefix=self.ends, extend=self.extend, newest=newest, table_rows=self.table_rows
        )
        following.num_tokens, following.num_cached = count, self.num_cached + count
        following.longest, following.previous = self.longest + 1, self
        before, first = self.previous, self._first
        following._first = (self, 1) if first is None else (first[0], first[1] + 1)
        # Else each would keep all before it.
        self.previous = None
        if before is not None and before._first is not None and before.newest_of_all is not None:
            # Steps are remembered and seldom asked: the first of these tells what the others had.
            del before.prefix, before.ends
            before.newest_of_all = None
        return following

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            make = _MADE.get(name)
            if make is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            value = make(self)
            setattr(self, name, value)
            return value

    @classmethod
    def of(cls, requests: Sequence[ForwardRequest]) -> BatchRequests:
        """Return `requests` in arrays."""
        if isinstance(requests, BatchRequests):
            return requests
        columns = _columns(requests)
        rows, owners, prefix, extend, pending = columns[:5]
        composition = Composition(requests, rows=rows, owners=owners, identities=columns[5], source=_GIVEN)
        return cls(
            composition,
            prefix=prefix,
            extend=extend,
            pending=pending if pending.any() else None,
            table_rows=None if all(r.table_row is None for r in requests) else _rows_in_tables(requests),
        )

    @property
    def is_composed(self) -> bool:
        """Whether the engine composes its requests, and does not describe each of them at every forward."""
        return self.composition.source is not _GIVEN

    @property
    def there(self) -> Int64s:
        """int64 [requests] tokens in the cache before the forward that it does not write itself."""
        return self.prefix if self.pending is None else self.prefix - self.pending

    def tokens(self, i: int, start: int, end: int) -> Sequence[int]:
        """Return own tokens [start, end) of the i-th request."""
        return self.composition.source.tokens(self.composition.members[i], start, end)

    def newest(self, which: Int64s, ends: Int64s) -> Int64s | None:
        """Return the own token before each of `ends` of the requests number `which`; None: ask for them one by one."""
        members = self.composition.members
        if self.newest_of_all is not None and np.array_equal(ends, self.prefix[which]):
            return self.newest_of_all if len(which) == len(self.newest_of_all) else self.newest_of_all[which]
        if len(which) != len(members):
            members = tuple(members[i] for i in which.tolist())
        return self.composition.source.newest(members, ends)

    def find(self, row: int) -> ForwardRequest | None:
        """Return the request of a row, or None if it has none here."""
        found = np.flatnonzero(self.rows == row)
        return self[int(found[0])] if len(found) else None

    def find_owner(self, owner: int) -> ForwardRequest | None:
        """Return the request whose records are stamped with `owner`, the bits of it that they hold."""
        found = np.flatnonzero(self.owners & OWNER_MASK == owner)
        return self[int(found[0])] if len(found) else None

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, i: int) -> ForwardRequest: ...

    @overload
    def __getitem__(self, i: slice) -> Sequence[ForwardRequest]: ...

    def __getitem__(self, i: int | slice) -> ForwardRequest | Sequence[ForwardRequest]:
        if isinstance(i, slice):
            return [self[n] for n in range(*i.indices(len(self)))]
        member, source = self.composition.members[i], self.composition.source
        if source is _GIVEN:
            given: ForwardRequest = member
            return given
        prefix, extend = int(self.prefix[i]), int(self.extend[i])
        return ForwardRequest(
            request_id=_name(source, member, int(self.rows[i])),
            row=int(self.rows[i]),
            owner=int(self.owners[i]),
            prefix_len=prefix,
            extend_len=extend,
            tokens=lambda start, end: source.tokens(member, start, end),
            pending=0 if self.pending is None else int(self.pending[i]),
            identity=int(self.composition.identities[i]) & _MASK,
            table_row=None if self.table_rows is None else int(self.table_rows[i]),
            # Of drafts it is sure to own the first.
            discarded=lambda: source.discarded(member, prefix + (min(extend, 1) if self.drafts else extend)),
        )

    def __iter__(self) -> Iterator[ForwardRequest]:
        return (self[i] for i in range(len(self)))


def _prefix_of(requests: BatchRequests) -> Int64s:
    """Return the prefixes of a decode step that the first one before it tells."""
    if requests._first is None:
        raise AttributeError(f"{type(requests).__name__!r} object has no attribute 'prefix'")
    first, steps = requests._first
    prefix: Int64s = first.prefix + steps * first.extend
    return prefix


# What of requests is made when it is first asked for.
_MADE: Mapping[str, Callable[[BatchRequests], Any]] = {
    "num_tokens": lambda requests: int(np.add.reduce(requests.extend)),
    "num_cached": lambda requests: int(np.add.reduce(requests.prefix)),
    "longest": lambda requests: int(requests.prefix.max(initial=0)),
    "ends": lambda requests: requests.prefix + requests.extend,
    "prefix": _prefix_of,
}

# Kinds of sources whose failing has been told of.
_told: set[type] = set()


def _name(source: RequestSource, member: Any, row: int) -> str:
    """Return how reports call a request; by its row where the engine cannot say, so that what was found is told."""
    try:
        return source.name(member)
    except Exception as error:
        if type(source) not in _told:
            _told.add(type(source))
            # Of no canary in particular: one of them may redact.
            logger.failure(
                "kv-canary: %s.name failed; reports call such a request by its row",
                type(source).__name__,
                error=error,
                redacts=True,
            )
        return f"row {row}"


class _Given:
    """Answers for members that are `ForwardRequest`s themselves."""

    def name(self, member: ForwardRequest) -> str:
        return member.request_id

    def tokens(self, member: ForwardRequest, start: int, end: int) -> Sequence[int]:
        return member.tokens(start, end)

    def newest(self, members: Sequence[ForwardRequest], ends: Int64s) -> Int64s | None:
        return None

    def discarded(self, member: ForwardRequest, length: int) -> bool:
        return member.discarded is not None and member.discarded()


_GIVEN = _Given()


def _columns(requests: Iterable[ForwardRequest]) -> npt.NDArray[np.int64]:
    """Return int64 [6, requests]: rows, owners, prefixes, extends, pending, identities."""
    words = [(r.row, r.owner, r.prefix_len, r.extend_len, r.pending, _signed(r.identity)) for r in requests]
    try:
        return np.array(words, dtype=np.int64).reshape(-1, 6).T.copy()
    except OverflowError:
        _complain_of_words(requests)
        raise


def _complain_of_words(requests: Iterable[ForwardRequest]) -> None:
    """Raise ValueError for a number of a request that 64 bits do not hold, if there is one."""
    for request in requests:
        for name in ("row", "owner", "prefix_len", "extend_len", "pending", "table_row"):
            value = getattr(request, name)
            if value is not None and not -(1 << 63) <= value < 1 << 63:
                expected = "a number of 64 bits"
                raise ValueError(must_be("forward", f"{name} of {request.request_id}", expected, str(value)))


def _rows_in_tables(requests: Iterable[ForwardRequest]) -> Int64s:
    try:
        return np.array([r.row_in_tables for r in requests], np.int64)
    except OverflowError:
        _complain_of_words(requests)
        raise


def _signed(word: int) -> int:
    word &= _MASK
    return word - (1 << 64) if word >> 63 else word
