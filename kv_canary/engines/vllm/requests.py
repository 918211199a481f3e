"""vLLM's requests as its workers know them: a row, an owner and the own tokens of each.

Workers have no list of a request's tokens that is independent of the model's input buffers; here is one. It grows by
what was sampled, all requests of a step at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_canary.constants import to_signed
from kv_canary.identity import identity_word
from kv_canary.runtime.composition import Composition, Int64s
from kv_canary.runtime.rows import OwnerNumbers

_ROW, _OWNER, _IDENTITY = attrgetter("row"), attrgetter("owner"), attrgetter("identity")


class Member:
    """A request of a worker.

    Attributes:
        name: vLLM's `req_id`.
        row: with the canary; 0 where it has none, because it has ended or waits to be resumed.
        owner: its serial number.
        identity: int64 word of what else its KV depends on.
        text: int32 own tokens; while it has a row, they are there.
    """

    __slots__ = ("identity", "name", "owner", "row", "text")

    def __init__(self, name: str, *, owner: int) -> None:
        self.name, self.owner = name, owner
        self.row = self.identity = 0
        self.text = np.zeros(0, np.int32)


class Requests:
    """The requests that a worker knows of.

    Args:
        num_rows: rows with the canary, row 0 (padding) included.
        max_len: tokens of one request.
    """

    def __init__(self, *, num_rows: int, max_len: int) -> None:
        self.owners = OwnerNumbers()
        self._members: dict[str, Member] = {}
        self._free = list(range(num_rows - 1, 0, -1))
        # Memory that is never written is never there.
        self._texts = np.zeros((num_rows, max_len), np.int32)
        # Of each row: known tokens; tokens up to the end of its last image; whose it is, 0 for nobody's.
        self.lengths, self.shown, self._owner_of = (np.zeros(num_rows, np.int64) for _ in range(3))
        # The last list of requests, and what was made of it.
        self._names: list[str] = []
        self._composition: Composition | None = None
        # What was sampled and is not taken in yet: whose it is, and the lists of tokens.
        self._sampled: deque[tuple[Int64s, Int64s, Sequence[Sequence[int]]]] = deque()

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def __getitem__(self, name: str) -> Member:
        return self._members[name]

    def start(self, name: str, tokens: Sequence[int], *, identity: int) -> Member:
        """Give a request a row; one that is known already goes on in its own, with these tokens.

        Raises:
            RuntimeError: there are more requests than rows.
        """
        member = self._members.get(name)
        if member is None:
            member = self._members[name] = Member(name, owner=self.owners.new(name))
        member.identity = to_signed(identity)
        self._place(member, np.asarray(tokens, np.int32))
        return member

    def resume(self, name: str, tokens: Sequence[int] | None) -> Member:
        """Give a request that was put off a row again.

        Args:
            name: of the request.
            tokens: its own ones; None: those that it had.
        """
        member = self._members[name]
        self._place(member, member.text if tokens is None else np.asarray(tokens, np.int32))
        return member

    def pause(self, name: str) -> Member | None:
        """Take a request's row; it may be resumed. Return it, its row still in place, or None where it has none."""
        member = self._members.get(name)
        if member is None or not member.row:
            return None
        self._keep(member)
        return member

    def let_go(self, member: Member) -> None:
        """Give the row of a request back that was paused or has ended."""
        self._free.append(member.row)
        self._owner_of[member.row], member.row = 0, 0
        self._names = []

    def end(self, name: str) -> Member | None:
        """Forget a request. Return it, its row still in place, or None where it is not known."""
        member = self._members.pop(name, None)
        if member is not None:
            self.owners.release(member.owner)
            if member.row:
                self._keep(member)
        return member

    def owner_of(self, row: int) -> int:
        """Return the owner number of the request of a row; 0 for nobody's."""
        return int(self._owner_of[row])

    def compose(self, names: Sequence[str]) -> Composition:
        """Return the composition of a step's requests, the same one for as long as the list is the same.

        Raises:
            KeyError: one of them was never started.
        """
        if self._composition is None or names != self._names:
            members = list(map(self._members.__getitem__, names))
            count = len(members)
            self._names, self._composition = (
                list(names),
                Composition(
                    members,
                    rows=np.fromiter(map(_ROW, members), np.int64, count),
                    owners=np.fromiter(map(_OWNER, members), np.int64, count),
                    identities=np.fromiter(map(_IDENTITY, members), np.int64, count),
                    source=self,
                ),
            )
        return self._composition

    def sampled(self, composition: Composition, names: Sequence[str], tokens: Sequence[Sequence[int]]) -> None:
        """Take in, from any thread, what was sampled for requests; it counts from the next `take` on.

        Args:
            composition: of the step.
            names: whose tokens these are.
            tokens: of each, none to several.
        """
        rows, owners = composition.rows, composition.owners
        members = composition.members
        if len(names) != len(members) or any(m.name != name for m, name in zip(members, names, strict=True)):
            at = {m.name: i for i, m in enumerate(members)}
            which = np.array([at[name] for name in names if name in at], np.int64)
            tokens = [t for name, t in zip(names, tokens, strict=True) if name in at]
            rows, owners = rows[which], owners[which]
        self._sampled.append((rows, owners, tokens))

    def take(self) -> None:
        """Append what was sampled to the requests' own tokens."""
        while self._sampled:
            rows, owners, tokens = self._sampled.popleft()
            counts = np.fromiter(map(len, tokens), np.int64, len(tokens))
            flat = np.fromiter(chain.from_iterable(tokens), np.int32, int(counts.sum()))
            # Rows of requests that have ended may be others' by now.
            goes_on = self._owner_of[rows] == owners
            if not goes_on.all():
                flat = flat[np.repeat(goes_on, counts)]
                rows, counts = rows[goes_on], counts[goes_on]
            lengths, most = self.lengths[rows], self._texts.shape[1]
            within = np.arange(len(flat)) - np.repeat(counts.cumsum() - counts, counts)
            at = np.repeat(lengths, counts) + within
            fits = at < most
            self._texts[np.repeat(rows, counts)[fits], at[fits]] = flat[fits]
            self.lengths[rows] = np.minimum(lengths + counts, most)

    # Answers for the canary, see `RequestSource`.

    def name(self, member: Member) -> str:
        """Return vLLM's `req_id`."""
        return member.name

    def tokens(self, member: Member, start: int, end: int) -> Sequence[int]:
        """Return own tokens [start, end) of a request, as far as they are known."""
        text = self._texts[member.row, : self.lengths[member.row]] if member.row else member.text
        found: list[int] = text[start:end].tolist()
        return found

    def newest(self, members: Sequence[Member], ends: Int64s) -> Int64s | None:
        """Return the own token before each end; None where one is not known."""
        rows = np.fromiter(map(_ROW, members), np.int64, len(members))
        if (rows == 0).any():
            return None
        return self.newest_of(rows, ends)

    def newest_of(self, rows: Int64s, ends: Int64s) -> Int64s | None:
        """Return the own token before each end of the requests of rows; None where one is not known."""
        if not len(ends) or np.minimum.reduce(ends) < 1 or (self.lengths[rows] < ends).any():
            return None
        found: npt.NDArray[np.int64] = self._texts[rows, ends - 1].astype(np.int64)
        return found

    def discarded(self, member: Member, length: int) -> bool:
        """Return False: a worker is not told which of its results the scheduler has thrown away."""
        return False

    def _place(self, member: Member, text: npt.NDArray[np.int32]) -> None:
        if not member.row:
            if not self._free:
                most = len(self._texts) - 1
                raise RuntimeError(f"kv-canary: vllm adapter: requests must be at most {most}, got more")
            member.row = self._free.pop()
        row, length = member.row, min(len(text), self._texts.shape[1])
        self._texts[row, :length] = text[:length]
        self.lengths[row], self.shown[row], self._owner_of[row] = length, 0, member.owner
        self._names = []

    def _keep(self, member: Member) -> None:
        member.text = self._texts[member.row, : self.lengths[member.row]].copy()


