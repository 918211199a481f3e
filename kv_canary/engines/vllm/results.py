"""The result of a step, which the engine's thread and the canary both ask for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Once:
    """A call that is made once, by whoever comes first, and answers everybody; others wait for it.

    Args:
        call: what is called; if it raises an `Exception`, everybody who asks is told.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call: Callable[[], Any] | None = call
        self._lock = threading.Lock()
        self._result: Any = None
        self._error: Exception | None = None

    def __call__(self) -> Any:
        """Return what the call returns.

        Raises:
            Exception: whatever it raises.
        """
        self.read()
        if self._error is not None:
            raise self._error
        return self._result

    def read(self) -> None:
        """See that the call has been made, whatever came of it; what ends a process or a thread is raised on."""
        with self._lock:
            if self._call is None:
                return
            try:
                self._result = self._call()
            except Exception as error:
                self._error = error
            self._call = None
