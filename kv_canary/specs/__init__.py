"""The specs: one module per op, each with a `SPEC`. A new op is found by its file; nothing here is edited."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from kv_canary.specs.interface import KernelSpec

# Ops registered from outside this package, by name.
_REGISTERED: dict[str, KernelSpec] = {}


@cache
def _built_in() -> dict[str, KernelSpec]:
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    return {m.SPEC.name: m.SPEC for m in modules if hasattr(m, "SPEC")}


def all_specs() -> dict[str, KernelSpec]:
    """Return every known op's spec by name, the built-in ones first."""
    return {**_built_in(), **_REGISTERED}


def get_spec(name: str) -> KernelSpec:
    """Return the spec of op `name`.

    Raises:
        ValueError: there is no such op.
    """
    specs = all_specs()
    if name not in specs:
        raise ValueError(f"kv-canary: specs: op must be one of {', '.join(specs)}, got {name!r}")
    return specs[name]


def add_spec(spec: KernelSpec) -> None:
    """Make an op known. Adding the same spec again does nothing.

    Raises:
        ValueError: another spec has that name.
    """
    known = all_specs().get(spec.name)
    if known is not None and known is not spec:
        raise ValueError(f"kv-canary: specs: name must be new, got {spec.name!r}, which is another op's")
    if known is None:
        _REGISTERED[spec.name] = spec
