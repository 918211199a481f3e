"""Cases of plan: batches over tables as engines keep them, and tables that hold anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from kv_canary.difftest.hostile import HOSTILE, HOSTILE_32, INT64_MAX, INT64_MIN
from kv_canary.difftest.strategies.domain import (
    batch_sizes,
    draw_giant,
    int64,
    lengths,
    often,
    owner_numbers,
    replace_some,
    seeds,
    steps,
    strided_rows,
)
from kv_canary.specs.structures import VerifyPlan, WritePlan


@st.composite
def cases(draw: Any, *, giant: bool | None = None) -> dict[str, Any]:
    """Draw one call of plan; `giant`: whether rows span more than 2**31 elements; None: sometimes."""
    giant = draw_giant(draw, giant)
    hostile = draw(st.booleans())
    rng = np.random.default_rng(draw(seeds))
    bs = max(draw(batch_sizes()), 1 if giant else 0)
    # Three blocks of requests make a wide table large.
    width = (
        24
        if bs > 512
        else max(1, draw(st.sampled_from([257, 513, 600]) if bs == 1 and draw(st.booleans()) else lengths()))
    )
    short = st.integers(0, width) if bs > 20 else st.one_of(st.just(width), st.integers(0, width), st.just(width))
    prefix = [draw(short) for _ in range(min(bs, 20))]
    prefix += [int(p) for p in rng.integers(0, min(width, 20) + 1, bs - len(prefix))]
    kind = draw(st.sampled_from(["decode", "extend", "mixed", "fresh", "continued"]))
    if kind == "fresh":
        prefix = [0] * bs
    if kind in ("decode", "continued"):
        prefix = [max(p, 1) for p in prefix]
    extend = [1] * bs if kind == "decode" else [int(e) for e in rng.integers(0 if kind == "mixed" else 2, 40, bs)]
    num_rows = bs + 1 + draw(st.integers(0, 2))
    rows = [int(r) for r in rng.permutation(np.arange(1, num_rows))[:bs]]
    if giant:
        # The last rows are those that lie far.
        rows = [int(r) for r in range(num_rows - 1, num_rows - 1 - bs, -1)]
    for _ in range(draw(st.integers(0, 2)) if bs > 1 else 0):
        rows[draw(st.integers(0, bs - 1))] = 0
    if draw(st.sampled_from([False] * (9 if bs <= 20 else 2) + [True])):
        # A captured graph that is replayed for nobody.
        rows = [0] * bs
    num_slots = draw(st.sampled_from([1, 40, 5000]))
    table = rng.integers(0, num_slots, (num_rows, width), dtype=np.int32)

    lut = None
    if not often(draw, 3):
        # A sub-pool: most slots have a place in it, evicted ones map to 0.
        lut = rng.integers(0, num_slots, num_slots)
        lut[rng.random(num_slots) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = 0
    if hostile:
        rows = replace_some(draw, rows, (*HOSTILE, num_rows))
        rows = replace_some(draw, rows, (num_rows,), most=1)
        prefix = replace_some(draw, prefix, (*HOSTILE, width + 1))
        extend = replace_some(draw, extend)
        for _ in range(draw(st.sampled_from([0, 0, 1, 5]))):
            at = draw(st.integers(0, num_rows - 1)), draw(st.integers(0, width - 1))
            table[at] = draw(st.sampled_from([*HOSTILE_32, num_slots]))
        if lut is not None and draw(st.booleans()):
            for _ in range(draw(st.integers(0, 3))):
                lut[draw(st.integers(0, num_slots - 1))] = draw(st.sampled_from(HOSTILE))

    cached = [(r, p) for r, p in zip(rows, prefix, strict=True) if 0 < r < num_rows and 0 < p <= width]
    if cached and not often(draw, 3):
        # Cells that a live request does rely on; often a single bad one in all the table.
        bad = st.sampled_from([num_slots, num_slots, num_slots + 1, (1 << 31) - 1, -1, -(1 << 31)])
        for _ in range(draw(st.sampled_from([1, 1, 1, 1, 3]))):
            row, p = cached[draw(st.integers(0, len(cached) - 1))]
            table[row, draw(st.one_of(st.just(p - 1), st.integers(0, p - 1)))] = draw(bad)

    owners = [draw(owner_numbers) for _ in range(min(bs, 20))]
    owners += [int(n) for n in rng.integers(0, 1 << 25, bs - len(owners))]
    # Of a giant case one table is.
    expected = not often(draw, 3)
    far_tokens = expected and draw(st.booleans())
    arguments: dict[str, Any] = {
        "rows": int64(rows),
        "owners": int64(owners) if draw(st.booleans()) else None,
        "prefix_lens": int64(prefix),
        "extend_lens": int64(extend),
        "req_to_token": strided_rows(draw, torch.from_numpy(table), giant=giant and not far_tokens),
        "window": draw(st.sampled_from([0] * 9 + [1, 2, 15, 16, 31, 127, 128, 1023, 1023])),
        "after_write": draw(st.booleans()),
        "lut": None if lut is None else torch.from_numpy(lut.astype(np.int64)),
    }
    if expected:
        token_rows = max(2 if giant else 1, num_rows - draw(st.integers(0, 2)))
        if cached and not giant and draw(st.booleans()):
            # A row in use is the first that has no tokens.
            token_rows = cached[draw(st.integers(0, len(cached) - 1))][0]
        shape = token_rows, max(1, width + draw(st.integers(-5, 5)))
        known = [int(n) for n in rng.integers(0, width + 8, bs)]
        pool = torch.from_numpy(rng.integers(-1, 1 << 17, shape, np.int32))
        arguments["expected_tokens"] = strided_rows(draw, pool, giant=giant and far_tokens)
        arguments["expected_lens"] = int64(replace_some(draw, known) if hostile else known)
        arguments["token_offset"] = draw(st.sampled_from([0, 1, -1, -1, 7]))
    if draw(st.booleans()):
        some = draw(st.sampled_from([(1, 2, 3, 4, 5), (1, 2, 3, 4, 5), (1, 2), (2, 1 << 62, INT64_MAX, 1 << 32)]))
        strides = [int(n) for n in rng.choice(some, bs)]
        arguments["strides"] = int64(replace_some(draw, strides) if hostile else strides)
        negative = st.sampled_from([INT64_MIN, INT64_MIN, -3, -1, -7])
        arguments["step"] = int64([draw(st.one_of(steps, negative, st.just(INT64_MAX)))])
    enough = sum(p for p in prefix if 0 <= p <= width)
    capacity = draw(st.one_of(st.just(enough), st.just(enough), st.integers(0, 300)))
    write_cap = bs + draw(st.integers(0, 2))
    return {
        **arguments,
        "verify_plan": VerifyPlan.allocate(verify_cap=capacity),
        "write_plan": WritePlan.allocate(write_cap=write_cap),
        "status": torch.zeros(1, dtype=torch.int32),
    }
