"""What has come to pools from elsewhere, as it is asked of violations."""

from __future__ import annotations

import torch

from kv_canary.runtime.arrivals import Arrivals
from kv_canary.specs.violation_row import ViolationRow

from .engine import make_pool


def row(slot: int) -> ViolationRow:
    return ViolationRow(slot=slot)


def test_the_last_time_that_something_came_to_a_slot_is_remembered() -> None:
    arrivals, pool, other = Arrivals(), make_pool(), make_pool()
    arrivals.note(3, pool, torch.tensor([4, 5]))
    assert [arrivals.step_of(pool, row(slot)) for slot in (4, 5, 6)] == [3, 3, None]
    arrivals.note(7, pool, torch.tensor([5, 6]))
    arrivals.note(8, other, torch.tensor([4]))
    assert [arrivals.step_of(pool, row(slot)) for slot in (4, 5, 6)] == [3, 7, 7]
    assert [arrivals.step_of(other, row(slot)) for slot in (4, 5)] == [8, None]
    assert arrivals.step_of(make_pool(), row(4)) is None


def test_what_is_no_slot_of_the_pool_came_nowhere() -> None:
    arrivals, pool = Arrivals(), make_pool()
    last = pool.num_slots - 1
    arrivals.note(2, pool, torch.tensor([0, -3, pool.num_slots, last]))
    asked = (0, -3, pool.num_slots, last)
    assert [arrivals.step_of(pool, row(slot)) for slot in asked] == [None, None, None, 2]


def test_so_many_are_remembered_until_somebody_asks() -> None:
    arrivals, pool = Arrivals(), make_pool()
    for step in range(1, 300):
        arrivals.note(step, pool, torch.tensor([1 + step % 30]))
    # The last 256: of each slot, the last one.
    assert arrivals.step_of(pool, row(1 + 299 % 30)) == 299
    assert arrivals.step_of(pool, row(1 + 270 % 30)) == 270


def test_a_tier_is_asked_of_its_own_slots() -> None:
    arrivals, pool = Arrivals(), make_pool()
    arrivals.watch(pool, lambda found: found.slot * 10)
    arrivals.note(3, pool, torch.tensor([4]))
    assert arrivals.step_of(pool, row(4)) == 40
