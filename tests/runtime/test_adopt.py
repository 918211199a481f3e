"""KV that is there already: a live cache, and a context shift, which gives cells other positions."""

from __future__ import annotations

import random

import pytest
import torch

import kv_canary as kc

from .engine import Engine, Request, full_engine, make_pool


def served(engine: Engine, *, tokens: int = 30) -> Request:
    a = engine.add("a", 60)
    engine.step((a, tokens))
    engine.step((a, 1))
    return a


def shift(engine: Engine, request: Request, *, keep: int, drop: int) -> torch.Tensor:
    """Drop positions [keep, keep + drop) as llama.cpp does: those behind move down, and their K is rotated in place.

    Return the slots of all positions that are left.
    """
    table = engine.tables["full"][request.row]
    slots = table[: request.cached].long()
    left = torch.cat([slots[:keep], slots[keep + drop :]])
    source = engine.groups[0].pool.k_source
    assert source is not None
    for layer in source.layers:
        layer.view(-1, source.bytes_per_token)[slots[keep + drop :]] ^= 85
    engine.manager.retire(engine.groups[0].pool, slots[keep : keep + drop], owner=request.owner)
    request.tokens[keep : keep + drop] = []
    request.cached -= drop
    table.zero_()[: len(left)] = left
    return left


def goes_on(engine: Engine, request: Request, steps: int = 4) -> list[kc.ViolationReport]:
    for _ in range(steps):
        engine.step((request, 1))
    return engine.found()


@pytest.mark.parametrize("drop", [1, 7, 25])
@pytest.mark.parametrize("check_tokens", [False, True])
def test_a_healthy_context_shift_that_is_told_of_is_silent(drop: int, check_tokens: bool) -> None:
    engine = full_engine(check_tokens=check_tokens)
    a = served(engine)
    left = shift(engine, a, keep=4, drop=drop)
    engine.manager.adopt("full", left, a.tokens[: a.cached], owner=a.owner)
    assert goes_on(engine, a) == []
    assert engine.manager.summary().uncovered == len(left)


def test_a_context_shift_that_nobody_tells_of_is_not() -> None:
    engine = full_engine()
    a = served(engine)
    shift(engine, a, keep=4, drop=7)
    assert {"POSITION", "CHAIN"} <= {name for r in goes_on(engine, a) for name in r.reasons}


def test_a_shift_and_a_defragmentation_that_moves_cells_wrongly_is_found() -> None:
    """llama.cpp#14081: the cells are moved once more, and one of them to another's place."""
    engine = full_engine()
    a = served(engine)
    left = shift(engine, a, keep=4, drop=7)
    engine.manager.adopt("full", left, a.tokens[: a.cached], owner=a.owner)
    table = engine.tables["full"][a.row]
    table[[10, 11]] = table[[11, 10]]
    assert {r.position for r in goes_on(engine, a, steps=1) if "POSITION" in r.reasons} == {10, 11}


def test_what_is_kept_as_it_was_need_not_be_adopted_again() -> None:
    engine = full_engine()
    a = served(engine)
    left = shift(engine, a, keep=4, drop=7)
    engine.manager.adopt("full", left[4:], a.tokens[: a.cached], owner=a.owner, start=4)
    assert goes_on(engine, a) == []
    assert engine.manager.summary().uncovered == len(left) - 4


@pytest.mark.parametrize("identity", [0, 77])
def test_a_canary_installed_into_a_live_cache_takes_it_as_it_is(identity: int) -> None:
    engine = full_engine()
    rng = random.Random(1)
    a = engine.add("a", [rng.randrange(1000) for _ in range(50)])
    a.identity = identity
    engine.map(a, 0, 20)
    a.cached = 20
    slots = engine.tables["full"][a.row, :20].long()
    engine.manager.adopt("full", slots, a.tokens[:20], owner=a.owner, identity=identity)
    assert goes_on(engine, a) == []
    engine.flip(engine.groups[0], "V", int(slots[3]), 3)
    assert {(r.position, r.reasons) for r in goes_on(engine, a, steps=1)} == {(3, ("V",))}


def test_a_window_has_no_slots_for_what_it_has_dropped() -> None:
    group = kc.BufferGroup(name="window", pool=make_pool(), window=6)
    engine = Engine([group])
    a = engine.add("a", 50)
    engine.map(a, 0, 20)
    a.cached = 20
    table = engine.tables["window"][a.row]
    table[:10] = 0
    engine.manager.adopt("window", table[:20].long(), a.tokens[:20], owner=a.owner)
    assert goes_on(engine, a) == []


def test_the_slots_of_a_draft_model_hold_the_token_behind_their_own() -> None:
    groups = [
        kc.BufferGroup(name="full", pool=make_pool(name="full")),
        kc.BufferGroup(name="draft", pool=make_pool(name="draft"), token_offset=1),
    ]
    engine = Engine(groups)
    a = engine.add("a", 50)
    with pytest.raises(ValueError, match="tokens must be 21, start and slots together, got 20"):
        engine.manager.adopt("draft", torch.arange(1, 21), a.tokens[:20], owner=a.owner)
    engine.manager.adopt("draft", torch.arange(1, 21), a.tokens[:21], owner=a.owner)
    assert (groups[1].pool.records[1:21, 0] & 0xFFFFFFFF).tolist() == a.tokens[1:21]


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"group": "other"}, ValueError, "adopt: group must be one of full, got 'other'"),
        ({"slots": torch.arange(1, 5, dtype=torch.int32)}, TypeError, "adopt: slots must be of dtype torch.int64"),
        ({"tokens": [1, 2, 3]}, ValueError, "adopt: tokens must be 4, start and slots together, got 3"),
        ({"start": -1}, ValueError, "adopt: start must be at least 0, got -1"),
    ],
)
def test_wrong_arguments_are_named_and_harm_nothing_in_log_mode(changes, error, said) -> None:  # type: ignore[no-untyped-def]
    engine = full_engine()
    given = {"group": "full", "slots": torch.arange(1, 5), "tokens": [1, 2, 3, 4], "owner": 1, **changes}
    with pytest.raises(error, match=said):
        engine.manager.adopt(**given)
    assert int(engine.groups[0].pool.records.abs().sum()) == 0
    engine.manager.guard.contains = True
    engine.manager.adopt(**given)
    assert sum(engine.manager.summary().failures.values()) == 1
