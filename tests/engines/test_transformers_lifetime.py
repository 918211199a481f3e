"""Caches, managers and canaries come and go; also in the middle of things, and when something raises."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import kv_canary

from .scenarios import Prompts, batching_config, generation_config, make_model, serve, watch_engine


def generate(model: Any, prompts: list[list[int]], *, new_tokens: int = 6) -> list[Any]:
    outputs = model.generate_batch(
        prompts,
        generation_config=generation_config(new_tokens=new_tokens),
        continuous_batching_config=batching_config(),
    )
    return list(outputs.values())


def test_a_stopped_cache_is_let_go_of_and_its_counts_are_kept() -> None:
    model, prompts = make_model("llama"), Prompts().of_lengths(20, 33)
    canary = kv_canary.install(model, backend="reference")
    caches, managers, steps = [], [], []
    for _ in range(3):
        with serve(model) as server:
            server.run(prompts)
            cache = server.manager.batch_processor.cache
            tensors = [cache.cache_tensor] if hasattr(cache, "cache_tensor") else cache.key_cache
            caches.append(weakref.ref(tensors[0]))
            managers.append(weakref.ref(server.manager))
        steps.append(canary.summary().steps)
        del server, cache, tensors
        gc.collect()
        assert caches[-1]() is None
        assert managers[-1]() is None
    assert steps[2] == 3 * steps[0] > 0
    assert canary.summary().positions_verified == canary.summary().positions_relied_on > 0
    with pytest.raises(RuntimeError, match="the cache must exist by now"):
        _ = canary.manager
    canary.uninstall()
    assert canary.summary().steps == steps[2]


def test_reports_outlive_their_cache() -> None:
    model = make_model("llama")
    canary = kv_canary.install(model, backend="reference", max_reports_per_step=1024)
    with serve(model) as server:
        spoil_once(server, canary, at=6)
        server.run(Prompts().of_lengths(20), new_tokens=12)
    first = canary.reports
    assert first
    assert all(r.reasons == ("K",) for r in first)
    generate(model, Prompts(2).of_lengths(20))
    assert canary.reports == first
    assert canary.summary().violations == len(first)
    canary.uninstall()
    assert canary.reports == first


def test_two_managers_at_once_are_both_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    happened = watch_engine(monkeypatch)
    models = [make_model("llama"), make_model("llama")]
    canaries = [kv_canary.install(m, backend="reference") for m in models]
    with serve(models[0]) as a, serve(models[1]) as b:
        ids = a.add(Prompts(1).of_lengths(20, 33)), b.add(Prompts(2).of_lengths(40, 7))
        assert len(a.collect(2)) + len(b.collect(2)) == len(ids[0]) + len(ids[1])
    for canary in canaries:
        canary.flush()
        assert canary.reports == []
    assert sum(c.summary().steps for c in canaries) == happened.forwards


def test_two_managers_of_one_model_are_both_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    happened = watch_engine(monkeypatch)
    model = make_model("llama")
    canary = kv_canary.install(model, backend="reference")
    with serve(model) as a, serve(model) as b:
        for wave in range(2):
            first, second = Prompts(wave), Prompts(7 + wave)
            a.add(first.of_lengths(20, 33)), b.add(second.of_lengths(40, 7))
            a.collect(2), b.collect(2)
    canary.flush()
    summary = canary.summary()
    assert (summary.steps, summary.violations, summary.watching) == (happened.forwards, 0, "complete")


def test_a_manager_kept_for_the_next_session_is_watched_on() -> None:
    model, prompts = make_model("llama"), Prompts().of_lengths(20, 33)
    canary = kv_canary.install(model, backend="reference")
    steps = []
    for _ in range(2):
        model.generate_batch(
            prompts,
            generation_config=generation_config(new_tokens=6),
            continuous_batching_config=batching_config(),
            persistent_manager=True,
        )
        steps.append(canary.summary().steps)
    assert canary.manager.step == steps[1] > steps[0] > 0
    assert canary.summary().violations == 0
    model.destroy_cached_continuous_batching_manager()


@pytest.mark.parametrize("moment", ["before", "inside"])
def test_uninstalling_in_the_middle_of_a_run(moment: str) -> None:
    model = make_model("llama")
    prompts = Prompts().of_lengths(20, 33)
    with serve(model) as server:
        expected = server.run(prompts, new_tokens=40)
    canary = kv_canary.install(model, backend="reference")
    with serve(model) as server:
        runner = server.manager.batch_processor.model_runner
        at = pause(runner, 9, below=moment == "inside")
        server.add(prompts, new_tokens=40)
        assert at.reached.wait(60)
        canary.uninstall()
        at.go.set()
        assert list(server.collect(2).values())
        assert canary.reports == []
        steps = canary.summary().steps
        again = server.run(prompts, new_tokens=40)
    assert again == expected
    assert canary.summary().steps == steps == (9 if moment == "inside" else 8)


def test_flushing_while_the_engine_runs_finds_each_violation_once() -> None:
    model = make_model("llama")
    canary = kv_canary.install(model, backend="reference", max_reports_per_step=1024)
    with serve(model) as server:
        spoil_once(server, canary, at=20)
        server.add(Prompts().of_lengths(20, 33), new_tokens=60)
        done = threading.Event()

        def flush() -> None:
            while not done.is_set():
                canary.flush()

        thread = threading.Thread(target=flush)
        thread.start()
        server.collect(2)
        done.set()
        thread.join()
    seen = [(r.step, r.slot, r.reasons, r.tag) for r in canary.reports]
    assert len(seen) == len(set(seen)) == canary.summary().violations > 0


@pytest.mark.parametrize("where", ["identity", "model"])
def test_after_an_exception_the_next_run_starts_afresh(where: str) -> None:
    failing = True

    def identity(state: Any) -> None:
        if failing and where == "identity" and state.request_id == "w1_0":
            raise KeyError("no such adapter")

    model = make_model("llama")
    # In log mode what `identity` raises goes no further.
    mode = "raise" if where == "identity" else "log"
    canary = kv_canary.install(model, backend="reference", identity=identity, mode=mode)
    manager = model.init_continuous_batching(
        generation_config=generation_config(), continuous_batching_config=batching_config()
    )
    manager.warmup()
    processor = manager.batch_processor
    prompts = Prompts()
    first, doomed = prompts.random(40), prompts.random(20)
    forward = type(model).forward

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of memory")

    manager.start()
    manager.add_request(first, request_id="w0_0", max_new_tokens=4, eos_token_id=-1)
    assert manager.get_result(timeout=60).is_finished()
    if where == "model":
        model.forward = broken
    manager.add_request(doomed, request_id="w1_0", max_new_tokens=4, eos_token_id=-1)
    result = manager.get_result(timeout=60)
    assert result.error
    # After a crash, 5.17 itself cannot go on with the same cache.
    keep = hasattr(processor.cache, "cache_allocators")
    manager.stop(block=True, keep_for_next_session=keep)
    failing = False
    if where == "model":
        del model.forward
    assert model.forward.__func__ is forward
    # Where the same cache goes on, its records are as the engine left its blocks.
    manager.start()
    for name, prompt in (("w2_0", first), ("w2_1", doomed)):
        manager.add_request(prompt, request_id=name, max_new_tokens=4, eos_token_id=-1)
    assert all(not manager.get_result(timeout=60).error for _ in range(2))
    assert (manager.batch_processor is processor) == keep
    manager.stop(block=True)
    canary.flush()
    assert canary.reports == []
    assert (canary.summary().violations, canary.summary().watching) == (0, "complete")


def test_in_raise_mode_a_finding_of_the_last_step_comes_out_of_flush() -> None:
    model = make_model("llama")
    canary = kv_canary.install(model, backend="reference", mode="raise")
    with serve(model) as server:
        # The prompt is one forward, and each further token one.
        spoil_once(server, canary, at=5)
        server.run(Prompts().of_lengths(20), new_tokens=5)
    with pytest.raises(kv_canary.CanaryViolationError):
        canary.flush()
    canary.flush()
    assert canary.reports


class Pause:
    def __init__(self) -> None:
        self.reached, self.go = threading.Event(), threading.Event()


def pause(runner: Any, at: int, *, below: bool) -> Pause:
    """Stop the `at`-th forward from now: below the canary's wrap, inside its forward, or above it."""
    paused, count = Pause(), 0

    def stop() -> None:
        nonlocal count
        count += 1
        if count == at:
            paused.reached.set()
            assert paused.go.wait(60)

    if below:
        forward = runner._forward_process_and_sample

        def inner(*args: Any, **kwargs: Any) -> Any:
            stop()
            return forward(*args, **kwargs)

        runner._forward_process_and_sample = inner
        return paused
    run: Callable[..., Any] = runner.compute_batch

    def outer(*args: Any, **kwargs: Any) -> Any:
        stop()
        return run(*args, **kwargs)

    runner.compute_batch = outer
    return paused


def spoil_once(server: Any, canary: Any, *, at: int) -> None:
    """Change the fingerprint of K in every record before the `at`-th forward."""
    runner = server.manager.batch_processor.model_runner
    run, count = runner.compute_batch, 0

    def spoiling(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == at:
            for pool in canary.manager.pools:
                pool.records[:, 2] ^= pool.records.ne(0).any(1).long()
        result = run(*args, **kwargs)
        if count == at:
            for pool in canary.manager.pools:
                # What this forward wrote is as it should be, and stays so.
                old = pool.records[:, 3].bitwise_and(2**63 - 1).bitwise_right_shift(24) != canary.manager.step
                pool.records[:, 2] ^= (pool.records.ne(0).any(1) & old).long()
        return result

    runner.compute_batch = spoiling
