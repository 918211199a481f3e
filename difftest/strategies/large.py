"""Calls at the bounds of kernels' inner loops, which drawn calls stay below or seldom meet."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from kv_canary.constants import ANCHOR, CHAIN_MULTIPLIER, HEAD_OF_CHAIN, MIX_ADD, MIX_MUL_1, MIX_MUL_2, Tag, to_signed
from kv_canary.difftest.strategies.batches import laid_out
from kv_canary.reference.hashing import identity, mix, next_chain
from kv_canary.specs import get_spec
from kv_canary.specs.structures import Endpoint, KvSource, ResolvedSlots, VerifyPlan, ViolationLog, WritePlan
from kv_canary.specs.write import TILE_TOKENS

# Requests that one program lays out at a time.
_REQUESTS_AT_ONCE = 1024
# Requests whose rows and starts one look takes, and some more.
_ONE_LOOK = 256
_ROWS = _ONE_LOOK + 3
_LOW_32 = (1 << 32) - 1


def large_cases(op: str, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield large calls of an op, the same ones every time; none for most ops.

    Args:
        device: where Triton will run: in its interpreter the bounds of some loops are lower.
    """
    if op == "write":
        # Not imported earlier: whether Triton interprets is settled when it is imported.
        from kv_canary.kernels.launching import INTERPRETER_PROGRAMS, tiles_at_once
        from kv_canary.kernels.write import NARROW_TILE

        at_once = tiles_at_once(device)
        # Where few bytes of each token are covered, and where many are.
        for tokens, num_bytes in ((2 * at_once * NARROW_TILE + 1, 16), (2 * at_once * TILE_TOKENS + 1, 260)):
            yield _write([(5, tokens), (0, 3)], num_bytes=num_bytes)
        many = [(i % 3, i % 2) for i in range(2 * _REQUESTS_AT_ONCE + 52)]
        yield _write(many, num_bytes=16)
        # Whose seeds are not the ends of their prefixes, the first one after so many at once too.
        yield _with_wrong_seeds(_write([(1, 1)] * len(many), num_bytes=16), count=len(many))
        # Of which the last ones of each so many have several tiles.
        many = [(1, 300 if i % _REQUESTS_AT_ONCE == _REQUESTS_AT_ONCE - 1 else 1) for i in range(len(many))]
        yield _write([*many, (1, 300)], num_bytes=16)
        # More requests than one program takes, and no token; the model is given other ones.
        nothing = _write([(1, 0)] * 600, num_bytes=16)
        yield nothing | {"given_rows": torch.arange(600), "given_lens": torch.ones(600, dtype=torch.int64)}
        # A tile of tokens that all share their slots with those of another request, which has the same prefix.
        yield _alike(NARROW_TILE, one_prefix=True)
        yield _alike(3, one_prefix=False)
        yield _alike(1, one_prefix=False)
        yield _shared()
        # Every slot goes to another token far behind, more of them than all programs take at once.
        yield _twice(_write([(0, 4 * INTERPRETER_PROGRAMS * TILE_TOKENS)], num_bytes=260))
        # Whose marks of slots say of this step what it would have left, or of another one, that looks like it.
        for step in (9, (1 << 31) + 9):
            yield _with_stale_marks(_twice(_write([(0, 8 * TILE_TOKENS)], num_bytes=260)), step=step)
        # As few as one program takes, and no token, or none that a request writes.
        yield _write([(1, 0)] * 3, num_bytes=16)
        yield _with_wrong_seeds(_write([(1, 5)] * 3, num_bytes=16), count=0)
        # Nobody writes, and the plan holds what it was left with.
        yield _with_wrong_seeds(_write([(1, 5)] * 40, num_bytes=16), count=0)
        # Few inputs, which one program takes at once, and thrice as many tokens.
        yield _thrice(_write([(0, 60), (0, 0), (0, 0), (0, 0), (0, 0)], num_bytes=16))
        # A last window of one byte, windows of tokens that one step takes whole, and windows that take several steps.
        yield _write([(3, 20)], num_bytes=17, read_bytes=16)
        yield _write([(3, 20)], num_bytes=64, read_bytes=16)
        yield _write([(3, 20)], num_bytes=1024)
        # Bytes that are read two at a time, and end inside a word.
        yield _write([(3, 20)], num_bytes=10)
    elif op == "chain_tails":
        for length in (1 << 16, (1 << 16) + 1, 70_000):
            yield _segments([length, 3], num_rows=3) | {"anchors": None, "tails": _words(3), "pool": None}
        # Some more than the row has room for.
        kept = torch.full((3, 70_000 - 5), 7, dtype=torch.int32)
        yield _segments([70_000, 3], num_rows=3) | {"anchors": None, "tails": _words(3), "pool": kept}
        for at in (5, _ONE_LOOK):
            yield _mostly_padding(wrong_at=at) | {"anchors": None, "tails": _words(_ROWS + 1), "pool": None}
    elif op == "scatter_token_ids":
        for length in (512, 1024, 3 * 512, 4 * 512, 4 * 512 + 1):
            pool = torch.full((3, length + 1), 7, dtype=torch.int32)
            yield _segments([length, 3], num_rows=3) | {"pool": pool}
        for at in (5, _ONE_LOOK):
            yield _mostly_padding(wrong_at=at) | {"pool": torch.full((_ROWS + 1, 4), 7, dtype=torch.int32)}
    elif op == "verify_resolved":
        yield _resolved()
        # K lacks the last entries' slots.
        short = KvSource(layers=(torch.zeros(4, 8, dtype=torch.uint8),), page_size=1, bytes_per_token=8)
        call = _resolved()
        yield call | {"endpoint": dataclasses.replace(call["endpoint"], k_source=short)}
        yield _wrong_alone("k_source", fingerprint=_LOW_32, kv=5)
        yield _wrong_alone("v_source", fingerprint=0, kv=5 << 32)
        # The token alone is.
        expected = {"expected_tokens": torch.zeros(2, 1, dtype=torch.int32), "expected_lens": torch.tensor([1])}
        yield _wrong_alone("k_source", fingerprint=0, kv=0) | expected
        # The chain alone is.
        call = _wrong_alone("k_source", fingerprint=0, kv=0)
        call["endpoint"].records[1, 1] += 1
        yield call
        # There is no slot but that of padding.
        records = torch.zeros(1, 4, dtype=torch.int64)
        yield _resolved() | {"endpoint": Endpoint(tag=Tag.TAIL_FULL, records=records)}
    elif op in ("seal", "verify_seals"):
        yield _hashed_to_zero(op)
        # Bytes so many and so little aligned that a program takes one slot at a time.
        yield _sealed(op, num_bytes=1027)
    elif op in ("plan", "verify_prefixes"):
        yield _prefixes(op, 2 * _REQUESTS_AT_ONCE + 52)
        yield _beyond(op)
        # So few that the same launch lays them out.
        yield _beyond(op) | {"lut": None}
        for window, step in ((0, -7), (90, 4)):
            yield _strided(op, window=window, step=step)
        if op == "verify_prefixes":
            for call in (_prefixes(op, 2 * _REQUESTS_AT_ONCE + 52), _beyond(op), _strided(op, window=90, step=4)):
                yield call | laid_out(call)
    elif op == "open_step":
        # Most requests that one look takes, and one more; more than several take.
        for count in (512, 513, 2 * _REQUESTS_AT_ONCE + 52):
            yield _opened(_prefixes("plan", count), lens=[1] * 5)
        for window, step in ((0, -7), (90, 4)):
            yield _opened(_strided("plan", window=window, step=step), lens=[2, 1, 0])
        # Most tokens that few lanes take, one more, and more than many take at a time.
        for length in (2047, 2048, 2049, 10_000):
            yield _opened(_beyond("plan"), lens=[length, 1])


