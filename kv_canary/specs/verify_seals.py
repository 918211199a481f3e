"""verify_seals: hold all bytes of slots against their seals."""

from __future__ import annotations

import torch

from kv_canary.specs.arguments import STEP, VIOLATIONS
from kv_canary.specs.interface import KernelSpec, TensorSpec
from kv_canary.specs.sealing import SEALED, SEALS, check_seals

SPEC = KernelSpec(
    name="verify_seals",
    doc="""Hold all bytes of slots against their seals.

    For each slot and band whose bytes have another hash, SEAL_K, SEAL_V or both are reported. A slot is taken where it
    has a record that is not retired, and a seal of that very record; one with a record and no such seal is counted.
    Slots out of range and slot 0 are skipped. Nothing but `violations`, `checked` and `counts` is written.
    """,
    arguments={
        **SEALED,
        "seals": SEALS,
        "step": STEP,
        "violations": VIOLATIONS,
        "checked": TensorSpec(
            dtype=torch.int64,
            shape=(4,),
            role="inout",
            lines=("launches", "slots", "slots without a seal", "bands that differ"),
            doc="launches, slots held against their seals, slots that have a record and no seal of it, and bands of "
            "slots whose bytes are not those that were sealed",
        ),
        "ends": TensorSpec(
            dtype=torch.int64,
            shape=("lists",),
            optional=True,
            with_="counts",
            doc="where each of several lists that lie one behind the other ends: an entry of `slots`, or a slot of the "
            "pool in order, is of the list of the number of ends that are not behind it; of none behind the last one",
        ),
        "counts": TensorSpec(
            dtype=torch.int64,
            shape=("lists", 3),
            role="inout",
            optional=True,
            with_="ends",
            columns=("slots", "slots without a seal", "bands that differ"),
            doc="of each list what `checked` counts of all",
        ),
    },
    checks=(check_seals("verify_seals"),),
)
