"""Wrapping methods on instances, and taking every wrap back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from kv_canary.errors import must_be


class Patches:
    """Wraps bound methods on instances; classes and other instances are left alone."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(self, target: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Replace `target.name` by a function that calls `wrapper(original, *args, **kwargs)`.

        Raises:
            ValueError: there is no such method, which means that the engine is not what the adapter was made for.
        """
        original = getattr(target, name, None)
        if not callable(original):
            expected = f"an object with the method {name}"
            raise ValueError(must_be("install", type(target).__name__, expected, f"{type(original).__name__}"))

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        # A method that another wrap has already shadowed goes back to that wrap.
        before = vars(target).get(name)

        def undo() -> None:
            if vars(target).get(name) is wrapped:
                if before is None:
                    delattr(target, name)
                else:
                    setattr(target, name, before)

        setattr(target, name, wrapped)
        self._undo.append(undo)

    def undo_all(self) -> None:
        """Take every wrap back, the last first."""
        while self._undo:
            self._undo.pop()()
