"""A forward that is given up leaves HEAD's own records as they were, as it leaves TAIL's."""

from __future__ import annotations

import pytest
import torch

import kv_canary as kc

from .engine import Engine, make_pool


def ring_engine() -> Engine:
    group = kc.BufferGroup(name="ring", pool=make_pool(), window=5, ring=True)
    return Engine([group], kc.CanaryConfig(backend="reference", records="head_and_tail"))


def give_up(engine: Engine, batch: kc.ForwardBatch, *, at: str) -> None:
    """Let a forward fail at one of its phases, before the model has written anything."""
    forward = engine.forward
    forward.begin(batch)
    if at != "begin":
        forward.head()
    forward.abort()


@pytest.mark.parametrize("at", ["begin", "head"])
def test_a_ring_is_as_it_was_when_the_model_failed_before_it_wrote(at: str) -> None:
    engine = ring_engine()
    a = engine.add("a", 40)
    engine.step((a, 4))
    pool = engine.groups[0].pool
    before = [records.clone() for records in pool.buffers]
    # So many tokens come round the ring, to the slots of the four that are cached.
    give_up(engine, engine.batch((a, 9)), at=at)
    assert all(torch.equal(old, new) for old, new in zip(before, pool.buffers, strict=True))
    engine.step((a, 1))
    engine.step((a, 1))
    assert engine.found() == []


def test_slots_that_were_fresh_are_fresh_again_and_padding_stays_zero() -> None:
    engine = ring_engine()
    a = engine.add("a", 40)
    give_up(engine, engine.batch((a, 20)), at="head")
    assert not any(records.any() for records in engine.groups[0].pool.buffers)


def test_what_tail_has_recorded_by_then_heads_records_have_too() -> None:
    engine = ring_engine()
    a = engine.add("a", 40)
    engine.forward.begin(engine.batch((a, 5)))
    engine.forward.head()
    engine.forward.tail()
    engine.forward.abort()
    head, tail = engine.groups[0].pool.buffers
    assert tail.any()
    assert torch.equal(head[:, [0, 1, 3]], tail[:, [0, 1, 3]])
    # HEAD's have no fingerprints.
    assert not head[:, 2].any()
