"""The chain of a row's whole prefix is that of the request that has it now, whatever was in the row before."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kv_canary as kc
from kv_canary.constants import CHAIN_MULTIPLIER, MASK64, OWNER_MASK
from kv_canary.hashing import mix
from kv_canary.runtime.composition import BatchRequests
from kv_canary.runtime.device_state import CanaryDeviceState
from kv_canary.runtime.rows import RowTable
from kv_canary.runtime.tails import FEW, anchor_of

from .engine import MAX_ROWS, Engine, Request, full_engine


def chain(tokens: list[int], identity: int = 0) -> int:
    c = anchor_of(identity) & MASK64
    for position, token in enumerate(tokens):
        c = (c * CHAIN_MULTIPLIER + mix(position << 32 | token)) & MASK64
    return c


def make_state(*, offsets: tuple[int, ...] = (0,), keep_tokens: bool = True, rows: int = 5) -> CanaryDeviceState:
    return CanaryDeviceState(
        max_rows=rows, ring_capacity=4, keep_tokens=keep_tokens, offsets=offsets, device=torch.device("cpu")
    )


@dataclasses.dataclass
class Text:
    """A request's own tokens, and how often they were asked for."""

    tokens: list[int]
    asked: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def __call__(self, start: int, end: int) -> list[int]:
        self.asked.append((start, end))
        return self.tokens[start:end]


def at(text: Text, prefix: int, *, row: int = 1, owner: int = 1, identity: int = 0) -> kc.ForwardRequest:
    return kc.ForwardRequest(
        request_id="a", row=row, owner=owner, prefix_len=prefix, extend_len=1, tokens=text, identity=identity
    )


