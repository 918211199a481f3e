"""verify: check the planned records against their neighbours, their positions and the real K/V bytes."""

from __future__ import annotations

from kv_canary.specs.arguments import ANCHORS, ENDPOINT, FINDINGS, STEP, TRACK_LIFETIME
from kv_canary.specs.interface import KernelSpec, StructSpec
from kv_canary.specs.structures import VerifyPlan

SPEC = KernelSpec(
    name="verify",
    doc="""Check the planned records against their neighbours, their positions and the real K/V bytes.

    For each entry the first of UNMAPPED, SLOT_RANGE, NEVER_WRITTEN, FREED that holds is reported, else the sum of
    POSITION, TOKEN, CHAIN, K and V. Records are only read. `counters[tag]` grows by (1, entries).
    """,
    arguments={
        "verify_plan": StructSpec(type=VerifyPlan, doc="what to verify"),
        "endpoint": ENDPOINT,
        "anchors": ANCHORS,
        "step": STEP,
        "track_lifetime": TRACK_LIFETIME,
        **FINDINGS,
    },
)
