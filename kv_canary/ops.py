"""The front door: `kv_canary.ops.<op>(..., backend=None)`, the same keyword call for every backend."""

from __future__ import annotations

from typing import Any

from kv_canary.backends import implementation, select_backend
from kv_canary.specs import all_specs, get_spec
from kv_canary.specs.interface import KernelSpec


class Op:
    """A callable op: validates its arguments against the spec, then launches the chosen backend's implementation."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec
        self.__name__ = spec.name
        self.__doc__ = spec.doc
        self.__signature__ = spec.signature()

    def __call__(self, *, backend: str | None = None, **arguments: Any) -> None:
        bound = self.spec.bind(arguments)
        device = next(self.spec.leaves(bound)).tensor.device
        implementation(self.spec.name, select_backend(backend, device))(**bound)

    def __repr__(self) -> str:
        return f"<kv_canary op {self.spec.name}{self.__signature__}>"


_OPS: dict[str, Op] = {}


def __getattr__(name: str) -> Op:
    if name.startswith("_") or name not in all_specs():
        raise AttributeError(f"kv-canary: ops: op must be one of {', '.join(all_specs())}, got {name!r}")
    if name not in _OPS:
        _OPS[name] = Op(get_spec(name))
    return _OPS[name]


def __dir__() -> list[str]:
    return sorted(all_specs())
