"""Wrapping methods of objects, so that the objects stay what they are, and taking every wrap back."""

from __future__ import annotations

import copy
import functools
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

from kv_canary.errors import must_be
from kv_canary.reports import CanaryViolationError

Wrapper = Callable[..., Any]
# Told of a wrapper's own failure, by the name of the method; it may raise it on.
Failed = Callable[[str, Exception], None]


class Patches:
    """Wraps methods of single objects; other objects, of the same class too, are left alone.

    What a wrapper raises of its own goes to `failed`, and the engine gets what its own method returns or raises, which
    is called exactly once. A finding goes on to the engine.

    Args:
        failed: see there; None: failures go on to the engine.
    """

    def __init__(self, *, failed: Failed | None = None) -> None:
        self._failed = failed
        self._undo: list[Callable[[], None]] = []

    def wrap(self, target: Any, name: str, wrapper: Wrapper) -> None:
        """Replace `target.name` by what calls `wrapper(original, *args, **kwargs)`.

        Raises:
            ValueError: there is no such method, which means that the engine is not what the adapter was made for.
        """
        wrapped = _Wrapped(_method(target, name), _Around(name, wrapper, self._failed), before=vars(target).get(name))

        def undo() -> None:
            # Somebody else may have wrapped it since, and goes on calling this one.
            wrapped.active = False
            if vars(target).get(name) is not wrapped:
                return
            before = wrapped.before
            while isinstance(before, _Wrapped) and not before.active:
                before = before.before
            if before is None:
                delattr(target, name)
            else:
                setattr(target, name, before)

        setattr(target, name, wrapped)
        self._undo.append(undo)

    def wrap_in_class(self, target: Any, name: str, wrapper: Wrapper) -> None:
        """Wrap a method of `target` without leaving anything in it: copies and pickles of it are as they were.

        The method is looked up in its class for as long as some object of it is watched; all others get their own.

        Raises:
            ValueError: as `wrap`.
            RuntimeError: another canary has wrapped it.
        """
        if name in vars(target):
            self.wrap(target, name, wrapper)
            return
        _method(target, name)
        self._undo.append(_Dispatcher.watch(target, name, _Around(name, wrapper, self._failed)))

    def inner(self) -> Patches:
        """Return patches that are taken back with these, or before, on their own; failures of both are told alike."""
        inner = Patches(failed=self._failed)
        self._undo.append(inner.undo_all)
        return inner

    def expect_unwatched(self, target: Any, name: str) -> None:
        """See that no other canary has wrapped `target.name`.

        Raises:
            RuntimeError: one has.
        """
        found = vars(target).get(name)
        if isinstance(found, _Wrapped) and found.active:
            raise RuntimeError(_taken(target))

    def undo_all(self) -> None:
        """Take every wrap back, the last first."""
        while self._undo:
            self._undo.pop()()


