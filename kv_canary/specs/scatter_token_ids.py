"""scatter_token_ids: put each request's new tokens into its row of the token pool."""

from __future__ import annotations

import torch

from kv_canary.specs.interface import ROW, KernelSpec, TensorSpec

SPEC = KernelSpec(
    name="scatter_token_ids",
    doc="""Put each request's new tokens into its row of the token pool.

    pool[rows[r], starts[r] + k] = low 32 bits of flat[offsets[r] + k]. Stops at the end of the row; skips row 0,
    rows out of range (ROW_RANGE), negative starts and indices outside `flat`; leaves all else untouched.
    """,
    arguments={
        "flat": TensorSpec(dtype=torch.int64, shape=("total",), doc="tokens of all requests"),
        "offsets": TensorSpec(dtype=torch.int64, shape=("bs+1",), doc="segment r is [offsets[r], offsets[r+1])"),
        "rows": TensorSpec(dtype=torch.int64, shape=("bs",), index_of=ROW, doc="row of each request; 0 is padding"),
        "starts": TensorSpec(dtype=torch.int64, shape=("bs",), optional=True, doc="first position; None: 0"),
        "pool": TensorSpec(
            dtype=torch.int32, shape=("num_rows", "max_len"), role="inout", row_strided=True, doc="token pool"
        ),
        "status": TensorSpec(dtype=torch.int32, shape=(1,), role="out", doc="Status bits"),
    },
)
