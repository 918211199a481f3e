"""write: the reference."""

from __future__ import annotations

import torch

from kv_canary.constants import OWNER_MASK, Reason
from kv_canary.reference.hashing import fingerprint, identity, in_source, stored_position, walk_chains, writer
from kv_canary.reference.records import load_records
from kv_canary.reference.reporting import report
from kv_canary.reference.segments import elements
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
    given_rows: torch.Tensor | None,
    given_lens: torch.Tensor | None,
    track_lifetime: bool,
    ring: bool,
    violations: ViolationLog,
    counters: torch.Tensor,
    tile_sums: torch.Tensor,
    slot_marks: torch.Tensor,
) -> None:
    """Record the new tokens in the slots that the forward wrote them to; see specs/write.py."""
    records, k_source, v_source = endpoint.records, endpoint.k_source, endpoint.v_source
    num_slots, num_tokens = len(records), len(input_ids)

    # Which request writes which tokens, and each token's chain: the request's tail, advanced over its tokens.
    n = min(max(int(write_plan.num_requests), 0), len(write_plan.rows))
    rows, offsets = write_plan.rows[:n], write_plan.offsets[: n + 1].clamp(0, num_tokens)
    live = (rows > 0) & (rows < len(tails))
    lengths = torch.where(live, offsets.diff().clamp(min=0), 0)
    request, token = elements(offsets[:-1], lengths)
    input_id, position, slots = input_ids.take(token), positions.take(token), out_slots.take(token)
    identities = identity(input_id, position)
    before = torch.zeros_like(rows).masked_scatter(live, tails[rows[live]])
    chains = walk_chains(before, lengths, identities)

    if given_rows is not None and given_lens is not None:
        _check_given(write_plan, live, lengths, given_rows, given_lens, endpoint.site, step, violations)
    _check_seeds(write_plan, lengths.nonzero()[:, 0], endpoint, tails, step, violations)

    in_range = (slots >= 0) & (slots < num_slots) & in_source(k_source, slots) & in_source(v_source, slots)
    # Slot 0 is padding, also where a bias puts it before a source's first row.
    storable = in_range & (slots != 0)
    # Of several tokens for one slot the last one is stored.
    last = _last_with_slot(out_slots, end=int(offsets[n])).take(token)
    first_come = storable & (last > token)
    stored = storable & ~first_come
    owners = write_plan.owners.take(request)
    covered = slots.masked_select(storable), stored_position(identities).masked_select(storable)
    k_print, v_print = fingerprint(k_source, *covered), fingerprint(v_source, *covered)
    kv = torch.zeros_like(slots).masked_scatter(storable, k_print | (v_print << 32))
    old = load_records(records, slots, stored)

    expected_position = (write_plan.prefix_lens[:n] - write_plan.offsets[:n]).take(request) + token
    wrong_position = (position != expected_position) & (check_positions != 0)
    wrong_token = torch.zeros_like(stored)
    expected_input = torch.full_like(slots, -1)
    if expected_input_ids is not None:
        expected_input = expected_input_ids.take(token)
        wrong_token = input_id != expected_input
    taken, taker = _owners_of(write_plan, live, offsets, last) if bool(first_come.any()) else (first_come, owners)
    own = taken & ((taker & OWNER_MASK) == (owners & OWNER_MASK))
    equal = taken & (identity(input_ids.take(last), positions.take(last)) == identities)
    chain_at = torch.zeros_like(input_ids).index_copy(0, token, chains)
    same = (own & (equal | ring)) | (equal & (chain_at.take(last) == chains))
    overwrite = (first_come & track_lifetime & ~same) | (
        stored
        & track_lifetime
        & old.written
        & (old.writer >= 0)
        & ((old.writer & OWNER_MASK) != (owners & OWNER_MASK))
        & ((old.identity != identities) | (old.chain != chains))
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
        site=endpoint.site,
        reasons=reasons,
        slot=slots,
        row=rows.take(request),
        position=expected_position,
        identity=identities,
        token=expected_input,
        chain=chains,
        kv=kv,
        writer=torch.where(first_come, writer(step, taker), old.writer),
        step=step,
        previous=write_plan.seed_slots.take(request),
        owner=owners,
    )
    new = torch.stack([identities, chains, kv, writer(step, owners)], dim=1)
    written = stored.nonzero()[:, 0]
    records[slots.take(written)] = new.index_select(0, written)
    counters[endpoint.tag, 0] += 1
    counters[endpoint.tag, 1] += len(written)


def _last_with_slot(slots: torch.Tensor, *, end: int) -> torch.Tensor:
    """Return int64 [tokens]: of each flat input before `end` the last one before it that has its slot; else itself."""
    last = torch.arange(len(slots), device=slots.device)
    ordered, place = slots[:end].sort(stable=True)
    is_last = torch.ones_like(ordered, dtype=torch.bool)
    is_last[:-1] = ordered[:-1] != ordered[1:]
    run = is_last.cumsum(0) - is_last.long()
    last[place] = place[is_last].take(run)
    return last


def _owners_of(
    plan: WritePlan, live: torch.Tensor, offsets: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which of `tokens` are of a live request, and its owner; 0 for the others."""
    owned, owners = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros_like(tokens)
    for r in live.nonzero()[:, 0].tolist():
        mine = (tokens >= offsets[r]) & (tokens < offsets[r + 1])
        owned, owners = owned | mine, torch.where(mine, plan.owners[r], owners)
    return owned, owners


def _check_given(
    write_plan: WritePlan,
    live: torch.Tensor,
    lengths: torch.Tensor,
    given_rows: torch.Tensor,
    given_lens: torch.Tensor,
    site: int,
    step: torch.Tensor,
    violations: ViolationLog,
) -> None:
    """Report BATCH for each live request whose row or length is not the one that the model is given."""
    n = min(len(live), len(given_rows))
    rows, length = write_plan.rows[:n], write_plan.prefix_lens[:n] + lengths[:n]
    report(
        violations,
        live[:n] & ((given_rows[:n] != rows) | (given_lens[:n] != length)),
        site=site,
        reasons=int(Reason.BATCH),
        row=rows,
        position=length,
        token=-1,
        step=step,
        previous=given_rows[:n],
        owner=write_plan.owners[:n],
        given=given_lens[:n],
    )


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
    record = load_records(records, seeds, readable)
    expected = tails[rows]
    report(
        violations,
        record.written & (record.chain != expected),
        site=endpoint.site,
        reasons=int(Reason.PREFIX),
        slot=seeds,
        row=rows,
        position=prefix - 1,
        identity=record.identity,
        token=-1,
        chain=record.chain,
        expected_chain=expected,
        kv=record.kv,
        writer=record.writer,
        step=step,
        previous=seeds,
        owner=write_plan.owners[request],
    )