def _write(requests: list[tuple[int, int]], *, num_bytes: int, read_bytes: int | None = None) -> dict[str, Any]:
    """Return a write of requests of (cached, new) tokens, each in a slot of its own; every 100th position is wrong."""
    rng, count = np.random.default_rng(len(requests)), len(requests)
    extend = [new for _, new in requests]
    num_tokens, num_slots = sum(extend), sum(extend) + 2
    source = KvSource(
        layers=(torch.from_numpy(rng.integers(0, 256, (num_slots, num_bytes), dtype=np.uint8)),),
        page_size=1,
        bytes_per_token=num_bytes,
        read_bytes=read_bytes or num_bytes,
    )
    positions = np.concatenate([np.arange(cached, cached + new) for cached, new in requests])
    positions[::100] += 1
    offsets = np.cumsum([0, *extend])
    return {
        "write_plan": WritePlan(
            rows=torch.arange(1, count + 1),
            owners=torch.arange(7, 7 + count),
            offsets=torch.from_numpy(offsets),
            prefix_lens=torch.tensor([cached for cached, _ in requests]),
            seed_slots=torch.full((count,), HEAD_OF_CHAIN),
            num_requests=torch.tensor([count], dtype=torch.int32),
        ),
        "input_ids": torch.from_numpy(rng.integers(0, 1 << 17, num_tokens)),
        "positions": torch.from_numpy(positions),
        "out_slots": torch.from_numpy(rng.permutation(num_tokens) + 1),
        "endpoint": Endpoint(
            tag=Tag.TAIL_FULL, records=torch.zeros(num_slots, 4, dtype=torch.int64), k_source=source, v_source=None
        ),
        "tails": _words(count + 1),
        "step": torch.tensor([9]),
        "check_positions": torch.ones(1, dtype=torch.int32),
        "track_lifetime": True,
        "violations": ViolationLog.allocate(ring_cap=num_tokens),
        "counters": torch.zeros(len(Tag), 2, dtype=torch.int64),
    }


