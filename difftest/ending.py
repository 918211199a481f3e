"""The end of a long run by a signal: Ctrl-C, and what `timeout` and CI send, lose nothing of what was reached."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Seconds within which two signals are one: whoever sends one to a process and to its group does so at once.
_ONE_S = 1.0


@contextmanager
def until_ended() -> Iterator[Callable[[], bool]]:
    """Raise KeyboardInterrupt once, at the first SIGINT or SIGTERM, and yield what says whether one came.

    `timeout` sends its signal twice, to the process and to its group: the second one must not end what the first began
    to write. A second Ctrl-C, a second later or more, ends it all the same. Python drops an exception that is raised in
    the hooks of a fork, so that a run which forks has to ask.
    """
    ended = threading.Event()
    first = 0.0

    def end(number: int, frame: Any) -> None:
        nonlocal first
        if not ended.is_set():
            first = time.monotonic()
            ended.set()
            raise KeyboardInterrupt
        if number == signal.SIGINT and time.monotonic() - first > _ONE_S:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield ended.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
