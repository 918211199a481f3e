"""Cases of seal: pools of any geometry, records in any state, lists and ranges of slots."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from kv_canary.constants import OWNER_BITS, OWNER_MASK, STEP_MASK, to_signed
from kv_canary.difftest.strategies.domain import draw_giant, int64, steps
from kv_canary.difftest.strategies.seals import seal_all, sealed_pools


@st.composite
def cases(draw: Any, *, giant: bool | None = None) -> dict[str, Any]:
    """Draw one call of seal; `giant`: whether rows span more than 2**31 elements; None: sometimes."""
    pool = draw(sealed_pools(giant=draw_giant(draw, giant)))
    if draw(st.booleans()):
        # Sealed before.
        seal_all(pool)
    return {**pool.arguments, "written_in": _step(draw, pool.endpoint.records, pool.taken())}


def _step(draw: Any, records: torch.Tensor, taken: list[int]) -> torch.Tensor | None:
    """Draw the step whose records' slots are sealed: none, that of some slot, or any; some slots may get it."""
    if draw(st.booleans()):
        return None
    step = draw(steps)
    for _ in range(draw(st.integers(0, 3)) if taken else 0):
        record = records[draw(st.sampled_from(taken))]
        if draw(st.booleans()):
            step = to_signed(int(record[3]) >> OWNER_BITS & STEP_MASK)
        else:
            record[3] = (int(record[3]) & OWNER_MASK) | to_signed((step & STEP_MASK) << OWNER_BITS)
    return int64([step])
