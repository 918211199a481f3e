"""What a manager refuses, what it hands out, and that its lives are the same on every backend."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import kv_canary as kc
from kv_canary.runtime.capacities import CanaryLimits

from .engine import Engine, full_engine, make_pool
from .test_forward import flip
from .test_sharing import share_in_one_step

LIMITS = CanaryLimits(max_rows=4, max_requests=2, max_tokens=8, max_len=16)


def group(name: str = "full", **options: Any) -> kc.BufferGroup:
    return kc.BufferGroup(name=name, pool=options.pop("pool", None) or make_pool(16), **options)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([], "groups must be at least one group, got none"),
        ([group(), group()], r"groups must be of different names, got \['full', 'full'\]"),
        (
            [
                group(),
                group("there", pool=kc.KvPool(name="p", num_slots=4, k_source=None, v_source=None, device="meta")),
            ],
            "groups must be on one device",
        ),
    ],
)
def test_groups_that_do_not_go_together_are_refused(groups: list[kc.BufferGroup], said: str) -> None:
    with pytest.raises(ValueError, match=f"CanaryManager: {said}"):
        kc.CanaryManager(groups, limits=LIMITS)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"window": -1}, "window must be at least 0, got -1"),
        ({"ring": True}, "window must be at least 1 for a ring, got 0"),
        ({"token_offset": 2}, "token_offset must be 0 or 1, got 2"),
    ],
)
def test_a_group_that_there_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"BufferGroup: {said}"):
        group(**options)


def test_a_forward_is_made_once_and_of_groups_that_there_are() -> None:
    manager = kc.CanaryManager([group(), group("other")], limits=LIMITS, config=kc.CanaryConfig(backend="reference"))
    with pytest.raises(ValueError, match="forward: groups must be some of full, other, got 'none'"):
        manager.forward("draft", groups=["none"])
    draft = manager.forward("draft", groups=["other"], inner=True)
    assert manager.forward("draft") is draft
    assert (draft.name, draft.inner, [g.name for g in draft.groups]) == ("draft", True, ["other"])
    assert [g.name for g in manager.forward().groups] == ["full", "other"]


def test_launches_are_those_of_each_group_s_tags() -> None:
    engine = Engine([group(), group("swa", window=3), group("more")])
    assert engine.forward.launches == {
        kc.Tag.HEAD_FULL: 2,
        kc.Tag.TAIL_FULL: 4,
        kc.Tag.HEAD_SWA: 1,
        kc.Tag.TAIL_SWA: 2,
    }


def test_a_pool_that_several_groups_read_is_cleared_and_counted_once() -> None:
    pool = make_pool(16)
    manager = kc.CanaryManager([group(pool=pool), group("swa", pool=pool, window=3)], limits=LIMITS)
    assert manager.pools == (pool,)
    pool.records.fill_(7)
    manager.clear()
    assert int(pool.records.abs().sum()) == 0


def test_steps_are_numbered_from_one_and_records_bear_their_step() -> None:
    engine = full_engine()
    assert engine.manager.step == 0
    a = engine.add("a", 8)
    engine.step((a, 2))
    with engine.manager.one_step():
        engine.step((a, 1))
        engine.step((a, 1))
    assert engine.manager.step == 2
    steps = (engine.groups[0].pool.records[1:5, 3] >> 24).tolist()
    assert steps == [1, 1, 2, 2]


def life(backend: str, *, layout: str, stride: int, records: Any) -> Engine:
    """Return an engine behind a little of everything, faults at the end."""
    torch.manual_seed(0)
    groups = [group(pool=make_pool(256))]
    if layout == "ring":
        groups.append(group("ring", pool=make_pool(64), window=5, ring=True))
    if layout == "lut":
        groups.append(group("swa", pool=make_pool(256), window=5, lut=torch.arange(256, dtype=torch.int64)))
    engine = Engine(groups, kc.CanaryConfig(backend=backend, stride=stride, records=records, ring_capacity=64))
    a = engine.add("a", list(range(100, 140)))
    engine.step((a, 12))
    if layout != "ring":
        b = share_in_one_step(engine)
    else:
        b = engine.add("b", 40)
        engine.step((b, 9), (a, 3))
    engine.step((a, 1), (b, 1))
    engine.found()
    assert engine.manager.summary().violations == 0
    for g in groups:
        flip(g, engine.slot_of(g, a, a.cached - 2), a.cached - 2)
    wrong = engine.batch((a, 2), (b, 1))
    wrong.positions[1] += 1
    requests = [wrong.requests[0], dataclasses.replace(wrong.requests[1], owner=9)]
    engine.run(dataclasses.replace(wrong, requests=requests))
    return engine


@pytest.mark.parametrize(
    ("stride", "records", "layout"),
    [
        (1, "one", "full"),
        (2, "head_and_tail", "lut"),
        (1, "one", "ring"),
        pytest.param(2, "head_and_tail", "full", marks=pytest.mark.long),
        pytest.param(1, "one", "lut", marks=pytest.mark.long),
        pytest.param(2, "head_and_tail", "ring", marks=pytest.mark.long),
    ],
)
def test_backends_leave_the_same_behind(layout: str, stride: int, records: Any) -> None:
    reference, triton = (life(b, layout=layout, stride=stride, records=records) for b in ("reference", "triton"))
    for mine, theirs in zip(reference.manager.pools, triton.manager.pools, strict=True):
        for one, other in zip(mine.buffers, theirs.buffers, strict=True):
            assert torch.equal(one, other)
    states = reference.manager.state, triton.manager.state
    assert torch.equal(states[0].counters, states[1].counters)
    assert torch.equal(states[0].tails[0].chains, states[1].tails[0].chains)
    found = [sorted(s.violations.ring[: int(s.violations.count)].tolist()) for s in states]
    assert found[0] == found[1]
    assert found[0]
