"""Flat tokens cut into segments by row: what scatter_token_ids and chain_tails take."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from kv_canary.difftest.hostile import HOSTILE
from kv_canary.difftest.strategies.domain import int64, lengths, replace_some, seeds


@st.composite
def segments(draw: Any) -> dict[str, Any]:
    """Draw `num_rows`, `max_len` and the tensors flat, offsets, rows, starts; hostile ones half of the time."""
    rng = np.random.default_rng(draw(seeds))
    bs = draw(st.one_of(st.just(1), st.integers(0, 8)))
    lens = [draw(lengths(longest=2049)) for _ in range(bs)]
    num_rows = bs + 1 + draw(st.integers(0, 2))
    rows = [int(r) for r in rng.permutation(np.arange(1, num_rows))[:bs]]
    for _ in range(draw(st.integers(0, 2)) if bs > 1 else 0):
        rows[draw(st.integers(0, bs - 1))] = 0
    max_len = max(1, draw(lengths()))
    starts = [0 if rng.random() < 0.5 else int(rng.integers(0, max_len + 3)) for _ in range(bs)]
    offsets = [int(o) for o in np.cumsum([0, *lens])]
    total = offsets[-1] + draw(st.integers(0, 3))
    tokens = [int(t) for t in rng.integers(-(1 << 40), 1 << 40, total)]
    if draw(st.booleans()):
        rows = replace_some(draw, rows, (*HOSTILE, num_rows))
        starts = replace_some(draw, starts, (*HOSTILE, max_len))
        offsets = replace_some(draw, offsets, (*HOSTILE, 0, total, total + 5))
    # The same row twice is undefined: later ones become padding.
    rows = [0 if r in rows[:i] else r for i, r in enumerate(rows)]
    return {
        "num_rows": num_rows,
        "max_len": max_len,
        "seed": draw(seeds),
        "tensors": {
            "flat": int64(tokens),
            "offsets": int64(offsets),
            "rows": int64(rows),
            "starts": int64(starts),
        },
    }
