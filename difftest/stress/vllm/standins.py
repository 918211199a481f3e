"""Stand-ins for the compiled parts of vLLM that it calls on a GPU, where only its Python can be had.

`use()` makes them importable, and answers by PyTorch those few of their operations that a Llama needs. Nothing else of
`torch.ops._C` is there: vLLM asks whether it is where it can do without, and elsewhere an AttributeError names it.
Attention and the cache are served by Triton kernels of vLLM's own (backend TRITON_ATTN); norms, rotation and
activations by its forms in PyTorch (`ARGUMENTS`).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn

import torch

# Imported for what they register.
_COMPILED = ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm.vllm_flash_attn._vllm_fa2_C")
# cudaMemcpyDefault: what is copied where is told by the addresses.
_BY_ADDRESS = 4
# Imported for n-grams and for structured outputs, of which there are none here.
_ABSENT = ("numba", "llguidance")

ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_TARGET_DEVICE": "cuda",
}
# Of vLLM's `LLM`, with which the stand-ins suffice.
ARGUMENTS: dict[str, Any] = {
    "attention_backend": "TRITON_ATTN",
    "compilation_config": {"mode": 0, "custom_ops": ["none"]},
    "ir_op_priority": {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]},
    # Kernels are compiled when they are first called: what vLLM warms up ahead goes by another Triton's insides.
    "kernel_config": {"enable_jit_warmup": False, "enable_flashinfer_autotune": False},
}


def use() -> None:
    """Make the stand-ins importable, and the platform CUDA; before vLLM is imported."""
    os.environ.update(ENVIRONMENT)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
    for name, operation in _OPERATIONS.items():
        setattr(torch.ops._C, name, operation)
    for name, operation in _CACHE_OPERATIONS.items():
        setattr(torch.ops._C_cache_ops, name, operation)


def patch() -> None:
    """Have vLLM take the device for what it is, and this torch for enough; before its engine is made.

    Raises:
        RuntimeError: vLLM has decided for another platform before.
    """
    from vllm import platforms

    # It goes by the version of the package, and by NVML.
    platforms.resolve_current_platform_cls_qualname = lambda: "vllm.platforms.cuda.CudaPlatform"
    if not platforms.current_platform.is_cuda():
        found = type(platforms.current_platform).__name__
        raise RuntimeError(f"kv-canary: stress: vLLM's platform must be CUDA, got {found}: it was imported before")
    from vllm.model_executor.models import registry
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu_worker import Worker

    # It would look at the model's class in a process of its own, which has no stand-ins.
    registry._run_in_subprocess = lambda look: look()
    # What is warmed up asks for it, and nobody else; its kernels are for another Triton.
    topk_topp_sampler.HAS_TRITON = False
    # It would ask this torch for the allocator's settings, to put them back.
    Worker._scoped_allocator_max_split = lambda *_, **__: contextlib.nullcontext()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what is compiled or not to be had, behind all other finders: what is installed comes first."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _COMPILED and fullname.partition(".")[0] not in _ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return ModuleType(spec.name) if spec.name in _COMPILED else _Missing(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: its names are made when they are asked for."""


class _Absent(type):
    """The class of a name that there is no stand-in for: names below it exist as well, and calling it raises."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(name, (), {"__module__": f"{cls.__module__}.{cls.__qualname__}"})

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"kv-canary: stress: {cls.__module__}.{cls.__qualname__} has no stand-in")


class _Missing(ModuleType):
    """A module in which every name is found; see `_Absent`."""

    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(name, (), {"__module__": self.__name__})


def _weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself: memory of a graph's pool is not given to the next graph then."""
    return tensor


class _Pinned:
    """Pinned memory of the host, as numba's and CuPy's arrays of a device describe themselves."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # Kept for as long as the view of it is.
        self._tensor = tensor
        self.__cuda_array_interface__ = {
            "shape": (tensor.numel() * tensor.element_size(),),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


def _cuda_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor of the host as the device addresses it; of one that is not pinned, a copy's."""
    if not tensor.numel():
        return torch.empty_like(tensor, device="cuda")
    if not tensor.is_contiguous():
        raise NotImplementedError("kv-canary: stress: a view of memory with strides has no stand-in")
    pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
    seen = torch.as_tensor(_Pinned(pinned), device="cuda")
    if seen.data_ptr() != pinned.data_ptr():
        raise RuntimeError("kv-canary: stress: a view of pinned memory must lie where that does, got a copy")
    return seen.view(tensor.dtype).view(tensor.shape)


def _silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    half = x.shape[-1] // 2
    out.copy_(torch.nn.functional.silu(x[..., :half]) * x[..., half:])


def _no(*_: Any) -> bool:
    """The answer for what needs kernels that are not there."""
    return False


def _swap_blocks_batch(
    sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, _any_order: bool = False
) -> None:
    """Copy stretches of memory of the host and the device, on the current stream: one call of the driver for each."""
    from vllm.distributed.device_communicators.cuda_wrapper import CudaRTLibrary

    copy = CudaRTLibrary().lib.cudaMemcpyAsync
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
        code = copy(
            ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(size), ctypes.c_int(_BY_ADDRESS), stream
        )
        if code:
            raise RuntimeError(f"kv-canary: stress: a copy between host and device ended with CUDA's error {code}")


_CACHE_OPERATIONS: dict[str, Callable[..., Any]] = {"swap_blocks_batch": _swap_blocks_batch}
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "weak_ref_tensor": _weak_ref_tensor,
    "get_cuda_view_from_cpu_tensor": _cuda_view,
    "silu_and_mul": _silu_and_mul,
    "cutlass_scaled_mm_supports_fp8": _no,
    "cutlass_scaled_mm_supports_block_fp8": _no,
    "cutlass_scaled_mm_supports_fp4": _no,
    "cutlass_group_gemm_supported": _no,
}
