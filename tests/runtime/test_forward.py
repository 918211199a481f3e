"""The phases of a forward, what a batch must be, and what each kind of group finds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kv_canary as kc
from kv_canary.specs.interface import KernelSpec, TensorSpec

from .engine import MAX_ROWS, Engine, full_engine, make_pool
from .tape import Launches

PHASES = ["begin", "head", "tail", "end"]


def call(engine: Engine, phase: str, batch: kc.ForwardBatch) -> None:
    if phase == "begin":
        engine.forward.begin(batch)
    else:
        getattr(engine.forward, phase)()


@pytest.mark.parametrize(("done", "wrong"), [(d, w) for d in range(4) for w in PHASES if PHASES[d] != w])
def test_a_phase_out_of_order_is_refused_by_name(done: int, wrong: str) -> None:
    engine = full_engine()
    batch = engine.batch((engine.add("a", 4), 4))
    for phase in PHASES[:done]:
        call(engine, phase, batch)
    standing = ["idle", "begun", "head", "tail"][done]
    with pytest.raises(RuntimeError, match=f"forward target: {wrong} must come when .* got it when {standing}"):
        call(engine, wrong, batch)
    # The refusal changed nothing: the right phase still follows.
    for phase in PHASES[done:]:
        call(engine, phase, batch)
    assert engine.found() == []
    assert engine.manager.summary().watching == "complete"


def test_a_forward_cannot_begin_within_itself() -> None:
    engine = full_engine()
    batch = engine.batch((engine.add("a", 4), 4))
    with (
        engine.forward.around(batch),
        pytest.raises(RuntimeError, match="begin must come when the forward is idle, got it when head"),
    ):
        engine.forward.begin(batch)
    assert engine.manager.step == 1


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_model_that_raises_leaves_the_forward_ready(error: type[BaseException]) -> None:
    engine = full_engine()
    a = engine.add("a", 12)
    engine.step((a, 4))
    batch = engine.batch((a, 4))
    with pytest.raises(error, match="model"), engine.forward.around(batch):
        raise error("the model failed")
    # The engine tries the same tokens again, in the same slots.
    engine.run(batch)
    a.cached += 4
    engine.step((a, 4))
    assert engine.found() == []
    assert engine.manager.step == 4
    assert engine.manager.summary().positions_verified == 0 + 4 + 4 + 8


def test_what_an_aborted_forward_found_is_reported_by_flush() -> None:
    engine = full_engine()
    a = engine.add("a", 8)
    engine.step((a, 4))
    assert engine.found() == []
    engine.groups[0].pool.k_source.layers[0][engine.slot_of(engine.groups[0], a, 2)] ^= 1
    with pytest.raises(ValueError, match="model"), engine.forward.around(engine.batch((a, 4))):
        raise ValueError("the model failed on the damaged bytes")
    assert [r.reasons for r in engine.found()] == [("K",)]


def test_what_an_aborted_forward_found_is_reported_behind_the_next_one() -> None:
    engine = full_engine()
    a = engine.add("a", 8)
    engine.step((a, 4))
    layer, slot = engine.groups[0].pool.k_source.layers[0], engine.slot_of(engine.groups[0], a, 2)
    layer[slot] ^= 1
    batch = engine.batch((a, 4))
    with pytest.raises(ValueError, match="model"), engine.forward.around(batch):
        raise ValueError("the model failed on the damaged bytes")
    layer[slot] ^= 1
    engine.run(batch)
    assert [(r.reasons, r.step) for r in engine.found()] == [(("K",), 2)]


def shorter(name: str) -> Callable[[kc.ForwardBatch], dict[str, Any]]:
    return lambda batch: {name: getattr(batch, name)[:-1]}


def with_request(**changes: Any) -> Callable[[kc.ForwardBatch], dict[str, Any]]:
    return lambda batch: {"requests": [dataclasses.replace(batch.requests[0], **changes)]}


def two_with_a_wrong_first(**changes: Any) -> Callable[[kc.ForwardBatch], dict[str, Any]]:
    """Return what puts such a request before one with all of the tokens."""

    def spoil(batch: kc.ForwardBatch) -> dict[str, Any]:
        first = dataclasses.replace(batch.requests[0], extend_len=0, **changes)
        return {"requests": [first, dataclasses.replace(batch.requests[0], request_id="b", row=2, owner=2)]}

    return spoil


def two_of_one_row(batch: kc.ForwardBatch) -> dict[str, Any]:
    first = dataclasses.replace(batch.requests[0], extend_len=2)
    return {"requests": [first, dataclasses.replace(first, request_id="b")]}


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (shorter("input_ids"), r"input_ids must be of shape \[4\].*got \[3\]"),
        (shorter("positions"), r"positions must be of shape \[4\].*got \[3\]"),
        (lambda b: {"out_slots": {"full": b.out_slots["full"][:-1]}}, r"out_slots\[full\] must be of shape \[4\]"),
        (lambda b: {"input_ids": b.input_ids[None]}, r"input_ids must be of shape \[4\].*got \[1, 4\]"),
        (lambda b: {"out_slots": {}}, r"out_slots and tables must be given for the groups \['full'\]"),
        (lambda b: {"tables": {}}, r"out_slots and tables must be given for the groups \['full'\]"),
        (lambda b: {"tables": {**b.tables, "other": b.tables["full"]}}, "given for the groups"),
        (with_request(row=0), rf"row of a must be in \[1, {MAX_ROWS}\), got 0"),
        (with_request(row=MAX_ROWS), rf"row of a must be in \[1, {MAX_ROWS}\), got {MAX_ROWS}"),
        (with_request(row=-1), rf"row of a must be in \[1, {MAX_ROWS}\), got -1"),
        (with_request(extend_len=65), "requests must be at most 64 new tokens, got 65"),
        (with_request(prefix_len=-1), "prefix_len of a must be at least 0, got -1"),
        (two_with_a_wrong_first(pending=5), r"pending of a must be in \[0, 4\], got 5"),
        (two_with_a_wrong_first(pending=-1), r"pending of a must be in \[0, 4\], got -1"),
        (lambda b: {"requests": list(b.requests) * 5}, "requests must be at most 4 requests, got 5"),
        (two_of_one_row, r"rows must be different for every request, got \[1, 1\]"),
        (lambda b: {"input_ids": b.input_ids.float()}, "input_ids must be of dtype int32 or int64, got torch.float32"),
    ],
)
def test_a_batch_that_contradicts_itself_changes_nothing(
    spoil: Callable[[kc.ForwardBatch], dict[str, Any]], complaint: str
) -> None:
    engine = full_engine()
    a = engine.add("a", 12)
    engine.step((a, 4))
    batch = engine.batch((a, 4))
    engine.manager.flush()
    state = engine.manager.state
    tensors = [engine.groups[0].pool.records, state.tails[0].chains, state.step, state.counters, state.violations.count]
    before, steps = [t.clone() for t in tensors], engine.manager.step
    with pytest.raises((ValueError, TypeError), match=complaint):
        engine.forward.begin(dataclasses.replace(batch, **spoil(batch)))
    assert engine.manager.step == steps == 1
    assert all(torch.equal(old, new) for old, new in zip(before, tensors, strict=True))
    engine.run(batch)
    assert engine.found() == []


def test_the_two_forwards_of_a_step_are_apart() -> None:
    manager = full_engine().manager
    assert manager.forward("draft") is manager.forward("draft") is not manager.forward("target")


def test_every_cached_position_of_a_full_group_is_verified() -> None:
    engine = full_engine()
    a, b = engine.add("a", 40), engine.add("b", 40)
    prefixes = 0
    for i in range(8):
        prefixes += a.cached + b.cached
        engine.step((a, 1 + i % 3), (b, 5 if i < 3 else 1))
    assert engine.found() == []
    summary = engine.manager.summary()
    assert summary.positions_verified == prefixes
    # HEAD verifies, TAIL writes and verifies.
    assert summary.launches == {"HEAD_FULL": 8, "TAIL_FULL": 16}


def test_more_cached_positions_than_the_plan_first_held_are_all_verified() -> None:
    pool = make_pool(8)
    engine = Engine([kc.BufferGroup(name="full", pool=pool)])
    a = engine.add("a", 8)
    engine.step((a, 4))
    # A table as long as the request claims to be: 2000 cached positions, all in four slots.
    wide = torch.zeros(MAX_ROWS, 4096, dtype=torch.int32)
    wide[a.row, :2000] = torch.arange(2000, dtype=torch.int32) % 4 + 1
    a.tokens = list(range(2001))
    a.cached = 2000
    engine.tables["full"] = wide
    engine.step((a, 1))
    engine.manager.flush()
    assert engine.manager.summary().positions_verified == 2000
    assert engine.manager.summary().watching == "complete"


def flip(group: kc.BufferGroup, slot: int, position: int) -> None:
    """Flip one covered bit of the K that `position` has in `slot`."""
    layer, start, _ = group.pool.k_source.coverage(position)
    group.pool.k_source.layers[layer][slot, start] ^= 1


def test_a_ring_is_clean_round_after_round_and_checks_only_its_window() -> None:
    group = kc.BufferGroup(name="ring", pool=make_pool(), window=5, ring=True)
    engine = Engine([group])
    a, b = engine.add("a", 60), engine.add("b", 60)
    verified = 0
    for i in range(20):
        verified += min(a.cached, 5) + min(b.cached, 5)
        engine.step((a, 1), (b, 3 if i % 2 else 1))
    assert engine.found() == []
    summary = engine.manager.summary()
    assert summary.positions_verified == verified
    assert set(summary.launches) == {"HEAD_SWA", "TAIL_SWA"}
    for distance in range(1, 7):
        # Position `cached - 6` is out of the next query's window, though its slot still holds it.
        position = a.cached - distance
        slot = engine.slot_of(group, a, position)
        flip(group, slot, position)
        engine.step((a, 1))
        expected = [(("K",), "HEAD_SWA", position)] if distance <= 5 else []
        assert [(r.reasons, r.tag, r.position) for r in engine.found()] == expected
        # What was overwritten in the meantime has new bytes and a new record.
        if distance <= 5:
            flip(group, slot, position)


def test_a_chunk_longer_than_its_ring_is_clean() -> None:
    group = kc.BufferGroup(name="ring", pool=make_pool(), window=3, ring=True)
    engine = Engine([group])
    a = engine.add("a", 40)
    batch = engine.batch((a, 10))
    # An engine writes only the last window + 1 tokens of a chunk; the others go to padding.
    batch.out_slots["ring"][:6] = 0
    engine.run(batch)
    a.cached = 10
    for _ in range(6):
        engine.step((a, 1))
    assert engine.found() == []
    assert engine.manager.summary().positions_verified == 18


def lut_engine() -> Engine:
    full = kc.BufferGroup(name="full", pool=make_pool(name="full"))
    # Full slot s lies in sliding slot 2 s: nothing but the LUT says so.
    lut = torch.arange(60, dtype=torch.int64) * 2
    swa = kc.BufferGroup(name="swa", pool=make_pool(name="swa"), window=6, lut=lut)
    return Engine([full, swa])


def test_a_group_behind_a_lut_verifies_the_translated_slots() -> None:
    engine = lut_engine()
    swa = engine.groups[1]
    a = engine.add("a", 40)
    for n in (10, 1, 1):
        engine.step((a, n))
    assert engine.found() == []
    slot = engine.slot_of(swa, a, 8)
    assert slot == 2 * int(engine.tables["swa"][a.row, 8])
    flip(swa, slot, 8)
    engine.step((a, 1))
    assert [(r.reasons, r.tag, r.slot, r.position) for r in engine.found()] == [(("K",), "HEAD_SWA", slot, 8)]


def test_a_live_position_that_the_lut_maps_to_padding_is_reported() -> None:
    engine = lut_engine()
    a = engine.add("a", 40)
    engine.step((a, 10))
    engine.groups[1].lut[int(engine.tables["swa"][a.row, 7])] = 0
    engine.step((a, 1))
    found = engine.found()
    assert {(r.reasons, r.position, r.group) for r in found} == {(("UNMAPPED",), 7, "swa")}
    assert {r.tag for r in found} == {"HEAD_SWA", "TAIL_SWA"}


def test_an_index_outside_the_lut_is_reported_and_degrades() -> None:
    engine = lut_engine()
    a = engine.add("a", 40)
    engine.step((a, 10))
    engine.tables["swa"][a.row, 7] = 60
    engine.step((a, 1))
    found = engine.found()
    assert {(r.reasons, r.position) for r in found} == {(("SLOT_RANGE",), 7)}
    assert "the table or the LUT holds an index that no pool has" in found[0].sentence
    assert engine.manager.summary().watching == "partial"


def test_what_changes_in_a_ring_under_the_model_is_found_behind_it() -> None:
    ring = kc.BufferGroup(name="ring", pool=make_pool(), window=5, ring=True)
    engine = Engine([ring])
    a = engine.add("a", 40)
    engine.step((a, 8))
    batch = engine.batch((a, 1))
    engine.forward.begin(batch)
    engine.forward.head()
    ring.pool.records[engine.slot_of(ring, a, 6), 1] ^= 1
    engine.write_bytes(batch)
    engine.forward.tail()
    engine.forward.end()
    assert {(r.reasons, r.position, r.tag) for r in engine.found()} == {(("CHAIN",), p, "TAIL_SWA") for p in (6, 7)}


def test_two_groups_over_one_pool_name_their_own_slots() -> None:
    pool = make_pool()
    full = kc.BufferGroup(name="full", pool=pool)
    ring = kc.BufferGroup(name="ring", pool=pool, window=5, ring=True)
    engine = Engine([full, ring])
    assert engine.manager.pools == (pool,)
    a, b = engine.add("a", 40), engine.add("b", 40)
    for n in (8, 1, 1, 1, 3, 1):
        engine.step((a, n), (b, 1))
    assert engine.found() == []
    slots = {g.name: engine.slot_of(g, a, a.cached - 2) for g in (full, ring)}
    assert slots["full"] != slots["ring"]
    flip(ring, slots["ring"], a.cached - 2)
    engine.step((a, 1))
    found = engine.found()
    assert [(r.reasons, r.tag, r.slot, r.group) for r in found] == [(("K",), "HEAD_SWA", slots["ring"], "ring")]


def test_two_requests_given_the_same_slot_are_reported_as_overwrite() -> None:
    engine = full_engine()
    a, b = engine.add("a", 8), engine.add("b", 8)
    engine.step((a, 4))
    engine.tables["full"][b.row, :4] = engine.tables["full"][a.row, :4]
    engine.step((b, 4), map_new=False)
    found = engine.found()
    assert [(r.reasons, r.request_id, r.position) for r in found] == [(("OVERWRITE",), "b", p) for p in range(4)]
    assert "two owners" in found[0].cause
    assert "over a record of request a" in found[0].sentence


@pytest.mark.parametrize("right", [True, False])
def test_what_is_recorded_is_what_the_model_was_given_behind_head(right: bool) -> None:
    """An asynchronous engine puts the tokens of the step before in when HEAD has run."""
    engine = full_engine(check_tokens=True)
    a = engine.add("a", 20)
    engine.step((a, 4))
    batch = engine.batch((a, 1))
    given = batch.input_ids if right else batch.input_ids + 1
    engine.forward.begin(dataclasses.replace(batch, input_ids=torch.zeros_like(batch.input_ids)))
    engine.forward.head()
    engine.write_bytes(batch)
    engine.forward.tail(input_ids=given)
    engine.forward.end()
    engine.found()
    a.cached += 1
    engine.step((a, 1))
    # Its own token is not what was written.
    found = {(reason, r.position) for r in engine.found() for reason in r.reasons}
    assert found == (set() if right else {("TOKEN", 4), ("PREFIX", 4)})


def test_rewriting_the_same_text_in_a_shared_slot_is_clean() -> None:
    engine = full_engine()
    a, b = engine.add("a", [1, 2, 3, 4, 5, 6]), engine.add("b", [1, 2, 3, 4, 7, 8])
    engine.step((a, 4))
    engine.tables["full"][b.row, :4] = engine.tables["full"][a.row, :4]
    engine.step((b, 4), map_new=False)
    engine.step((a, 1), (b, 1))
    assert engine.found() == []


def test_a_retired_slot_that_is_still_read_is_reported_as_freed() -> None:
    engine = full_engine()
    pool = engine.groups[0].pool
    a = engine.add("a", 8)
    engine.step((a, 4))
    slot = engine.slot_of(engine.groups[0], a, 1)
    engine.manager.retire(pool, torch.tensor([slot]), owner=a.owner)
    engine.step((a, 1))
    found = engine.found()
    assert [(r.reasons, r.tag, r.slot) for r in found] == [(("FREED",), "HEAD_FULL", slot)]
    assert "use after free" in found[0].cause
    assert found[0].record is not None
    assert found[0].record.retired


def test_without_lifetime_neither_frees_nor_overwrites_are_reported() -> None:
    engine = full_engine(track_lifetime=False)
    pool = engine.groups[0].pool
    a, b = engine.add("a", 8), engine.add("b", 8)
    engine.step((a, 4))
    engine.manager.retire(pool, torch.arange(1, 5), owner=a.owner)
    engine.step((a, 1))
    engine.tables["full"][b.row, :4] = engine.tables["full"][a.row, :4]
    engine.step((b, 4), map_new=False)
    assert engine.found() == []


def test_a_moved_record_is_as_good_as_the_first() -> None:
    engine = full_engine()
    pool = engine.groups[0].pool
    a = engine.add("a", 8)
    engine.step((a, 4))
    src, dst = torch.arange(1, 5), torch.arange(101, 105)
    for source in (pool.k_source, pool.v_source):
        for layer in source.layers:
            layer[dst] = layer[src]
    engine.manager.move(pool, src, dst, owner=a.owner)
    engine.tables["full"][a.row, :4] = dst
    engine.step((a, 1))
    assert engine.found() == []


def test_a_cleared_cache_has_no_records() -> None:
    engine = full_engine()
    a = engine.add("a", 8)
    engine.step((a, 4))
    engine.manager.clear()
    engine.step((a, 1))
    found = engine.found()
    assert {r.reasons for r in found} == {("NEVER_WRITTEN",)}
    assert {r.position for r in found} == {0, 1, 2, 3}


def test_bytes_are_verified_again_at_tail_only_where_asked() -> None:
    for at_tail in (False, True):
        engine = full_engine(verify_bytes_at_tail=at_tail)
        group = engine.groups[0]
        a = engine.add("a", 8)
        engine.step((a, 4))
        batch = engine.batch((a, 1))
        with engine.forward.around(batch):
            engine.write_bytes(batch)
            # The model's own stray write, into a slot that it has read before.
            flip(group, engine.slot_of(group, a, 2), 2)
        expected = [(("K",), "TAIL_FULL", 2)] if at_tail else []
        assert [(r.reasons, r.tag, r.position) for r in engine.found()] == expected


def test_every_launch_is_given_its_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between HEAD and TAIL nothing is allocated: what the specs would allocate comes from the forward."""
    missing = []
    bind = KernelSpec.bind

    def watch(spec: KernelSpec, given: dict[str, Any]) -> dict[str, Any]:
        scratch = [n for n, a in spec.arguments.items() if isinstance(a, TensorSpec) and a.role == "scratch"]
        missing.extend(f"{spec.name}.{name}" for name in scratch if given.get(name) is None)
        return bind(spec, given)

    monkeypatch.setattr(KernelSpec, "bind", watch)
    engine = full_engine()
    a, b = engine.add("a", 40), engine.add("b", 40)
    for n in (20, 1, 3):
        engine.step((a, n), (b, n))
    assert missing == []


