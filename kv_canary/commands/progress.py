"""The progress bar of commands that take long."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

# Seconds from one line of progress to the next, where nobody sees a bar.
EVERY_S = 30.0


def progress_bar(console: Console | None, columns: str = "what bar done elapsed left", **options: Any) -> Progress:
    """Return a progress bar, which goes when it is done unless `options` say otherwise.

    Where the console is no terminal it is on stderr; where that is none either, it is a line every half a minute.

    Args:
        console: where it is shown; None: rich's own.
        columns: their names, in order.
        options: of `rich.progress.Progress`.
    """
    # Not imported earlier: whoever asks for help waits for it.
    from rich import get_console
    from rich import progress as rich
    from rich.console import Console

    named: dict[str, Callable[[], rich.ProgressColumn]] = {
        "spinner": rich.SpinnerColumn,
        "what": lambda: rich.TextColumn("{task.description}"),
        "bar": lambda: rich.BarColumn(bar_width=16),
        "done": lambda: rich.TextColumn("{task.completed} of {task.total}"),
        "lives": lambda: rich.TextColumn("{task.completed} lives"),
        "count": rich.MofNCompleteColumn,
        "share": rich.TaskProgressColumn,
        "elapsed": rich.TimeElapsedColumn,
        "left": rich.TimeRemainingColumn,
    }
    shown = get_console() if console is None else console
    kind: type[Progress] = rich.Progress
    if not shown.is_terminal:
        shown = Console(stderr=True)
        kind = rich.Progress if shown.is_terminal else _lines()
    return kind(*(named[name]() for name in columns.split()), console=shown, **{"transient": True, **options})


@functools.cache
def _lines() -> type[Progress]:
    """Return the kind of progress that writes lines, for a file or a pipe."""
    from rich.progress import Progress
    from rich.text import Text

    class Lines(Progress):
        """Progress that writes a line every now and then, of the task that has moved, and nothing else."""

        def __init__(self, *columns: Any, **options: Any) -> None:
            super().__init__(*columns, **{**options, "disable": True})

        said = time.monotonic()

        def update(self, task_id: Any, **changes: Any) -> None:
            super().update(task_id, **changes)
            self._say(task_id)

        def advance(self, task_id: Any, advance: float = 1) -> None:
            super().advance(task_id, advance)
            self._say(task_id)

        def _say(self, task_id: Any) -> None:
            now = time.monotonic()
            if now - self.said < EVERY_S:
                return
            self.said = now
            task = next(task for task in self.tasks if task.id == task_id)
            share = f", {task.completed:,.0f} of {task.total:,.0f}" if task.total else ""
            what = Text.from_markup(task.description).plain
            print(f"kv-canary: {what}{share}, {task.elapsed or 0.0:.0f} s", file=sys.stderr, flush=True)

    return Lines