def identity_of(new: Any, *, salt: str | None) -> int:
    """Return the word of what a new request's KV depends on besides its tokens and the weights; 0 for nothing.

    Args:
        new: vLLM's `NewRequestData`.
        salt: of its prefix cache; None: it has none, or its scheduler does not tell.
    """
    parts: list[int | str] = []
    if (lora := new.lora_request) is not None:
        parts += ["lora", lora.lora_name, lora.lora_int_id]
    if salt:
        parts += ["cache_salt", salt]
    return identity_word(*parts)


def with_images(tokens: Sequence[int], features: Iterable[Any] | None) -> tuple[Sequence[int], int]:
    """Return a prompt whose placeholders of images and sounds are told apart by their content, and where these end.

    Args:
        tokens: with the same placeholder for whatever stands there.
        features: vLLM's, of the request.
    """
    features = list(features or ())
    if not features:
        return tokens, 0
    told, end = list(tokens), 0
    for feature in features:
        place, content = feature.mm_position, identity_word(str(feature.identifier))
        end = max(end, min(place.offset + place.length, len(told)))
        for i in range(place.offset, min(place.offset + place.length, len(told))):
            # Any number that is no token's and another one at every place.
            told[i] = (content + i * 0x9E3779B1) % 2**30 + 2**30
    return told, end


def by_name(names: Sequence[str], of: Mapping[str, int]) -> Int64s:
    """Return int64 numbers of requests, in the order of their names."""
    return np.fromiter(map(of.__getitem__, names), np.int64, len(names))
