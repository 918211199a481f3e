"""Calls at the bounds of kernels' inner loops."""

from __future__ import annotations

import pytest
import torch

from kv_canary.difftest.runner import check_case
from kv_canary.difftest.strategies.large import large_cases
from kv_canary.specs import get_spec

COUNTS = {
    "write": 21,
    "chain_tails": 6,
    "scatter_token_ids": 7,
    "seal": 2,
    "verify_seals": 2,
    "plan": 5,
    "verify_prefixes": 8,
    "open_step": 9,
    "verify_resolved": 7,
}


@pytest.mark.parametrize(("op", "number"), [(op, number) for op, count in COUNTS.items() for number in range(count)])
def test_a_large_call_is_that_of_the_reference(op: str, number: int, device: torch.device) -> None:
    cases = list(large_cases(op, device))
    assert len(cases) == COUNTS[op]
    # That a call gives the same again is tried with drawn ones; where Triton is interpreted, these take seconds each. A
    # write has marks of slots besides, which it believes or not by what they held before.
    check_case(get_spec(op), cases[number], device=device, again=device.type == "cuda" or op == "write")
    assert get_spec(op).has_one_outcome(get_spec(op).bind(cases[number]))


def test_they_go_round_the_inner_loops_three_times(device: torch.device) -> None:
    from kv_canary.kernels.batches import MAX_BLOCK_REQUESTS
    from kv_canary.kernels.launching import tiles_at_once
    from kv_canary.kernels.write import MAX_REQUESTS, NARROW_TILE
    from kv_canary.specs.write import TILE_TOKENS

    plans = [case["write_plan"] for case in large_cases("write", device)]
    at_once = tiles_at_once(device)
    longest = [int(plan.offsets.diff().max()) for plan in plans]
    assert longest[:3] == [2 * at_once * NARROW_TILE + 1, 2 * at_once * TILE_TOKENS + 1, 1]
    assert max(len(plan.rows) for plan in plans) > 2 * MAX_REQUESTS
    assert len(next(large_cases("plan", device))["rows"]) > 2 * MAX_BLOCK_REQUESTS
