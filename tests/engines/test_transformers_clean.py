"""Clean runs report nothing: every scenario of the engine's memory management, and nothing to find in it.

Every run also checks that nothing was left out: the positions verified are exactly the cached positions that the
forwards were about to read. Each test asserts its own least number of forwards (`LEAST`), which summed over the models
(4 * (48 + 50 + 48 + 55 + 58 + 50 + 48 + 90) = 1788) is 1788 in each version of transformers; the last two tests add
some 150. Of four models every scenario has two in `make test`, and the others in `make test-long`.
"""

from __future__ import annotations

import pytest
import torch

import kv_canary

from .clean import Run, run_clean
from .scenarios import MODELS, Prompts, allow_async_batching, drop_pinning, padding_config

LENGTHS = (3, 7, 16, 17, 31, 40, 5, 90)
LEAST = {
    "chunked prefill": 48,
    "prefix": 50,
    "same": 48,
    "fork": 55,
    "evict": 58,
    "offload": 50,
    "pad": 48,
    "cancel": 90,
}


@pytest.mark.every_day("gptoss")
@pytest.mark.parametrize("kind", MODELS)
def test_chunked_prefill_is_clean(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def scenario(run: Run) -> None:
        prompts = Prompts().of_lengths(*LENGTHS)
        waves = [run.server.run(prompts) for _ in range(3)]
        # The same prompts, first computed and then partly hit, must come to the same text.
        assert waves[0] == waves[1] == waves[2]

    happened = run_clean(monkeypatch, kind, scenario)
    assert happened.forwards >= LEAST["chunked prefill"]
    assert happened.later_chunks > 0


@pytest.mark.every_day("gemma3")
@pytest.mark.parametrize("kind", MODELS)
def test_shared_prefixes_over_several_turns_are_clean(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def scenario(run: Run) -> None:
        prompts = Prompts()
        shared = prompts.random(40)
        turns = [shared + prompts.random(n) for n in (3, 9, 20)] + [
            shared[:32],
            shared[:32],
            shared[:33],
            shared,
            shared,
        ]
        for _ in range(3):
            answers = run.server.run(turns)
            turns = [t + a + prompts.random(5) for t, a in zip(turns, answers, strict=True)]

    happened = run_clean(monkeypatch, kind, scenario)
    assert happened.forwards >= LEAST["prefix"]
    if kind == "llama":
        # The engine shares prefixes only where all attention is full.
        assert happened.prefix_hits >= 16


@pytest.mark.every_day("mistral")
@pytest.mark.parametrize("kind", MODELS)
def test_identical_prompts_in_one_batch_are_clean(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def scenario(run: Run) -> None:
        # Two whole pages: 5.17 hits all of it and rewrites the last slot, in blocks that others are reading.
        prompts = [Prompts().random(32)] * 6
        waves = [run.server.run(prompts) for _ in range(3)]
        assert all(answer == waves[0][0] for wave in waves for answer in wave)

    happened = run_clean(monkeypatch, kind, scenario)
    assert happened.forwards >= LEAST["same"]
    if kind == "llama":
        assert happened.prefix_hits >= 10


@pytest.mark.every_day("llama")
@pytest.mark.parametrize("kind", MODELS)
def test_forked_requests_are_clean(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def scenario(run: Run) -> None:
        prompts = Prompts().of_lengths(3, 7, 16, 17, 31, 40)
        for _ in range(2):
            run.server.run(prompts)

    happened = run_clean(monkeypatch, kind, scenario, samples=3)
    assert happened.forwards >= LEAST["fork"]
    # Two children of each of 6 prompts, twice.
    assert happened.forks >= 24


@pytest.mark.every_day("gemma3")
@pytest.mark.parametrize("kind", MODELS)
def test_evictions_and_soft_resets_are_clean(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def scenario(run: Run) -> None:
        prompts = Prompts().of_lengths(*(min(n, 50) for n in LENGTHS))
        for _ in range(2):
            run.server.run(prompts)

    blocks = {"mistral": 8}.get(kind, 10)
    happened = run_clean(monkeypatch, kind, scenario, options={"num_blocks": blocks})
    assert happened.forwards >= LEAST["evict"]
    assert happened.soft_resets > 0


@pytest.mark.every_day("gptoss")
@pytest.mark.parametrize("kind", MODELS)
def test_offloading_to_the_host_and_back_is_clean(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    drop_pinning(monkeypatch)

    def scenario(run: Run) -> None:
        prompts = Prompts().of_lengths(*(min(n, 50) for n in LENGTHS))
        for _ in range(2):
            run.server.run(prompts)

    blocks = {"mistral": 8, "llama": 10}.get(kind, 12)
    happened = run_clean(monkeypatch, kind, scenario, options={"num_blocks": blocks, "cpu_offload_space": 0.01})
    assert happened.forwards >= LEAST["offload"]
    assert happened.restores > 0


@pytest.mark.every_day("llama")
@pytest.mark.parametrize("kind", MODELS)
def test_padded_inputs_and_the_warm_up_are_clean(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def scenario(run: Run) -> None:
        prompts = Prompts().of_lengths(*LENGTHS)
        for _ in range(3):
            run.server.run(prompts)

    happened = run_clean(monkeypatch, kind, scenario, options=padding_config())
    assert happened.forwards >= LEAST["pad"]
    if kind in ("llama", "mistral"):
        # With several groups, 5.17 has too few blocks for its warm-up and leaves it out.
        assert happened.warm_ups > 0
    assert happened.padded > 0


@pytest.mark.every_day("mistral")
@pytest.mark.parametrize("kind", MODELS)
def test_cancelling_running_requests_is_clean(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def scenario(run: Run) -> None:
        prompts = Prompts()
        for _ in range(3):
            # 400 tokens take far longer than the other requests, so these are surely running when they are cancelled.
            doomed = run.server.add(prompts.of_lengths(20, 33, 70), new_tokens=400)
            run.server.run(prompts.of_lengths(5, 40, 17))
            for request_id in doomed:
                run.server.manager.cancel_request(request_id)
            # Their blocks go to these.
            run.server.run(prompts.of_lengths(31, 48, 9, 64))

    happened = run_clean(monkeypatch, kind, scenario, options={"num_blocks": 40})
    assert happened.forwards >= LEAST["cancel"]
    assert happened.cancelled_running == 9


@pytest.mark.every_day("gemma3")
@pytest.mark.parametrize("kind", MODELS)
def test_checking_everything_is_clean(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def scenario(run: Run) -> None:
        prompts = Prompts().of_lengths(*(min(n, 50) for n in LENGTHS))
        for _ in range(2):
            run.server.run(prompts)
        sources = [s for p in run.canary.manager.pools for s in (p.k_source, p.v_source)]
        assert all(s.num_windows == 1 and s.read_bytes == s.bytes_per_token for s in sources)
        assert run.canary.manager.state.token_pool is not None

    config = kv_canary.CanaryConfig(
        backend="reference", verify_bytes_at_tail=True, check_tokens=True, read_bytes=1 << 20, mode="raise"
    )
    happened = run_clean(monkeypatch, kind, scenario, config=config, options={"num_blocks": 24})
    assert happened.forwards >= 32


@pytest.mark.every_day("llama")
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_asynchronous_batching_is_clean(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    allow_async_batching(monkeypatch)

    def scenario(run: Run) -> None:
        assert run.happened.asynchronous is False
        prompts = Prompts()
        shared = prompts.random(40)
        first = run.server.run([shared + prompts.random(n) for n in (3, 9, 20)] + prompts.of_lengths(*LENGTHS))
        run.server.run([shared[:32], shared[:33], shared, shared] + prompts.of_lengths(16, 48))
        doomed = run.server.add(prompts.of_lengths(20, 33), new_tokens=400)
        run.server.run(prompts.of_lengths(5, 40))
        for request_id in doomed:
            run.server.manager.cancel_request(request_id)
        again = run.server.run(prompts.of_lengths(31, 48, 9, 64))
        assert len(first) == 11
        assert len(again) == 4
        assert run.happened.asynchronous

    options = {"use_async_batching": True, "num_blocks": 64}
    # HEAD's own records need the tokens that the forward before has just sampled. Sweeps see a block that 5.17 takes
    # into the prefix cache before it is filled: the one behind a prompt that the cache has wholly.
    config = kv_canary.CanaryConfig(
        backend="reference", check_tokens=True, verify_bytes_at_tail=True, records="head_and_tail", sweep_every=1
    )
    run_clean(monkeypatch, kind, scenario, options=options, config=config)


@pytest.mark.every_day("gemma3")
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_asynchronous_batching_under_pressure_is_clean(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    allow_async_batching(monkeypatch)
    drop_pinning(monkeypatch)

    def scenario(run: Run) -> None:
        prompts = Prompts().of_lengths(*(min(n, 50) for n in LENGTHS))
        for _ in range(2):
            run.server.run(prompts)

    options = {"use_async_batching": True, "num_blocks": {"llama": 10}.get(kind, 12), "cpu_offload_space": 0.01}
    happened = run_clean(monkeypatch, kind, scenario, options=options)
    assert happened.restores > 0


@pytest.mark.parametrize(("kind", "waves"), [pytest.param("llama", 2, marks=pytest.mark.long), ("gemma3", 1)])
def test_the_triton_backend_is_clean(
    monkeypatch: pytest.MonkeyPatch, kind: str, waves: int, device: torch.device
) -> None:
    pytest.importorskip("triton")
    if device.type != "cpu":
        pytest.skip("the engine runs on the CPU here, and Triton only in its interpreter")

    def scenario(run: Run) -> None:
        assert run.canary.manager.backend == "triton"
        prompts = Prompts().of_lengths(3, 17, 40, 60)
        for _ in range(waves):
            run.server.run(prompts, new_tokens=8)

    config = kv_canary.CanaryConfig(backend="triton")
    happened = run_clean(monkeypatch, kind, scenario, config=config)
    assert happened.forwards >= 9 * waves
