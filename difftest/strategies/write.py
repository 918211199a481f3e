"""Cases of write: batches that extend cached requests, and plans and slots that hold anything."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from kv_canary.constants import ANCHOR, HEAD_OF_CHAIN, Tag
from kv_canary.difftest.strategies.domain import (
    World,
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
from kv_canary.difftest.strategies.edge_values import HOSTILE, INT64_MAX, INT64_MIN
from kv_canary.reference.hashing import identity, walk_chains, writer
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
    batch = _draw_batch(draw, world, kind, rng, last_slots=giant)
    _contradict(draw, batch, world, rng)
    damage_records(draw, world.endpoint.records, [*batch.seeds, *batch.slots[:40]])
    if hostile:
        _make_hostile(draw, batch, world)
    others = [len(batch.rows)] if giant else [0, -1, len(batch.rows) + 9, len(batch.rows) + 9]
    count = draw(st.sampled_from([len(batch.rows)] * 20 + others))
    if draw(st.booleans()):
        _share_slots(draw, batch)
    _give_up_shared_tokens(batch, count)
    given = _draw_given(draw, batch, rng) if draw(st.booleans()) else None
    expected = int64(_make_wrong(draw, batch, world.num_slots)) if draw(st.booleans()) else None
    tracked = draw(st.booleans())
    if draw(st.booleans()):
        tracked = not often(draw, 6)
        _hold_others(rng, world.endpoint.records, batch, count)
    spare = 0 if kind in ("alone", "nobody") else draw(st.integers(0, 2))
    return {
        "write_plan": WritePlan(
            rows=int64(batch.rows + [0] * spare),
            owners=int64(batch.owners + [5] * spare),
            offsets=int64(batch.offsets + [len(batch.tokens)] * spare),
            prefix_lens=int64(batch.prefix + [3] * spare),
            seed_slots=int64(batch.seeds + [1] * spare),
            num_requests=torch.tensor([count], dtype=torch.int32),
        ),
        "input_ids": int64(batch.tokens),
        "positions": int64(batch.positions),
        "out_slots": int64(batch.slots),
        "endpoint": world.endpoint,
        "tails": batch.tails,
        "step": int64([draw(steps)]),
        "check_positions": torch.tensor([draw(st.sampled_from([0, 1, 1, -7]))], dtype=torch.int32),
        "expected_input_ids": expected,
        "given_rows": None if given is None else given[0],
        "given_lens": None if given is None else given[1],
        "track_lifetime": tracked,
        "ring": not often(draw, 2),
        "violations": draw(violation_logs()),
        "counters": torch.arange(2 * len(Tag)).view(-1, 2),
    }


@dataclass(kw_only=True)
class _Batch:
    """A batch to be written, while it is being drawn: requests, and their tokens one after the other."""

    rows: list[int]
    prefix: list[int]
    tails: torch.Tensor
    seeds: list[int]
    offsets: list[int]
    tokens: list[int]
    positions: list[int]
    slots: list[int]
    owners: list[int]


def _draw_batch(draw: Any, world: World, kind: str, rng: np.random.Generator, *, last_slots: bool) -> _Batch:
    """Draw a batch that extends what `world` has cached; with `last_slots` it may take those of the pool's end."""
    rows, prefix, tails = _draw_requests(draw, world, kind, rng)
    long = draw(st.booleans())
    extend = [_draw_extend(draw, kind, long=long) for _ in rows]
    if len(rows) > 1 and draw(st.booleans()):
        rows[draw(st.integers(0, len(rows) - 1))] = 0
    seeds = [
        int(world.slots[r, p - 1]) if 0 < r < world.num_rows and 0 < p <= world.slots.shape[1] else HEAD_OF_CHAIN
        for r, p in zip(rows, prefix, strict=True)
    ]
    records = world.endpoint.records
    if kind == "many" and world.num_slots > 1:
        records[1:, :3] += (records[1:] == 0).all(dim=1, keepdim=True) * world.seed
        seeds = [int(s) for s in rng.integers(0, world.num_slots, len(rows))]
    if kind == "many" and not often(draw, 2):
        # One of them has several tiles.
        extend[draw(st.integers(0, len(extend) - 1))] = 300
    # Tokens of nobody may come first, and follow.
    before, behind = draw(st.sampled_from([(0, 0), (0, 0), (0, 0), (0, 3), (5, 0)]))
    num_tokens = before + sum(extend) + behind
    tokens = [int(t) for t in rng.integers(0, 1 << 17, num_tokens)]
    positions = [0] * before + [p + k for p, e in zip(prefix, extend, strict=True) for k in range(e)]
    # Distinct slots, free or cached ones; what the pool cannot hold goes to the padding slot.
    free = [int(s) for s in rng.permutation(world.num_slots - 1) + 1] if world.num_slots > 1 else []
    if last_slots and draw(st.booleans()):
        free.sort(reverse=True)
    slots = replace_some(draw, (free + [0] * num_tokens)[:num_tokens], (0,))
    owners = [draw(owner_numbers) for _ in rows]
    if draw(st.booleans()):
        owners = [n % (1 << 24) + (1 << 24) for n in owners]
    return _Batch(
        rows=rows,
        prefix=prefix,
        tails=tails,
        seeds=seeds,
        offsets=[int(o) for o in np.cumsum([before, *extend])],
        tokens=tokens,
        positions=positions + [0] * (num_tokens - len(positions)),
        slots=slots,
        owners=owners,
    )


