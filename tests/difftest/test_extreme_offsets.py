"""Offsets at the ends of int64: differences of them wrap, and must not become addresses or loop bounds."""

from __future__ import annotations

import itertools

import pytest
import torch

import kv_canary as kc
from kv_canary.difftest.runner import check_case
from kv_canary.specs import get_spec

LOW, HIGH = -(1 << 63), (1 << 63) - 1
# More than a tile of any kernel.
TOKENS = 530
ENDS = (LOW, LOW + 1, -1, 0, 3, TOKENS, TOKENS + 1, HIGH - 1, HIGH)
PAIRS = list(itertools.product(ENDS, ENDS))
EVERY_DAY = [f"pair{i}" for i in range(0, len(PAIRS), 4)]


def offsets(pair: tuple[int, int]) -> torch.Tensor:
    return torch.tensor(pair, dtype=torch.int64)


@pytest.mark.every_day(*EVERY_DAY)
@pytest.mark.parametrize("pair", PAIRS)
def test_scatter_and_chain_of_one_segment(pair: tuple[int, int], device: torch.device) -> None:
    flat = torch.arange(TOKENS)
    segment = {"flat": flat, "offsets": offsets(pair), "rows": torch.tensor([1]), "starts": torch.tensor([2])}
    status = torch.zeros(1, dtype=torch.int32)
    pool = torch.zeros(2, 1024, dtype=torch.int32)
    check_case(get_spec("scatter_token_ids"), {**segment, "pool": pool, "status": status}, device=device)
    tails = torch.tensor([5, 7])
    check_case(get_spec("chain_tails"), {**segment, "tails": tails, "status": status}, device=device)


@pytest.mark.every_day(*EVERY_DAY)
@pytest.mark.parametrize("pair", PAIRS)
def test_write_of_one_segment(pair: tuple[int, int], device: torch.device) -> None:
    plan = kc.WritePlan(
        rows=torch.tensor([1]),
        owners=torch.tensor([3]),
        offsets=offsets(pair),
        prefix_lens=torch.tensor([4]),
        seed_slots=torch.tensor([1]),
        num_requests=torch.ones(1, dtype=torch.int32),
    )
    call = {
        "write_plan": plan,
        "input_ids": torch.arange(TOKENS),
        "positions": torch.arange(TOKENS) + 4,
        "out_slots": torch.arange(TOKENS) + 1,
        "endpoint": kc.Endpoint(tag=1, records=torch.zeros(TOKENS + 1, 4, dtype=torch.int64)),
        "tails": torch.tensor([0, 9]),
        "step": torch.tensor([1]),
        "check_positions": torch.ones(1, dtype=torch.int32),
        "violations": kc.ViolationLog.allocate(ring_cap=2 * TOKENS),
        "counters": torch.zeros(6, 2, dtype=torch.int64),
    }
    check_case(get_spec("write"), call, device=device)
