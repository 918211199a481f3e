"""Hypothesis strategies: one module per op, each with `cases()`, which draws the arguments of one call, on the CPU.

Those are drawn for themselves, and shrink well; `engine` draws calls as a model of an engine makes them in the course
of its life. `cases(op)` here is both, where engines call the op.

Excluded from every strategy, because the outcome is undefined: the same slot twice in one write, except with equal
identity and chain; the same destination twice in one move; the same row twice in one write, scatter or chain_tails;
output tensors that overlap. A token written twice with equal identity and chain gets equal owners here, since either
writer may win. `KernelSpec.has_one_outcome` tells them apart, for calls that come otherwise.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from hypothesis.strategies import SearchStrategy, one_of

Cases = Callable[[], SearchStrategy[dict[str, Any]]]

_REGISTERED: dict[str, Cases] = {}


def cases(op: str) -> SearchStrategy[dict[str, Any]]:
    """Return the strategy that draws calls of `op`.

    Raises:
        ValueError: there is none.
    """
    if op not in _REGISTERED:
        name = f"{__name__}.{op}"
        try:
            isolated = importlib.import_module(name).cases
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            raise ValueError(f"kv-canary: difftest: op must be one with a strategy, got {op!r}") from error
        _REGISTERED[op] = partial(_with_engine_made, op, isolated)
    return _REGISTERED[op]()


def _with_engine_made(op: str, isolated: Cases) -> SearchStrategy[dict[str, Any]]:
    from kv_canary.difftest.simulator import ENGINE_OPS
    from kv_canary.difftest.strategies.engine import engine_cases

    return one_of(isolated(), engine_cases(op)) if op in ENGINE_OPS else isolated()


def register_cases(op: str) -> Callable[[Cases], Cases]:
    """Register the decorated function as the strategy of `op`."""

    def decorate(function: Cases) -> Cases:
        _REGISTERED[op] = function
        return function

    return decorate
