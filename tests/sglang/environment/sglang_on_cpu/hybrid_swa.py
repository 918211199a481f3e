"""Attention in plain torch over a hybrid pool: in SGLang 0.5.23 it writes a sliding layer's KV where the pool's mapping
says, and reads it from the full layers' slots, so that every model with such a pool generates nonsense on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def apply() -> None:
    """Let sliding layers read what they wrote."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    for name in ("forward_extend", "forward_decode"):
        setattr(TorchNativeAttnBackend, name, _reads_translated(getattr(TorchNativeAttnBackend, name)))


def _reads_translated(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        pool, table = self.token_to_kv_pool, self.req_to_token_pool
        if not self.use_sliding_window_kv_pool or not pool.layers_mapping[layer.layer_id][1]:
            return original(self, q, k, v, layer, *args, **kwargs)
        # What has left the window translates to the padding slot, and is masked.
        slots = pool.full_to_swa_index_mapping[table.req_to_token.long()]
        self.req_to_token_pool = SimpleNamespace(req_to_token=slots)
        try:
            return original(self, q, k, v, layer, *args, **kwargs)
        finally:
            self.req_to_token_pool = table

    return forward
