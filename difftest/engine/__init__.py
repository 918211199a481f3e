"""A model of an LLM engine's bookkeeping: what an engine would put into the arguments of the ops, without a model.

An `Engine` keeps pages, a prefix cache, tables and requests, and hands out the op calls of each step; a `Memory` is
what one implementation of the ops keeps beside it.
"""

from __future__ import annotations

from kv_canary.difftest.engine.actions import ACTIONS, STEPS, Action, perform
from kv_canary.difftest.engine.batch import Request
from kv_canary.difftest.engine.calls import ENGINE_OPS, Call
from kv_canary.difftest.engine.config import EngineConfig, GroupConfig
from kv_canary.difftest.engine.engine import Engine
from kv_canary.difftest.engine.faults import FAULTS, corrupt
from kv_canary.difftest.engine.memory import Memory

__all__ = [
    "ACTIONS",
    "ENGINE_OPS",
    "FAULTS",
    "STEPS",
    "Action",
    "Call",
    "Engine",
    "EngineConfig",
    "GroupConfig",
    "Memory",
    "Request",
    "corrupt",
    "perform",
]
