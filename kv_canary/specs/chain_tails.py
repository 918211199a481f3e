"""chain_tails: advance each row's chain over the request's own tokens, and keep these tokens."""

from __future__ import annotations

import dataclasses

import torch

from kv_canary.specs.arguments import ANCHORS, SEGMENTS, STATUS, TAILS, TOKEN_TABLE
from kv_canary.specs.interface import KernelSpec, TensorSpec, are_distinct

SPEC = KernelSpec(
    name="chain_tails",
    doc="""Advance each row's chain over the request's own tokens, and put them into its row of the token pool.

    A row with start 0 begins at its anchor, any other continues from its tail; flat[offsets[r] + k] stands at position
    starts[r] + k; indices outside `flat` are skipped; the pool gets what its row has room for. Row 0 is skipped, as are
    rows out of range (ROW_RANGE) and negative starts (LENGTH_RANGE).
    """,
    arguments={
        **SEGMENTS,
        "starts": TensorSpec(dtype=torch.int64, shape=("bs",), doc="position of each segment's first token"),
        "anchors": dataclasses.replace(ANCHORS, shape=("num_rows",)),
        "tails": dataclasses.replace(TAILS, role="inout"),
        "pool": dataclasses.replace(TOKEN_TABLE, optional=True, doc="tokens of each row; None: they are not kept"),
        "status": STATUS,
    },
    # No row twice.
    has_one_outcome=lambda a: are_distinct(a["rows"], len(a["tails"])),
)