class _Around:
    """A wrapper and what becomes of its failures."""

    def __init__(self, name: str, wrapper: Wrapper, failed: Failed | None) -> None:
        self._name, self._wrapper, self._failed = name, wrapper, failed

    def call(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the wrapper around `original`, which is called once whatever becomes of the wrapper."""
        if self._failed is None:
            return self._wrapper(original, *args, **kwargs)
        outcome: list[Any] = []
        raised: list[BaseException] = []

        def once(*args: Any, **kwargs: Any) -> Any:
            try:
                outcome.append(original(*args, **kwargs))
            except BaseException as error:
                raised.append(error)
                raise
            return outcome[-1]

        try:
            return self._wrapper(once, *args, **kwargs)
        except CanaryViolationError:
            raise
        except Exception as error:
            if raised and (error is raised[-1] or not outcome):
                raise raised[-1] from None
            self._failed(self._name, error)
        return outcome[-1] if outcome else original(*args, **kwargs)


class _Wrapped:
    """A method of one object with a wrapper around it; a copy or a pickle has the method alone."""

    def __init__(self, original: Callable[..., Any], around: _Around, *, before: Any) -> None:
        functools.update_wrapper(self, original)
        # Whether the wrapper is to be called, and what the object itself had under the name.
        self.active, self.before = True, before
        self._original, self._around = original, around

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active:
            return self._original(*args, **kwargs)
        return self._around.call(self._original, args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        # As a function does, where what was wrapped is a method of a class.
        return self if instance is None else types.MethodType(self, instance)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._original, memo)

    def __reduce__(self) -> Any:
        # By a function of the standard library: whoever loads it may not have kv-canary.
        return copy.copy, (self._original,)


class _Dispatcher:
    """A method of a class, which calls the wrapper of the object that it is called on, if there is one.

    Args:
        cls: the class.
        name: of the method.
    """

    _lock = threading.Lock()
    _known: ClassVar[weakref.WeakKeyDictionary[type, dict[str, _Dispatcher]]] = weakref.WeakKeyDictionary()

    def __init__(self, cls: type, name: str) -> None:
        self._cls, self._name = weakref.ref(cls), name
        self._own = vars(cls).get(name)
        # By identity: an object need not be hashable, nor equal to itself only.
        self._wrappers: dict[int, tuple[weakref.ref[Any], _Around]] = {}
        original = getattr(cls, name)

        @functools.wraps(original)
        def dispatch(this: Any, *args: Any, **kwargs: Any) -> Any:
            method = original.__get__(this, type(this))
            found = self._wrappers.get(id(this))
            if found is None or found[0]() is not this:
                return method(*args, **kwargs)
            return found[1].call(method, args, kwargs)

        self._function = dispatch
        setattr(cls, name, dispatch)

    @classmethod
    def watch(cls, target: Any, name: str, around: _Around) -> Callable[[], None]:
        """Call `around` where `target.name` is called; return what ends that."""
        with cls._lock:
            named = cls._known.setdefault(type(target), {})
            if name not in named:
                named[name] = cls(type(target), name)
            dispatcher = named[name]
            found = dispatcher._wrappers.get(id(target))
            if found is not None and found[0]() is target:
                raise RuntimeError(_taken(target))
            key = id(target)
            reference = weakref.ref(target, lambda _: dispatcher._is_gone(key, around))
            dispatcher._wrappers[key] = (reference, around)
        return lambda: dispatcher._forget(key, around)

    def _is_gone(self, key: int, around: _Around) -> None:
        """Forget an object that the collector takes: it may come by inside `watch`, whose lock its own thread holds."""
        if self._lock.acquire(blocking=False):
            try:
                self._drop(key, around)
            finally:
                self._lock.release()
        elif (found := self._wrappers.get(key)) is not None and found[1] is around:
            # The class keeps the dispatcher, which calls what it has always called.
            self._wrappers.pop(key, None)

    def _forget(self, key: int, around: _Around) -> None:
        """Call `around` no more, and leave the class as it was found once nothing of it is watched."""
        with self._lock:
            self._drop(key, around)

    def _drop(self, key: int, around: _Around) -> None:
        """See `_forget`; with the lock."""
        found = self._wrappers.get(key)
        if found is None or found[1] is not around:
            return
        del self._wrappers[key]
        cls = self._cls()
        if self._wrappers or cls is None:
            return
        self._known[cls].pop(self._name, None)
        # Somebody else may have replaced it since, and goes on calling it.
        if vars(cls).get(self._name) is self._function:
            if self._own is None:
                delattr(cls, self._name)
            else:
                setattr(cls, self._name, self._own)


def _method(target: Any, name: str) -> Callable[..., Any]:
    """Return a method; ValueError where there is none."""
    original: Callable[..., Any] | None = getattr(target, name, None)
    if not callable(original):
        expected = f"an object with the method {name}"
        raise ValueError(must_be("install", type(target).__name__, expected, f"{type(original).__name__}"))
    return original


def _taken(target: Any) -> str:
    expected = "an object that no canary watches"
    return must_be(
        "install", type(target).__name__, expected, "one that is watched already: uninstall that canary first"
    )
