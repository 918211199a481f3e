"""Clean runs report nothing: every scenario of SGLang's memory management, and nothing to find in it.

Every run also sees that nothing was left out, and that outputs are what transformers generates: see `run_clean`.
"""

from __future__ import annotations

import pytest

pytest.importorskip("sglang")

from . import engine
from .clean import VARIANTS, Run, Tokens, run_clean
from .engine_process import Round, run_engine

LENGTHS = (3, 15, 16, 17, 64, 65, 128, 150)


# Of the settings with a model whose layers slide, which is slower, those that hold the others' parts.
SLIDING = ("overlap, page 16",)


def models_in(*variants: str) -> pytest.MarkDecorator:
    """Parametrize a test by model, one whose layers are all full and one most of whose layers slide, and variant.

    Every day what comes together in one variant need not come alone in others.
    """
    alone = {part for variant in variants if ", " in variant for part in variant.split(", ")}

    def marks(kind: str, variant: str) -> list[pytest.MarkDecorator]:
        is_long = variant in alone or (kind == "mellum" and variant not in SLIDING)
        return [pytest.mark.long] if is_long else []

    return pytest.mark.parametrize(
        ("kind", "variant"),
        [pytest.param(k, v, marks=marks(k, v)) for k in ("llama", "mellum") for v in variants],
    )


@pytest.fixture
def model(request, kind):
    """The folder of a model."""
    return request.getfixturevalue(kind)


@models_in(*VARIANTS)
def test_chunked_prefills_and_prefix_hits_are_clean(model, variant):
    def scenario(run: Run) -> None:
        prompts = [run.tokens(n) for n in LENGTHS]
        first = run.serve(prompts, 12)
        again = run.serve(prompts, 12)
        # Several turns: what was said, and more.
        longer = [[*r.origin_input_ids, *r.output_ids, *run.tokens(9)] for r in again]
        turns = run.serve(longer, 12)
        assert engine.outputs(first) == engine.outputs(again)
        assert all(req.cached_tokens == 0 for req in first)
        assert all(req.cached_tokens > 0 for req in turns if len(req.origin_input_ids) > 40)

    run = run_clean(model, scenario, **VARIANTS[variant])
    assert ("MIXED" in run.modes) == ("mixed" in variant)
    assert run.modes["EXTEND"] + run.modes["MIXED"] > 10


@models_in("plain", "page 16", "overlap, page 16")
def test_prompts_of_whole_pages_are_clean(model, variant):
    def scenario(run: Run) -> None:
        longest = run.tokens(96)
        for n in (16, 32, 48, 64, 80, 96, 64, 32, 33, 31, 96):
            run.serve([longest[:n], longest[:n]], 3)

    run = run_clean(model, scenario, **VARIANTS[variant])
    assert sum(req.cached_tokens for req in run.reqs) > 500


@models_in("plain", "overlap, page 16")
def test_going_back_to_an_earlier_prompt_is_clean(model, variant):
    def scenario(run: Run) -> None:
        a, b = run.tokens(70), run.tokens(70)
        for prompt in (a, b, a, a[:40] + b[40:], b, a):
            run.serve([prompt], 6)

    run_clean(model, scenario, **VARIANTS[variant])


@models_in(*VARIANTS)
def test_eviction_from_a_tight_pool_is_clean(model, variant):
    def scenario(run: Run) -> None:
        prompts = [run.tokens(n) for n in LENGTHS]
        for _ in range(3):
            run.serve(prompts, 16)

    run = run_clean(model, scenario, max_total_tokens=384, **VARIANTS[variant])
    # Not all of it fits.
    assert sum(req.cached_tokens for req in run.reqs[8:]) < 2 * sum(LENGTHS) - 200


@models_in(*VARIANTS)
def test_retraction_is_clean(model, variant):
    def scenario(run: Run) -> None:
        prompts = [run.tokens(20) for _ in range(8)]
        for _ in range(2):
            for prompt in prompts:
                # They might end early, so they are let in on the assumption that few of these tokens will come.
                run.submit(prompt, 60, ignore_eos=False)
            run.go()

    run = run_clean(model, scenario, max_total_tokens=384, schedule_conservativeness=0.1, **VARIANTS[variant])
    assert sum(req.retraction_count for req in run.reqs) > 0


