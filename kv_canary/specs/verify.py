"""verify: check the planned records against their neighbours, their positions and the real K/V bytes."""

from __future__ import annotations

import torch

from kv_canary.constants import Tag
from kv_canary.specs.interface import KernelSpec, ScalarSpec, StructSpec, TensorSpec
from kv_canary.specs.structures import Endpoint, VerifyPlan, ViolationLog

SPEC = KernelSpec(
    name="verify",
    doc="""Check the planned records against their neighbours, their positions and the real K/V bytes.

    For each entry the first of UNMAPPED, SLOT_RANGE, NEVER_WRITTEN, FREED that holds is reported, else the sum of
    POSITION, TOKEN, CHAIN, K and V. Records are only read. `counters[tag]` grows by (1, entries).
    """,
    arguments={
        "verify_plan": StructSpec(type=VerifyPlan, doc="what to verify"),
        "endpoint": StructSpec(type=Endpoint, doc="records and KV bytes"),
        "anchors": TensorSpec(
            dtype=torch.int64, shape=("num_rows",), optional=True, doc="chain(-1) of each row; None: ANCHOR"
        ),
        "step": TensorSpec(dtype=torch.int64, shape=(1,), doc="step number, for the reports"),
        "track_lifetime": ScalarSpec(type=bool, default=False, doc="report reads of retired slots as FREED"),
        "violations": StructSpec(type=ViolationLog, role="inout", compare="violations", doc="where violations go"),
        "counters": TensorSpec(dtype=torch.int64, shape=(len(Tag), 2), role="inout", doc="launches, entries; by tag"),
    },
)
