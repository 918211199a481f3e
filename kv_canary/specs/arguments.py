"""Arguments that several ops take: alone, or in groups that stand together in a signature."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from kv_canary.constants import Status, Tag
from kv_canary.specs.interface import ROW, SLOT, ArgumentSpec, ScalarSpec, StructSpec, TensorSpec, TensorsSpec
from kv_canary.specs.structures import RECORDS, Endpoint, ViolationLog, WritePlan

ROWS = TensorSpec(dtype=torch.int64, shape=("bs",), index_of=ROW, doc="row of each request; 0 is padding")
STEP = TensorSpec(dtype=torch.int64, shape=(1,), doc="step number")
STATUS = TensorSpec(dtype=torch.int32, shape=(1,), role="out", flags=Status, doc="Status bits")
TAILS = TensorSpec(dtype=torch.int64, shape=("num_rows",), doc="chain of each row's prefix")
ANCHORS = TensorSpec(
    dtype=torch.int64, shape=("num_anchors",), optional=True, doc="chain(-1) of each row; None: ANCHOR"
)
RECORD_BUFFERS = TensorsSpec(
    each=dataclasses.replace(RECORDS, role="inout", doc=""), doc="record buffers, all to be treated alike"
)
WRITE_PLAN = StructSpec(type=WritePlan, role="out", doc="segments to write")
ENTRY_OFFSETS = TensorSpec(dtype=torch.int64, shape=("bs+1",), role="scratch", doc="first entry of each request")

# The requests of a forward.
BATCH: Mapping[str, ArgumentSpec] = {
    "rows": ROWS,
    "owners": TensorSpec(dtype=torch.int64, shape=("bs",), optional=True, doc="serial numbers; None: the rows"),
    "prefix_lens": TensorSpec(dtype=torch.int64, shape=("bs",), doc="tokens cached before this forward"),
    "extend_lens": TensorSpec(dtype=torch.int64, shape=("bs",), doc="tokens written by this forward"),
}

# How the slot of a position is looked up, and which positions are read.
TABLES: Mapping[str, ArgumentSpec] = {
    "req_to_token": TensorSpec(
        dtype=torch.int32,
        shape=("num_rows", "num_pages"),
        row_strided=True,
        index_of={"lut_len": None, "num_slots": None},
        doc="page of each position of a row, by its number: its slots are those from page_size times that on",
    ),
    "table_rows": TensorSpec(
        dtype=torch.int64, shape=("bs",), optional=True, index_of=ROW, doc="row of req_to_token; None: rows"
    ),
    "page_size": ScalarSpec(type=int, default=1, minimum=1, doc="slots of a page; 1: req_to_token holds slots"),
}
WINDOW = ScalarSpec(type=int, default=0, minimum=0, doc="cached positions the first new query may read; 0: all of them")
LUT = TensorSpec(dtype=torch.int64, shape=("lut_len",), optional=True, index_of=SLOT, doc="full slot -> SWA slot")
STRIDES = TensorSpec(
    dtype=torch.int64,
    shape=("bs",),
    optional=True,
    doc="n > 1: keep the last position and every n-th block of 16, rotating with step",
)

# The tokens that cached positions should hold.
EXPECTED_TOKENS: Mapping[str, ArgumentSpec] = {
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
    "token_offset": ScalarSpec(type=int, default=0, doc="added to a position to look its token up; 1: EAGLE drafts"),
}

TOKEN_TABLE = TensorSpec(
    dtype=torch.int32, shape=("num_rows", "max_len"), role="inout", row_strided=True, doc="tokens of each row"
)

# Tokens of several requests, one behind the other.
SEGMENTS: Mapping[str, ArgumentSpec] = {
    "flat": TensorSpec(dtype=torch.int64, shape=("total",), doc="tokens of all requests"),
    "offsets": TensorSpec(dtype=torch.int64, shape=("bs+1",), doc="segment r is [offsets[r], offsets[r+1])"),
    "rows": ROWS,
}

# What ops that check records read, and what they report.
ENDPOINT = StructSpec(type=Endpoint, doc="records and KV bytes")
TRACK_LIFETIME = ScalarSpec(type=bool, default=False, doc="report reads of retired slots as FREED")
VIOLATIONS = StructSpec(type=ViolationLog, role="inout", compare="violations", doc="where violations go")
FINDINGS: Mapping[str, ArgumentSpec] = {
    "violations": VIOLATIONS,
    "counters": TensorSpec(
        dtype=torch.int64,
        shape=(len(Tag), 2),
        role="inout",
        lines=tuple(tag.name for tag in Tag),
        columns=("launches", "entries"),
        doc="launches, entries; by tag",
    ),
}
