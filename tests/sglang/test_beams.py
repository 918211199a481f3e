"""Beam searches among ordinary requests: every row is described by its own branch's tokens, and blinds no other's."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.beam_search import coordinator
from sglang.srt.beam_search.history import BeamNode
from sglang.srt.beam_search.joint_select import FinalSelect, SelectResult

from kv_canary.engines.sglang import beams, session

from . import engine
from .engine_process import EngineRun, Round, run_engine

# Everything that could find fault with a healthy engine.
ALL_ON = {"KV_CANARY_CHECK_INPUTS": "1", "KV_CANARY_SWEEP_EVERY": "3", "KV_CANARY_QUARANTINE": "1"}


def tokens(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, engine.VOCABULARY) for _ in range(n)]


def build(model: str, mode: str, settings: dict[str, str] | None = None, **args: Any) -> Any:
    with engine.overriding(KV_CANARY_MODE=mode, **(ALL_ON if settings is None else settings)):
        return engine.build_scheduler(model, **args)


def results(req: Any) -> list[tuple[list[int], float]]:
    """Return what a beam search has come to: tokens and score of each beam, the best first."""
    return [(list(r.tokens), r.cum_logprob) for r in req.beam_group.final_results]


def live(scheduler: Any) -> tuple[list[list[int]], list[list[tuple[list[int], float]]]]:
    """Serve searches of several widths, stops and lengths among ordinary requests; return what came of each."""
    first = [
        engine.submit(scheduler, tokens(40, 1), 20),
        engine.submit(scheduler, tokens(70, 3), 16),
        engine.submit(scheduler, tokens(50, 2), 12, beam_width=3, n=3),
    ]
    engine.run_all(scheduler)
    # A prompt that is cached; stops that end branches; one token, which has no rows of its own; one that fills a step.
    stops = [r.tokens[4] for r in first[2].beam_group.final_results]
    then = [
        engine.submit(scheduler, tokens(40, 1) + tokens(5, 9), 8),
        engine.submit(scheduler, tokens(40, 1), 9, beam_width=2, n=2),
        engine.submit(scheduler, tokens(50, 2), 12, beam_width=3, n=3, stop_token_ids=stops, ignore_eos=False),
        engine.submit(scheduler, tokens(30, 4), 1, beam_width=2, n=1),
    ]
    engine.run_all(scheduler)
    reqs = [*first, *then]
    searches = [results(r) for r in reqs if r.beam_group is not None]
    return engine.outputs([r for r in reqs if r.beam_group is None]), searches


@pytest.mark.parametrize("overlap", [False, True])
def test_searches_among_ordinary_requests_are_verified_row_by_row(llama, overlap):
    expected = live(build(llama, "off", disable_overlap_schedule=not overlap))
    scheduler = build(llama, "raise", disable_overlap_schedule=not overlap)
    assert live(scheduler) == expected
    state = session.current().status()
    assert (state["watching"], state["off"], state["violations"]) == ("complete", "", 0)
    assert (state["skipped"], state["left_out"], state["failures"]) == (0, {}, {})
    assert state["positions_verified"] == state["positions_relied_on"]
    # 11 forwards of three rows, each with 50 positions of the prompt and what was generated.
    assert state["positions_verified"] > 3 * 11 * 50


def churn(scheduler: Any, seed: int) -> tuple[list[Any], set[str]]:
    """Submit and abort at random in a tight pool; return the requests, and the names of the aborted ones."""
    rng, reqs, aborted = random.Random(seed), [], set()
    stems = [tokens(n, n) for n in (30, 64)]

    def before_step(iteration: int) -> bool:
        if len(reqs) < 30 and len(scheduler.waiting_queue) < 3 and rng.random() < 0.5:
            prompt = rng.choice(stems) + tokens(rng.choice((1, 9, 20)), iteration)
            width = rng.choice((None, None, 2, 3))
            more = {} if width is None else {"beam_width": width, "n": width}
            reqs.append(engine.submit(scheduler, prompt, rng.choice((1, 2, 8, 20)), **more))
        if rng.random() < 0.05:
            running = [r for r in reqs if not r.finished()]
            if running:
                req = rng.choice(running)
                aborted.add(req.rid)
                engine.abort(scheduler, req.rid)
        return len(reqs) < 30

    engine.run_all(scheduler, before_step)
    return reqs, aborted


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_tight_pool_with_aborts_is_clean(llama, overlap, seed):
    scheduler = build(
        llama, "raise", disable_overlap_schedule=not overlap, max_total_tokens=420, max_running_requests=32
    )
    reqs, aborted = churn(scheduler, seed)
    searches = [r for r in reqs if r.beam_group is not None]
    assert len(searches) > 8
    assert aborted
    for req in reqs:
        if req.beam_group is None:
            assert engine.is_greedy(llama, req.origin_input_ids, req.output_ids)
    state = session.current().status()
    assert (state["watching"], state["violations"], state["skipped"], state["left_out"]) == ("complete", 0, 0, {})
    assert state["positions_verified"] == state["positions_relied_on"]


def step_until(scheduler: Any, req: Any, generated: int) -> torch.Tensor:
    """Run steps until a search has generated so much; return the slots of its rows, [rows x positions]."""
    while req.beam_group.num_committed < generated:
        engine.step(scheduler)
    table = scheduler.req_to_token_pool.req_to_token
    return table[req.beam_group.all_rows, : len(req.origin_input_ids) + generated - 1]


def test_a_byte_changed_in_one_beams_slots_is_found_as_that_beams(llama):
    scheduler = build(llama, "log", {"KV_CANARY_READ_BYTES": "128"})
    req = engine.submit(scheduler, tokens(30, 6), 14, rid="the search", beam_width=3, n=3)
    other = engine.submit(scheduler, tokens(40, 7), 30, rid="an ordinary one")
    slots = step_until(scheduler, req, 6)
    # A slot that one row alone is on; which of the three is not known before.
    alone = [
        (row, position)
        for row in range(3)
        for position in range(30, slots.shape[1])
        if (slots[:, position] == slots[row, position]).sum() == 1
    ]
    row, position = alone[-1]
    slot = int(slots[row, position])
    pool = scheduler.tp_worker.model_runner.token_to_kv_pool
    pool.k_buffer[position % 3][slot] += 1
    engine.run_all(scheduler)
    session.current().manager.flush()
    reports = list(session.current().manager.reports)
    assert reports[0].request_id == f"the search beam {row + 1}"
    assert (reports[0].slot, reports[0].position, list(reports[0].reasons)) == (slot, position, ["K"])
    assert {r.request_id for r in reports} <= {f"the search beam {i}" for i in (1, 2, 3)}
    assert engine.is_greedy(llama, other.origin_input_ids, other.output_ids)


def test_a_byte_changed_under_an_ordinary_request_beside_a_search_is_found(llama):
    scheduler = build(llama, "raise", {"KV_CANARY_READ_BYTES": "128"})
    search = engine.submit(scheduler, tokens(30, 6), 14, beam_width=3, n=3)
    victim = engine.submit(scheduler, tokens(40, 7), 30, rid="the victim")
    step_until(scheduler, search, 4)
    slot = int(scheduler.req_to_token_pool.req_to_token[victim.kv.req_pool_idx, 9])
    scheduler.tp_worker.model_runner.token_to_kv_pool.v_buffer[0][slot] += 1
    with pytest.raises(session.CanaryViolationError, match="the victim"):
        engine.run_all(scheduler)


def test_a_row_that_is_not_pointed_at_its_branch_is_found(llama, monkeypatch):
    def forgets_the_last_row(req_to_token, rows, parent_idx, prefix_len, seq_len):
        window = req_to_token[rows, prefix_len:seq_len]
        old = window.clone()
        new = old[parent_idx]
        new[-1] = old[-1]
        req_to_token[rows, prefix_len:seq_len] = new
        return old, new

    scheduler = build(llama, "log")
    monkeypatch.setattr(coordinator, "remap_kv_mapping", forgets_the_last_row)
    engine.submit(scheduler, tokens(30, 6), 14, rid="the search", beam_width=3, n=3)
    other = engine.submit(scheduler, tokens(40, 7), 12)
    engine.run_all(scheduler)
    session.current().manager.flush()
    reports = list(session.current().manager.reports)
    assert reports[0].request_id == "the search beam 3"
    assert "TOKEN" in reports[0].reasons
    # The others take over what it has.
    assert {r.request_id for r in reports} <= {f"the search beam {i}" for i in (1, 2, 3)}
    assert engine.is_greedy(llama, other.origin_input_ids, other.output_ids)


def test_a_wide_search_over_a_long_prompt_leaves_itself_out_and_nobody_else(llama, monkeypatch, caplog):
    monkeypatch.setattr(beams, "MOST_ANEW", 100)
    expected = live(build(llama, "off"))
    scheduler = build(llama, "raise")
    assert live(scheduler) == expected
    state = session.current().status()
    [(why, count)] = state["left_out"].items()
    assert "a row of a beam search whose text has changed" in why
    assert count > 8
    assert (state["watching"], state["violations"], state["skipped"], state["failures"]) == ("complete", 0, 0, {})
    assert state["positions_verified"] == state["positions_relied_on"]
    # Rows that go on from where they were read what rows that were left out have written.
    assert state["unverified"] > 0


def test_what_is_not_known_of_a_search_leaves_it_out(llama, monkeypatch):
    expected = live(build(llama, "off"))
    scheduler = build(llama, "raise")
    monkeypatch.setattr(beams._Group, "texts", lambda self, group: group.another_name)
    assert live(scheduler) == expected
    state = session.current().status()
    assert list(state["left_out"]) == ["a row of a beam search whose tokens the host does not have"]
    assert (state["off"], state["violations"], state["failures"]) == ("", 0, {})
    # Where it was alone.
    assert state["skipped"] > 0
    assert state["positions_verified"] == state["positions_relied_on"] > 0


def group(leaves: list[Any], pending: list[Any], width: int) -> Any:
    return SimpleNamespaceWithIdentity(
        leaves=leaves, _pending_steps=[(0, choice) for choice in pending], beam_width=width
    )


class SimpleNamespaceWithIdentity(SimpleNamespace):
    __hash__ = object.__hash__


def chosen(parents: list[int], next_tokens: list[int]) -> SelectResult:
    none = torch.zeros(0, dtype=torch.int64)
    return SelectResult(
        next_tokens=torch.tensor(next_tokens),
        parent_idx=torch.tensor(parents),
        new_cum_logprobs=none,
        num_survivors=none,
        fin_tokens=none,
        fin_parent_idx=none,
        fin_cum_logprobs=none,
        num_finished=none,
    )


def test_texts_follow_choices_that_the_host_has_not_taken_in():
    followed = beams.Beams()
    one = group([None], [chosen([0, 0], [5, 6])], 2)
    assert followed.texts(one) == [[5], [6]]
    five, six = BeamNode(5), BeamNode(6)
    one.leaves, one._pending_steps = [five, six], [(1, chosen([1, 1], [7, 8]))]
    assert followed.texts(one) == [[6, 7], [6, 8]]
    one.leaves, one._pending_steps = [BeamNode(7, six), BeamNode(8, six)], []
    assert followed.texts(one) == [[6, 7], [6, 8]]
    # Behind a last choice every row stays where it is, whatever it is given.
    last = FinalSelect(tokens=torch.tensor([1, 2]), parent_idx=torch.tensor([1, 0]), cum_logprobs=torch.zeros(2))
    one._pending_steps = [(2, last)]
    assert followed.texts(one) == [[6, 7, 1], [6, 8, 2]]


def test_a_text_that_goes_on_keeps_its_owner_and_another_one_has_another():
    followed, one, req = beams.Beams(), group([], [], 2), SimpleNamespaceWithIdentity(rid="r")
    first, second = beams.Beam(group=one, place=0), beams.Beam(group=one, place=1)
    assert followed.owner_key(req, first, [5]) is req
    before = followed.owner_key(req, second, [6])
    assert before is not req
    assert before.rid == "r beam 2"
    assert followed.goes_on(second, [6, 7])
    assert followed.owner_key(req, second, [6, 7]) is before
    # A sibling's branch: only the last token differs, but it lies in the sibling's slot.
    assert not followed.goes_on(second, [6, 9, 8])
    other = followed.owner_key(req, second, [6, 9, 8])
    assert other is not before
    assert followed.owner_key(req, second, [5, 7, 8, 9]) is before
    followed.forget()
    assert not followed.goes_on(second, [5, 7, 8, 9, 1])
    assert followed.owner_key(req, second, [5, 7, 8, 9, 1]) not in (before, other)
    assert followed.owner_key(req, first, [5, 1]) is not req


ROUND = Round(
    prompts=[tokens(40, 1), tokens(50, 2), tokens(70, 3), tokens(30, 4), tokens(90, 5)],
    new_tokens=14,
    beams={1: 3, 3: 2},
)


@pytest.fixture(scope="module")
def without(llama) -> EngineRun:
    """What an engine without the canary answers, twice over."""
    return run_engine(llama, [ROUND, ROUND])


@pytest.mark.long
@pytest.mark.parametrize("mode", ["log", "raise"])
def test_a_whole_engine_serves_searches_with_the_canary_on(llama, without, mode):
    run = run_engine(llama, [ROUND, ROUND], env={"KV_CANARY_MODE": mode, **ALL_ON})
    assert (run.outputs, run.beams, run.cached) == (without.outputs, without.beams, without.cached)
    assert [[len(b) for b in r] for r in run.beams] == [[0, 3, 0, 2, 0]] * 2
    state = run.states[0]["kv-canary"]
    assert (state["watching"], state["off"], state["violations"]) == ("complete", "", 0)
    assert (state["skipped"], state["left_out"], state["failures"]) == (0, {}, {})
    assert state["positions_verified"] == state["positions_relied_on"] > 2 * 13 * (40 + 3 * 50 + 70 + 2 * 30 + 90)


@pytest.mark.long
def test_a_whole_engine_and_its_canary_go_on_through_unknown_forwards_and_failures(llama, without):
    """Some forwards have no lengths, the canary fails now and then; and a fault that is planted late is found."""
    trouble = {"KV_CANARY_MODE": "log", "SGLANG_ON_CPU": "troubled_canary"}
    fault = {"KV_CANARY_PERTURB_MODE": "req_to_token", "KV_CANARY_PERTURB_WARM_UP": "25"}
    run = run_engine(llama, [ROUND, ROUND], env=trouble | fault)
    # The fault swaps two entries of a table for one forward only.
    pairs = [pair for both in zip(run.outputs, without.outputs, strict=True) for pair in zip(*both, strict=True)]
    assert sum(a == b for a, b in pairs) >= 9
    state = run.states[0]["kv-canary"]
    assert state["off"] == ""
    assert state["skipped"] > 5
    assert sum(state["failures"].values()) > 1
    assert state["positions_verified"] > 1000
    assert state["violations"] > 0
    # Both entries, of one request, in one forward; and nothing else in either round.
    incidents = re.findall(r"kv-canary: incident \d+: (step \d+ .*request .*) reads position .* TOKEN ", run.log)
    assert len(incidents) == 2
    assert len(set(incidents)) == 1
