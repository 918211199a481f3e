"""The plain implementation of what finds cached positions and checks them: plan, verify, and the two in one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kv_canary.difftest.naive.records import (
    BAD_SLOT,
    HEAD_OF_CHAIN,
    MASK_32,
    NO_RECORD,
    RETIRED,
    UNCHECKED,
    Record,
    advance,
    count_launch,
    kv_word,
    previous_chain,
    read_record,
    report,
    stores,
)
from kv_canary.specs.structures import Endpoint, ResolvedSlots, VerifyPlan, ViolationLog, WritePlan

CHAIN, POSITION, K, V, TOKEN = 1, 2, 4, 8, 16
UNMAPPED, SLOT_RANGE, NEVER_WRITTEN, FREED = 128, 256, 512, 1024
# A block of resolved slots, whose first entry begins a run.
RUN_ENTRIES = 64
INT32_MAX = (1 << 31) - 1
OVERFLOW, ROW_RANGE, LENGTH_RANGE, LUT_RANGE = 1, 2, 4, 8


def plan(
    *,
    rows: torch.Tensor,
    owners: torch.Tensor | None,
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    table_rows: torch.Tensor | None,
    page_size: int,
    window: int,
    after_write: bool,
    lut: torch.Tensor | None,
    expected_tokens: torch.Tensor | None,
    expected_lens: torch.Tensor | None,
    token_offset: int,
    strides: torch.Tensor | None,
    step: torch.Tensor | None,
    verify_plan: VerifyPlan,
    write_plan: WritePlan,
    status: torch.Tensor,
    entry_offsets: torch.Tensor,
) -> None:
    """Turn a batch's rows and lengths into the entries to verify and the segments to write."""
    found, bits = _find(
        rows,
        owners,
        prefix_lens,
        extend_lens,
        req_to_token,
        table_rows,
        page_size,
        window,
        after_write,
        lut,
        strides,
        step,
        write_plan,
    )
    capacity = verify_plan.slots.shape[0]
    for i, entry in enumerate(found[:capacity]):
        verify_plan.slots[i] = entry.slot
        verify_plan.prev_slots[i] = entry.predecessor
        verify_plan.positions[i] = entry.position
        verify_plan.tokens[i] = _token(expected_tokens, expected_lens, token_offset, entry)
        verify_plan.rows[i] = entry.row
    verify_plan.num_valid[0] = min(len(found), capacity)
    verify_plan.num_requested[0] = len(found)
    status[0] = bits | _bits(found, capacity)


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
    """Check the planned records against their neighbours, their positions and the real K/V bytes."""
    count = min(max(int(verify_plan.num_valid), 0), verify_plan.slots.shape[0])
    for i in range(count):
        entry = Entry(
            slot=int(verify_plan.slots[i]),
            predecessor=int(verify_plan.prev_slots[i]),
            position=int(verify_plan.positions[i]),
            row=int(verify_plan.rows[i]),
        )
        _check(entry, int(verify_plan.tokens[i]), endpoint, anchors, int(step), track_lifetime, violations)
    count_launch(counters, endpoint.tag, count)


