"""The canary leaves the engine as it was: the same text, and no trace once it is uninstalled."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
import transformers
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.continuous_batching.model_runner import ModelRunner

import kv_canary
from kv_canary.runtime.manager import CanaryManager

from .scenarios import MODELS, Prompts, batching_config, generation_config, make_model, serve, watch_engine

LENGTHS = (3, 7, 16, 17, 31, 40, 5, 60)


def generate(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    outputs = model.generate_batch(
        prompts, generation_config=generation_config(new_tokens=16), continuous_batching_config=batching_config()
    )
    assert len(outputs) == len(prompts)
    assert not any(o.error for o in outputs.values())
    return [list(o.generated_tokens) for o in outputs.values()]


def new_manager(model: Any, **options: Any) -> Any:
    return model.init_continuous_batching(
        generation_config=generation_config(), continuous_batching_config=batching_config(**options)
    )


def engine_objects(model: Any, manager: Any) -> dict[str, Any]:
    """Return every object of the engine that an adapter might wrap methods of, by name."""
    objects = {"model": model, "manager": manager}
    processor = manager.batch_processor
    if processor is None:
        return objects
    cache = processor.cache
    objects |= {
        "processor": processor,
        "inputs and outputs": processor.inputs_and_outputs,
        "runner": processor.model_runner,
        "scheduler": processor.scheduler,
        "offloading": processor.offloading_manager,
        "cache": cache,
    }
    for name in ("pool", "_block_manager"):
        if hasattr(cache, name):
            objects[name] = getattr(cache, name)
    for name in ("cache_allocators", "group_cache_managers"):
        parts = getattr(cache, name, ())
        for i, part in enumerate(parts.values() if isinstance(parts, dict) else parts):
            objects[f"{name} {i}"] = part
    return objects


def attributes(objects: dict[str, Any]) -> dict[tuple[str, str], int]:
    """Return the names of all instance attributes; with the value's identity where it can be called."""
    return {
        (name, attribute): id(value) if callable(value) else 0
        for name, each in objects.items()
        for attribute, value in vars(each).items()
    }


