"""What the attention backend is given on the device, against the scheduler's requests: healthy silent, else found."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from kv_canary.engines.sglang import graphs, session

from . import engine

# Those that a graph's were copied from.
POSITIONS = torch.arange(11, 19)


def tokens(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, engine.VOCABULARY) for _ in range(n)]


def build(model: str, **args: Any) -> Any:
    with engine.overriding(KV_CANARY_MODE="log"):
        return engine.build_scheduler(model, **args)


def served(scheduler: Any) -> list[Any]:
    reqs = [engine.submit(scheduler, tokens(20 + 7 * n, n), 12, rid="abc"[n]) for n in range(3)]
    engine.run_all(scheduler)
    session.current().manager.flush()
    return reqs


def spoil(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None], *, from_forward: int) -> list[int]:
    """Change what decodes are given on the device, from the n-th forward on; return the steps in which it was done."""
    real, steps, forwards = ForwardBatch.init_new, list[int](), [0]

    def init_new(*args: Any, **kwargs: Any) -> Any:
        batch = real(*args, **kwargs)
        forwards[0] += 1
        if forwards[0] >= from_forward and batch.forward_mode.is_decode() and batch.batch_size > 1:
            change(batch)
            steps.append(session.current().manager.step + 1)
        return batch

    monkeypatch.setattr(ForwardBatch, "init_new", init_new)
    return steps


def swap_rows(batch: Any) -> None:
    batch.req_pool_indices = batch.req_pool_indices[torch.tensor([1, 0, *range(2, batch.batch_size)])]


def shorten(batch: Any) -> None:
    batch.seq_lens = batch.seq_lens.clone()
    batch.seq_lens[1] -= 1


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("change", "who"), [(swap_rows, {"a", "b"}), (shorten, {"b"})], ids=["rows", "length"])
def test_a_batch_on_the_device_that_is_not_the_schedulers_is_found_at_once(llama, monkeypatch, change, who, overlap):
    scheduler = build(llama, disable_overlap_schedule=not overlap)
    steps = spoil(monkeypatch, change, from_forward=9)
    reqs = served(scheduler)
    assert steps
    wrong = [req.rid for req in reqs if not engine.is_greedy(llama, req.origin_input_ids, req.output_ids)]
    assert set(wrong) == who
    manager = session.current().manager
    batch = [r for r in manager.reports if "BATCH" in r.reasons]
    assert {r.request_id for r in batch} == who
    assert min(r.step for r in manager.reports) == min(r.step for r in batch) == steps[0]
    told = [i for i in manager.incidents if "BATCH" in i.reasons]
    assert len(told) == 1
    assert ("rows swapped, or stale" in told[0].sentence) == (change is swap_rows)


def test_a_row_that_is_stale_after_an_abort_is_found(llama, monkeypatch):
    """The device's rows are those of before: the batch on the host has lost one request, and its row is another's."""
    scheduler = build(llama, disable_overlap_schedule=False)
    before: list[torch.Tensor] = []

    def stale(batch: Any) -> None:
        if before and len(before[-1]) == batch.batch_size + 1:
            batch.req_pool_indices = before[-1][: batch.batch_size]
        else:
            before.append(batch.req_pool_indices.clone())

    steps = spoil(monkeypatch, stale, from_forward=2)
    reqs = [engine.submit(scheduler, tokens(30, n), 20, rid="abc"[n]) for n in range(3)]
    engine.run_all(scheduler, lambda i: engine.abort(scheduler, "a") if i == 9 else None)
    session.current().manager.flush()
    assert steps
    reports = [r for r in session.current().manager.reports if "BATCH" in r.reasons]
    assert {r.request_id for r in reports} == {"b", "c"}
    assert not all(engine.is_greedy(llama, req.origin_input_ids, req.output_ids) for req in reqs[1:])


@pytest.mark.parametrize("args", [{}, {"disable_overlap_schedule": False}, {"enable_mixed_chunk": True}])
def test_a_healthy_engine_is_silent_and_every_forward_is_compared(llama, monkeypatch, args):
    given = []
    real = session.Session._batch
    monkeypatch.setattr(
        session.Session,
        "_batch",
        lambda self, *a: given.append(real(self, *a)) or given[-1],  # type: ignore[func-returns-value]
    )
    scheduler = build(llama, **args)
    served(scheduler)
    assert session.current().manager.summary().violations == 0
    assert given
    assert all(batch.rows is not None and batch.lengths is not None for batch in given)


class Runner:
    """A model runner; a `SimpleNamespace` has no hash."""

    decode_cuda_graph_runner: Any = None


def test_a_graphs_tensors_are_read_where_they_are() -> None:
    tensors = {
        name: torch.zeros(8, dtype=torch.int64)
        for name in ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens")
    }
    runner, other = Runner(), Runner()
    runner.decode_cuda_graph_runner = SimpleNamespace(buffers=SimpleNamespace(**tensors))
    group = SimpleNamespace(name="full", lut=None)
    known = graphs.Graphs()
    found = known.inputs_of(runner, SimpleNamespace(can_run_graph=True), [group], count=3, positions=POSITIONS)
    assert found is not None
    assert found.is_in_place
    assert known.inputs_of(runner, SimpleNamespace(can_run_graph=True), [group], count=3, positions=POSITIONS) is found
    assert found.out_slots["full"] is tensors["out_cache_loc"]
    assert (found.rows, found.lengths) == (tensors["req_pool_indices"], tensors["seq_lens"])
    assert known.inputs_of(runner, SimpleNamespace(can_run_graph=False), [group], count=3, positions=POSITIONS) is None
    assert known.inputs_of(other, SimpleNamespace(can_run_graph=True), [group], count=3, positions=POSITIONS) is None


def test_what_a_graph_looks_up_is_looked_up_again() -> None:
    names = ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens")
    tensors = {name: torch.arange(i, i + 8) for i, name in enumerate(names)}
    runner = Runner()
    runner.decode_cuda_graph_runner = SimpleNamespace(buffers=SimpleNamespace(**tensors))
    groups = [SimpleNamespace(name="full", lut=None), SimpleNamespace(name="swa", lut=torch.arange(20).roll(1))]
    found = graphs.Graphs().inputs_of(runner, SimpleNamespace(can_run_graph=True), groups, count=3, positions=POSITIONS)
    assert found is not None
    assert not found.is_in_place
    assert found.out_slots["full"].tolist() == [2, 3, 4]
    assert found.out_slots["swa"].tolist() == [1, 2, 3]
    assert found.rows is not None
    assert found.lengths is not None
    assert (found.rows.tolist(), found.lengths.tolist()) == ([3, 4, 5], [4, 5, 6])
    assert (found.input_ids.tolist(), found.positions.tolist()) == ([0, 1, 2], [1, 2, 3])


@pytest.mark.parametrize(("module", "expected"), [("gemma3_mm", [11, 12, 13]), ("llama", [1, 2, 3])])
def test_positions_that_a_model_counts_on_in_its_graph_are_those_before_it(module: str, expected: list[int]) -> None:
    names = ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens")
    tensors = {name: torch.arange(i, i + 8) for i, name in enumerate(names)}
    runner: Any = Runner()
    runner.decode_cuda_graph_runner = SimpleNamespace(buffers=SimpleNamespace(**tensors))
    runner.model = type("Derived", (type("Model", (), {"__module__": f"sglang.srt.models.{module}"}),), {})()
    groups = [SimpleNamespace(name="full", lut=None)]
    found = graphs.Graphs().inputs_of(runner, SimpleNamespace(can_run_graph=True), groups, count=3, positions=POSITIONS)
    assert found is not None
    assert found.positions[:3].tolist() == expected
    assert found.is_in_place == (module == "llama")


@pytest.mark.parametrize("module", graphs._WRITE_POSITIONS)
def test_models_that_count_positions_on_are_there(module: str) -> None:
    import importlib.util
    from pathlib import Path

    spec = importlib.util.find_spec(f"sglang.srt.models.{module}")
    assert spec is not None
    assert spec.origin is not None
    assert "positions += 1" in Path(spec.origin).read_text(encoding="utf-8")
