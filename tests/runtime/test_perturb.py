"""Faults injected on purpose: each is found at its place and nowhere else, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import kv_canary as kc
from kv_canary.constants import UNCHECKED, Tag
from kv_canary.difftest.simulator.scripted_engine import kv_source
from kv_canary.perturb import MODES, PerturbConfig, Perturber, bytes_of, collect_active_slots
from kv_canary.perturb import perturber as perturber_module
from kv_canary.reports import CanaryViolationError
from kv_canary.runtime.cached import CachedSlots

from .engine import BYTES, Engine, Request, make_pool
from .test_captured import Tape

WARM_UP = 3
WINDOW = 5
# The kinds of groups, and the tags that they report under.
KINDS = {"full": "FULL", "window": "SWA", "lut": "SWA", "ring": "SWA"}
BYTE_MODES = [m for m in MODES if m.startswith("real_kv")]


def make_groups(kind: str, *, read_bytes: int = BYTES) -> list[kc.BufferGroup]:
    """Return groups of which the last is of the kind."""
    pool = make_pool(name=kind, read_bytes=read_bytes)
    if kind == "full":
        return [kc.BufferGroup(name="full", pool=pool)]
    if kind == "lut":
        lut = torch.cat([torch.zeros(1, dtype=torch.int64), torch.arange(127).flip(0) + 1])
        full = kc.BufferGroup(name="full", pool=make_pool())
        return [full, kc.BufferGroup(name="lut", pool=pool, window=WINDOW, lut=lut)]
    return [kc.BufferGroup(name=kind, pool=pool, window=WINDOW, ring=kind == "ring")]


class Perturbed(Engine):
    """Two requests in flight, and one that is over and whose slots the prefix cache holds.

    Its forwards tell the canary which tokens to expect, unless `oracle` is False.
    """

    oracle = True

    def __init__(self, kind: str, perturb: PerturbConfig | None, *, read_bytes: int = BYTES, **options: Any) -> None:
        config = kc.CanaryConfig(**{"backend": "reference", "check_tokens": True, **options})
        super().__init__(make_groups(kind, read_bytes=read_bytes), config, perturb=perturb, cached=self.cached)
        self.group = self.groups[-1]
        self.asked = 0
        self.over = self.add("over", 12)
        # Their texts differ at every position.
        self.running = [self.add("a", range(100, 180)), self.add("b", range(300, 380))]
        self.step((self.over, 12))
        self.step(*((r, 12) for r in self.running))

    def cached(self) -> list[CachedSlots]:
        self.asked += 1
        positions = torch.arange(self.over.cached)
        slots = torch.tensor(
            [self.slot_of(self.group, self.over, p) for p in range(self.over.cached)], dtype=torch.int64
        )
        previous = torch.full_like(positions, UNCHECKED)
        return [CachedSlots(group=self.group.name, slots=slots, positions=positions, previous=previous)]

    def batch(self, *work: tuple[Request, int], map_new: bool = True) -> kc.ForwardBatch:
        batch = super().batch(*work, map_new=map_new)
        return dataclasses.replace(batch, expected_input_ids=batch.input_ids.clone()) if self.oracle else batch

    def decode(self, times: int = 1) -> None:
        for _ in range(times):
            self.step(*((r, 1) for r in self.running))

    @property
    def injections(self) -> Sequence[Any]:
        return self.manager.perturber.injections

    def tensors(self) -> list[torch.Tensor]:
        """Return what an injection may change for one forward."""
        return [*self.tables.values(), *(g.lut for g in self.groups if g.lut is not None)]


def perturbed(kind: str, mode: str, *, perturb: dict[str, Any] | None = None, **options: Any) -> Perturbed:
    """Return an engine whose faults are put where HEAD sees them, unless `perturb` says otherwise."""
    settings = {"mode": mode, "group": kind, "warm_up": WARM_UP, "covered_only": True, **(perturb or {})}
    return Perturbed(kind, PerturbConfig(**settings), **options)


def run_until_injected(engine: Perturbed) -> Any:
    """Decode until something is injected, which the warm-up delays; return it."""
    for _ in range(4):
        engine.decode()
        if engine.injections:
            break
    [injection] = engine.injections
    assert injection.step == WARM_UP + 1 == engine.manager.step
    assert injection.group == engine.group.name
    return injection


def places(reports: Sequence[kc.ViolationReport]) -> set[tuple[int, str, int, tuple[str, ...]]]:
    return {(r.step, r.tag, r.slot, r.reasons) for r in reports}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("records", ["one", "head_and_tail"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bit_flipped_in_use_is_found_there_by_that_forward(kind: str, records: str, seed: int) -> None:
    engine = perturbed(kind, "real_kv_used", perturb={"seed": seed}, records=records)
    injection = run_until_injected(engine)
    [slot] = injection.slots
    [name] = [r.name for r in kc.Reason if r in injection.reasons]
    # HEAD's own records have no fingerprints.
    tag = f"{'HEAD' if records == 'one' else 'TAIL'}_{KINDS[kind]}"
    assert injection.tag.name == tag
    assert name in ("K", "V")
    assert places(engine.found()) == {(injection.step, tag, slot, (name,))}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_a_bit_flipped_behind_tail_is_found_there_by_the_next_forward(kind: str, seed: int) -> None:
    engine = perturbed(kind, "real_kv_post_forward", perturb={"seed": seed})
    injection = run_until_injected(engine)
    assert engine.found() == []
    engine.decode()
    [slot] = injection.slots
    [name] = [r.name for r in kc.Reason if r in injection.reasons]
    assert injection.tag.name == f"HEAD_{KINDS[kind]}"
    assert places(engine.found()) == {(injection.step + 1, injection.tag.name, slot, (name,))}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["full", "window", "lut"])
def test_a_bit_flipped_in_an_idle_slot_is_found_there_by_the_next_sweep(kind: str, seed: int) -> None:
    engine = perturbed(kind, "real_kv_unused_cache", perturb={"seed": seed}, sweep_every=WARM_UP + 3)
    injection = run_until_injected(engine)
    engine.decode()
    assert engine.found() == []
    engine.decode()
    [slot] = injection.slots
    [name] = [r.name for r in kc.Reason if r in injection.reasons]
    assert slot in {engine.slot_of(engine.group, engine.over, p) for p in range(12)}
    assert injection.tag.name == f"SWEEP_{KINDS[kind]}"
    assert places(engine.found()) == {(WARM_UP + 3, injection.tag.name, slot, (name,))}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", KINDS)
def test_swapped_table_entries_are_found_there_and_where_they_are_predecessors(kind: str, seed: int) -> None:
    engine = perturbed(kind, "req_to_token", perturb={"seed": seed})
    injection = run_until_injected(engine)
    assert injection.reasons == kc.Reason.POSITION
    assert injection.tag.name == f"HEAD_{KINDS[kind]}"
    reports = engine.found()
    assert {r.step for r in reports} == {injection.step}
    assert {r.tag for r in reports} == {f"HEAD_{KINDS[kind]}", f"TAIL_{KINDS[kind]}"}
    moved = [r for r in reports if "POSITION" in r.reasons]
    assert {(r.tag, r.slot) for r in moved} == {(tag, s) for tag in {r.tag for r in moved} for s in injection.slots}
    assert {r.tag for r in moved} >= {injection.tag.name}
    positions = {r.position for r in moved}
    assert len(positions) == 2
    for other in (r for r in reports if r not in moved):
        seed_was_moved = other.reasons == ("PREFIX",) and other.position in positions
        assert seed_was_moved or (other.reasons == ("CHAIN",) and other.position - 1 in positions)
    # Both are one request's.
    assert len({r.request_id for r in reports}) == 1


@pytest.mark.parametrize("records", ["one", "head_and_tail"])
@pytest.mark.parametrize("kind", KINDS)
def test_swapped_tokens_are_found_there_when_they_are_written(kind: str, records: str) -> None:
    engine = perturbed(kind, "next_token_swap", records=records)
    injection = run_until_injected(engine)
    assert injection.reasons == kc.Reason.WRITE_TOKEN
    assert injection.tag.name == f"{'TAIL' if records == 'one' else 'HEAD'}_{KINDS[kind]}"
    assert injection.slots == {engine.slot_of(engine.group, r, r.cached - 1) for r in engine.running}
    reports = engine.found()
    assert {r.reasons for r in reports} == {("WRITE_TOKEN",)}
    mine = [r for r in reports if r.tag == injection.tag.name]
    assert {(r.step, r.slot) for r in mine} == {(injection.step, s) for s in injection.slots}
    # The tokens are every group's.
    assert {r.position for r in reports} == {engine.running[0].cached - 1}


@pytest.mark.parametrize("kind", KINDS)
def test_without_an_oracle_swapped_tokens_are_found_once_others_follow(kind: str) -> None:
    engine = perturbed(kind, "next_token_swap", check_tokens=False)
    engine.oracle = False
    injection = run_until_injected(engine)
    assert engine.found() == []
    engine.decode()
    reports = [r for r in engine.found() if r.tag == injection.tag.name]
    assert injection.reasons == kc.Reason.PREFIX
    assert places(reports) == {(injection.step + 1, injection.tag.name, s, ("PREFIX",)) for s in injection.slots}


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_injected_before_the_warm_up_is_over(mode: str) -> None:
    engine = perturbed("full", mode, perturb={"warm_up": 20}, sweep_every=1)
    engine.decode(20 - engine.manager.step)
    assert engine.injections == []
    assert engine.found() == []
    engine.decode(2)
    assert [i.step for i in engine.injections] == [21]
    assert engine.found() != []


@pytest.mark.parametrize("mode", ["req_to_token", "real_kv_used", "real_kv_post_forward", "next_token_swap"])
def test_injections_come_so_often_and_so_many_times(mode: str) -> None:
    engine = perturbed("full", mode, perturb={"every": 3, "count": 4})
    engine.decode(14)
    assert [i.step for i in engine.injections] == [4, 7, 10, 13]
    endless = perturbed("full", mode, perturb={"every": 2, "count": 0})
    endless.decode(8)
    assert [i.step for i in endless.injections] == list(range(4, 11, 2))


@pytest.mark.parametrize("mode", MODES)
def test_the_seed_decides_what_is_chosen(mode: str) -> None:
    def chosen(seed: int) -> list[str]:
        engine = perturbed("full", mode, perturb={"seed": seed, "count": 0})
        engine.decode(6)
        return [f"{i.slots} {i.where}" for i in engine.injections]

    first = chosen(1)
    assert chosen(1) == first != []
    if mode != "next_token_swap":
        # Of two requests there is one pair.
        assert any(chosen(seed) != first for seed in (2, 3))


@pytest.mark.parametrize("mode", ["req_to_token", "real_kv_used", "real_kv_post_forward", "next_token_swap"])
def test_the_target_group_alone_is_chosen_and_any_without_one(mode: str) -> None:
    def groups(group: str) -> set[str]:
        engine = Perturbed("lut", PerturbConfig(mode=mode, group=group, warm_up=0, count=0))
        engine.decode(8)
        return {i.group for i in engine.injections}

    assert groups("full") == {"full"}
    assert groups("lut") == {"lut"}
    assert groups("") == {"full", "lut"}


def test_a_forward_without_the_group_is_left_alone() -> None:
    engine = Perturbed("lut", PerturbConfig(mode="real_kv_used", group="lut", warm_up=0))
    engine.forward = engine.manager.forward("draft", groups=["full"])
    batch = engine.batch(*((r, 1) for r in engine.running))
    only = {"out_slots": {"full": batch.out_slots["full"]}, "tables": {"full": batch.tables["full"]}}
    with engine.forward.around(dataclasses.replace(batch, **only)):
        pass
    assert engine.injections == []


@pytest.mark.parametrize("mode", ["req_to_token", "real_kv_used"])
def test_slots_that_the_forward_itself_writes_are_never_chosen(mode: str) -> None:
    engine = Perturbed("full", None)
    a, b = engine.running
    # b rewrites all that a reads, two slots excepted.
    spared = [engine.slot_of(engine.group, a, p) for p in (3, 8)]
    written = [s for p in range(12) if (s := engine.slot_of(engine.group, a, p)) not in spared]
    batch = dataclasses.replace(
        engine.batch((a, 1), (b, 9)),
        out_slots={"full": torch.tensor([100, *written[:9]], dtype=torch.int64)},
    )
    free = {s.slot for s in collect_active_slots(batch, engine.group)}
    assert free == {engine.slot_of(engine.group, r, p) for r in (a, b) for p in range(12)} - set(written[:9])
    for seed in range(30):
        perturber = Perturber(PerturbConfig(mode=mode, warm_up=0, seed=seed), engine.groups)
        perturber.before(batch, step=1)
        perturber.restore()
        [injection] = perturber.injections
        assert injection.slots <= free


def test_slots_that_the_forward_uses_are_not_idle() -> None:
    engine = Perturbed("full", None)
    engine.over, idle = engine.running[0], engine.over
    [used] = engine.cached()
    [kept] = (engine.slot_of(engine.group, idle, p) for p in [4])
    slots, positions = torch.cat([used.slots, torch.tensor([kept])]), torch.cat([used.positions, torch.tensor([4])])
    part = dataclasses.replace(used, slots=slots, positions=positions, previous=torch.full_like(slots, UNCHECKED))
    for seed in range(10):
        perturber = Perturber(PerturbConfig(mode="real_kv_unused_cache", warm_up=0, seed=seed), engine.groups)
        perturber.before(engine.batch((engine.running[0], 1)), step=1, cached=lambda: [part])
        assert [i.slots for i in perturber.injections] == [{kept}]


def test_padding_and_slots_out_of_range_are_never_chosen() -> None:
    engine = Perturbed("lut", None)
    a = engine.running[0]
    batch = engine.batch((a, 1))
    full, lut = engine.groups
    for table in engine.tables.values():
        table[a.row][[2, 9, 10]] = torch.tensor([0, 127, 4000], dtype=torch.int32)
    full_slots = {s.position for s in collect_active_slots(batch, full)}
    assert full_slots == set(range(12)) - {2, 10}
    lut.lut[127] = 4000
    assert {s.position for s in collect_active_slots(batch, lut)} == {7, 8, 11}


@pytest.mark.parametrize("covered_only", [True, False])
@pytest.mark.parametrize("mode", BYTE_MODES)
def test_only_the_chosen_half_and_layer_are_flipped(mode: str, covered_only: bool) -> None:
    positions = set()
    for seed in range(8):
        settings = {"half": "V", "layer": 1, "covered_only": covered_only, "seed": seed, "count": 0}
        engine = perturbed("full", mode, perturb=settings)
        # No model writes from here on, so that what is flipped is all that changes.
        engine.write_bytes = lambda batch: None
        layers = [*engine.group.pool.k_source.layers, *engine.group.pool.v_source.layers]
        before = [layer.clone() for layer in layers]
        engine.decode(4)
        changed = [set((a != b).any(dim=1).nonzero().view(-1).tolist()) for a, b in zip(before, layers, strict=True)]
        assert changed[:3] == [set()] * 3
        assert changed[3]
        assert changed[3] <= {s for i in engine.injections for s in i.slots}
        assert {i.reasons for i in engine.injections} <= {kc.Reason.V, kc.Reason(0)}
        for injection in engine.injections:
            found = re.search(r"V of layer 1, byte \d+, position (\d+) of ", injection.where)
            positions.add(int(found[1]) % 2)
    # Odd positions are covered in layer 1.
    assert positions == ({1} if covered_only else {0, 1})


LAYERS, WIDTH, READ_BYTES = 8, 32, 16
_WHERE = re.compile(r"([KV]) of layer (\d+), byte (\d+), position (\d+) of ")


def deep_engine(perturb: PerturbConfig, **options: Any) -> Engine:
    """Return an engine of 8 layers of 32 bytes a token, of which 16 of one layer are sampled."""
    k, v = (kv_source(256, WIDTH, layers=LAYERS, read_bytes=READ_BYTES) for _ in range(2))
    names = tuple(f"layer {i}" for i in range(LAYERS))
    pool = kc.KvPool(name="deep", num_slots=256, k_source=k, v_source=v, layer_names=names, device="cpu")
    config = kc.CanaryConfig(**{"backend": "reference", "max_reports_per_step": 1024, **options})
    return Engine([kc.BufferGroup(name="full", pool=pool)], config, perturb=perturb)


def flipped_in(engine: Engine) -> list[tuple[str, int, int, int]]:
    """Return half, layer, byte and position of every bit that was flipped."""
    found = [_WHERE.match(i.where) for i in engine.manager.perturber.injections]
    return [(m[1], int(m[2]), int(m[3]), int(m[4])) for m in found]


@pytest.mark.parametrize("mode", ["real_kv_used", "real_kv_post_forward"])
def test_bits_flip_anywhere_unless_told_otherwise(mode: str) -> None:
    injections, flipped = [], []
    for seed in (11, 12):
        engine = deep_engine(PerturbConfig(mode=mode, warm_up=0, count=100, seed=seed))
        a, b = engine.add("a", 120), engine.add("b", 120)
        engine.step((a, 7), (b, 10))
        for _ in range(100):
            engine.step((a, 1), (b, 1))
        injections += engine.manager.perturber.injections
        flipped += flipped_in(engine)
    assert len(injections) == len(flipped) == 200
    # Each is expected 25 times, and lies within 4.5 standard deviations of that; halves and bytes likewise.
    layers, halves = Counter(layer for _, layer, _, _ in flipped), Counter(half for half, *_ in flipped)
    assert len(layers) == LAYERS
    assert all(5 <= n <= 46 for n in layers.values())
    assert 68 <= halves["K"] <= 132
    assert len({byte for _, _, byte, _ in flipped}) > WIDTH * 0.9
    source = engine.groups[0].pool.k_source
    for (_, layer, byte, position), injection in zip(flipped, injections, strict=True):
        at, start, end = source.coverage(position)
        assert injection.position == position
        assert injection.sampled == (layer == at and start <= byte < end)
    # One in 16 is expected: 12.5.
    assert 0 < sum(i.sampled for i in injections) < 35
    # Nothing can see the others, and the injection says so.
    assert {(i.reasons, i.tag) for i in injections if not i.sampled} == {(kc.Reason(0), None)}


def test_a_byte_that_is_sampled_has_to_be_asked_for() -> None:
    engine = deep_engine(PerturbConfig(mode="real_kv_used", warm_up=0, count=30, covered_only=True))
    a = engine.add("a", 80)
    engine.step((a, 40))
    for _ in range(30):
        engine.step((a, 1))
    injections = engine.manager.perturber.injections
    assert len(injections) == 30
    assert all(i.sampled and i.reasons in (kc.Reason.K, kc.Reason.V) for i in injections)
    assert len({layer for _, layer, _, _ in flipped_in(engine)}) > LAYERS / 2
    reports = engine.found()
    assert all(any(r.step == i.step and r.slot in i.slots for r in reports) for i in injections)


@pytest.mark.parametrize("mode", BYTE_MODES)
def test_what_no_sample_shows_a_scrub_finds_and_without_seals_nothing_does(mode: str) -> None:
    met: Counter[bool] = Counter()
    for seed in range(8):
        for seals in ("layer", "off"):
            # One byte of 32 is sampled, in one layer of two.
            perturb = {"seed": seed, "covered_only": False}
            engine = perturbed("full", mode, perturb=perturb, seals=seals, read_bytes=1, sweep_every=WARM_UP + 3)
            injection = run_until_injected(engine)
            [slot] = injection.slots
            engine.decode(3)
            early = engine.found()
            met[injection.sampled] += 1
            if injection.sampled:
                assert {(r.slot, r.tag) for r in early} >= {(slot, injection.tag.name)}
                continue
            assert early == []
            engine.manager.scrub()
            late = engine.found()
            if seals == "off":
                assert (late, injection.reasons, injection.tag) == ([], kc.Reason(0), None)
            else:
                [name] = [r.name for r in kc.Reason if r in injection.reasons]
                assert name in ("SEAL_K", "SEAL_V")
                assert {(r.slot, r.tag, r.reasons) for r in late} == {(slot, injection.tag.name, (name,))}
    assert met[False] >= 10


def test_in_a_pool_that_groups_share_a_scrub_reports_under_the_last() -> None:
    pool = make_pool(read_bytes=1)
    groups = [kc.BufferGroup(name="full", pool=pool), kc.BufferGroup(name="window", pool=pool, window=WINDOW)]
    pool.keep_seals(by_layer=True, seed=1)
    engine = Engine(groups)
    a = engine.add("a", 40)
    batch = engine.batch((a, 12))
    tags = set()
    for seed in range(8):
        perturber = Perturber(PerturbConfig(mode="real_kv_post_forward", warm_up=0, seed=seed), groups)
        perturber.after(batch, step=1)
        tags |= {i.tag for i in perturber.injections if not i.sampled}
    assert tags == {Tag.SWEEP_SWA}


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"mode": "everything"}, "mode must be one of 'req_to_token', .*, got 'everything'"),
        ({"half": "Q"}, "half must be one of '', 'K', 'V', got 'Q'"),
        ({"every": 0}, "every must be at least 1, got 0"),
        ({"count": -1}, "count must be at least 0, got -1"),
        ({"warm_up": -1}, "warm_up must be at least 0, got -1"),
        ({"layer": -1}, "layer must be at least 0, got -1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=f"kv-canary: PerturbConfig: {complaint}"):
        PerturbConfig(**{"mode": "req_to_token", **settings})


@pytest.mark.parametrize("name", ["warm_up", "every", "count", "layer"])
def test_numbers_must_be_numbers(name: str) -> None:
    with pytest.raises(TypeError, match=f"PerturbConfig: {name} must be an int, got True"):
        PerturbConfig(mode="req_to_token", **{name: True})


def test_a_switch_must_be_a_switch() -> None:
    with pytest.raises(TypeError, match="kv-canary: PerturbConfig: covered_only must be a bool, got 'sampled'"):
        PerturbConfig(mode="real_kv_used", covered_only="sampled")
    assert PerturbConfig(mode="real_kv_used").covered_only is False


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"mode": "req_to_token", "group": "none"}, "group must be one of full, got 'none'"),
        ({"mode": "real_kv_used", "layer": 2}, "group, half and layer must be bytes that there are, got .* layer 2"),
        ({"mode": "real_kv_used", "half": "V"}, "group, half and layer must be bytes that there are, got .*'V'"),
    ],
)
def test_what_an_engine_does_not_have_is_refused(settings: dict[str, Any], complaint: str) -> None:
    pool = make_pool()
    pool.v_source = None
    with pytest.raises(ValueError, match=f"kv-canary: PerturbConfig: {complaint}"):
        Perturber(PerturbConfig(**settings), [kc.BufferGroup(name="full", pool=pool)])


def test_the_environment_asks_for_a_fault() -> None:
    asked = {
        "KV_CANARY_PERTURB_MODE": "real_kv_used",
        "KV_CANARY_PERTURB_GROUP": "full",
        "KV_CANARY_PERTURB_HALF": "K",
        "KV_CANARY_PERTURB_LAYER": "1",
        "KV_CANARY_PERTURB_WARM_UP": "7",
        "KV_CANARY_PERTURB_EVERY": "2",
        "KV_CANARY_PERTURB_COUNT": "0",
        "KV_CANARY_PERTURB_COVERED_ONLY": "on",
        "KV_CANARY_PERTURB_SEED": "5",
        "KV_CANARY_STRIDE": "3",
    }
    assert PerturbConfig.from_env(asked) == PerturbConfig(
        mode="real_kv_used",
        group="full",
        half="K",
        layer=1,
        warm_up=7,
        every=2,
        count=0,
        covered_only=True,
        seed=5,
    )
    assert PerturbConfig.from_env({"KV_CANARY_PERTURB_LAYER": "none"}, mode="real_kv_used").layer is None
    assert PerturbConfig.from_env(asked, warm_up=1).warm_up == 1
    assert PerturbConfig.from_env({"KV_CANARY_STRIDE": "3"}) is None


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"SEED": "5"}, "KV_CANARY_PERTURB_MODE must be given with seed"),
        (
            {"MOD": "real_kv_used"},
            r"KV_CANARY_PERTURB_MOD must be a known setting.*did you mean KV_CANARY_PERTURB_MODE",
        ),
        ({"MODE": "real_kv_used", "SEED": "five"}, "KV_CANARY_PERTURB_SEED must be int, got 'five'"),
        ({"MODE": "real"}, "mode must be one of 'req_to_token'"),
    ],
)
def test_an_environment_that_cannot_be_read_is_refused(asked: dict[str, str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        PerturbConfig.from_env({f"KV_CANARY_PERTURB_{name}": text for name, text in asked.items()})


def test_the_environment_reaches_the_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("KV_CANARY_PERTURB_")]:
        monkeypatch.delenv(name)
    assert Perturbed("full", None).manager.perturber is None
    monkeypatch.setenv("KV_CANARY_PERTURB_MODE", "real_kv_used")
    monkeypatch.setenv("KV_CANARY_PERTURB_WARM_UP", str(WARM_UP))
    monkeypatch.setenv("KV_CANARY_PERTURB_COVERED_ONLY", "1")
    engine = Perturbed("full", None)
    run_until_injected(engine)
    assert len(engine.found()) == 1
    # An argument comes before the environment.
    other = Perturbed("full", PerturbConfig(mode="req_to_token"))
    assert other.manager.perturber.config.mode == "req_to_token"
    monkeypatch.setenv("KV_CANARY_PERTURB_GROUP", "nowhere")
    with pytest.raises(ValueError, match="group must be one of full, got 'nowhere'"):
        Perturbed("full", None)


@pytest.mark.parametrize("mode", ["req_to_token", "next_token_swap"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_for_one_forward_is_undone_behind_it(kind: str, mode: str) -> None:
    engine = perturbed(kind, mode)
    engine.decode()
    batch = engine.batch(*((r, 1) for r in engine.running))
    before = [t.clone() for t in [*engine.tensors(), batch.input_ids]]
    inside: list[bool] = []
    with engine.forward.around(batch):
        now = [*engine.tensors(), batch.input_ids]
        inside += [torch.equal(a, b) for a, b in zip(before, now, strict=True)]
        engine.write_bytes(batch)
    assert len(engine.injections) == 1
    # The very tensors that the model is given. Tables come first, then LUTs, then the tokens: where a group has a LUT
    # its table is another group's as well.
    changed = {"next_token_swap": -1, "req_to_token": -2}[mode]
    assert [i - len(inside) for i, same in enumerate(inside) if not same] == [changed]
    assert all(torch.equal(a, b) for a, b in zip(before, [*engine.tensors(), batch.input_ids], strict=True))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("mode", ["req_to_token", "next_token_swap"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_for_one_forward_is_undone_when_the_model_raises(
    kind: str, mode: str, error: type[BaseException]
) -> None:
    engine = perturbed(kind, mode)
    engine.decode()
    batch = engine.batch(*((r, 1) for r in engine.running))
    before = [t.clone() for t in [*engine.tensors(), batch.input_ids]]
    with pytest.raises(error), engine.forward.around(batch):
        raise error("the model failed")
    assert len(engine.injections) == 1
    assert all(torch.equal(a, b) for a, b in zip(before, [*engine.tensors(), batch.input_ids], strict=True))
    engine.found()
    engine.decode(3)
    assert engine.found() == []


def test_a_forward_that_is_refused_is_not_damaged() -> None:
    engine = perturbed("full", "req_to_token")
    engine.decode()
    batch = engine.batch(*((r, 1) for r in engine.running))
    # A history that cannot be had: the row is another's now, so that its tail starts anew.
    starved = dataclasses.replace(batch.requests[0], tokens=lambda start, end: [], owner=999)
    before = engine.tables["full"].clone()
    with pytest.raises(ValueError, match="must be 13 tokens, got 0"):
        engine.forward.begin(dataclasses.replace(batch, requests=[starved, batch.requests[1]]))
    assert torch.equal(engine.tables["full"], before)


def test_a_forward_that_does_not_begin_for_what_was_found_before_is_not_damaged() -> None:
    perturb = PerturbConfig(mode="req_to_token", warm_up=WARM_UP + 1)
    engine = Perturbed("full", perturb, mode="raise")
    engine.decode()
    bytes_of(engine.group.pool.k_source, engine.slot_of(engine.group, engine.running[0], 11), 1)[0] ^= 1
    engine.decode()
    batch = engine.batch(*((r, 1) for r in engine.running))
    before = engine.tables["full"].clone()
    with pytest.raises(CanaryViolationError):
        engine.forward.begin(batch)
    assert torch.equal(engine.tables["full"], before)


def test_what_the_engine_changed_meanwhile_stays() -> None:
    engine = perturbed("full", "req_to_token")
    engine.decode()
    batch = engine.batch(*((r, 1) for r in engine.running))
    table = engine.tables["full"]
    before = table.clone()
    with engine.forward.around(batch):
        [first, second] = (table != before).nonzero().tolist()
        # An engine that prepares its next forward early gives a row to somebody else.
        table[tuple(first)] = 77
    assert int(table[tuple(first)]) == 77
    assert int(table[tuple(second)]) == int(before[tuple(second)])


def test_a_forward_that_was_lost_is_undone_by_the_next_one() -> None:
    engine = Perturbed("full", None)
    batch = engine.batch(*((r, 1) for r in engine.running))
    perturber = Perturber(PerturbConfig(mode="req_to_token", warm_up=0), engine.groups)
    before = engine.tables["full"].clone()
    perturber.before(batch, step=1)
    assert not torch.equal(engine.tables["full"], before)
    perturber.before(batch, step=2)
    assert torch.equal(engine.tables["full"], before)


@pytest.mark.parametrize("mode", MODES)
def test_tables_are_read_in_steps_only_in_which_an_injection_is_due(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    engine = perturbed("full", mode, perturb={"warm_up": 6})

    def count(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            reads.append(engine.manager.step)
            return function(*args)

        return counted

    for name in ("collect_active_slots", "pick_out_cache_loc_slot"):
        monkeypatch.setattr(perturber_module, name, count(getattr(perturber_module, name)))
    engine.asked = 0
    engine.decode(12)
    assert [i.step for i in engine.injections] == [7]
    if mode != "next_token_swap":
        assert set(reads) == {7}
    # The prefix cache is walked where it is to be damaged, and then only.
    assert engine.asked == (mode == "real_kv_unused_cache")


@pytest.mark.parametrize("mode", MODES)
def test_a_fault_before_a_replayed_graph_is_found(mode: str) -> None:
    engine = perturbed("full", mode, perturb={"warm_up": 4}, sweep_every=6)
    graph = Tape(engine, requests=4, tokens=8, expects_tokens=True)
    before = engine.tables["full"].clone()
    for _ in range(4):
        batch = engine.batch(*((r, 1) for r in engine.running))
        graph.run(batch)
        for request in engine.running:
            request.cached += 1
    [injection] = engine.injections
    assert injection.step == 5
    reports = engine.found()
    right = [r for r in reports if r.tag == injection.tag.name and r.slot in injection.slots]
    wanted = {r.name for r in kc.Reason if r in injection.reasons}
    assert right
    assert wanted <= set(right[0].reasons)
    width = 12
    assert torch.equal(engine.tables["full"][:, :width], before[:, :width])


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_injected_where_there_is_nothing_to_damage(mode: str) -> None:
    engine = Engine(make_groups("full"))
    perturber = engine.manager.perturber = Perturber(PerturbConfig(mode=mode, warm_up=0), engine.groups)
    engine.run(engine.batch())
    assert perturber.injections == []


def test_one_request_alone_has_nobody_to_swap_tokens_with() -> None:
    engine = Perturbed("full", PerturbConfig(mode="next_token_swap", warm_up=0))
    for _ in range(3):
        engine.step((engine.running[0], 1))
    assert engine.injections == []


def test_bytes_of_finds_a_token_in_any_geometry() -> None:
    rng = random.Random(3)
    for page_size, bias, offset in ((1, 0, 0), (4, 1, 8), (16, 1, 3)):
        layer = torch.zeros(6, offset + page_size * 7 + 5, dtype=torch.uint8)
        source = kc.KvSource(
            layers=(torch.zeros_like(layer), layer),
            page_size=page_size,
            bytes_per_token=7,
            offset_bytes=offset,
            slot_bias=bias,
        )
        slot = rng.randrange(bias, bias + 6 * page_size)
        bytes_of(source, slot, 1)[:] = 9
        row, at = divmod(slot - bias, page_size)
        expected = torch.zeros_like(layer)
        expected[row, offset + at * 7 : offset + at * 7 + 7] = 9
        assert torch.equal(layer, expected)
