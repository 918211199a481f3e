"""A bundle as one HTML page, for a phone as well: the cause, a summary, the slot timeline drawn, and the details."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from kv_canary.errors import printable
from kv_canary.reports.bundle import Bundle
from kv_canary.reports.incidents import Incident, requests_text
from kv_canary.reports.neighbourhood import LEFT, Neighbour, Neighbourhood
from kv_canary.reports.text import cells, is_faulty, steps_text, versions_text, where_text

# Writers that get a colour of their own: the ones with most slots; the others share a grey.
NUM_COLOURS = 6
_LEFT, _TOP, _BOTTOM, _RIGHT = 64, 34, 46, 12
_WIDTH, _HEIGHT, _FLOOR = 960, 300, 26

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59626d; --line: #d5dae0; --paper: #ffffff; --bad: #c4162a;
  --c0: #2f6fb7; --c1: #b35c00; --c2: #1f7a4d; --c3: #7a4fb0; --c4: #8a6d00; --c5: #0f7c86; --c6: #8b939c; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8ebef; --soft: #a3adb8; --line: #3a424b; --paper: #14181d; --bad: #ff6b78;
    --c0: #6aa6ea; --c1: #f0a04b; --c2: #5cc48d; --c3: #b793ea; --c4: #d9bb45; --c5: #54c3cd; --c6: #7d8791; } }
body { margin: 1.5rem; background: var(--paper); color: var(--ink); font: 15px/1.45 system-ui, sans-serif;
  overflow-wrap: anywhere; }
h1 { font-size: 1.25rem; margin: .2rem 0 1rem; max-width: 50rem; } h2 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
p { margin: .4rem 0; max-width: 50rem; } .soft { color: var(--soft); } .bad { color: var(--bad); font-weight: 600; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .25rem 1rem; margin: 0; max-width: 50rem; }
dt { color: var(--soft); } dd { margin: 0; }
/* What is wider than the page scrolls in itself; where it can be said, it begins at the fault. */
.wide { overflow-x: auto; max-width: 100%; } .picture { position: relative; width: max-content; }
.start { position: absolute; top: 0; width: 1px; height: 1px; scroll-initial-target: nearest; }
table { border-collapse: separate; border-spacing: 0; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: .2rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { color: var(--soft); font-weight: 500; } td.text, th.text { text-align: left; }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--paper); }
tr.fault td { background: color-mix(in srgb, var(--bad) 12%, var(--paper)); }
@media (max-width: 40rem) { body { margin: 1rem; } th, td { padding: .2rem .5rem; } }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; list-style: none; padding: 0; }
.legend i { display: inline-block; width: .8rem; height: .8rem; margin-right: .4rem; border-radius: 2px; }
svg { display: block; } svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
svg .axis { stroke: var(--line); stroke-width: 1; } svg .mark { fill: var(--bad); stroke: none; }
svg .ring { fill: none; stroke: var(--bad); stroke-width: 1.5; } svg .none { fill: none; stroke: var(--soft); }
"""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One position in the drawing, in pixels: where its slot's mark is, and what it says.

    Args:
        x, y, width, height: of the mark.
        colour: number of its writer's colour; NUM_COLOURS for all others, -1 where nothing was written.
        faulty: whether a verify found something wrong, or it is one of the incident's own.
        row: what is drawn.
    """

    x: float
    y: float
    width: float
    height: float
    colour: int
    faulty: bool
    row: Neighbour


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """The geometry of a timeline: positions to the right, steps at which their slots were written upwards.

    Args:
        width, height: of the picture.
        columns: one for every position, left to right.
        steps: every step in which something was written, with the middle of its lane.
        writers: names by colour number.
    """

    width: float
    height: float
    columns: tuple[Column, ...]
    steps: tuple[tuple[int, float], ...]
    writers: tuple[str, ...]


def page(bundle: Bundle) -> str:
    """Return a whole HTML page that needs no network."""
    incident = bundle.incident
    timeline = bundle.timeline or incident.neighbourhood
    title = f"kv-canary incident {incident.number}: {' + '.join(incident.reasons)}"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">""",
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body>",
        f'<p class="soft">{_text(title)}</p><h1>{_text(_capital(incident.cause))}</h1>',
        _summary(bundle),
    ]
    if timeline is not None and timeline.rows:
        whose = f"request {timeline.request}" if timeline.request is not None else "slots side by side"
        moved = " The table has changed since the fault was found." if timeline.moved else ""
        drawing = layout(timeline, incident)
        parts += [
            f"<h2>Who wrote or freed the slots of {_text(whose)}, and when</h2>",
            f'<p class="soft">As of step {timeline.as_of_step}, in {_text(timeline.group)}.{moved}',
            "Further up is later; a ring and a triangle mark what is wrong, an empty box a slot without a record.</p>",
            f'<div class="wide"><div class="picture">{_start(drawing, timeline, incident)}',
            f"{_svg(drawing, timeline)}</div></div>{_legend(drawing)}",
        ]
    around = incident.neighbourhood or timeline
    if around is not None and around.rows:
        parts.append(f'<h2>Around the fault</h2><div class="wide">{_table(around, incident)}</div>')
    parts.append(f"<h2>In full</h2><p>{_text(incident.sentence)}</p>")
    parts.append(f'<p class="soft">{_text(versions_text(bundle))}</p>')
    return "\n".join([*parts, "</body></html>", ""])


