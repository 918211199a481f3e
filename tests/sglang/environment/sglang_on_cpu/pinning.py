"""Pinned memory, which torch refuses to give where there is no accelerator."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

_ALLOCATE = ("empty", "zeros", "ones", "full", "tensor")


class _Torch:
    """torch, but for functions that allocate: they leave `pin_memory` out."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name not in _ALLOCATE:
            return value

        def pageable(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            tensor: torch.Tensor = value(*args, **kwargs)
            return tensor

        return pageable


def leave_out_pinning(module: ModuleType) -> None:
    """Give a module that allocates pinned memory unasked a torch that does not."""
    module.torch = _Torch()  # type: ignore[attr-defined]