def _with_wrong_seeds(call: dict[str, Any], *, count: int) -> dict[str, Any]:
    """Return `call` with seeds that hold other chains than the tails, and a plan that says that it has `count`."""
    plan, records = call["write_plan"], call["endpoint"].records
    # No token is written to the last slot.
    records[-1] = torch.tensor([5, 6, 7, 8])
    seeds = torch.full_like(plan.seed_slots, len(records) - 1)
    number = torch.full_like(plan.num_requests, count)
    violations = ViolationLog.allocate(ring_cap=2 * len(plan.rows) + len(call["positions"]))
    changed = dataclasses.replace(plan, seed_slots=seeds, num_requests=number)
    return call | {"write_plan": changed, "violations": violations}


def _thrice(call: dict[str, Any]) -> dict[str, Any]:
    """Return `call` with the first request's tokens written by the third and the fifth too, at slots outside."""
    plan = call["write_plan"]
    num_tokens = len(call["positions"])
    offsets = torch.tensor([0, num_tokens] * 3)
    return call | {
        "write_plan": dataclasses.replace(plan, offsets=offsets),
        "out_slots": torch.full((num_tokens,), len(call["endpoint"].records)),
        "violations": ViolationLog.allocate(ring_cap=4 * num_tokens),
    }


def _alike(length: int, *, one_prefix: bool) -> dict[str, Any]:
    """Return a write of two requests, of one prefix or of two, which have the same tokens in the same slots."""
    call = _write([(0, length), (0, length)], num_bytes=16)
    if one_prefix:
        call["tails"][2] = call["tails"][1]
    for name in ("input_ids", "positions", "out_slots"):
        call[name][length:] = call[name][:length]
    return call


def _twice(call: dict[str, Any]) -> dict[str, Any]:
    """Return `call` with the second half of its tokens in the slots of the first half."""
    half = len(call["out_slots"]) // 2
    call["out_slots"][half:] = call["out_slots"][:half]
    return call


