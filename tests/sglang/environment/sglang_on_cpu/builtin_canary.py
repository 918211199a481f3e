"""SGLang's own KV canary, which makes streams on a named device and pins its buffers."""

from __future__ import annotations

from typing import Any

import torch

from .pinning import leave_out_pinning


class _Stream(torch.cpu.Stream):
    """A stream of the CPU that takes a device, as other backends' streams do."""

    def __init__(self, priority: int = -1, device: Any = None) -> None:
        super().__init__(priority)
        self.device = torch.device("cpu")


def apply() -> None:
    """Let it be installed on the CPU."""
    from sglang.srt.kv_canary import req_to_expected_token_ids_manager
    from sglang.srt.kv_canary.runner import future_tensor

    torch.cpu.Stream = _Stream  # type: ignore[misc]
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign,assignment]
    leave_out_pinning(req_to_expected_token_ids_manager)
    leave_out_pinning(future_tensor)