def test_a_forward_that_begins_inside_another_is_refused() -> None:
    engine = full_engine(mode="raise")
    other = engine.manager.forward("other")
    a, b = engine.add("a", 8), engine.add("b", 8)
    engine.forward.begin(engine.batch((a, 4)))
    with pytest.raises(RuntimeError, match="forward other: begin must come when no forward is under way"):
        other.begin(engine.batch((b, 4)))
    engine.forward.head()
    engine.forward.tail()
    engine.forward.end()
    # Refused, it has taken nothing away from the one that was under way.
    assert engine.found() == []


@pytest.mark.parametrize("track", [True, False])
def test_a_ring_s_freed_slots_are_reported_where_lifetime_is_tracked(track: bool) -> None:
    group = kc.BufferGroup(name="swa", pool=make_pool(), window=5, ring=True)
    engine = Engine([group], kc.CanaryConfig(backend="reference", track_lifetime=track))
    a = engine.add("a", 12)
    engine.step((a, 4))
    # Retired, as an engine would whose frees are followed.
    group.pool.records[engine.slot_of(group, a, 2), 3] |= -(1 << 63)
    engine.step((a, 1))
    assert {r.reasons for r in engine.found()} == ({("FREED",)} if track else set())


@pytest.mark.parametrize("given", [("input_ids", "positions"), ("input_ids",), ("positions",)])
def test_what_head_is_given_late_is_what_is_recorded(given: tuple[str, ...]) -> None:
    engine = full_engine()
    a = engine.add("a", 20)
    for count in (6, 1, 3):
        batch = engine.batch((a, count))
        late = {name: getattr(batch, name) for name in given}
        nothing: dict[str, Any] = dict.fromkeys(given)
        engine.forward.begin(dataclasses.replace(batch, **nothing))
        engine.forward.head(**late)
        engine.write_bytes(batch)
        engine.forward.tail()
        engine.forward.end()
        a.cached += count
    assert [r.sentence for r in engine.found()] == []
    assert engine.manager.summary().positions_verified == 0 + 6 + 7


