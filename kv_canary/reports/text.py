"""A bundle in a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kv_canary.errors import printable
from kv_canary.reports.bundle import Bundle
from kv_canary.reports.incidents import Incident, ranges_text, requests_text
from kv_canary.reports.neighbourhood import Neighbour, Neighbourhood

# Violations that are shown one by one.
MOST_SENTENCES = 4


def show(bundle: Bundle, console: Console) -> None:
    """Print what a bundle says."""
    incident = bundle.incident
    console.print(Text(printable(incident.sentence), style="bold"))
    console.print(_facts(bundle))
    if incident.neighbourhood is not None and incident.neighbourhood.rows:
        console.print()
        console.print(neighbourhood_table(incident.neighbourhood, incident))
    if len(bundle.reports) > 1:
        shown = bundle.reports[:MOST_SENTENCES]
        console.print()
        console.print(Text(f"The first {len(shown)} of {incident.count} violations; --json has {len(bundle.reports)}:"))
        for report in shown:
            console.print(Padding(Text(printable(report.sentence)), (0, 0, 0, 2)))


def neighbourhood_table(around: Neighbourhood, incident: Incident) -> Table:
    """Return what lies around a fault, the fault itself in bold."""
    title = f"Around it, as of step {around.as_of_step}" + (
        "; the table has changed since it was found" if around.moved else ""
    )
    # 80 columns hold it: what has to wrap is the name of a writer, and a verdict between its words.
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for column in ("position", "slot", "holds\ntoken", "of\nposition", "expected", "at\nstep"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("written by", overflow="fold", min_width=10)
    table.add_column("verdict", min_width=max(len(word) for row in around.rows for word in cells(row)[-1].split()))
    for row in around.rows:
        style = "bold" if is_faulty(row, around, incident) else ""
        *numbers, by, step, _ = (Text(cell, style=style) for cell in cells(row))
        table.add_row(*numbers, step, by, verdict_text(row))
    return table


def is_faulty(row: Neighbour, around: Neighbourhood, incident: Incident) -> bool:
    """Whether a row of the neighbourhood is one of the incident's own."""
    number, parts = (row.slot, incident.slots) if around.request is None else (row.position, incident.positions)
    return any(first <= number <= last for first, last in parts)


def cells(row: Neighbour) -> list[str]:
    """Return the words of a neighbour: position, slot, token, its position, expected token, writer, step, verdict."""
    numbers = (row.position, row.slot, row.token, row.stored_position, row.expected_token)
    by = printable(row.writer) if row.writer else f"owner {row.owner}" if row.owner else ""
    written = row.token is not None
    return [
        *("" if n is None else str(n) for n in numbers),
        f"{by} (handed out)" if row.handed_out else f"{by} (freed)" if row.retired else by,
        str(row.step) if written else "",
        " + ".join(row.verdict) or "ok",
    ]


def verdict_text(row: Neighbour) -> Text:
    """Return a neighbour's verdict in its colour."""
    text = cells(row)[-1]
    return Text(text, style="green" if text == "ok" else "dim" if text == "LEFT_WINDOW" else "bold red")


def where_text(incident: Incident) -> str:
    """Return an incident's positions and slots in words."""
    return f"{ranges_text('position', incident.positions)}; {ranges_text('slot', incident.slots)}"


def steps_text(incident: Incident) -> str:
    """Return the step in which an incident was found, or the first and the last of several."""
    first, last = incident.first_step, incident.last_step
    return f"{first}" if first == last else f"{first} to {last}"


def versions_text(bundle: Bundle) -> str:
    """Return the versions of what was installed, in a line."""
    return ", ".join(f"{k} {v}" for k, v in bundle.versions.items() if v is not None)


def _facts(bundle: Bundle) -> Table:
    incident = bundle.incident
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in (
        ("who", requests_text(incident.requests, count=incident.num_requests)),
        ("where", where_text(incident)),
        ("group", incident.group),
        ("reasons", " + ".join(incident.reasons)),
        ("found by", " + ".join(incident.tags)),
        ("written by", incident.writer or ""),
        ("steps", steps_text(incident)),
        ("violations", str(incident.count)),
        ("likely", incident.cause),
        ("saved", bundle.written),
        ("watching", str(bundle.summary.get("watching", ""))),
        ("versions", versions_text(bundle)),
    ):
        if value:
            table.add_row(Text(name, style="dim"), Text(printable(value)))
    return table
