"""What KV depends on besides its tokens comes from the request and the engine, never from the cache's own key."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from safetensors.torch import save_file

from kv_canary.demo.models import save_tiny_model
from kv_canary.difftest.stress.sglang.engine import message
from kv_canary.engines.sglang import session
from kv_canary.engines.sglang.identities import Identities

from . import engine

HIDDEN, RANK, LAYERS = 64, 4, 3


class Req:
    lora_id = extra_key = cache_salt = None
    retraction_count = 0


def tokens(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, engine.VOCABULARY) for _ in range(n)]


def build(model: str, **args: Any) -> Any:
    with engine.overriding(KV_CANARY_MODE="log", KV_CANARY_SWEEP_EVERY="3"):
        return engine.build_scheduler(model, **args)


def ask(scheduler: Any, prompt: list[int], rid: str, **fields: Any) -> Any:
    """Serve one request alone and return it."""
    scheduler.process_input_requests([message(rid, prompt, new_tokens=4, **fields)])
    req = next(req for req in scheduler.waiting_queue if req.rid == rid)
    engine.run_all(scheduler)
    return req


def found() -> dict[str, set[str]]:
    """Return the reasons that were reported, by request."""
    manager = session.current().manager
    manager.flush()
    summary = manager.summary()
    assert summary.positions_verified == summary.positions_relied_on
    reasons: dict[str, set[str]] = {}
    for report in manager.reports:
        reasons.setdefault(report.request_id or "", set()).update(report.reasons)
    return reasons


def test_every_name_that_a_request_has_counts_and_stays_while_its_kv_does() -> None:
    identities, plain = Identities(), Req()
    assert identities.of(plain) == 0
    words = {}
    for name in ("lora_id", "extra_key", "cache_salt"):
        req = Req()
        setattr(req, name, "x")
        words[name] = identities.of(req)
    assert len({0, *words.values()}) == 4
    identities.weights_changed()
    assert identities.of(plain) == 0
    after = identities.of(Req())
    assert after == identities.of(Req()) != 0
    plain.retraction_count += 1
    assert identities.of(plain) == after
    elsewhere = Identities(counts_weights=False)
    elsewhere.weights_changed()
    assert elsewhere.of(Req()) == 0


def test_what_the_cache_keeps_apart_is_reused_in_silence(llama: str) -> None:
    scheduler = build(llama)
    prompt = tokens(50)
    given = [{}, {"extra_key": "a"}, {}, {"cache_salt": "b"}, {"extra_key": "a"}, {"cache_salt": "b"}]
    reqs = [ask(scheduler, prompt, f"request {n}", **fields) for n, fields in enumerate(given)]
    assert [req.cached_tokens > 0 for req in reqs] == [False, False, True, False, True, True]
    assert found() == {}


@pytest.mark.parametrize("salts", [("x", None, "y"), (None, "x", "x")])
def test_turns_of_a_session_that_streams_find_its_own_kv_whatever_their_keys(
    llama: str, salts: tuple[str | None, ...]
) -> None:
    from sglang.srt.managers.io_struct import OpenSessionReqInput, SessionParams

    scheduler = build(llama, page_size=1, enable_streaming_session=True)
    opened = OpenSessionReqInput(capacity_of_str_len=1000, session_id="s", streaming=True)
    scheduler.process_input_requests([opened])
    for n, salt in enumerate(salts):
        keys = {"cache_salt": salt, "extra_key": salt and f"key {salt}"}
        turn = ask(scheduler, tokens(20, seed=n), f"turn {n}", session_params=SessionParams(id="s"), **keys)
        assert (turn.cached_tokens > 0) == (n > 0)
        assert engine.is_greedy(llama, list(turn.origin_input_ids), list(turn.output_ids))
    assert found() == {}
    # What the first turn has published is found under its own keys.
    other = ask(scheduler, tokens(20), "other", cache_salt=salts[0], extra_key=salts[0] and f"key {salts[0]}")
    assert other.cached_tokens > 0
    assert found() == {}


def test_a_key_that_forgets_the_salt_is_found(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.radix_cache import RadixKey

    scheduler = build(llama)
    keeps_it = RadixKey.__init__

    def forgets_it(self: Any, *args: Any, **kwargs: Any) -> None:
        keeps_it(self, *args, **{**kwargs, "cache_salt": None})

    monkeypatch.setattr(RadixKey, "__init__", forgets_it)
    prompt = tokens(50)
    ask(scheduler, prompt, "tenant 1", cache_salt="tenant 1")
    second = ask(scheduler, prompt, "tenant 2", cache_salt="tenant 2")
    assert second.cached_tokens > 0
    assert found()["tenant 2"] & {"CHAIN", "PREFIX"}


def adapter(folder: Path, seed: int) -> str:
    """Write a LoRA adapter of q, k and v with random weights, and return its folder."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 4 * RANK, "bias": "none", "task_type": "CAUSAL_LM"}
    config |= {"target_modules": ["q_proj", "k_proj", "v_proj"], "base_model_name_or_path": "tiny"}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    generator, weights = torch.Generator().manual_seed(seed), {}
    for layer in range(LAYERS):
        for name, out in (("q_proj", HIDDEN), ("k_proj", HIDDEN // 2), ("v_proj", HIDDEN // 2)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=generator)
            weights[f"{at}.lora_B.weight"] = torch.randn(out, RANK, generator=generator)
    save_file(weights, folder / "adapter_model.safetensors")
    return str(folder)


def not_pinned(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: make(*args, **{**kwargs, "pin_memory": False})


@pytest.mark.parametrize("forgets", [False, True], ids=["healthy", "the key forgets the adapter"])
def test_another_adapters_prefix(llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgets: bool) -> None:
    """vllm#3263, in SGLang's own line: the adapter's id is left out of the key that the cache is searched with."""
    # Without a GPU there is no pinned memory.
    for name in ("tensor", "empty", "zeros"):
        monkeypatch.setattr(torch, name, not_pinned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    from sglang.srt.lora.lora_registry import LoRARef

    refs = [LoRARef(lora_name=n, lora_path=adapter(tmp_path / n, seed), pinned=False) for seed, n in enumerate("ab")]
    ids = {ref.lora_name: ref.lora_id for ref in refs}
    scheduler = build(
        llama, enable_lora=True, lora_paths=refs, max_loras_per_batch=3, lora_backend="torch_native", max_lora_rank=RANK
    )
    prompt, outputs = tokens(50), {}
    for number, name in enumerate((None, "a", "b", "a", None)):
        rid = f"{name} {number}"
        scheduler.process_input_requests([message(rid, prompt, new_tokens=6, lora_id=ids.get(name))])
        req = next(req for req in scheduler.waiting_queue if req.rid == rid)
        if forgets:
            req.extra_key = None
        engine.run_all(scheduler)
        outputs[rid] = (list(req.output_ids), req.cached_tokens > 0)
    if forgets:
        assert [cached for _, cached in outputs.values()] == [False, True, True, True, True]
        reasons = found()
        assert set(reasons) >= {"a 1", "b 2", "a 3"}
        assert all(reasons[rid] & {"CHAIN", "PREFIX"} for rid in ("a 1", "b 2", "a 3"))
        assert "None 4" not in reasons
    else:
        assert [cached for _, cached in outputs.values()] == [False, False, False, True, True]
        assert outputs["a 1"][0] == outputs["a 3"][0] != outputs["b 2"][0]
        assert found() == {}


@pytest.mark.parametrize("flush", ["done", "not asked for", "forgotten", "refused"])
def test_kv_of_other_weights(llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: str) -> None:
    """lmdeploy#4917: the prefix cache survives an update of the weights."""
    other = save_tiny_model(tmp_path / "other", seed=7)
    scheduler = build(llama)
    prompt = tokens(50)
    ask(scheduler, prompt, "before")
    if flush == "forgotten":
        scheduler.weight_updater.flush_cache = lambda **_: True
    running = None
    if flush == "refused":
        running = engine.submit(scheduler, tokens(40, 3), 8, rid="running")
        engine.step(scheduler)
        engine.step(scheduler)
    request = SimpleNamespace(
        model_path=other,
        load_format="auto",
        recapture_cuda_graph=False,
        weight_version=None,
        flush_cache=flush != "not asked for",
        torch_empty_cache=False,
    )
    assert scheduler.weight_updater.update_weights_from_disk(request).success == (flush != "refused")
    behind = ask(scheduler, prompt, "behind")
    assert (behind.cached_tokens > 0) == (flush != "done")
    assert engine.is_greedy(other, prompt, behind.output_ids) == (flush == "done")
    if flush in ("done", "not asked for"):
        assert found() == {}
    else:
        assert found()["behind"] & {"CHAIN", "PREFIX"}
        # A sweep names nobody.
        assert set(found()) <= {"behind", ""}
    if running is not None:
        assert len(running.output_ids) == 8


@pytest.mark.parametrize("flush", [True, False], ids=["flush", "no flush"])
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_requests_that_run_while_the_weights_change_are_silent(
    llama: str, tmp_path: Path, mode: str, flush: bool
) -> None:
    """As reinforcement learning does: pause, update, go on. The same list of requests may have the same rows again."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    other = save_tiny_model(tmp_path / "other", seed=7)
    scheduler = build(llama)
    reqs = [engine.submit(scheduler, tokens(20 + 5 * n, n), 14) for n in range(3)]
    while len(reqs[-1].output_ids) < 5:
        engine.step(scheduler)
    scheduler.pause_generation(PauseGenerationReqInput(mode=mode))
    done = update(scheduler, other, flush=flush)
    # Requests that are not put off keep their KV, and the cache cannot be emptied.
    assert done == (not flush or mode == "retract")
    scheduler.continue_generation(ContinueGenerationReqInput())
    engine.run_all(scheduler)
    assert [len(req.output_ids) for req in reqs] == [14, 14, 14]
    assert {req.retraction_count for req in reqs} == ({1} if mode == "retract" else {0})
    assert found() == {}
    if done:
        # What they have left in the cache is of the weights of now, or was to be gone on with.
        again = ask(scheduler, list(reqs[0].origin_input_ids) + list(reqs[0].output_ids)[:4], "again")
        assert again.cached_tokens > 0
        assert found() == {}


def update(scheduler: Any, model: str, *, flush: bool) -> bool:
    """Update the weights from another model's folder; return whether SGLang says that all went well."""
    request = SimpleNamespace(
        model_path=model,
        load_format="auto",
        recapture_cuda_graph=False,
        weight_version=None,
        flush_cache=flush,
        torch_empty_cache=False,
    )
    return bool(scheduler.weight_updater.update_weights_from_disk(request).success)
