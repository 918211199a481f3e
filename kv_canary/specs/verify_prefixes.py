"""verify_prefixes: check every cached position of a batch, straight from the tables."""

from __future__ import annotations

from functools import partial

import torch

from kv_canary.constants import Tag
from kv_canary.specs.interface import ROW, SLOT, KernelSpec, ScalarSpec, StructSpec, TensorSpec
from kv_canary.specs.plan import check_write_capacity
from kv_canary.specs.structures import Endpoint, ResolvedSlots, ViolationLog, WritePlan

SPEC = KernelSpec(
    name="verify_prefixes",
    doc="""Check every cached position of a batch, straight from the tables: plan and verify in one.

    What it checks, writes and reports is what `plan` and then `verify` do with a plan as long as `resolved`, but no
    plan is made: `resolved` keeps where the entries were found, for `verify_resolved`. `counters[tag]` grows by
    (1, entries).
    """,
    arguments={
        "rows": TensorSpec(dtype=torch.int64, shape=("bs",), index_of=ROW, doc="row of each request; 0 is padding"),
        "owners": TensorSpec(dtype=torch.int64, shape=("bs",), optional=True, doc="serial numbers; None: the rows"),
        "prefix_lens": TensorSpec(dtype=torch.int64, shape=("bs",), doc="tokens cached before this forward"),
        "extend_lens": TensorSpec(dtype=torch.int64, shape=("bs",), doc="tokens written by this forward"),
        "req_to_token": TensorSpec(
            dtype=torch.int32,
            shape=("num_rows", "max_len"),
            row_strided=True,
            index_of={"lut_len": None, "num_slots": None},
            doc="slot of each position of a row",
        ),
        "window": ScalarSpec(
            type=int, default=0, minimum=0, doc="cached positions the first new query may read; 0: all of them"
        ),
        "lut": TensorSpec(
            dtype=torch.int64, shape=("lut_len",), optional=True, index_of=SLOT, doc="full slot -> SWA slot"
        ),
        "expected_tokens": TensorSpec(
            dtype=torch.int32,
            shape=("token_rows", "token_len"),
            optional=True,
            with_="expected_lens",
            row_strided=True,
            doc="token of each position of a row",
        ),
        "expected_lens": TensorSpec(
            dtype=torch.int64, shape=("bs",), optional=True, with_="expected_tokens", doc="tokens known of each request"
        ),
        "token_offset": ScalarSpec(
            type=int, default=0, doc="added to a position to look its token up; 1: EAGLE drafts"
        ),
        "strides": TensorSpec(
            dtype=torch.int64,
            shape=("bs",),
            optional=True,
            doc="n > 1: keep the last position and every n-th block of 16, rotating with step",
        ),
        "step": TensorSpec(dtype=torch.int64, shape=(1,), doc="step number"),
        "endpoint": StructSpec(type=Endpoint, doc="records and KV bytes"),
        "anchors": TensorSpec(
            dtype=torch.int64, shape=("num_anchors",), optional=True, doc="chain(-1) of each row; None: ANCHOR"
        ),
        "track_lifetime": ScalarSpec(type=bool, default=False, doc="report reads of retired slots as FREED"),
        "resolved": StructSpec(type=ResolvedSlots, role="out", doc="where the entries were found"),
        "write_plan": StructSpec(type=WritePlan, role="out", doc="segments to write"),
        "status": TensorSpec(dtype=torch.int32, shape=(1,), role="out", doc="Status bits"),
        "violations": StructSpec(type=ViolationLog, role="inout", compare="violations", doc="where violations go"),
        "counters": TensorSpec(dtype=torch.int64, shape=(len(Tag), 2), role="inout", doc="launches, entries; by tag"),
        "entry_offsets": TensorSpec(
            dtype=torch.int64, shape=("bs+1",), role="scratch", doc="first entry of each request"
        ),
        "longest_stride": TensorSpec(dtype=torch.int64, shape=(1,), role="scratch", doc="of the batch"),
    },
    checks=(partial(check_write_capacity, "verify_prefixes"),),
)
