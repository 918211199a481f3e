"""scatter_token_ids: put each request's new tokens into its row of the token pool."""

from __future__ import annotations

import torch

from kv_canary.specs.arguments import SEGMENTS, STATUS, TOKEN_TABLE
from kv_canary.specs.interface import KernelSpec, TensorSpec, are_distinct

SPEC = KernelSpec(
    name="scatter_token_ids",
    doc="""Put each request's new tokens into its row of the token pool.

    pool[rows[r], starts[r] + k] = low 32 bits of flat[offsets[r] + k]. Stops at the end of the row; skips row 0,
    rows out of range (ROW_RANGE), negative starts and indices outside `flat`; leaves all else untouched.
    """,
    arguments={
        **SEGMENTS,
        "starts": TensorSpec(dtype=torch.int64, shape=("bs",), optional=True, doc="first position; None: 0"),
        "pool": TOKEN_TABLE,
        "status": STATUS,
    },
    # No row twice.
    has_one_outcome=lambda a: are_distinct(a["rows"], len(a["pool"])),
)
