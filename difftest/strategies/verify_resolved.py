"""Cases of verify_resolved: what verify_prefixes left of a forward, then damaged; and entries that hold anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from kv_canary.backends import implementation
from kv_canary.constants import HEAD_OF_CHAIN, RESOLVED_WORDS, RUN_ENTRIES, RUN_WORDS, Tag
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
from kv_canary.difftest.strategies.edge_values import HOSTILE, HOSTILE_32
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
    n = int(forward["resolved"].num_valid)
    entries, runs = (words[:n].tolist() for words in (forward["resolved"].entries, forward["resolved"].runs))
    if often(draw, 4):
        # Nothing is where it should be, in more entries than three programs take.
        entries, runs = (entries, runs) if entries else ([[1, -1]], [[HEAD_OF_CHAIN, 0]])
        picked = [i % len(entries) for i in range(draw(st.integers(385, 520)))]
        runs = [runs[i] for i in picked]
        entries = [[slot, _further(position)] for slot, position in (entries[i] for i in picked)]
    if often(draw, 3):
        # What the model did between HEAD and TAIL.
        damage_records(draw, endpoint.records, [entry[0] for entry in entries])
        damage_bytes(draw, endpoint.k_source)
        damage_bytes(draw, endpoint.v_source)
    if draw(st.booleans()):
        _make_hostile(draw, entries, runs, num_slots=num_slots, bs=bs)
        rows = replace_some(draw, rows, (*HOSTILE, (1 << 32) + 1, 0))
        if entries and bs and not often(draw, 3):
            # A request that has become padding, whose entry is to be reported: nobody knows its token.
            i = draw(st.integers(0, len(entries) - 1))
            rows[_request(entries, runs, i) % bs], entries[i][0] = 0, 0
    if often(draw, 12):
        # All of them are anything.
        anything = rng.integers(_INT32_MIN, _INT32_MAX, (2, draw(st.integers(0, 140)), 2))
        entries, runs = anything.tolist()
    n, spare = len(entries), draw(st.integers(0, 3))
    entries, runs = (words + rng.integers(-5, 50, (spare, 2)).tolist() for words in (entries, runs))
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
            runs=torch.tensor(runs, dtype=torch.int32).view(-1, RUN_WORDS),
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


def _make_hostile(draw: Any, entries: list[list[int]], runs: list[list[int]], *, num_slots: int, bs: int) -> None:
    """Make some words of some entries what no table gave: other slots, positions and requests, and anything."""
    outside = (*HOSTILE_32, _INT32_MAX - 1)
    slots = (*outside, 0, 0, 1, num_slots - 1, num_slots, num_slots + 1)
    previous, requests = (*slots, -3, -4), (*outside, bs, bs, bs + 1, bs - 1, 0, -1)
    positions = (*outside, 0, 1, 1023, ~0, ~1023)
    for words, odd in ((entries, (slots, positions)), (runs, (previous, requests))):
        for column, values in enumerate(odd):
            for entry, value in zip(words, replace_some(draw, [w[column] for w in words], values), strict=True):
                entry[column] = value
    followed = [i for i in range(len(entries) - 1) if entries[i + 1][1] >= 0 and (i + 1) % RUN_ENTRIES]
    if followed and not often(draw, 3):
        # A slot that reads like a slot code, before an entry that follows it.
        entries[draw(st.sampled_from(followed))][0] = HEAD_OF_CHAIN
    if entries and not often(draw, 3):
        # Something to report of a request that is not there.
        i = draw(st.integers(0, len(entries) - 1))
        entries[i], runs[i] = (
            [0, ~(entries[i][1] & _INT32_MAX)],
            [runs[i][0], draw(st.sampled_from([bs, bs, bs + 1, -1]))],
        )


def _further(position: int) -> int:
    """The position after the one that an entry holds, as it holds it."""
    return min(position + 1, _INT32_MAX) if position >= 0 else max(position - 1, _INT32_MIN)


def _request(entries: list[list[int]], runs: list[list[int]], i: int) -> int:
    """The request of entry i."""
    while entries[i][1] >= 0 and i % RUN_ENTRIES:
        i -= 1
    return runs[i][1]
