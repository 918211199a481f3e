"""A third implementation of every op: Python integers and loops, one request, one entry, one token at a time.

It was written from the text of the design alone, knowing neither the reference nor the kernels, and shares nothing
with them, not even their constants: it finds what those two understand alike and wrongly. Every function takes exactly
the arguments of its op's spec, CPU tensors all, and writes the outputs in place; scratch is left as it is.
Violations stand in the ring in request or entry order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from kv_canary.difftest.naive.records import (
    ANCHOR,
    MASK_64,
    NO_RECORD,
    RETIRED,
    advance,
    count_launch,
    identity_of,
    kv_word,
    read_record,
    report,
    segment_of,
    signed,
    store_record,
    stores,
    writer_of,
)
from kv_canary.difftest.naive.seals import seal, verify_seals
from kv_canary.difftest.naive.verify import lay_out, plan, verify, verify_prefixes, verify_resolved
from kv_canary.specs.structures import Endpoint, ViolationLog, WritePlan

WRITE_TOKEN, WRITE_POSITION, SLOT_RANGE, OVERWRITE, PREFIX, BATCH = 32, 64, 256, 2048, 4096, 8192
ROW_RANGE, LENGTH_RANGE = 2, 4


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
    """Record the new tokens in the slots that the forward wrote them to."""
    records = endpoint.records
    num_requests = min(max(int(write_plan.num_requests), 0), write_plan.rows.shape[0])
    offsets = write_plan.offsets.tolist()
    seeds = [int(seed) for seed in write_plan.seed_slots]
    # All of them before anything is stored.
    seed_records = [read_record(records, seed) if 0 < seed < records.shape[0] else NO_RECORD for seed in seeds]
    stored = 0
    # Who has each token, each token's record but for the bytes, and which token has each slot in the end.
    num_tokens, whose, record_of = input_ids.shape[0], dict[int, int](), dict[int, tuple[int, int]]()
    last_in = dict[int, int]()
    for request in range(num_requests):
        if 0 < (row := int(write_plan.rows[request])) < tails.shape[0]:
            chain = int(tails[row]) & MASK_64
            for j, _ in segment_of(offsets, request, num_tokens):
                identity = identity_of(int(input_ids[j]), int(positions[j]))
                chain = advance(chain, identity)
                whose[j], record_of[j] = int(write_plan.owners[request]), (identity, chain)
    for j in range(min(max(offsets[num_requests], 0), num_tokens)):
        last_in[int(out_slots[j])] = j

    for request in range(num_requests):
        row, owner, prefix = (int(x[request]) for x in (write_plan.rows, write_plan.owners, write_plan.prefix_lens))
        tokens = segment_of(offsets, request, num_tokens)
        if not 0 < row < tails.shape[0]:
            continue
        length = signed(prefix + len(tokens))
        if given_rows is not None and given_lens is not None and request < given_rows.shape[0]:
            given = int(given_rows[request]), int(given_lens[request])
            if given != (row, length):
                report(
                    violations,
                    [endpoint.tag + 256 * endpoint.group, BATCH, 0, row, length, 0, -1, 0, 0, 0, 0, 0]
                    + [int(step), given[0], owner, given[1]],
                )
        if not tokens:
            continue
        tail = int(tails[row]) & MASK_64
        seed, seed_record = seeds[request], seed_records[request]

        if prefix > 0 and any(seed_record) and seed_record[1] != tail:
            report(
                violations,
                [
                    endpoint.tag + 256 * endpoint.group,
                    PREFIX,
                    seed,
                    row,
                    prefix - 1,
                    seed_record[0],
                    -1,
                    seed_record[1],
                    tail,
                ]
                + [seed_record[2], 0, seed_record[3], int(step), seed, owner, 0],
            )

        chain = tail
        for j, k in tokens:
            token, position, slot = int(input_ids[j]), int(positions[j]), int(out_slots[j])
            expected_position = signed(prefix + k)
            expected_token = -1 if expected_input_ids is None else int(expected_input_ids[j])
            identity = identity_of(token, position)
            chain = advance(chain, identity)
            kv = replaced_writer = 0

            reasons = WRITE_POSITION * (int(check_positions) != 0 and position != expected_position)
            reasons |= WRITE_TOKEN * (expected_input_ids is not None and token != expected_token)
            if slot != 0 and not stores(endpoint, slot):
                reasons |= SLOT_RANGE
            elif slot != 0:
                old_identity, old_chain, _, replaced_writer = old = read_record(records, slot)
                kv = kv_word(endpoint, slot, identity >> 32)
                if (last := last_in.get(slot, j)) > j:
                    # Another token of this forward has the slot in the end.
                    taker = whose.get(last)
                    same = taker is not None and record_of[last] == (identity, chain)
                    if taker is not None and (taker ^ owner) % (1 << 24) == 0:
                        same = same or ring or record_of[last][0] == identity
                    reasons |= OVERWRITE * (track_lifetime and not same)
                    replaced_writer = writer_of(int(step), taker or 0)
                elif track_lifetime and any(old) and not replaced_writer & RETIRED:
                    another_owner = (replaced_writer ^ owner) % (1 << 24) != 0
                    reasons |= OVERWRITE * (another_owner and (old_identity, old_chain) != (identity, chain))
                if last <= j:
                    store_record(records, slot, [identity, chain, kv, writer_of(int(step), owner)])
                    stored += 1

            if reasons:
                report(
                    violations,
                    [
                        endpoint.tag + 256 * endpoint.group,
                        reasons,
                        slot,
                        row,
                        expected_position,
                        identity,
                        expected_token,
                        chain,
                        0,
                    ]
                    + [kv, 0, replaced_writer, int(step), seed, owner, 0],
                )
    count_launch(counters, endpoint.tag, stored)


def move(
    *,
    src: torch.Tensor,
    dst: torch.Tensor,
    owner: int,
    step: torch.Tensor,
    records: tuple[torch.Tensor, ...],
    staged: torch.Tensor,
) -> None:
    """Carry records along when KV is copied from slot to slot."""
    for buffer in records:
        num_slots = buffer.shape[0]
        # All of them before anything is stored.
        sources = [read_record(buffer, int(slot)) if 0 < int(slot) < num_slots else NO_RECORD for slot in src]
        for slot, (identity, chain, kv, writer) in zip(dst.tolist(), sources, strict=True):
            if 0 < slot < num_slots:
                carried = any((identity, chain, kv, writer)) and not writer & RETIRED
                store_record(buffer, slot, [identity, chain, kv, writer_of(int(step), owner)] if carried else NO_RECORD)


def retire(*, slots: torch.Tensor, owner: torch.Tensor, step: torch.Tensor, records: tuple[torch.Tensor, ...]) -> None:
    """Mark the records of freed slots, so that a later read of them is seen."""
    for buffer in records:
        for slot in slots.tolist():
            if 0 < slot < buffer.shape[0] and any(record := read_record(buffer, slot)):
                store_record(buffer, slot, [*record[:3], RETIRED | writer_of(int(step), int(owner))])


def scatter_token_ids(
    *,
    flat: torch.Tensor,
    offsets: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor | None,
    pool: torch.Tensor,
    status: torch.Tensor,
) -> None:
    """Put each request's new tokens into its row of the token pool."""
    num_rows, max_len = pool.shape
    bits = 0
    for request, row in enumerate(rows.tolist()):
        start = 0 if starts is None else int(starts[request])
        if not 0 <= row < num_rows:
            bits |= ROW_RANGE
        elif row != 0 and start >= 0:
            for j, k in segment_of(offsets.tolist(), request, flat.shape[0]):
                if start + k < max_len:
                    pool[row, start + k] = signed(int(flat[j]) << 32) >> 32
    status[0] = bits


