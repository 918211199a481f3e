"""What the model is given against what the requests are: rows, lengths, and the tensors that a graph reads."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import kv_canary as kc
from kv_canary.runtime.batch import ModelInputs

from .engine import Engine, Request, full_engine, make_pool
from .test_captured import Tape


def given(batch: kc.ForwardBatch, **changes: Any) -> kc.ForwardBatch:
    """Return a batch with the rows and lengths of its requests, as an engine would have them on the device."""
    rows = torch.tensor([r.row for r in batch.requests])
    lengths = torch.tensor([r.prefix_len + r.extend_len for r in batch.requests])
    return dataclasses.replace(batch, **{"rows": rows, "lengths": lengths, **changes})


def started(**options: Any) -> tuple[Engine, Request, Request]:
    engine = full_engine(**options)
    a, b = engine.add("a", 40), engine.add("b", 40)
    engine.step((a, 7), (b, 4))
    return engine, a, b


def run(engine: Engine, batch: kc.ForwardBatch) -> list[kc.ViolationReport]:
    engine.run(batch)
    for request in engine.requests.values():
        request.cached += 1
    return engine.found()


def test_rows_and_lengths_that_agree_are_silent() -> None:
    engine, a, b = started()
    for _ in range(3):
        assert run(engine, given(engine.batch((a, 1), (b, 1)))) == []
    # As many as a graph has room for.
    batch = engine.batch((a, 1), (b, 1))
    with pytest.raises(ValueError, match=r"rows must be of shape \[2\]"):
        run(engine, given(batch, rows=torch.tensor([1, 2, 3])))
    with pytest.raises(ValueError, match="lengths must be given where rows are"):
        run(engine, given(batch, lengths=None))


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_rows_swapped_on_the_device_are_found_in_that_very_step(backend: str) -> None:
    engine, a, b = started(backend=backend)
    batch = engine.batch((a, 1), (b, 1))
    first, second = run(engine, given(batch, rows=torch.tensor([b.row, a.row])))
    assert (first.reasons, first.request_id, first.given) == (("BATCH",), "a", (b.row, 8))
    assert (second.reasons, second.request_id, second.given) == (("BATCH",), "b", (a.row, 5))
    assert first.sentence == (
        "step 2 TAIL_FULL: request a is given to the model: BATCH. Given: row 2, 8 tokens; its own: row 1, 8 tokens. "
        "Likely: the batch on the device is of other requests than that on the host: rows swapped, or stale."
    )
    [incident] = engine.manager.incidents
    assert "requests a, b are given to the model: BATCH (2 violations). Given: row 2, 8 tokens" in incident.sentence
    assert run(engine, given(engine.batch((a, 1), (b, 1)))) == []


@pytest.mark.parametrize("short", [-1, 1])
def test_a_length_off_by_one_on_the_device_is_found_in_that_very_step(short: int) -> None:
    engine, a, b = started()
    [report] = run(engine, given(engine.batch((a, 1), (b, 1)), lengths=torch.tensor([8, 5 + short])))
    assert (report.reasons, report.request_id, report.given) == (("BATCH",), "b", (b.row, 5 + short))
    assert f"the length on the device is off by {short}:" in report.sentence


def test_one_group_of_several_holds_them_against_each_other() -> None:
    groups = [kc.BufferGroup(name=name, pool=make_pool(name=name)) for name in ("full", "other")]
    engine = Engine(groups)
    a = engine.add("a", 20)
    batch = given(engine.batch((a, 3)), rows=torch.tensor([a.row + 1]))
    engine.run(batch)
    [report] = engine.found()
    assert (report.group, report.reasons) == ("full", ("BATCH",))


def test_a_captured_forward_holds_them_against_each_other_too() -> None:
    engine, a, b = started()
    tape = Tape(engine, requests=4, tokens=4, is_given=True)
    batch = engine.batch((a, 1), (b, 1))
    tape.run(given(batch))
    for request in (a, b):
        request.cached += 1
    assert engine.found() == []
    batch = engine.batch((a, 1), (b, 1))
    with pytest.raises(ValueError, match="lengths must be given, as captured"):
        tape.run(batch)
    tape.run(given(batch, rows=torch.tensor([a.row, a.row])))
    assert [(r.request_id, r.reasons) for r in engine.found()] == [("b", ("BATCH",))]


class Graph:
    """The tensors that an engine's graph reads: filled while it runs, wherever the batch's own are."""

    def __init__(self, size: int = 4) -> None:
        self.tensors = {name: torch.zeros(size, dtype=torch.int64) for name in ("ids", "at", "slots", "rows", "lens")}

    def fill(self, batch: kc.ForwardBatch) -> None:
        values = (batch.input_ids, batch.positions, batch.out_slots["full"], batch.rows, batch.lengths)
        for tensor, value in zip(self.tensors.values(), values, strict=True):
            assert value is not None
            tensor.zero_()[: len(value)] = value

    def inputs(self, **changes: Any) -> ModelInputs:
        ids, at, slots, rows, lens = self.tensors.values()
        fields = {"input_ids": ids, "positions": at, "out_slots": {"full": slots}, "rows": rows, "lengths": lens}
        return ModelInputs(**{**fields, "stays": True, **changes})


def run_in_place(
    engine: Engine, graph: Graph, batch: kc.ForwardBatch, inputs: ModelInputs | None = None
) -> list[kc.ViolationReport]:
    forward = engine.forward
    forward.begin(dataclasses.replace(batch, is_given_at_tail=True))
    forward.head()
    engine.write_bytes(batch)
    forward.tail(given=inputs or graph.inputs())
    forward.end()
    for request in engine.requests.values():
        request.cached += 1
    return engine.found()


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_what_a_graph_has_read_is_what_is_recorded(backend: str) -> None:
    engine, a, b = started(backend=backend)
    graph = Graph()
    for _ in range(3):
        batch = given(engine.batch((a, 1), (b, 1)))
        graph.fill(batch)
        assert run_in_place(engine, graph, batch) == []
    summary = engine.manager.summary()
    assert summary.positions_verified == summary.positions_relied_on
    # The graph has still the slots and the positions of the step before.
    batch = given(engine.batch((a, 1), (b, 1)))
    reports = run_in_place(engine, graph, batch)
    found = {(r.request_id, r.reasons) for r in reports}
    assert found >= {(name, reasons) for name in "ab" for reasons in (("WRITE_POSITION",), ("BATCH",))}
    # Nothing was recorded where the tokens should be.
    batch = given(engine.batch((a, 1), (b, 1)))
    graph.fill(batch)
    assert ("NEVER_WRITTEN",) in {r.reasons for r in run_in_place(engine, graph, batch)}


def test_tensors_that_do_not_stay_are_copied() -> None:
    engine, a, b = started()
    graph = Graph()
    batch = given(engine.batch((a, 1), (b, 1)))
    graph.fill(batch)
    assert run_in_place(engine, graph, batch, graph.inputs(stays=False)) == []
    batch = given(engine.batch((a, 1), (b, 1)))
    graph.fill(batch)
    narrow = graph.inputs(positions=graph.tensors["at"].to(torch.int32))
    assert run_in_place(engine, graph, batch, narrow) == []
    assert run_in_place(engine, graph, given(engine.batch((a, 1), (b, 1))), graph.inputs(stays=False)) != []
    with pytest.raises(ValueError, match="given must be of at least 2 tokens, got 1"):
        run_in_place(engine, graph, given(engine.batch((a, 1), (b, 1))), graph.inputs(input_ids=torch.zeros(1).long()))


def test_where_head_needs_them_they_are_taken_before() -> None:
    engine, a, b = started(check_inputs=True)
    graph = Graph()
    batch = given(engine.batch((a, 1), (b, 1)))
    assert batch.input_ids is not None
    batch.input_ids[0] += 1
    assert {r.reasons for r in run_in_place(engine, graph, batch)} == {("WRITE_TOKEN",)}


def test_a_forward_that_is_given_up_before_tail_leaves_no_trace_of_other_slots() -> None:
    engine, a, b = started(quarantine=True, track_lifetime=True, sweep_every=1)
    graph = Graph()
    batch = given(engine.batch((a, 1), (b, 1)))
    engine.forward.begin(dataclasses.replace(batch, is_given_at_tail=True))
    engine.forward.head()
    engine.write_bytes(batch)
    engine.forward.abort()
    graph.fill(batch)
    assert run_in_place(engine, graph, batch) == []
    assert engine.manager.summary().violations == 0


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("shared", [0, 1])
def test_two_requests_that_write_one_slot_in_one_forward_are_both_named(backend: str, shared: int) -> None:
    engine = full_engine(backend=backend)
    a = engine.add("a", [5, 6, 7])
    # The second token is the same, and what is before it is not.
    b = engine.add("b", [9, 6, 7])
    engine.map(a, 0, 2)
    engine.map(b, 0, 2)
    engine.tables["full"][b.row, shared] = engine.tables["full"][a.row, shared]
    engine.run(engine.batch((a, 2), (b, 2), map_new=False))
    [report] = [r for r in engine.found() if r.tag == "TAIL_FULL"]
    assert (report.reasons, report.request_id, report.slot) == (("OVERWRITE",), "a", 1 + shared)
    assert report.sentence == (
        f"step 1 TAIL_FULL: request a writes position {shared} in slot {1 + shared} of full: OVERWRITE. Not stored: "
        f"token {5 + shared} at position {shared}: request b writes there in the same step. Likely: two owners: the "
        "slot was handed out while another request still used it."
    )


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_two_requests_that_write_the_same_behind_the_same_prefix_into_one_slot_do_no_harm(backend: str) -> None:
    engine = full_engine(backend=backend)
    a, b = engine.add("a", [5, 6, 7]), engine.add("b", [5, 6, 8])
    engine.map(a, 0, 3)
    engine.map(b, 0, 3)
    engine.tables["full"][b.row, :2] = engine.tables["full"][a.row, :2]
    engine.run(engine.batch((a, 2), (b, 3), map_new=False))
    engine.run(engine.batch((a, 1), map_new=False))
    assert engine.found() == []


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_two_tokens_of_one_request_in_one_slot_are_found_but_for_rings(backend: str) -> None:
    engine = full_engine(backend=backend)
    a = engine.add("a", 20)
    engine.map(a, 0, 5)
    engine.tables["full"][a.row, 3] = engine.tables["full"][a.row, 1]
    engine.run(engine.batch((a, 5), map_new=False))
    [report] = engine.found()
    assert (report.reasons, report.position, report.slot) == (("OVERWRITE",), 1, 2)
    ring = kc.BufferGroup(name="ring", pool=make_pool(), window=3, ring=True)
    engine = Engine([ring], kc.CanaryConfig(backend=backend))
    a = engine.add("a", 20)
    engine.step((a, 9))
    engine.step((a, 1))
    assert engine.found() == []
