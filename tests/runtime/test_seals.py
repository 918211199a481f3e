"""Seals at work: every change of a byte is found in a while, and nothing that an engine does is one."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import kv_canary as kc
from kv_canary import ops
from kv_canary.difftest.simulator.scripted_engine import kv_source
from kv_canary.runtime import seals
from kv_canary.runtime.context import CanaryContext
from kv_canary.runtime.history import StepHistory, StepRecord
from kv_canary.runtime.seals import SCRUB_EVERY

from .engine import Engine, Request, full_engine, make_pool

BACKENDS = ("reference", "triton")
SLOTS = 256


def sealed_engine(*, num_slots: int = 128, **options: object) -> Engine:
    """An engine whose bytes are sampled in few places, so that only seals see the others."""
    pool = make_pool(num_slots, read_bytes=1)
    config = kc.CanaryConfig(**{"backend": "reference", "seals": "layer", **options})  # type: ignore[arg-type]
    return Engine([kc.BufferGroup(name="full", pool=pool)], config)


def slots_of(engine: Engine, request: Request, start: int, end: int) -> torch.Tensor:
    return engine.tables["full"][request.row, start:end].long().clone()


def damage(engine: Engine, half: str, slot: int, layer: int, byte: int, bit: int = 0) -> None:
    pool = engine.groups[0].pool
    source = pool.k_source if half == "K" else pool.v_source
    assert source is not None
    source.layers[layer].view(-1, source.bytes_per_token)[slot, byte] ^= 1 << bit


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bit_that_is_never_sampled_is_found(backend: str) -> None:
    engine = sealed_engine(backend=backend)
    a = engine.add("a", 40)
    engine.step((a, 9))
    slot = int(slots_of(engine, a, 4, 5))
    damage(engine, "V", slot, layer=1, byte=31, bit=7)
    engine.step((a, 1))
    # Its own forward reads another byte.
    assert engine.found() == []
    engine.manager.scrub()
    (report,) = engine.found()
    assert (report.reasons, report.slot, report.position, report.tag) == (("SEAL_V",), slot, 4, "SWEEP_FULL")
    assert "V somewhere from layer 0 to layer 1" in report.sentence
    assert "written by request a at step 1; its bytes were sealed then" in report.sentence
    assert "the K/V bytes changed after they were written" in report.cause


@pytest.mark.parametrize("first", ["HEAD", "seal"])
def test_what_head_and_a_seal_find_of_one_damage_is_one_incident(first: str) -> None:
    engine = sealed_engine()
    a = engine.add("a", 40)
    engine.step((a, 9))
    source = engine.groups[0].pool.k_source
    assert source is not None
    slots = slots_of(engine, a, 2, 6)
    # Whole rows of four tokens.
    for layer in source.layers:
        layer.view(-1, source.bytes_per_token)[slots] ^= 255
    if first == "seal":
        engine.manager.scrub()
    engine.step((a, 1))
    engine.manager.scrub()
    engine.manager.flush()
    (incident,) = engine.manager.incidents
    assert incident.positions == ((2, 5),)
    assert {"K", "SEAL_K"} == set(incident.reasons)
    assert {"HEAD_FULL", "SWEEP_FULL"} <= set(incident.tags)
    assert incident.requests == ("a",)
    # Another damage is another incident.
    damage(engine, "V", int(slots_of(engine, a, 8, 9)), layer=0, byte=3)
    engine.manager.scrub()
    engine.manager.flush()
    assert len(engine.manager.incidents) == 2


@pytest.mark.parametrize(("width", "per_band", "place"), [(2560, 1, "layer 4"), (2000, 2, "layer 4 to layer 5")])
def test_layers_are_told_apart_as_far_as_there_is_room(width: int, per_band: int, place: str) -> None:
    k, v = (kv_source(64, width, layers=6, read_bytes=1) for _ in range(2))
    names = tuple(f"layer {i}" for i in range(6))
    pool = kc.KvPool(name="pool", num_slots=64, k_source=k, v_source=v, layer_names=names, device="cpu")
    engine = Engine([kc.BufferGroup(name="full", pool=pool)], kc.CanaryConfig(backend="reference", seals="layer"))
    assert pool.seals is not None
    assert pool.seals.layers_per_band == per_band
    a = engine.add("a", 40)
    engine.step((a, 9))
    damage(engine, "K", int(slots_of(engine, a, 4, 5)), layer=4, byte=300)
    engine.manager.scrub()
    (report,) = engine.manager.reports
    assert report.places[0].endswith(place)


def test_going_round_finds_it_in_a_while() -> None:
    engine = sealed_engine(scrub_share=1.0)
    a = engine.add("a", 120)
    engine.step((a, 9))
    damage(engine, "K", int(slots_of(engine, a, 8, 9)), layer=0, byte=17)
    steps = 0
    found: list[kc.ViolationReport] = []
    while not found and steps < 40:
        engine.step((a, 1))
        steps += 1
        found = engine.found()
    assert {r.reasons for r in found} == {("SEAL_K",)}
    scrub = engine.manager.summary().scrub
    assert scrub is not None
    assert scrub.verified > 0
    assert scrub.unsealed == 0


def test_one_piece_of_sixteen_is_timed_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events cost the host more than the rest of a piece; a piece whose events are not over is waited for by none."""
    engine = sealed_engine(scrub_share=1.0)
    engine.step((engine.add("a", 40), 9))
    scrub, timed = engine.manager._steps.scrub, list[int]()

    class Timer:
        is_over = False

        def __init__(self, device: torch.device) -> None:
            timed.append(piece)

        def span(self) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

        def seconds(self) -> float | None:
            return 0.5 if self.is_over else None

    monkeypatch.setattr(seals, "DeviceTimer", Timer)
    monkeypatch.setattr(scrub, "_on_gpu", True)
    before = scrub._bandwidth
    for piece in range(40):
        Timer.is_over = piece >= 20
        scrub.piece()
        assert (scrub._bandwidth == before) == (piece < 20)
    assert timed == [0, 20, 36]


