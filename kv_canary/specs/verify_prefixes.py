"""verify_prefixes: check every cached position of a batch, straight from the tables."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from kv_canary.specs.arguments import (
    ANCHORS,
    BATCH,
    ENDPOINT,
    ENTRY_OFFSETS,
    EXPECTED_TOKENS,
    FINDINGS,
    LUT,
    STATUS,
    STEP,
    STRIDES,
    TABLES,
    TRACK_LIFETIME,
    WINDOW,
    WRITE_PLAN,
)
from kv_canary.specs.interface import KernelSpec, StructSpec, TensorSpec
from kv_canary.specs.plan import check_write_capacity, entry_counts
from kv_canary.specs.structures import ResolvedSlots


def _has_one_outcome(arguments: Mapping[str, Any]) -> bool:
    """Whether a batch that is said to be laid out is laid out as it is."""
    if arguments["laid_out"] is None:
        return True
    strides = arguments["strides"]
    longest = 1 if strides is None else max([1, *strides.tolist()])
    offsets = list(itertools.accumulate(entry_counts(arguments), initial=0))
    return [*arguments["laid_out"].tolist(), int(arguments["laid_out_stride"])] == [*offsets, longest]


SPEC = KernelSpec(
    name="verify_prefixes",
    doc="""Check every cached position of a batch, straight from the tables: plan and verify in one.

    What it checks, writes and reports is what `plan` and then `verify` do with a plan as long as `resolved`, but no
    plan is made: `resolved` keeps where the entries were found, for `verify_resolved`. `counters[tag]` grows by
    (1, entries). A batch that `open_step` has laid out need not be laid out again; what says how must be that
    batch's. Another's makes what is found worthless, but nothing past a request's prefix is looked up.
    """,
    arguments={
        **BATCH,
        **TABLES,
        "window": WINDOW,
        "lut": LUT,
        **EXPECTED_TOKENS,
        "strides": STRIDES,
        "step": STEP,
        "endpoint": ENDPOINT,
        "anchors": ANCHORS,
        "track_lifetime": TRACK_LIFETIME,
        "laid_out": TensorSpec(
            dtype=torch.int64,
            shape=("bs+1",),
            optional=True,
            with_="laid_out_stride",
            doc="entry_offsets of the batch, of `open_step`; None: they are found here",
        ),
        "laid_out_stride": TensorSpec(
            dtype=torch.int64, shape=(1,), optional=True, with_="laid_out", doc="longest_stride of the batch, likewise"
        ),
        "resolved": StructSpec(type=ResolvedSlots, role="out", doc="where the entries were found"),
        "write_plan": WRITE_PLAN,
        "status": STATUS,
        **FINDINGS,
        "entry_offsets": ENTRY_OFFSETS,
        "longest_stride": TensorSpec(dtype=torch.int64, shape=(1,), role="scratch", doc="of the batch"),
    },
    checks=(partial(check_write_capacity, "verify_prefixes"),),
    has_one_outcome=_has_one_outcome,
)
