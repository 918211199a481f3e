"""Models of random weights, a few layers each, that a CPU serves: for the demo, campaigns and tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from kv_canary.errors import must_be

# Those of the demo.
MODELS = ("llama", "gemma3")
KINDS = ("llama", "mistral", "gemma3", "gptoss", "mellum")
SLIDING_WINDOW = 24

_SHAPE = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
_SLIDING = {"head_dim": 16, "sliding_window": SLIDING_WINDOW}
_TWO_TO_ONE = ["sliding_attention", "sliding_attention", "full_attention"] * 2
_ONE_TO_ONE = ["sliding_attention", "full_attention"] * 2


def tiny_config(kind: str, **overrides: Any) -> Any:
    """Return the configuration of a tiny model.

    Args:
        kind: "llama" (full attention), "mistral" (sliding), "gemma3", "mellum" (two sliding layers to a full one) or
            "gptoss" (one to one, experts).
        overrides: fields that differ.

    Raises:
        ValueError: there is no such kind.
    """
    more: dict[str, Any]
    if kind == "llama":
        name, more = "LlamaConfig", {"num_hidden_layers": 3}
    elif kind == "mistral":
        name, more = "MistralConfig", {"num_hidden_layers": 2, **_SLIDING}
    elif kind == "gemma3":
        name = "Gemma3TextConfig"
        more = {"num_hidden_layers": 6, "layer_types": _TWO_TO_ONE, "query_pre_attn_scalar": 16, **_SLIDING}
    elif kind == "mellum":
        name = "MellumConfig"
        tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False}
        layers = {"num_hidden_layers": 6, "layer_types": _TWO_TO_ONE, "mlp_layer_types": ["dense"] * 6}
        more = {**layers, **tokens, **_SLIDING}
    elif kind == "gptoss":
        name = "GptOssConfig"
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
        more = {"num_hidden_layers": 4, "layer_types": _ONE_TO_ONE, **experts, **_SLIDING}
    else:
        raise ValueError(must_be("tiny model", "kind", f"one of {', '.join(KINDS)}", repr(kind)))
    return getattr(transformers, name)(**{**_SHAPE, **more, **overrides})


def tiny_model(
    kind: str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    spread: float = 0.15,
    **overrides: Any,
) -> Any:
    """Return a tiny model of random weights, wide enough apart that every layer's K and V depend on the tokens before.

    Args:
        kind: of `tiny_config`.
        device: where it is.
        dtype: of its weights.
        seed: of its weights.
        spread: their standard deviation.
        overrides: fields of the configuration that differ.
    """
    torch.manual_seed(seed)
    # GptOss has attention sinks, which SDPA has not.
    attention = "eager" if kind == "gptoss" else "sdpa"
    model = AutoModelForCausalLM.from_config(tiny_config(kind, **overrides), attn_implementation=attention).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=spread)
    return model.to(device=device, dtype=dtype)


def save_tiny_model(
    folder: Path | str, kind: str = "llama", *, seed: int = 0, spread: float = 0.3, **overrides: Any
) -> str:
    """Save a tiny model of random weights in `folder`, unless one is there, and return the folder.

    Args:
        folder: made if need be.
        kind: of `tiny_config`.
        seed: of its weights.
        spread: of weights; by default large enough that outputs do not fall into loops.
        overrides: fields of the configuration that differ.
    """
    if not (Path(folder) / "config.json").exists():
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        torch.manual_seed(seed)
        fields = {"head_dim": 16, "max_position_embeddings": 4096, "initializer_range": spread, **overrides}
        AutoModelForCausalLM.from_config(tiny_config(kind, **fields)).float().save_pretrained(folder)
    return str(folder)
