"""move: carry records along when KV is copied from slot to slot."""

from __future__ import annotations

import torch

from kv_canary.constants import RECORD_WORDS
from kv_canary.specs.arguments import RECORD_BUFFERS, STEP
from kv_canary.specs.interface import SLOT, KernelSpec, ScalarSpec, TensorSpec, are_distinct

SPEC = KernelSpec(
    name="move",
    doc="""Carry records along when KV is copied from slot to slot.

    Behaves as if every source were read first. A destination gets the source's record under a new writer, or zeroes
    where the source is out of range, slot 0, never written or retired. Destinations out of range are skipped.
    """,
    arguments={
        "src": TensorSpec(dtype=torch.int64, shape=("n",), index_of=SLOT, doc="slots copied from"),
        "dst": TensorSpec(dtype=torch.int64, shape=("n",), index_of=SLOT, doc="slots copied to"),
        "owner": ScalarSpec(type=int, doc="serial number of the new owner"),
        "step": STEP,
        "records": RECORD_BUFFERS,
        "staged": TensorSpec(dtype=torch.int64, shape=("n", RECORD_WORDS), role="scratch", doc="sources as read"),
    },
    # No destination twice.
    has_one_outcome=lambda a: are_distinct(a["dst"], len(a["records"][0])),
)
