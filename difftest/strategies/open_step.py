"""Cases of open_step: numbers to copy, segments of chains, and batches over tables, none of which know each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from kv_canary.difftest.strategies import chain_tails
from kv_canary.difftest.strategies.batches import draw_strides, draw_where, make_hostile
from kv_canary.difftest.strategies.domain import draw_giant, int64, seeds
from kv_canary.difftest.strategies.edge_values import INT64_MAX, INT64_MIN
from kv_canary.difftest.strategies.plan import draw_batch

# Numbers that end before, at and behind what a program copies, of few lanes and of many.
_COPIED = (0, 1, 40, 255, 256, 257, 511, 512, 513)


@st.composite
def cases(draw: Any, *, giant: bool | None = None) -> dict[str, Any]:
    """Draw one call of open_step; `giant`: whether rows span more than 2**31 elements; None: sometimes."""
    giant = draw_giant(draw, giant)
    # Of a giant case one thing is: the token pool, or the table.
    far_table = giant and draw(st.booleans())
    advance = draw(chain_tails.cases(giant=giant and not far_table))
    hostile = draw(st.booleans())
    rng = np.random.default_rng(draw(seeds))
    batch = draw_batch(draw, rng, giant=far_table)
    # It is not looked into.
    pages = rng.integers(0, 9, (batch.num_rows, batch.width // batch.page_size), dtype=np.int32)
    if hostile:
        make_hostile(draw, batch, pages, None, 9 * batch.page_size)
    words = torch.from_numpy(rng.integers(INT64_MIN, INT64_MAX, draw(st.sampled_from(_COPIED))))
    return {
        "words": words,
        "copy": torch.zeros_like(words),
        **{"advance_rows" if name == "rows" else name: value for name, value in advance.items()},
        "rows": int64(batch.rows),
        "prefix_lens": int64(batch.prefix),
        "extend_lens": int64(batch.extend),
        **draw_where(draw, rng, batch, pages, hostile=hostile, giant=far_table),
        "window": draw(st.sampled_from([0] * 4 + [1, 2, 15, 16, 31, 127, 1023])),
        **(draw_strides(draw, rng, batch.size, hostile=hostile) if draw(st.booleans()) else {}),
        "entry_offsets": torch.zeros(batch.size + 1, dtype=torch.int64),
        "longest_stride": torch.zeros(1, dtype=torch.int64),
    }
