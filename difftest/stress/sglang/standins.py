"""Stand-ins for the compiled kernels that SGLang calls on a GPU, where only its Python can be had.

`use()` makes `sgl_kernel` importable, and `flash_mla`, which SGLang imports for drafts: packages whose names all exist
and raise when they are called, apart from those few that SGLang asks something of while it is imported. What a Llama's
forward calls is taken from elsewhere: SGLang's fused operations have a form in PyTorch each, which
`SGLANG_FORCE_FUSED_OP_BACKEND=torch` selects, and attention, tables and slots are served by Triton kernels of SGLang's
own.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

PACKAGE = "sgl_kernel"
_PACKAGES = (PACKAGE, "flash_mla")

# What SGLang asks of it while it starts.
_ANSWERS: dict[str, Any] = {
    "sgl_kernel.utils.is_arch_support_pdl": lambda: False,
}


def use(*, own_norms: bool = False) -> None:
    """Make the stand-ins importable; before SGLang is imported.

    Args:
        own_norms: whether the norms are kernels that SGLang compiles while it runs (which needs nvcc), and its fused
            operations what it chooses itself; else these are PyTorch's, and slow.
    """
    if own_norms:
        _ANSWERS.update({f"{PACKAGE}.rmsnorm": _rmsnorm, f"{PACKAGE}.fused_add_rmsnorm": _fused_add_rmsnorm})
    else:
        os.environ["SGLANG_FORCE_FUSED_OP_BACKEND"] = "torch"
    os.environ["SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK"] = "1"
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def patch() -> None:
    """Turn off what SGLang would choose by the device alone; before its scheduler is made."""
    from sglang.srt.layers.dual_gemm import DualGemm

    # A kernel for other devices, whose module wants CUTLASS's Python only to say so.
    DualGemm._select_mode = lambda *_: None


def _rmsnorm(x: Any, weight: Any, eps: float = 1e-6, out: Any = None, enable_pdl: Any = None) -> Any:
    from sglang.kernels.ops.layernorm.norm import rmsnorm

    out = x.new_empty(x.shape) if out is None else out
    rmsnorm(x, weight, out, eps)
    return out


def _fused_add_rmsnorm(x: Any, residual: Any, weight: Any, eps: float = 1e-6, enable_pdl: Any = None) -> None:
    from sglang.kernels.ops.layernorm.norm import fused_add_rmsnorm

    fused_add_rmsnorm(x, residual, weight, eps)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds these packages and everything below them, behind all other finders: an installed one comes first."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] not in _PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Missing(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: its names are made when they are asked for."""


class _Absent(type):
    """The class of a name that there is no stand-in for: names below it exist as well, and calling it raises."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(f"{cls.__module__}.{cls.__qualname__}", name)

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"kv-canary: bench: {cls.__module__}.{cls.__qualname__} has no stand-in")


class _Missing(ModuleType):
    """A module in which every name is found; see `_Absent`."""

    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(self.__name__, name)


def _absent(where: str, name: str) -> Any:
    answer = _ANSWERS.get(f"{where}.{name}")
    return answer if answer is not None else _Absent(name, (), {"__module__": where})