def _summary(bundle: Bundle) -> str:
    """Return what was found, in which request, where and when, and the canary's verdict then, as a list."""
    incident = bundle.incident
    steps = steps_text(incident)
    facts = (
        ("what", f"{' + '.join(incident.reasons)}, {incident.count} violation{'' if incident.count == 1 else 's'}"),
        ("request", requests_text(incident.requests, count=incident.num_requests).removeprefix("request ")),
        ("where", f"{where_text(incident)} of {incident.group}"),
        ("when", f"step{'' if steps.isdigit() else 's'} {steps}"),
        ("saved", bundle.written),
        ("written by", incident.writer or ""),
        ("found by", " + ".join(incident.tags)),
        ("verdict", str(bundle.summary.get("verdict") or "")),
        ("watching", str(bundle.summary.get("watching") or "")),
    )
    return f"<dl>{''.join(f'<dt>{name}</dt><dd>{_text(words)}</dd>' for name, words in facts if words)}</dl>"


def layout(timeline: Neighbourhood, incident: Incident) -> Drawing:
    """Return where everything goes."""
    rows = timeline.rows
    steps = sorted({r.step for r in rows if r.token is not None})
    inner = max(_WIDTH - _LEFT - _RIGHT, 5 * len(rows))
    pitch = min(inner / len(rows), 30)
    # The lowest lane, which has room for its label, is for slots without a record.
    lane = min(_HEIGHT / (len(steps) + 1), _FLOOR)
    height = _TOP + lane * len(steps) + _FLOOR + _BOTTOM
    lanes = {step: _TOP + lane * (len(steps) - 1 - i) for i, step in enumerate(steps)}
    names = [name for name, _ in Counter(_writer(r) for r in rows if r.token is not None).most_common(NUM_COLOURS)]
    mark = max(lane * 0.8, 3)
    columns = tuple(
        Column(
            x=_LEFT + i * pitch,
            y=(lanes[r.step] + lane / 2 if r.token is not None else height - _BOTTOM - _FLOOR / 2) - mark / 2,
            width=max(pitch * 0.86, pitch - 3),
            height=mark,
            colour=-1 if r.token is None else names.index(w) if (w := _writer(r)) in names else NUM_COLOURS,
            faulty=is_faulty(r, timeline, incident) or bool(set(r.verdict) - {LEFT}),
            row=r,
        )
        for i, r in enumerate(rows)
    )
    return Drawing(
        width=max(_LEFT + pitch * len(rows) + _RIGHT, 320),
        height=height,
        columns=columns,
        steps=tuple((step, lanes[step] + lane / 2) for step in steps),
        writers=tuple(names),
    )


def _start(drawing: Drawing, timeline: Neighbourhood, incident: Incident) -> str:
    """Return a mark at which a picture that is wider than the page begins: a little before the incident."""
    at = next((c.x for c in drawing.columns if is_faulty(c.row, timeline, incident)), 0.0)
    return f'<i class="start" style="left: {max(at - 4 * _LEFT, 0):.0f}px"></i>'