def verify_prefixes(
    *,
    rows: torch.Tensor,
    owners: torch.Tensor | None,
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    table_rows: torch.Tensor | None,
    page_size: int,
    window: int,
    lut: torch.Tensor | None,
    expected_tokens: torch.Tensor | None,
    expected_lens: torch.Tensor | None,
    token_offset: int,
    strides: torch.Tensor | None,
    step: torch.Tensor,
    endpoint: Endpoint,
    anchors: torch.Tensor | None,
    track_lifetime: bool,
    laid_out: torch.Tensor | None,
    laid_out_stride: torch.Tensor | None,
    resolved: ResolvedSlots,
    write_plan: WritePlan,
    status: torch.Tensor,
    violations: ViolationLog,
    counters: torch.Tensor,
    entry_offsets: torch.Tensor,
    longest_stride: torch.Tensor,
) -> None:
    """Check every cached position of a batch, straight from the tables."""
    found, bits = _find(
        rows,
        owners,
        prefix_lens,
        extend_lens,
        req_to_token,
        table_rows,
        page_size,
        window,
        False,
        lut,
        strides,
        step,
        write_plan,
    )
    capacity = resolved.entries.shape[0]
    for i, entry in enumerate(found[:capacity]):
        token = _token(expected_tokens, expected_lens, token_offset, entry)
        _check(entry, token, endpoint, anchors, int(step), track_lifetime, violations)
        before = found[i - 1]
        slot, predecessor, position = (min(x, INT32_MAX) for x in (entry.slot, entry.predecessor, entry.position))
        follows = before.request == entry.request and before.position + 1 == entry.position
        resolved.entries[i, 0] = slot
        resolved.entries[i, 1] = position
        if i % RUN_ENTRIES == 0 or not follows:
            resolved.entries[i, 1] = -1 - position
            resolved.runs[i, 0] = predecessor
            resolved.runs[i, 1] = entry.request
    resolved.num_valid[0] = min(len(found), capacity)
    resolved.num_requested[0] = len(found)
    status[0] = bits | _bits(found, capacity)
    count_launch(counters, endpoint.tag, min(len(found), capacity))


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
    """Check again the slots that a batch's cached positions were found in."""
    count = min(max(int(resolved.num_valid), 0), resolved.entries.shape[0])
    slot = predecessor = request = 0
    for i in range(count):
        before, (slot, position) = slot, resolved.entries[i].tolist()
        if position < 0 or i % RUN_ENTRIES == 0:
            predecessor, request = resolved.runs[i].tolist()
        else:
            predecessor = UNCHECKED if before == HEAD_OF_CHAIN else before
        position = -1 - position if position < 0 else position
        row = int(rows[request]) if 0 <= request < rows.shape[0] else 0
        entry = Entry(slot=slot, predecessor=predecessor, position=position, row=row, request=request)
        token = _token(expected_tokens, expected_lens, token_offset, entry)
        _check(entry, token, endpoint, anchors, int(step), track_lifetime, violations)
    count_launch(counters, endpoint.tag, count)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A cached position: where it was found, whose it is, and whether the LUT lacks its slot."""

    slot: int
    predecessor: int
    position: int
    row: int
    request: int = -1
    lacking: bool = False


def _find(
    rows: torch.Tensor,
    owners: torch.Tensor | None,
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    table_rows: torch.Tensor | None,
    page_size: int,
    window: int,
    after_write: bool,
    lut: torch.Tensor | None,
    strides: torch.Tensor | None,
    step: torch.Tensor | None,
    write_plan: WritePlan,
) -> tuple[list[Entry], int]:
    """Write the segments to write; return all entries to verify, and the status bits that requests set."""
    num_rows, num_pages = req_to_token.shape
    max_len = min(num_pages * page_size, (1 << 31) - 1)
    bits = 0
    tokens_before = 0
    found: list[Entry] = []

    def slot_of(row: int, position: int) -> tuple[int, bool]:
        page, lacking = int(req_to_token[row, position // page_size]), False
        slot = page * page_size + position % page_size if page >= 0 else page
        if lut is not None:
            lacking = not 0 <= slot < lut.shape[0]
            slot = BAD_SLOT if lacking else int(lut[slot])
        return (BAD_SLOT if slot < 0 else slot), lacking

    def kept(request: int, position: int, prefix: int) -> bool:
        if strides is None or step is None or int(strides[request]) <= 1:
            return True
        return (position // 16 + int(step)) % int(strides[request]) == 0 or position == prefix - 1

    for request in range(rows.shape[0]):
        row, prefix, extend = int(rows[request]), int(prefix_lens[request]), int(extend_lens[request])
        table_row = row if table_rows is None else int(table_rows[request])
        bad_row = not (0 <= row < 1 << 31 and 0 <= table_row < num_rows)
        bad_extend = not 0 <= extend < 1 << 31
        bad_length = bad_extend or not 0 <= prefix <= max_len
        bits |= ROW_RANGE * bad_row | LENGTH_RANGE * bad_length
        padding = row == 0 or bad_row or bad_length

        seed = HEAD_OF_CHAIN if padding or prefix == 0 else slot_of(table_row, prefix - 1)[0]
        write_plan.rows[request] = 0 if padding else row
        write_plan.owners[request] = row if owners is None else owners[request]
        write_plan.offsets[request] = tokens_before
        write_plan.prefix_lens[request] = prefix
        write_plan.seed_slots[request] = seed
        # The flat inputs hold the tokens of padding too.
        tokens_before += 0 if bad_extend else extend

        if padding:
            continue
        start = 0
        if window > 0:
            start = max(0, prefix + extend - window - 1) if after_write else max(0, prefix - window)
        for position in range(start, prefix):
            if not kept(request, position, prefix):
                continue
            slot, lacking = slot_of(table_row, position)
            if position == 0:
                predecessor = HEAD_OF_CHAIN
            elif position == start:
                predecessor = UNCHECKED
            else:
                predecessor = slot_of(table_row, position - 1)[0]
            entry = Entry(
                slot=slot, predecessor=predecessor, position=position, row=row, request=request, lacking=lacking
            )
            found.append(entry)

    write_plan.offsets[rows.shape[0]] = tokens_before
    write_plan.num_requests[0] = rows.shape[0]
    return found, bits


def lay_out(
    rows: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    table_rows: torch.Tensor | None,
    page_size: int,
    window: int,
    strides: torch.Tensor | None,
    step: torch.Tensor | None,
) -> list[int]:
    """Return how many entries each request has."""
    # What is to be written is of no matter, nor are the slots.
    spare = WritePlan.allocate(write_cap=rows.shape[0])
    found, _ = _find(
        rows,
        None,
        prefix_lens,
        extend_lens,
        req_to_token,
        table_rows,
        page_size,
        window,
        False,
        None,
        strides,
        step,
        spare,
    )
    counts = [0] * rows.shape[0]
    for entry in found:
        counts[entry.request] += 1
    return counts


def _bits(found: list[Entry], capacity: int) -> int:
    """The status bits that entries set."""
    return OVERFLOW * (len(found) > capacity) | LUT_RANGE * any(entry.lacking for entry in found[:capacity])


def _token(expected_tokens: torch.Tensor | None, expected_lens: torch.Tensor | None, offset: int, entry: Entry) -> int:
    """The token that an entry should hold, or -1."""
    if expected_tokens is None or expected_lens is None or not 0 <= entry.request < expected_lens.shape[0]:
        return -1
    token_rows, token_len = expected_tokens.shape
    column = entry.position + offset
    known = 0 < entry.row < token_rows and 0 <= column < min(int(expected_lens[entry.request]), token_len)
    return int(expected_tokens[entry.row, column]) if known else -1


def _check(
    entry: Entry,
    token: int,
    endpoint: Endpoint,
    anchors: torch.Tensor | None,
    step: int,
    track_lifetime: bool,
    violations: ViolationLog,
) -> None:
    """Report what is wrong with an entry."""
    slot, records = entry.slot, endpoint.records
    # A plan holds rows in 32 bits.
    row = (entry.row + (1 << 31)) % (1 << 32) - (1 << 31)
    record: Record = NO_RECORD
    expected_chain = observed_kv = 0

    if slot == 0:
        reasons = UNMAPPED
    elif not stores(endpoint, slot):
        reasons = SLOT_RANGE
    else:
        record = read_record(records, slot)
        identity, chain, kv, writer = record
        if not any(record):
            reasons = NEVER_WRITTEN
        elif track_lifetime and writer & RETIRED:
            reasons = FREED
        else:
            reasons = POSITION * (identity >> 32 != entry.position)
            reasons |= TOKEN * (token >= 0 and identity & MASK_32 != token)
            previous = previous_chain(records, entry.predecessor, row=row, anchors=anchors)
            if previous is not None:
                expected_chain = advance(previous, identity)
                reasons |= CHAIN * (chain != expected_chain)
            # Bytes are where the record says that they were taken, whatever position is expected.
            observed_kv = kv_word(endpoint, slot, identity >> 32)
            if endpoint.k_source is not None:
                reasons |= K * (kv & MASK_32 != observed_kv & MASK_32)
            if endpoint.v_source is not None:
                reasons |= V * (kv >> 32 != observed_kv >> 32)

    if reasons:
        report(
            violations,
            [
                endpoint.tag + 256 * endpoint.group,
                reasons,
                slot,
                row,
                entry.position,
                record[0],
                token,
                record[1],
                expected_chain,
            ]
            + [record[2], observed_kv, record[3], step, entry.predecessor, 0, 0],
        )
