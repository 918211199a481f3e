"""Speculative decoding in a real scheduler in this process."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from kv_canary.demo.models import save_tiny_model

from . import engine

STEPS = 3


def models(folder: Path) -> tuple[str, str]:
    """Save a target model and an EAGLE draft model of one layer for it; return their folders.

    The target is a tiny Llama whose layers add little to the embeddings, and the draft model passes the embeddings on:
    so it is often right about the next token, and often not.
    """
    import torch
    from safetensors.torch import load_file, save_file

    target, draft = folder / "target", folder / "draft"
    save_tiny_model(target)
    weights = load_file(target / "model.safetensors")
    for name in weights:
        if "o_proj" in name or "down_proj" in name:
            weights[name] *= 0.004
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps(config))
    layer = {n.removeprefix("model."): w for n, w in weights.items() if n.startswith("model.layers.0.")}
    del layer["layers.0.input_layernorm.weight"]
    same = torch.eye(config["hidden_size"])
    save_file({**layer, "fc.weight": torch.cat([same, 0.02 * same], dim=1)}, draft / "model.safetensors")
    return str(target), str(draft)


def build(models: tuple[str, str], *, mode: str = "raise", settings: dict[str, str] | None = None, **args: Any) -> Any:
    """Return a scheduler that decodes with chains of STEPS drafts, with a canary in it.

    Args:
        models: target and draft.
        mode: of the canary.
        settings: further variables of its environment.
        args: of SGLang's ServerArgs.
    """
    speculation = {
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": models[1],
        "speculative_num_steps": STEPS,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": STEPS + 1,
    }
    environment = {"SGLANG_ON_CPU": "speculative", "KV_CANARY_MODE": mode, **(settings or {})}
    with engine.overriding(**environment):
        return engine.build_scheduler(models[0], **(speculation | args))


def some_tokens(n: int, *, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, engine.VOCABULARY) for _ in range(n)]


def accepted(reqs: list[Any], *, steps: int = STEPS) -> tuple[int, int]:
    """Return how many drafts of these requests were right, and how many were not, in chains of `steps`."""
    right = sum(req.spec_num_correct_drafts for req in reqs)
    return right, steps * sum(req.spec_verify_ct for req in reqs) - right
