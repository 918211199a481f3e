"""Every scenario, and what is said of the classes that have none here."""

from __future__ import annotations

from dataclasses import dataclass

from . import (
    class_a_lifetime,
    class_b_copies,
    class_c_mapping,
    class_d_identity,
    class_f_drafts,
    class_g_graphs,
    class_h_kernels,
    class_k_cells,
    on_transformers,
)
from .harness import Scenario


@dataclass(frozen=True, kw_only=True)
class FaultClass:
    """A class of faults.

    Args:
        letter: its own.
        title: what goes wrong.
        note: what its scenarios do not show; Markdown.
    """

    letter: str
    title: str
    note: str = ""


CLASSES = (
    FaultClass(letter="A", title="Lifetime: freed while still read or written"),
    FaultClass(letter="B", title="Copies and streams"),
    FaultClass(letter="C", title="Stale mapping"),
    FaultClass(letter="D", title="Identity: the same tokens, other KV"),
    FaultClass(
        letter="E",
        title="Prefill and decode in two processes, connectors",
        note="Between two processes: [transfer.md](transfer.md), `tests/runtime/test_transfer.py`. A block length that "
        "is wrong in a copy is in class B here, for a host tier.",
    ),
    FaultClass(
        letter="F",
        title="Speculative decoding",
        note="Trees (sglang#8409: a wrong parent) are not covered: the chain takes no parents yet.",
    ),
    FaultClass(
        letter="G",
        title="CUDA graphs and padding",
        note="Not visible by design: the padding slot itself, and index buffers that only a kernel sees. Not visible "
        "either, without `check_writes`: damage done in the very forward that writes the slot, which TAIL takes for "
        "right, as padding whose K and V are the same in every decode, over a live slot (vllm#43810 as it recurs).",
    ),
    FaultClass(
        letter="H",
        title="Kernel arithmetic and scales",
        note="Not visible by design: what a kernel reads although the tables are right, scales, and a write that "
        "lands where nobody has anything; a write elsewhere shows at its victim only.",
    ),
    FaultClass(
        letter="I",
        title="Recurrent state",
        note="Not covered yet: vllm#50630 and sglang#34043, a stale or shared state slot, have no record here.",
    ),
    FaultClass(
        letter="J",
        title="Ranks disagree",
        note="Across ranks: [ranks.md](ranks.md), `tests/runtime/test_ranks.py`.",
    ),
    FaultClass(letter="K", title="Cells that are moved"),
)

ON_TRANSFORMERS: tuple[Scenario, ...] = on_transformers.SCENARIOS

SCENARIOS: tuple[Scenario, ...] = (
    *class_a_lifetime.SCENARIOS,
    *class_b_copies.SCENARIOS,
    *class_c_mapping.SCENARIOS,
    *class_d_identity.SCENARIOS,
    *class_f_drafts.SCENARIOS,
    *class_g_graphs.SCENARIOS,
    *class_h_kernels.SCENARIOS,
    *class_k_cells.SCENARIOS,
    *ON_TRANSFORMERS,
)
