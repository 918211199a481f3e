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
from kv_canary.reference.records import load_records
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
    record = load_records(records, slots, readable)
    never_written = readable & ~record.written
    freed = readable & ~never_written & (record.writer < 0) & track_lifetime
    checked = readable & ~never_written & ~freed

    stored_at = stored_position(record.identity)
    wrong_position = checked & (stored_at != positions)
    wrong_token = checked & (tokens >= 0) & (stored_token(record.identity) != tokens)

    # The predecessor's chain: from its record, or at the head of a chain from the row's anchor.
    head = previous == HEAD_OF_CHAIN
    previous_chain = torch.full_like(slots, ANCHOR)
    if anchors is not None:
        anchored = head & (rows > 0) & (rows < len(anchors))
        previous_chain[anchored] = anchors[rows[anchored]]
    predecessor = load_records(records, previous, (previous > 0) & (previous < num_slots))
    known = predecessor.written
    previous_chain = torch.where(known, predecessor.chain, previous_chain)
    chain_checked = checked & (head | known)
    expected_chain = torch.where(chain_checked, next_chain(previous_chain, record.identity), 0)
    wrong_chain = chain_checked & (record.chain != expected_chain)

    covered = slots.masked_select(checked), stored_at.masked_select(checked)
    k_print, v_print = fingerprint(k_source, *covered), fingerprint(v_source, *covered)
    observed_kv = torch.zeros_like(slots).masked_scatter(checked, k_print | (v_print << 32))
    wrong_k = checked & ((record.kv & LOW_32) != (observed_kv & LOW_32)) & (k_source is not None)
    wrong_v = checked & (shift_right(record.kv, 32) != shift_right(observed_kv, 32)) & (v_source is not None)

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
        site=endpoint.site,
        reasons=reasons,
        slot=slots,
        row=rows,
        position=positions,
        identity=record.identity,
        token=tokens,
        chain=record.chain,
        expected_chain=expected_chain,
        kv=record.kv,
        observed_kv=observed_kv,
        writer=record.writer,
        step=step,
        previous=previous,
    )
    counters[endpoint.tag, 0] += 1
    counters[endpoint.tag, 1] += n
