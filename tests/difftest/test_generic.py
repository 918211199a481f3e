"""How cases are searched: what counts as one, and that all of what was drawn is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kv_canary.difftest.engine import STEPS, Action
from kv_canary.difftest.generic import search_engine
from kv_canary.difftest.machine import EngineMachine
from kv_canary.specs.interface import KernelSpec


def test_a_round_of_an_engine_is_one_case(monkeypatch: pytest.MonkeyPatch) -> None:
    actions: list[str] = []
    checked: list[str] = []
    told: list[list[frozenset[str]]] = []
    perform = EngineMachine._perform

    def watched(self: EngineMachine, action: Action) -> None:
        perform(self, action)
        actions.append(action.kind)

    def check(spec: KernelSpec, arguments: Mapping[str, Any]) -> None:
        checked.append(spec.name)

    monkeypatch.setattr(EngineMachine, "_perform", watched)
    for seed in range(3):
        search_engine(check, lambda *found: True, told.append, seed=seed, database=None)
    rounds = [calls for calls in told if calls]
    # Every call is told, once.
    assert sum(map(len, rounds)) == len(checked) > 0
    # What is no step is told with the step that follows it, or where the history ends.
    steps = sum(kind in STEPS for kind in actions)
    assert steps <= len(rounds) < len(actions)
