"""Clean runs report nothing: every scenario of the engine's memory management, and nothing to find in it.

Every run also checks that nothing was left out: the positions verified are exactly the cached positions that the
forwards were about to read. Each test asserts its own least number of forwards (`LEAST`), which summed over the models
(4 * (70 + 70 + 65 + 65 + 75 + 60 + 70 + 100) = 2300) is 2300 in each version of transformers; the last two tests add
some 200.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import kv_canary

from .scenarios import (
    MODELS,
    Happened,
    Prompts,
    Server,
    drop_pinning,
    make_model,
    padding_config,
    serve,
    watch_engine,
)

LENGTHS = (3, 7, 16, 17, 31, 40, 5, 90)
LEAST = {
    "chunked prefill": 70,
    "prefix": 70,
    "same": 65,
    "fork": 65,
    "evict": 75,
    "offload": 60,
    "pad": 70,
    "cancel": 100,
}


@dataclass
class Run:
    """What a scenario works with."""

    server: Server
    happened: Happened
    canary: Any


def run_clean(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    scenario: Callable[[Run], None],
    *,
    samples: int = 1,
    options: dict[str, Any] | None = None,
    config: kv_canary.CanaryConfig | None = None,
) -> Happened:
    """Run the scenario under a canary, assert that it found nothing and left nothing out, and return what happened."""
    happened = watch_engine(monkeypatch)
    model = make_model(kind)
    canary = kv_canary.install(model, config=config or kv_canary.CanaryConfig(backend="reference"))
    try:
        with serve(model, samples=samples, **(options or {})) as server:
            scenario(Run(server=server, happened=happened, canary=canary))
        canary.flush()
        summary = canary.summary()
        assert [r.sentence for r in canary.reports] == []
        assert (summary.violations, summary.reasons, summary.status) == (0, {}, "healthy")
        assert summary.steps == happened.forwards
        assert summary.positions_verified == happened.relied_on(canary.manager.groups) > 0
        assert all(summary.launches[g.head_tag.name] for g in canary.manager.groups)
    finally:
        canary.uninstall()
    return happened


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
    assert happened.forwards >= 45


@pytest.mark.parametrize(("kind", "waves"), [("llama", 2), ("gemma3", 1)])
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
