"""kv-canary: a record beside every KV slot, verified around every forward.

Importing this package imports neither triton nor any engine.
"""

from kv_canary import ops
from kv_canary.accounts import CanarySummary
from kv_canary.backends import register, use_backend
from kv_canary.capacities import CanaryLaunchCapacities, CanaryLimits
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
from kv_canary.forward import ForwardBatch, ForwardRequest, SingleForwardManager
from kv_canary.identity import identity_word
from kv_canary.manager import CanaryManager
from kv_canary.observers import Observer
from kv_canary.perturb import PerturbConfig
from kv_canary.pools import BufferGroup, KvPool
from kv_canary.ranks import RankGroup, RankReport, RankViolationError
from kv_canary.reports import CanaryViolationError, Incident, ViolationReport
from kv_canary.specs.structures import Endpoint, KvSource, ResolvedSlots, VerifyPlan, ViolationLog, WritePlan
from kv_canary.sweep import CachedSlots

__version__ = "0.1.0"

__all__ = [
    "ANCHOR",
    "BAD_SLOT",
    "CHAIN_MULTIPLIER",
    "HEAD_OF_CHAIN",
    "UNCHECKED",
    "BufferGroup",
    "CachedSlots",
    "CanaryConfig",
    "CanaryLaunchCapacities",
    "CanaryLimits",
    "CanaryManager",
    "CanarySummary",
    "CanaryViolationError",
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
    "ResolvedSlots",
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
