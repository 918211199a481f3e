"""A bug of stock vLLM that gives wrong text: found as it is, in the step that it happens in, and silent once mended."""

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
