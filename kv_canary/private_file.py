"""Files that hold what users have written: readable by their owner only, and there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file beside `path`, to be written in the block and renamed to it then; its folder is made.

    Raises:
        OSError: it cannot be written; then, as where the block raises, nothing is left of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.stem[:64]}-", suffix=".tmp", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