@settings(max_examples=max(1, settings.default.max_examples // 4))
@given(seed=st.integers(0, 1 << 30), offsets=st.sampled_from([(0,), (0, 1), (1,)]), keep=st.booleans())
def test_tails_and_tokens_are_those_of_whoever_has_the_row(seed: int, offsets: tuple[int, ...], keep: bool) -> None:
    rng = random.Random(seed)
    state = make_state(offsets=offsets, keep_tokens=keep)
    texts = {
        owner: Text([rng.randrange(1 << 20) for _ in range(60)]) for owner in (1, 2, OWNER_MASK + 1, OWNER_MASK + 2)
    }
    held: dict[int, tuple[int, int, int]] = {}
    for _ in range(20):
        rows = rng.sample(range(1, 5), rng.randrange(1, 4))
        owners = rng.sample(sorted(texts), len(rows))
        batch = []
        for row, owner in zip(rows, owners, strict=True):
            # Most of the time the row goes on with what it had.
            known = held.get(row)
            if known is not None and rng.random() < 0.6:
                owner = known[0]
            if owner in {r.owner for r in batch}:
                continue
            length = known[2] if known is not None and known[0] == owner else 0
            prefix = rng.choice([length, min(length + rng.randrange(4), 58), rng.randrange(58)])
            identity = rng.choice([0, 0, owner % 3])
            if prefix < length or identity:
                # From there on another text, as after a rejection.
                texts[owner].tokens[prefix + 1 :] = [rng.randrange(1 << 20) for _ in range(59 - prefix)]
            held[row] = owner, identity, prefix
            batch.append(at(texts[owner], prefix, row=row, owner=owner, identity=identity))
        state.advance(BatchRequests.of(batch), backend="reference")
        for r in batch:
            own = texts[r.owner].tokens
            for offset in offsets:
                expected = chain(own[offset : r.prefix_len + offset], r.identity)
                assert int(state.tails[offset].chains[r.row]) & MASK64 == expected
            if state.token_pool is not None:
                known = r.prefix_len + state.lookahead
                assert state.token_pool[r.row, :known].tolist() == own[:known]


def test_the_first_list_of_a_process_starts_anew_when_its_identity_is_what_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kv_canary.runtime.composition._numbers", itertools.count(1))
    state, text, rows = make_state(rows=FEW + 2), Text(list(range(20))), range(1, FEW + 2)
    first, others = (
        BatchRequests.of([at(text, 10, row=row, owner=row, identity=identity) for row in rows]) for identity in (0, 5)
    )
    for requests, identity in ((first, 0), (others, 5), (first, 0)):
        state.advance(requests, backend="reference")
        assert {int(state.tails[0].chains[row]) & MASK64 for row in rows} == {chain(text.tokens[:10], identity)}


def test_a_row_at_its_prefix_asks_for_nothing() -> None:
    state, text = make_state(), Text(list(range(40)))
    state.advance(BatchRequests.of([at(text, 10)]), backend="reference")
    assert text.asked == [(0, 10)]
    text.asked.clear()
    state.advance(BatchRequests.of([at(text, 10)]), backend="reference")
    assert text.asked == []
    state.advance(BatchRequests.of([at(text, 13)]), backend="reference")
    assert text.asked == [(10, 13)]


@pytest.mark.parametrize(
    ("change", "asked"),
    [
        ({"owner": 2}, (0, 10)),
        # An owner that is the same in the 24 bits of a record is another request all the same.
        ({"owner": (1 << 24) + 1}, (0, 10)),
        ({"identity": 5}, (0, 10)),
        ({"prefix": 9}, (0, 9)),
        ({"prefix": 0}, (0, 0)),
        ({"prefix": 11}, (10, 11)),
    ],
)
def test_a_row_that_is_another_s_now_starts_anew(change: dict[str, int], asked: tuple[int, int]) -> None:
    state, text = make_state(keep_tokens=False), Text(list(range(40)))
    state.advance(BatchRequests.of([at(text, 10)]), backend="reference")
    text.asked.clear()
    request = at(text, **{"prefix": 10, **change})
    state.advance(BatchRequests.of([request]), backend="reference")
    assert text.asked == [asked]
    expected = chain(text.tokens[: request.prefix_len], request.identity)
    assert int(state.tails[0].chains[1]) & MASK64 == expected


def test_a_draft_s_tail_is_over_the_tokens_one_later() -> None:
    state, text = make_state(offsets=(0, 1)), Text(list(range(50, 90)))
    state.advance(BatchRequests.of([at(text, 4)]), backend="reference")
    assert int(state.tails[0].chains[1]) & MASK64 == chain([50, 51, 52, 53])
    assert int(state.tails[1].chains[1]) & MASK64 == chain([51, 52, 53, 54])
    assert state.token_pool is not None
    assert state.token_pool[1, :5].tolist() == [50, 51, 52, 53, 54]
    assert state.known_lens(BatchRequests.of([at(text, 4)])).tolist() == [5]


def test_the_token_table_grows_and_keeps_what_it_has() -> None:
    state, text, other = make_state(), Text(list(range(1000))), Text(list(range(5000, 5040)))
    assert state.token_pool is not None
    state.advance(BatchRequests.of([at(other, 30, row=2, owner=2), at(text, 20)]), backend="reference")
    widths = []
    for prefix in (200, 255, 256, 257, 900):
        state.advance(BatchRequests.of([at(text, prefix)]), backend="reference")
        widths.append(state.token_pool.shape[1])
        assert state.token_pool[1, :prefix].tolist() == text.tokens[:prefix]
    assert state.token_pool[2, :30].tolist() == other.tokens[:30]
    # It doubles, so that it is seldom moved.
    assert len(set(widths)) <= 3


def test_a_final_token_table_takes_what_fits() -> None:
    state, text = make_state(), Text(list(range(1000)))
    state.finalize_table(300)
    table = state.token_pool
    assert table is not None
    state.advance(BatchRequests.of([at(text, 900)]), backend="reference")
    assert state.token_pool is table
    assert table[1, :300].tolist() == text.tokens[:300]
    state.finalize_table(2000)
    assert state.token_pool is table


def with_identity(engine: Engine, identity: int, *work: tuple[Request, int]) -> None:
    batch = engine.batch(*work)
    requests = [dataclasses.replace(r, identity=identity) for r in batch.requests]
    engine.run(dataclasses.replace(batch, requests=requests))
    for request, count in work:
        request.cached += count


@pytest.mark.parametrize("check_tokens", [True, False])
def test_the_same_tokens_under_another_identity_are_another_prefix(check_tokens: bool) -> None:
    engine = full_engine(check_tokens=check_tokens)
    a, b = engine.add("a", [1, 2, 3, 4, 5, 6]), engine.add("b", [1, 2, 3, 4, 7, 8])
    with_identity(engine, 11, (a, 5))
    engine.tables["full"][b.row, :4] = engine.tables["full"][a.row, :4]
    b.cached = 4
    with_identity(engine, 22, (b, 1))
    found = engine.found()
    assert {(r.reasons, r.position, r.tag) for r in found} == {
        (("CHAIN",), 0, "HEAD_FULL"),
        (("CHAIN",), 0, "TAIL_FULL"),
        (("PREFIX",), 3, "TAIL_FULL"),
    }
    assert {r.request_id for r in found} == {"b"}


def test_two_requests_of_the_same_text_and_different_identities_are_clean_apart() -> None:
    engine = full_engine()
    a, b = engine.add("a", list(range(20))), engine.add("b", list(range(20)))
    for n in (5, 1, 3):
        with_identity(engine, 11, (a, n))
        with_identity(engine, 22, (b, n))
    assert [r.sentence for r in engine.found()] == []
    records = engine.groups[0].pool.records
    slots = [engine.tables["full"][r.row, :9].long() for r in (a, b)]
    assert torch.equal(records[slots[0], 0], records[slots[1], 0])
    assert not (records[slots[0], 1] == records[slots[1], 1]).any()


def test_the_same_owner_in_the_same_row_under_another_identity_starts_anew() -> None:
    """As when a request's weights were changed under way, and its text was put in again."""
    engine = full_engine()
    a = engine.add("a", list(range(20)))
    with_identity(engine, 11, (a, 6))
    with_identity(engine, 11, (a, 1))
    a.cached = 0
    with_identity(engine, 22, (a, 7))
    with_identity(engine, 22, (a, 1))
    assert [r.sentence for r in engine.found()] == []
    assert int(engine.manager.state.tails[0].chains[a.row]) & MASK64 == chain(a.tokens[:7], 22)


def test_an_identity_is_64_bits() -> None:
    state, text = make_state(), Text(list(range(10)))
    state.advance(BatchRequests.of([at(text, 3, identity=(1 << 64) - 1)]), backend="reference")
    assert int(state.tails[0].chains[1]) & MASK64 == chain([0, 1, 2], (1 << 64) - 1)


def test_a_request_that_was_offloaded_resumes_in_another_row() -> None:
    engine = full_engine(check_tokens=True)
    pool = engine.groups[0].pool
    a = engine.add("a", 40)
    engine.step((a, 9))
    old, new = engine.tables["full"][a.row, :9].long().clone(), torch.arange(101, 110)
    # Its KV waits elsewhere, its slots are another's, and it comes back to other slots.
    for source in (pool.k_source, pool.v_source):
        for layer in source.layers:
            layer[new] = layer[old]
    engine.manager.move(pool, old, new, owner=a.owner)
    engine.manager.retire(pool, old, owner=a.owner)
    b = engine.add("b", 40, row=a.row)
    engine.next_slot.clear()
    for n in (9, 1):
        engine.step((b, n))
    a.row = 5
    engine.tables["full"][5, :9] = new
    engine.next_slot[pool] = 30
    for n in (1, 1):
        engine.step((a, n), (b, 1))
    assert [r.sentence for r in engine.found()] == []
    assert int(engine.manager.state.tails[0].chains[5]) & MASK64 == chain(a.tokens[:10])


def test_a_request_that_was_retracted_is_put_in_again() -> None:
    engine = full_engine(check_tokens=True)
    pool = engine.groups[0].pool
    a = engine.add("a", 40)
    for n in (9, 1, 1):
        engine.step((a, n))
    engine.manager.retire(pool, engine.tables["full"][a.row, :11].long(), owner=a.owner)
    a.cached = 0
    # What it had generated is part of its prompt now, but for one token that was sampled anew.
    a.tokens[10] = 4242
    for n in (11, 1, 1):
        engine.step((a, n))
    assert [r.sentence for r in engine.found()] == []


def test_owners_wrap_and_are_told_apart_as_far_as_records_can() -> None:
    engine = full_engine()
    engine.rows._numbers._last = OWNER_MASK - 2
    names = ["w", "x", "y", "z"]
    requests = [engine.add(name, 20) for name in names]
    assert [r.owner for r in requests] == [OWNER_MASK - 1, OWNER_MASK, OWNER_MASK + 2, OWNER_MASK + 3]
    engine.step(*((r, 4) for r in requests))
    engine.step(*((r, 1) for r in requests))
    assert [r.sentence for r in engine.found()] == []
    # Two owners on each side of the wrap.
    x, y = requests[1], requests[2]
    engine.tables["full"][y.row, 5] = engine.tables["full"][x.row, 3]
    engine.step((y, 1), map_new=False)
    [found] = [r for r in engine.found() if "OVERWRITE" in r.reasons]
    assert "over a record of request x" in found.sentence


@pytest.mark.parametrize("owner", [(1 << 24) + 5, (1 << 62) + 5])
def test_owners_longer_than_a_record_has_room_for_are_cut(owner: int) -> None:
    """Engines may count on: a request stays itself, whatever its number."""
    engine = full_engine()
    a = engine.add("a", 20)
    a.owner = owner
    for n in (4, 1, 1):
        engine.step((a, n))
    a.cached = 3
    a.tokens[3:] = [9] * 17
    engine.step((a, 2), map_new=False)
    assert [r.sentence for r in engine.found()] == []
    slot = engine.slot_of(engine.groups[0], a, 0)
    assert int(engine.groups[0].pool.records[slot, 3]) & OWNER_MASK == 5


def test_rows_are_taken_from_those_longest_unseen() -> None:
    table = RowTable(MAX_ROWS)
    rows: dict[str, Any] = {name: table.row(name) for name in "abcdefg"}
    assert sorted(rows.values()) == list(range(1, 8))
    table.row("a")
    assert table.row("h") == rows["b"]
