"""verify_resolved: the reference."""

from __future__ import annotations

import torch

from kv_canary.reference.plan import expected_tokens_of
from kv_canary.reference.verify import verify
from kv_canary.specs.structures import Endpoint, ResolvedSlots, VerifyPlan, ViolationLog


def verify_resolved(
    *,
    rows: torch.Tensor,
    expected_tokens: torch.Tensor | None,
    expected_lens: torch.Tensor | None,
    token_offset: int,
    resolved: ResolvedSlots,
    endpoint: Endpoint,
    anchors: torch.Tensor | None,
    step: torch.Tensor,
    track_lifetime: bool,
    violations: ViolationLog,
    counters: torch.Tensor,
) -> None:
    """Check again the slots that a forward's prefixes were found in; see specs/verify_resolved.py."""
    slots, previous, positions, request = resolved.unfold()
    known = (request >= 0) & (request < len(rows))
    row, tokens = torch.zeros_like(slots), torch.full_like(slots, -1)
    row[known] = rows[request[known]]
    tokens[known] = expected_tokens_of(
        expected_tokens, expected_lens, request[known], row[known], positions[known], token_offset
    )
    verify(
        verify_plan=VerifyPlan(
            slots=slots,
            prev_slots=previous,
            positions=positions,
            tokens=tokens,
            rows=row.to(torch.int32),
            num_valid=resolved.num_valid,
            num_requested=resolved.num_requested,
        ),
        endpoint=endpoint,
        anchors=anchors,
        step=step,
        track_lifetime=track_lifetime,
        violations=violations,
        counters=counters,
    )