def test_rounds_and_their_age_are_told() -> None:
    engine = sealed_engine(scrub_share=1.0, num_slots=64)
    a = engine.add("a", 120)
    engine.step((a, 20))
    before = engine.manager.summary().scrub
    assert before is not None
    assert (before.rounds, before.oldest) == (0, None)
    for _ in range(2 * SCRUB_EVERY):
        engine.step((a, 1))
    after = engine.manager.summary().scrub
    assert after is not None
    assert after.rounds >= 1
    assert after.oldest is not None
    assert 0 < after.oldest < 60
    assert engine.manager.summary().as_dict()["scrub"]["rounds"] == after.rounds
    assert full_engine().manager.summary().scrub is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("records", ["one", "head_and_tail"])
def test_what_engines_do_is_no_damage(backend: str, records: str) -> None:
    engine = sealed_engine(backend=backend, records=records, num_slots=72)
    pool, manager = engine.groups[0].pool, engine.manager
    a, b = engine.add("a", 60), engine.add("b", 60)
    engine.step((a, 20), (b, 5))
    manager.scrub()
    # Copied, with its KV: the seals go along.
    src, dst = slots_of(engine, b, 0, 5), torch.arange(60, 65)
    for source in (pool.k_source, pool.v_source):
        assert source is not None
        for layer in source.layers:
            layer[dst] = layer[src]
    manager.move(pool, src, dst, owner=b.owner)
    engine.tables["full"][b.row, :5] = dst.int()
    manager.retire(pool, src, owner=b.owner)
    # Freed, and written by whatever comes; a forward that is given up; and slots that nobody followed.
    for source in (pool.k_source, pool.v_source):
        assert source is not None
        source.layers[0][src] = 1
    with pytest.raises(KeyError), engine.forward.around(engine.batch((a, 3))) as _:
        raise KeyError
    manager.unverify(pool, slots_of(engine, a, 2, 4))
    for source in (pool.k_source, pool.v_source):
        assert source is not None
        source.layers[1][slots_of(engine, a, 2, 4)] = 7
    for _ in range(3):
        engine.step((a, 1), (b, 1))
        manager.scrub()
    assert [r.sentence for r in engine.found()] == []
    scrub = manager.summary().scrub
    assert scrub is not None
    assert scrub.verified > 50
    manager.clear()
    manager.scrub()
    assert engine.found() == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_forward_that_is_given_up_leaves_no_seal_of_what_it_wrote(backend: str) -> None:
    group = kc.BufferGroup(name="ring", pool=make_pool(read_bytes=1), window=3, ring=True)
    engine = Engine([group], kc.CanaryConfig(backend=backend, seals="layer"))
    a = engine.add("a", 40)
    for count in (4, 1, 1):
        engine.step((a, count))
    batch = engine.batch((a, 1))
    # The oldest token's slot is written, and nobody records that.
    engine.forward.begin(batch)
    engine.forward.head()
    engine.write_bytes(batch)
    engine.forward.abort()
    engine.manager.scrub()
    assert [r.sentence for r in engine.found()] == []
    scrub = engine.manager.summary().scrub
    assert scrub is not None
    assert (scrub.verified, scrub.unsealed) == (3, 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_damage_on_the_way_of_a_copy_is_found(backend: str) -> None:
    engine = sealed_engine(backend=backend, num_slots=72)
    pool = engine.groups[0].pool
    a = engine.add("a", 60)
    engine.step((a, 8))
    src, dst = slots_of(engine, a, 0, 8), torch.arange(60, 68)
    for source in (pool.k_source, pool.v_source):
        assert source is not None
        for layer in source.layers:
            layer[dst] = layer[src]
    # One layer of one token was left out.
    assert pool.v_source is not None
    pool.v_source.layers[1][63] = 0
    engine.manager.move(pool, src, dst, owner=a.owner)
    engine.manager.scrub()
    assert {(r.slot, r.reasons) for r in engine.found()} == {(63, ("SEAL_V",))}


def test_swapped_slots_keep_their_seals() -> None:
    engine = sealed_engine()
    pool = engine.groups[0].pool
    a = engine.add("a", 60)
    engine.step((a, 8))
    src = slots_of(engine, a, 0, 8)
    dst = src.flip(0)
    for source in (pool.k_source, pool.v_source):
        assert source is not None
        for layer in source.layers:
            layer[dst] = layer[src].clone()
    engine.manager.move(pool, src, dst, owner=a.owner)
    engine.manager.scrub()
    assert engine.found() == []
    scrub = engine.manager.summary().scrub
    assert scrub is not None
    assert (scrub.verified, scrub.unsealed) == (8, 0)


def test_the_padding_has_no_seal_whatever_lies_there() -> None:
    engine = sealed_engine()
    a = engine.add("a", 40)
    engine.step((a, 9))
    pool = engine.groups[0].pool
    assert pool.seals is not None
    slot = engine.slot_of(engine.groups[0], a, 4)
    pool.seals.words[0, 1:] = 77
    taken = pool.take_seals(torch.tensor([slot, 0, -1, len(pool.records)]))
    assert taken is not None
    assert torch.equal(taken[0], pool.seals.words[slot])
    assert taken.ne(0).any(dim=1).tolist() == [True, False, False, False]


def test_kv_that_is_adopted_is_sealed() -> None:
    engine = sealed_engine()
    engine.manager.adopt("full", torch.arange(50, 60), list(range(10)), owner=3)
    engine.manager.scrub()
    scrub = engine.manager.summary().scrub
    assert scrub is not None
    assert (scrub.verified, scrub.unsealed) == (10, 0)
    damage(engine, "K", 55, layer=1, byte=30)
    engine.manager.scrub()
    assert [(r.slot, r.reasons) for r in engine.found()] == [(55, ("SEAL_K",))]


@pytest.mark.parametrize("layers", [32, 80])
def test_a_hundred_random_bits_are_found(layers: int) -> None:
    sources = [kv_source(SLOTS, 256, layers=layers, read_bytes=16) for _ in range(2)]
    pool = kc.KvPool(name="pool", num_slots=SLOTS, k_source=sources[0], v_source=sources[1], device="cpu")
    engine = Engine([kc.BufferGroup(name="full", pool=pool)], kc.CanaryConfig(backend="reference", seals="layer"))
    a = engine.add("a", 100)
    engine.step((a, 50))
    assert pool.seals is not None
    # As fine as 0.3 % of the pool allows.
    share = 8 * (4 + pool.seals.words.shape[1]) * SLOTS / pool.kv_bytes
    assert share <= 0.003
    rng = np.random.default_rng(layers)
    expected = set()
    for slot in slots_of(engine, a, 0, 50).tolist():
        half, layer = ("K", "V")[int(rng.integers(2))], int(rng.integers(layers))
        damage(engine, half, slot, layer, byte=int(rng.integers(256)), bit=int(rng.integers(8)))
        expected.add((slot, f"SEAL_{half}"))
    engine.manager.scrub()
    found = engine.manager.reports
    assert engine.manager.summary().violations == 50
    assert {(r.slot, r.reasons[0]) for r in found} <= expected


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="kv-canary: CanaryConfig: seals must be off where track_lifetime is"):
        kc.CanaryConfig(seals="layer", track_lifetime=False)
    with pytest.raises(ValueError, match=r"kv-canary: CanaryConfig: scrub_share must be in \[0, 1\]"):
        kc.CanaryConfig(scrub_share=2)
    with pytest.raises(ValueError, match="kv-canary: CanaryConfig: seals must be one of layer, model, off"):
        kc.CanaryConfig(seals="pages")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "settings", "expected"),
    [
        ("cuda", {}, "layer"),
        ("cuda", {"seals": "off"}, "off"),
        ("cuda", {"seals": "model"}, "model"),
        ("cuda", {"track_lifetime": False}, "off"),
        ("cuda", {"mode": "off"}, "off"),
        ("cpu", {}, "off"),
        ("cpu", {"check_writes": True}, "layer"),
        ("cpu", {"seals": "layer"}, "layer"),
        ("cpu", {"seals": "layer", "mode": "off"}, "off"),
    ],
)
def test_seals_are_kept_on_a_gpu_unless_it_is_said_otherwise(
    device: str, settings: dict[str, Any], expected: str
) -> None:
    config = kc.CanaryConfig(**settings)
    context = SimpleNamespace(config=config, is_off=config.mode == "off", device=torch.device(device))
    assert CanaryContext.seals.fget(context) == expected  # type: ignore[attr-defined]


