"""What parts of vLLM want of a GPU though they run on the CPU; each is asked for by name.

The variable VLLM_ON_CPU lists modules of this package, with commas: `asynchronous`. vLLM calls `plugin` in each of its
processes before a worker is made; without the variable it does nothing.
"""

from __future__ import annotations

import importlib
import os

_applied: set[str] = set()


def plugin() -> None:
    """Call `apply()` of every module that VLLM_ON_CPU names, once."""
    names = {name.strip() for name in os.environ.get("VLLM_ON_CPU", "").split(",")} - {""}
    for name in sorted(names - _applied):
        importlib.import_module(f"{__name__}.{name}").apply()
        _applied.add(name)
