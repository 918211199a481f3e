"""Stands in for `sgl_kernel`, SGLang's compiled kernels, whose build for CPUs is not on the package index.

SGLang's CPU engine imports names out of it at start and calls few of them: those are here, in torch. Any other `*_cpu`
name can be imported, and raises when it is called. Nothing is registered under `torch.ops.sgl_kernel`: SGLang asks for
an operator there to see whether the CPU kernels exist, and without it every layer takes its plain torch path.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

__version__ = "0"


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor,
    req_to_token: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    row_length: int,
) -> None:
    """Write `slots`, request after request, into `req_to_token[rows[i], starts[i]:ends[i]]`."""
    taken = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        req_to_token[row, start:end] = slots[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


def copy_all_layer_kv_cache_cpu(
    addresses: torch.Tensor, strides: torch.Tensor, targets: torch.Tensor, sources: torch.Tensor
) -> None:
    """Copy rows within each buffer, given by its address and the bytes of a row; every source is read first."""
    for address, stride in zip(addresses.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + source * stride, stride) for source in sources.tolist()]
        for target, row in zip(targets.tolist(), rows, strict=True):
            ctypes.memmove(address + target * stride, row, stride)


def __getattr__(name: str) -> Callable[..., Any]:
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in")

    return missing
