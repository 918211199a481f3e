"""Cases of scatter_token_ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from kv_canary.difftest.strategies.domain import draw_giant, often, strided_rows
from kv_canary.difftest.strategies.segments import segments


@st.composite
def cases(draw: Any, *, giant: bool | None = None) -> dict[str, Any]:
    """Draw one call of scatter_token_ids; `giant`: whether rows span more than 2**31 elements; None: sometimes."""
    giant = draw_giant(draw, giant)
    drawn = draw(segments())
    tensors = drawn["tensors"]
    if often(draw, 3):
        tensors["starts"] = None
    rng = np.random.default_rng(drawn["seed"])
    pool = rng.integers(-5, 1 << 17, (drawn["num_rows"], drawn["max_len"]), dtype=np.int32)
    return {
        **tensors,
        "pool": strided_rows(draw, torch.from_numpy(pool), giant=giant),
        "status": torch.zeros(1, dtype=torch.int32),
    }
