"""Asynchronous scheduling, which vLLM turns off on a CPU: there is nothing to gain by it, and it runs all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def apply() -> Callable[[], None]:
    """Turn it on again behind the platform's own settings, and return what takes that back."""
    from vllm.platforms.cpu import CpuPlatform

    before = CpuPlatform.__dict__["check_and_update_config"]
    original = before.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)

    def undo() -> None:
        CpuPlatform.check_and_update_config = before

    return undo
