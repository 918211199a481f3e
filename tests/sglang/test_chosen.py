"""The newest tokens of SGLang's rows, as they are chosen from drafts."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kv_canary.engines.sglang.chosen import Chosen, ChosenTokens, Step


def who(rows: list[int], owners: list[int]) -> Any:
    return SimpleNamespace(rows=np.array(rows), owners=np.array(owners))


def step(
    rows: list[int],
    owners: list[int],
    starts: list[int],
    tokens: list[list[int]],
    *,
    given: list[int] | None = None,
    counts: list[bool] | None = None,
    members: list[Any] | None = None,
) -> Step:
    return Step(
        members=[object() for _ in rows] if members is None else members,
        rows=np.array(rows),
        owners=np.array(owners),
        starts=np.array(starts),
        counts=None if counts is None else np.array(counts),
        chosen=Chosen(torch.tensor(tokens).view(-1), None if given is None else torch.tensor(given)),
    )


def text_of(chosen: ChosenTokens, row: int, owner: int) -> tuple[int, list[int]]:
    """Return the place of the first token that is known of a row, and all that are."""
    base, first, end, tokens = (x[0] for x in chosen.newest(who([row], [owner])))
    return int(first), [int(tokens[at - base]) for at in range(first, end)]


def test_a_row_goes_on_from_the_token_that_was_verified_first() -> None:
    chosen = ChosenTokens(4)
    chosen.add(step([2, 1], [7, 8], [10, 20], [[50], [60]]))
    assert text_of(chosen, 2, 7) == (10, [50])
    chosen.add(step([1, 2], [8, 7], [21, 11], [[61, 62, 0], [51, 0, 0]], given=[2, 1]))
    assert text_of(chosen, 2, 7) == (10, [50, 51])
    assert text_of(chosen, 1, 8) == (20, [60, 61, 62])
    chosen.add(step([2, 1], [7, 8], [12, 23], [[52, 53, 54], [63, 0, 0]], given=[3, 1]))
    assert text_of(chosen, 2, 7) == (11, [51, 52, 53, 54])
    assert text_of(chosen, 1, 8) == (22, [62, 63])


def test_of_whom_nothing_was_chosen_nothing_is_known() -> None:
    chosen = ChosenTokens(4)
    chosen.add(step([2], [7], [10], [[50]]))
    newest = chosen.newest(who([2, 1, 2], [7, 8, 9]))
    assert newest.end.tolist() == [11, 0, 0]
    # Nothing joins a row to what was chosen for it before the last but one.
    chosen.add(step([2], [7], [14], [[54]]))
    assert text_of(chosen, 2, 7) == (14, [54])
    # Neither a row that is not known, nor a request of which none was accepted, nor one whose prompt goes on.
    chosen.add(step([0, 2, 1], [5, 7, 8], [3, 15, 30], [[1], [55], [70]], counts=[True, False, True]))
    assert text_of(chosen, 2, 7) == (14, [54])
    assert text_of(chosen, 1, 8) == (30, [70])
    assert chosen.newest(who([0], [5])).end.tolist() == [0]


def test_a_row_that_was_given_back_is_nobody_s_even_if_tokens_for_it_are_on_their_way() -> None:
    chosen = ChosenTokens(4)
    chosen.add(step([2, 1], [7, 8], [10, 20], [[50], [60]]))
    chosen.row_ended(2)
    assert chosen.newest(who([2, 1], [7, 8])).end.tolist() == [0, 21]
    chosen.row_ended(1)
    assert chosen.newest(who([1], [8])).end.tolist() == [0]
    # The same request comes again.
    chosen.add(step([2], [7], [9], [[49]]))
    assert text_of(chosen, 2, 7) == (9, [49])


def test_requests_that_come_newly_find_what_waits_for_them() -> None:
    chosen = ChosenTokens(20)
    for n in range(1, 20):
        chosen.add(step([n], [n], [n], [[100 + n]]))
    assert [text_of(chosen, n, n) for n in range(1, 20)] == [(n, [100 + n]) for n in range(1, 20)]


def test_what_was_chosen_in_the_place_of_others_counts() -> None:
    a, b = object(), object()
    chosen = ChosenTokens(4)
    chosen.add(step([1, 2], [7, 8], [5, 9], [[1, 2], [3, 4]], given=[2, 1], members=[a, b]))
    assert [(u.start, u.read()) for u in chosen.unread(a)] == [(5, [1, 2])]
    chosen.add(step([1], [7], [7], [[5, 6]], given=[1], members=[a]))
    assert [(u.start, u.read()) for u in chosen.unread(a)] == [(5, [1, 2]), (7, [5])]
    assert [(u.start, u.read()) for u in chosen.unread(b)] == [(9, [3])]
    # It was put off, and begins again.
    chosen.add(step([1], [7], [7], [[9]], members=[a]))
    assert [(u.start, u.read()) for u in chosen.unread(a)] == [(7, [9])]
    assert chosen.unread(object()) == []
    # Of a prompt that goes on nothing was chosen.
    chosen.add(step([1], [7], [8], [[2]], counts=[False], members=[a]))
    assert [(u.start, u.read()) for u in chosen.unread(a)] == [(7, [9])]


def test_a_request_that_has_ended_is_not_kept() -> None:
    class Req:
        pass

    req = Req()
    alive = weakref.ref(req)
    chosen = ChosenTokens(4)
    chosen.add(step([1], [7], [5], [[1, 2]], given=[2], members=[req]))
    assert chosen.unread(req)
    del req
    gc.collect()
    assert alive() is not None
    chosen.settle()
    gc.collect()
    assert alive() is None
    assert text_of(chosen, 1, 7) == (5, [1, 2])
