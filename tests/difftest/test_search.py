"""How cases are searched: what counts as one, and that all of what was drawn is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kv_canary.cases.comparison import Mismatch, Outcome
from kv_canary.difftest.machine import EngineMachine
from kv_canary.difftest.search import search_engine, search_rounds
from kv_canary.difftest.simulator import STEPS, Action
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


@pytest.mark.long
def test_rounds_are_told_whole_and_end_at_what_fails() -> None:
    checked: list[str] = []
    told: list[list[frozenset[str]]] = []

    def check(spec: KernelSpec, arguments: Mapping[str, Any]) -> Mismatch | None:
        checked.append(spec.name)
        return Mismatch(Outcome.BYTES_DIFFER, op=spec.name, backend="triton") if spec.name == "write" else None

    search_rounds(check, lambda *found: False, told.append, seed=3, database=None)
    assert sum(map(len, told)) == len(checked) > checked.count("write") > 1
    for calls in (checked, told):
        calls.clear()
    search_rounds(check, lambda *found: True, told.append, seed=3, database=None)
    # The smallest round that fails comes last, and nothing is checked behind what failed.
    assert checked[-1] == "write"
    assert len(checked) < sum(map(len, told))
