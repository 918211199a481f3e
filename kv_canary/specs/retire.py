"""retire: mark the records of freed slots, so that a later read of them is seen."""

from __future__ import annotations

import torch

from kv_canary.specs.arguments import RECORD_BUFFERS, STEP
from kv_canary.specs.interface import SLOT, KernelSpec, TensorSpec

SPEC = KernelSpec(
    name="retire",
    doc="""Mark the records of freed slots, so that a later read of them is seen.

    The writer word of every named record that was ever written becomes (retired, step, owner); the rest stays for
    the report. Slots out of range and slot 0 are skipped.
    """,
    arguments={
        "slots": TensorSpec(dtype=torch.int64, shape=("n",), index_of=SLOT, doc="slots freed"),
        "owner": TensorSpec(dtype=torch.int64, shape=(1,), doc="serial number of who freed them"),
        "step": STEP,
        "records": RECORD_BUFFERS,
    },
)