def chain_tails(
    *,
    flat: torch.Tensor,
    offsets: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    anchors: torch.Tensor | None,
    tails: torch.Tensor,
    pool: torch.Tensor | None,
    status: torch.Tensor,
) -> None:
    """Advance each row's chain over the request's own tokens, and keep these."""
    bits = 0
    for request, (row, start) in enumerate(zip(rows.tolist(), starts.tolist(), strict=True)):
        bad_row = not 0 <= row < tails.shape[0]
        bits |= ROW_RANGE * bad_row | LENGTH_RANGE * (start < 0)
        if row == 0 or bad_row or start < 0:
            continue
        anchor = ANCHOR if anchors is None else int(anchors[row])
        chain = anchor if start == 0 else int(tails[row])
        for j, k in segment_of(offsets.tolist(), request, flat.shape[0]):
            chain = advance(chain, identity_of(int(flat[j]), start + k))
            if pool is not None and start + k < pool.shape[1]:
                pool[row, start + k] = signed(int(flat[j]) << 32) >> 32
        tails[row] = signed(chain)
    status[0] = bits


def open_step(
    *,
    words: torch.Tensor,
    copy: torch.Tensor,
    flat: torch.Tensor,
    offsets: torch.Tensor,
    advance_rows: torch.Tensor,
    starts: torch.Tensor,
    anchors: torch.Tensor | None,
    tails: torch.Tensor,
    pool: torch.Tensor | None,
    status: torch.Tensor,
    rows: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    table_rows: torch.Tensor | None,
    page_size: int,
    window: int,
    strides: torch.Tensor | None,
    step: torch.Tensor | None,
    entry_offsets: torch.Tensor,
    longest_stride: torch.Tensor,
) -> None:
    """Take in the numbers of a step, advance chains, and lay the batch out."""
    for i, word in enumerate(words.tolist()):
        copy[i] = word
    chain_tails(
        flat=flat,
        offsets=offsets,
        rows=advance_rows,
        starts=starts,
        anchors=anchors,
        tails=tails,
        pool=pool,
        status=status,
    )
    counts = lay_out(rows, prefix_lens, extend_lens, req_to_token, table_rows, page_size, window, strides, step)
    for request in range(rows.shape[0] + 1):
        entry_offsets[request] = sum(counts[:request])
    longest_stride[0] = max([1] if strides is None else [1, *strides.tolist()])


IMPLEMENTATIONS: Mapping[str, Callable[..., None]] = MappingProxyType(
    {
        each.__name__: each
        for each in (
            *(plan, verify, verify_prefixes, verify_resolved),
            *(write, move, retire, scatter_token_ids, chain_tails, open_step),
            *(seal, verify_seals),
        )
    }
)
