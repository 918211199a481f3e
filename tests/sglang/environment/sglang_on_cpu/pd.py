"""The prefill side of disaggregation, which asks for events and the stream of CUDA whatever the device is."""

from __future__ import annotations

from typing import Any

import torch

from .pinning import leave_out_pinning


class _Event:
    """An event of a device that runs everything at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        """Nothing is ever pending."""

    def synchronize(self) -> None:
        """Nothing is ever pending."""

    def wait(self, *args: Any) -> None:
        """Nothing is ever pending."""

    def query(self) -> bool:
        """Return that all is done."""
        return True


def apply() -> None:
    """Let a prefill engine run on the CPU."""
    from sglang.srt.disaggregation import prefill

    torch.cuda.Event = _Event  # type: ignore[misc,assignment]
    torch.cuda.current_stream = lambda *args, **kwargs: torch.cpu.current_stream()  # type: ignore[assignment,return-value]
    leave_out_pinning(prefill)
