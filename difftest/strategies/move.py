"""Cases of move: forks, swaps and landings, and slots that are none."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from kv_canary.difftest.strategies.domain import (
    damage_records,
    draw_giant,
    int64,
    often,
    owner_numbers,
    replace_some,
    steps,
    strided_rows,
    worlds,
)
from kv_canary.difftest.strategies.edge_values import HOSTILE


@st.composite
def cases(draw: Any, *, giant: bool | None = None) -> dict[str, Any]:
    """Draw one call of move; `giant`: whether rows span more than 2**31 elements; None: sometimes."""
    giant = draw_giant(draw, giant)
    # More slots than three programs take, in a pool that has as many.
    many = often(draw, 5)
    world = draw(worlds(giant=giant, room=1000 if many else draw(st.sampled_from([0, 0, 0, 300]))))
    rng = np.random.default_rng(world.seed)
    records = world.endpoint.records
    sizes = st.sampled_from([769, 1000]) if many else st.sampled_from([1, 1, 1, 255, 256, 257, 300])
    n = min(draw(sizes if many else st.one_of(st.integers(0, 40), sizes)), world.num_slots)
    src = [int(s) for s in rng.integers(0, world.num_slots, n)]
    dst = [int(s) for s in rng.permutation(world.num_slots)[:n]]
    damage_records(draw, records, src)
    if draw(st.booleans()):
        src = replace_some(draw, src, (*HOSTILE, 0, world.num_slots))
        dst = replace_some(draw, dst, (*HOSTILE, 0, world.num_slots))
        src, dst = (replace_some(draw, slots, (world.num_slots,), most=1) for slots in (src, dst))
    others = [strided_rows(draw, records.flip(0), multiple=4)] if draw(st.booleans()) else []
    return {
        "src": int64(src),
        "dst": int64(dst),
        "owner": draw(owner_numbers),
        "step": int64([draw(steps)]),
        "records": (records, *others),
    }
