"""Triton's interpreter, made quicker: it looks through Triton's language once in a process, and not at every launch.

A launch puts the interpreter's functions in the place of the language's, and takes them back when it is over; every
call of a device function within it does the first again. Both look for what there is to replace, which takes longer
than the kernels of most calls do, and find the same each time.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

_ABSENT = object()


class _Replaced:
    """The language as the interpreter wants it, for as long as a launch is under way in any thread.

    Args:
        found: what is replaced: the object, the attribute's name, and the value that it gets.
    """

    def __init__(self, found: list[tuple[Any, str, Any]]) -> None:
        self._found = found
        self._before: list[tuple[Any, str, Any]] = []
        self._lock, self._launches = threading.Lock(), 0

    def replace(self, _kernel: Any) -> _Replaced:
        """Replace it; `restore` takes it back. In the place of the interpreter's `_patch_lang`."""
        with self._lock:
            self._launches += 1
            if self._launches == 1:
                self._before = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name, _ in self._found]
                for owner, name, value in self._found:
                    setattr(owner, name, value)
        return self

    def restore(self) -> None:
        with self._lock:
            self._launches -= 1
            if not self._launches:
                for owner, name, value in self._before:
                    if value is _ABSENT:
                        delattr(owner, name)
                    else:
                        setattr(owner, name, value)


def quicken() -> None:
    """Make Triton's interpreter quicker in this process; does nothing where it is not built as it is expected to be."""
    import triton.language as tl
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope") or isinstance(
        getattr(interpreter._patch_lang, "__self__", None), _Replaced
    ):
        return
    # All that any function may see of the language: by the name that a kernel gives it, and by Triton's own.
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    places = {(id(owner), name): (owner, name) for owner, name, _ in scope._changes}
    found = [(owner, name, vars(owner)[name]) for owner, name in places.values()]
    scope.restore()
    interpreter._patch_lang = _Replaced(found).replace

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.InterpretedFunction.__call__ = call
