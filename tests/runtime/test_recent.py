"""Rows that have grown by several tokens, brought up by what an adapter has at hand: what would have been asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_canary.runtime.composition import BatchRequests, Composition, Int64s, Newest
from kv_canary.runtime.tails import FEW, segments_of

MOST = 5


class Source:
    """Requests with texts, asked for one by one."""

    def __init__(self, texts: Sequence[list[int]]) -> None:
        self.texts = texts
        self.asked: list[int] = []

    def name(self, member: Any) -> str:
        return str(member)

    def tokens(self, member: Any, start: int, end: int) -> list[int]:
        self.asked.append(member)
        return self.texts[member][start:end]

    def newest(self, members: Any, ends: Int64s) -> Int64s | None:
        return None

    def discarded(self, member: Any, length: int) -> bool:
        return length > 100


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[int], list[int], int, int]:
    count = draw(st.integers(FEW + 1, FEW + 6))
    numbers = st.integers(0, 12)
    texts = [[draw(st.integers(0, 1 << 40)) for _ in range(20)] for _ in range(count)]
    prefix = [draw(st.integers(1, 18)) for _ in range(count)]
    starts = [draw(st.integers(0, n)) for n in prefix]
    # Where what is at hand begins; some have nothing.
    bases = [draw(st.integers(0, 19)) for _ in range(count)]
    return texts, prefix, starts, bases, draw(numbers) % 2, draw(numbers) % 2


@settings(deadline=None, max_examples=200)
@given(batches())
def test_what_is_at_hand_is_what_would_have_been_asked_for(batch: Any) -> None:
    texts, prefix, starts, bases, offset, more = batch
    count = len(texts)
    ends = [min(base + 1 + base % MOST, 20) if base % 7 else 0 for base in bases]
    tokens = np.full((count, MOST + 1), -1)
    for i, (base, end) in enumerate(zip(bases, ends, strict=True)):
        mine = texts[i][base:end]
        tokens[i, : len(mine)] = mine
    # Of some the first column is not known.
    first = np.array([base + base % 2 for base in bases])
    recent = Newest(np.array(bases), first, np.array(ends), tokens)
    rows = np.arange(1, count + 1)
    source = Source(texts)
    composition = Composition(range(count), rows=rows, owners=rows, source=source)
    lengths = np.array(prefix)
    which = np.arange(count)
    lists = []
    asked = []
    for its in (None, recent):
        source.asked = []
        requests = BatchRequests(composition, prefix=lengths, extend=np.full(count, 4), drafts=True, recent=its)
        lists.append(segments_of(requests, which, np.array(starts), offset=offset, more=more))
        asked.append(set(source.asked))
    for one, other in zip(*lists, strict=True):
        assert one.tolist() == other.tolist()
    spans = zip(starts, prefix, first.tolist(), ends, strict=True)
    there = {
        i for i, (start, end, low, high) in enumerate(spans) if low <= start + offset and end + offset + more <= high
    }
    assert not asked[1] & there
    assert asked[1] | there >= asked[0]


def test_of_drafts_a_request_is_sure_to_own_the_first() -> None:
    rows = np.array([1, 2])
    composition = Composition([0, 1], rows=rows, owners=rows, source=Source([[], []]))
    extend = np.array([4, 4])
    prefix = np.array([98, 100])
    for drafts, expected in ((True, [False, True]), (False, [True, True])):
        requests = BatchRequests(composition, prefix=prefix, extend=extend, drafts=drafts)
        assert [r.discarded() for r in requests if r.discarded is not None] == expected
