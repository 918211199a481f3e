"""Files that commands write."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import click


class _OutFile(click.Path):
    """A file to be written, in a folder that is there: nobody is to work for minutes and learn then that it is not."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path: Path = super().convert(value, param, ctx)  # type: ignore[assignment]
        if not path.absolute().parent.is_dir():
            self.fail(f"the folder of {str(path)!r} must be there, got none", param, ctx)
        return path


OUT_FILE = _OutFile()


def write_early(path: Path, text: str) -> None:
    """Write what there is by now to a file that is written again at the end.

    What is no file, a pipe say, gets all of it once, at the end; and what cannot be written now ends nothing.
    """
    if path.exists() and not path.is_file():
        return
    with contextlib.suppress(OSError):
        path.write_text(text, encoding="utf-8")
