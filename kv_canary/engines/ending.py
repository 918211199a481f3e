"""The end of an engine's process: what is still to be said then, and not by processes that were forked from it."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable


def at_exit(method: Callable[[], object]) -> None:
    """Call a method at the end of this process, if its object is still there, which this does not keep alive.

    A process that is forked off, as a helper of the engine's, has a copy of the object; what that watched is still its
    parent's, which goes on.
    """
    kept, process = weakref.WeakMethod(method), os.getpid()

    def end() -> None:
        alive = kept()
        if alive is not None and os.getpid() == process:
            alive()

    atexit.register(end)
