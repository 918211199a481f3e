"""Flat tokens cut into segments by row: what scatter_token_ids and chain_tails take."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from kv_canary.difftest.strategies.domain import int64, lengths, often, replace_some, seeds
from kv_canary.difftest.strategies.edge_values import HOSTILE, INT64_MAX, INT64_MIN


@st.composite
def segments(draw: Any) -> dict[str, Any]:
    """Draw `num_rows`, `max_len` and the tensors flat, offsets, rows, starts; hostile ones half of the time."""
    rng = np.random.default_rng(draw(seeds))
    bs = draw(st.one_of(st.just(1), st.integers(2, 8), st.integers(0, 8)))
    if often(draw, 12):
        # More take long in the interpreter, where each is a program; see large.py.
        bs = draw(st.sampled_from([31, 32, 33, 40]))
    # One request alone often crosses several tiles.
    alone = bs == 1 and not often(draw, 3)
    longest = st.sampled_from([513, 600, 1025, 1100, 2049, 4097, 4100, 8200]) if alone else lengths(longest=4097)
    lens = [draw(longest) for _ in range(min(bs, 8))]
    lens += [int(n) for n in rng.integers(0, 4, bs - len(lens))]
    if bs > 1 and often(draw, 4):
        # One token each, but for one that has none, and a later one that has its token.
        lens, other = [1] * bs, draw(st.integers(1, bs - 1))
        lens[draw(st.integers(0, other - 1))], lens[other] = 0, 2
    num_rows = bs + 1 + draw(st.integers(0, 2))
    rows = [int(r) for r in rng.permutation(np.arange(1, num_rows))[:bs]]
    for _ in range(draw(st.integers(0, 2)) if bs > 1 else 0):
        rows[draw(st.integers(0, bs - 1))] = 0
    max_len = max(1, lens[0] + draw(st.integers(-1, 2)) if alone else draw(lengths()))
    starts = [0 if alone or rng.random() < 0.5 else int(rng.integers(0, max_len + 3)) for _ in range(bs)]
    offsets = [int(o) for o in np.cumsum([0, *lens])]
    total = offsets[-1] + draw(st.integers(0, 3))
    tokens = [int(t) for t in rng.integers(-(1 << 40), 1 << 40, total)]
    if alone and often(draw, 3):
        # The first program's tile begins before the flat inputs, and another one's inside them.
        offsets[0] = -draw(st.integers(1, 20))
    if draw(st.booleans()):
        rows = replace_some(draw, rows, (*HOSTILE, num_rows))
        starts = replace_some(draw, starts, (*HOSTILE, max_len))
        offsets = replace_some(draw, offsets, (*HOSTILE, 0, total, total + 5))
        if not often(draw, 3):
            # A segment that begins before the flat inputs and ends inside them.
            offsets[0] = -draw(st.integers(1, 20))
        if bs > 1 and not often(draw, 3):
            # A bad row and a bad start, in either order.
            first = draw(st.integers(0, bs - 1))
            second = (first + draw(st.integers(1, bs - 1))) % bs
            rows[first] = draw(st.sampled_from([-1, num_rows, INT64_MAX]))
            starts[second] = draw(st.sampled_from([-1, -2, INT64_MIN]))
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