@models_in(*VARIANTS)
def test_aborts_in_mid_flight_are_clean(model, variant):
    def scenario(run: Run) -> None:
        prompts = [run.tokens(n) for n in (150, 20, 100, 64)]

        def before_step(iteration: int) -> bool:
            if iteration >= 50:
                return False
            # While it waits, between its chunks, while it decodes; and the same prompts come again.
            if iteration % 8 == 0:
                for prompt in prompts:
                    run.submit(prompt, 25)
            if iteration % 8 in (1, 2, 5):
                alive = run.alive()
                run.abort(alive[iteration // 8 % len(alive)])
            return True

        run.go(before_step)

    run = run_clean(model, scenario, **VARIANTS[variant])
    assert len(run.aborted) > 15
    assert {0, 25} < {len(req.output_ids) for req in run.reqs}


@models_in("plain", "overlap, page 16")
def test_flushing_the_cache_is_clean(model, variant):
    def scenario(run: Run) -> None:
        prompts = [run.tokens(n) for n in LENGTHS]
        for _ in range(3):
            fresh = run.serve(prompts, 8)
            assert all(req.cached_tokens == 0 for req in fresh)
            assert run.scheduler.flush_cache()
            # So that slots hold what they have not held before.
            prompts.append(prompts.pop(0))

    run_clean(model, scenario, **VARIANTS[variant])


@pytest.mark.parametrize("variant", ["plain", "overlap, page 16"])
def test_no_prefix_cache_is_clean(llama, variant):
    def scenario(run: Run) -> None:
        prompts = [run.tokens(n) for n in LENGTHS]
        for _ in range(2):
            run.serve(prompts, 8)

    # There is nothing to sweep.
    run = run_clean(
        llama, scenario, settings={"KV_CANARY_SWEEP_EVERY": "0"}, disable_radix_cache=True, **VARIANTS[variant]
    )
    assert all(req.cached_tokens == 0 for req in run.reqs)


@models_in("plain", "overlap")
def test_sampled_tokens_and_stops_are_clean(model, variant):
    def scenario(run: Run) -> None:
        prompts = [run.tokens(n) for n in LENGTHS]
        for _ in range(2):
            for prompt in prompts:
                # One in twenty tokens ends a request, so that an overlapped scheduler runs it one step too many.
                stops = list(range(0, engine.VOCABULARY, 20))
                run.submit(prompt, 30, temperature=1.0, stop_token_ids=stops, ignore_eos=False)
            run.go()

    run = run_clean(model, scenario, random=True, **VARIANTS[variant])
    assert len({len(req.output_ids) for req in run.reqs}) > 5


@models_in("plain", "overlap, page 16")
def test_the_canary_changes_no_output(model, variant, monkeypatch):
    def served(run: Run) -> None:
        shared = run.tokens(40)
        for n in (5, 30, 90):
            run.serve([shared + run.tokens(n), run.tokens(n)], 20)

    guarded = run_clean(model, served, **VARIANTS[variant])
    monkeypatch.setenv("KV_CANARY_MODE", "off")
    monkeypatch.setenv("SGLANG_ON_CPU", "hybrid_swa")
    bare = Run(scheduler=engine.build_scheduler(model, **VARIANTS[variant]), tokens=Tokens())
    served(bare)
    assert engine.outputs(guarded.reqs) == engine.outputs(bare.reqs)
    assert guarded.modes == bare.modes


@pytest.mark.parametrize(
    ("kind", "seed", "variant", "steps"),
    [
        pytest.param("llama", 1, "plain", 400, marks=pytest.mark.long),
        pytest.param("llama", 2, "overlap, mixed", 400, marks=pytest.mark.long),
        pytest.param("llama", 3, "overlap, page 16", 400, marks=pytest.mark.long),
        pytest.param("mellum", 4, "page 16", 300, marks=pytest.mark.long),
        ("mellum", 5, "overlap", 300),
    ],
)
def test_churn_is_clean(request, kind, seed, variant, steps):
    """1,800 steps of requests that come, share prefixes, go on where others ended, are aborted and retracted."""

    def scenario(run: Run) -> None:
        random = run.tokens.random
        stems = [run.tokens(random.randrange(1, 120)) for _ in range(6)]

        def before_step(iteration: int) -> bool:
            if iteration >= steps:
                return False
            alive = run.alive()
            if len(alive) < 12 and random.random() < 0.5:
                stem = random.choice(stems)
                ended = random.choice(run.reqs) if run.reqs else None
                if ended and ended.finished() and random.random() < 0.3:
                    stem = [*ended.origin_input_ids, *ended.output_ids][:200]
                cut = stem[: random.choice((len(stem), random.randrange(1, len(stem) + 1), 16, 32, 64))]
                run.submit(cut + run.tokens(random.choice((0, 1, 9, 40))), random.choice((1, 2, 8, 30)))
            if alive and random.random() < 0.06:
                run.abort(random.choice(alive))
            return True

        run.go(before_step)

    run = run_clean(
        request.getfixturevalue(kind),
        scenario,
        seed=seed,
        max_total_tokens=512,
        schedule_conservativeness=0.2,
        **VARIANTS[variant],
    )
    assert run.modes.total() > steps * 0.9
    assert len(run.reqs) > steps / 10 > len(run.aborted) > 2


ROUNDS = (
    Round(prompts=[Tokens(n)(n) for n in LENGTHS], new_tokens=16),
    Round(prompts=[[*Tokens(n)(n), *Tokens(1)(5)] for n in LENGTHS], new_tokens=40, abort=(1, 6)),
    Round(prompts=[Tokens(n)(n) for n in LENGTHS], new_tokens=16, flush=True),
)


@pytest.mark.parametrize(
    "args",
    [
        pytest.param(
            {"page_size": 16, "max_total_tokens": 512, "enable_mixed_chunk": True},
            id="tight, mixed",
            marks=pytest.mark.long,
        ),
        pytest.param({"tp_size": 2}, id="two ranks", marks=pytest.mark.long),
    ],
)
def test_an_engine_of_processes_is_clean(llama, args):
    env = {"KV_CANARY_MODE": "raise", "KV_CANARY_SWEEP_EVERY": "5"}
    if args.get("tp_size"):
        env |= {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "KV_CANARY_DIGEST_EVERY": "4"}
    run = run_engine(llama, ROUNDS, env=env, **args)
    for asked, outputs, cached in zip(ROUNDS, run.outputs, run.cached, strict=True):
        for number, (prompt, output) in enumerate(zip(asked.prompts, outputs, strict=True)):
            assert engine.is_greedy(llama, prompt, output)
            if number not in asked.abort:
                assert len(output) == asked.new_tokens
        assert (sum(cached) > 0) == (asked is ROUNDS[1])
    [state] = run.states
    found = state["kv-canary"]
    assert (found["watching"], found["mode"], found["off"], found["violations"]) == ("complete", "raise", "", 0)
    assert found["positions_verified"] == found["positions_relied_on"] > sum(LENGTHS)
    assert found["steps"] > 60
