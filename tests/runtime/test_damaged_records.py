"""Damage to the canary's own words told from damaged KV: one bit of a hash does not change by itself."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import kv_canary as kc

from .engine import BYTES, Engine, Request, full_engine, make_pool

OWN = "the canary's own record is damaged, in one bit of its "
AS_IT_WAS = "the KV is probably as it was"


def served(seed: int, **options: Any) -> tuple[Engine, Request, int, int]:
    """Return an engine, its request, and a position of it with its slot."""
    rng = random.Random(seed)
    engine = full_engine(**options)
    a = engine.add("a", [rng.randrange(1 << 17) for _ in range(60)])
    engine.step((a, 40))
    position = rng.randrange(1, 39)
    return engine, a, position, engine.slot_of(engine.groups[0], a, position)


def incidents(engine: Engine, a: Request, *, count: int = 1) -> list[kc.Incident]:
    engine.step((a, count))
    engine.manager.flush()
    return list(engine.manager.incidents)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("check_tokens", [True, False])
@pytest.mark.parametrize(
    ("word", "bits", "name"),
    [(1, range(64), "chain"), (2, range(64), "fingerprint"), (0, range(32, 40), "position"), (0, range(17), "token")],
    ids=["chain", "fingerprint", "position", "token"],
)
def test_one_bit_of_a_record_is_blamed_on_the_record(
    word: int, bits: range, name: str, check_tokens: bool, seed: int
) -> None:
    if name == "token" and not check_tokens:
        pytest.skip("nobody knows which token it should be")
    engine, a, _, slot = served(seed, check_tokens=check_tokens)
    bit = random.Random(seed).choice(bits)
    flip = torch.tensor(1 << bit if bit < 63 else -(1 << 63))
    engine.groups[0].pool.records[slot, word] ^= flip
    [incident] = incidents(engine, a)
    assert incident.cause == f"{OWN}{name}: the KV is probably as it was"


def test_it_is_so_where_tokens_are_hidden_too() -> None:
    engine, a, _, slot = served(3, redact=True)
    engine.groups[0].pool.records[slot, 2] ^= 1 << 7
    [incident] = incidents(engine, a)
    assert incident.cause == f"{OWN}fingerprint: the KV is probably as it was"
    assert incident.first.cause == incident.cause


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("damage", ["a bit of K", "another token", "another position", "zeros", "another's slot"])
def test_what_is_not_the_records_damage_is_not_blamed_on_it(damage: str, seed: int) -> None:
    engine, a, position, slot = served(seed)
    group, table = engine.groups[0], engine.tables["full"][a.row]
    if damage == "a bit of K":
        engine.flip(group, "K", slot, position)
    elif damage == "another token":
        a.tokens[position] ^= 1 << seed
    elif damage == "another position":
        table[position] = table[(position ^ 1) % 40]
    elif damage == "zeros":
        for source in (group.pool.k_source, group.pool.v_source):
            assert source is not None
            for layer in source.layers:
                layer[slot] = 0
    else:
        b = engine.add("b", [token ^ 1 for token in a.tokens])
        engine.step((b, 40))
        table[position] = engine.tables["full"][b.row, position]
    # What the row knew before counts no more.
    engine.manager.state.forget_owner(a.owner)
    found = incidents(engine, a)
    assert found
    assert not [i.cause for i in found if OWN in i.cause]


# Other words of the canary's own.


def bit(n: int) -> int:
    return 1 << n if n < 63 else -(1 << 63)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("written", [1, 12])
def test_one_bit_of_a_rows_tail_is_blamed_on_the_tail(written: int, count: int, seed: int) -> None:
    """It goes on over the tokens that were written since, before it is held against the last of them."""
    engine, a, _, _ = served(seed)
    engine.step((a, written))
    engine.manager.state.tails[0].chains[a.row] ^= bit(random.Random(seed).randrange(64))
    [incident] = incidents(engine, a, count=count)
    assert incident.reasons == ("PREFIX",)
    assert incident.cause == f"the canary's own tail of this row is damaged, in one bit: {AS_IT_WAS}"
    engine.step((a, 1))
    engine.manager.flush()
    # What was written behind it follows from it.
    assert len(engine.manager.incidents) == 1
    assert not [r.cause for r in engine.manager.reports if "the canary's own tail of this row" not in r.cause]


@pytest.mark.parametrize("seed", range(6))
def test_one_bit_of_a_rows_tail_is_blamed_on_it_also_where_it_is_held_against_the_record_at_once(seed: int) -> None:
    engine, a, _, _ = served(seed)
    batch = engine.batch((a, 1))
    with engine.forward.around(batch):
        engine.write_bytes(batch)
        engine.manager.state.tails[0].chains[a.row] ^= bit(random.Random(seed).randrange(64))
    engine.manager.flush()
    [incident] = engine.manager.incidents
    assert incident.cause == f"the canary's own tail of this row is damaged, in one bit: {AS_IT_WAS}"


def test_a_tail_that_differs_because_the_text_does_is_a_wrong_prefix_hit() -> None:
    engine, a, position, _ = served(0)
    a.tokens[position] ^= 1
    engine.manager.state.forget_owner(a.owner)
    engine.step((a, 1))
    prefix = next(r for r in engine.found() if "PREFIX" in r.reasons)
    assert "a stale or wrong prefix hit" in prefix.cause


@pytest.mark.parametrize("at", [62, 63, 0, 17])
def test_one_bit_of_the_chain_of_the_last_record_is_the_records_whether_or_not_it_was_verified(at: int) -> None:
    engine, a, _, _ = served(at)
    engine.groups[0].pool.records[engine.slot_of(engine.groups[0], a, 39), 1] ^= bit(at)
    engine.step((a, 1))
    reports = engine.found()
    [incident] = engine.manager.incidents
    assert (incident.reasons, incident.cause) == (("CHAIN", "PREFIX"), f"{OWN}chain: {AS_IT_WAS}")
    # The write by itself cannot tell which of the two is damaged.
    alone = next(r for r in reports if r.reasons == ("PREFIX",))
    assert (
        alone.cause == f"the canary's own tail of this row, or the record's chain, is damaged, in one bit: {AS_IT_WAS}"
    )


@pytest.mark.parametrize("seed", range(6))
def test_one_bit_of_what_a_rows_chain_starts_from_is_blamed_on_that(seed: int) -> None:
    engine, a, _, _ = served(seed)
    engine.step((a, seed))
    engine.manager.state.anchors[a.row] ^= bit(random.Random(seed).randrange(64))
    [incident] = incidents(engine, a)
    assert incident.cause == f"the canary's own start of this row's chain is damaged, in one bit: {AS_IT_WAS}"


def test_a_prefix_under_another_identity_is_not_blamed_on_what_its_chain_starts_from() -> None:
    engine, a, _, _ = served(0)
    a.identity = 5
    [incident] = incidents(engine, a)
    assert "CHAIN" in incident.reasons
    assert "the canary's own" not in incident.cause


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("many", [False, True])
def test_one_bit_of_the_table_of_tokens_is_blamed_on_the_table(many: bool, seed: int) -> None:
    engine, a, position, _ = served(seed, check_tokens=True)
    engine.step((a, 1))
    tokens, rng = engine.manager.state.token_pool, random.Random(seed)
    assert tokens is not None
    places = range(3, 9) if many else [position]
    for place in places:
        tokens[a.row, place] ^= 1 << rng.randrange(17)
    [incident] = incidents(engine, a)
    assert incident.reasons == ("TOKEN",)
    where = "at 6 positions, in one bit each" if many else "in one bit"
    is_damaged = f"is damaged {where}" if many else f"is damaged, {where}"
    assert incident.cause == f"the canary's own table of tokens {is_damaged}: {AS_IT_WAS}"
    assert not [r.cause for r in engine.manager.reports if "was given" in r.cause]


@pytest.mark.parametrize("seed", range(4))
def test_a_forward_that_was_given_another_token_is_told_as_that_however_little_it_differs(seed: int) -> None:
    engine, a, _, _ = served(seed, check_tokens=True)
    batch = engine.batch((a, 4))
    batch.input_ids[2] ^= 1 << seed
    engine.run(batch)
    a.cached += 4
    # What the forward was given makes the tail differ, from the next one on.
    [incident] = incidents(engine, a)
    assert incident.first.cause == (
        "the forward that wrote it at step 2 was given another token than the request's own: a wrong input, or an old "
        "branch of the text"
    )
    assert incident.cause == incident.first.cause


def test_where_the_request_cannot_be_asked_either_may_be_damaged() -> None:
    engine, a, position, _ = served(0, check_tokens=True)
    engine.step((a, 1))
    assert engine.manager.state.token_pool is not None
    engine.manager.state.token_pool[a.row, position] ^= 8
    engine.step((a, 1))

    def over(*_: object) -> list[int]:
        raise RuntimeError("the request is over")

    step = engine.manager.accounts._steps.newest
    assert step is not None
    request = dataclasses.replace(step.forwards[0][0], tokens=over)
    step.forwards[0] = kc.BatchRequests.of([request])
    engine.manager.flush()
    [incident] = engine.manager.incidents
    assert incident.cause.endswith("or an old branch of the text, or one bit of the canary's own table of tokens")


# The bit that marks freed slots.

MARK = f"the canary's own record is damaged, in the bit that marks freed slots: {AS_IT_WAS}"


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("seals", ["off", "layer"])
def test_a_slot_that_nobody_freed_is_no_use_after_free(seals: str, many: bool) -> None:
    engine, a, _, slot = served(1, seals=seals)
    b = engine.add("b", 20)
    engine.step((b, 9))
    # Somebody frees something, at another step and of his own.
    engine.manager.retire(engine.groups[0].pool, torch.tensor([engine.slot_of(engine.groups[0], b, 3)]), owner=b.owner)
    slots = list(range(5, 12)) if many else [slot]
    engine.groups[0].pool.records[slots, 3] |= bit(63)
    [incident] = incidents(engine, a)
    assert incident.reasons == ("FREED",)
    expected = f"the canary's own records of 7 slots are damaged, in one bit each: {AS_IT_WAS}"
    assert incident.cause == (expected if many else MARK)
    assert {r.cause for r in engine.manager.reports} == {MARK}


@pytest.mark.parametrize("freer", ["a", "b", ""])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_slot_that_was_freed_is_a_use_after_free(at_once: bool, freer: str) -> None:
    """Also where the one who wrote it did it, in the very step in which he wrote it."""
    engine = full_engine()
    a, b = engine.add("a", 60), engine.add("b", 60)
    engine.step((a, 40), (b, 20))
    if not at_once:
        engine.step((a, 1))
    slot = engine.slot_of(engine.groups[0], a, 7)
    owner = {"a": a.owner, "b": b.owner, "": 0}[freer]
    engine.manager.retire(engine.groups[0].pool, torch.tensor([slot]), owner=owner)
    [incident] = incidents(engine, a)
    assert incident.cause == "use after free: the slot was freed while a request still reads it"


def test_what_is_forgotten_may_have_been_freed() -> None:
    engine, a, _, slot = served(2)
    b = engine.add("b", 120)
    engine.step((b, 9))
    for _ in range(65):
        engine.step((b, 1))
    engine.groups[0].pool.records[slot, 3] |= bit(63)
    [incident] = incidents(engine, a)
    assert incident.cause == "use after free: the slot was freed while a request still reads it"


# Many of them.


@pytest.mark.parametrize(("word", "reason"), [(2, "K"), (0, "TOKEN")])
def test_one_bit_of_many_records_is_blamed_on_the_records(word: int, reason: str) -> None:
    engine, a, _, _ = served(0, check_tokens=True)
    records = engine.groups[0].pool.records
    records[:, word] ^= records.ne(0).any(1).long()
    [incident] = incidents(engine, a)
    assert reason in incident.reasons
    assert incident.count >= 40
    assert incident.cause == f"the canary's own records of 40 slots are damaged, in one bit each: {AS_IT_WAS}"


def test_bytes_that_changed_among_many_damaged_records_are_not_blamed_on_the_records() -> None:
    engine, a, position, _ = served(0)
    group = engine.groups[0]
    group.pool.records[1:41, 2] ^= 1
    engine.flip(group, "K", engine.slot_of(group, a, position), position)
    [incident] = incidents(engine, a)
    assert incident.count == 40
    assert incident.first.position == position
    assert incident.cause == (
        "the K/V bytes changed after they were written: a stray write, a copy race or memory corruption"
    )
    engine, a, _, _ = served(0)
    group = engine.groups[0]
    group.pool.records[1:41, 2] ^= 1
    for position in (7, 8, 21):
        engine.flip(group, "K", engine.slot_of(group, a, position), position)
    [incident] = incidents(engine, a)
    assert incident.cause.startswith("the bytes of 3 slots changed after they were written")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (3, "its token"),
        (1 << 33, "one bit of its position"),
    ],
)
def test_a_token_or_position_that_the_chain_contradicts_is_the_records_damage(change: int, what: str) -> None:
    engine, a, _, slot = served(1, check_tokens=True)
    engine.groups[0].pool.records[slot, 0] ^= change
    [incident] = incidents(engine, a)
    assert incident.cause == f"the canary's own record is damaged, in {what}: {AS_IT_WAS}"


def test_many_records_that_are_damaged_in_more_than_a_bit_are_told_as_one() -> None:
    engine, a, _, _ = served(1, check_tokens=True)
    engine.groups[0].pool.records[1:41, 0] += 1
    [incident] = incidents(engine, a)
    assert incident.cause == f"the canary's own records of 40 slots are damaged: {AS_IT_WAS}"


# Records that are gone, or overwritten.


def paged_engine(**options: Any) -> Engine:
    """Return an engine whose slots lie in pages of 4, and count from 1 on."""
    pool = make_pool(32 * 4, page_size=4)
    sources = {
        name: dataclasses.replace(source, slot_bias=1)
        for name, source in (("k_source", pool.k_source), ("v_source", pool.v_source))
        if source is not None
    }
    pool = kc.KvPool(name="pool", num_slots=128, device="cpu", **sources)
    return Engine([kc.BufferGroup(name="full", pool=pool)], kc.CanaryConfig(backend="reference", **options))


def zeroed(engine: Engine, slots: list[int]) -> None:
    for records in engine.groups[0].pool.buffers:
        records[slots] = 0


def junk(engine: Engine, slots: list[int]) -> None:
    # Not the sign, which marks freed slots.
    records = torch.randint(1, 1 << 62, (len(slots), 4), generator=torch.Generator().manual_seed(slots[0]))
    for buffer in engine.groups[0].pool.buffers:
        buffer[slots] = records


def freed_junk(engine: Engine, slots: list[int]) -> None:
    junk(engine, slots)
    engine.groups[0].pool.records[slots, 3] |= bit(63)


WITNESSED = "as the records beside it bear out"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (
            zeroed,
            "the canary's own record is gone, or a copy or load to where the table points now never came: a forward "
            f"wrote what should be there at step 1, {WITNESSED}",
        ),
        (
            junk,
            "the canary's own record is overwritten, by what is none: a forward wrote the right one at step 1, "
            f"{WITNESSED}; {AS_IT_WAS}",
        ),
        (
            freed_junk,
            "the canary's own record is overwritten, by what is none: a forward wrote the right one at step 1, "
            f"{WITNESSED}; {AS_IT_WAS}",
        ),
    ],
)
@pytest.mark.parametrize("records", ["one", "head_and_tail"])
def test_a_record_that_others_bear_out_is_said_to_be_gone(
    records: str, damage: Callable[[Engine, list[int]], None], cause: str, seed: int
) -> None:
    engine, a, _, slot = served(seed, records=records)
    damage(engine, [slot])
    [incident] = incidents(engine, a)
    assert incident.cause == cause


def test_an_engine_may_give_its_tokens_as_an_array() -> None:
    engine = full_engine(check_tokens=True)
    a = engine.add("a", [7 * n for n in range(60)])
    a.history = lambda start, end: np.array(a.tokens[start:end], np.int32)  # type: ignore[method-assign]
    engine.step((a, 40))
    engine.step((a, 1))
    zeroed(engine, [engine.slot_of(engine.groups[0], a, 17)])
    assert engine.manager.state.token_pool is not None
    engine.manager.state.token_pool[a.row, 3] ^= 64
    table, record = sorted(i.cause for i in reversed(incidents(engine, a)))[::-1]
    assert table.startswith("the canary's own table of tokens is damaged, in one bit")
    assert record.startswith("the canary's own record is gone")


@pytest.mark.parametrize("make", [full_engine, paged_engine])
@pytest.mark.parametrize("forgotten", [False, True])
@pytest.mark.parametrize(("damage", "verb"), [(zeroed, "gone"), (junk, "overwritten")])
def test_the_kv_of_a_record_that_is_gone_is_held_against_its_seal(
    damage: Callable[[Engine, list[int]], None], verb: str, forgotten: bool, make: Callable[..., Engine]
) -> None:
    engine = make(seals="layer")
    a, b = engine.add("a", 60), engine.add("b", 120)
    engine.step((a, 40), (b, 8))
    for _ in range(66 if forgotten else 1):
        engine.step((b, 1))
    damage(engine, [engine.slot_of(engine.groups[0], a, 11)])
    [incident] = incidents(engine, a)
    assert incident.cause == f"the canary's own record is {verb}: the KV is as it was sealed at step 1"


def test_the_kv_of_a_record_that_is_gone_may_have_changed_too() -> None:
    engine, a, _, slot = served(0, seals="layer")
    zeroed(engine, [slot])
    for source in (engine.groups[0].pool.k_source, engine.groups[0].pool.v_source):
        assert source is not None
        source.layers[0].view(-1, BYTES)[slot] ^= 3
    [incident] = incidents(engine, a)
    assert incident.cause == (
        "the canary's own record is gone, and the KV is not as it was sealed at step 1: something has written over both"
    )


@pytest.mark.parametrize("seals", ["off", "layer"])
def test_many_records_that_are_gone_are_told_as_one(seals: str) -> None:
    engine, a, _, _ = served(0, seals=seals)
    zeroed(engine, list(range(9, 33)))
    [incident] = incidents(engine, a)
    assert (incident.reasons, incident.count) == (("NEVER_WRITTEN",), 48)
    assert incident.cause.startswith("the canary's own records of 24 slots are gone")


NOTHING = "mapped, but nothing ever wrote there"


def named_wrongly(engine: Engine, a: Request, position: int) -> None:
    """Let the table name a slot that nobody has written."""
    engine.tables["full"][a.row, position] = 100


def freed_and_replaced(engine: Engine, a: Request, position: int) -> None:
    engine.manager.retire(engine.groups[0].pool, torch.tensor([engine.slot_of(engine.groups[0], a, position)]))
    named_wrongly(engine, a, position)


def copied_but_for_one(engine: Engine, a: Request, position: int) -> None:
    """Let a request go on in copies of its slots, one of which was left out."""
    table, group = engine.tables["full"][a.row], engine.groups[0]
    engine.step((engine.add("b", 20), 9))
    there, copies = table[:40].long().clone(), torch.arange(61, 101)
    some = torch.arange(40) != position
    engine.manager.move(group.pool, there[some], copies[some], owner=a.owner)
    for source in (group.pool.k_source, group.pool.v_source):
        assert source is not None
        for layer in source.layers:
            layer[copies[some]] = layer[there[some]]
    table[:40] = copies
    # Others have the slots that it had.
    engine.manager.retire(group.pool, there)
    group.pool.records[there] = 0


def loaded_but_for_one(engine: Engine, a: Request, position: int) -> None:
    """Let its records come back as they were, from elsewhere, all but one."""
    pool, table = engine.groups[0].pool, engine.tables["full"][a.row]
    there, others = table[:40].long().clone(), torch.arange(61, 101)
    some = torch.arange(40) != position
    pool.records[others[some]] = pool.records[there[some]]
    for source in (pool.k_source, pool.v_source):
        assert source is not None
        for layer in source.layers:
            layer[others] = layer[there]
    engine.manager.arrived(pool, others[some], pool.take_seals(there[some]))
    pool.records[there] = 0
    table[:40] = others


def emptied(engine: Engine, a: Request, position: int) -> None:
    """Let the engine empty its cache, and a request come whose table names a slot that is not written any more."""
    engine.manager.clear()
    a.cached = 0
    engine.step((a, 40))
    engine.tables["full"][a.row, position] = position + 1


@pytest.mark.parametrize("seals", ["off", "layer"])
@pytest.mark.parametrize(
    "bug",
    [named_wrongly, freed_and_replaced, copied_but_for_one, loaded_but_for_one, emptied],
    ids=lambda f: f.__name__,
)
def test_what_never_came_is_not_said_to_be_gone(bug: Callable[[Engine, Request, int], None], seals: str) -> None:
    engine, a, position, _ = served(3, seals=seals)
    bug(engine, a, position)
    [incident] = incidents(engine, a)
    assert incident.reasons == ("NEVER_WRITTEN",)
    assert incident.cause.startswith(NOTHING)


@pytest.mark.parametrize("seals", ["off", "layer"])
@pytest.mark.parametrize("reused", [False, True], ids=["a stale entry", "a slot reused"])
def test_anothers_record_whose_bytes_changed_is_not_said_to_be_overwritten(reused: bool, seals: str) -> None:
    engine, a, position, slot = served(4, seals=seals, check_tokens=True)
    b = engine.add("b", [7 + token for token in a.tokens])
    group, table = engine.groups[0], engine.tables["full"]
    engine.step((b, 20))
    if reused:
        engine.manager.retire(group.pool, torch.tensor([slot]), owner=a.owner)
        table[b.row, 20] = slot
        engine.step((b, 1), map_new=False)
    else:
        slot = engine.slot_of(group, b, 9)
        table[a.row, position] = slot
    for source in (group.pool.k_source, group.pool.v_source):
        assert source is not None
        for layer in source.layers:
            layer[slot] ^= 5
    found = [i for i in incidents(engine, a) if set(i.reasons) & {"TOKEN", "POSITION"}]
    assert found
    assert found[0].cause == "the slot was reused while in use, and its bytes changed as well"