def wrapped(objects: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the instance attributes that are functions wrapped around another."""
    return [
        (name, attribute)
        for name, each in objects.items()
        for attribute, value in vars(each).items()
        if callable(value) and hasattr(value, "__wrapped__")
    ]


@pytest.mark.every_day("gemma3")
@pytest.mark.parametrize("kind", MODELS)
def test_the_text_is_the_same_before_during_and_after(kind: str) -> None:
    model, prompts = make_model(kind), Prompts().of_lengths(*LENGTHS)
    plain = generate(model, prompts)
    canary = kv_canary.install(model)
    watched = generate(model, prompts)
    summary = canary.summary()
    canary.uninstall()
    after = generate(model, prompts)
    assert plain == watched == after
    assert len({tuple(text) for text in plain}) == len(prompts)
    assert (summary.watching, summary.violations) == ("complete", 0)
    assert summary.positions_verified > 0
    # After uninstalling, it sees no forward.
    assert canary.summary() == summary


@pytest.mark.every_day("gptoss")
@pytest.mark.parametrize("kind", MODELS)
def test_uninstalling_leaves_no_wrapped_method(kind: str) -> None:
    model = make_model(kind)
    clean_model = set(vars(model))
    canary = kv_canary.install(model)
    with serve(model) as server:
        server.run(Prompts().of_lengths(5, 40))
        objects = engine_objects(model, server.manager)
        during = {name for name, _ in wrapped(objects)}
        canary.uninstall()
        assert wrapped(objects) == []
    # It was watching each of these, so there was something to take back.
    # The model is left as it is: its class looks the canary up.
    assert {"manager", "runner", "offloading", "cache"} < during
    assert "model" not in during
    assert set(vars(model)) == clean_model


def test_uninstalling_leaves_an_existing_manager_as_it_was_found() -> None:
    model = make_model("gemma3")
    manager = new_manager(model)
    manager.warmup()
    objects = engine_objects(model, manager)
    before = attributes(objects)
    canary = kv_canary.install(manager)
    during = attributes(objects)
    canary.uninstall()
    assert during != before
    assert attributes(objects) == before


def test_a_manager_can_be_watched_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    happened = watch_engine(monkeypatch)
    manager = new_manager(make_model("llama"))
    canary = kv_canary.install(manager)
    assert canary.summary().watching == "off"
    manager.start()
    try:
        manager.add_request(Prompts().random(40), request_id="a", max_new_tokens=8, eos_token_id=-1)
        assert manager.get_result(timeout=60).is_finished()
        groups = canary.manager.groups
    finally:
        manager.stop(block=True)
    canary.flush()
    summary = canary.summary()
    assert (summary.steps, summary.watching) == (happened.forwards, "complete")
    assert summary.positions_verified == happened.relied_on(groups) > 0


def test_a_manager_can_be_watched_once_its_cache_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    happened = watch_engine(monkeypatch)
    manager = new_manager(make_model("gemma3"))
    manager.warmup()
    assert manager.batch_processor is not None
    canary = kv_canary.install(manager)
    manager.start()
    try:
        manager.add_request(Prompts().random(40), request_id="a", max_new_tokens=8, eos_token_id=-1)
        assert manager.get_result(timeout=60).is_finished()
        groups = canary.manager.groups
    finally:
        manager.stop(block=True)
    canary.flush()
    summary = canary.summary()
    assert (summary.steps, summary.watching) == (happened.forwards, "complete")
    assert summary.positions_verified == happened.relied_on(groups) > 0


def test_a_cache_that_holds_only_reusable_blocks_is_emptied_when_installing(monkeypatch: pytest.MonkeyPatch) -> None:
    happened = watch_engine(monkeypatch)
    prompt = Prompts().random(40)
    with serve(make_model("llama")) as server:
        first = server.run([prompt])
        server.run([prompt])
        hits = happened.prefix_hits
        canary = kv_canary.install(server.manager)
        again = server.run([prompt])
        # The blocks without records were forgotten, so nothing could hit them.
        assert happened.prefix_hits == hits > 0
        assert server.run([prompt]) == again == first
        assert happened.prefix_hits == hits + 1
    canary.flush()
    assert (canary.summary().watching, canary.summary().violations) == ("complete", 0)


def test_a_second_manager_is_watched_and_counted_too() -> None:
    model, prompts = make_model("llama"), Prompts().of_lengths(5, 40)
    canary = kv_canary.install(model)
    with serve(model) as server:
        server.run(prompts)
    canary.flush()
    once = canary.summary()
    with serve(model) as server:
        server.run(prompts)
    canary.flush()
    twice = canary.summary()
    canary.uninstall()
    assert (once.watching, twice.watching) == ("complete", "complete")
    assert twice.positions_verified == 2 * once.positions_verified > 0


def test_a_manager_that_is_started_again_is_watched_again() -> None:
    manager = new_manager(make_model("llama"))
    canary = kv_canary.install(manager)
    steps = []
    for _ in range(2):
        manager.start()
        manager.add_request(Prompts().random(40), request_id="a", max_new_tokens=8, eos_token_id=-1)
        assert manager.get_result(timeout=60).is_finished()
        manager.stop(block=True)
        steps.append(canary.summary().steps)
    canary.flush()
    assert steps[1] == 2 * steps[0] > 0
    assert canary.summary().violations == 0


def test_a_use_backend_block_around_install_reaches_the_engines_own_thread() -> None:
    model = make_model("llama")
    with kv_canary.use_backend("triton"):
        canary = kv_canary.install(model)
    # Not warmed up, so that the engine's thread makes the cache, and with it the canary.
    with serve(model, warm_up=False) as server:
        server.run(Prompts().of_lengths(5), new_tokens=2)
        assert canary.manager.backend == "triton"
    canary.flush()
    assert canary.summary().violations == 0


def test_a_cache_in_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go = threading.Event(), threading.Event()
    original = ModelRunner.compute_batch
    forwards = 0

    def pausing(runner: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal forwards
        forwards += 1
        if forwards == 3:
            reached.set()
            assert go.wait(60)
        return original(runner, *args, **kwargs)

    monkeypatch.setattr(ModelRunner, "compute_batch", pausing)
    model = make_model("llama")
    with serve(model) as server:
        server.add([Prompts().random(20)])
        assert reached.wait(60)
        objects = engine_objects(model, server.manager)
        try:
            with pytest.raises(RuntimeError, match="the cache must be empty when installed"):
                kv_canary.install(server.manager)
            assert wrapped(objects) == []
        finally:
            go.set()
        server.collect(1)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_request_that_comes_while_a_running_manager_is_installed_into_is_watched(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Making the canary's tables and compiling its kernels takes seconds on a GPU."""
    happened = watch_engine(monkeypatch)
    prompts = Prompts().of_lengths(40, 20)
    with serve(make_model(kind)) as server:
        first = server.run(prompts[:1])
        before = happened.forwards

        def warm_up(canary: Any, *args: Any) -> None:
            # The cache was found empty, and the hooks are not set yet.
            server.add(prompts, new_tokens=100)
            end = time.monotonic() + 1.0
            while happened.forwards < before + 3 and time.monotonic() < end:
                time.sleep(0.01)
            original(canary, *args)

        original = CanaryManager.warm_up
        monkeypatch.setattr(CanaryManager, "warm_up", warm_up)
        canary = kv_canary.install(server.manager)
        assert server.collect(2)["w1_0"][: len(first[0])] == first[0]
        assert ("processor", "prepare_next_batch") not in wrapped(engine_objects(server.manager.model, server.manager))
    canary.flush()
    summary = canary.summary()
    assert (summary.violations, summary.watching, summary.steps) == (0, "complete", happened.forwards - before)
    assert canary.reports == []


def test_a_manager_that_has_just_been_started_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    happened = watch_engine(monkeypatch)
    making, go = slow_cache(monkeypatch)
    manager = new_manager(make_model("llama"))
    manager.start()
    try:
        assert making.wait(60)
        assert manager.batch_processor is None
        threading.Timer(0.3, go.set).start()
        canary = kv_canary.install(manager)
        manager.add_request(Prompts().random(40), request_id="a", max_new_tokens=8, eos_token_id=-1)
        assert manager.get_result(timeout=60).is_finished()
        groups = canary.manager.groups
    finally:
        go.set()
        manager.stop(block=True)
    canary.flush()
    summary = canary.summary()
    assert (summary.steps, summary.watching) == (happened.forwards, "complete")
    assert summary.positions_verified == happened.relied_on(groups) > 0


def test_a_manager_whose_cache_does_not_come_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("kv_canary.engines.transformers"), "PATIENCE", 0.2)
    making, go = slow_cache(monkeypatch)
    manager = new_manager(make_model("llama"))
    manager.start()
    try:
        assert making.wait(60)
        with pytest.raises(RuntimeError, match=r"thread must be between two steps within 0\.2 s, got one that is not"):
            kv_canary.install(manager)
        go.set()
        manager.add_request(Prompts().random(40), request_id="a", max_new_tokens=8, eos_token_id=-1)
        assert manager.get_result(timeout=60).is_finished()
        assert wrapped(engine_objects(manager.model, manager)) == []
    finally:
        go.set()
        manager.stop(block=True)