def test_a_report_says_who_has_read_the_slot_since_it_was_last_good() -> None:
    engine = sealed_engine(scrub_share=0.0, num_slots=256)
    a, b, c = (engine.add(name, 60) for name in "abc")
    engine.step((a, 9), (c, 4))
    engine.manager.scrub()
    # A request that has a's slots in its row, and one that comes when the damage is done.
    engine.step((a, 1), (c, 1))
    b.tokens[:8], b.cached = a.tokens[:8], 8
    engine.tables["full"][b.row, :8] = engine.tables["full"][a.row, :8]
    engine.step((a, 1), (b, 2))
    damage(engine, "V", int(slots_of(engine, a, 4, 5)), layer=1, byte=31)
    engine.step((a, 1), (c, 1))
    engine.manager.scrub()
    (report,) = engine.found()
    # The scrub behind step 1 has seen it good, as every other since would have.
    assert (report.intact_at, report.readers) == (1, ("a", "b"))
    assert "its bytes were sealed then. Read since by a, b." in report.sentence
    assert report.as_dict()["readers"] == ("a", "b")
    # What is known of the slot does not get better by looking again.
    engine.step((a, 1))
    engine.manager.scrub()
    (again,) = engine.found()
    assert again.intact_at == 1


def test_a_report_says_when_the_bytes_were_last_good() -> None:
    engine = sealed_engine(scrub_share=0.0)
    a, b = engine.add("a", 60), engine.add("b", 60)
    engine.step((a, 9))
    for _ in range(3):
        engine.step((a, 1))
        engine.manager.scrub()
    # It has the slot no more when the bytes change.
    engine.step((a, 1), (b, 3))
    slot = int(slots_of(engine, a, 4, 5))
    damage(engine, "K", slot, layer=0, byte=9)
    engine.step((b, 1))
    engine.manager.scrub()
    (report,) = engine.found()
    assert report.intact_at == 4
    assert "its bytes were sealed then, and the same at step 4. Read since by a." in report.sentence


