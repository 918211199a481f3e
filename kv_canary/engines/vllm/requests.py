"""vLLM's requests as its workers know them: a row, an owner and the own tokens of each.

Workers have no list of a request's tokens that is independent of the model's input buffers; here is one. It grows by
what was sampled, all requests of a step at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, count
from operator import attrgetter, is_not
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kv_canary.constants import to_signed
from kv_canary.identity import identity_word
from kv_canary.runtime.composition import Composition, Int64s, Newest
from kv_canary.runtime.rows import OwnerNumbers

_ROW = attrgetter("row")
# Steps that are kept out of the texts, one behind the other, and as many again while the list of requests stays.
_MOST_DECODED = 64


class Member:
    """A request of a worker.

    Attributes:
        name: vLLM's `req_id`.
        row: with the canary; 0 where it has none, because it has ended or waits to be resumed.
        owner: its serial number.
        identity: int64 word of what else its KV depends on.
        prompt: how many of its own tokens it came with.
        text: int32 own tokens; while it has a row, they are there.
        shown: tokens up to the end of its last image or sound, whose placeholders are told apart; 0 for none.
        is_lost: whether something of its text has gone by.
    """

    __slots__ = ("identity", "is_lost", "name", "owner", "prompt", "row", "shown", "text")

    def __init__(self, name: str, *, owner: int) -> None:
        self.name, self.owner = name, owner
        self.row = self.identity = self.shown = self.prompt = 0
        self.text, self.is_lost = np.zeros(0, np.int32), False


@dataclass(frozen=True, kw_only=True, eq=False)
class Composed:
    """The requests of a step, and those of them that can be described.

    Args:
        rows: int64 of all of them; 0 where one is not known.
        which: int64 places of those that can be described among them; None: all can.
        names: of those, in order.
        composition: of those.
        serials: int64 of those, of the row's text: what is sampled for an earlier one is not this one's.
    """

    rows: Int64s
    which: Int64s | None
    names: list[str]
    composition: Composition
    serials: Int64s


class _Sampled(NamedTuple):
    """What was sampled in a step, and for which rows of which texts; `counts` None: one token each."""

    composed: Composed
    rows: Int64s
    serials: Int64s
    flat: Int64s
    counts: Int64s | None


@dataclass(kw_only=True, slots=True, eq=False)
class _Decoded:
    """Tokens that the same requests have got, step by step, which are not in their logs yet.

    Args:
        rows: int64 [requests].
        first: int64 [requests] where the first of them belongs in each text.
        steps: int64 [requests] of each step.
        ends, step: the ends that were asked for last, and the number of the step whose tokens stand before these.
    """

    rows: Int64s
    first: Int64s
    steps: list[Int64s]
    ends: Int64s | None = None
    step: int = 0


class _Log:
    """The last tokens of all rows by step, which are not in the texts yet: those are far apart in memory.

    A row is there with one token of each of the last steps, without a gap, or not at all.

    Args:
        texts: int32 [rows, tokens] where it ends.
        lengths: int64 [rows] known tokens, those that are in the log included.
    """

    def __init__(self, texts: npt.NDArray[np.int32], lengths: Int64s) -> None:
        self._texts, self._lengths = texts, lengths
        # Of each row: tokens that are in its text, and what its positions are less than the numbers of their steps.
        self._settled, self._behind = np.zeros_like(lengths), np.zeros_like(lengths)
        self._lines = np.zeros((_MOST_DECODED, len(lengths)), np.int64)
        # The number of the next step, and of the first one whose tokens may not be in the texts.
        self._next = self._oldest = 0

    def add(self, decoded: _Decoded) -> None:
        """Take in tokens of rows that have had so many, and tell their lengths."""
        rows, first, steps = decoded.rows, decoded.first, decoded.steps
        if self._next + len(steps) - self._oldest > _MOST_DECODED:
            self.settle((self._lengths > self._settled).nonzero()[0])
            self._oldest = self._next
        begins = (self._behind[rows] + first != self._next).nonzero()[0]
        if len(begins):
            new, at = rows[begins], first[begins]
            self.settle(new)
            self._settled[new], self._behind[new] = at, self._next - at
        for step in steps:
            self._lines[self._next % _MOST_DECODED][rows] = step
            self._next += 1
        self._lengths[rows] = first + len(steps)

    def settle(self, rows: Int64s) -> None:
        """Bring what is there of rows into their texts."""
        first, counts = self._settled[rows], self._lengths[rows] - self._settled[rows]
        total = int(np.add.reduce(counts))
        if total:
            at = np.arange(total) + np.repeat(first - (counts.cumsum() - counts), counts)
            rows_each = np.repeat(rows, counts)
            self._texts[rows_each, at] = self._lines[(at + self._behind[rows_each]) % _MOST_DECODED, rows_each]
        self._settled[rows] = first + counts

    def settle_row(self, row: int) -> None:
        """Bring what is there of one row into its text."""
        first, length = int(self._settled[row]), int(self._lengths[row])
        if first < length:
            at = np.arange(first, length) + self._behind[row]
            self._texts[row, first:length] = self._lines[at % _MOST_DECODED, row]
            self._settled[row] = length

    def begin(self, row: int | Int64s) -> None:
        """Take in that all of what is known of a row, or of rows, is in the text."""
        self._settled[row] = self._lengths[row]

    def read(self, row: int, start: int, end: int) -> list[int]:
        """Return tokens [start, end) of a row, as far as they are known."""
        settled, length = int(self._settled[row]), int(self._lengths[row])
        found: list[int] = self._texts[row, start : min(end, settled)].tolist() if start < settled else []
        at = np.arange(max(start, settled), min(end, length))
        found += self._lines[(at + self._behind[row]) % _MOST_DECODED, row].tolist()
        return found

    def find(self, rows: Int64s, at: Int64s) -> Int64s:
        """Return the tokens at a position each of rows, from the log or the text; 0 where it is below 0."""
        steps = at + self._behind[rows]
        is_here = at >= self._settled[rows]
        if np.logical_and.reduce(is_here):
            found: Int64s = self._lines[steps % _MOST_DECODED, rows]
            return found
        found = np.where(is_here, self._lines[steps % _MOST_DECODED, rows], 0)
        others = (~is_here & (at >= 0)).nonzero()[0]
        found[others] = self._texts[rows[others], at[others]]
        return found


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
        # Of each row: known tokens; tokens up to the end of its last image; whose it is, 0 for nobody's; and the number
        # of its text among all that were ever placed, 0 where it is lost.
        self._lengths, self.shown, self._owner_of, self._serials = (np.zeros(num_rows, np.int64) for _ in range(4))
        self._identities = np.zeros(num_rows, np.int64)
        self._serial = 0
        # Whether a request has ever had images.
        self.has_shown = False
        # The last list of requests, each with its row, 0 for none, and its place; whose row is another one since then;
        # and what was made of the list, None where that is another by now.
        self._names: list[str] = []
        self._listed: list[Member | None] = []
        self._rows = np.zeros(0, np.int64)
        self._places: dict[str, int] = {}
        self._moved: set[str] = set()
        self._composed: Composed | None = None
        # No row has more known tokens.
        self._longest = 0
        self._log = _Log(self._texts, self._lengths)
        # What a list of requests has decoded since it is this one.
        self._decoded: _Decoded | None = None
        # What was sampled and is not taken in yet.
        self._sampled: deque[_Sampled] = deque()

    def find(self, name: str) -> Member | None:
        """Return a request; None where it is not known."""
        return self._members.get(name)

    def start(
        self, name: str, tokens: Sequence[int], *, identity: int, shown: int = 0, prompt: int | None = None
    ) -> Member:
        """Give a request a row; one that is known already goes on in its own, with these tokens.

        Args:
            name: of the request.
            tokens: its own ones.
            identity: word of what else its KV depends on.
            shown: see `Member`.
            prompt: how many of the tokens it came with; None: all.

        Raises:
            RuntimeError: there are more requests than rows.
        """
        member = self._members.get(name)
        if member is None:
            member = self._members[name] = Member(name, owner=self.owners.new(name))
        member.identity, member.shown, member.is_lost = to_signed(identity), shown, False
        member.prompt = len(tokens) if prompt is None else prompt
        self.has_shown |= shown > 0
        self._place(member, np.asarray(tokens, np.int32))
        return member

    def resume(self, name: str, tokens: Sequence[int] | None) -> Member:
        """Give a request that was put off a row again.

        Args:
            name: of the request.
            tokens: its own ones; None: those that it had.
        """
        member = self._members[name]
        text = member.text if tokens is None else np.array(tokens, np.int32)
        # The scheduler does not tell images apart.
        text[: member.shown] = member.text[: member.shown]
        member.is_lost &= tokens is None
        self._place(member, text)
        return member

    def discard(self, name: str, generated: int) -> Member | None:
        """Take in that of what a request has generated the engine has thrown the last away, and what is under way.

        Args:
            name: of the request.
            generated: how many tokens it has generated.

        Returns:
            The request; None where nothing of it was thrown away.
        """
        member = self._members.get(name)
        if member is None or not member.row:
            return None
        self._close()
        row, length = member.row, member.prompt + generated
        if self._lengths[row] <= length:
            return None
        self._log.settle_row(row)
        self._place(member, self._texts[row, :length].copy())
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
        self._close()
        self._free.append(member.row)
        # Nobody's: the longest would make the others' steps slow for as long as it lies there.
        self._lengths[member.row] = 0
        self._log.begin(member.row)
        self._moved.add(member.name)
        self._owner_of[member.row], self._serials[member.row], member.row = 0, 0, 0
        self._composed = None

    def lose(self, names: Iterable[str]) -> None:
        """Take in that some of what was sampled for requests has gone by: their own text is not known from here on."""
        for name in names:
            member = self._members.get(name)
            if member is not None:
                member.is_lost, self._serials[member.row] = True, 0
        self._composed = None

    def forget(self) -> None:
        """Take in that nothing is known of any request."""
        for name in list(self._members):
            if (member := self.end(name)) is not None and member.row:
                self.let_go(member)
        self._composed = None

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

    def compose(self, names: Sequence[str]) -> Composed:
        """Return the requests of a step, the same for as long as the list is the same and all of them go on."""
        if self._composed is None or names != self._names:
            self._list(names)
            # Row 0 is nobody's, and has no text.
            rows = self._rows
            is_known = self._serials[rows] > 0
            is_whole = bool(np.logical_and.reduce(is_known))
            mine = rows if is_whole else rows[is_known]
            members: list[Any] = self._listed if is_whole else list(compress(self._listed, is_known.tolist()))
            self._composed = Composed(
                rows=rows,
                which=None if is_whole else is_known.nonzero()[0],
                names=self._names if is_whole else [m.name for m in members],
                composition=Composition(
                    members, rows=mine, owners=self._owner_of[mine], identities=self._identities[mine], source=self
                ),
                serials=self._serials[mine],
            )
        return self._composed

    def _list(self, names: Sequence[str]) -> None:
        """Look up the requests of a list and their rows, those alone that were not in their places in the last one."""
        before, places, most = self._names, self._places, len(names)
        changed = list(compress(count(), map(is_not, names, before)))
        for i in chain(changed, range(most, len(before))):
            if places.get(before[i]) == i:
                del places[before[i]]
        changed += range(len(before), most)
        # Who has stayed in its place, but not in its row.
        changed += [i for i in map(places.get, self._moved) if i is not None]
        listed = self._listed[:most] + [None] * (most - len(before))
        rows = np.zeros(most, np.int64)
        rows[: len(before)] = self._rows[:most]
        for i in changed:
            name = names[i]
            member = listed[i] = self._members.get(name)
            places[name], rows[i] = i, 0 if member is None else member.row
        # What was made of the last list keeps its own.
        self._names, self._listed, self._rows = list(names), listed, rows
        self._moved.clear()

    def sampled(self, composed: Composed, names: Sequence[str], tokens: Sequence[Sequence[int]]) -> None:
        """Take in, from any thread, what was sampled for requests; it counts from the next `take` on.

        Args:
            composed: of the step.
            names: whose tokens these are.
            tokens: of each, none to several.
        """
        rows, serials = composed.composition.rows, composed.serials
        if names != composed.names:
            at = {name: i for i, name in enumerate(composed.names)}
            which = np.array([at[name] for name in names if name in at], np.int64)
            tokens = [t for name, t in zip(names, tokens, strict=True) if name in at]
            rows, serials = rows[which], serials[which]
        counts = None
        try:
            # As in most steps: one token each.
            flat = np.fromiter([token for (token,) in tokens], np.int64, len(tokens))
        except ValueError:
            flat = np.fromiter(chain.from_iterable(tokens), np.int64)
            counts = np.fromiter(map(len, tokens), np.int64, len(tokens))
        self._sampled.append(_Sampled(composed, rows, serials, flat, counts))

    def take(self) -> None:
        """Append what was sampled to the requests' own tokens."""
        while self._sampled:
            composed, rows, serials, flat, counts = self._sampled.popleft()
            most = self._texts.shape[1]
            # Rows may have another text by now: another request's, or what the scheduler says of the same one.
            goes_on = None if composed is self._composed else self._serials[rows] == serials
            if counts is None and self._longest < most and (goes_on is None or goes_on.all()):
                decoded = self._decoded
                if decoded is None or decoded.rows is not rows or len(decoded.steps) == _MOST_DECODED:
                    self._close()
                    decoded = self._decoded = _Decoded(rows=rows, first=self._lengths[rows], steps=[])
                decoded.steps.append(flat)
                self._longest += 1
                continue
            self._close()
            counts = np.ones(len(flat), np.int64) if counts is None else counts
            if goes_on is not None and not goes_on.all():
                flat = flat[np.repeat(goes_on, counts)]
                rows, counts = rows[goes_on], counts[goes_on]
            self._log.settle(rows)
            lengths = self._lengths[rows]
            within = np.arange(len(flat)) - np.repeat(counts.cumsum() - counts, counts)
            at = np.repeat(lengths, counts) + within
            fits = at < most
            self._texts[np.repeat(rows, counts)[fits], at[fits]] = flat[fits]
            self._lengths[rows] = np.minimum(lengths + counts, most)
            self._log.begin(rows)
            self._longest = int(self._lengths.max())

    def known(self, rows: Int64s) -> Int64s:
        """Return how many tokens of the texts of rows are known, int64."""
        decoded = self._decoded
        if decoded is not None and decoded.rows is rows:
            return decoded.first + len(decoded.steps)
        self._close()
        return self._lengths[rows]

    def _close(self) -> None:
        """Bring what was decoded into the log."""
        decoded, self._decoded = self._decoded, None
        if decoded is not None:
            self._log.add(decoded)

    # Answers for the canary, see `RequestSource`.

    def name(self, member: Member) -> str:
        """Return vLLM's `req_id`."""
        return member.name

    def tokens(self, member: Member, start: int, end: int) -> Sequence[int]:
        """Return own tokens [start, end) of a request, as far as they are known."""
        row, decoded = member.row, self._decoded
        if not row:
            text: list[int] = member.text[start:end].tolist()
            return text
        found = self._log.read(row, start, end)
        if decoded is not None and len(at := (decoded.rows == row).nonzero()[0]):
            n, first = int(at[0]), int(decoded.first[at[0]])
            found += [int(step[n]) for step in decoded.steps[max(0, start - first) : max(0, end - first)]]
        return found

    def newest(self, members: Sequence[Member], ends: Int64s) -> Int64s | None:
        """Return the own token before each end; None where one is not known."""
        rows = np.fromiter(map(_ROW, members), np.int64, len(members))
        if (rows == 0).any():
            return None
        return self.newest_of(rows, ends)

    def newest_of(
        self, rows: Int64s, ends: Int64s, *, are_known: bool = False, after: Int64s | None = None
    ) -> Int64s | None:
        """Return the own token before each end of the requests of rows; None where one is not known.

        Args:
            rows, ends: int64 [requests].
            are_known: whether none of the ends is past what is known.
            after: the ends that these are one token behind each; None: that is not known.
        """
        decoded = self._decoded
        if decoded is not None and decoded.rows is rows and len(ends):
            step = self._step_of(decoded, ends, after)
            if step is not None and step <= len(decoded.steps):
                decoded.ends, decoded.step = ends, step
                if step > 0:
                    return decoded.steps[step - 1]
                if np.minimum.reduce(ends) > 0:
                    # As in the step behind one in which the list has changed.
                    return self._log.find(rows, ends - 1)
        if not len(ends) or np.minimum.reduce(ends) < 1 or not (are_known or (self.known(rows) >= ends).all()):
            return None
        return self.before(rows, ends)

    @staticmethod
    def _step_of(decoded: _Decoded, ends: Int64s, after: Int64s | None) -> int | None:
        """Return the number of the step whose tokens stand before the ends; None: they are not of one step."""
        if after is not None and after is decoded.ends:
            return decoded.step + 1
        steps = ends - decoded.first
        step = int(steps[0])
        return step if np.logical_and.reduce(steps == step) else None

    def before(self, rows: Int64s, ends: Int64s) -> Int64s:
        """Return the own token before each end of the requests of rows, all of which are known; 0 before the first."""
        self._close()
        return self._log.find(rows, ends - 1)

    def recent(self, rows: Int64s, most: int) -> Newest:
        """Return the last tokens that are known of requests, `most` of each, or all if it has fewer.

        Args:
            rows: int64 [requests], theirs.
            most: tokens of each, no more than a text may have.
        """
        self._close()
        self._log.settle(rows)
        ends = self._lengths[rows]
        first = np.maximum(ends - most, 0)
        return Newest(first, first, ends, self._texts[rows[:, None], first[:, None] + np.arange(most)].astype(np.int64))

    def discarded(self, member: Member, length: int) -> bool:
        """Return False: a worker is not told which of its results the scheduler has thrown away."""
        return False

    def _place(self, member: Member, text: npt.NDArray[np.int32]) -> None:
        if not member.row:
            if not self._free:
                most = len(self._texts) - 1
                raise RuntimeError(f"kv-canary: vllm adapter: requests must be at most {most}, got more")
            member.row = self._free.pop()
        self._close()
        row, length = member.row, min(len(text), self._texts.shape[1])
        self._texts[row, :length] = text[:length]
        self._serial += 1
        self._lengths[row], self.shown[row], self._owner_of[row] = length, member.shown, member.owner
        self._identities[row] = member.identity
        self._log.begin(row)
        self._moved.add(member.name)
        self._longest = max(self._longest, length)
        self._serials[row], self._composed = 0 if member.is_lost else self._serial, None

    def _keep(self, member: Member) -> None:
        self._close()
        self._log.settle_row(member.row)
        member.text = self._texts[member.row, : self._lengths[member.row]].copy()


def identity_of(new: Any, *, salt: str | None) -> int:
    """Return the word of what a new request's KV depends on besides its tokens and the weights; 0 for nothing.

    Args:
        new: vLLM's `NewRequestData`.
        salt: of its prefix cache; None: it has none, or its scheduler does not tell.
    """
    parts: list[int | str] = []
    if (lora := new.lora_request) is not None:
        # As vLLM's prefix cache tells them apart: an adapter that is loaded again has another number.
        parts += ["lora", lora.lora_name, lora.lora_path]
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