def _draw_requests(
    draw: Any, world: World, kind: str, rng: np.random.Generator
) -> tuple[list[int], list[int], torch.Tensor]:
    """Return rows, their prefixes' lengths, and the tails of all rows."""
    rows, prefix, tails = list(world.rows), list(world.lengths), world.tails.clone()
    fresh = [r for r in range(1, world.num_rows) if r not in rows]
    if kind == "fresh":
        return fresh, [0] * len(fresh), tails
    if kind == "alone":
        rows = (rows + fresh)[:1]
        return rows, [*prefix, 0][: len(rows)], tails
    if kind == "many":
        # More requests than a row of the ring each takes, whose prefixes are mostly not theirs.
        rows = list(range(1, draw(st.integers(28, 40))))
        prefix = [int(p) for p in rng.integers(0, 20, len(rows))]
        return rows, prefix, torch.cat([tails, torch.from_numpy(rng.integers(INT64_MIN, INT64_MAX, 40))])
    if kind == "nobody":
        return [], [], tails
    if kind == "mixed" and fresh and draw(st.booleans()):
        return [*rows, fresh[0]], [*prefix, 0], tails
    return rows, prefix, tails


def _draw_extend(draw: Any, kind: str, *, long: bool) -> int:
    """Draw the number of tokens that one request writes."""
    if kind == "decode":
        return 1
    if kind == "many":
        return int(draw(st.sampled_from([0, 1, 1, 1, 2])))
    if kind == "alone" or (long and often(draw, 3)):
        return int(draw(st.sampled_from([257, 300, 511, 512, 513, 700, 1025])))
    return int(draw(st.one_of(st.just(1), lengths(longest=1025))))


def _contradict(draw: Any, batch: _Batch, world: World, rng: np.random.Generator) -> None:
    """Make seeds say something else than tails, or be none that can say anything."""
    for i, row in enumerate(batch.rows[:6]):
        # With no prefix nobody asks the seed.
        if often(draw, 5):
            batch.tails[row] ^= 1 << draw(st.integers(0, 62))
        if i < 3 and often(draw, 4):
            batch.prefix[i], batch.seeds[i] = 1, 0
        elif often(draw, 5):
            batch.prefix[i] = draw(st.integers(0, 1))
            batch.seeds[i] = int(rng.integers(1, world.num_slots)) if world.num_slots > 1 else 0
        elif often(draw, 5):
            # Just past the pool.
            batch.prefix[i], batch.seeds[i] = max(batch.prefix[i], 1), world.num_slots


def _make_hostile(draw: Any, batch: _Batch, world: World) -> None:
    """Make any of the batch's numbers anything."""
    num_tokens = len(batch.tokens)
    batch.rows = _distinct(replace_some(draw, batch.rows, (*HOSTILE, len(batch.tails))))
    batch.prefix = replace_some(draw, batch.prefix)
    batch.seeds = replace_some(draw, batch.seeds, (*HOSTILE, 0, 1, world.num_slots))
    batch.slots = replace_some(draw, batch.slots, (*HOSTILE, world.num_slots, world.num_slots + 1))
    batch.positions = replace_some(draw, batch.positions, (*HOSTILE, 0))
    batch.tokens = replace_some(draw, batch.tokens)
    batch.offsets = replace_some(draw, batch.offsets, (*HOSTILE, 0, 1, num_tokens, num_tokens + 5), most=2)
    if len(batch.tails) > 1:
        batch.tails[draw(st.integers(1, len(batch.tails) - 1))] = ANCHOR


def _make_wrong(draw: Any, batch: _Batch, num_slots: int) -> list[int]:
    """Return what tokens are expected: some others than the batch has, often for a wrong slot or position as well."""
    expected = replace_some(draw, batch.tokens, (-1, 0, 7))
    for _ in range(draw(st.integers(0, 3)) if expected else 0):
        j = draw(st.integers(0, len(expected) - 1))
        expected[j] ^= 1
        what = draw(st.sampled_from(["slot", "position", "both", "token"]))
        if what in ("slot", "both"):
            batch.slots[j] = draw(st.sampled_from([-1, num_slots, INT64_MAX]))
        if what in ("position", "both"):
            batch.positions[j] += draw(st.sampled_from([-1, 1, 1 << 31, 1 << 32]))
    return expected


