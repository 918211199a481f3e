"""The token oracle: what a forward is given is held against the requests' own next tokens."""

from __future__ import annotations

import dataclasses

import torch

import kv_canary as kc
from kv_canary.runtime.oracle import UNKNOWN, TokenOracle
from tests.runtime.engine import Engine, Request, full_engine


def known_to(request: Request, count: int) -> object:
    """Return the request's history as a host has it that has seen `count` tokens."""
    return lambda start, end: request.tokens[: max(count, start)][start:end]


def step_with(engine: Engine, batch: kc.ForwardBatch) -> None:
    engine.run(batch)
    for request in batch.requests:
        engine.requests[request.request_id].cached += request.extend_len


def test_own_tokens_are_expected_in_prefills_chunks_and_decodes() -> None:
    engine = full_engine(check_inputs=True)
    a, b = engine.add("a", 30), engine.add("b", 9)
    for work in ([(a, 10)], [(a, 10), (b, 8)], [(a, 1), (b, 1)]):
        engine.step(*work)
    assert engine.found() == []


def test_another_token_than_the_request_has_is_reported_at_once() -> None:
    for check_inputs, reasons in ((True, {"WRITE_TOKEN"}), (False, set())):
        engine = full_engine(check_inputs=check_inputs)
        a = engine.add("a", 30)
        engine.step((a, 10))
        batch = engine.batch((a, 5))
        ids = batch.input_ids.clone()
        ids[3] += 1
        engine.run(dataclasses.replace(batch, input_ids=ids))
        found = engine.found()
        assert {name for r in found for name in r.reasons} == reasons
        if check_inputs:
            [report] = found
            assert (report.tag, report.position, report.record.token) == ("TAIL_FULL", 13, a.tokens[13] + 1)
            assert report.expected_token == a.tokens[13]


def test_tokens_that_the_host_has_not_seen_are_not_checked() -> None:
    engine = full_engine(check_inputs=True)
    a = engine.add("a", 12)
    engine.step((a, 11))
    batch = engine.batch((a, 1))
    [request] = batch.requests
    late = dataclasses.replace(request, tokens=known_to(a, 11))
    step_with(engine, dataclasses.replace(batch, requests=[late], input_ids=torch.tensor([777])))
    assert engine.found() == []


def test_what_was_sampled_stands_for_what_the_host_has_not_seen() -> None:
    engine = full_engine(check_inputs=True)
    a = engine.add("a", 12)
    engine.step((a, 11))
    engine.manager.oracle.sampled(torch.tensor([a.row]), torch.tensor([a.tokens[11]]))
    batch = engine.batch((a, 1))
    [request] = batch.requests
    late = dataclasses.replace(request, tokens=known_to(a, 11))
    engine.run(dataclasses.replace(batch, requests=[late], input_ids=torch.tensor([777])))
    [report] = engine.found()
    assert (report.reasons, report.expected_token) == (("WRITE_TOKEN",), a.tokens[11])


def test_what_the_host_knows_comes_before_what_was_sampled() -> None:
    """A row that changed hands holds what was sampled for another."""
    engine = full_engine(check_inputs=True)
    a = engine.add("a", 12)
    engine.manager.oracle.sampled(torch.tensor([a.row]), torch.tensor([4]))
    engine.step((a, 11))
    assert engine.found() == []


def test_an_engine_may_say_itself_what_it_expects_and_leave_out_what_it_does_not_know() -> None:
    engine = full_engine()
    a = engine.add("a", 12)
    batch = engine.batch((a, 4))
    expected = batch.input_ids.long().clone()
    expected[1], expected[2] = UNKNOWN, expected[2] + 1
    engine.run(dataclasses.replace(batch, expected_input_ids=expected))
    [report] = engine.found()
    assert (report.reasons, report.position) == (("WRITE_TOKEN",), 2)


def test_the_offset_of_a_draft_model_shifts_what_is_expected() -> None:
    oracle = TokenOracle(max_rows=4, device=torch.device("cpu"))
    tokens = [10, 11, 12, 13]
    request = kc.ForwardRequest(
        request_id="a", row=2, owner=1, prefix_len=1, extend_len=3, tokens=lambda i, j: tokens[i:j]
    )
    assert oracle.expected([request]).tolist() == [11, 12, 13]
    assert oracle.expected([request], offset=1).tolist() == [12, 13, UNKNOWN]
    oracle.sampled(torch.tensor([2]), torch.tensor([14]))
    assert oracle.expected([request], offset=1).tolist() == [12, 13, 14]
    assert oracle.expected([]).tolist() == []
