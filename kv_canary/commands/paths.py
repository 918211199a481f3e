"""Files that commands write."""

from __future__ import annotations

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
