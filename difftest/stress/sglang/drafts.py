"""A tiny target and a draft model for it that is often right and often not, and how SGLang is told to use them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kv_canary.demo.models import save_tiny_model

# Drafts of a step, one behind the other.
STEPS = 3


def save_models(folder: Path, *, added: float = 0.004, **shape: Any) -> tuple[str, str]:
    """Save a target model and an EAGLE draft model of one layer for it; return their folders.

    The target is a tiny Llama whose layers add little to the embeddings, and the draft model passes the embeddings on:
    so it is often right about the next token, and often not.

    Args:
        folder: for both.
        added: what is left of what a layer adds; larger models add more, and their draft model is less often right.
        shape: of the target, see `save_tiny_model`.
    """
    import torch
    from safetensors.torch import load_file, save_file

    target, draft = folder / "target", folder / "draft"
    save_tiny_model(target, **shape)
    weights = load_file(target / "model.safetensors")
    for name in weights:
        if "o_proj" in name or "down_proj" in name:
            weights[name] *= added
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
    draft.mkdir(exist_ok=True)
    (draft / "config.json").write_text(json.dumps(config))
    layer = {n.removeprefix("model."): w for n, w in weights.items() if n.startswith("model.layers.0.")}
    del layer["layers.0.input_layernorm.weight"]
    same = torch.eye(config["hidden_size"])
    save_file({**layer, "fc.weight": torch.cat([same, 0.02 * same], dim=1)}, draft / "model.safetensors")
    return str(target), str(draft)


def arguments(draft: str, *, steps: int = STEPS) -> dict[str, Any]:
    """Return SGLang's arguments for EAGLE with chains of `steps` drafts by the model in the folder `draft`."""
    return {
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": draft,
        "speculative_num_steps": steps,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": steps + 1,
    }


def accepted(reqs: Iterable[Any], *, steps: int = STEPS) -> tuple[int, int]:
    """Return how many drafts of these requests were right, and how many were not, in chains of `steps`."""
    asked, right = 0, 0
    for req in reqs:
        asked, right = asked + steps * req.spec_verify_ct, right + req.spec_num_correct_drafts
    return right, asked - right
