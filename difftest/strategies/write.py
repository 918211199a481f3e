"""Cases of write: batches that extend cached requests, and plans and slots that hold anything."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from kv_canary.constants import ANCHOR, HEAD_OF_CHAIN, Tag
from kv_canary.difftest.hostile import HOSTILE, INT64_MAX, INT64_MIN
from kv_canary.difftest.strategies.domain import (
    damage_records,
    draw_giant,
    int64,
    lengths,
    often,
    owner_numbers,
    replace_some,
    steps,
    violation_logs,
    worlds,
)
from kv_canary.reference.hashing import identity, walk_chain, writer
from kv_canary.specs.structures import WritePlan


@st.composite
def cases(draw: Any, *, giant: bool | None = None) -> dict[str, Any]:
    """Draw one call of write; `giant`: whether rows span more than 2**31 elements; None: sometimes."""
    giant = draw_giant(draw, giant)
    kinds = ["mixed", "mixed", "mixed", "decode", "fresh", "alone", "alone", "alone", "many", "many", "many"]
    kind = draw(st.sampled_from(kinds if giant else [*kinds, "nobody"]))
    room = draw(st.sampled_from([300, 1100, 1100] if kind == "alone" else [0, 0, 40, 600, 1100]))
    world = draw(worlds(longest=129, room=room, tag=int(draw(st.sampled_from(list(Tag)))), giant=giant))
    rng = np.random.default_rng(world.seed)
    hostile = kind != "alone" and draw(st.booleans())
    rows = list(world.rows)
    prefix = list(world.lengths)
    fresh = [r for r in range(1, world.num_rows) if r not in rows]
    tails = world.tails.clone()
    if kind == "fresh":
        rows, prefix = fresh, [0] * len(fresh)
    elif kind == "alone":
        rows = (rows + fresh)[:1]
        prefix = [*prefix, 0][: len(rows)]
    elif kind == "many":
        # More requests than a row of the ring each takes, whose prefixes are mostly not theirs.
        rows = list(range(1, draw(st.integers(28, 40))))
        prefix = [int(p) for p in rng.integers(0, 20, len(rows))]
        tails = torch.cat([tails, torch.from_numpy(rng.integers(INT64_MIN, INT64_MAX, 40))])
    elif kind == "nobody":
        rows, prefix = [], []
    elif kind == "mixed" and fresh and draw(st.booleans()):
        rows.append(fresh[0])
        prefix.append(0)
    long = draw(st.booleans())
    extend = [_draw_extend(draw, kind, long=long) for _ in rows]
    if len(rows) > 1 and draw(st.booleans()):
        rows[draw(st.integers(0, len(rows) - 1))] = 0
    seeds_ = [
        int(world.slots[r, p - 1]) if 0 < r < world.num_rows and 0 < p <= world.slots.shape[1] else HEAD_OF_CHAIN
        for r, p in zip(rows, prefix, strict=True)
    ]
    records = world.endpoint.records
    if kind == "many" and world.num_slots > 1:
        records[1:, :3] += (records[1:] == 0).all(dim=1, keepdim=True) * world.seed
        seeds_ = [int(s) for s in rng.integers(0, world.num_slots, len(rows))]
    # Tokens of nobody may follow.
    num_tokens = sum(extend) + draw(st.sampled_from([0, 0, 3]))
    offsets = [int(o) for o in np.cumsum([0, *extend])]
    tokens = [int(t) for t in rng.integers(0, 1 << 17, num_tokens)]
    positions = [p + k for p, e in zip(prefix, extend, strict=True) for k in range(e)]
    positions += [0] * (num_tokens - len(positions))
    # Distinct slots, free or cached ones; what the pool cannot hold goes to the padding slot.
    free = [int(s) for s in rng.permutation(world.num_slots - 1) + 1] if world.num_slots > 1 else []
    if giant and draw(st.booleans()):
        # The last slots are those that lie far.
        free.sort(reverse=True)
    free = free[:num_tokens]
    slots = free + [0] * (num_tokens - len(free))
    slots = replace_some(draw, slots, (0,))
    owners = [draw(owner_numbers) for _ in rows]
    if draw(st.booleans()):
        owners = [n % (1 << 24) + (1 << 24) for n in owners]
    for i, row in enumerate(rows):
        # The seed says something else than the tail; with no prefix nobody asks it.
        if i < 6 and often(draw, 5):
            tails[row] ^= 1 << draw(st.integers(0, 62))
        if i < 3 and often(draw, 4):
            prefix[i], seeds_[i] = 1, 0
        elif i < 6 and often(draw, 5):
            prefix[i] = draw(st.integers(0, 1))
            seeds_[i] = int(rng.integers(1, world.num_slots)) if world.num_slots > 1 else 0
        elif i < 6 and often(draw, 5):
            # Just past the pool.
            prefix[i], seeds_[i] = max(prefix[i], 1), world.num_slots
    damage_records(draw, records, [*seeds_, *slots[:40]])
    if hostile:
        rows = _distinct(replace_some(draw, rows, (*HOSTILE, len(tails))))
        prefix = replace_some(draw, prefix)
        seeds_ = replace_some(draw, seeds_, (*HOSTILE, 0, 1, world.num_slots))
        slots = replace_some(draw, slots, (*HOSTILE, world.num_slots, world.num_slots + 1))
        positions = replace_some(draw, positions, (*HOSTILE, 0))
        tokens = replace_some(draw, tokens)
        offsets = replace_some(draw, offsets, (*HOSTILE, 0, 1, num_tokens, num_tokens + 5), most=2)
        if len(tails) > 1:
            tails[draw(st.integers(1, len(tails) - 1))] = ANCHOR
    others = [len(rows)] if giant else [0, -1, len(rows) + 9, len(rows) + 9]
    count = draw(st.sampled_from([len(rows)] * 20 + others))
    _give_up_shared_tokens(rows, offsets, slots, len(tails), count)
    expected = None
    if draw(st.booleans()):
        expected = int64(_make_wrong(draw, replace_some(draw, tokens, (-1, 0, 7)), positions, slots, world.num_slots))
    tracked = draw(st.booleans())
    if draw(st.booleans()):
        tracked = not often(draw, 6)
        segments = [
            (owner, int(tails[row]), max(offsets[r], 0), min(offsets[r + 1], num_tokens))
            for r, (row, owner) in enumerate(zip(rows, owners, strict=True))
            if r < count and 0 < row < len(tails)
        ]
        _hold_others(rng, records, segments, tokens=tokens, positions=positions, slots=slots)
    spare = 0 if kind in ("alone", "nobody") else draw(st.integers(0, 2))
    return {
        "write_plan": WritePlan(
            rows=int64(rows + [0] * spare),
            owners=int64(owners + [5] * spare),
            offsets=int64(offsets + [num_tokens] * spare),
            prefix_lens=int64(prefix + [3] * spare),
            seed_slots=int64(seeds_ + [1] * spare),
            num_requests=torch.tensor([count], dtype=torch.int32),
        ),
        "input_ids": int64(tokens),
        "positions": int64(positions),
        "out_slots": int64(slots),
        "endpoint": world.endpoint,
        "tails": tails,
        "step": int64([draw(steps)]),
        "check_positions": torch.tensor([draw(st.sampled_from([0, 1, 1, -7]))], dtype=torch.int32),
        "expected_input_ids": expected,
        "track_lifetime": tracked,
        "violations": draw(violation_logs()),
        "counters": torch.arange(2 * len(Tag)).view(-1, 2),
    }


def _draw_extend(draw: Any, kind: str, *, long: bool) -> int:
    """How many tokens one request writes."""
    if kind == "decode":
        return 1
    if kind == "many":
        return int(draw(st.sampled_from([0, 1, 1, 1, 2])))
    if kind == "alone" or (long and often(draw, 3)):
        return int(draw(st.sampled_from([257, 300, 511, 512, 513, 700, 1025])))
    return int(draw(st.one_of(st.just(1), lengths(longest=1025))))


def _make_wrong(draw: Any, expected: list[int], positions: list[int], slots: list[int], num_slots: int) -> list[int]:
    """Make some tokens other than `expected`, often in a slot out of range or at another position as well."""
    for _ in range(draw(st.integers(0, 3)) if expected else 0):
        j = draw(st.integers(0, len(expected) - 1))
        expected[j] ^= 1
        what = draw(st.sampled_from(["slot", "position", "both", "token"]))
        if what in ("slot", "both"):
            slots[j] = draw(st.sampled_from([-1, num_slots, INT64_MAX]))
        if what in ("position", "both"):
            positions[j] += draw(st.sampled_from([-1, 1, 1 << 31, 1 << 32]))
    return expected


def _hold_others(
    rng: np.random.Generator,
    records: torch.Tensor,
    segments: list[tuple[int, int, int, int]],
    *,
    tokens: list[int],
    positions: list[int],
    slots: list[int],
) -> None:
    """Let some slots hold what an overwrite is told from: other owners' records, equal in part to the new ones.

    Args:
        segments: owner, tail, first and last token of each request that writes.
    """
    for owner, tail, first, last in segments:
        if first >= last:
            continue
        identities = identity(int64(tokens[first:last]), int64(positions[first:last]))
        chains = walk_chain(tail, identities)
        kinds = int(rng.integers(0, 8))
        for i, k in enumerate(rng.permutation(last - first)[:16].tolist()):
            slot = slots[first + k]
            if not 0 < slot < len(records):
                continue
            kind = (kinds + i) % 8
            other = [owner ^ 1, owner ^ (1 << 23), owner ^ 1, owner, owner ^ 1, 0, owner ^ 1, owner + (1 << 24)][kind]
            # 0 holds the same token of the same prefix; 1, 3, 5 and 7 that of another prefix; 2 only the same chain;
            # 4 is retired; 6 is another's altogether.
            records[slot, 0] = identities[k] ^ (1 << int(rng.integers(0, 62)) if kind in (2, 6) else 0)
            records[slot, 1] = chains[k] ^ (1 << int(rng.integers(0, 62)) if kind % 2 or kind in (4, 6) else 0)
            records[slot, 2] = int(rng.integers(INT64_MIN, INT64_MAX))
            step = 0 if kind == 5 else int(rng.integers(0, 9))
            records[slot, 3] = writer(torch.tensor(step), other, retired=kind == 4)


def _distinct(rows: list[int]) -> list[int]:
    """The same row twice in one write is undefined: later ones become padding."""
    return [0 if r in rows[:i] else r for i, r in enumerate(rows)]


def _give_up_shared_tokens(rows: list[int], offsets: list[int], slots: list[int], num_rows: int, count: int) -> None:
    """Send to the padding slot every token that several requests would write, and repeats of a slot."""
    owners: Counter[int] = Counter()
    for r, row in enumerate(rows[: max(count, 0)]):
        if 0 < row < num_rows:
            owners.update(range(max(offsets[r], 0), min(offsets[r + 1], len(slots))))
    seen: set[int] = set()
    for j, slot in enumerate(slots):
        if owners[j] > 1 or slot in seen:
            slots[j] = 0
        seen.add(slot)
