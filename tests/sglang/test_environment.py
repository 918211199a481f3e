"""SGLang in this environment, without a canary, generates what transformers does: what the other tests stand on."""

from __future__ import annotations

import importlib.metadata
import random

import pytest

pytest.importorskip("sglang")

from . import engine
from .engine_process import Round, run_engine

SHARED = random.Random(1).choices(range(3, engine.VOCABULARY), k=100)
PROMPTS = [
    [*SHARED, *random.Random(seed).choices(range(3, engine.VOCABULARY), k=k)] for seed, k in [(2, 7), (3, 50), (4, 28)]
] + [random.Random(seed).choices(range(3, engine.VOCABULARY), k=k) for seed, k in [(5, 150), (6, 9), (7, 64), (8, 16)]]
NEW_TOKENS = 20


@pytest.fixture(autouse=True)
def no_canary(monkeypatch):
    monkeypatch.delenv("KV_CANARY_MODE", raising=False)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page", [1, 16])
def test_a_scheduler_in_this_process_is_greedy(llama, page, overlap):
    scheduler = engine.build_scheduler(llama, page_size=page, disable_overlap_schedule=not overlap)
    expected = engine.greedy(llama, PROMPTS, NEW_TOKENS)
    for again in range(2):
        reqs = [engine.submit(scheduler, prompt, NEW_TOKENS) for prompt in PROMPTS]
        modes = engine.run_all(scheduler)
        assert engine.outputs(reqs) == expected
        assert all(req.finished() for req in reqs)
        if again:
            # But for the last token, and what is too little for a page.
            assert [req.cached_tokens for req in reqs] == [(len(p) - 1) // page * page for p in PROMPTS]
        else:
            # In chunks.
            assert modes["EXTEND"] > 1 < modes["DECODE"]


@pytest.mark.parametrize("page", [1, 16])
def test_a_hybrid_pool_is_greedy(mellum, monkeypatch, page):
    monkeypatch.setenv("SGLANG_ON_CPU", "hybrid_swa")
    scheduler = engine.build_scheduler(mellum, page_size=page)
    pool = scheduler.tp_worker.model_runner.token_to_kv_pool
    assert (type(pool).__name__, pool.swa_layer_nums, pool.full_layer_nums) == ("SWAKVPool", 4, 2)
    for _ in range(2):
        reqs = [engine.submit(scheduler, prompt, NEW_TOKENS) for prompt in PROMPTS]
        engine.run_all(scheduler)
        assert engine.outputs(reqs) == engine.greedy(mellum, PROMPTS, NEW_TOKENS)


def test_greedy_is_told_from_what_is_not(llama):
    [output] = engine.greedy(llama, PROMPTS[:1], NEW_TOKENS)
    assert engine.is_greedy(llama, PROMPTS[0], output)
    for i in range(NEW_TOKENS):
        assert not engine.is_greedy(llama, PROMPTS[0], [*output[:i], output[i] ^ 1, *output[i + 1 :]])


def test_a_scheduler_goes_step_by_step(llama):
    scheduler = engine.build_scheduler(llama)
    req = engine.submit(scheduler, PROMPTS[3], 3)
    lengths = []
    while engine.step(scheduler):
        lengths.append(len(req.output_ids))
    # Three chunks, of which the last gives a token, and two decodes.
    assert lengths == [0, 0, 1, 2, 3]
    assert engine.run_all(scheduler) == {}


def test_requests_come_and_go_while_it_runs(llama):
    scheduler = engine.build_scheduler(llama, disable_overlap_schedule=False)
    reqs = []

    def before_step(iteration):
        if iteration == 3:
            reqs.append(engine.submit(scheduler, PROMPTS[0], 30, rid="first"))
        if iteration == 9:
            engine.abort(scheduler, "first")
            reqs.append(engine.submit(scheduler, PROMPTS[1], 5))
        return iteration < 12

    engine.run_all(scheduler, before_step)
    assert [req.finished() for req in reqs] == [True, True]
    assert 0 < len(reqs[0].output_ids) < 30
    assert engine.is_greedy(llama, PROMPTS[0], reqs[0].output_ids)
    assert engine.outputs(reqs[1:]) == engine.greedy(llama, PROMPTS[1:2], 5)


@pytest.mark.long
def test_an_engine_of_processes_is_greedy(llama):
    run = run_engine(llama, [Round(prompts=PROMPTS, new_tokens=NEW_TOKENS)] * 2, page_size=16)
    assert run.outputs == [engine.greedy(llama, PROMPTS, NEW_TOKENS)] * 2
    assert sum(run.cached[1]) > sum(run.cached[0])
    assert [state.get("kv-canary") for state in run.states] == [None]


def test_the_versions_are_those_that_are_pinned(request):
    pins = (request.config.rootpath / "constraints-sglang.txt").read_text()
    for name in ("sglang", "torch", "transformers", "triton"):
        assert f"\n{name}=={importlib.metadata.version(name).split('+')[0]}\n" in pins
