"""Tails and tokens follow each request's own text, whatever the engine does with rows and prefixes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kv_canary as kc
from kv_canary.constants import MASK64, MIX_ADD, MIX_MUL_1, MIX_MUL_2
from kv_canary.runtime.context import CanaryContext
from kv_canary.runtime.device_state import MOST_REPLAYED
from kv_canary.runtime.replays import Replays

from .engine import MAX_ROWS, Engine, Request, full_engine


def mix(x: int) -> int:
    z = (x + MIX_ADD) & MASK64
    z = ((z ^ (z >> 30)) * MIX_MUL_1) & MASK64
    z = ((z ^ (z >> 27)) * MIX_MUL_2) & MASK64
    return z ^ (z >> 31)


def chain(tokens: list[int]) -> int:
    """Return the chain over a whole prefix, as the design defines it."""
    c = kc.ANCHOR
    for position, token in enumerate(tokens):
        c = (c * kc.CHAIN_MULTIPLIER + mix(position << 32 | token)) & MASK64
    return c


def tail(engine: Engine, request: Request) -> int:
    return int(engine.manager.state.tails[0].chains[request.row]) & MASK64


def share(engine: Engine, source: Request, request: Request, count: int) -> None:
    """Let the request hit the first `count` cached tokens of another."""
    table = engine.tables["full"]
    table[request.row, :count] = table[source.row, :count]
    request.cached = count


def test_a_tail_follows_a_prompt_in_chunks_and_its_decodes() -> None:
    engine = full_engine()
    a = engine.add("a", 30)
    for n in (5, 7, 1, 1, 9, 1):
        engine.step((a, n))
        # It stands at the prefix of the forward, not behind its new tokens.
        assert tail(engine, a) == chain(a.tokens[: a.cached - n])
    assert engine.found() == []


def test_a_tail_starts_at_the_end_of_a_prefix_hit() -> None:
    engine = full_engine()
    a = engine.add("a", [1, 2, 3, 4, 5, 6])
    b = engine.add("b", [1, 2, 3, 4, 7, 8])
    engine.step((a, 6))
    share(engine, a, b, 4)
    engine.step((b, 1))
    assert tail(engine, b) == chain([1, 2, 3, 4])
    engine.step((b, 1))
    assert engine.found() == []


def test_a_wrong_prefix_hit_is_reported() -> None:
    engine = full_engine()
    a = engine.add("a", [1, 2, 3, 4, 5, 6])
    b = engine.add("b", [1, 9, 3, 4, 7, 8])
    engine.step((a, 6))
    share(engine, a, b, 4)
    engine.step((b, 1))
    found = engine.found()
    # Only one token differs; the slots hold another complete, self-consistent prefix.
    assert {(r.reasons, r.position, r.tag) for r in found} == {
        (("TOKEN",), 1, "HEAD_FULL"),
        (("TOKEN",), 1, "TAIL_FULL"),
        (("PREFIX",), 3, "TAIL_FULL"),
    }


def test_a_wrong_prefix_hit_is_reported_without_the_token_table() -> None:
    engine = full_engine(check_tokens=False)
    assert engine.manager.state.token_pool is None
    a = engine.add("a", [1, 2, 3, 4, 5, 6])
    b = engine.add("b", [1, 9, 3, 4, 7, 8])
    engine.step((a, 6))
    share(engine, a, b, 4)
    engine.step((b, 1))
    found = engine.found()
    assert [(r.reasons, r.position, r.slot) for r in found] == [(("PREFIX",), 3, 4)]
    assert "not this request's own" in found[0].sentence


def test_a_row_handed_to_another_request_starts_anew() -> None:
    engine = full_engine()
    a = engine.add("a", [1, 2, 3, 4, 5])
    engine.step((a, 4))
    engine.step((a, 1))
    b = engine.add("b", [1, 2, 3, 9, 8, 7], row=a.row)
    share(engine, a, b, 3)
    engine.step((b, 3))
    assert tail(engine, b) == chain([1, 2, 3])
    # And back again, further on than either was.
    a.tokens.append(6)
    engine.tables["full"][a.row, :5] = torch.arange(1, 6)
    engine.step((a, 1))
    assert tail(engine, a) == chain([1, 2, 3, 4, 5])
    assert engine.found() == []


def test_a_request_that_shrinks_and_resumes_is_clean() -> None:
    engine = full_engine()
    a = engine.add("a", 20)
    engine.step((a, 10))
    engine.step((a, 2))
    # A soft reset, or a rejected draft: it goes on from position 4, with another text from there on.
    a.cached = 4
    a.tokens[4:] = [70 + i for i in range(16)]
    engine.step((a, 3), map_new=False)
    assert tail(engine, a) == chain(a.tokens[:4])
    engine.step((a, 5), map_new=False)
    engine.step((a, 1))
    assert engine.found() == []
    assert tail(engine, a) == chain(a.tokens[:12])


def test_a_request_without_new_tokens_is_verified_and_keeps_its_tail() -> None:
    engine = full_engine()
    a, b = engine.add("a", 8), engine.add("b", 8)
    engine.step((a, 4), (b, 2))
    engine.step((a, 0), (b, 2))
    assert tail(engine, a) == chain(a.tokens[:4])
    engine.step((a, 2), (b, 1))
    assert engine.found() == []
    assert engine.manager.summary().positions_verified == (4 + 2) + (4 + 4)


def test_a_wrong_input_id_is_found_by_the_next_forward() -> None:
    engine = full_engine()
    a = engine.add("a", 8)
    engine.step((a, 4))
    batch = engine.batch((a, 1))
    batch.input_ids[0] = 999
    engine.run(batch)
    a.cached += 1
    # The record says what the model was given; only the request's own history contradicts it.
    assert engine.found() == []
    engine.step((a, 1))
    found = engine.found()
    assert {(r.reasons, r.position, r.tag) for r in found} == {
        (("TOKEN",), 4, "HEAD_FULL"),
        (("TOKEN",), 4, "TAIL_FULL"),
        (("PREFIX",), 4, "TAIL_FULL"),
    }
    token = next(r for r in found if r.tag == "HEAD_FULL")
    assert token.expected_token == a.tokens[4]
    assert token.record is not None
    assert token.record.token == 999
    assert f"expected token {a.tokens[4]} of position 4" in token.sentence
    assert "given another token than the request's own" in token.cause


def test_a_wrong_position_is_found_when_it_is_written() -> None:
    engine = full_engine()
    a = engine.add("a", 8)
    batch = engine.batch((a, 4))
    batch.positions[2] += 1
    engine.run(batch)
    found = [r for r in engine.found() if "WRITE_POSITION" in r.reasons]
    assert [(r.tag, r.position) for r in found] == [("TAIL_FULL", 2)]


def test_the_token_table_grows_with_the_longest_prefix() -> None:
    engine = full_engine(check_tokens=True)
    state = engine.manager.state
    assert state.token_pool is not None
    a, b = engine.add("a", 300), engine.add("b", 40)
    engine.tables["full"] = torch.zeros(MAX_ROWS, 400, dtype=torch.int32)
    for request in (b, a):
        # Slots come round; nothing is verified here but the table of tokens.
        engine.tables["full"][request.row] = torch.arange(400) % 100 + 1
    for _ in range(6):
        engine.step((a, 48), map_new=False)
        engine.step((b, 6), map_new=False)
    assert state.token_pool.shape[1] >= 240
    assert state.token_pool[a.row, :240].tolist() == a.tokens[:240]
    assert state.token_pool[b.row, :30].tolist() == b.tokens[:30]


def broken(request: kc.ForwardRequest) -> kc.ForwardRequest:
    return dataclasses.replace(request, tokens=lambda start, end: [0] * (end - start - 1))


def test_a_history_of_the_wrong_length_is_refused() -> None:
    engine = full_engine()
    a = engine.add("a", 8)
    engine.step((a, 4))
    batch = engine.batch((a, 1))
    spoilt = dataclasses.replace(batch, requests=[broken(batch.requests[0])])
    with pytest.raises(ValueError, match=r"request a: tokens\(0, 4\) must be 4 tokens, got 3"):
        engine.forward.begin(spoilt)
    engine.run(batch)
    assert engine.found() == []


def test_a_bad_history_of_one_request_leaves_the_others_tails_right() -> None:
    engine = full_engine()
    a, b = engine.add("a", 8), engine.add("b", 8)
    engine.step((a, 4), (b, 4))
    batch = engine.batch((a, 1), (b, 1))
    spoilt = dataclasses.replace(batch, requests=[batch.requests[0], broken(batch.requests[1])])
    with pytest.raises(ValueError, match="request b"):
        engine.forward.begin(spoilt)
    engine.run(batch)
    assert [r.sentence for r in engine.found()] == []


def test_a_text_longer_than_any_launch_that_is_replayed_is_brought_up_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches for rounded sizes end at so many tokens; what is longer is launched as it is."""
    monkeypatch.setattr(CanaryContext, "new_replays", lambda _: Replays(lambda launch: launch))
    engine = full_engine()
    a = engine.add("a", MOST_REPLAYED + 200)
    tokens = a.tokens[: MOST_REPLAYED + 100]
    wide = torch.zeros(MAX_ROWS, 2 * MOST_REPLAYED, dtype=torch.int32)
    # Slots come round; nothing is verified here but the tail.
    wide[a.row] = torch.arange(wide.shape[1]) % 100 + 1
    engine.tables["full"], a.cached = wide, len(tokens)
    engine.step((a, 1), map_new=False)
    assert tail(engine, a) == chain(tokens)
