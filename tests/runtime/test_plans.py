"""What a plan is of where nobody says."""

from __future__ import annotations

import inspect

import kv_canary as kc


def test_a_plan_is_of_what_is_there_before_the_forward_unless_it_is_asked_for_otherwise() -> None:
    assert inspect.signature(kc.ops.plan).parameters["after_write"].default is False
