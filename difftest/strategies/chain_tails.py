"""Cases of chain_tails."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from kv_canary.difftest.strategies.edge_values import INT64_MAX, INT64_MIN
from kv_canary.difftest.strategies.segments import segments


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    """Draw one call of chain_tails."""
    drawn = draw(segments())
    rng = np.random.default_rng(drawn["seed"])
    tails, anchors = (torch.from_numpy(rng.integers(INT64_MIN, INT64_MAX, drawn["num_rows"])) for _ in range(2))
    return {
        **drawn["tensors"],
        "anchors": anchors if draw(st.booleans()) else None,
        "tails": tails,
        "status": torch.zeros(1, dtype=torch.int32),
    }
