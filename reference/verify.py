"""verify: the reference."""

from __future__ import annotations

import torch

from kv_canary.constants import ANCHOR, HEAD_OF_CHAIN, Reason
from kv_canary.reference.hashing import (
    LOW_32,
    fingerprint,
    in_source,
    next_chain,
    shift_right,
    stored_position,
    stored_token,
)
from kv_canary.reference.reporting import report
from kv_canary.specs.structures import Endpoint, VerifyPlan, ViolationLog


def verify(
    *,
    verify_plan: VerifyPlan,
    endpoint: Endpoint,
    anchors: torch.Tensor | None,
    step: torch.Tensor,
    track_lifetime: bool,
    violations: ViolationLog,
    counters: torch.Tensor,
) -> None:
    """Check the planned records against neighbours, positions and K/V bytes; see specs/verify.py."""
    records, k_source, v_source = endpoint.records, endpoint.k_source, endpoint.v_source
    num_slots = len(records)
    n = min(max(int(verify_plan.num_valid), 0), len(verify_plan.slots))
    slots, previous = verify_plan.slots[:n], verify_plan.prev_slots[:n]
    positions, tokens, rows = verify_plan.positions[:n], verify_plan.tokens[:n], verify_plan.rows[:n].to(torch.int64)

    unmapped = slots == 0
    in_range = (slots >= 0) & (slots < num_slots) & in_source(k_source, slots) & in_source(v_source, slots)
    readable = in_range & ~unmapped
    record = torch.zeros(n, 4, dtype=torch.int64, device=records.device)
    record[readable] = records[slots[readable]]
    never_written = readable & (record == 0).all(dim=1)
    freed = readable & ~never_written & (record[:, 3] < 0) & track_lifetime
    checked = readable & ~never_written & ~freed

    identities, chains, kv = record[:, 0], record[:, 1], record[:, 2]
    wrong_position = checked & (stored_position(identities) != positions)
    wrong_token = checked & (tokens >= 0) & (stored_token(identities) != tokens)

    # The predecessor's chain: from its record, or at the head of a chain from the row's anchor.
    head = previous == HEAD_OF_CHAIN
    previous_chain = torch.full_like(slots, ANCHOR)
    if anchors is not None:
        anchored = head & (rows > 0) & (rows < len(anchors))
        previous_chain[anchored] = anchors[rows[anchored]]
    readable_previous = (previous > 0) & (previous < num_slots)
    predecessor = torch.zeros_like(record)
    predecessor[readable_previous] = records[previous[readable_previous]]
    readable_previous &= (predecessor != 0).any(dim=1)
    previous_chain[readable_previous] = predecessor[readable_previous, 1]
    chain_checked = checked & (head | readable_previous)
    expected_chain = torch.where(chain_checked, next_chain(previous_chain, identities), 0)
    wrong_chain = chain_checked & (chains != expected_chain)

    observed_kv = torch.zeros_like(kv)
    where = stored_position(identities[checked])
    k_print = fingerprint(k_source, slots[checked], where)
    v_print = fingerprint(v_source, slots[checked], where)
    observed_kv[checked] = k_print | (v_print << 32)
    wrong_k = checked & ((kv & LOW_32) != (observed_kv & LOW_32)) & (k_source is not None)
    wrong_v = checked & (shift_right(kv, 32) != shift_right(observed_kv, 32)) & (v_source is not None)

    reasons = torch.zeros_like(slots)
    for holds, reason in (
        (unmapped, Reason.UNMAPPED),
        (~unmapped & ~in_range, Reason.SLOT_RANGE),
        (never_written, Reason.NEVER_WRITTEN),
        (freed, Reason.FREED),
        (wrong_position, Reason.POSITION),
        (wrong_token, Reason.TOKEN),
        (wrong_chain, Reason.CHAIN),
        (wrong_k, Reason.K),
        (wrong_v, Reason.V),
    ):
        reasons += torch.where(holds, int(reason), 0)

    report(
        violations,
        reasons != 0,
        {
            0: int(endpoint.tag),
            1: reasons,
            2: slots,
            3: rows,
            4: positions,
            5: identities,
            6: tokens,
            7: chains,
            8: expected_chain,
            9: kv,
            10: observed_kv,
            11: record[:, 3],
            12: step,
            13: previous,
        },
    )
    counters[endpoint.tag, 0] += 1
    counters[endpoint.tag, 1] += n
