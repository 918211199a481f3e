"""kv-canary: a record beside every KV slot, verified around every forward.

Importing this package imports neither triton nor any engine.
"""

from kv_canary import ops
from kv_canary.backends import register, use_backend
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
from kv_canary.specs.structures import Endpoint, KvSource, VerifyPlan, ViolationLog, WritePlan

__version__ = "0.1.0"

__all__ = [
    "ANCHOR",
    "BAD_SLOT",
    "CHAIN_MULTIPLIER",
    "HEAD_OF_CHAIN",
    "UNCHECKED",
    "Endpoint",
    "KvSource",
    "Reason",
    "Status",
    "Tag",
    "VerifyPlan",
    "ViolationLog",
    "WritePlan",
    "ops",
    "register",
    "use_backend",
]