@pytest.mark.skipif(not hasattr(ContinuousBatchingManager, "pause"), reason="5.17 has no pause")
def test_a_manager_that_the_caller_has_paused_is_installed_into() -> None:
    manager = new_manager(make_model("llama"))
    manager.start()
    try:
        manager.add_request(Prompts().random(40), request_id="a", max_new_tokens=2, eos_token_id=-1)
        assert manager.get_result(timeout=60).is_finished()
        start = time.monotonic()
        with manager.pause():
            canary = kv_canary.install(manager)
        assert time.monotonic() - start < 30
        manager.add_request(Prompts().random(40), request_id="b", max_new_tokens=8, eos_token_id=-1)
        assert manager.get_result(timeout=60).is_finished()
    finally:
        manager.stop(block=True)
    canary.flush()
    summary = canary.summary()
    assert (summary.watching, summary.incidents) == ("complete", 0)
    assert summary.positions_verified > 0


def test_a_manager_that_is_started_while_it_is_installed_into_is_watched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    happened = watch_engine(monkeypatch)
    manager = new_manager(make_model("llama"))
    manager.warmup()
    original = CanaryManager.warm_up

    def warm_up(canary: Any, *args: Any) -> None:
        manager.start()
        manager.add_request(Prompts().random(40), request_id="a", max_new_tokens=8, eos_token_id=-1)
        time.sleep(0.5)
        original(canary, *args)

    monkeypatch.setattr(CanaryManager, "warm_up", warm_up)
    canary = kv_canary.install(manager)
    try:
        assert manager.get_result(timeout=60).is_finished()
    finally:
        manager.stop(block=True)
    canary.flush()
    summary = canary.summary()
    assert (summary.violations, summary.watching, summary.steps) == (0, "complete", happened.forwards)
    assert canary.reports == []


