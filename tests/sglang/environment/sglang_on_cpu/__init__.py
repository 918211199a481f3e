"""What parts of SGLang want of a GPU though they run on the CPU, or get wrong there; each is asked for by name.

The variable SGLANG_ON_CPU lists modules of this package, with commas: `builtin_canary`, `hybrid_swa`, `pd`,
`speculative`; and `troubled_canary`, which is no part of SGLang. SGLang calls `plugin` in each of its processes before
anything else of it runs; without the variable it does nothing.
"""

from __future__ import annotations

import importlib
import os

_applied: set[str] = set()


def plugin() -> None:
    """Call `apply()` of every module that SGLANG_ON_CPU names, once."""
    names = {name.strip() for name in os.environ.get("SGLANG_ON_CPU", "").split(",")} - {""}
    for name in sorted(names - _applied):
        importlib.import_module(f"{__name__}.{name}").apply()
        _applied.add(name)
