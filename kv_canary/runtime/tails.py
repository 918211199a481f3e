"""The chain of each row's prefix: how far it has come, what brings it on, and where it lies on the device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from kv_canary.constants import ANCHOR, MASK64, to_signed
from kv_canary.errors import must_be
from kv_canary.hashing import mix
from kv_canary.runtime.composition import BatchRequests, Int64s

# Requests that are gone through one by one.
FEW = 8
_NOTHING = np.zeros(0, np.int64)


class Progress:
    """How far each row has come: its request's owner, the identity that its chain starts from, and its tokens in.

    Attributes:
        at: requests whose rows are at their prefixes, where that is not noted row by row yet.
    """

    def __init__(self, max_rows: int) -> None:
        self._owners, self._identities, self._lengths = (np.zeros(max_rows, np.int64) for _ in range(3))
        self._row_of: dict[int, int] = {}
        # The number of a composition all of whose requests have their rows; 0: it is not known of any.
        self._whole = 0
        self.at: BatchRequests | None = None

    def _settle(self) -> None:
        """Note how far the rows have come of which that is known."""
        at, self.at = self.at, None
        if at is not None:
            self._lengths[at.rows] = at.prefix

    def behind(self, requests: BatchRequests) -> tuple[Int64s, Int64s]:
        """Return which requests' rows are not at their prefixes, and the lengths to go on from."""
        self._settle()
        if len(requests) <= FEW:
            return self._few_behind(requests)
        rows, prefix, composition = requests.rows, requests.prefix, requests.composition
        lengths = self._lengths[rows]
        if composition.number != self._whole:
            goes_on = self._owners[rows] == requests.owners
            goes_on &= self._identities[rows] == composition.identities
            if not goes_on.all():
                which = (~goes_on | (lengths != prefix)).nonzero()[0]
                return which, np.where(goes_on & (lengths <= prefix), lengths, 0)[which]
            self._whole = composition.number
        which = (lengths != prefix).nonzero()[0]
        starts = lengths[which]
        starts[starts > prefix[which]] = 0
        return which, starts

    def _few_behind(self, requests: BatchRequests) -> tuple[Int64s, Int64s]:
        which, starts, composition = list[int](), list[int](), requests.composition
        columns = (requests.rows, requests.owners, composition.identities, requests.prefix)
        for i, (row, *who, prefix) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            goes_on = [self._owners[row], self._identities[row]] == who
            length = int(self._lengths[row])
            if not goes_on or length != prefix:
                which.append(i)
                starts.append(length if goes_on and length <= prefix else 0)
        return np.array(which, np.int64), np.array(starts, np.int64)

    def one_behind(self, requests: BatchRequests) -> Int64s | None:
        """Return the lengths of the requests' rows where each is one token behind its prefix; None: not all are."""
        if self.at is not None and requests.previous is self.at:
            return self.at.prefix
        self._settle()
        rows, composition = requests.rows, requests.composition
        if composition.number != self._whole:
            same = self._owners[rows] == requests.owners
            same &= self._identities[rows] == composition.identities
            if not same.all():
                return None
            self._whole = composition.number
        lengths = self._lengths[rows]
        return lengths if np.logical_and.reduce(lengths + 1 == requests.prefix) else None

    def forget(self, rows: Int64s) -> None:
        """Let `rows` start anew."""
        self._settle()
        self._whole = 0
        for values in (self._owners, self._identities, self._lengths):
            values[rows] = 0

    def rows_of(self, owner: int) -> Int64s:
        """Return the row of a request, if it has one."""
        return np.array([self._row_of[owner]] if owner in self._row_of else [], np.int64)

    def lengths(self, rows: Int64s) -> Int64s:
        """Return how many tokens of each of `rows` are in."""
        self._settle()
        return self._lengths[rows]

    def is_at(self, row: int, length: int) -> bool:
        """Whether so many tokens of a row are in."""
        self._settle()
        return bool(self._lengths[row] == length)

    def went_on(self, requests: BatchRequests) -> None:
        """Note that the rows of the requests, of which `one_behind` knew, are at their prefixes."""
        if self.at is not requests.previous:
            self._settle()
        self.at = requests

    def went_ahead(self, rows: Int64s | list[int], lengths: Int64s | list[int]) -> None:
        """Note that rows have come further than their requests' prefixes."""
        self._settle()
        self._lengths[rows] = lengths

    def advanced(self, requests: BatchRequests, which: Int64s) -> None:
        """Note that the rows of these requests are at their prefixes."""
        self._settle()
        rows, owners = requests.rows[which], requests.owners[which]
        if requests.composition.number == self._whole:
            self._lengths[rows] = requests.prefix[which]
            return
        self._whole = 0
        for row, owner in zip(*self._changed_hands(rows, owners), strict=True):
            self._row_of.pop(int(self._owners[row]), None)
            # A request that has moved leaves nothing behind that it could go on from when it comes back.
            self.forget(np.array([self._row_of.get(owner, 0)]))
            self._row_of[owner] = row
        self._owners[rows] = owners
        self._identities[rows] = requests.composition.identities[which]
        self._lengths[rows] = requests.prefix[which]

    def _changed_hands(self, rows: Int64s, owners: Int64s) -> tuple[list[int], list[int]]:
        changed = self._owners[rows] != owners
        return rows[changed].tolist(), owners[changed].tolist()


