"""Sharing within a step: a request hits blocks that another request of the very same forward produces."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kv_canary as kc

from .engine import MAX_LEN, Engine, Request, full_engine, make_pool
from .test_forward import flip


def hit(engine: Engine, source: Request, request: Request, count: int) -> None:
    """Let the request's first `count` positions be those of another, which need not have been written yet."""
    for group in engine.groups:
        table = engine.tables[group.name]
        table[request.row, :count] = table[source.row, :count]
    request.cached = count


def pending(batch: kc.ForwardBatch, **counts: int) -> kc.ForwardBatch:
    """Return the batch, in which so many tokens of these requests' prefixes are yet to come."""
    requests = [dataclasses.replace(r, pending=counts.get(r.request_id, 0)) for r in batch.requests]
    return dataclasses.replace(batch, requests=requests)


def share_in_one_step(engine: Engine, *, first: int = 0, count: int = 16, text: list[int] | None = None) -> Request:
    """Run one forward in which a puts its tokens [first, 16) in, and b hits `count` of a's 16."""
    a = engine.requests.get("a") or engine.add("a", list(range(100, 140)))
    b = engine.add("b", text or a.tokens[:count] + [7, 8, 9, 10, 11, 12])
    engine.map(a, a.cached, 16)
    batch = engine.batch((a, 16 - a.cached), map_new=False)
    hit(engine, a, b, count)
    engine.map(b, count, count + 2)
    batch = engine.batch((a, 16 - a.cached), (b, 2), map_new=False)
    engine.run(pending(batch, b=max(0, count - a.cached)))
    a.cached, b.cached = 16, count + 2
    return b


def kinds() -> dict[str, list[kc.BufferGroup]]:
    full = kc.BufferGroup(name="full", pool=make_pool(256))
    lut = torch.arange(256, dtype=torch.int64)
    swa = kc.BufferGroup(name="swa", pool=make_pool(256, name="swa"), window=6, lut=lut)
    window = kc.BufferGroup(name="window", pool=make_pool(256), window=6)
    return {"full": [full], "window": [window], "lut": [full, swa]}


@pytest.mark.parametrize("kind", ["full", "window", "lut"])
@pytest.mark.parametrize("records", ["one", "head_and_tail"])
@pytest.mark.parametrize("dirty", [False, True])
def test_a_hit_on_what_the_step_produces_is_clean(kind: str, records: Any, dirty: bool) -> None:
    engine = Engine(kinds()[kind], kc.CanaryConfig(backend="reference", records=records, check_tokens=True))
    if dirty:
        # The slots held something else before, which was freed.
        old = engine.add("old", 30)
        engine.step((old, 30))
        for pool in engine.manager.pools:
            engine.manager.retire(pool, torch.arange(1, 31), owner=old.owner)
            engine.next_slot.clear()
    b = share_in_one_step(engine)
    assert [r.sentence for r in engine.found()] == []
    a = engine.requests["a"]
    for _ in range(3):
        engine.step((a, 1), (b, 1))
    assert [r.sentence for r in engine.found()] == []
    summary = engine.manager.summary()
    assert summary.watching == "complete"
    assert summary.positions_verified == summary.positions_relied_on


def test_a_seed_that_changes_under_the_model_is_reported_beside_a_prefix_that_is_yet_to_come() -> None:
    engine = full_engine()
    a, b, c = (engine.add(name, list(range(100, 120))) for name in "abc")
    engine.step((c, 6))
    engine.map(a, 0, 8)
    hit(engine, a, b, 8)
    for request, end in ((b, 9), (c, 7)):
        engine.map(request, request.cached, end)
    batch = pending(engine.batch((a, 8), (b, 1), (c, 1), map_new=False), b=8)
    engine.forward.begin(batch)
    engine.forward.head()
    # The chain that c's next token goes on from is another one now.
    engine.groups[0].pool.records[engine.slot_of(engine.groups[0], c, 5), 1] ^= 1
    engine.write_bytes(batch)
    engine.forward.tail()
    engine.forward.end()
    found = {(r.reasons, r.request_id, r.position) for r in engine.found() if "PREFIX" in r.reasons}
    assert found == {(("PREFIX",), "c", 5)}


def test_without_a_word_of_it_the_same_step_is_reported() -> None:
    engine = full_engine()
    a = engine.add("a", list(range(100, 140)))
    b = engine.add("b", a.tokens[:16] + [7, 8])
    engine.map(a, 0, 16)
    hit(engine, a, b, 16)
    engine.map(b, 16, 18)
    engine.run(engine.batch((a, 16), (b, 2), map_new=False))
    assert {r.reasons for r in engine.found()} == {("NEVER_WRITTEN",)}


