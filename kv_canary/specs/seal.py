"""seal: keep a hash of all bytes of slots, so that any later change of one of them is seen."""

from __future__ import annotations

import dataclasses

from kv_canary.specs.arguments import STEP
from kv_canary.specs.interface import KernelSpec
from kv_canary.specs.sealing import SEALED, SEALS, check_seals

SPEC = KernelSpec(
    name="seal",
    doc="""Keep a hash of all bytes of slots, so that any later change of one of them is seen.

    The seal of each slot becomes the WRITER word of its record, then for each band of layers a word: the hash of K in
    the low 32 bits and that of V in the high 32. A slot whose record was never written, or is retired, gets a seal of
    zeroes. Slots out of range and slot 0 are skipped; with `written_in` every slot whose record was not written or
    retired in that step.
    """,
    arguments={
        **SEALED,
        "written_in": dataclasses.replace(STEP, optional=True, doc="step whose records' slots are taken; None: of any"),
        "seals": dataclasses.replace(SEALS, role="inout"),
    },
    checks=(check_seals("seal"),),
)
