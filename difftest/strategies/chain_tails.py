"""Cases of chain_tails."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from kv_canary.difftest.strategies.domain import draw_giant, strided_rows
from kv_canary.difftest.strategies.edge_values import INT64_MAX, INT64_MIN
from kv_canary.difftest.strategies.segments import segments


@st.composite
def cases(draw: Any, *, giant: bool | None = None) -> dict[str, Any]:
    """Draw one call of chain_tails; `giant`: whether rows span more than 2**31 elements; None: sometimes."""
    giant = draw_giant(draw, giant)
    drawn = draw(segments())
    rng = np.random.default_rng(drawn["seed"])
    tails, anchors = (torch.from_numpy(rng.integers(INT64_MIN, INT64_MAX, drawn["num_rows"])) for _ in range(2))
    pool = torch.from_numpy(rng.integers(-5, 1 << 17, (drawn["num_rows"], drawn["max_len"]), dtype=np.int32))
    return {
        **drawn["tensors"],
        "anchors": anchors if draw(st.booleans()) else None,
        "tails": tails,
        "pool": strided_rows(draw, pool, giant=giant) if giant or draw(st.booleans()) else None,
        "status": torch.zeros(1, dtype=torch.int32),
    }
