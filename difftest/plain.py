"""A third implementation of every op: Python integers and loops, one request, one entry, one token at a time.

It was written from the text of the design alone, knowing neither the reference nor the kernels, and shares nothing
with them, not even their constants: it finds what those two understand alike and wrongly. Every function takes exactly
the arguments of its op's spec, CPU tensors all, and writes the outputs in place; scratch is left as it is.
Violations stand in the ring in request or entry order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch

from kv_canary.specs.structures import Endpoint, KvSource, VerifyPlan, ViolationLog, WritePlan

MASK_32 = (1 << 32) - 1
MASK_64 = (1 << 64) - 1
ANCHOR = 0x6B765F63616E6172
MULTIPLIER = 0x9E3779B97F4A7C15
RETIRED = 1 << 63
NO_RECORD = (0, 0, 0, 0)

CHAIN, POSITION, K, V, TOKEN, WRITE_TOKEN, WRITE_POSITION = 1, 2, 4, 8, 16, 32, 64
UNMAPPED, SLOT_RANGE, NEVER_WRITTEN, FREED, OVERWRITE, PREFIX = 128, 256, 512, 1024, 2048, 4096
OVERFLOW, ROW_RANGE, LENGTH_RANGE, LUT_RANGE = 1, 2, 4, 8
HEAD_OF_CHAIN, UNCHECKED, BAD_SLOT = -1, -2, -3

Record = Sequence[int]


def plan(
    *,
    rows: torch.Tensor,
    owners: torch.Tensor | None,
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    req_to_token: torch.Tensor,
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
    num_rows, max_len = req_to_token.shape
    bits = 0
    tokens_before = 0
    # (slot, predecessor, position, token, row, whether the LUT lacks the slot)
    entries: list[tuple[int, int, int, int, int, bool]] = []

    def slot_of(row: int, position: int) -> tuple[int, bool]:
        slot, lacking = int(req_to_token[row, position]), False
        if lut is not None:
            lacking = not 0 <= slot < lut.shape[0]
            slot = BAD_SLOT if lacking else int(lut[slot])
        return (BAD_SLOT if slot < 0 else slot), lacking

    def token_of(request: int, row: int, position: int) -> int:
        if expected_tokens is None or expected_lens is None:
            return -1
        token_rows, token_len = expected_tokens.shape
        column = position + token_offset
        known = row < token_rows and 0 <= column < min(int(expected_lens[request]), token_len)
        return int(expected_tokens[row, column]) if known else -1

    def kept(request: int, position: int, prefix: int) -> bool:
        if strides is None or step is None or int(strides[request]) <= 1:
            return True
        return (position // 16 + int(step)) % int(strides[request]) == 0 or position == prefix - 1

    for request in range(rows.shape[0]):
        row, prefix, extend = int(rows[request]), int(prefix_lens[request]), int(extend_lens[request])
        bad_row = not 0 <= row < num_rows
        bad_extend = not 0 <= extend < 1 << 31
        bad_length = bad_extend or not 0 <= prefix <= max_len
        bits |= ROW_RANGE * bad_row | LENGTH_RANGE * bad_length
        padding = row == 0 or bad_row or bad_length

        seed = HEAD_OF_CHAIN if padding or prefix == 0 else slot_of(row, prefix - 1)[0]
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
            slot, lacking = slot_of(row, position)
            if position == 0:
                predecessor = HEAD_OF_CHAIN
            elif position == start:
                predecessor = UNCHECKED
            else:
                predecessor = slot_of(row, position - 1)[0]
            entries.append((slot, predecessor, position, token_of(request, row, position), row, lacking))

    write_plan.offsets[rows.shape[0]] = tokens_before
    write_plan.num_requests[0] = rows.shape[0]

    capacity = verify_plan.slots.shape[0]
    for i, (slot, predecessor, position, token, row, lacking) in enumerate(entries[:capacity]):
        verify_plan.slots[i] = slot
        verify_plan.prev_slots[i] = predecessor
        verify_plan.positions[i] = position
        verify_plan.tokens[i] = token
        verify_plan.rows[i] = row
        bits |= LUT_RANGE * lacking
    verify_plan.num_valid[0] = min(len(entries), capacity)
    verify_plan.num_requested[0] = len(entries)
    status[0] = bits | OVERFLOW * (len(entries) > capacity)


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
    records = endpoint.records
    count = min(max(int(verify_plan.num_valid), 0), verify_plan.slots.shape[0])
    for i in range(count):
        slot, predecessor = int(verify_plan.slots[i]), int(verify_plan.prev_slots[i])
        position, token, row = int(verify_plan.positions[i]), int(verify_plan.tokens[i]), int(verify_plan.rows[i])
        record: Record = NO_RECORD
        expected_chain = observed_kv = 0

        if slot == 0:
            reasons = UNMAPPED
        elif not _stores(endpoint, slot):
            reasons = SLOT_RANGE
        else:
            record = _read(records, slot)
            identity, chain, kv, writer = record
            if not any(record):
                reasons = NEVER_WRITTEN
            elif track_lifetime and writer & RETIRED:
                reasons = FREED
            else:
                reasons = POSITION * (identity >> 32 != position)
                reasons |= TOKEN * (token >= 0 and identity & MASK_32 != token)
                previous = _previous_chain(records, predecessor, row=row, anchors=anchors)
                if previous is not None:
                    expected_chain = _advance(previous, identity)
                    reasons |= CHAIN * (chain != expected_chain)
                # Bytes are where the record says that they were taken, whatever position is expected.
                observed_kv = _kv_word(endpoint, slot, identity >> 32)
                if endpoint.k_source is not None:
                    reasons |= K * (kv & MASK_32 != observed_kv & MASK_32)
                if endpoint.v_source is not None:
                    reasons |= V * (kv >> 32 != observed_kv >> 32)

        if reasons:
            _report(
                violations,
                [endpoint.tag, reasons, slot, row, position, record[0], token, record[1], expected_chain]
                + [record[2], observed_kv, record[3], int(step), predecessor, 0, 0],
            )
    _count(counters, endpoint.tag, count)


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
    """Record the new tokens in the slots that the forward wrote them to."""
    records = endpoint.records
    num_requests = min(max(int(write_plan.num_requests), 0), write_plan.rows.shape[0])
    offsets = write_plan.offsets.tolist()
    seeds = [int(seed) for seed in write_plan.seed_slots]
    # All of them before anything is stored.
    seed_records = [_read(records, seed) if 0 < seed < records.shape[0] else NO_RECORD for seed in seeds]
    stored = 0

    for request in range(num_requests):
        row, owner, prefix = (int(x[request]) for x in (write_plan.rows, write_plan.owners, write_plan.prefix_lens))
        tokens = _segment(offsets, request, input_ids.shape[0])
        if not 0 < row < tails.shape[0] or not tokens:
            continue
        tail = int(tails[row]) & MASK_64
        seed, seed_record = seeds[request], seed_records[request]

        if prefix > 0 and any(seed_record) and seed_record[1] != tail:
            _report(
                violations,
                [endpoint.tag, PREFIX, seed, row, prefix - 1, seed_record[0], -1, seed_record[1], tail]
                + [seed_record[2], 0, seed_record[3], int(step), seed, owner, 0],
            )

        chain = tail
        for j, k in tokens:
            token, position, slot = int(input_ids[j]), int(positions[j]), int(out_slots[j])
            expected_position = _signed(prefix + k)
            expected_token = -1 if expected_input_ids is None else int(expected_input_ids[j])
            identity = _identity(token, position)
            chain = _advance(chain, identity)
            kv = replaced_writer = 0

            reasons = WRITE_POSITION * (int(check_positions) != 0 and position != expected_position)
            reasons |= WRITE_TOKEN * (expected_input_ids is not None and token != expected_token)
            if slot != 0 and not _stores(endpoint, slot):
                reasons |= SLOT_RANGE
            elif slot != 0:
                old_identity, old_chain, _, replaced_writer = old = _read(records, slot)
                kv = _kv_word(endpoint, slot, identity >> 32)
                if track_lifetime and any(old) and not replaced_writer & RETIRED:
                    another_owner = (replaced_writer ^ owner) % (1 << 24) != 0
                    reasons |= OVERWRITE * (another_owner and (old_identity, old_chain) != (identity, chain))
                _store(records, slot, [identity, chain, kv, _writer(int(step), owner)])
                stored += 1

            if reasons:
                _report(
                    violations,
                    [endpoint.tag, reasons, slot, row, expected_position, identity, expected_token, chain, 0]
                    + [kv, 0, replaced_writer, int(step), seed, owner, 0],
                )
    _count(counters, endpoint.tag, stored)


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
        sources = [_read(buffer, int(slot)) if 0 < int(slot) < num_slots else NO_RECORD for slot in src]
        for slot, (identity, chain, kv, writer) in zip(dst.tolist(), sources, strict=True):
            if 0 < slot < num_slots:
                carried = any((identity, chain, kv, writer)) and not writer & RETIRED
                _store(buffer, slot, [identity, chain, kv, _writer(int(step), owner)] if carried else NO_RECORD)


def retire(*, slots: torch.Tensor, owner: int, step: torch.Tensor, records: tuple[torch.Tensor, ...]) -> None:
    """Mark the records of freed slots, so that a later read of them is seen."""
    for buffer in records:
        for slot in slots.tolist():
            if 0 < slot < buffer.shape[0] and any(record := _read(buffer, slot)):
                _store(buffer, slot, [*record[:3], RETIRED | _writer(int(step), owner)])


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
            for j, k in _segment(offsets.tolist(), request, flat.shape[0]):
                if start + k < max_len:
                    pool[row, start + k] = _signed(int(flat[j]) << 32) >> 32
    status[0] = bits


def chain_tails(
    *,
    flat: torch.Tensor,
    offsets: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    anchors: torch.Tensor | None,
    tails: torch.Tensor,
    status: torch.Tensor,
) -> None:
    """Advance each row's chain over the request's own tokens."""
    bits = 0
    for request, (row, start) in enumerate(zip(rows.tolist(), starts.tolist(), strict=True)):
        bad_row = not 0 <= row < tails.shape[0]
        bits |= ROW_RANGE * bad_row | LENGTH_RANGE * (start < 0)
        if row == 0 or bad_row or start < 0:
            continue
        anchor = ANCHOR if anchors is None else int(anchors[row])
        chain = anchor if start == 0 else int(tails[row])
        for j, k in _segment(offsets.tolist(), request, flat.shape[0]):
            chain = _advance(chain, _identity(int(flat[j]), start + k))
        tails[row] = _signed(chain)
    status[0] = bits


IMPLEMENTATIONS: Mapping[str, Callable[..., None]] = MappingProxyType(
    {each.__name__: each for each in (plan, verify, write, move, retire, scatter_token_ids, chain_tails)}
)


def _signed(value: int) -> int:
    """The int64 of the same bits, mod 2**64."""
    value &= MASK_64
    return value - (1 << 64) if value >> 63 else value


def _mix(x: int) -> int:
    """Splitmix64 (Steele, Lea & Flood 2014)."""
    z = (x + 0x9E3779B97F4A7C15) & MASK_64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK_64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK_64
    return z ^ z >> 31


def _identity(token: int, position: int) -> int:
    return (position & MASK_32) << 32 | token & MASK_32


def _advance(chain: int, identity: int) -> int:
    return (chain * MULTIPLIER + _mix(identity)) & MASK_64


def _writer(step: int, owner: int) -> int:
    return step % (1 << 39) << 24 | owner % (1 << 24)


def _segment(offsets: list[int], request: int, total: int) -> list[tuple[int, int]]:
    """The indices of a request's segment that exist in a flat input of `total`, each with its place in the segment."""
    begin, end = offsets[request], offsets[request + 1]
    return [(j, j - begin) for j in range(max(begin, 0), min(end, total))]


