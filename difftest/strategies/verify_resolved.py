"""Cases of verify_resolved: what verify_prefixes left of a forward, then damaged; and entries that hold anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from kv_canary.backends import implementation
from kv_canary.constants import HEAD_OF_CHAIN, RESOLVED_WORDS, Tag
from kv_canary.difftest.hostile import HOSTILE, HOSTILE_32
from kv_canary.difftest.strategies import verify_prefixes
from kv_canary.difftest.strategies.domain import (
    damage_bytes,
    damage_records,
    int64,
    often,
    replace_some,
    seeds,
    steps,
    violation_logs,
)
from kv_canary.specs import get_spec
from kv_canary.specs.structures import ResolvedSlots

_INT32_MIN, _INT32_MAX = -(1 << 31), (1 << 31) - 1


@st.composite
def cases(draw: Any, *, giant: bool | None = None) -> dict[str, Any]:
    """Draw one call of verify_resolved; `giant`: whether rows span more than 2**31 elements; None: sometimes."""
    forward = get_spec("verify_prefixes").bind(draw(verify_prefixes.cases(giant=giant)))
    implementation("verify_prefixes", "reference")(**forward)
    rng = np.random.default_rng(draw(seeds))
    endpoint, rows = forward["endpoint"], forward["rows"].tolist()
    bs, num_slots = len(rows), len(endpoint.records)
    entries = forward["resolved"].entries[: int(forward["resolved"].num_valid)].tolist()
    if often(draw, 4):
        # Nothing is where it should be, in more entries than three programs take.
        entries = entries or [[1, HEAD_OF_CHAIN, 0, 0]]
        repeated = (entries[i % len(entries)] for i in range(draw(st.integers(385, 520))))
        entries = [[slot, previous, position + 1, request] for slot, previous, position, request in repeated]
    if often(draw, 3):
        # What the model did between HEAD and TAIL.
        damage_records(draw, endpoint.records, [entry[0] for entry in entries])
        damage_bytes(draw, endpoint.k_source)
        damage_bytes(draw, endpoint.v_source)
    if draw(st.booleans()):
        _make_hostile(draw, entries, num_slots=num_slots, bs=bs)
        rows = replace_some(draw, rows, (*HOSTILE, (1 << 32) + 1, 0))
        if entries and bs and not often(draw, 3):
            # A request that has become padding, whose entry is to be reported: nobody knows its token.
            entry = entries[draw(st.integers(0, len(entries) - 1))]
            rows[entry[3] % bs], entry[0] = 0, 0
    if often(draw, 12):
        # All of them are anything.
        entries = rng.integers(_INT32_MIN, _INT32_MAX, (draw(st.integers(0, 140)), RESOLVED_WORDS)).tolist()
    n, spare = len(entries), draw(st.integers(0, 3))
    entries += rng.integers(-5, 50, (spare, RESOLVED_WORDS)).tolist()
    valid = draw(st.sampled_from([n, n, n, n - 1, 0, -1, n + spare, n + spare + 1, _INT32_MAX, _INT32_MIN]))
    # Requests that HEAD saw may be gone.
    kept = draw(st.integers(0, bs)) if often(draw, 6) else bs
    known = forward["expected_lens"]
    return {
        "rows": int64(rows[:kept]),
        "expected_tokens": forward["expected_tokens"],
        "expected_lens": None if known is None else known[:kept],
        "token_offset": forward["token_offset"],
        "resolved": ResolvedSlots(
            entries=torch.tensor(entries, dtype=torch.int32).view(-1, RESOLVED_WORDS),
            num_valid=torch.tensor([valid], dtype=torch.int32),
            num_requested=torch.tensor([n]),
        ),
        "endpoint": endpoint,
        "anchors": forward["anchors"],
        "step": int64([draw(steps)]),
        "track_lifetime": draw(st.booleans()),
        "violations": draw(violation_logs()),
        "counters": torch.arange(2 * len(Tag)).view(-1, 2),
    }


def _make_hostile(draw: Any, entries: list[list[int]], *, num_slots: int, bs: int) -> None:
    """Let some words of some entries be what no table gave: other slots, positions and requests, and anything."""
    outside = (*HOSTILE_32, _INT32_MAX - 1)
    slots = (*outside, 0, 0, 1, num_slots - 1, num_slots, num_slots + 1)
    words = (slots, (*slots, -3, -4), (*outside, 0, 1, 1023), (*outside, bs, bs, bs + 1, bs - 1, 0, -1))
    for column, odd in enumerate(words):
        values = replace_some(draw, [entry[column] for entry in entries], odd)
        for entry, value in zip(entries, values, strict=True):
            entry[column] = value
    if entries and not often(draw, 3):
        # Something to report of a request that is not there.
        entry = entries[draw(st.integers(0, len(entries) - 1))]
        entry[0], entry[3] = 0, draw(st.sampled_from([bs, bs, bs + 1, -1]))
