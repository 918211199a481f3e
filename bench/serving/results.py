"""What was measured, for a terminal and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kv_canary.bench.serving.run import Row
from kv_canary.commands.paths import write_early

_PAGE_WIDTH = 110


class ResultFile:
    """A file with the rows of a measurement, which are there as they come.

    Args:
        path: of the file; None: there is none.
        facts: return where all of them are measured; called once, when there is a row.
    """

    def __init__(self, path: Path | None, facts: Callable[[], Mapping[str, Any]]) -> None:
        self._path, self._facts = path, facts
        self._found: Mapping[str, Any] | None = None

    def keep(self, rows: Sequence[Row]) -> None:
        """Write what has been measured by now; the first row says that it is not all, and nothing was checked last."""
        if self._path is not None:
            write_early(self._path, self._text(rows, {"unfinished": True}))

    def write(self, rows: Sequence[Row], failed: Mapping[str, Mapping[str, str]]) -> None:
        """Write all of it; the first row says what has failed, by model and mode."""
        if self._path is not None:
            self._path.write_text(self._text(rows, {"failed": dict(failed)}), encoding="utf-8")

    def _text(self, rows: Sequence[Row], more: Mapping[str, Any]) -> str:
        if self._found is None:
            self._found = self._facts()
        found = [asdict(row) for row in rows] or [{}]
        found[0] |= {**self._found, **more}
        return json.dumps(found, indent=1) + "\n"


def show(rows: Sequence[Row]) -> None:
    """Print the rows."""
    console = Console()
    # What is not a terminal has no width of its own.
    (console if console.is_terminal else Console(width=_PAGE_WIDTH)).print(table(rows))


def table(rows: Sequence[Row]) -> Table:
    """Return the rows as a table for a terminal."""
    shown = Table(title="tokens per second against no canary, by turns")
    shown.add_column("batch", no_wrap=True)
    shown.add_column("mode", no_wrap=True)
    for column in ("ratio", "range", "best", "host us", "stream us", "device ops", "gc ms"):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        operations = sum(each["count"] for each in row.operations.values())
        shown.add_row(
            f"{row.model} {row.phase}\n{row.shape}",
            f"{row.mode}\nn={row.n}" + (f" ({row.starts} starts)" if row.starts > 1 else ""),
            f"{row.ratio:.3f}",
            f"{row.low:.3f}\n{row.high:.3f}",
            f"{row.best:.3f}",
            *("" if us is None else f"{us:,.0f}" for us in (row.host_us, row.stream_us)),
            f"{operations:.1f}" if row.operations else "",
            "" if row.gc_longest_ms is None else f"{row.gc_longest_ms:.1f}",
        )
    return shown
