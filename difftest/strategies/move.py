"""Cases of move: forks, swaps and landings, and slots that are none."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from kv_canary.difftest.strategies.domain import (
    HOSTILE,
    damage_records,
    int64,
    owner_numbers,
    replace_some,
    steps,
    strided_rows,
    worlds,
)


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    """Draw one call of move."""
    world = draw(worlds())
    rng = np.random.default_rng(world.seed)
    records = world.endpoint.records
    damage_records(draw, records)
    n = draw(st.integers(0, min(world.num_slots, 300)))
    src = [int(s) for s in rng.integers(0, world.num_slots, n)]
    dst = [int(s) for s in rng.permutation(world.num_slots)[:n]]
    if draw(st.booleans()):
        src = replace_some(draw, src, (*HOSTILE, world.num_slots))
        dst = replace_some(draw, dst, (*HOSTILE, world.num_slots))
    others = [strided_rows(draw, records.flip(0), multiple=4)] if draw(st.booleans()) else []
    return {
        "src": int64(src),
        "dst": int64(dst),
        "owner": draw(owner_numbers),
        "step": int64([draw(steps)]),
        "records": (records, *others),
    }
