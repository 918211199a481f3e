"""verify_prefixes: check every cached position of a batch, straight from the tables."""

from __future__ import annotations

from functools import partial

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
from kv_canary.specs.plan import check_write_capacity
from kv_canary.specs.structures import ResolvedSlots

SPEC = KernelSpec(
    name="verify_prefixes",
    doc="""Check every cached position of a batch, straight from the tables: plan and verify in one.

    What it checks, writes and reports is what `plan` and then `verify` do with a plan as long as `resolved`, but no
    plan is made: `resolved` keeps where the entries were found, for `verify_resolved`. `counters[tag]` grows by
    (1, entries).
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
        "resolved": StructSpec(type=ResolvedSlots, role="out", doc="where the entries were found"),
        "write_plan": WRITE_PLAN,
        "status": STATUS,
        **FINDINGS,
        "entry_offsets": ENTRY_OFFSETS,
        "longest_stride": TensorSpec(dtype=torch.int64, shape=(1,), role="scratch", doc="of the batch"),
    },
    checks=(partial(check_write_capacity, "verify_prefixes"),),
)
