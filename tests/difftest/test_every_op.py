"""Every registered op, generated calls: backends agree to the byte, misuse is refused, files hold the same call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from kv_canary.cases.casefile import check_round_trip
from kv_canary.difftest.misuse import check_misuse, misuses
from kv_canary.difftest.runner import check_case
from kv_canary.difftest.strategies import cases
from kv_canary.specs import all_specs, get_spec

# The interpreter takes longest for the calls of these; where few are asked for, it gets a third of them.
SLOW = (
    "chain_tails",
    "open_step",
    "plan",
    "seal",
    "verify",
    "verify_prefixes",
    "verify_resolved",
    "verify_seals",
    "write",
)
FEW = 30
# Calls of each op that are refused and saved: what these are held against is the spec, and any call has all of it.
OTHERS = 8 if settings.default.max_examples <= FEW else 20


def examples_of(op: str) -> int:
    """Return how many calls of an op are compared."""
    asked = settings.default.max_examples
    return max(1, asked // 3) if op in SLOW and asked <= FEW else asked


@pytest.mark.parametrize("op", all_specs())
def test_backends_agree(op: str, device: torch.device, quick_cases: Callable[[str], Any]) -> None:
    spec = get_spec(op)

    @settings(max_examples=examples_of(op))
    @given(case=quick_cases(op))
    def agree(case: dict[str, Any]) -> None:
        check_case(spec, case, device=device)

    agree()


@pytest.mark.parametrize("op", all_specs())
def test_misuse_is_refused(op: str) -> None:
    spec, tried = get_spec(op), set()

    @settings(max_examples=OTHERS)
    @given(case=cases(op))
    def refuse(case: dict[str, Any]) -> None:
        check_misuse(spec, case)
        tried.update(m.argument.split(".")[0].split("[")[0] for m in misuses(spec, spec.bind(case)))

    refuse()
    assert tried == {*spec.arguments, "no_such"}


@pytest.mark.parametrize("op", all_specs())
def test_a_saved_call_is_the_same_once_loaded(op: str) -> None:
    spec = get_spec(op)

    @settings(max_examples=OTHERS)
    @given(case=cases(op))
    def same(case: dict[str, Any]) -> None:
        check_round_trip(spec, case)

    same()