def test_a_forward_that_is_given_up_takes_back_the_slots_that_it_began_with() -> None:
    """The engine may fill the tensors anew by then, as it does where it keeps them: they were copied at `begin`."""
    group = kc.BufferGroup(name="ring", pool=make_pool(read_bytes=1), window=3, ring=True)
    engine = Engine([group], kc.CanaryConfig(backend="reference", seals="layer"))
    a = engine.add("a", 40)
    for count in (4, 1, 1):
        engine.step((a, count))
    batch = engine.batch((a, 1))
    engine.forward.begin(batch)
    engine.forward.head()
    engine.write_bytes(batch)
    batch.out_slots["ring"].zero_()
    engine.forward.abort()
    # Of the four slots of the ring, the oldest token's was written, and has no seal any more.
    engine.manager.scrub()
    assert [r.sentence for r in engine.found()] == []
    scrub = engine.manager.summary().scrub
    assert scrub is not None
    assert (scrub.verified, scrub.unsealed) == (3, 1)


def test_a_warm_up_refuses_the_tables_of_other_groups_and_compiles_nothing_on_a_cpu() -> None:
    forward = (engine := full_engine()).forward
    tables = {"full": engine.tables["full"]}
    for wrong in ({}, {"other": tables["full"]}, {**tables, "other": tables["full"]}):
        with pytest.raises(ValueError, match=r"tables must be given for the groups \['full'\]"):
            forward.warm_up(tables=wrong)
    assert forward.warm_up(tables=tables) == 0
    engine.step((engine.add("a", 8), 4))
    assert engine.found() == []
    assert engine.manager.summary().launches == {"HEAD_FULL": 1, "TAIL_FULL": 2}