def _read(records: torch.Tensor, slot: int) -> Record:
    """The record of a slot in range, its words unsigned."""
    return [word & MASK_64 for word in records[slot].tolist()]


def _store(records: torch.Tensor, slot: int, words: Record) -> None:
    for i, word in enumerate(words):
        records[slot, i] = _signed(word)


def _stores(endpoint: Endpoint, slot: int) -> bool:
    """Whether a slot has a record and, in every source, bytes."""
    sources = [source for source in (endpoint.k_source, endpoint.v_source) if source is not None]
    return 0 <= slot < endpoint.records.shape[0] and all(
        0 <= (slot - source.slot_bias) // source.page_size < source.layers[0].shape[0] for source in sources
    )


def _previous_chain(records: torch.Tensor, predecessor: int, *, row: int, anchors: torch.Tensor | None) -> int | None:
    """The chain that an entry's own follows, or None where it is not to be checked."""
    if predecessor == HEAD_OF_CHAIN:
        return int(anchors[row]) if anchors is not None and 0 < row < anchors.shape[0] else ANCHOR
    if not 0 < predecessor < records.shape[0]:
        return None
    record = _read(records, predecessor)
    return record[1] if any(record) else None


def _kv_word(endpoint: Endpoint, slot: int, position: int) -> int:
    """The fingerprints of a slot's K and V bytes, for a token at `position`."""
    halves = [
        0 if source is None else _fingerprint(source, slot, position)
        for source in (endpoint.k_source, endpoint.v_source)
    ]
    return halves[0] | halves[1] << 32


