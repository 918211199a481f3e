"""verify_resolved: check again the slots that a forward's prefixes were found in."""

from __future__ import annotations

from kv_canary.specs.arguments import ANCHORS, ENDPOINT, EXPECTED_TOKENS, FINDINGS, ROWS, STEP, TRACK_LIFETIME
from kv_canary.specs.interface import KernelSpec, StructSpec
from kv_canary.specs.structures import ResolvedSlots

SPEC = KernelSpec(
    name="verify_resolved",
    doc="""Check again the slots that `verify_prefixes` found a batch's cached positions in, without reading tables.

    As `verify` does; an entry whose request is outside the batch has no row and no token. `counters[tag]` grows by
    (1, entries).
    """,
    arguments={
        "rows": ROWS,
        **EXPECTED_TOKENS,
        "resolved": StructSpec(type=ResolvedSlots, doc="where the entries were found"),
        "endpoint": ENDPOINT,
        "anchors": ANCHORS,
        "step": STEP,
        "track_lifetime": TRACK_LIFETIME,
        **FINDINGS,
    },
)
