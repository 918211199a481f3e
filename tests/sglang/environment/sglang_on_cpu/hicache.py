"""SGLang's host tier, whose copies are compiled and whose memory is pinned: the same copies, in torch."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import torch

from .pinning import leave_out_pinning

# Where host pools are, which import what copies by name.
_POOLS = ("mha", "mla", "base", "common")


def apply() -> None:
    """Let host pools be made and copied to and from on the CPU, with `hicache_io_backend="direct"`."""
    for name in _POOLS:
        module = importlib.import_module(f"sglang.srt.mem_cache.pool_host.{name}")
        for pinning in ("_cuda_host_register", "_cuda_host_unregister"):
            setattr(module, pinning, lambda *args, **kwargs: None)
        for copy in (transfer_kv_direct, transfer_kv_per_layer_direct_pf_lf, transfer_kv_all_layer_direct_lf_pf):
            setattr(module, copy.__name__, copy)
        leave_out_pinning(module)
    torch.cpu.Stream.synchronize = lambda self: None  # type: ignore[attr-defined]


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy rows of every layer, each from its place to its place."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy one layer's rows from pages [page, layer, slot of the page, ...] to a buffer [slot, ...]."""
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[src_indices // page_size, layer_id, src_indices % page_size]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy every layer's rows from buffers [slot, ...], those of a half side by side, to pages of that half."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for half, target in enumerate(dst_ptrs):
        for layer, source in enumerate(src_ptrs[half * layers : (half + 1) * layers]):
            target[dst_indices // page_size, layer, dst_indices % page_size] = source[src_indices]
