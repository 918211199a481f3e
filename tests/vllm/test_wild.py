"""Bugs of stock vLLM that give wrong text: found as they are, in the step they happen in, and silent once mended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kv_canary.difftest.stress.vllm.engine import VOCABULARY, Engine, Runner

PROMPT = [(7 * n) % VOCABULARY + 3 for n in range(170)]


def mend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take lengths that go back to the device as well, as vllm#49252 does."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    update = GPUModelRunner.update_requests

    def mended(self: Any, scheduled: Any) -> None:
        update(self, scheduled)
        states, cached = self.req_states, scheduled.scheduled_cached_reqs
        for name, length in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            states.num_computed_tokens.gpu[states.req_id_to_index[name]] = length

    monkeypatch.setattr(GPUModelRunner, "update_requests", mended)


@pytest.mark.parametrize(("runner", "is_mended"), [("V2", False), ("V2", True), ("V1", False)])
def test_a_load_that_failed_and_is_computed_again(
    model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, runner: Runner, is_mended: bool
) -> None:
    """vllm#49250: runner V2 goes on at the length that was promised, and V1 does not."""
    from kv_canary.difftest.stress.vllm import loopback

    if is_mended:
        mend(monkeypatch)
    connector = loopback.settings("wild", waits=False)
    arguments = {"kv_transfer_config": connector, "enable_prefix_caching": False}
    with Engine(model("llama"), runner=runner, canary={}, **arguments) as engine:
        engine.submit("first", PROMPT, new_tokens=6)
        engine.run()
        loopback.STORES["wild"].fault = "fails"
        engine.submit("second", PROMPT, new_tokens=6)
        engine.run()
        first, second = engine.outputs.values()
        session = engine.session
        session.manager.flush()
        incidents = session.manager.incidents
        assert session.manager.guard.failures == {}
        if runner == "V1" or is_mended:
            assert second == first
            assert incidents == []
            return
        assert second != first
        step = min(incident.first_step for incident in incidents)
        told = [incident for incident in incidents if incident.first_step == step]
        assert {reason for incident in told for reason in incident.reasons} >= {"WRITE_POSITION", "BATCH"}
        assert any("the forward's positions are off by 170" in incident.cause for incident in told)
        assert any("the length on the device is off by 170" in incident.cause for incident in told)
        assert all(name.startswith("second") for incident in incidents for name in incident.requests)


def forget_what_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take what a request that is preempted has not computed out of the prefix cache."""
    from vllm.v1.core.sched.scheduler import Scheduler

    preempt = Scheduler._preempt_request

    def mended(self: Any, request: Any, *args: Any, **options: Any) -> None:
        [blocks] = self.kv_cache_manager.get_block_ids(request.request_id)
        rest = blocks[request.num_computed_tokens // self.block_size :]
        self.kv_cache_manager.block_pool.evict_blocks(set(rest))
        preempt(self, request, *args, **options)

    monkeypatch.setattr(Scheduler, "_preempt_request", mended)


@pytest.mark.parametrize("runner", ["V1", "V2"])
@pytest.mark.parametrize("is_mended", [False, True])
def test_a_request_that_is_preempted_by_priority_in_the_step_that_it_was_scheduled_in(
    model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, runner: Runner, is_mended: bool
) -> None:
    """vllm#57580: its blocks are in the prefix cache as soon as they are handed out, and nobody computes them."""
    from vllm import SamplingParams

    if is_mended:
        forget_what_is_not_computed(monkeypatch)
    arguments = {
        "scheduling_policy": "priority",
        "max_num_batched_tokens": 200,
        "long_prefill_token_threshold": 64,
        "max_model_len": 416,
        "scheduler_reserve_full_isl": False,
    }
    document, other = [(7 * n) % 900 + 3 for n in range(400)], [5, *range(30, 123)]

    def serve(blocks: int, canary: dict[str, str] | None) -> tuple[list[int], list[Any]]:
        with Engine(
            model("llama"), runner=runner, canary=canary, num_gpu_blocks_override=blocks, **arguments
        ) as engine:

            def submit(name: str, prompt: list[int], *, new_tokens: int, priority: int) -> None:
                sampling = SamplingParams(temperature=0, max_tokens=new_tokens, detokenize=False, ignore_eos=True)
                engine.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling, priority=priority)

            submit("patient", document, new_tokens=4, priority=5)
            engine.step()
            submit("urgent", other, new_tokens=8, priority=0)
            engine.run()
            [text] = [tokens for name, tokens in engine.outputs.items() if name.startswith("patient")]
            if canary is None:
                return text, []
            engine.session.manager.flush()
            assert engine.session.manager.guard.failures == {}
            return text, engine.session.manager.incidents

    expected, _ = serve(60, None)
    found, incidents = serve(14, {})
    if is_mended:
        assert (found, incidents) == (expected, [])
        return
    assert found != expected
    [incident] = [incident for incident in incidents if "NEVER_WRITTEN" in incident.reasons]
    assert incident.first_step == min(each.first_step for each in incidents)
    assert all(name.startswith("patient") for each in incidents for name in each.requests)