def test_a_manager_whose_thread_has_died_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread ends while it is waited for, instead of coming to rest."""
    manager = new_manager(make_model("llama"))
    making, go = slow_cache(monkeypatch, error=RuntimeError("no memory"))
    manager.start()
    assert making.wait(60)
    threading.Timer(0.3, go.set).start()
    canary = kv_canary.install(manager)
    assert not manager.is_running()
    monkeypatch.undo()
    manager.start()
    try:
        manager.add_request(Prompts().random(40), request_id="a", max_new_tokens=8, eos_token_id=-1)
        assert manager.get_result(timeout=60).is_finished()
    finally:
        manager.stop(block=True)
    canary.flush()
    assert (canary.summary().violations, canary.summary().watching) == (0, "complete")


def slow_cache(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None = None
) -> tuple[threading.Event, threading.Event]:
    """Let caches be made, or fail with `error`, only once the second event is set; the first says that one is due."""
    making, go = threading.Event(), threading.Event()
    original = PagedAttentionCache.__init__

    def slow(cache: Any, *args: Any, **kwargs: Any) -> None:
        making.set()
        assert go.wait(60)
        if error is not None:
            raise error
        original(cache, *args, **kwargs)

    monkeypatch.setattr(PagedAttentionCache, "__init__", slow)
    return making, go


@pytest.mark.parametrize("version", ["5.16.2", "5.18.0", "5.25.0", "6.0.0", "5", "unknown"])
def test_an_unknown_version_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    model = make_model("llama")
    adapter = importlib.import_module("kv_canary.engines.transformers")
    # The adapter's own name: a lazy package may exist twice.
    monkeypatch.setattr(adapter.transformers, "__version__", version)
    with pytest.raises(ValueError, match=f"transformers version must be one of 5.17, 5.19, .*5.24, got {version}"):
        kv_canary.install(model)
    assert "init_continuous_batching" not in vars(model)


def test_an_object_of_no_known_engine_is_refused() -> None:
    with pytest.raises(TypeError, match=r"target must be an object of transformers, got dict"):
        kv_canary.install({})


def test_another_object_of_transformers_is_refused() -> None:
    with pytest.raises(TypeError, match=r"target must be a model that can generate.*, got LlamaConfig"):
        kv_canary.install(transformers.LlamaConfig())


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (
            lambda: transformers.T5ForConditionalGeneration(_t5()),
            "T5ForConditionalGeneration, an encoder-decoder, whose",
        ),
        (lambda: transformers.MambaForCausalLM(_mamba()), "MambaForCausalLM, one that keeps a state instead"),
    ],
    ids=["T5", "Mamba"],
)
def test_a_model_without_kv_of_its_text_alone_is_refused(make: Any, kind: str) -> None:
    model = make()
    with pytest.raises(TypeError, match=f"target must be a decoder that keeps keys and values, got {kind}"):
        kv_canary.install(model)
    assert "generate" not in vars(model)


def _t5() -> Any:
    return transformers.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)


def _mamba() -> Any:
    return transformers.MambaConfig(vocab_size=32, hidden_size=16, state_size=4, num_hidden_layers=1)


def test_generate_on_a_watched_model_is_said_to_be_unwatched_once(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("llama")
    ids = torch.tensor([[5, 6, 7]])
    options = {"max_new_tokens": 2, "do_sample": False}
    before = model.generate(ids, **options)
    with kv_canary.install(model):
        for _ in range(2):
            assert torch.equal(model.generate(ids, **options), before)
    assert torch.equal(model.generate(ids, **options), before)
    said = [r.message for r in caplog.records if "goes by unwatched" in r.message]
    assert len(said) == 1
    assert "generate() goes by unwatched: the canary is in continuous batching" in said[0]


def test_paged_generation_is_watched_and_not_said_to_be_unwatched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    happened = watch_engine(monkeypatch)
    model = make_model("llama")
    options = {"generation_config": generation_config(new_tokens=2), "cache_implementation": "paged"}
    with kv_canary.install(model) as canary:
        model.generate(torch.tensor([[5, 6, 7]]), continuous_batching_config=batching_config(), **options)
        assert "goes by unwatched" not in caplog.text
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False)
    assert caplog.text.count("generate() goes by unwatched") == 1
    assert (canary.summary().watching, canary.summary().steps) == ("complete", happened.forwards)
    assert happened.forwards > 0


def test_options_beside_a_config_are_refused() -> None:
    with pytest.raises(TypeError, match="options must be left out where a config is given, got mode"):
        kv_canary.install(make_model("llama"), config=kv_canary.CanaryConfig(), mode="raise")


def test_a_window_without_a_past_is_refused() -> None:
    manager = new_manager(make_model("mistral", sliding_window=1))
    manager.warmup()
    with pytest.raises(ValueError, match=r"sliding_window must be at least 2.*, got 1"):
        kv_canary.install(manager)


def spoil(monkeypatch: pytest.MonkeyPatch, canary: Any, *, at: int) -> None:
    """Damage a slot's records in every pool, right before the `at`-th forward from here on."""
    original, forwards = ModelRunner.compute_batch, 0

    def spoiling(runner: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal forwards
        forwards += 1
        if forwards == at:
            for pool in canary.manager.pools:
                pool.records[:, 2] ^= pool.records.ne(0).any(1).long()
        return original(runner, *args, **kwargs)

    monkeypatch.setattr(ModelRunner, "compute_batch", spoiling)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_in_raise_mode_generate_batch_raises_what_a_forward_found(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    model, prompts = make_model(kind), Prompts().of_lengths(40, 20)
    canary = kv_canary.install(model, mode="raise")
    spoil(monkeypatch, canary, at=6)
    with pytest.raises(kv_canary.CanaryViolationError) as caught:
        generate(model, prompts)
    assert all(report.reasons == ("K",) for report in caught.value.reports)
    assert canary.summary().violations == caught.value.total > 0


def test_asking_for_the_canary_of_a_cache_that_is_not_there_is_misuse() -> None:
    canary = kv_canary.install(make_model("llama"))
    for name in ("manager", "layout"):
        with pytest.raises(RuntimeError, match="the cache must exist by now"):
            getattr(canary, name)
    assert canary.summary().watching == "off"
    canary.uninstall()


def test_incidents_of_caches_that_are_gone_stay_and_their_numbers_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, prompts = make_model("llama"), Prompts().of_lengths(40, 20)
    with kv_canary.install(model, mode="log") as canary:
        for _ in range(2):
            with monkeypatch.context() as patch:
                spoil(patch, canary, at=6)
                generate(model, prompts)
            with pytest.raises(RuntimeError, match="the cache must exist by now"):
                assert canary.manager
        incidents, summary = canary.incidents, canary.summary()
        assert len(incidents) == summary.incidents >= 2
        assert [incident.number for incident in incidents] == list(range(1, len(incidents) + 1))
        assert summary.requests
        assert summary.verdict.startswith(f"CORRUPTION: {len(incidents)} incidents, {summary.violations:,} violations")
    assert "generate_batch" not in vars(model)
    canary.uninstall()
    # Canaries of tests before may have their say as late as here.
    said = [r.message for r in caplog.records if "verdict: CORRUPTION" in r.message]
    assert said == [f"kv-canary: verdict: {summary}"]


@pytest.mark.parametrize("how", ["uninstalled", "its handle is dropped", "left", "left, with a forked helper"])
def test_the_verdict_is_said_once_whether_uninstalled_or_not(how: str) -> None:
    last = {
        "uninstalled": "canary.uninstall()",
        "its handle is dropped": "del canary",
        "left": "pass",
        "left, with a forked helper": "import os; child = os.fork(); child and os.waitpid(child, 0)",
    }[how]
    program = f"""
import transformers, kv_canary
config = transformers.LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, vocab_size=32)
canary = kv_canary.install(transformers.LlamaForCausalLM(config))
{last}
"""
    command = [sys.executable, "-P", "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert found.stderr.count("kv-canary: verdict: no verdict; watched nothing") == 1, found.stderr
