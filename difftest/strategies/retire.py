"""Cases of retire: freed pages, freed twice, never written, and slots that are none."""

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
    """Draw one call of retire; `giant`: whether rows span more than 2**31 elements; None: sometimes."""
    giant = draw_giant(draw, giant)
    # More slots than three programs take, in a pool that has as many.
    many = often(draw, 5)
    world = draw(worlds(giant=giant, room=1000 if many else 0))
    rng = np.random.default_rng(world.seed)
    records = world.endpoint.records
    n = draw(st.sampled_from([769, 1000] if many else [0, 1, 1, 7, 30, 255, 256, 257, 600]))
    slots = [int(s) for s in rng.integers(0, world.num_slots, n)]
    damage_records(draw, records, slots)
    if draw(st.booleans()):
        slots = replace_some(draw, slots, (*HOSTILE, 0, world.num_slots))
        slots = replace_some(draw, slots, (world.num_slots,), most=1)
    others = [strided_rows(draw, records.flip(0), multiple=4)] if draw(st.booleans()) else []
    return {
        "slots": int64(slots),
        "owner": int64([draw(owner_numbers)]),
        "step": int64([draw(steps)]),
        "records": (records, *others),
    }
