"""The cores that a measurement has for itself: another one beside it, on another GPU of the host, has others."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kv_canary.errors import must_be


class NoneLeftError(RuntimeError):
    """Other measurements have all cores."""


@contextlib.contextmanager
def taken(count: int) -> Iterator[tuple[int, ...]]:
    """Give `count` cores that no other measurement has as long as the context lasts, the last that there are.

    None, where there are no more than these: whoever is there runs where it likes.

    Raises:
        NoneLeftError: others have them all.
    """
    there = sorted(os.sched_getaffinity(0))
    if len(there) <= count:
        yield ()
        return
    for end in range(len(there), count - 1, -count):
        with contextlib.ExitStack() as stack:
            cores = tuple(there[end - count : end])
            if all(_lock(core, stack) for core in cores):
                yield cores
                return
    expected = f"{count} that no other measurement has"
    raise NoneLeftError(must_be("bench", "cores", expected, f"{len(there)}, which others measure on"))


def _lock(core: int, stack: contextlib.ExitStack) -> bool:
    """Take a core until `stack` is closed; return False where another process has it."""
    path = Path(tempfile.gettempdir()) / f"kv-canary-bench-core-{core}"
    try:
        file = stack.enter_context(path.open("a", encoding="utf-8"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
