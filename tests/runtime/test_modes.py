"""Canaries made and used in and out of inference mode, and under another default device, in both backends."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

import kv_canary as kc

from .engine import Engine, make_pool
from .test_observers import flip

Mode = Callable[[], AbstractContextManager[object]]
INSIDE, OUTSIDE = torch.inference_mode, contextlib.nullcontext
BACKENDS = ("reference", "triton")
# What no tensor can be computed on: whatever is made without naming a device shows.
META: Mode = lambda: torch.device("meta")  # noqa: E731


def engine_of(backend: str, made: Mode = OUTSIDE, **options: object) -> Engine:
    """Return an engine whose canary and records, but not whose own tensors, are made in a mode."""
    pool = make_pool()
    groups = [
        kc.BufferGroup(name="full", pool=pool),
        kc.BufferGroup(name="window", pool=make_pool(name="windowed"), window=4),
        kc.BufferGroup(name="ring", pool=make_pool(name="ring"), window=4, ring=True),
    ]
    config = {"backend": backend, "check_tokens": True, "check_inputs": True, "sweep_every": 2, "quarantine": True}
    with made():
        for group in groups:
            like = group.pool
            like.__init__(  # type: ignore[misc]
                name=like.name,
                num_slots=like.num_slots,
                k_source=like.k_source,
                v_source=like.v_source,
                layer_names=like.layer_names,
                device="cpu",
            )
        engine = Engine(groups, kc.CanaryConfig(**{**config, **options}))  # type: ignore[arg-type]
    engine.tables = {name: table.clone() for name, table in engine.tables.items()}
    return engine


def live(engine: Engine, *modes: Mode) -> None:
    """Run a step in each mode; the last one reads what was damaged, and another growth of every buffer falls in it."""
    a = engine.requests.get("a") or engine.add("a", 100)
    for number, mode in enumerate(modes):
        batch = engine.batch((a, 20 if not a.cached else 1 + number))
        a.cached += sum(r.extend_len for r in batch.requests)
        with mode():
            engine.run(batch)


@pytest.mark.parametrize(
    ("made", "flushed", "backend"),
    [
        pytest.param(
            made,
            flushed,
            backend,
            id=f"made {'inside' if made is INSIDE else 'outside'}-flushed "
            f"{'inside' if flushed is INSIDE else 'outside'}-{backend}",
            # The interpreter takes its time; the two that differ most are enough for every day.
            marks=[pytest.mark.long] if backend == "triton" and made is flushed else [],
        )
        for made in (INSIDE, OUTSIDE)
        for flushed in (INSIDE, OUTSIDE)
        for backend in BACKENDS
    ],
)
def test_inference_mode_may_come_and_go(backend: str, made: Mode, flushed: Mode) -> None:
    engine = engine_of(backend, made)
    live(engine, OUTSIDE, INSIDE, OUTSIDE, INSIDE)
    flip(engine, "a", 21)
    # In either order: what one mode has allocated the other changes.
    live(engine, INSIDE, OUTSIDE)
    slots = torch.tensor([1, 2])
    for mode in (OUTSIDE, INSIDE):
        with mode():
            engine.manager.move(engine.groups[0].pool, slots, slots + 100, owner=9)
            engine.manager.retire(engine.groups[0].pool, slots + 100, owner=9)
            engine.manager.unverify(engine.groups[0].pool, slots + 110)
    with flushed():
        engine.manager.flush()
    assert {(r.position, r.reasons) for r in engine.manager.reports} == {(21, ("K",))}
    flip(engine, "a", 21)
    with made():
        engine.manager.scrub()
        engine.manager.clear()
    assert not engine.groups[0].pool.records.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_gaps_are_taken_in_in_any_mode(backend: str) -> None:
    engine = engine_of(backend)
    live(engine, INSIDE)
    for marked, used in ((INSIDE, OUTSIDE), (OUTSIDE, INSIDE)):
        with marked():
            for group in engine.groups[:2]:
                engine.manager.unverify(group.pool, engine.tables[group.name][1, :20].long())
        live(engine, used, marked)
    engine.manager.flush()
    summary = engine.manager.summary()
    assert summary.violations == 0
    assert summary.unverified >= 40


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_default_device_changes_nothing(backend: str) -> None:
    with META():
        k = torch.empty(1).device
        assert k.type == "meta"
    engine = engine_of(backend)
    a = engine.add("a", 100)
    batches = []
    for count in (20, 1, 2, 40):
        batches.append(engine.batch((a, count)))
        a.cached += count
    for number, batch in enumerate(batches):
        with META():
            with engine.forward.around(batch), torch.device("cpu"):
                engine.write_bytes(batch)
            engine.manager.summary()
        if number == 1:
            flip(engine, "a", 20)
    with META():
        engine.manager.retire(engine.groups[0].pool, batches[0].out_slots["full"])
        engine.manager.sweep()
        engine.manager.unverify(engine.groups[0].pool, batches[0].out_slots["full"])
        engine.forward.skip({}, why="an unknown kind")
        engine.manager.flush()
    assert {
        (r.position, r.reasons) for r in engine.manager.reports if r.group == "full" and "FREED" not in r.reasons
    } == {(20, ("K",))}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_canary_is_made_under_another_default_device(backend: str) -> None:
    pool, config = make_pool(), kc.CanaryConfig(backend=backend, event_log=None)
    limits = kc.CanaryLimits(max_rows=8, max_requests=4, max_tokens=64, max_len=128)
    with META():
        made = kc.KvPool(name="made", num_slots=8, k_source=None, v_source=None, device="cpu")
        manager = kc.CanaryManager([kc.BufferGroup(name="full", pool=pool)], limits=limits, config=config)
        manager.guard.contains = False
        forward = manager.forward()
    assert made.records.device.type == "cpu"
    table = torch.zeros(8, 128, dtype=torch.int32)
    table[1, :10] = torch.arange(1, 11)
    for start, end in ((0, 4), (4, 5), (5, 6)):
        request = kc.ForwardRequest(
            request_id="a",
            row=1,
            owner=1,
            prefix_len=start,
            extend_len=end - start,
            tokens=lambda i, j: list(range(i, j)),
        )
        batch = kc.ForwardBatch(
            requests=[request],
            input_ids=torch.arange(start, end),
            positions=torch.arange(start, end),
            out_slots={"full": torch.arange(start + 1, end + 1)},
            tables={"full": table},
        )
        with META(), forward.around(dataclasses.replace(batch)):
            pass
    with META():
        manager.flush()
    assert (manager.summary().violations, manager.summary().positions_verified) == (0, 9)
