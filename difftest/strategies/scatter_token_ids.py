"""Cases of scatter_token_ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from kv_canary.difftest.strategies.domain import strided_rows
from kv_canary.difftest.strategies.segments import segments


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    """Draw one call of scatter_token_ids."""
    drawn = draw(segments())
    tensors = drawn["tensors"]
    if draw(st.booleans()):
        tensors["starts"] = None
    rng = np.random.default_rng(drawn["seed"])
    pool = rng.integers(-5, 1 << 17, (drawn["num_rows"], drawn["max_len"]), dtype=np.int32)
    return {
        **tensors,
        "pool": strided_rows(draw, torch.from_numpy(pool)),
        "status": torch.zeros(1, dtype=torch.int32),
    }
