"""docs/vllm-detection.md, from the rows of `detection`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kv_canary.difftest.stress.causes import GRADES

_HEAD = """# In vLLM

<!-- kv-canary evidence status vllm_detection: begin -->
<!-- kv-canary evidence: end -->

Faults in vLLM's own engine ({vllm}) on the CPU, in process, with a tiny model of three layers, or of as many as a row
says: model runner V1, and V2 in Triton's interpreter. Requests, tokens and the fault follow from a seed; each life runs
as it is, with the fault, and with the fault before kv-canary. This page is written by `kv-canary stress vllm --page`
from its rows, which `bench/results/vllm_detection.json` keeps; a test compares them.

Seals are on (`KV_CANARY_SEALS=layer`), as they are by default on a GPU; rows with a star have
`KV_CANARY_CHECK_WRITES=1` besides. *Text wrong* counts the lives in which some request generated other tokens than
without the fault. *Late* are steps from the fault to the report, the median and the most: bytes that nobody samples are
found when their request ends, or when somebody hits them, and a worker is told of an end with the next step; those that
nobody reads again are found by the scrub, with which each life ends. *Blamed wrongly* counts lives with an incident
that is not of what was damaged. *Causes* counts how right the first incident's is
([how that is judged, and what is wrong](detection.md#how-right-the-causes-are)): right, half right, wrong.

## Healthy lives

The same traffic without a fault. A report here is a false alarm.

{healthy}
## Faults

{faults}
## What the reports say

The first incident of the first life of each fault, with model runner V1.

{reports}"""


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return the page that the rows make."""
    faulty = [r for r in rows if not r["is_healthy"]]
    return _HEAD.format(
        vllm=rows[0]["versions"]["vllm"],
        healthy=_table([r for r in rows if r["is_healthy"]]),
        faults=_table(faulty),
        reports="".join(f"- `{r['fault']}`, {r['where']}:\n  {r['example']}\n" for r in faulty if r["runner"] == "V1"),
    )


def _table(rows: Sequence[dict[str, Any]]) -> str:
    titles = ("what goes wrong", "runner", "text wrong", "found", "late", "blamed wrongly", "causes")
    text = f"| {' | '.join(titles)} |\n" + "|---" * len(titles) + "|\n"
    for row in rows:
        late = "" if row["late_steps_max"] is None else f"{row['late_steps_median']}, {row['late_steps_max']}"
        cells = (
            f"{row['doc']} (`{row['fault']}`){' *' if row['setting'] == 'writes' else ''}",
            row["runner"],
            f"{row['wrong_text']} of {row['runs']}",
            f"{row['found']} of {row['runs']}",
            late,
            str(row["blamed_wrongly"]),
            "" if row["is_healthy"] else ", ".join(str(row["causes"][grade]) for grade in GRADES),
        )
        text += f"| {' | '.join(cells)} |\n"
    return text
