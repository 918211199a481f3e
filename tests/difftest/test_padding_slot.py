"""Slot 0 is padding whatever the source: a bias that puts it before the first row is no SLOT_RANGE."""

from __future__ import annotations

import pytest
import torch

import kv_canary as kc


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_token_for_slot_0_of_a_biased_source_is_discarded_silently(backend: str, device: torch.device) -> None:
    source = kc.KvSource(
        layers=(torch.zeros(3, 16, dtype=torch.uint8, device=device),), page_size=1, bytes_per_token=16, slot_bias=1
    )
    records = torch.zeros(4, 4, dtype=torch.int64, device=device)
    log = kc.ViolationLog.allocate(ring_cap=4, device=device)
    counters = torch.zeros(6, 2, dtype=torch.int64, device=device)
    kc.ops.write(
        write_plan=kc.WritePlan(
            rows=torch.tensor([1], device=device),
            owners=torch.tensor([1], device=device),
            offsets=torch.tensor([0, 4], device=device),
            prefix_lens=torch.tensor([0], device=device),
            seed_slots=torch.tensor([-1], device=device),
            num_requests=torch.tensor([1], dtype=torch.int32, device=device),
        ),
        input_ids=torch.tensor([5, 6, 7, 8], device=device),
        positions=torch.arange(4, device=device),
        out_slots=torch.tensor([0, 0, 3, 4], device=device),
        endpoint=kc.Endpoint(tag=1, records=records, k_source=source, v_source=source),
        tails=torch.full((2,), kc.ANCHOR, device=device),
        step=torch.tensor([1], device=device),
        check_positions=torch.ones(1, dtype=torch.int32, device=device),
        violations=log,
        counters=counters,
        backend=backend,
    )
    # Slot 3 is stored, slot 4 is past the pool; both stand behind two discarded tokens in the chain.
    assert int(log.count) == 1
    assert log.ring[0, 1:3].tolist() == [kc.Reason.SLOT_RANGE, 4]
    assert counters[1].tolist() == [1, 1]
    assert records[3, 0].item() == 7 + (2 << 32)
    assert records[:3].eq(0).all()