def test_nothing_is_said_to_have_been_good_behind_a_storm() -> None:
    engine = sealed_engine(scrub_share=0.0, ring_capacity=2)
    a = engine.add("a", 60)
    engine.step((a, 9))
    engine.step((a, 1))
    engine.manager.scrub()
    for slot in slots_of(engine, a, 0, 9).tolist():
        damage(engine, "K", slot, layer=0, byte=9)
    engine.step((a, 1))
    # Of nine, two are told.
    engine.manager.scrub()
    assert len(engine.found()) == 2
    engine.step((a, 1))
    engine.manager.scrub()
    assert {report.intact_at for report in engine.found()} == {1}


def test_names_of_readers_are_hidden_where_names_are() -> None:
    engine = sealed_engine(scrub_share=0.0, redact=True)
    a = engine.add("a", 60)
    engine.step((a, 9))
    damage(engine, "K", int(slots_of(engine, a, 4, 5)), layer=0, byte=9)
    engine.step((a, 1))
    engine.manager.scrub()
    (report,) = engine.found()
    (reader,) = report.readers
    assert reader.startswith("redacted-")


@pytest.mark.parametrize("kind", ["full", "window", "lut", "pages"])
def test_readers_are_those_whose_rows_name_the_slot(kind: str) -> None:
    lut = torch.randperm(256) if kind == "lut" else None
    group = kc.BufferGroup(
        name="full",
        pool=make_pool(256, read_bytes=1),
        window=4 if kind == "window" else 0,
        lut=lut,
        page_size=4 if kind == "pages" else 1,
    )
    table = torch.zeros(8, 12, dtype=torch.int32)
    table[1], table[2] = torch.arange(20, 32), torch.arange(40, 52)
    requests = [
        kc.ForwardRequest(request_id=name, row=row, owner=row, prefix_len=9, extend_len=1, tokens=lambda i, j: [])
        for row, name in ((1, "a"), (2, "b"))
    ]
    history = StepHistory()
    history.append(StepRecord(number=5, tables={"full": table}, forwards=[kc.BatchRequests.of(requests)]))
    expected: dict[int, list[str]] = {}
    for request in requests:
        for position in range(6 if kind == "window" else 0, 10):
            entry = int(table[request.row, position // group.page_size])
            slot = entry * group.page_size + position % group.page_size
            expected[slot if lut is None else int(lut[slot])] = [request.request_id]
    assert len(expected) == (8 if kind == "window" else 20)
    for slot in range(1, 256):
        assert history.readers(group, slot, after=4, most=8) == expected.get(slot, [])
    assert history.readers(group, next(iter(expected)), after=5, most=8) == []


def test_a_warm_up_verifies_nothing_by_lists_and_by_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the kernels of both are compiled; whether any is missing shows where nothing interprets them."""
    engine = sealed_engine(scrub_share=0.0)
    given = list[tuple[bool, bool]]()
    verify = ops.verify_seals

    def seen(**arguments: Any) -> None:
        given.append((arguments["slots"] is not None, arguments["ends"] is not None))
        verify(**arguments)

    monkeypatch.setattr(ops, "verify_seals", seen)
    seals.warm_up(engine.manager.context)
    assert given == [(False, False), (True, False), (True, True)]
    engine.manager.flush()
    assert list(engine.manager.reports) == []
