"""Batches as plan and verify_prefixes take them: requests, and what the tables, tokens and strides beside them hold."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from kv_canary.difftest.strategies.domain import int64, often, replace_some, steps, strided_rows
from kv_canary.difftest.strategies.edge_values import HOSTILE, HOSTILE_32, INT64_MAX, INT64_MIN
from kv_canary.specs.plan import entry_counts


@dataclass(kw_only=True)
class Batch:
    """Requests, and the size of the tables that they are in: `num_rows` of `width` positions, in pages."""

    rows: list[int]
    prefix: list[int]
    extend: list[int]
    num_rows: int
    width: int
    page_size: int = 1

    @property
    def size(self) -> int:
        return len(self.rows)

    @property
    def cached(self) -> list[tuple[int, int]]:
        """Row and prefix of every live request that has something to verify."""
        pairs = zip(self.rows, self.prefix, strict=True)
        return [(r, p) for r, p in pairs if 0 < r < self.num_rows and 0 < p <= self.width]

    @property
    def most_entries(self) -> int:
        """Entries that the batch has at most."""
        return sum(p for p in self.prefix if 0 <= p <= self.width)


def draw_padding(draw: Any, rows: list[int]) -> list[int]:
    """Return `rows` with some of them padding, or all, as of a captured graph that is replayed for nobody."""
    rows, count = list(rows), len(rows)
    for _ in range(draw(st.integers(0, 2)) if count > 1 else 0):
        rows[draw(st.integers(0, count - 1))] = 0
    if draw(st.sampled_from([False] * (9 if count <= 20 else 2) + [True])):
        rows = [0] * count
    return rows


def make_hostile(
    draw: Any, batch: Batch, table: npt.NDArray[np.int32], lut: npt.NDArray[np.int64] | None, num_slots: int
) -> None:
    """Make any number of the batch and its tables, which hold pages, anything."""
    num_rows, width = batch.num_rows, batch.width
    batch.rows = replace_some(draw, batch.rows, (*HOSTILE, num_rows))
    batch.rows = replace_some(draw, batch.rows, (num_rows,), most=1)
    if batch.size > 300 or (batch.size > 1 and often(draw, 3)):
        # One that has no entry, behind all that have; of very many, entries are looked for as far as there.
        batch.rows[-1] = draw(st.sampled_from((*HOSTILE, num_rows)))
    batch.prefix = replace_some(draw, batch.prefix, (*HOSTILE, width + 1))
    batch.extend = replace_some(draw, batch.extend)
    for _ in range(draw(st.sampled_from([0, 0, 1, 5]))):
        at = draw(st.integers(0, num_rows - 1)), draw(st.integers(0, table.shape[1] - 1))
        table[at] = draw(st.sampled_from([*HOSTILE_32, num_slots // batch.page_size]))
    if lut is not None and draw(st.booleans()):
        for _ in range(draw(st.integers(0, 3))):
            lut[draw(st.integers(0, len(lut) - 1))] = draw(st.sampled_from(HOSTILE))


def damage_cells(draw: Any, batch: Batch, table: npt.NDArray[np.int32], num_slots: int) -> None:
    """Damage cells that a live request does rely on, or none; often a single one in all the table."""
    cached = batch.cached
    if cached and not often(draw, 3):
        first = num_slots // batch.page_size
        bad = st.sampled_from([first, first, first + 1, (1 << 31) - 1, -1, -(1 << 31)])
        for _ in range(draw(st.sampled_from([1, 1, 1, 1, 3]))):
            row, p = cached[draw(st.integers(0, len(cached) - 1))]
            position = draw(st.one_of(st.just(p - 1), st.integers(0, p - 1)))
            table[row, position // batch.page_size] = draw(bad)


def damage_lut(draw: Any, batch: Batch, table: npt.NDArray[np.int32], lut: npt.NDArray[np.int64]) -> None:
    """Damage what a LUT holds for a cell that a live request relies on."""
    cached = batch.cached
    if cached:
        row, p = cached[draw(st.integers(0, len(cached) - 1))]
        position = draw(st.one_of(st.just(p - 1), st.integers(0, p - 1)))
        slot = int(table[row, position // batch.page_size]) * batch.page_size + position % batch.page_size
        if 0 <= slot < len(lut):
            lut[slot] = draw(st.sampled_from(HOSTILE))


def draw_where(
    draw: Any,
    rng: np.random.Generator,
    batch: Batch,
    table: npt.NDArray[np.int32],
    *,
    hostile: bool,
    giant: bool,
) -> dict[str, Any]:
    """Return the arguments that say where cached positions lie, perhaps with rows of the table apart from the rows."""
    arguments: dict[str, Any] = {"page_size": batch.page_size}
    if draw(st.booleans()):
        place = rng.permutation(batch.num_rows)
        moved = np.empty_like(table)
        moved[place] = table
        table_rows = [int(place[r]) if 0 <= r < batch.num_rows else draw(st.integers(0, 1)) for r in batch.rows]
        arguments["table_rows"] = int64(
            replace_some(draw, table_rows, (*HOSTILE, batch.num_rows), most=1) if hostile else table_rows
        )
        table = moved
    return {**arguments, "req_to_token": strided_rows(draw, torch.from_numpy(table), giant=giant)}


def draw_tokens(
    draw: Any,
    rng: np.random.Generator,
    batch: Batch,
    *,
    hostile: bool,
    giant: bool = False,
    far: bool = False,
    truth: npt.NDArray[np.int64] | None = None,
) -> dict[str, Any]:
    """Return the arguments that say which tokens to expect: any, or those of `truth` [num_rows, n], by position."""
    token_rows, cached = max(2 if giant else 1, batch.num_rows - draw(st.integers(0, 2))), batch.cached
    if cached and not giant and draw(st.booleans()):
        # A row in use is the first that has no tokens.
        token_rows = cached[draw(st.integers(0, len(cached) - 1))][0]
    shape = token_rows, max(1, batch.width + draw(st.integers(-5, 5)))
    known = [int(n) for n in rng.integers(0, batch.width + 8, batch.size)]
    offset = draw(st.sampled_from([0, 1, -1, -1, 7]))
    pool = rng.integers(-1, 1 << 17, shape, np.int32)
    if truth is not None:
        position = np.arange(shape[1]) - offset
        there = (position >= 0) & (position < truth.shape[1])
        held = min(token_rows, len(truth))
        pool[:held, there] = truth[:held, position[there]]
    return {
        "expected_tokens": strided_rows(draw, torch.from_numpy(pool), giant=giant and far),
        "expected_lens": int64(replace_some(draw, known) if hostile else known),
        "token_offset": offset,
    }


def draw_strides(draw: Any, rng: np.random.Generator, bs: int, *, hostile: bool) -> dict[str, Any]:
    """Return the arguments that say which positions' turn it is."""
    some = draw(st.sampled_from([(1, 2, 3, 4, 5), (1, 2, 3, 4, 5), (1, 2), (2, 1 << 62, INT64_MAX, 1 << 32)]))
    strides = [int(n) for n in rng.choice(some, bs)]
    negative = st.sampled_from([INT64_MIN, INT64_MIN, -3, -1, -7])
    return {
        "strides": int64(replace_some(draw, strides) if hostile else strides),
        "step": int64([draw(st.one_of(steps, negative, st.just(INT64_MAX)))]),
    }


def laid_out(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that say how the batch of a call of verify_prefixes is laid out, as open_step leaves it."""
    strides = arguments.get("strides")
    counts = entry_counts({"table_rows": None, "strides": None, "window": 0, "page_size": 1, **arguments})
    return {
        "laid_out": int64(itertools.accumulate(counts, initial=0)),
        "laid_out_stride": int64([1 if strides is None else max([1, *strides.tolist()])]),
    }
