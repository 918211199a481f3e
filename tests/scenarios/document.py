"""docs/detection.md, from what the scenarios really reported."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from kv_canary import Reason
from kv_canary.commands.evidence_pages import fill

from .catalog import CLASSES, SCENARIOS, FaultClass
from .causes import CAUSES
from .harness import CHECKS, Facts, Scenario, facts

PATH = Path(__file__).resolve().parents[2] / "docs/detection.md"

HEAD = """# What is found, and what is not

Documented bugs of real engines, each built into a running engine, once without the bug (silent, or the tests fail) and
once with it; this page is written by `tests/scenarios/write_table.py` from what was reported, and a test compares it.

A row is one bug: *found as* are the reasons of the first step that reported anything, *by* the launches that did, and
*steps late* the steps from the bug's act to them. That report comes at the first forward that reads, or writes again,
a slot on which the bug left a trace; KV spoiled while a forward runs is seen by the HEAD of the next one, and what a
kernel puts somewhere else than it was told leaves its trace on the slot's other user only. *Text wrong* compares what
was generated with the life without the bug: a row that says "before the report" is one where the canary came too late
for some tokens, and "not visible" one where it never comes.

"Model engine" is a pool, tables, a prefix cache and a small model whose text depends on every byte of K and V that its
kernels read ([difftest/simulator](../difftest/simulator/engine.py), `tests/scenarios/served.py`), two layers of 32
bytes a token, 16 of them fingerprinted. Where a bug is marked "kind", its mechanism was rebuilt in another place than
where it was found.

Not found: bits that change in the word of the canary's own record that says who wrote a slot, and at which step.
Nothing bears that word out. A report of the slot then names another request or step, and to a seal the slot looks
written anew since, so that its bytes are not held against it any more. The other words of a record are held against
each other and against the request.
"""

CAMPAIGNS = """
The first incident of each life of the campaigns on real engines, judged likewise, fault by fault
(`difftest/stress/causes.py`); a campaign in which one is wrong fails:

<!-- kv-canary evidence causes tiers vllm_tiers sglang_detection sglang_bytes vllm_detection: begin -->
<!-- kv-canary evidence: end -->
"""

COLUMNS = (
    "| example | what goes wrong | engine | found as | by | steps late | text wrong |\n|---|---|---|---|---|---|---|\n"
)


def document() -> str:
    """Return the page."""
    return fill(HEAD + _causes() + "".join(_section(c) for c in CLASSES))


def _causes() -> str:
    """Return the section about what incidents say of their causes."""
    seen = [(s, facts(s).cause, CAUSES.get(s.name)) for s in SCENARIOS if facts(s).cause]
    # What nobody has judged, or says something else than was judged, counts as wrong.
    grades = Counter("wrong" if j is None or j.says not in cause else j.grade for _, cause, j in seen)
    text = (
        "\n## How right the causes are\n\nThe first incident of each bug that is found, judged by hand "
        "(`tests/scenarios/causes.py`): *right* names what happened, if need be as one of two or three; *half* is "
        "true, and lacks something.\n\n| right | half | wrong |\n|---|---|---|\n"
        f"| {grades['right']} | {grades['half']} | {grades['wrong']} |\n\n"
        "| half right | what is said | what it lacks |\n|---|---|---|\n"
    )
    text += "".join(f"| `{s.name}` | {cause} | {j.lacks} |\n" for s, cause, j in seen if j is not None and j.lacks)
    return text + CAMPAIGNS


def _section(fault_class: FaultClass) -> str:
    mine = [s for s in SCENARIOS if s.fault == fault_class.letter]
    text = f"\n## {fault_class.letter}. {fault_class.title}\n"
    if fault_class.note:
        text += f"\n{fault_class.note}\n"
    if not mine:
        return text
    checks = CHECKS[fault_class.letter]
    text += f"\nTo be found as one of {', '.join(r.name or '' for r in Reason if r in checks)}"
    text += "; \\* marks what else it may be found as.\n\n" if any(s.beyond for s in mine) else ".\n\n"
    text += COLUMNS + "".join(_row(s, facts(s)) for s in mine)
    sentences = [f"- `{s.name}`: {facts(s).sentence}\n" for s in mine if facts(s).sentence]
    return text + "\n" + "".join(sentences) if sentences else text


def _row(scenario: Scenario, found: Facts) -> str:
    reasons = " + ".join(f"{name}{'' if Reason[name] not in scenario.beyond else ' *'}" for name in found.reasons)
    columns = (
        f"{scenario.example}",
        f"{scenario.doc} (`{scenario.name}`)",
        scenario.engine,
        reasons.replace("*", "\\*") if reasons else "**not visible**",
        " + ".join(found.tags) or "-",
        "-" if found.late is None else str(found.late),
        _text(found),
    )
    return f"| {' | '.join(columns)} |\n"


def _text(found: Facts) -> str:
    if found.text_late is None and found.drafts_late is None:
        return "no"
    what, wrong = ("yes", found.text_late) if found.text_late is not None else ("drafts only", found.drafts_late)
    if found.late is None or wrong is None:
        return f"{what}, {_steps(wrong or 0)} after the act" if wrong else f"{what}, at once"
    if wrong == found.late:
        return f"{what}, from the report on"
    return f"{what}, {_steps(abs(wrong - found.late))} {'before' if wrong < found.late else 'after'} the report"


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"