def _svg(drawing: Drawing, timeline: Neighbourhood) -> str:
    right, bottom = drawing.width - _RIGHT, drawing.height - _BOTTOM
    noun = "slot" if timeline.request is None else "position"
    parts = [
        f'<svg role="img" aria-label="slot timeline" width="{drawing.width:g}" height="{drawing.height:g}" '
        f'viewBox="0 0 {drawing.width:g} {drawing.height:g}" xmlns="http://www.w3.org/2000/svg">',
        f'<line class="axis" x1="{_LEFT}" y1="{bottom:g}" x2="{right:g}" y2="{bottom:g}"/>',
        f'<text x="{_LEFT}" y="{drawing.height - 8:g}">{noun}</text><text x="4" y="14">step</text>',
    ]
    for step, y in _spread(drawing.steps, 13):
        parts.append(f'<line class="axis" x1="{_LEFT - 4}" y1="{y:.1f}" x2="{right:g}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{step}</text>')
    labels = [(c.row.slot if timeline.request is None else c.row.position, c.x + c.width / 2) for c in drawing.columns]
    for label, x in _spread(labels, 9 + 7 * len(str(max(n for n, _ in labels)))):
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16:g}" text-anchor="middle">{label}</text>')
    for c in drawing.columns:
        box = f'x="{c.x:.1f}" y="{c.y:.1f}" width="{c.width:.1f}" height="{c.height:.1f}"'
        look = 'class="none"' if c.colour < 0 else f'style="fill: var(--c{c.colour})"'
        parts.append(f"<rect {box} {look}><title>{_text(_tip(c.row))}</title></rect>")
        if c.faulty:
            middle = c.x + c.width / 2
            # Around the mark, so that the colour of a thin one still shows.
            around = f'x="{c.x - 1.5:.1f}" y="{c.y - 1.5:.1f}" width="{c.width + 3:.1f}" height="{c.height + 3:.1f}"'
            parts.append(f'<rect class="ring" {around}/>')
            parts.append(f'<path class="mark" d="M{middle - 4:.1f} {_TOP - 16} h8 l-4 8 z"/>')
    if any(c.colour < 0 for c in drawing.columns):
        parts.append(f'<text x="{_LEFT - 8}" y="{bottom - _FLOOR / 2 + 4:g}" text-anchor="end">none</text>')
    return "".join([*parts, "</svg>"])


def _spread(labels: Sequence[tuple[int, float]], room: float) -> list[tuple[int, float]]:
    """Return the labels that leave each other `room` pixels, from the first on."""
    chosen: list[tuple[int, float]] = []
    for label, at in labels:
        if not chosen or abs(at - chosen[-1][1]) >= room:
            chosen.append((label, at))
    return chosen


def _legend(drawing: Drawing) -> str:
    entries = [
        f'<li><i style="background: var(--c{i})"></i>{_text(name)}</li>' for i, name in enumerate(drawing.writers)
    ]
    if any(c.colour == NUM_COLOURS for c in drawing.columns):
        entries.append(f'<li><i style="background: var(--c{NUM_COLOURS})"></i>others</li>')
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _table(around: Neighbourhood, incident: Incident) -> str:
    # The verdict comes early: it is seen without scrolling.
    names = ("position", "slot", "verdict", "holds token", "of position", "expected", "written by", "at step")
    text = {"written by", "verdict"}
    head = "".join(f"<th{' class=text' if n in text else ''}>{n}</th>" for n in names)
    lines = []
    for row in around.rows:
        position, slot, *others, verdict = cells(row)
        kinds = ["text" if n in text else "" for n in names]
        kinds[2] = "text bad" if set(row.verdict) - {LEFT} else "text"
        words = (position, slot, verdict, *others)
        inner = "".join(f'<td class="{k}">{_text(c)}</td>' for k, c in zip(kinds, words, strict=True))
        fault = ' class="fault"' if is_faulty(row, around, incident) else ""
        lines.append(f"<tr{fault}>{inner}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _tip(row: Neighbour) -> str:
    position, slot, token, _, _, by, step, verdict = cells(row)
    by = _writer(row) if row.retired else by or "writer unknown"
    held = f"token {token}, {by}, step {step}" if token else "no record"
    return f"position {position}, slot {slot}: {held}; {verdict}"


def _writer(row: Neighbour) -> str:
    by = row.writer or (f"owner {row.owner}" if row.owner else "")
    if row.handed_out:
        return f"handed out to {by}"
    if row.retired:
        return f"freed by {by}" if by else "freed"
    return by or "unknown"


def _capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def _text(text: str) -> str:
    return escape(printable(text))
