"""Cases of retire: freed pages, freed twice, never written, and slots that are none."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from kv_canary.difftest.hostile import HOSTILE
from kv_canary.difftest.strategies.domain import (
    damage_records,
    draw_giant,
    int64,
    owner_numbers,
    replace_some,
    steps,
    strided_rows,
    worlds,
)


@st.composite
def cases(draw: Any, *, giant: bool | None = None) -> dict[str, Any]:
    """Draw one call of retire; `giant`: whether rows span more than 2**31 elements, else rarely so."""
    giant = draw_giant(draw, giant)
    world = draw(worlds(giant=giant))
    rng = np.random.default_rng(world.seed)
    records = world.endpoint.records
    damage_records(draw, records)
    slots = [int(s) for s in rng.integers(0, world.num_slots, draw(st.sampled_from([0, 1, 7, 255, 256, 257, 600])))]
    if draw(st.booleans()):
        slots = replace_some(draw, slots, (*HOSTILE, world.num_slots))
    others = [strided_rows(draw, records.flip(0), multiple=4)] if draw(st.booleans()) else []
    return {
        "slots": int64(slots),
        "owner": draw(owner_numbers),
        "step": int64([draw(steps)]),
        "records": (records, *others),
    }
