"""Beam search: the rows that a request decodes in, and the tokens of the branch that each of them is on.

A request of beam width k decodes in k rows: its own, which stands among the other requests of the batch, and k - 1
bare ones behind all of them. They have the prompt's slots in common. Behind each forward SGLang chooses the k best
continuations of all rows together, and points every row at the slots of the row that its branch comes from: slots are
shared, and what a row holds may become another text. Nothing of it enters the prefix cache; slots that no branch needs
any more, and all of them in the end, go back through the allocator as others do.

What was chosen is a tree with its leaves in the order of the rows. With the overlapped scheduler the host has not taken
in the last choice when the next forward begins: that one is read from the device, which the host waits for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

# Tokens of one forward that rows may hash anew because their text has become another one. Rows past that are left out:
# a wide search over a long prompt must not cost the others' time.
MOST_ANEW = 65536


@dataclass(frozen=True, kw_only=True)
class Beam:
    """One row of a group of beams.

    Args:
        group: SGLang's `BeamGroup`.
        place: of the row in it; the request's own is 0.
    """

    group: Any
    place: int


def has_rows(schedule_batch: Any) -> bool:
    """Whether there are rows of beams in a batch."""
    return getattr(schedule_batch, "beam_tail", None) is not None


def rows(schedule_batch: Any) -> Iterator[tuple[int, Beam, int]]:
    """Return (number of the request in the batch, beam, row) of all rows of its beams, as they stand in the batch.

    Those of the requests' own rows, which stand with the other requests, come with row 0.
    """
    tail = getattr(schedule_batch, "beam_tail", None)
    if tail is None:
        return
    members = schedule_batch.req_pool_indices_cpu.tolist()[tail.num_base_rows :]
    for entry in tail.entries:
        yield entry.leader_idx, Beam(group=entry.group, place=0), 0
        for number, row in enumerate(members[entry.start : entry.end], start=1):
            yield entry.leader_idx, Beam(group=entry.group, place=number), row


def discarded(group: Any, length: int) -> Callable[[], bool]:
    """Say whether a forward's result was thrown away: the group ended without what came behind `length` tokens."""
    return lambda: bool(group.retired) and group.num_committed <= length


class Beams:
    """Follows groups of beams: which tokens each row has generated, and whether they continue those of before."""

    def __init__(self) -> None:
        self._groups: weakref.WeakKeyDictionary[Any, _Group] = weakref.WeakKeyDictionary()

    def texts(self, group: Any) -> list[list[int]]:
        """Return what each row has generated, the coming forward's input included.

        Empty where the group has ended, and nobody knows any more.
        """
        return self._of(group).texts(group)

    def goes_on(self, beam: Beam, text: list[int]) -> bool:
        """Return whether a row's text continues what it was when `owner_key` was last asked for it."""
        return self._of(beam.group).line(beam.place).goes_on(text)

    def owner_key(self, req: Any, beam: Beam, text: list[int]) -> Any:
        """Return what stands for a row's present text where a request stands for itself.

        Another one than before where the text does not continue: what the canary knows of the row then counts no more.
        If the forward that this is asked for is not begun, `forget` has to be called.
        """
        return self._of(beam.group).line(beam.place).take(req, beam.place, text)

    def forget(self) -> None:
        """Let every row begin anew, because it is not known how far the canary has followed it."""
        self._groups.clear()

    def _of(self, group: Any) -> _Group:
        if group not in self._groups:
            self._groups[group] = _Group()
        return self._groups[group]


class _Key:
    """A key that stands for a text of a row."""

    def __init__(self, rid: str) -> None:
        self.rid = rid


class _Line:
    """One row's text as of its last forward, and the two keys that its texts have by turns."""

    def __init__(self) -> None:
        self._text: list[int] | None = None
        self._keys: tuple[Any, Any] | None = None
        self._turn = 0

    def goes_on(self, text: list[int]) -> bool:
        # No two rows of a forward have one text: if it goes on with this one, the row is on its own slots still.
        return self._text is not None and text[: len(self._text)] == self._text

    def take(self, req: Any, place: int, text: list[int]) -> Any:
        if self._keys is None:
            name = f"{req.rid} beam {place + 1}"
            # The request's own row goes on from the prompt.
            goes_on = not place and len(text) == 1
            self._keys = (req if goes_on else _Key(name), _Key(name))
        elif not self.goes_on(text):
            self._turn = 1 - self._turn
        self._text = text
        return self._keys[self._turn]


class _Group:
    def __init__(self) -> None:
        # Of the leaves when they were last looked at, by id: the leaf, and the text that ends in it.
        self._known: dict[int, tuple[Any, list[int]]] = {}
        self._lines: dict[int, _Line] = {}

    def line(self, place: int) -> _Line:
        return self._lines.setdefault(place, _Line())

    def texts(self, group: Any) -> list[list[int]]:
        leaves = list(group.leaves)
        texts = [self._text(leaf) for leaf in leaves]
        self._known = {id(leaf): (leaf, text) for leaf, text in zip(leaves, texts, strict=True) if leaf is not None}
        for _, choice in group._pending_steps:
            texts = _chosen(texts, choice, group.beam_width)
        return texts

    def _text(self, leaf: Any) -> list[int]:
        behind: list[int] = []
        while leaf is not None:
            if id(leaf) in self._known:
                return self._known[id(leaf)][1] + behind[::-1]
            behind.append(leaf.token)
            leaf = leaf.parent
        return behind[::-1]


def _chosen(texts: list[list[int]], choice: Any, width: int) -> list[list[int]]:
    """Return the texts after a choice that the host has not taken in; waits for the device."""
    from sglang.srt.beam_search.joint_select import FinalSelect

    if isinstance(choice, FinalSelect):
        # Every row stays on its slots: whatever it is given next, nobody wants what comes of it.
        return [[*text, token] for text, token in zip(texts, choice.tokens.tolist(), strict=True)]
    parents, tokens = choice.parent_idx[:width].tolist(), choice.next_tokens[:width].tolist()
    return [[*texts[parent], token] for parent, token in zip(parents, tokens, strict=True)]