class Advance(NamedTuple):
    """What brings rows further: the lists, on the host, of a launch of `chain_tails` that has not been made yet."""

    flat: Int64s
    offsets: Int64s
    rows: Int64s
    starts: Int64s


class Tails:
    """The chain of each row's prefix, computed from the requests' own tokens.

    Args:
        max_rows: rows, row 0 (padding) included.
        offset: how many tokens later than its position the token of a slot stands.
        device: where the chains live.
    """

    def __init__(self, *, max_rows: int, offset: int, device: torch.device) -> None:
        self.offset = offset
        self.chains = torch.full((max_rows,), ANCHOR, dtype=torch.int64, device=device)
        # What forwards inside a step advance, over tokens that may yet be rejected.
        self.scratch = self.chains.clone()
        self.progress = Progress(max_rows)


def anchor_of(identity: int) -> int:
    """Return the chain that the first token of a request with this identity word follows; 0 is none."""
    return to_signed(ANCHOR ^ mix(identity & MASK64)) if identity else ANCHOR


@functools.lru_cache(maxsize=256)
def ones(count: int) -> Int64s:
    """Return the offsets of segments of one token each."""
    offsets = np.arange(count + 1)
    offsets.setflags(write=False)
    return offsets


def segments_of(requests: BatchRequests, which: Int64s, starts: Int64s, *, offset: int = 0, more: int = 0) -> Advance:
    """Return what brings rows up to their prefixes, and `more` tokens further.

    Raises:
        ValueError: a request gives fewer tokens than it was asked for.
    """
    if len(which) <= FEW:
        spans = [
            (i, start + offset, int(requests.prefix[i]) + offset + more)
            for i, start in zip(which.tolist(), starts.tolist(), strict=True)
        ]
        return Advance(*flat_of(requests, spans), requests.rows[which], starts)
    rows, firsts, lasts = requests.rows[which], starts + offset, requests.prefix[which] + offset + more
    counts = lasts - firsts
    if len(which) == len(requests) and (counts == 1).all():
        # As most steps are: the list is the same, and all have grown by one token.
        newest = requests.newest(which, lasts)
        if newest is not None:
            return Advance(newest, ones(len(which)), rows, starts)
    offsets = np.zeros(len(which) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    flat = np.empty(offsets[-1], np.int64)
    # One by one only those are asked for that the engine cannot give in one pass.
    left = counts > 0
    if requests.recent is not None:
        covered = left & requests.recent.covers(which, firsts, lasts)
        if covered.any():
            flat[np.repeat(covered, counts)] = requests.recent.spans(which[covered], firsts[covered], counts[covered])
            left &= ~covered
    single = left & (counts == 1)
    newest = requests.newest(which[single], lasts[single]) if single.any() else None
    if newest is not None:
        flat[offsets[:-1][single]] = newest
        left &= ~single
    rest = left.nonzero()[0]
    for n, i in zip(rest.tolist(), which[rest].tolist(), strict=True):
        first, last = int(firsts[n]), int(lasts[n])
        flat[offsets[n] : offsets[n + 1]] = _words(requests, i, _own(requests, i, first, last))
    return Advance(flat, offsets, rows, starts)


def flat_of(requests: BatchRequests, spans: Sequence[tuple[int, int, int]]) -> tuple[Int64s, Int64s]:
    """Return the own tokens of some requests one behind the other, and the offsets of each.

    For a few: arrays cost more than loops there.

    Args:
        requests: of a forward.
        spans: the place of each of them among these, and its first token and the one behind its last.

    Raises:
        ValueError: a request gives fewer tokens than it was asked for.
    """
    texts, offsets = [], [0]
    for i, first, last in spans:
        texts.append(_words(requests, i, _own(requests, i, first, last)))
        offsets.append(offsets[-1] + last - first)
    flat = texts[0] if len(texts) == 1 else np.concatenate([*texts, _NOTHING])
    return flat, np.array(offsets, np.int64)


def _words(requests: BatchRequests, i: int, tokens: Sequence[int]) -> Int64s:
    """Return own tokens of the i-th request as words.

    Raises:
        ValueError: one is too large.
        TypeError: they are no integers.
    """
    try:
        words: Int64s = np.array(tokens)
        if words.dtype.kind == "f" and len(words):
            # They would be cut to integers.
            raise TypeError(must_be("forward", f"tokens of {requests[i].request_id}", "integers", str(words.dtype)))
        return words if words.dtype == np.int64 else np.array(tokens, np.int64)
    except OverflowError as error:
        expected = "numbers of 64 bits"
        got = str(max(tokens, key=abs))
        raise ValueError(must_be("forward", f"tokens of {requests[i].request_id}", expected, got)) from error


def _own(requests: BatchRequests, i: int, first: int, last: int) -> Sequence[int]:
    """Return own tokens [first, last) of the i-th request."""
    tokens = requests.tokens(i, first, last)
    if len(tokens) != last - first:
        raise ValueError(
            f"kv-canary: request {requests[i].request_id}: tokens({first}, {last}) must be "
            f"{last - first} tokens, got {len(tokens)}"
        )
    return tokens
