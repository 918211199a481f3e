"""The models and the canaries that are compared, and what is asked of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NONE = "none"
# Tokens of an answer of a service with a host tier, at least.
LEAST_ANSWER = 16


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Llama's sizes; its weights are made up.

    Args:
        layers, hidden, heads, kv_heads, inner, vocabulary: as in its configuration.
        dtype: of weights and KV.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int = 128256
    dtype: str = "bfloat16"

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * (4 if self.dtype == "float32" else 2)

    def config(self, *, positions: int = 0) -> dict[str, Any]:
        """Return the model's config.json.

        Args:
            positions: that it must have room for; it has 8,192 in any case.
        """
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": max(8192, 1 << positions.bit_length()),
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "torch_dtype": self.dtype,
            "attention_bias": False,
            "mlp_bias": False,
        }


MODELS: Mapping[str, Shape] = {
    "8b": Shape(layers=32, hidden=4096, heads=32, kv_heads=8, inner=14336),
    "1b": Shape(layers=16, hidden=2048, heads=32, kv_heads=8, inner=8192),
    "tiny": Shape(layers=2, hidden=64, heads=4, kv_heads=2, inner=128, vocabulary=1000, dtype="float32"),
}


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A canary, or none.

    Args:
        environment: of its process.
        arguments: of SGLang's `ServerArgs`.
        own_kv: whether it cannot share its KV with others, which write there what is cached no more for them.
        doc: what it is, in a line.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    own_kv: bool = False
    doc: str


_OURS = {"KV_CANARY_MODE": "log"}
_WHOLE = {
    "KV_CANARY_STRIDE": "1",
    "KV_CANARY_VERIFY_BYTES_AT_TAIL": "1",
    "KV_CANARY_CHECK_TOKENS": "1",
    "KV_CANARY_CHECK_INPUTS": "1",
}
_SGL_ALL = {"SGLANG_KV_CANARY_ENABLE_MHA_V": "1", "SGLANG_KV_CANARY_ENABLE_VERIFY_TOKEN_ASSERT": "1"}

MODES: Mapping[str, Mode] = {
    NONE: Mode(doc="no canary"),
    "ours": Mode(
        environment=_OURS,
        own_kv=True,
        doc="kv-canary as it comes: with a hash of every byte, which is looked at when requests come and end",
    ),
    "ours_sampled": Mode(
        environment={**_OURS, "KV_CANARY_SEALS": "off"},
        doc="the same without: 16 bytes of a layer's K and V of a token",
    ),
    "ours_writes": Mode(
        environment={**_OURS, "KV_CANARY_CHECK_WRITES": "1"},
        own_kv=True,
        doc="kv-canary as it comes, and what the model hands over held against what lies there",
    ),
    "ours_full": Mode(
        environment={**_OURS, **_WHOLE},
        own_kv=True,
        doc="every position at every step, bytes again at TAIL, tokens and inputs",
    ),
    "sgl": Mode(arguments={"kv_canary": "log"}, doc="SGLang's own as it comes: no bytes of K or V"),
    "sgl_partial": Mode(
        arguments={"kv_canary": "log", "kv_canary_real_data": "partial"},
        doc="the same, 16 bytes of a layer's K",
    ),
    "sgl_all": Mode(
        environment=_SGL_ALL,
        arguments={"kv_canary": "log", "kv_canary_real_data": "all"},
        doc="the same, everything that needs no oracle",
    ),
}
