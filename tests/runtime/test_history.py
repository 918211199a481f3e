"""The steps that are remembered: when a request came, and when nobody can tell any more."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kv_canary as kc
from kv_canary.runtime.frees import Frees
from kv_canary.runtime.history import REMEMBERED_STEPS, StepHistory, StepRecord


def request(name: str, *, row: int, owner: int) -> kc.ForwardRequest:
    return kc.ForwardRequest(request_id=name, row=row, owner=owner, prefix_len=4, extend_len=1, tokens=np.arange(5))


@pytest.mark.parametrize(
    ("steps", "came", "told"),
    [
        # From the first step of all on, and everything since is remembered.
        (3, 1, 1),
        (3, 2, 2),
        # As far back as is remembered: it may have come before that.
        (REMEMBERED_STEPS + 5, 1, None),
        (REMEMBERED_STEPS + 5, 6, None),
        (REMEMBERED_STEPS + 5, 7, 7),
    ],
)
def test_when_a_request_came_is_told_where_it_can_be_known(steps: int, came: int, told: int | None) -> None:
    history = StepHistory()
    for number in range(1, steps + 1):
        # Whoever had the row before is somebody else.
        there = request("new", row=3, owner=7) if number >= came else request("old", row=3, owner=5)
        batch = kc.BatchRequests.of([request("other", row=1, owner=2), there])
        history.append(StepRecord(number=number, tables={"full": torch.zeros(1, 1)}, forwards=[batch]))
    assert history.arrived(steps, 3) == told
    assert history.arrived(steps, 9) is None


def test_what_no_forward_wrote_has_come_from_elsewhere() -> None:
    history = StepHistory()
    # Row 3 writes position 4 at step 1, and 5 at step 2; nobody with owner 9 is there.
    for number in (1, 2):
        there = kc.ForwardRequest(
            request_id="a", row=3, owner=7, prefix_len=3 + number, extend_len=1, tokens=np.arange(4 + number)
        )
        batch = kc.BatchRequests.of([request("b", row=1, owner=2), there])
        history.append(StepRecord(number=number, forwards=[batch]))
    assert [history.wrote(1, 7, position) for position in (3, 4, 5)] == [False, True, False]
    assert history.wrote(2, 7, 5)
    assert history.wrote(2, 9, 5) is False
    assert history.wrote(3, 7, 5) is None
    assert [history.written(7, position) for position in (3, 4, 5)] == [None, 1, 2]
    # Records hold the low bits of an owner.
    assert (history.wrote(2, 7 + (1 << 24), 5), history.written(7 + (1 << 24), 5)) == (True, 2)
    history.append(StepRecord(number=3, broken=True))
    assert history.wrote(3, 7, 5) is None
    # Again, in a later step.
    history.append(StepRecord(number=4, forwards=[batch]))
    assert history.written(7, 5) == 4


def test_who_has_freed_slots_is_remembered_for_as_long_as_what_was_written() -> None:
    frees = Frees()
    for step in range(1, REMEMBERED_STEPS + 2):
        frees.note(step, 100 + step)
        frees.note(step, 3)
        # Nobody in particular.
        frees.note(step, 0)
    assert [frees.any_by(owner, 5) for owner in (105, 3, 104, 0)] == [True, True, False, False]
    assert frees.any_by(105 + (1 << 24), 5)
    assert [frees.any_by(3, step) for step in (1, 2, REMEMBERED_STEPS + 1, REMEMBERED_STEPS + 2)] == [
        False,
        True,
        True,
        False,
    ]


def test_who_is_handed_slots_in_use_is_told_from_who_frees() -> None:
    frees = Frees()
    frees.note(3, 7, handed_out=True)
    frees.note(3, 8)
    frees.note(4, 7)
    frees.note(4, 7, handed_out=True)
    assert [frees.handed_out(owner, 3) for owner in (7, 8, 0)] == [True, False, False]
    assert frees.handed_out(7 + (1 << 24), 3)
    # One that has freed slots in the step as well may have freed those.
    assert not frees.handed_out(7, 4)
    assert [frees.any_by(7, step) for step in (3, 4, 5)] == [True, True, False]
