"""In log mode nothing that goes wrong inside the canary reaches vLLM; in raise mode a finding does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kv_canary.difftest.stress.vllm.engine import Engine, Runner, drafts_of
from kv_canary.engines.vllm import support
from kv_canary.engines.vllm.session import Session

Model = Callable[[str], str]
# So many that every request is handed out another block on the way.
NEW = 30


def serve(engine: Engine, *, first: int = 0) -> None:
    for n in range(first, first + 4):
        engine.submit(f"r{n}", [7 + n, *range(20, 90)], new_tokens=NEW)
    engine.run()


def outputs_of(engine: Engine) -> dict[str, list[int]]:
    return {name.partition("-")[0]: tokens for name, tokens in engine.outputs.items()}


@pytest.fixture(scope="module")
def without(model: Model) -> dict[str, list[int]]:
    """What the requests generate without a canary."""
    with Engine(model("llama")) as engine:
        serve(engine)
        return outputs_of(engine)


@pytest.mark.parametrize("runner", ["V1", pytest.param("V2", marks=pytest.mark.long)])
def test_a_canary_that_fails_everywhere_changes_nothing(
    model: Model, without: dict[str, list[int]], runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kv_canary.engines.vllm import blocks, inputs, requests, session

    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("on purpose")

    broken = [
        (blocks.Blocks, "admit"),
        (requests.Requests, "sampled"),
        (requests.Requests, "take"),
        (inputs.RunnerV1, "read"),
        (inputs.RunnerV2, "read"),
        (inputs.RunnerV1, "decode"),
        (inputs.RunnerV2, "decode"),
        (session, "told"),
    ]
    with Engine(model("llama"), runner=runner, canary={}) as engine:
        # One after the other, and all of them together.
        for owner, name in broken:
            with monkeypatch.context() as patched:
                patched.setattr(owner, name, fail)
                serve(engine)
                assert outputs_of(engine) == without
                engine.outputs.clear()
        with monkeypatch.context() as patched:
            for owner, name in broken:
                patched.setattr(owner, name, fail)
            serve(engine)
        assert outputs_of(engine) == without
        failures = engine.session.manager.guard.failures
        parts = {kind.partition(":")[0] for kind in failures}
        assert {"following the scheduler's step", "following a forward", "taking in what was sampled"} <= parts
        # And when nothing fails any more, it is watched again; what nobody followed is taken in anew.
        before = engine.session.manager.summary()
        serve(engine, first=4)
        engine.session.manager.flush()
        after = engine.session.manager.summary()
        assert after.positions_verified > before.positions_verified
        assert after.violations == 0


@pytest.mark.parametrize(
    ("runner", "drafted"),
    [
        pytest.param("V1", False, marks=pytest.mark.long),
        ("V2", False),
        pytest.param("V1", True, marks=pytest.mark.long),
    ],
)
def test_one_failure_in_the_midst_of_requests_makes_no_false_alarm(
    model: Model, without: dict[str, list[int]], runner: Runner, drafted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was sampled meanwhile is missing from their own text, and blocks were handed out that nobody followed."""
    from kv_canary.engines.vllm import blocks, inputs, requests

    reader, folder = inputs.RunnerV2 if runner == "V2" else inputs.RunnerV1, model("llama")
    more = {"speculative_config": drafts_of("draft_model", folder)} if drafted else {}
    canary = {"seals": "layer", "check_inputs": "1"}
    with Engine(folder, runner=runner, canary=canary, asynchronous=drafted, **more) as engine:
        manager, left_out = engine.session.manager, [0]
        for owner, name in (
            (reader, "read"),
            # Of a decode like the one before it nothing else is read, and with drafts there is none.
            *(() if drafted else ((reader, "decode"),)),
            (requests.Requests, "sampled"),
            (requests.Requests, "take"),
            (blocks.Blocks, "begin_step"),
            (blocks.Blocks, "append_each"),
        ):
            engine.outputs.clear()
            for n in range(4):
                engine.submit(f"r{n}", [7 + n, *range(20, 90)], new_tokens=NEW)
            start = engine.steps
            engine.run(lambda start=start: engine.steps == start + 5)
            failures = manager.guard.failures.total()
            real, calls = getattr(owner, name), [0]

            def once(*args: Any, real: Any = real, calls: list[int] = calls, **kwargs: Any) -> Any:
                calls[0] += 1
                if calls[0] == 1:
                    raise ZeroDivisionError("on purpose")
                return real(*args, **kwargs)

            with monkeypatch.context() as patched:
                patched.setattr(owner, name, once)
                if name == "read" and not drafted:
                    # Whoever comes is read of.
                    engine.submit("comes", [9, *range(30, 60)], new_tokens=6)
                # A block is handed out within so many steps.
                engine.run(lambda calls=calls: calls[0] > 0, most=40)
            # One that comes beside those that are left out, and hits what they have written and are writing.
            engine.submit("beside", [7, *range(20, 90), *range(300, 340)], new_tokens=6)
            engine.run()
            assert manager.guard.failures.total() > failures, name
            assert {n: engine.outputs[n] for n in without} == without
            manager.scrub()
            assert [report.sentence for report in manager.reports] == [], name
            assert engine.session.left_out > left_out[0], name
            left_out[0] = engine.session.left_out
        before = manager.summary().positions_verified
        serve(engine, first=20)
        manager.flush()
        assert manager.summary().positions_verified > before
        assert manager.summary().violations == 0


