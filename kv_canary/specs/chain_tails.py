"""chain_tails: advance each row's chain over the request's own tokens."""

from __future__ import annotations

import torch

from kv_canary.specs.interface import ROW, KernelSpec, TensorSpec

SPEC = KernelSpec(
    name="chain_tails",
    doc="""Advance each row's chain over the request's own tokens.

    A row with start 0 begins at its anchor, any other continues from its tail; flat[offsets[r] + k] stands at position
    starts[r] + k; indices outside `flat` are skipped. Row 0 is skipped, as are rows out of range (ROW_RANGE) and
    negative starts (LENGTH_RANGE).
    """,
    arguments={
        "flat": TensorSpec(dtype=torch.int64, shape=("total",), doc="tokens of all requests"),
        "offsets": TensorSpec(dtype=torch.int64, shape=("bs+1",), doc="segment r is [offsets[r], offsets[r+1])"),
        "rows": TensorSpec(dtype=torch.int64, shape=("bs",), index_of=ROW, doc="row of each request; 0 is padding"),
        "starts": TensorSpec(dtype=torch.int64, shape=("bs",), doc="position of each segment's first token"),
        "anchors": TensorSpec(
            dtype=torch.int64, shape=("num_rows",), optional=True, doc="chain(-1) of each row; None: ANCHOR"
        ),
        "tails": TensorSpec(dtype=torch.int64, shape=("num_rows",), role="inout", doc="chain of each row's prefix"),
        "status": TensorSpec(dtype=torch.int32, shape=(1,), role="out", doc="Status bits"),
    },
)
