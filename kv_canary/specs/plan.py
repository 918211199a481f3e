"""plan: turn a batch's rows and lengths into the entries to verify and the segments to write."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from kv_canary.constants import STRIDE_BLOCK
from kv_canary.errors import must_be
from kv_canary.specs.arguments import (
    BATCH,
    ENTRY_OFFSETS,
    EXPECTED_TOKENS,
    LUT,
    STATUS,
    STEP,
    STRIDES,
    TABLES,
    WINDOW,
    WRITE_PLAN,
)
from kv_canary.specs.interface import KernelSpec, ScalarSpec, Sizes, StructSpec
from kv_canary.specs.structures import VerifyPlan


def longest_prefix(num_pages: int, page_size: int) -> int:
    """Return how many cached positions a request may have in a table of so many pages a row: they fit 31 bits."""
    return min(num_pages * page_size, (1 << 31) - 1)


def entry_counts(arguments: Mapping[str, Any]) -> Iterator[int]:
    """Yield how many cached positions of each request of a batch are to be verified before it is written."""
    table, window, step = arguments["req_to_token"], arguments["window"], arguments["step"]
    rows, table_rows, strides = (arguments[name] for name in ("rows", "table_rows", "strides"))
    places = rows if table_rows is None else table_rows
    lens = arguments["prefix_lens"], arguments["extend_lens"]
    most, ones = longest_prefix(table.shape[1], arguments["page_size"]), [1] * len(rows)
    columns = (
        rows.tolist(),
        places.tolist(),
        *(x.tolist() for x in lens),
        ones if strides is None else strides.tolist(),
    )
    for row, place, prefix, extend, stride in zip(*columns, strict=True):
        is_live = 0 < row < 1 << 31 and 0 <= place < len(table) and 0 <= prefix <= most and 0 <= extend < 1 << 31
        positions = range(max(prefix - window, 0) if window else 0, prefix if is_live else 0)
        if stride <= 1:
            yield len(positions)
        else:
            turn = int(step)
            yield sum((p // STRIDE_BLOCK + turn) % stride == 0 or p == prefix - 1 for p in positions)


def check_write_capacity(op: str, arguments: Mapping[str, Any], sizes: Sizes) -> None:
    """Raise ValueError, in the name of `op`, unless every request of the batch has a place in the write plan."""
    if sizes["bs"] > sizes["write_cap"]:
        expected = f"at least as long as rows ({sizes['bs']} requests)"
        raise ValueError(must_be(op, "write_plan", expected, f"a capacity of {sizes['write_cap']}"))


SPEC = KernelSpec(
    name="plan",
    doc="""Turn a batch's rows and lengths into the entries to verify and the segments to write.

    Verify entries, in request order and then position order, are the cached positions [start, prefix) of every
    request that is not padding: start is 0, or what the window leaves. Entries past the capacity are dropped, never
    silently: `status` gets OVERFLOW and `num_requested` keeps the truth. A request whose row or lengths are out of
    range is treated as padding and sets ROW_RANGE or LENGTH_RANGE. Slots that the tables cannot give become BAD_SLOT.
    """,
    arguments={
        **BATCH,
        **TABLES,
        "window": WINDOW,
        "after_write": ScalarSpec(
            type=bool, default=False, doc="plan what is still resident after this step in a ring of window + 1 slots"
        ),
        "lut": LUT,
        **EXPECTED_TOKENS,
        "strides": dataclasses.replace(STRIDES, with_="step"),
        "step": dataclasses.replace(STEP, optional=True, with_="strides"),
        "verify_plan": StructSpec(type=VerifyPlan, role="out", doc="entries to verify"),
        "write_plan": WRITE_PLAN,
        "status": STATUS,
        "entry_offsets": ENTRY_OFFSETS,
    },
    checks=(partial(check_write_capacity, "plan"),),
)
