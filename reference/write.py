"""write: the reference."""

from __future__ import annotations

import torch

from kv_canary.constants import OWNER_MASK, Reason
from kv_canary.reference.hashing import LOW_32, fingerprint, identity, in_source, walk_chain, writer
from kv_canary.reference.reporting import report
from kv_canary.specs.structures import Endpoint, ViolationLog, WritePlan


def write(
    *,
    write_plan: WritePlan,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    out_slots: torch.Tensor,
    endpoint: Endpoint,
    tails: torch.Tensor,
    step: torch.Tensor,
    check_positions: torch.Tensor,
    expected_input_ids: torch.Tensor | None,
    track_lifetime: bool,
    violations: ViolationLog,
    counters: torch.Tensor,
    tile_sums: torch.Tensor,
) -> None:
    """Record the new tokens in the slots that the forward wrote them to; see specs/write.py."""
    records, k_source, v_source = endpoint.records, endpoint.k_source, endpoint.v_source
    num_slots, num_tokens = len(records), len(input_ids)

    # Which request writes which tokens, and each token's chain: the request's tail, advanced over its tokens.
    request_parts, token_parts, chain_parts = [], [], []
    n = min(max(int(write_plan.num_requests), 0), len(write_plan.rows))
    plan_rows, offsets, plan_tails = write_plan.rows[:n].tolist(), write_plan.offsets[: n + 1].tolist(), tails.tolist()
    for r, row in enumerate(plan_rows):
        first, last = max(offsets[r], 0), min(offsets[r + 1], num_tokens)
        if not 0 < row < len(tails) or first >= last:
            continue
        tokens = torch.arange(first, last, device=input_ids.device)
        request_parts.append(torch.full_like(tokens, r))
        token_parts.append(tokens)
        chain_parts.append(walk_chain(plan_tails[row], identity(input_ids[tokens], positions[tokens])))
    none = torch.zeros(0, dtype=torch.int64, device=input_ids.device)
    request, token = torch.cat([none, *request_parts]), torch.cat([none, *token_parts])
    chains = torch.tensor([c for part in chain_parts for c in part], dtype=torch.int64, device=input_ids.device)

    _check_seeds(write_plan, request.unique(), endpoint, tails, step, violations)

    slots, identities = out_slots[token], identity(input_ids[token], positions[token])
    in_range = (slots >= 0) & (slots < num_slots) & in_source(k_source, slots) & in_source(v_source, slots)
    # Slot 0 is padding, also where a bias puts it before a source's first row.
    stored = in_range & (slots != 0)
    owners = write_plan.owners[request]
    where = positions[token][stored] & LOW_32
    kv = torch.zeros_like(slots)
    k_print = fingerprint(k_source, slots[stored], where)
    v_print = fingerprint(v_source, slots[stored], where)
    kv[stored] = k_print | (v_print << 32)
    old = torch.zeros(len(slots), 4, dtype=torch.int64, device=records.device)
    old[stored] = records[slots[stored]]

    expected_position = write_plan.prefix_lens[request] + token - write_plan.offsets[request]
    wrong_position = (positions[token] != expected_position) & (check_positions != 0)
    wrong_token = torch.zeros_like(stored)
    expected_input = torch.full_like(slots, -1)
    if expected_input_ids is not None:
        expected_input = expected_input_ids[token]
        wrong_token = input_ids[token] != expected_input
    overwrite = (
        stored
        & track_lifetime
        & (old != 0).any(dim=1)
        & (old[:, 3] >= 0)
        & ((old[:, 3] & OWNER_MASK) != (owners & OWNER_MASK))
        & ((old[:, 0] != identities) | (old[:, 1] != chains))
    )
    reasons = torch.zeros_like(slots)
    for holds, reason in (
        (~in_range & (slots != 0), Reason.SLOT_RANGE),
        (wrong_position, Reason.WRITE_POSITION),
        (wrong_token, Reason.WRITE_TOKEN),
        (overwrite, Reason.OVERWRITE),
    ):
        reasons += torch.where(holds, int(reason), 0)
    report(
        violations,
        reasons != 0,
        {
            0: int(endpoint.tag),
            1: reasons,
            2: slots,
            3: write_plan.rows[request],
            4: expected_position,
            5: identities,
            6: expected_input,
            7: chains,
            9: kv,
            11: old[:, 3],
            12: step,
            13: write_plan.seed_slots[request],
            14: owners,
        },
    )
    new = torch.stack([identities, chains, kv, writer(step, owners)], dim=1)
    records[slots[stored]] = new[stored]
    counters[endpoint.tag, 0] += 1
    counters[endpoint.tag, 1] += int(stored.sum())


def _check_seeds(
    write_plan: WritePlan,
    request: torch.Tensor,
    endpoint: Endpoint,
    tails: torch.Tensor,
    step: torch.Tensor,
    violations: ViolationLog,
) -> None:
    """Report PREFIX for each request, of those with tokens, whose seed record's chain is not its row's tail."""
    records = endpoint.records
    rows, seeds, prefix = write_plan.rows[request], write_plan.seed_slots[request], write_plan.prefix_lens[request]
    readable = (prefix > 0) & (seeds > 0) & (seeds < len(records))
    record = torch.zeros(len(request), 4, dtype=torch.int64, device=records.device)
    record[readable] = records[seeds[readable]]
    expected = tails[rows]
    report(
        violations,
        readable & (record != 0).any(dim=1) & (record[:, 1] != expected),
        {
            0: int(endpoint.tag),
            1: int(Reason.PREFIX),
            2: seeds,
            3: rows,
            4: prefix - 1,
            5: record[:, 0],
            6: -1,
            7: record[:, 1],
            8: expected,
            9: record[:, 2],
            11: record[:, 3],
            12: step,
            13: seeds,
            14: write_plan.owners[request],
        },
    )
