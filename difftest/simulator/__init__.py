"""A model of an LLM engine's bookkeeping: what an engine would put into the arguments of the ops, without a model.

An `Engine` keeps pages, a prefix cache, tables and requests, and hands out the op calls of each step; a `Memory` is
what one implementation of the ops keeps beside it.
"""

from __future__ import annotations

from kv_canary.difftest.simulator.actions import ACTIONS, STEPS, Action, perform
from kv_canary.difftest.simulator.config import EngineConfig, GroupConfig
from kv_canary.difftest.simulator.engine import Engine
from kv_canary.difftest.simulator.faults import FAULTS, corrupt
from kv_canary.difftest.simulator.memory import Memory
from kv_canary.difftest.simulator.op_calls import ENGINE_OPS, Call
from kv_canary.difftest.simulator.requests import Request

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
