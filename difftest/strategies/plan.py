"""Cases of plan: batches over tables as engines keep them, and tables that hold anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from kv_canary.difftest.hostile import HOSTILE, HOSTILE_32, INT64_MAX, INT64_MIN
from kv_canary.difftest.strategies.domain import (
    batch_sizes,
    draw_giant,
    int64,
    lengths,
    often,
    owner_numbers,
    replace_some,
    seeds,
    steps,
    strided_rows,
)
from kv_canary.specs.structures import VerifyPlan, WritePlan


@st.composite
def cases(draw: Any, *, giant: bool | None = None) -> dict[str, Any]:
    """Draw one call of plan; `giant`: whether rows span more than 2**31 elements; None: sometimes."""
    giant = draw_giant(draw, giant)
    hostile = draw(st.booleans())
    rng = np.random.default_rng(draw(seeds))
    batch = _draw_batch(draw, rng, giant=giant)
    table, lut, num_slots = _draw_tables(draw, rng, batch)
    if hostile:
        _make_hostile(draw, batch, table, lut, num_slots)
    cached = batch.cached
    if cached and not often(draw, 3):
        # Cells that a live request does rely on; often a single bad one in all the table.
        bad = st.sampled_from([num_slots, num_slots, num_slots + 1, (1 << 31) - 1, -1, -(1 << 31)])
        for _ in range(draw(st.sampled_from([1, 1, 1, 1, 3]))):
            row, p = cached[draw(st.integers(0, len(cached) - 1))]
            table[row, draw(st.one_of(st.just(p - 1), st.integers(0, p - 1)))] = draw(bad)
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
        "req_to_token": strided_rows(draw, torch.from_numpy(table), giant=giant and not far_tokens),
        "window": draw(st.sampled_from([0] * 9 + [1, 2, 15, 16, 31, 127, 128, 1023, 1023])),
        "after_write": draw(st.booleans()),
        "lut": None if lut is None else torch.from_numpy(lut),
    }
    if expected:
        arguments |= _draw_tokens(draw, rng, batch, hostile=hostile, giant=giant, far=far_tokens)
    if draw(st.booleans()):
        arguments |= _draw_strides(draw, rng, batch.size, hostile=hostile)
    enough = sum(p for p in batch.prefix if 0 <= p <= batch.width)
    capacity = draw(st.one_of(st.just(enough), st.just(enough), st.integers(0, 300)))
    return {
        **arguments,
        "verify_plan": VerifyPlan.allocate(verify_cap=capacity),
        "write_plan": WritePlan.allocate(write_cap=batch.size + draw(st.integers(0, 2))),
        "status": torch.zeros(1, dtype=torch.int32),
    }


@dataclass(kw_only=True)
class _Batch:
    """Requests, and the size of the tables that they are in: `num_rows` of `width` positions."""

    rows: list[int]
    prefix: list[int]
    extend: list[int]
    num_rows: int
    width: int

    @property
    def size(self) -> int:
        return len(self.rows)

    @property
    def cached(self) -> list[tuple[int, int]]:
        """Row and prefix of every live request that has something to verify."""
        pairs = zip(self.rows, self.prefix, strict=True)
        return [(r, p) for r, p in pairs if 0 < r < self.num_rows and 0 < p <= self.width]


def _draw_batch(draw: Any, rng: np.random.Generator, *, giant: bool) -> _Batch:
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
    for _ in range(draw(st.integers(0, 2)) if bs > 1 else 0):
        rows[draw(st.integers(0, bs - 1))] = 0
    if draw(st.sampled_from([False] * (9 if bs <= 20 else 2) + [True])):
        # A captured graph that is replayed for nobody.
        rows = [0] * bs
    return _Batch(rows=rows, prefix=prefix, extend=extend, num_rows=num_rows, width=width)


def _draw_tables(
    draw: Any, rng: np.random.Generator, batch: _Batch
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64] | None, int]:
    """Return a table of slots, perhaps a LUT behind it, and the number of slots."""
    num_slots = draw(st.sampled_from([1, 40, 5000]))
    table = rng.integers(0, num_slots, (batch.num_rows, batch.width), dtype=np.int32)
    if often(draw, 3):
        return table, None, num_slots
    # A sub-pool: most slots have a place in it, evicted ones map to 0.
    lut = rng.integers(0, num_slots, num_slots)
    lut[rng.random(num_slots) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = 0
    return table, lut, num_slots


def _make_hostile(
    draw: Any,
    batch: _Batch,
    table: npt.NDArray[np.int32],
    lut: npt.NDArray[np.int64] | None,
    num_slots: int,
) -> None:
    """Let any number of the batch and its tables be anything."""
    num_rows, width = batch.num_rows, batch.width
    batch.rows = replace_some(draw, batch.rows, (*HOSTILE, num_rows))
    batch.rows = replace_some(draw, batch.rows, (num_rows,), most=1)
    batch.prefix = replace_some(draw, batch.prefix, (*HOSTILE, width + 1))
    batch.extend = replace_some(draw, batch.extend)
    for _ in range(draw(st.sampled_from([0, 0, 1, 5]))):
        at = draw(st.integers(0, num_rows - 1)), draw(st.integers(0, width - 1))
        table[at] = draw(st.sampled_from([*HOSTILE_32, num_slots]))
    if lut is not None and draw(st.booleans()):
        for _ in range(draw(st.integers(0, 3))):
            lut[draw(st.integers(0, num_slots - 1))] = draw(st.sampled_from(HOSTILE))


def _draw_tokens(
    draw: Any, rng: np.random.Generator, batch: _Batch, *, hostile: bool, giant: bool, far: bool
) -> dict[str, Any]:
    """Return the arguments that say which tokens to expect."""
    token_rows, cached = max(2 if giant else 1, batch.num_rows - draw(st.integers(0, 2))), batch.cached
    if cached and not giant and draw(st.booleans()):
        # A row in use is the first that has no tokens.
        token_rows = cached[draw(st.integers(0, len(cached) - 1))][0]
    shape = token_rows, max(1, batch.width + draw(st.integers(-5, 5)))
    known = [int(n) for n in rng.integers(0, batch.width + 8, batch.size)]
    pool = torch.from_numpy(rng.integers(-1, 1 << 17, shape, np.int32))
    return {
        "expected_tokens": strided_rows(draw, pool, giant=giant and far),
        "expected_lens": int64(replace_some(draw, known) if hostile else known),
        "token_offset": draw(st.sampled_from([0, 1, -1, -1, 7])),
    }


def _draw_strides(draw: Any, rng: np.random.Generator, bs: int, *, hostile: bool) -> dict[str, Any]:
    """Return the arguments that say which positions' turn it is."""
    some = draw(st.sampled_from([(1, 2, 3, 4, 5), (1, 2, 3, 4, 5), (1, 2), (2, 1 << 62, INT64_MAX, 1 << 32)]))
    strides = [int(n) for n in rng.choice(some, bs)]
    negative = st.sampled_from([INT64_MIN, INT64_MIN, -3, -1, -7])
    return {
        "strides": int64(replace_some(draw, strides) if hostile else strides),
        "step": int64([draw(st.one_of(steps, negative, st.just(INT64_MAX)))]),
    }