def test_a_replay_reads_tails_that_were_brought_up_before_it() -> None:
    """Where HEAD lies in a graph, it cannot bring them up itself."""
    engine = full_engine()
    a = engine.add("a", 20)
    engine.step((a, 7))
    launches = Launches()
    with (
        launches.tape(),
        engine.forward.capturing(requests=2, tokens=2, tables=engine.tables) as captured,
    ):
        launches.taking = True
        engine.forward.head()
        engine.forward.tail()
    for _ in range(3):
        batch = engine.batch((a, 1))
        engine.forward.begin(batch, captured=captured)
        engine.write_bytes(batch)
        launches.play()
        engine.forward.end()
        a.cached += 1
    assert [r.sentence for r in engine.found()] == []
    assert engine.manager.summary().positions_verified == 7 + 8 + 9


def test_input_ids_that_nobody_has_given_by_tail_are_asked_for() -> None:
    engine = full_engine(mode="raise")
    a = engine.add("a", 40)
    batch = engine.batch((a, 10))
    ids = batch.input_ids
    assert ids is not None
    forward = engine.forward
    for given, said in ((None, "input_ids must be given by TAIL, got nothing"), (ids[None], r"got \[1, 10\]")):
        forward.begin(dataclasses.replace(batch, input_ids=None))
        forward.head()
        with pytest.raises(ValueError, match=said):
            forward.tail(input_ids=given)
        forward.abort()
    forward.begin(dataclasses.replace(batch, input_ids=None))
    forward.head(input_ids=ids)
    forward.tail()
    forward.end()
    engine.manager.flush()
    assert engine.manager.summary().violations == 0
