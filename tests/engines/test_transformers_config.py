"""Every setting reaches the canary through `install`, from arguments and from the environment."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import kv_canary

from .clean import Run, run_clean
from .scenarios import PAGE, Prompts, make_model, serve

WINDOW = 24
SETTINGS: dict[str, dict[str, Any]] = {
    "head_and_tail": {"records": "head_and_tail"},
    "stride": {"stride": 3},
    "sweep": {"sweep_every": 5, "quarantine": True},
    "tokens": {"check_tokens": True, "verify_bytes_at_tail": True},
    "no lifetime": {"track_lifetime": False},
    "all": {
        "records": "head_and_tail",
        "stride": 3,
        "sweep_every": 2,
        "quarantine": True,
        "check_tokens": True,
        "verify_bytes_at_tail": True,
        "stats_every": 4,
    },
}


@pytest.mark.every_day(*(f"{name}-{('llama', 'gemma3')[i % 2]}" for i, name in enumerate(SETTINGS)))
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_clean(monkeypatch: pytest.MonkeyPatch, kind: str, name: str) -> None:
    settings = SETTINGS[name]

    def scenario(run: Run) -> None:
        prompts = Prompts()
        shared = prompts.random(2 * PAGE)
        for _ in range(2):
            run.server.run([shared, shared + [5, 6, 7], shared, *prompts.of_lengths(40, 5)], new_tokens=18)
        manager = run.canary.manager
        assert all((len(p.buffers) == 2) == (settings.get("records") == "head_and_tail") for p in manager.pools)
        run.canary.flush()
        swept = sum(n for tag, n in run.canary.summary().launches.items() if tag.startswith("SWEEP"))
        assert bool(swept) == ("sweep_every" in settings)
        summary = run.canary.summary()
        assert summary.stride == settings.get("stride", 1)
        assert (summary.positions_verified < summary.positions_relied_on) == ("stride" in settings)

    config = kv_canary.CanaryConfig(backend="reference", **settings)
    run_clean(monkeypatch, kind, scenario, config=config, options={"num_blocks": 24})


@pytest.mark.every_day("mistral", "gemma3")
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3", "gptoss"])
def test_lengths_at_multiples_of_page_and_window_are_clean(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    edges = sorted({n + d for n in (PAGE, 2 * PAGE, 3 * PAGE, WINDOW, 2 * WINDOW) for d in (-1, 0, 1)})

    def scenario(run: Run) -> None:
        prompts = Prompts()
        first = prompts.of_lengths(*edges)
        # New tokens that end on the same edges; then all again, whose prefixes are cached by now.
        run.server.run(first, new_tokens=PAGE)
        run.server.run(first, new_tokens=PAGE + 1)

    config = kv_canary.CanaryConfig(backend="reference", verify_bytes_at_tail=True, sweep_every=3, quarantine=True)
    run_clean(monkeypatch, kind, scenario, config=config)


@pytest.mark.every_day(f"{2 * PAGE}-llama", f"{2 * PAGE + 3}-gemma3", f"{5 * PAGE}-llama")
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("length", [2 * PAGE, 2 * PAGE + 3, 5 * PAGE])
def test_cold_prefills_of_one_prompt_in_one_step_are_clean(
    monkeypatch: pytest.MonkeyPatch, kind: str, length: int
) -> None:
    def scenario(run: Run) -> None:
        prompts = Prompts()
        for _ in range(2):
            prompt = prompts.random(length)
            answers = run.server.run([prompt] * 4 + [prompt[:-1], prompt + [9]], new_tokens=PAGE)
            assert answers[0] == answers[1] == answers[2] == answers[3]

    config = kv_canary.CanaryConfig(backend="reference", sweep_every=1, check_tokens=True)
    options = {"max_batch_tokens": 8 * length}
    run_clean(monkeypatch, kind, scenario, config=config, options=options)


def test_without_a_config_the_environment_is_read_and_arguments_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_CANARY_STRIDE", "4")
    monkeypatch.setenv("KV_CANARY_READ_BYTES", "64")
    monkeypatch.setenv("KV_CANARY_BACKEND", "reference")
    model = make_model("llama")
    for arguments, stride in (({}, 4), ({"stride": 2}, 2), ({"config": kv_canary.CanaryConfig(stride=3)}, 3)):
        canary = kv_canary.install(model, **arguments)
        with serve(model) as server:
            server.run(Prompts().of_lengths(5), new_tokens=2)
            config = canary.manager.config
        canary.uninstall()
        assert config.stride == stride
        assert config.read_bytes == (16 if "config" in arguments else 64)


def test_a_variable_that_is_no_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_CANARY_STRIDES", "4")
    model = make_model("llama")
    with pytest.raises(ValueError, match=r"KV_CANARY_STRIDES must be a known setting.*did you mean KV_CANARY_STRIDE"):
        kv_canary.install(model)
    assert "generate_batch" not in vars(model)


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"strides": 4}, TypeError, r"options must be settings of CanaryConfig, got strides \(did you mean stride\?\)"),
        ({"on_reports": print}, TypeError, r"got on_reports \(did you mean on_report\?\)"),
        ({"xyz": 1}, TypeError, "settings of CanaryConfig, got xyz$"),
        ({"mode": "loud"}, ValueError, "mode must be one of log, raise, off, got 'loud'"),
        ({"mode": "log", "config": kv_canary.CanaryConfig()}, TypeError, "options must be left out where a config is"),
        ({"mode": kv_canary.CanaryConfig()}, TypeError, "got a CanaryConfig: give it as config=..."),
        ({"stride": 0}, ValueError, "stride must be at least 1, got 0"),
        ({"stride": "4"}, TypeError, "stride must be an int or None, got '4'"),
        ({"records": "two"}, ValueError, "records must be one of one, head_and_tail, got 'two'"),
        ({"quarantine": True}, ValueError, "quarantine must be off where track_lifetime or sweep_every is"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(settings: dict[str, Any], error: type[Exception], text: str) -> None:
    model = make_model("llama")
    with pytest.raises(error, match=text):
        kv_canary.install(model, **settings)
    assert "generate_batch" not in vars(model)


def test_the_mode_may_stand_behind_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_CANARY_MODE", "log")
    model = make_model("llama")
    for arguments, mode in (((), "log"), ((None,), "log"), (("raise",), "raise")):
        with kv_canary.install(model, *arguments) as canary, serve(model) as server:
            server.run(Prompts().of_lengths(5), new_tokens=2)
            assert canary.manager.config.mode == mode
    with kv_canary.install(model, "off") as canary, serve(model) as server:
        server.run(Prompts().of_lengths(5), new_tokens=2)
        assert canary.summary().watching == "off"


@pytest.mark.parametrize(
    ("target", "got"),
    [
        (transformers.LlamaForCausalLM, "the class LlamaForCausalLM, not one of its objects"),
        (None, "None"),
        ("gpt2", "str"),
        (torch.nn.Identity(), "torch.nn.modules.linear.Identity"),
    ],
)
def test_a_target_that_is_none_is_told_by_what_it_is(target: Any, got: str) -> None:
    with pytest.raises(TypeError) as caught:
        kv_canary.install(target, "log")
    assert str(caught.value) == f"kv-canary: install: target must be an object of transformers, got {got}"


def test_an_engine_that_installs_the_canary_itself_says_how() -> None:
    scheduler = type("Scheduler", (), {"__module__": "sglang.srt.managers.scheduler"})()
    with pytest.raises(TypeError, match="Scheduler is guarded by a plugin: set KV_CANARY_MODE=log or raise"):
        kv_canary.install(scheduler)


def test_a_damaged_record_of_heads_own_is_found_under_head_and_tail() -> None:
    model = make_model("llama")
    canary = kv_canary.install(model, backend="reference", records="head_and_tail")
    with serve(model) as server:
        server.run([Prompts().random(2 * PAGE + 1)], new_tokens=2)
        pool = canary.manager.pools[0]
        head = pool.head_records
        assert head is not None
        head[:, 1] += head.ne(0).any(1).long()
        # The prefix is hit again.
        server.run([Prompts().random(2 * PAGE + 1)], new_tokens=2)
        canary.flush()
    assert {r.tag for r in canary.reports} == {"HEAD_FULL"}