def _with_stale_marks(call: dict[str, Any], *, step: int) -> dict[str, Any]:
    """Return `call`, whose second half of tokens has the slots of the first, with marks that are wrong in every way.

    In one way in a tile: where a mark is not understood, all of the tile are done without.
    """
    tokens, tile = len(call["out_slots"]), TILE_TOKENS
    slots = call["out_slots"][: tokens // 2]
    behind = torch.cat([slots[tile + 4 : tile + 5], slots[2 * tile : 3 * tile]])
    more = {name: torch.cat([call[name], call[name][: len(behind)]]) for name in ("input_ids", "positions")}
    # Of the first token that has the slot; of another slot's; of one behind the batch, of one right behind it.
    marks = torch.arange(len(slots))
    marks[:tile] = tokens - 1
    marks[2 * tile : 3 * tile] = torch.arange(tokens + 1, tokens + 1 + tile)
    marks[tile + 4] = tokens
    slot_marks = torch.zeros(len(call["endpoint"].records), dtype=torch.int64)
    slot_marks[slots] = marks | (step & ((1 << 31) - 1)) << 32
    more["out_slots"] = torch.cat([call["out_slots"], behind])
    return call | more | {"slot_marks": slot_marks, "step": torch.tensor([step])}


def _shared() -> dict[str, Any]:
    """Return a write of few tokens, two to a slot, in each of the ways that a kernel may take for another."""
    call = _write([(0, 1)] * 10, num_bytes=16)
    plan, tails, tokens, slots = call["write_plan"], call["tails"], call["input_ids"], call["out_slots"]
    # The first one's slot goes to padding, which has no owner, as it has.
    plan.rows[1], plan.owners[0], slots[1] = 0, 1 << 24, slots[0]
    # The third one's chain is 0, as that of a token nobody asks for; its slot goes to another token.
    scale = to_signed(pow(CHAIN_MULTIPLIER, -1, 1 << 64))
    call["positions"].zero_()
    for i in (2, 8):
        tails[i + 1] = -mix(identity(tokens[i], call["positions"][i])) * scale
        slots[i + 1] = slots[i]
    # The ninth one's likewise; its slot goes to the same token, of padding.
    plan.rows[9], tokens[9] = 0, tokens[8]
    # The fifth one's goes to the same token of the same prefix.
    tails[6], tokens[5], slots[5] = tails[5], tokens[4], slots[4]
    # The seventh one's lies far before the pool.
    slots[6] = -(1 << 40)
    # The eighth one has that of a token behind the batch.
    kept = {name: torch.cat([call[name], call[name][7:8]]) for name in ("input_ids", "positions", "out_slots")}
    return call | kept | {"ring": True}


def _resolved() -> dict[str, Any]:
    """Return a call of verify_resolved with entries unlike any of a plan's.

    One of position 0 follows another one, and the last one follows the first slot behind the records.
    """
    records = _words(6 * 4).view(6, 4)
    return {
        "rows": torch.tensor([1]),
        "resolved": ResolvedSlots(
            entries=torch.tensor([[1, ~0], [2, 1], [3, 0], [4, 1], [5, ~1]], dtype=torch.int32),
            runs=torch.tensor([[HEAD_OF_CHAIN, 0], [5, 0], [5, -1], [5, 0], [6, 0]], dtype=torch.int32),
            num_valid=torch.tensor([5], dtype=torch.int32),
            num_requested=torch.tensor([5]),
        ),
        "endpoint": Endpoint(tag=Tag.TAIL_FULL, records=records),
        "step": torch.tensor([9]),
        "violations": ViolationLog.allocate(ring_cap=8),
        "counters": torch.zeros(len(Tag), 2, dtype=torch.int64),
    }


def _wrong_alone(half: str, *, fingerprint: int, kv: int) -> dict[str, Any]:
    """Return a call of verify_resolved where nothing but K or V is wrong, if that is: its bytes have `fingerprint`."""
    # Of one word, whose mixed value's upper half is 0.
    word = _unmixed(fingerprint) ^ int(mix(torch.tensor(0)))
    layer = torch.tensor([[0], [to_signed(word & ((1 << 64) - 1))]]).view(torch.uint8)
    records = torch.zeros(2, 4, dtype=torch.int64)
    ident = identity(torch.tensor([3]), torch.tensor([0]))
    records[1] = torch.tensor([int(ident), int(next_chain(torch.tensor([ANCHOR]), ident)), kv, 8])
    source = KvSource(layers=(layer,), page_size=1, bytes_per_token=8)
    sources: dict[str, Any] = {half: source}
    return {
        "rows": torch.tensor([1]),
        "resolved": ResolvedSlots(
            entries=torch.tensor([[1, ~0]], dtype=torch.int32),
            runs=torch.tensor([[HEAD_OF_CHAIN, 0]], dtype=torch.int32),
            num_valid=torch.tensor([1], dtype=torch.int32),
            num_requested=torch.tensor([1]),
        ),
        "endpoint": Endpoint(tag=Tag.TAIL_FULL, records=records, **sources),
        "step": torch.tensor([9]),
        "violations": ViolationLog.allocate(ring_cap=8),
        "counters": torch.zeros(len(Tag), 2, dtype=torch.int64),
    }


def _hashed_to_zero(op: str) -> dict[str, Any]:
    """Return a call of seal or verify_seals for a slot whose bytes have a hash of 0, which a seal holds as 1."""
    source = KvSource(layers=(torch.zeros(2, 16, dtype=torch.uint8),), page_size=1, bytes_per_token=16)
    words = source.layers[0].view(torch.int64)[1]
    # What each half of a word adds to, as it is of the one layer.
    keys = mix(torch.arange(2)), mix(torch.tensor(-1))
    wanted = next(total for total in map(_unmixed, range(100)) if total < _LOW_32 * _LOW_32)
    quotient, rest = divmod(wanted, _LOW_32)
    for j, (low, high) in enumerate(((quotient, _LOW_32), (rest, 1))):
        key = int(keys[0][j]), int(keys[1])
        halves = low - sum(key), high - sum(k >> 32 for k in key)
        words[j] = to_signed((halves[0] & _LOW_32) | (halves[1] & _LOW_32) << 32)
    return _seals(op, source, num_slots=2) | {"seals": torch.tensor([[0, 0], [8, 1]])}


def _sealed(op: str, *, num_bytes: int) -> dict[str, Any]:
    """Return a call of seal or verify_seals for two slots of so many bytes, one behind the records, and a free one."""
    rng = np.random.default_rng(num_bytes)
    layer = torch.from_numpy(rng.integers(0, 256, (5, num_bytes), dtype=np.uint8))
    source = KvSource(layers=(layer,), page_size=1, bytes_per_token=num_bytes)
    call = _seals(op, source, num_slots=4) | {"slots": torch.tensor([1, 4, 2, 3])}
    # The WRITER of none is that of step and owner 0, but a seal of that is of no record.
    call["endpoint"].records[3], call["seals"][3, 0] = 0, 0
    return call


def _seals(op: str, source: KvSource, *, num_slots: int) -> dict[str, Any]:
    """Return a call of seal or verify_seals for all slots, whose seals have words that are not the hash of K."""
    # Positions past 31 bits.
    records = torch.tensor([[-5, 6, 7, 8]] * num_slots)
    call = {
        "slots": None,
        "span": torch.tensor([0, num_slots]),
        "endpoint": Endpoint(tag=Tag.SWEEP_FULL, records=records, k_source=source),
        "layers_per_band": 1,
        "seed": 0,
        "seals": torch.tensor([[8, 9]] * num_slots),
    }
    if op == "seal":
        return call | {"written_in": None}
    # As launches before have left it.
    checked = torch.arange(3, 7)
    return call | {
        "step": torch.tensor([9]),
        "violations": ViolationLog.allocate(ring_cap=4),
        "checked": checked,
        "ends": None,
        "counts": None,
    }


def _unmixed(mixed: int) -> int:
    """The uint64 that `mix` makes `mixed` of."""
    mask = (1 << 64) - 1
    z = mixed ^ (mixed >> 31) ^ (mixed >> 62)
    z = z * pow(MIX_MUL_2, -1, 1 << 64) & mask
    z ^= (z >> 27) ^ (z >> 54)
    z = z * pow(MIX_MUL_1, -1, 1 << 64) & mask
    return (z ^ (z >> 30) ^ (z >> 60)) - MIX_ADD & mask


def _prefixes(op: str, count: int) -> dict[str, Any]:
    """Return a call of plan or verify_prefixes for so many requests of up to 2 cached tokens; some rows are none."""
    rng, num_slots = np.random.default_rng(count), 64
    rows = rng.permutation(count) + 1
    rows[::97], rows[5::211] = 0, count + 1
    batch = {
        "rows": torch.from_numpy(rows),
        "prefix_lens": torch.from_numpy(rng.integers(0, 3, count)),
        "extend_lens": torch.ones(count, dtype=torch.int64),
        "req_to_token": torch.from_numpy(rng.integers(0, num_slots, (count + 1, 4), dtype=np.int32)),
    }
    return batch | _places(op, size=count, num_slots=num_slots)


def _beyond(op: str) -> dict[str, Any]:
    """Return a call of plan or verify_prefixes for a request behind whose cached tokens the table is beyond the LUT."""
    batch = {
        "rows": torch.tensor([1]),
        "prefix_lens": torch.tensor([2]),
        "extend_lens": torch.tensor([1]),
        "req_to_token": torch.tensor([[9, 9], [1, 9]], dtype=torch.int32),
        "page_size": 2,
        "lut": torch.arange(4),
    }
    return batch | _places(op, size=1, num_slots=4)


def _strided(op: str, *, window: int, step: int) -> dict[str, Any]:
    """Return a call of plan or verify_prefixes for requests of all strides and lengths, and some that cannot be."""
    rng, num_slots = np.random.default_rng(window), 900
    prefix_lens = [0, 1, 15, 16, 17, 33, 48, 64, 65, 100, 130, 131, 160, 200, 4, 4, 4, 4, -1, 201]
    count = len(prefix_lens)
    rows, extend_lens = torch.arange(1, count + 1), torch.arange(count) % 4
    rows[4], rows[7], rows[8], rows[15] = 0, (1 << 31) - 1, 1 << 31, -3
    extend_lens[16], extend_lens[17] = -1, 1 << 31
    batch = {
        "rows": rows,
        "table_rows": torch.arange(count - 1, -1, -1),
        "owners": torch.arange(70, 70 + count),
        "prefix_lens": torch.tensor(prefix_lens),
        "extend_lens": extend_lens,
        "req_to_token": torch.from_numpy(rng.integers(0, num_slots // 4, (count, 50), dtype=np.int32)),
        "page_size": 4,
        "lut": None if window else torch.from_numpy(rng.permutation(num_slots)),
        "window": window,
        "strides": torch.tensor([3, 2, 1, 4] * 5),
        "step": torch.tensor([step]),
        "expected_tokens": torch.from_numpy(rng.integers(0, 1 << 17, (count - 1, 150), dtype=np.int32)),
        "expected_lens": torch.arange(count) * 11,
        "token_offset": -1,
    }
    return batch | _places(op, size=20 * count, num_slots=num_slots)


def _opened(batch: dict[str, Any], *, lens: list[int]) -> dict[str, Any]:
    """Return a call of open_step for a batch, and for segments of so many tokens; every one is its own row's."""
    advance = _segments(lens, num_rows=len(lens) + 1)
    words, kept = _words(300), torch.full((len(lens) + 1, 2000), 7, dtype=torch.int32)
    taken = get_spec("open_step").arguments
    return {
        **{name: value for name, value in batch.items() if name in taken},
        **{"advance_rows" if name == "rows" else name: value for name, value in advance.items()},
        "rows": batch["rows"],
        "step": batch["step"] if "strides" in batch else None,
        "words": words,
        "copy": torch.zeros_like(words),
        "anchors": _words(len(lens) + 1),
        "tails": _words(len(lens) + 1),
        "pool": kept,
        "entry_offsets": torch.zeros(len(batch["rows"]) + 1, dtype=torch.int64),
        "longest_stride": torch.zeros(1, dtype=torch.int64),
    }


def _places(op: str, *, size: int, num_slots: int) -> dict[str, Any]:
    """Return what a call of plan or verify_prefixes takes beside so many requests, and where its results go."""
    both = {"write_plan": WritePlan.allocate(write_cap=size), "status": torch.zeros(1, dtype=torch.int32)}
    if op == "plan":
        return {**both, "verify_plan": VerifyPlan.allocate(verify_cap=3 * size)}
    records = _words(num_slots * 4).view(num_slots, 4)
    return {
        **both,
        "step": torch.tensor([9]),
        "endpoint": Endpoint(tag=Tag.HEAD_FULL, records=records),
        "resolved": ResolvedSlots.allocate(entry_cap=3 * size),
        "violations": ViolationLog.allocate(ring_cap=4 * size),
        "counters": torch.zeros(len(Tag), 2, dtype=torch.int64),
    }


def _segments(lens: list[int], *, num_rows: int) -> dict[str, Any]:
    offsets = np.cumsum([0, *lens])
    return {
        "flat": torch.from_numpy(np.random.default_rng(lens).integers(0, 1 << 17, offsets[-1])),
        "offsets": torch.from_numpy(offsets),
        "rows": torch.arange(1, len(lens) + 1),
        "starts": torch.zeros(len(lens), dtype=torch.int64),
        "status": torch.zeros(1, dtype=torch.int32),
    }


def _mostly_padding(*, wrong_at: int) -> dict[str, Any]:
    """Return segments of padding but for the end, one of them with a row that is not there and a start below 0."""
    call = _segments([1] * _ROWS, num_rows=_ROWS + 1)
    call["rows"][:_ONE_LOOK] = 0
    call["rows"][wrong_at], call["starts"][wrong_at] = _ROWS + 1, -1
    return call


def _words(count: int) -> torch.Tensor:
    """Words of any value."""
    return torch.from_numpy(np.random.default_rng(count).integers(-(1 << 63), (1 << 63) - 1, count))
