"""The backend switch: which implementation of an op a call gets.

`reference` is pure PyTorch, slow and readable; `triton` is for production, on a GPU or, with TRITON_INTERPRET=1, in
Triton's interpreter; `auto` is Triton on a GPU and the reference elsewhere; `shadow` is Triton, every n-th launch of
which the reference re-runs on a copy. Implementations are imported on first use.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from kv_canary.constants import AUTO, BACKENDS, SHADOW
from kv_canary.errors import must_be
from kv_canary.specs import add_spec
from kv_canary.specs.interface import KernelSpec

_PACKAGES = {"reference": "kv_canary.reference", "triton": "kv_canary.kernels"}

Implementation = Callable[..., None]

_active: ContextVar[str | None] = ContextVar("kv_canary_backend", default=None)
_compiles_for: ContextVar[tuple[int, int] | None] = ContextVar("kv_canary_compiles_for", default=None)
_implementations: dict[tuple[str, str], Implementation] = {}


@contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Make `backend` the one that calls inside the `with` block get, unless they name another."""
    token = _active.set(_check(backend, "use_backend", "backend"))
    try:
        yield
    finally:
        _active.reset(token)


def active_backend() -> str | None:
    """Return the backend of the innermost `use_backend` block here, or None; other threads do not see the block."""
    return _active.get()


def select_backend(backend: str | None, device: torch.device) -> str:
    """Return "reference", "triton" or "shadow": by argument, else `use_backend`, else KV_CANARY_BACKEND, else auto.

    Raises:
        ValueError: the name is unknown, or Triton cannot run on `device`.
    """
    if backend is not None:
        chosen = _check(backend, "backend switch", "backend")
    elif (active := active_backend()) is not None:
        chosen = active
    else:
        chosen = _check(os.environ.get("KV_CANARY_BACKEND", AUTO), "backend switch", "KV_CANARY_BACKEND")
    if chosen == AUTO:
        return "triton" if device.type == "cuda" else "reference"
    if chosen != "reference" and device.type != "cuda" and not interpreting() and _compiles_for.get() is None:
        expected = f"on a GPU for backend={chosen}, or TRITON_INTERPRET=1 set before its first use"
        raise ValueError(must_be("backend switch", "tensors", expected, str(device)))
    return chosen


def interpreting() -> bool:
    """Whether Triton kernels run in Triton's interpreter in this process."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@contextmanager
def compiling_for(capability: tuple[int, int]) -> Iterator[None]:
    """Choose kernels inside the `with` block as on a GPU of a compute capability, wherever tensors are."""
    token = _compiles_for.set(capability)
    try:
        yield
    finally:
        _compiles_for.reset(token)


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Return that of the GPU which kernels for tensors on `device` are compiled for; None for the interpreter."""
    return _compiles_for.get() or _capability_of(device)


@functools.cache
def _capability_of(device: torch.device) -> tuple[int, int] | None:
    if device.type != "cuda" or interpreting():
        return None
    return torch.cuda.get_device_capability(device)


def implementation(op: str, backend: str) -> Implementation:
    """Return the function that implements `op` in "reference", "triton" or "shadow"."""
    if backend == SHADOW:
        # Made of the other two, which may change: made anew for each caller.
        from kv_canary.shadow import shadowed

        return shadowed(op, serve=implementation(op, "triton"), check=implementation(op, "reference"))
    key = (op, backend)
    if key not in _implementations:
        name = f"{_PACKAGES[backend]}.{op}"
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            raise ValueError(f"kv-canary: {op}: backend must be one that implements it, got {backend!r}") from error
        _implementations[key] = getattr(module, op)
    return _implementations[key]


def is_registered(op: str, backend: str) -> bool:
    """Whether an op's implementation was registered, or imported before, so that nothing is imported for it."""
    return (op, backend) in _implementations


def register(spec: KernelSpec, *, backend: str) -> Callable[[Implementation], Implementation]:
    """Register the decorated function as `backend`'s implementation of the op that `spec` declares.

    This is how an op from outside this package gets validation, backends and difftest. The function takes exactly
    the arguments of the spec, by keyword.
    """
    if backend not in _PACKAGES:
        raise ValueError(must_be("register", "backend", f"one of {', '.join(_PACKAGES)}", repr(backend)))
    add_spec(spec)

    def decorate(function: Implementation) -> Implementation:
        _implementations[spec.name, backend] = function
        return function

    return decorate


def _check(backend: Any, part: str, argument: str) -> str:
    if not isinstance(backend, str):
        raise TypeError(must_be(part, argument, f"one of {', '.join(BACKENDS)}", type(backend).__name__))
    if backend not in BACKENDS:
        raise ValueError(must_be(part, argument, f"one of {', '.join(BACKENDS)}", repr(backend)))
    return backend
