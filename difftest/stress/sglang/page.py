"""docs/sglang-detection.md, from the rows of `sglang_detection`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kv_canary.difftest.stress.sglang.engine import BYTES_PER_TOKEN, LAYERS
from kv_canary.difftest.stress.sglang.lives import COLUMNS, SWEEP_EVERY

_HEAD = """# In SGLang, beside SGLang's own canary

<!-- kv-canary evidence status sglang_detection: begin -->
<!-- kv-canary evidence: end -->

The same faults in the same engine: a real scheduler of SGLang {sglang} on the CPU, stepped in one process, with a tiny
model ({layers} layers, {bytes} bytes of K and as many of V a token and layer). Requests, tokens and the fault follow
from a seed; each life runs as it is, with the fault, and with the fault before each canary. This page is written by
`kv-canary stress sglang --page` from its rows, which `bench/results/sglang_detection.json` keeps; a
test compares them.

*Text wrong* counts the lives in which some request generated other tokens than without the fault. The other columns
count the lives in which that canary reported something, and the steps from the first that ran with the fault to the one
in which the report came; 0 is that very step. Every canary sweeps the prefix cache every {sweep} steps.

| column | turned on |
|---|---|
{columns}
Of the lives whose text was wrong, those that were reported:
{shares}
## Healthy lives

The same traffic without a fault. A report here is a false alarm.

{healthy}
## Faults

{faults}
- A stretch in one layer is met by kv-canary's fingerprints whichever of these {layers} layers it is: a position's is of
  one layer, and the next position's of the next. In a model of more layers than the stretch has positions, only seals
  find it for certain. SGLang's own reads layer 0 only, and of it K alone unless it is told otherwise.
- An idle prefix has nobody who reads it: the next sweep finds the damage, or the next hit.
- Swapping two entries of one request leaves its own text as it was, for attention has no order; a later request that
  hits only one of the two positions in the cache reads a wrong token.
- Another request's whole prefix is consistent in itself: only who knows the request's own tokens can tell. SGLang's own
  without token checks notices when the request has ended and its slots are hit anew.
- Freed slots are seen by kv-canary before anybody has reused them.

## One byte

One random byte of one random position, of {bytes} bytes in {layers} layers: too little for a fingerprint of some of
the bytes to see for certain. kv-canary covers such a byte with probability 1 in {odds} as it comes, and 1 in {layers}
with whole rows; it has to report the change if and only if it covers it (in brackets). Seals are of every byte: their
scrub comes every {sweep} steps, and its report with it.

{one_byte}
## What the reports say

The first report of the first life of each fault.

{reports}"""


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return the page that the rows make."""
    healthy = [r for r in rows if r["place"] == "healthy"]
    faulty = [r for r in rows if r["place"] != "healthy"]
    whole = [r for r in faulty if not r["one_byte"]]
    return _HEAD.format(
        sglang=rows[0]["versions"]["sglang"],
        layers=LAYERS,
        bytes=BYTES_PER_TOKEN,
        sweep=SWEEP_EVERY,
        odds=LAYERS * (BYTES_PER_TOKEN // (COLUMNS[0].read_bytes or 1)),
        columns="".join(f"| {_title(c.name)} | {c.doc} |\n" for c in COLUMNS),
        shares="".join(f"{line}\n" for line in _shares(faulty)),
        healthy=_table(healthy),
        faults=_table(whole),
        one_byte=_table([r for r in faulty if r["one_byte"]]),
        reports="".join(f"{line}\n" for line in _reports(whole)),
    )


def cells(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return one line of a table per fault: its name, what goes wrong, whether the text was, and who reported it."""
    lines = []
    for name in dict.fromkeys(r["fault"] for r in rows):
        mine = [r for r in rows if r["fault"] == name]
        wrong = sum(r["output_wrong"] for r in mine)
        lines.append((name, mine[0]["doc"], f"{wrong} of {len(mine)}", *(_found(mine, c.name) for c in COLUMNS)))
    return lines


def _table(rows: Sequence[dict[str, Any]]) -> str:
    titles = ("what goes wrong", "text wrong", *(_title(c.name) for c in COLUMNS))
    text = f"| {' | '.join(titles)} |\n" + "|---" * len(titles) + "|\n"
    for name, doc, *rest in cells(rows):
        what = f"{doc} (`{name}`)"
        text += f"| {' | '.join((what, *rest))} |\n"
    return text


def _title(column: str) -> str:
    return {
        "ours": "kv-canary",
        "ours_whole_rows": "kv-canary, whole rows",
        "ours_sealed": "kv-canary, seals",
        "builtin": "SGLang's own",
        "builtin_everything": "SGLang's own, everything on",
    }[column]


def _found(rows: Sequence[dict[str, Any]], column: str) -> str:
    found = [r for r in rows if r[column]]
    notes = []
    if found:
        late = sorted(r[f"{column}_steps_late"] for r in found)
        steps = f"{late[0]}" if late[0] == late[-1] else f"{late[0]} to {late[-1]}"
        notes.append(f"{steps} step{'' if steps == '1' else 's'}")
    if rows[0]["one_byte"] and f"{column}_covered" in rows[0]:
        notes.append(f"{sum(r[f'{column}_covered'] for r in rows)} covered")
    return f"{len(found)} of {len(rows)}" + (f" ({'; '.join(notes)})" if notes else "")


def _shares(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    titles = ("", *(_title(c.name) for c in COLUMNS))
    yield f"\n| {' | '.join(titles)} |\n" + "|---" * len(titles) + "|"
    for what, one_byte in (
        ("a stretch of bytes, a page, a table entry, a prefix, a lifetime", False),
        ("one byte", True),
    ):
        wrong = [r for r in rows if r["one_byte"] == one_byte and r["output_wrong"]]
        counts = [f"{sum(r[c.name] for r in wrong)} of {len(wrong)}" for c in COLUMNS]
        yield f"| {what} | {' | '.join(counts)} |"


def _reports(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    for name in dict.fromkeys(r["fault"] for r in rows):
        first = next(r for r in rows if r["fault"] == name)
        yield f"- `{name}`, {first['where']}"
        builtin = "builtin" if first["builtin"] else "builtin_everything"
        yield from (f"  - {_title(c)}: {first[f'{c}_report']}" for c in ("ours", builtin) if first[c])
