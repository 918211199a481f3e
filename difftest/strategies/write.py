"""Cases of write: batches that extend cached requests, and plans and slots that hold anything."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from kv_canary.constants import ANCHOR, HEAD_OF_CHAIN, Tag
from kv_canary.difftest.hostile import HOSTILE
from kv_canary.difftest.strategies.domain import (
    damage_records,
    draw_giant,
    int64,
    lengths,
    owner_numbers,
    replace_some,
    steps,
    violation_logs,
    worlds,
)
from kv_canary.specs.structures import WritePlan


@st.composite
def cases(draw: Any, *, giant: bool | None = None) -> dict[str, Any]:
    """Draw one call of write; `giant`: whether rows span more than 2**31 elements, else rarely so."""
    giant = draw_giant(draw, giant)
    world = draw(worlds(longest=129, tag=int(draw(st.sampled_from(list(Tag)))), giant=giant))
    rng = np.random.default_rng(world.seed)
    hostile = draw(st.booleans())
    rows = list(world.rows)
    prefix = list(world.lengths)
    fresh = [r for r in range(1, world.num_rows) if r not in rows]
    kind = draw(st.sampled_from(["mixed", "mixed", "decode", "fresh"]))
    if kind == "fresh":
        rows, prefix = fresh, [0] * len(fresh)
    elif kind == "mixed" and fresh and draw(st.booleans()):
        rows.append(fresh[0])
        prefix.append(0)
    extend = [1 if kind == "decode" else draw(st.one_of(st.just(1), lengths(longest=1025))) for _ in rows]
    for _ in range(draw(st.integers(0, 1)) if rows else 0):
        rows[draw(st.integers(0, len(rows) - 1))] = 0
    seeds_ = [
        int(world.slots[r, p - 1]) if r and 0 < p <= world.slots.shape[1] else HEAD_OF_CHAIN
        for r, p in zip(rows, prefix, strict=True)
    ]
    num_tokens = sum(extend)
    offsets = [int(o) for o in np.cumsum([0, *extend])]
    tokens = [int(t) for t in rng.integers(0, 1 << 17, num_tokens)]
    positions = [p + k for p, e in zip(prefix, extend, strict=True) for k in range(e)]
    # Distinct slots, free or cached ones; what the pool cannot hold goes to the padding slot.
    free = [int(s) for s in rng.permutation(world.num_slots - 1)[:num_tokens] + 1] if world.num_slots > 1 else []
    slots = free + [0] * (num_tokens - len(free))
    slots = replace_some(draw, slots, (0,))
    tails = world.tails.clone()
    owners = [draw(owner_numbers) for _ in rows]
    damage_records(draw, world.endpoint.records)
    if hostile:
        rows = _distinct(replace_some(draw, rows, (*HOSTILE, world.num_rows)))
        prefix = replace_some(draw, prefix)
        seeds_ = replace_some(draw, seeds_, (*HOSTILE, 0, 1, world.num_slots))
        slots = replace_some(draw, slots, (*HOSTILE, world.num_slots, world.num_slots + 1))
        positions = replace_some(draw, positions, (*HOSTILE, 0))
        tokens = replace_some(draw, tokens)
        offsets = replace_some(draw, offsets, (*HOSTILE, 0, 1, num_tokens, num_tokens + 5), most=2)
        if len(tails) > 1:
            tails[draw(st.integers(1, len(tails) - 1))] = ANCHOR
    count = draw(st.sampled_from([len(rows)] * 5 + [0, -1, len(rows) + 9]))
    _give_up_shared_tokens(rows, offsets, slots, world.num_rows, count)
    expected = None
    if draw(st.booleans()):
        expected = int64(replace_some(draw, tokens, (-1, 0, 7)))
    spare = draw(st.integers(0, 2))
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
        "track_lifetime": draw(st.booleans()),
        "violations": draw(violation_logs()),
        "counters": torch.arange(2 * len(Tag)).view(-1, 2),
    }


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
