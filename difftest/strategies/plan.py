"""Cases of plan: batches over tables as engines keep them, and tables that hold anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from kv_canary.difftest.strategies.batches import (
    Batch,
    damage_cells,
    draw_padding,
    draw_strides,
    draw_tokens,
    draw_where,
    make_hostile,
)
from kv_canary.difftest.strategies.domain import (
    batch_sizes,
    draw_giant,
    int64,
    lengths,
    often,
    owner_numbers,
    seeds,
)
from kv_canary.specs.structures import VerifyPlan, WritePlan


@st.composite
def cases(draw: Any, *, giant: bool | None = None) -> dict[str, Any]:
    """Draw one call of plan; `giant`: whether rows span more than 2**31 elements; None: sometimes."""
    giant = draw_giant(draw, giant)
    hostile = draw(st.booleans())
    rng = np.random.default_rng(draw(seeds))
    batch = draw_batch(draw, rng, giant=giant)
    table, lut, num_slots = _draw_tables(draw, rng, batch)
    if hostile:
        make_hostile(draw, batch, table, lut, num_slots)
    damage_cells(draw, batch, table, num_slots)
    owners = [draw(owner_numbers) for _ in range(min(batch.size, 20))]
    owners += [int(n) for n in rng.integers(0, 1 << 25, batch.size - len(owners))]
    # Of a giant case one table is.
    expected = not often(draw, 3)
    far_tokens = expected and draw(st.booleans())
    arguments: dict[str, Any] = {
        "rows": int64(batch.rows),
        "owners": int64(owners) if draw(st.booleans()) else None,
        "prefix_lens": int64(batch.prefix),
        "extend_lens": int64(batch.extend),
        **draw_where(draw, rng, batch, table, hostile=hostile, giant=giant and not far_tokens),
        "window": draw(st.sampled_from([0] * 9 + [1, 2, 15, 16, 31, 127, 128, 1023, 1023])),
        "after_write": draw(st.booleans()),
        "lut": None if lut is None else torch.from_numpy(lut),
    }
    if expected:
        arguments |= draw_tokens(draw, rng, batch, hostile=hostile, giant=giant, far=far_tokens)
    if draw(st.booleans()):
        arguments |= draw_strides(draw, rng, batch.size, hostile=hostile)
    enough = batch.most_entries
    capacity = draw(st.one_of(st.just(enough), st.just(enough), st.integers(0, 300)))
    return {
        **arguments,
        "verify_plan": VerifyPlan.allocate(verify_cap=capacity),
        "write_plan": WritePlan.allocate(write_cap=batch.size + draw(st.integers(0, 2))),
        "status": torch.zeros(1, dtype=torch.int32),
    }


def draw_batch(draw: Any, rng: np.random.Generator, *, giant: bool) -> Batch:
    """Draw a batch as engines make them."""
    bs = max(draw(batch_sizes()), 1 if giant else 0)
    # Three blocks of requests make a wide table large.
    width = (
        24
        if bs > 512
        else max(1, draw(st.sampled_from([257, 513, 600]) if bs == 1 and draw(st.booleans()) else lengths()))
    )
    short = st.integers(0, width) if bs > 20 else st.one_of(st.just(width), st.integers(0, width), st.just(width))
    prefix = [draw(short) for _ in range(min(bs, 20))]
    prefix += [int(p) for p in rng.integers(0, min(width, 20) + 1, bs - len(prefix))]
    kind = draw(st.sampled_from(["decode", "extend", "mixed", "fresh", "continued"]))
    if kind == "fresh":
        prefix = [0] * bs
    if kind in ("decode", "continued"):
        prefix = [max(p, 1) for p in prefix]
    extend = [1] * bs if kind == "decode" else [int(e) for e in rng.integers(0 if kind == "mixed" else 2, 40, bs)]
    num_rows = bs + 1 + draw(st.integers(0, 2))
    rows = [int(r) for r in rng.permutation(np.arange(1, num_rows))[:bs]]
    if giant:
        # The last rows are those that lie far.
        rows = [int(r) for r in range(num_rows - 1, num_rows - 1 - bs, -1)]
    page_size = draw(st.sampled_from([1, 1, 1, 2, 16, 3, 40]))
    return Batch(
        rows=draw_padding(draw, rows),
        prefix=prefix,
        extend=extend,
        num_rows=num_rows,
        width=-(-width // page_size) * page_size,
        page_size=page_size,
    )


def _draw_tables(
    draw: Any, rng: np.random.Generator, batch: Batch
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64] | None, int]:
    """Return a table of pages, perhaps a LUT behind it, and the number of slots."""
    num_pages = -(-draw(st.sampled_from([1, 40, 5000])) // batch.page_size)
    num_slots = num_pages * batch.page_size
    table = rng.integers(0, num_pages, (batch.num_rows, batch.width // batch.page_size), dtype=np.int32)
    if often(draw, 3):
        return table, None, num_slots
    # A sub-pool: most slots have a place in it, evicted ones map to 0.
    lut = rng.integers(0, num_slots, num_slots)
    lut[rng.random(num_slots) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = 0
    return table, lut, num_slots