def test_who_finds_blocks_of_a_request_that_could_not_be_followed_takes_them_in(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, its = [], Session._known

    def fails(self: Any, inputs: Any) -> Any:
        if not failed:
            failed.append(True)
            raise ZeroDivisionError("on purpose")
        return its(self, inputs)

    monkeypatch.setattr(Session, "_known", fails)
    with Engine(model("llama"), canary={}) as engine:
        engine.submit("first", range(20, 90), new_tokens=NEW)
        engine.step()
        # Its forwards are followed.
        engine.submit("beside", range(120, 190), new_tokens=2 * NEW)
        engine.run()
        engine.submit("second", range(20, 90), new_tokens=NEW)
        engine.run()
        manager = engine.session.manager
        manager.flush()
        assert manager.guard.failures
        assert [report.sentence for report in manager.reports] == []
        assert manager.summary().unverified == 64


@pytest.mark.parametrize("by_graph", [False, True])
def test_with_check_writes_a_graph_s_batch_is_watched_whole_or_not_at_all(model: Model, by_graph: bool) -> None:
    """What its model hands over is of all requests, in their order: held against some of them it would be wrong."""
    with Engine(model("llama"), canary={"seals": "layer", "check_writes": "1"}) as engine:
        session = engine.session
        for n in range(2):
            engine.submit(f"r{n}", [7 + n, *range(20, 60)], new_tokens=NEW)
        engine.run(lambda: engine.steps == 4)
        session._has_graphs = by_graph
        names = list(session._composed.names)
        session.requests.lose(names[:1])
        engine.run(lambda: engine.steps == 6)
        assert session.left_out > 0
        assert (session.manager.skipped > 0) == by_graph
        session._has_graphs = False
        engine.run()
        session.manager.flush()
        assert [report.sentence for report in session.manager.reports] == []
        assert session.manager.summary().writes.slots > 0


def test_a_scheduler_that_tells_of_salts_no_more_makes_no_false_alarm(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kv_canary.engines.vllm import session

    with Engine(model("llama"), canary={}) as engine:
        for n, told in enumerate((True, False, True)):
            with monkeypatch.context() as patched:
                if not told:
                    patched.setattr(session, "told", lambda scheduled: None)
                engine.submit(f"r{n}", list(range(40, 120)), new_tokens=6, cache_salt="mine")
                engine.run()
        engine.session.manager.flush()
        assert [report.sentence for report in engine.session.manager.reports] == []
        assert engine.session.left_out > 0
        assert engine.session.manager.summary().positions_verified > 64


def test_a_finding_in_raise_mode_ends_the_step(model: Model) -> None:
    from kv_canary.reports import CanaryViolationError

    with Engine(model("llama"), canary={"mode": "raise"}) as engine:
        engine.submit("r", list(range(20, 90)), new_tokens=30)
        engine.run(lambda: engine.steps == 6)
        [name] = engine.scheduler.requests
        block = engine.scheduler.kv_cache_manager.get_block_ids(name)[0][0]
        session = engine.session
        session.manager.retire(session.groups[0].group.pool, torch.arange(32) + 32 * block)
        with pytest.raises(CanaryViolationError, match="FREED"):
            engine.run(most=5)


def test_a_closed_canary_leaves_the_worker_as_it_was(model: Model) -> None:
    with Engine(model("llama"), runner="V2", canary={}) as engine:
        worker, runner = engine.worker, engine.worker.model_runner
        assert worker.kv_canary_status()["off"] == ""
        serve(engine)
        status = worker.kv_canary_status()
        assert status["steps"] > 10
        assert (status["runner"], status["rank"], status["not_covered"]) == ("V2", 0, [])
        engine.session.close()
        names = ("execute_model", "sample_tokens", "shutdown", "sleep", "wake_up", "kv_canary_status")
        assert not set(names) & set(vars(worker))
        assert "prepare_attn" not in vars(runner)
        assert type(runner.kv_connector).__name__ == "KVConnector"
        serve(engine, first=4)
        assert len(engine.outputs) == 8


def test_a_cache_that_holds_nothing_any_more_is_forgotten(model: Model) -> None:
    with Engine(model("llama"), canary={"seals": "layer"}) as engine:
        serve(engine)
        session = engine.session
        pool = session.groups[0].group.pool
        assert pool.records.any()
        # What the memory of a KV cache that was given back holds when it is there again.
        slept = session._sleep(lambda level: level, 1)
        for layer in session.groups[0].layers:
            engine.worker.vllm_config.compilation_config.static_forward_context[layer].kv_cache.fill_(1.0)
        engine.scheduler.reset_prefix_cache()
        assert slept == 1
        assert session._wake_up(lambda: "awake") == "awake"
        assert not pool.records.any()
        serve(engine, first=4)
        session.manager.scrub()
        assert session.manager.summary().violations == 0


def test_requests_that_the_engine_makes_up_to_warm_up_are_nobodys(
    model: Model, without: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runner V2's, which a GPU's worker serves before any other; nobody asks for what they sample."""
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker import cpu_worker
    from vllm.v1.worker.gpu import warmup

    served: list[Any] = []
    warm_up = cpu_worker.CPUWorker.compile_or_warm_up_model

    def warms(worker: Any) -> Any:
        def execute(scheduled: Any) -> Any:
            served.append(scheduled)
            return worker.execute_model(scheduled)

        # Without a grammar, whose kernel Triton's interpreter does not take.
        warmup.warmup_kernels(worker.model_runner, execute, lambda _: worker.sample_tokens(None))
        return warm_up(worker)

    # Nor its.
    monkeypatch.setattr(topk_topp_sampler, "HAS_TRITON", False)
    monkeypatch.setattr(cpu_worker.CPUWorker, "compile_or_warm_up_model", warms)
    with Engine(model("llama"), runner="V2", canary={}) as engine:
        assert len(served) > 3
        serve(engine)
        assert outputs_of(engine) == without
        engine.session.manager.flush()
        status = engine.session.status()
    assert (status["watching"], status["skipped"], status["left_out"], status["violations"]) == ("complete", 0, 0, 0)
    assert status["positions_verified"] == status["positions_relied_on"] > 0


@pytest.mark.parametrize("drafts", [False, True])
def test_results_that_every_rank_is_asked_for_are_read_once(
    model: Model, monkeypatch: pytest.MonkeyPatch, drafts: bool
) -> None:
    """Behind some executors, ranks are asked whose results otherwise nobody asks for, and V1's answer only once."""
    monkeypatch.setattr(support, "is_output_rank", lambda worker: False)
    folder = model("llama")
    options = {"speculative_config": drafts_of("draft_model", folder)} if drafts else {}
    with Engine(folder, canary={}, asynchronous=True, **options) as engine:
        for n in range(3):
            engine.submit(f"r{n}", [7 + n, *range(20, 60)], new_tokens=NEW)
        engine.run()
        engine.session.manager.flush()
        summary = engine.session.manager.summary()
        assert [len(text) for text in engine.outputs.values()] == [NEW] * 3
        assert (summary.failures, summary.violations, engine.session.left_out) == ({}, 0, 0)
