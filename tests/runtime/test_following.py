"""Decode steps that follow one of the same requests: what is derived is what would have been said and noted anew."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kv_canary as kc
from kv_canary.runtime.budget import Budget
from kv_canary.runtime.composition import BatchRequests, Composition, Int64s
from kv_canary.runtime.tails import Progress

MAX_ROWS = 9


class Source:
    """Requests of which nothing is asked."""

    def name(self, member: Any) -> str:
        return str(member)

    def tokens(self, member: Any, start: int, end: int) -> list[int]:
        return list(range(start, end))

    def newest(self, members: Any, ends: Int64s) -> Int64s | None:
        return ends - 1

    def discarded(self, member: Any, length: int) -> bool:
        return False


SOURCE = Source()


def composed(*rows: int, owners: tuple[int, ...] = ()) -> Composition:
    numbers = np.array(owners or rows, np.int64)
    return Composition([f"request {n}" for n in rows], rows=np.array(rows, np.int64), owners=numbers, source=SOURCE)


def decode(composition: Composition, *prefix: int) -> BatchRequests:
    at = np.array(prefix, np.int64)
    return BatchRequests(composition, prefix=at, extend=np.ones_like(at), newest=at - 1)


def same(one: BatchRequests, other: BatchRequests) -> bool:
    numbers = [(r.num_tokens, r.num_cached, r.longest, r.prefix.tolist(), r.ends.tolist()) for r in (one, other)]
    return numbers[0] == numbers[1] and one.composition is other.composition


def test_what_follows_is_one_token_longer_and_says_what_it_follows() -> None:
    first = decode(composed(3, 5), 7, 20)
    second = first.following(np.array([70, 200]))
    assert same(second, decode(first.composition, 8, 21))
    assert second.newest_of_all is not None
    assert second.newest_of_all.tolist() == [70, 200]
    assert second.previous is first
    assert first.previous is None
    third = second.following(np.array([71, 201]))
    assert same(third, decode(first.composition, 9, 22))
    assert third.previous is second
    assert second.previous is None


def test_steps_that_follow_each_other_do_not_keep_all_before_them() -> None:
    last = decode(composed(1), 4)
    kept = []
    for _ in range(20):
        last = last.following(np.array([1]))
        # Their arrays stand for them: they have no room for weak references.
        kept.append(weakref.ref(last.prefix))
    gc.collect()
    assert sum(ref() is not None for ref in kept) <= 3
    assert last.prefix.tolist() == [24]


def test_steps_that_are_remembered_keep_no_arrays_and_tell_their_lengths_all_the_same() -> None:
    first = decode(composed(1, 2), 4, 9)
    steps, kept = [first], []
    for n in range(20):
        steps.append(steps[-1].following(np.array([n, n])))
        kept += [weakref.ref(steps[-1].prefix), weakref.ref(steps[-1].newest_of_all)]
    gc.collect()
    assert sum(ref() is not None for ref in kept) <= 5
    for n, step in enumerate(steps):
        assert same(step, decode(first.composition, 4 + n, 9 + n))
        assert [(r.prefix_len, r.extend_len) for r in step] == [(4 + n, 1), (9 + n, 1)]


def test_a_step_may_be_followed_by_two_of_which_one_is_not_run() -> None:
    first = decode(composed(1, 2), 4, 9)
    second = first.following(np.array([0, 0]))
    dropped, third = (second.following(np.array([n, n])) for n in (1, 2))
    for last in (dropped, third):
        assert same(last.following(np.array([3, 3])), decode(first.composition, 7, 12))
    assert same(second, decode(first.composition, 5, 10))


def test_what_follows_is_in_the_same_rows_of_the_tables() -> None:
    composition, at, places = composed(3, 5), np.array([7, 20]), np.array([1, 0])
    first = BatchRequests(composition, prefix=at, extend=np.ones_like(at), newest=at, table_rows=places)
    assert first.following(np.array([70, 200])).table_rows is places


@pytest.mark.parametrize("change", [{"extend": [1, 2]}, {"pending": [0, 1]}], ids=lambda change: next(iter(change)))
def test_what_is_no_decode_step_is_not_followed(change: dict[str, list[int]]) -> None:
    arrays = {name: np.array(values, np.int64) for name, values in change.items()}
    requests = BatchRequests(composed(1, 2), **({"prefix": np.array([3, 3]), "extend": np.array([1, 1])} | arrays))
    with pytest.raises(ValueError, match="following must be asked of a decode step"):
        requests.following(np.array([0, 0]))


@settings(max_examples=max(1, settings.default.max_examples // 2))
@given(seed=st.integers(0, 1 << 30))
def test_rows_and_strides_noted_late_are_those_noted_at_once(seed: int) -> None:
    """Two of each: one is told of steps that follow each other, the other one of the same steps as if none did."""
    rng = random.Random(seed)
    config = kc.CanaryConfig(stride=rng.choice([2, 4]))
    late, once = ((Progress(MAX_ROWS), Budget(config, torch.device("cpu"), max_rows=MAX_ROWS)) for _ in range(2))
    last: BatchRequests | None = None
    step = 0
    for _ in range(30):
        step += rng.choice([1, 1, 1, 2])
        action = rng.random()
        if last is None or action < 0.25:
            rows = rng.sample(range(1, MAX_ROWS), rng.randint(1, 5))
            owners = tuple(rng.choice([row, row + 100]) for row in rows)
            requests = decode(composed(*rows, owners=owners), *(rng.randint(1, 6) for _ in rows))
        else:
            requests = last.following(np.zeros(len(last), np.int64))
        plain = decode(requests.composition, *requests.prefix.tolist())
        strides = [b.strides("f", r, step=step).tolist() for (_, b), r in ((late, requests), (once, plain))]
        assert strides[0] == strides[1]
        behind = [p.one_behind(r) for (p, _), r in ((late, requests), (once, plain))]
        assert (behind[0] is None) == (behind[1] is None)
        for (progress, _), r, starts in zip((late, once), (requests, plain), behind, strict=True):
            if starts is not None:
                assert starts.tolist() == (r.prefix - 1).tolist()
                progress.went_on(r)
            else:
                which, _starts = progress.behind(r)
                progress.advanced(r, which)
        if action > 0.8:
            rows_now = requests.rows[: rng.randint(0, len(requests))]
            what = rng.choice(["look", "forget", "ahead", "give up"])
            for progress, budget in (late, once):
                if what == "forget":
                    progress.forget(rows_now)
                elif what == "ahead":
                    progress.went_ahead(rows_now, requests.ends[: len(rows_now)])
                elif what == "give up":
                    budget.forget("f")
            assert late[0].lengths(np.arange(MAX_ROWS)).tolist() == once[0].lengths(np.arange(MAX_ROWS)).tolist()
        last = requests


@pytest.mark.parametrize("count", [1, 3, 8, 9, 20])
def test_few_requests_are_behind_as_many_are(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from kv_canary.runtime import tails

    rng = random.Random(count)
    for _ in range(40):
        rows = rng.sample(range(1, 40), count)
        found = []
        state = rng.getstate()
        for few in (0, 100):
            rng.setstate(state)
            monkeypatch.setattr(tails, "FEW", few)
            progress = Progress(41)
            first = decode(composed(*rows), *(rng.randint(0, 4) for _ in rows))
            progress.advanced(first, np.arange(count))
            owners = tuple(row if rng.random() < 0.7 else row + 100 for row in rows)
            second = decode(composed(*rows, owners=owners), *(rng.randint(0, 6) for _ in rows))
            segments = []
            which, starts = progress.behind(second)
            if len(which):
                segments = [part.tolist() for part in tails.segments_of(second, which, starts, offset=1, more=2)]
            found.append((which.tolist(), starts.tolist(), segments))
        assert found[0] == found[1]
