"""Slots that are retired by replays of rounded sizes are those that were freed, and no others."""

from __future__ import annotations

import random

import pytest
import torch

import kv_canary as kc
from kv_canary.constants import OWNER_MASK
from kv_canary.runtime import retirement
from kv_canary.runtime.context import CanaryContext
from kv_canary.runtime.replays import Replays
from kv_canary.runtime.retirement import Retirement

from .engine import make_pool


def context(pool: kc.KvPool) -> CanaryContext:
    limits = kc.CanaryLimits(max_rows=4, max_requests=4, max_tokens=16, max_len=64)
    groups = [kc.BufferGroup(name="full", pool=pool)]
    return CanaryContext(groups, limits=limits, config=kc.CanaryConfig(backend="reference"))


@pytest.mark.parametrize("most", [64, 4096])
def test_sizes_that_grow_and_shrink_leave_nothing_behind(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retirement, "MOST_REPLAYED", most)
    draw = random.Random(5)
    pools = [make_pool(256), make_pool(256)]
    plain, replayed = (Retirement(context(pool)) for pool in pools)
    replayed._replays = Replays(lambda launch: launch)
    slots = list(range(1, 256))
    for step in range(1, 200):
        for pool, each in zip(pools, (plain, replayed), strict=True):
            each._context.state.number = step
            # As if all had been written again.
            pool.records[1:256, 0] = step
            pool.records[1:256, 1:] = 7
        freed = torch.tensor(draw.sample(slots, draw.choice([1, 3, 16, 17, 40, 65, 200])))
        owner = draw.choice([0, 0, 0, 9, (1 << 64) + 9])
        for pool, each in zip(pools, (plain, replayed), strict=True):
            parts = freed.split(draw.choice([1, 40, 300]))
            # In whatever mode the engine is.
            with torch.inference_mode(step % 2 == 0):
                each.retire(pool, parts, owner=owner)
        assert torch.equal(pools[0].records, pools[1].records)
        retired = pools[1].records[:, -1][pools[1].records[:, -1] < 0]
        assert len(retired) == len(freed)
        assert ((retired & OWNER_MASK) == owner & OWNER_MASK).all()