@pytest.mark.parametrize("kind", ["full", "window", "lut"])
def test_what_is_there_already_of_such_a_prefix_is_verified_before(kind: str) -> None:
    engine = Engine(kinds()[kind])
    a = engine.add("a", list(range(100, 140)))
    engine.step((a, 12))
    group = engine.groups[-1]
    for position, seen in ((3, kind == "full"), (11, True)):
        slot = engine.slot_of(group, a, position)
        flip(group, slot, position)
        b = engine.add(f"b{position}", a.tokens[:16] + [7, 8])
        hit(engine, a, b, 16)
        for g in engine.groups:
            if g.lut is None:
                engine.map(a, 12, 16)
        hit(engine, a, b, 16)
        engine.map(b, 16, 18)
        engine.run(pending(engine.batch((a, 4), (b, 2), map_new=False), **{b.name: 4}))
        found = {(r.request_id, r.tag[:4], r.position) for r in engine.found() if "K" in r.reasons}
        # The window of b's first token begins at position 10.
        assert ((b.name, "HEAD", position) in found) == seen
        flip(group, slot, position)


def test_another_text_of_the_same_length_is_found_behind_the_model() -> None:
    engine = full_engine(check_tokens=True)
    share_in_one_step(engine, text=[100, 101, 55, *range(103, 116), 7, 8, 9])
    found = engine.found()
    assert {(r.reasons, r.tag, r.position, r.request_id) for r in found} == {(("TOKEN",), "TAIL_FULL", 2, "b")}


def test_another_text_is_found_by_the_next_forward_without_a_table_of_tokens() -> None:
    engine = full_engine(check_tokens=False)
    b = share_in_one_step(engine, text=[100, 101, 55, *range(103, 116), 7, 8, 9])
    assert engine.found() == []
    engine.step((b, 1))
    found = engine.found()
    # b's own first token follows another prefix than the one that lies before it.
    assert [(r.reasons, r.tag, r.position, r.request_id) for r in found] == [
        (("CHAIN",), tag, 16, "b") for tag in ("HEAD_FULL", "TAIL_FULL")
    ]


@pytest.mark.parametrize("wrong", ["position", "unmapped", "never"])
def test_a_wrong_table_of_such_a_prefix_is_found_behind_the_model(wrong: str) -> None:
    engine = full_engine()
    a = engine.add("a", list(range(100, 140)))
    b = engine.add("b", a.tokens[:16] + [7, 8])
    engine.map(a, 0, 16)
    hit(engine, a, b, 16)
    row = engine.tables["full"][b.row]
    row[5] = {"position": row[6].clone(), "unmapped": 0, "never": 99}[wrong]
    engine.map(b, 16, 18)
    engine.run(pending(engine.batch((a, 16), (b, 2), map_new=False), b=16))
    expected = {"position": "POSITION", "unmapped": "UNMAPPED", "never": "NEVER_WRITTEN"}[wrong]
    found = engine.found()
    assert (5, "TAIL_FULL", "b") in {(r.position, r.tag, r.request_id) for r in found if expected in r.reasons}
    assert {r.tag for r in found} == {"TAIL_FULL"}


@pytest.mark.parametrize("count", [-1, 5])
def test_more_pending_than_there_is_of_the_prefix_is_refused(count: int) -> None:
    engine = full_engine()
    a = engine.add("a", 20)
    engine.step((a, 4))
    with pytest.raises(ValueError, match=rf"pending of a must be in \[0, 4\], got {count}"):
        engine.forward.begin(pending(engine.batch((a, 1)), a=count))


def test_a_plan_of_such_a_step_that_is_incomplete_is_told() -> None:
    engine = full_engine(verify_capacity=20)
    share_in_one_step(engine)
    engine.manager.flush()
    assert engine.manager.summary().watching == "complete"
    engine = full_engine(verify_capacity=15)
    share_in_one_step(engine)
    engine.manager.flush()
    assert engine.manager.summary().watching == "partial"


@settings(max_examples=max(1, settings.default.max_examples // 10))
@given(
    kind=st.sampled_from(["full", "window", "lut"]),
    records=st.sampled_from(["one", "head_and_tail"]),
    stride=st.sampled_from([1, 2]),
    seed=st.integers(0, 1 << 30),
)
def test_steps_that_share_as_they_go_are_clean(kind: str, records: Any, stride: int, seed: int) -> None:
    rng = random.Random(seed)
    engine = Engine(kinds()[kind], kc.CanaryConfig(backend="reference", records=records, stride=stride))
    text = [rng.randrange(50) for _ in range(MAX_LEN)]
    first = engine.add("first", text)
    live = [first]
    for i in range(6):
        extend = rng.randrange(1, 9)
        work, counts = [(first, extend)], {}
        for r in live[1:]:
            if rng.random() < 0.7:
                work.append((r, rng.randrange(1, 4)))
        engine.map(first, first.cached, first.cached + extend)
        if len(live) < 4:
            b = engine.add(f"b{i}", [*text[: first.cached + rng.randrange(extend + 1)], *range(900, 900 + MAX_LEN)])
            reach = next(p for p in range(MAX_LEN) if b.tokens[p] >= 900)
            hit(engine, first, b, reach)
            counts[b.name] = max(0, reach - first.cached)
            live.append(b)
            work.append((b, 1 + rng.randrange(3)))
        for r, n in work[1:]:
            engine.map(r, r.cached, r.cached + n)
        engine.run(pending(engine.batch(*work, map_new=False), **counts))
        for r, n in work:
            r.cached += n
    assert [r.sentence for r in engine.found()] == []
    summary = engine.manager.summary()
    assert summary.watching == "complete"
    assert stride > 1 or summary.positions_verified == summary.positions_relied_on