def _fingerprint(source: KvSource, slot: int, position: int) -> int:
    num_layers = len(source.layers)
    num_windows = -(-source.bytes_per_token // source.read_bytes)
    window = position // num_layers % num_windows
    window_begin = window * source.read_bytes
    window_end = min(window_begin + source.read_bytes, source.bytes_per_token)

    row, place = divmod(slot - source.slot_bias, source.page_size)
    token_begin = source.offset_bytes + place * source.bytes_per_token
    row_bytes = source.layers[position % num_layers][row].reshape(-1).view(torch.uint8)
    covered = bytes(row_bytes[token_begin + window_begin : token_begin + window_end].tolist())

    total = 0
    for j, first in enumerate(range(0, len(covered), 8)):
        # A shorter last word is as good as zero-padded: its bytes are the low ones.
        total += _mix(int.from_bytes(covered[first : first + 8], "little") ^ _mix(j))
    total &= MASK_64
    return (total ^ total >> 32) & MASK_32


def _report(violations: ViolationLog, words: list[int]) -> None:
    """Append a violation row; one past the capacity is counted and dropped."""
    count = int(violations.count)
    if 0 <= count < violations.ring.shape[0]:
        for i, word in enumerate(words):
            violations.ring[count, i] = _signed(word)
    violations.count[0] = _signed(count + 1)


def _count(counters: torch.Tensor, tag: int, number: int) -> None:
    """Add one launch and `number` entries or records to a tag's counters."""
    counters[tag, 0] = _signed(int(counters[tag, 0]) + 1)
    counters[tag, 1] = _signed(int(counters[tag, 1]) + number)
