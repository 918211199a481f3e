"""kv-canary: a record beside every KV slot, verified around every forward.

Importing this package imports neither torch nor triton nor any engine: each name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kv_canary import ops
    from kv_canary.backends import register, use_backend
    from kv_canary.config import CanaryConfig
    from kv_canary.constants import (
        ANCHOR,
        BAD_SLOT,
        CHAIN_MULTIPLIER,
        HEAD_OF_CHAIN,
        UNCHECKED,
        Reason,
        Status,
        Tag,
    )
    from kv_canary.engines import Installation, install
    from kv_canary.identity import identity_word
    from kv_canary.observers import Observer
    from kv_canary.perturb_settings import PerturbConfig
    from kv_canary.ranks import RankGroup, RankReport, RankViolationError
    from kv_canary.reports import CanaryViolationError, Incident, ViolationReport
    from kv_canary.runtime.batch import ForwardBatch
    from kv_canary.runtime.cached import CachedSlots
    from kv_canary.runtime.capacities import CanaryLaunchCapacities, CanaryLimits
    from kv_canary.runtime.composition import BatchRequests, Composition, ForwardRequest, RequestSource
    from kv_canary.runtime.forward import SingleForwardManager
    from kv_canary.runtime.manager import CanaryManager
    from kv_canary.runtime.pools import BufferGroup, KvPool
    from kv_canary.runtime.rows import RowTable
    from kv_canary.runtime.summary import CanarySummary
    from kv_canary.specs.structures import Endpoint, KvSource, ResolvedSlots, VerifyPlan, ViolationLog, WritePlan

__version__ = "0.1.0"

__all__ = [
    "ANCHOR",
    "BAD_SLOT",
    "CHAIN_MULTIPLIER",
    "HEAD_OF_CHAIN",
    "UNCHECKED",
    "BatchRequests",
    "BufferGroup",
    "CachedSlots",
    "CanaryConfig",
    "CanaryLaunchCapacities",
    "CanaryLimits",
    "CanaryManager",
    "CanarySummary",
    "CanaryViolationError",
    "Composition",
    "Endpoint",
    "ForwardBatch",
    "ForwardRequest",
    "Incident",
    "Installation",
    "KvPool",
    "KvSource",
    "Observer",
    "PerturbConfig",
    "RankGroup",
    "RankReport",
    "RankViolationError",
    "Reason",
    "RequestSource",
    "ResolvedSlots",
    "RowTable",
    "SingleForwardManager",
    "Status",
    "Tag",
    "VerifyPlan",
    "ViolationLog",
    "ViolationReport",
    "WritePlan",
    "identity_word",
    "install",
    "ops",
    "register",
    "use_backend",
]

# Where each name comes from, but for `ops`, which is a module.
_MODULES: dict[str, tuple[str, ...]] = {
    "kv_canary.runtime.summary": ("CanarySummary",),
    "kv_canary.backends": (
        "register",
        "use_backend",
    ),
    "kv_canary.runtime.capacities": (
        "CanaryLaunchCapacities",
        "CanaryLimits",
    ),
    "kv_canary.config": ("CanaryConfig",),
    "kv_canary.constants": (
        "ANCHOR",
        "BAD_SLOT",
        "CHAIN_MULTIPLIER",
        "HEAD_OF_CHAIN",
        "UNCHECKED",
        "Reason",
        "Status",
        "Tag",
    ),
    "kv_canary.engines": (
        "Installation",
        "install",
    ),
    "kv_canary.runtime.composition": (
        "BatchRequests",
        "Composition",
        "ForwardRequest",
        "RequestSource",
    ),
    "kv_canary.runtime.batch": ("ForwardBatch",),
    "kv_canary.runtime.forward": ("SingleForwardManager",),
    "kv_canary.identity": ("identity_word",),
    "kv_canary.runtime.manager": ("CanaryManager",),
    "kv_canary.observers": ("Observer",),
    "kv_canary.perturb_settings": ("PerturbConfig",),
    "kv_canary.runtime.pools": (
        "BufferGroup",
        "KvPool",
    ),
    "kv_canary.ranks": (
        "RankGroup",
        "RankReport",
        "RankViolationError",
    ),
    "kv_canary.reports": (
        "CanaryViolationError",
        "Incident",
        "ViolationReport",
    ),
    "kv_canary.runtime.rows": ("RowTable",),
    "kv_canary.specs.structures": (
        "Endpoint",
        "KvSource",
        "ResolvedSlots",
        "VerifyPlan",
        "ViolationLog",
        "WritePlan",
    ),
    "kv_canary.runtime.cached": ("CachedSlots",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "ops":
        return importlib.import_module("kv_canary.ops")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
