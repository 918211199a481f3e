"""What a session does around a forward of transformers: before it, behind it, and for requests that are over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import kv_canary

from .scenarios import PAGE, Prompts, make_model, serve
from .test_transformers_flips import engine_views
from .test_transformers_lifetime import pause


def test_a_block_that_is_freed_just_before_a_forward_is_told_of_by_that_forward() -> None:
    model = make_model("llama")
    canary = kv_canary.install(model, backend="reference", max_reports_per_step=1024)
    with serve(model) as server:
        processor = server.manager.batch_processor
        if not hasattr(processor.cache, "pool"):
            pytest.skip("5.17 counts the users of a block, and refuses to free it twice")
        run, steps = processor.model_runner.compute_batch, list[int]()

        def freeing(*args: Any) -> Any:
            steps.append(len(steps) + 1)
            if len(steps) == 4:
                # The last forward: no other comes that could tell of it.
                (allocator,) = processor.cache.cache_allocators.values()
                processor.cache.pool.free_blocks(allocator.index, allocator.block_table["w0_0"][:1])
            return run(*args)

        processor.model_runner.compute_batch = freeing
        server.run([Prompts().random(PAGE + 4)], new_tokens=4)
        canary.flush()
        found = {(r.step, r.position, r.reasons) for r in canary.reports if r.tag == "HEAD_FULL"}
    canary.uninstall()
    assert steps == [1, 2, 3, 4]
    assert found == {(4, position, ("FREED",)) for position in range(PAGE)}


def test_a_fault_injected_into_a_forward_is_taken_back_where_the_canary_is_uninstalled_inside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model("llama")
    monkeypatch.setenv("KV_CANARY_PERTURB_MODE", "next_token_swap")
    monkeypatch.setenv("KV_CANARY_PERTURB_WARM_UP", "3")
    canary = kv_canary.install(model, backend="reference")
    with serve(model) as server:
        runner = server.manager.batch_processor.model_runner
        run, forward = runner.compute_batch, runner._forward_process_and_sample
        steps: list[list[torch.Tensor]] = []

        def around(model: Any, batch_data: dict[str, Any]) -> Any:
            steps.append([batch_data["input_ids"].clone()])
            result = run(model, batch_data)
            steps[-1].append(batch_data["input_ids"].clone())
            return result

        def inside(model: Any, batch_data: dict[str, Any], *args: Any) -> Any:
            steps[-1].append(batch_data["input_ids"].clone())
            return forward(model, batch_data, *args)

        runner.compute_batch, runner._forward_process_and_sample = around, inside
        first, fourth = pause(runner, 1, below=True), pause(runner, 4, below=True)
        server.add(Prompts().of_lengths(5, 9), new_tokens=6)
        first.go.set()
        assert fourth.reached.wait(60)
        canary.uninstall()
        fourth.go.set()
        server.collect(2)
    before, during, after = steps[3]
    assert not torch.equal(before, during)
    assert torch.equal(before, after)


def test_a_session_keeps_nothing_of_requests_that_are_over() -> None:
    model = make_model("llama")
    canary: Any = kv_canary.install(model, backend="reference")
    with serve(model) as server:
        ids = server.add(Prompts().of_lengths(5, PAGE + 3), new_tokens=4)
        server.collect(2)
        server.run(Prompts().of_lengths(7), new_tokens=2)
        (session,) = canary._sessions
        parts = (session, session._written, session._composer, session._composer._rows)
        kept = {name: [*value] for part in parts for name, value in vars(part).items() if isinstance(value, dict)}
    canary.uninstall()
    assert {name for name, keys in kept.items() if set(ids) & set(keys)} == set()


@pytest.mark.parametrize("spoils", [False, True], ids=["healthy", "spoilt"])
def test_requests_whose_ids_are_numbers_are_watched_and_named(spoils: bool, tmp_path: Path) -> None:
    model, prompts = make_model("llama"), Prompts().of_lengths(20, 20, 20, 20)
    canary = kv_canary.install(
        model,
        backend="reference",
        seals="layer",
        event_log=tmp_path / "events.jsonl",
        identity=lambda state: str(state.request_id),
    )
    with serve(model) as server:
        processor = server.manager.batch_processor
        run, forwards = processor.model_runner.compute_batch, 0

        def spoiling(*args: Any) -> Any:
            nonlocal forwards
            forwards += 1
            result = run(*args)
            if spoils and forwards == 8:
                # What the requests that end now rest on: no other forward reads it.
                for views in engine_views(processor.cache, 0):
                    for view in views:
                        view.add_(1)
            return result

        processor.model_runner.compute_batch = spoiling
        for wave in (prompts[:2], prompts[2:]):
            # The engine takes these for two requests.
            for name, prompt in zip((7, "7"), wave, strict=True):
                server.manager.add_request(prompt, request_id=name, max_new_tokens=4, eos_token_id=-1)
            assert set(server.collect(2)) == {7, "7"}
    canary.flush()
    summary = canary.summary()
    canary.uninstall()
    assert (summary.watching, summary.steps, summary.skipped, summary.failures) == ("complete", forwards, 0, {})
    assert summary.positions_verified == summary.positions_relied_on > 0
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    verdicts = [(e["request_id"], e["verdict"]) for e in events if e["event"] == "request_verified"]
    assert verdicts == [("7", "intact")] * 2 + [("7", "damaged" if spoils else "intact")] * 2
    assert {report.record.request_id for report in canary.reports} == ({"7"} if spoils else set())
