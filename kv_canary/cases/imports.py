"""The Python code that a case file names: it is run only where whoever replays the file has named it too."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from kv_canary.errors import printable


def check_imports(wanted: Sequence[str], given: Sequence[str], *, case: str = "this case") -> None:
    """Check that all the code that a case wants is code that its user has named.

    Args:
        wanted: the files and modules that the case names.
        given: those that the user names: files by any path to them, modules by their dotted names.
        case: what to call the case.

    Raises:
        ValueError: saying which one is not given.
    """
    missing = [printable(shlex.quote(name)) for name in wanted if not any(_is_same(name, each) for each in given)]
    if missing:
        options = " ".join(f"--import {name}" for name in missing)
        raise ValueError(
            f"kv-canary: case file: {case} wants {', '.join(missing)}: pass {options} to run its code, if you trust it"
        )


def replay_line(
    path: Path, *, imports: Sequence[str] = (), device: str = "cpu", plant: str | None = None, max_gib: float = 1.0
) -> str:
    """Return the line that replays a case file, for a shell."""
    words = ["kv-canary", "difftest", "replay", str(path)]
    for name in imports:
        words += ["--import", name]
    words += ["--device", device] if device != "cpu" else []
    words += ["--max-gib", f"{max_gib:g}"] if max_gib > 1 else []
    words += ["--plant", plant] if plant else []
    return shlex.join(words)


def _is_same(name: str, given: str) -> bool:
    """Whether two names of files or modules name the same one."""
    if name == given:
        return True
    if not (name.endswith(".py") and given.endswith(".py")):
        return False
    try:
        return os.path.realpath(name) == os.path.realpath(given)
    except (OSError, ValueError):
        # Names that no file can have.
        return False
