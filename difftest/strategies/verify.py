"""Cases of verify: plans over records that fit, then damaged; and plans that hold anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from kv_canary.constants import HEAD_OF_CHAIN, MASK64, UNCHECKED, Tag, to_signed
from kv_canary.difftest.strategies.domain import (
    World,
    damage_bytes,
    damage_records,
    draw_giant,
    int64,
    often,
    replace_some,
    steps,
    violation_logs,
    worlds,
)
from kv_canary.difftest.strategies.edge_values import HOSTILE, INT64_MAX, INT64_MIN
from kv_canary.specs.structures import VerifyPlan


def plan_world(world: World, *, first: dict[int, int] | None = None) -> dict[str, list[int]]:
    """Return the entries, by field, that verify each request's positions from `first[row]` (0) on."""
    entries: dict[str, list[int]] = {"slots": [], "prev_slots": [], "positions": [], "tokens": [], "rows": []}
    for row, n in zip(world.rows, world.lengths, strict=True):
        start = min((first or {}).get(row, 0), n)
        slots = world.slots[row].tolist()
        for p in range(start, n):
            previous = slots[p - 1] if p > start else UNCHECKED
            entries["slots"].append(slots[p])
            entries["prev_slots"].append(HEAD_OF_CHAIN if p == 0 else previous)
            entries["positions"].append(p)
            entries["tokens"].append(int(world.tokens[row, p]))
            entries["rows"].append(row)
    return entries


@st.composite
def cases(draw: Any, *, giant: bool | None = None) -> dict[str, Any]:
    """Draw one call of verify; `giant`: whether rows span more than 2**31 elements; None: sometimes."""
    giant = draw_giant(draw, giant)
    world = draw(worlds(tag=int(draw(st.sampled_from(list(Tag)))), giant=giant))
    rng = np.random.default_rng(world.seed)
    entries = plan_world(world, first={r: draw(st.sampled_from([0, 0, 1, 16])) for r in world.rows})
    n = len(entries["slots"])
    if draw(st.booleans()):
        entries["tokens"] = [-1] * n
    records = world.endpoint.records
    if n and often(draw, 6):
        return {**_one_flaw(draw, world, entries), "anchors": world.anchors}
    damage_records(draw, records, entries["slots"])
    _use_high_bits(draw, entries, records)
    if n and often(draw, 6):
        # Nothing is where it should be, in more entries than three programs take.
        n = draw(st.integers(385, 520))
        entries = {name: (values * n)[:n] for name, values in entries.items()}
        entries["positions"] = [p + 1 for p in entries["positions"]]
    damage_bytes(draw, world.endpoint.k_source)
    damage_bytes(draw, world.endpoint.v_source)
    outside = (-1, 0, world.num_rows, (1 << 31) - 1, -(1 << 31))
    if n and bool(records[0].any()):
        # A predecessor that is padding says nothing, even if something is there.
        entries["prev_slots"] = replace_some(draw, entries["prev_slots"], (0,))
    anchors = world.anchors
    if anchors is None and draw(st.booleans()):
        anchors = torch.from_numpy(rng.integers(INT64_MIN, INT64_MAX, world.num_rows))
    if n and anchors is not None and draw(st.booleans()):
        # Heads of chains of rows that have no anchor.
        for row in outside:
            i = draw(st.integers(0, n - 1))
            entries["rows"][i], entries["prev_slots"][i] = row, HEAD_OF_CHAIN
    if draw(st.booleans()):
        # Entries an engine would never ask for: other slots, positions and tokens, and values out of any range.
        odd = (*HOSTILE, 0, 1, world.num_slots - 1, world.num_slots, world.num_slots + 1)
        for name, value in (("slots", 0), ("slots", world.num_slots), ("prev_slots", 0), ("tokens", 0)):
            entries[name] = replace_some(draw, entries[name], (value,), most=2)
        for name in ("slots", "prev_slots", "positions", "tokens"):
            entries[name] = replace_some(draw, entries[name], odd)
        entries["rows"] = replace_some(draw, entries["rows"], outside)
    spare = draw(st.integers(0, 3))
    filler = [int(v) for v in rng.integers(-5, 50, spare)]
    valid = draw(st.sampled_from([n, n, n, n - 1, 0, -1, n + spare, n + spare + 1, (1 << 31) - 1]))
    call = _call(draw, world, {name: values + filler for name, values in entries.items()}, valid=valid)
    return {**call, "anchors": anchors if draw(st.booleans()) or anchors is not world.anchors else None}


def _one_flaw(draw: Any, world: World, entries: dict[str, list[int]]) -> dict[str, Any]:
    """Return the call, less anchors, that verifies one entry, whose record or bytes are wrong in one bit if at all."""
    i = draw(st.integers(0, len(entries["slots"]) - 1))
    kind = draw(st.sampled_from(["chain", "k", "v", "token", "position", "bytes"]))
    if kind == "bytes":
        damage_bytes(draw, world.endpoint.k_source)
        damage_bytes(draw, world.endpoint.v_source)
    else:
        word, low = {"chain": (1, 0), "k": (2, 0), "v": (2, 32), "token": (0, 0), "position": (0, 32)}[kind]
        bit = low + draw(st.integers(0, 31))
        world.endpoint.records[entries["slots"][i], word] ^= to_signed(1 << bit)
    return _call(draw, world, {name: [values[i]] for name, values in entries.items()}, valid=1)


def _call(draw: Any, world: World, entries: dict[str, list[int]], *, valid: int) -> dict[str, Any]:
    """Return the call, less anchors, that verifies `entries`."""
    return {
        "verify_plan": VerifyPlan(
            **{name: int64(entries[name]) for name in ("slots", "prev_slots", "positions", "tokens")},
            rows=torch.tensor(entries["rows"], dtype=torch.int32),
            num_valid=torch.tensor([valid], dtype=torch.int32),
            num_requested=torch.tensor([len(entries["slots"])]),
        ),
        "endpoint": world.endpoint,
        "step": int64([draw(steps)]),
        "track_lifetime": draw(st.booleans()),
        "violations": draw(violation_logs()),
        "counters": torch.arange(2 * len(Tag)).view(-1, 2),
    }


def _use_high_bits(draw: Any, entries: dict[str, list[int]], records: torch.Tensor) -> None:
    """Make some records hold tokens and positions from 2**31 on, or token 0, as their entries expect."""
    for _ in range(draw(st.sampled_from([0, 3, 3])) if entries["slots"] else 0):
        i = draw(st.integers(0, len(entries["slots"]) - 1))
        slot = entries["slots"][i]
        identity = int(records[slot, 0]) & MASK64
        kind = draw(st.sampled_from(["token", "position", "zero"]))
        if kind == "zero":
            identity &= ~0xFFFFFFFF
        else:
            identity |= 1 << (31 if kind == "token" else 63)
        records[slot, 0] = to_signed(identity)
        entries["tokens"][i], entries["positions"][i] = identity & 0xFFFFFFFF, identity >> 32
