"""What KV depends on besides its tokens: a prefix cache that forgets it hands another request's KV out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kv_canary.difftest.stress.vllm.engine import Engine, Runner

from .models import picture, save_model_of_pictures

Model = Callable[[str], str]
PROMPT = list(range(40, 120))


def save_adapter(folder: Path, model: str, *, seed: int) -> str:
    """Save a LoRA adapter of random weights for a tiny Llama, and return its folder."""
    config = json.loads((Path(model) / "config.json").read_text())
    width, heads = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(8, width, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(heads, 8, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "task_type": "CAUSAL_LM"}))
    return str(folder)


def found_in(engine: Engine) -> list[tuple[str, ...]]:
    engine.session.manager.flush()
    return [report.reasons for report in engine.session.manager.reports]


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_a_salt_that_the_prefix_cache_forgets(model: Model, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core import kv_cache_utils

    with Engine(model("llama"), runner=runner, canary={}) as engine:
        for n, salt in enumerate(("mine", "yours", "mine")):
            engine.submit(f"r{n}", PROMPT, new_tokens=4, cache_salt=salt)
            engine.run()
        assert found_in(engine) == []
        assert engine.session.manager.summary().positions_verified > 64
        keys = kv_cache_utils.generate_block_hash_extra_keys

        def forgetful(request: Any, *args: Any, **kwargs: Any) -> Any:
            salt, request.cache_salt = request.cache_salt, None
            try:
                return keys(request, *args, **kwargs)
            finally:
                request.cache_salt = salt

        monkeypatch.setattr(kv_cache_utils, "generate_block_hash_extra_keys", forgetful)
        for n, salt in enumerate(("hers", "his")):
            engine.submit(f"again {n}", PROMPT, new_tokens=4, cache_salt=salt)
            engine.run()
        assert {reason for reasons in found_in(engine) for reason in reasons} == {"CHAIN", "PREFIX"}
        assert engine.session.manager.reports[0].request_id.startswith("again 1")


def test_an_adapter_that_the_prefix_cache_forgets(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.lora.request import LoRARequest
    from vllm.v1.core import kv_cache_utils

    folder = model("llama")
    adapters = [LoRARequest(f"adapter {n}", n, save_adapter(tmp_path / str(n), folder, seed=n)) for n in (1, 2)]
    with Engine(folder, canary={}, enable_lora=True, max_loras=2, max_lora_rank=8) as engine:
        for n, adapter in enumerate([None, *adapters, None, *adapters]):
            engine.submit(f"r{n}", PROMPT, new_tokens=4, lora=adapter)
            engine.run()
        assert found_in(engine) == []
        texts = [engine.outputs[name] for name in engine.outputs]
        # The adapters do something, and every second request has hit its own prefix.
        assert texts[:3] == texts[3:]
        assert texts[0] != texts[1] != texts[2]
        monkeypatch.setattr(kv_cache_utils, "_gen_lora_extra_hash_keys", lambda request: [])
        for n, adapter in enumerate(adapters):
            engine.submit(f"again {n}", [*PROMPT[::-1], *PROMPT], new_tokens=4, lora=adapter)
            engine.run()
        assert {reason for reasons in found_in(engine) for reason in reasons} == {"CHAIN", "PREFIX"}
        assert engine.session.manager.reports[0].request_id.startswith("again 1")


def test_an_adapter_that_is_unloaded_and_loaded_again_finds_its_prefix(model: Model, tmp_path: Path) -> None:
    """vLLM's server gives it another number each time."""
    from vllm.lora.request import LoRARequest

    folder = model("llama")
    path = save_adapter(tmp_path / "adapter", folder, seed=1)
    with Engine(folder, canary={}, enable_lora=True, max_loras=2, max_lora_rank=8) as engine:
        for number, name in enumerate(("first", "again"), 1):
            engine.submit(name, PROMPT, new_tokens=4, lora=LoRARequest("mine", number, path))
            engine.run()
            engine.llm.llm_engine.remove_lora(number)
        assert engine.outputs["first"] == engine.outputs["again"]
        assert found_in(engine) == []
        summary = engine.session.manager.summary()
        assert (summary.watching, summary.failures) == ("complete", {})


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_a_picture_that_the_prefix_cache_forgets(
    tmp_path: Path, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core import kv_cache_utils

    folder = save_model_of_pictures(tmp_path / "blip")
    with Engine(folder, runner=runner, canary={}, skip_tokenizer_init=False) as engine:
        for n, seed in enumerate((1, 2, 1)):
            engine.submit(f"r{n}", PROMPT, new_tokens=4, picture=picture(seed))
            engine.run()
        assert found_in(engine) == []
        hit = engine.session.manager.summary().positions_verified
        monkeypatch.setattr(kv_cache_utils, "_gen_mm_extra_hash_keys", lambda *args: ([], args[-1]))
        for n, seed in enumerate((3, 4)):
            engine.submit(f"again {n}", PROMPT, new_tokens=4, picture=picture(seed))
            engine.run()
        assert engine.session.manager.summary().positions_verified > hit > 64
        # What stands where a picture does is told apart by the picture.
        assert "TOKEN" in {reason for reasons in found_in(engine) for reason in reasons}
        assert engine.session.manager.reports[0].request_id.startswith("again 1")
