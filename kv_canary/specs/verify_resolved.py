"""verify_resolved: check again the slots that a forward's prefixes were found in."""

from __future__ import annotations

import torch

from kv_canary.constants import Tag
from kv_canary.specs.interface import ROW, KernelSpec, ScalarSpec, StructSpec, TensorSpec
from kv_canary.specs.structures import Endpoint, ResolvedSlots, ViolationLog

SPEC = KernelSpec(
    name="verify_resolved",
    doc="""Check again the slots that `verify_prefixes` found a batch's cached positions in, without reading tables.

    As `verify` does; an entry whose request is outside the batch has no row and no token. `counters[tag]` grows by
    (1, entries).
    """,
    arguments={
        "rows": TensorSpec(dtype=torch.int64, shape=("bs",), index_of=ROW, doc="row of each request"),
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
        "resolved": StructSpec(type=ResolvedSlots, doc="where the entries were found"),
        "endpoint": StructSpec(type=Endpoint, doc="records and KV bytes"),
        "anchors": TensorSpec(
            dtype=torch.int64, shape=("num_anchors",), optional=True, doc="chain(-1) of each row; None: ANCHOR"
        ),
        "step": TensorSpec(dtype=torch.int64, shape=(1,), doc="step number, for the reports"),
        "track_lifetime": ScalarSpec(type=bool, default=False, doc="report reads of retired slots as FREED"),
        "violations": StructSpec(type=ViolationLog, role="inout", compare="violations", doc="where violations go"),
        "counters": TensorSpec(dtype=torch.int64, shape=(len(Tag), 2), role="inout", doc="launches, entries; by tag"),
    },
)
