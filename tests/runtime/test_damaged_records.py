"""A damaged record told from damaged KV: one bit of a hash does not change by itself."""

from __future__ import annotations

import random

import pytest
import torch

import kv_canary as kc

from .engine import Engine, Request, full_engine

OWN = "the canary's own record is damaged, in one bit of its "


def served(seed: int, **options: bool) -> tuple[Engine, Request, int, int]:
    """Return an engine, its request, and a position of it with its slot."""
    rng = random.Random(seed)
    engine = full_engine(**options)
    a = engine.add("a", [rng.randrange(1 << 17) for _ in range(60)])
    engine.step((a, 40))
    position = rng.randrange(1, 39)
    return engine, a, position, engine.slot_of(engine.groups[0], a, position)


def incidents(engine: Engine, a: Request) -> list[kc.Incident]:
    engine.step((a, 1))
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