def _hold_others(rng: np.random.Generator, records: torch.Tensor, batch: _Batch, count: int) -> None:
    """Make slots to be written hold what an overwrite is told from: others' records, equal in part to the new ones."""
    for r, (row, owner) in enumerate(zip(batch.rows, batch.owners, strict=True)):
        first, last = max(batch.offsets[r], 0), min(batch.offsets[r + 1], len(batch.tokens))
        if r >= count or not 0 < row < len(batch.tails) or first >= last:
            continue
        identities = identity(int64(batch.tokens[first:last]), int64(batch.positions[first:last]))
        chains = walk_chains(batch.tails[row : row + 1], int64([last - first]), identities).tolist()
        kinds = int(rng.integers(0, 8))
        for i, k in enumerate(rng.permutation(last - first)[:16].tolist()):
            slot = batch.slots[first + k]
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


def _share_slots(draw: Any, batch: _Batch) -> None:
    """Let several tokens have one slot: of one request or of two, of the same token at the same position or not."""
    for _ in range(draw(st.integers(1, 4)) if len(batch.slots) > 1 else 0):
        first = draw(st.integers(0, len(batch.slots) - 2))
        second = draw(
            st.sampled_from([first + 1, len(batch.slots) - 1, draw(st.integers(first + 1, len(batch.slots) - 1))])
        )
        batch.slots[second] = batch.slots[first]
        if not often(draw, 2):
            batch.tokens[second] = batch.tokens[first]
        if not often(draw, 2):
            batch.positions[second] = batch.positions[first]
    if len(batch.owners) > 1 and draw(st.booleans()):
        _begin_alike(draw, batch)
    if len(batch.owners) > 1 and often(draw, 3):
        # Another request of the same number in a record.
        batch.owners[-1] = batch.owners[0] + (1 << 24)


def _begin_alike(draw: Any, batch: _Batch) -> None:
    """Let two requests go on from one prefix, over the same tokens to the same slots, as far as the shorter one goes.

    Or nearly so: the prefix may be another one, or a token; or the later one is padding.
    """
    # Requests with tokens, of rows that are some, if there are two.
    requests = [
        r for r, row in enumerate(batch.rows) if 0 < row < len(batch.tails) and batch.offsets[r] < batch.offsets[r + 1]
    ]
    requests = requests if len(requests) > 1 else list(range(len(batch.rows)))
    one, other = sorted(draw(st.permutations(requests))[:2])
    first, second = batch.offsets[one], batch.offsets[other]
    length = min(batch.offsets[one + 1] - first, batch.offsets[other + 1] - second)
    if not (0 <= first < second and first + length <= second and second + length <= len(batch.tokens)):
        return
    for values in (batch.tokens, batch.positions, batch.slots):
        values[second : second + length] = values[first : first + length]
    rows = batch.rows[one], batch.rows[other]
    if all(0 < row < len(batch.tails) for row in rows) and not often(draw, 4):
        batch.tails[rows[1]] = batch.tails[rows[0]]
    if often(draw, 3):
        batch.rows[other] = 0
    if length > 0 and often(draw, 3):
        batch.tokens[second + draw(st.integers(0, length - 1))] ^= 1


def _draw_given(draw: Any, batch: _Batch, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows and lengths as the model is given them, most of them right, of as many requests as not."""
    rows, lens = list(batch.rows), []
    for r, prefix in enumerate(batch.prefix):
        first = min(max(batch.offsets[r], 0), len(batch.tokens))
        lens.append(prefix + max(min(batch.offsets[r + 1], len(batch.tokens)) - first, 0))
    lens = [(n + (1 << 63)) % (1 << 64) - (1 << 63) for n in lens]
    for _ in range(draw(st.integers(0, 3)) if rows else 0):
        r, what = draw(st.integers(0, len(rows) - 1)), draw(st.integers(0, 3))
        rows[r] ^= what % 2
        lens[r] ^= what // 2
    spare = draw(st.sampled_from([0, 0, 0, -1, 3]))
    if spare < 0:
        return int64(rows[:spare]), int64(lens[:spare])
    return int64(rows + [0] * spare), int64(lens + [int(n) for n in rng.integers(0, 9, spare)])


def _distinct(rows: list[int]) -> list[int]:
    """The same row twice in one write is undefined: later ones become padding."""
    return [0 if r in rows[:i] else r for i, r in enumerate(rows)]


def _give_up_shared_tokens(batch: _Batch, count: int) -> None:
    """Send to the padding slot every token that several requests would write, and what of nobody knows which is last.

    That is a slot that comes again behind the plan's last offset.
    """
    owners: Counter[int] = Counter()
    count = min(max(count, 0), len(batch.rows))
    for r, row in enumerate(batch.rows[:count]):
        if 0 < row < len(batch.tails):
            owners.update(range(max(batch.offsets[r], 0), min(batch.offsets[r + 1], len(batch.slots))))
    end = min(max(batch.offsets[count], 0), len(batch.slots))
    seen: set[int] = set()
    for j, slot in enumerate(batch.slots):
        if owners[j] > 1 or (j >= end and slot in seen):
            batch.slots[j] = 0
        seen.add(slot)
