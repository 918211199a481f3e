"""Reading dataclasses back from JSON values, strictly: what a file says is what its type allows, or an error."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")

# Lists and dictionaries inside of each other, in a value of any kind; whoever writes it out goes into all of them.
MOST_DEPTH = 32


def from_plain(kind: type[T], value: Any, *, where: str = "$") -> T:
    """Return a `kind` made of JSON values.

    Args:
        kind: a dataclass, or bool, int, float, str, dict[str, X], tuple[X, ...], tuple[X, Y], X | None of these.
        value: what JSON gave; inside of Any, at most MOST_DEPTH deep.
        where: the path to it, for errors.

    Raises:
        ValueError: naming the place, what must be there and what is.
    """
    result: T = _read(kind, value, where)
    return result


def _read(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        return _read(next(a for a in arguments if a is not type(None)), value, where)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        entries = _expect(dict, value, where)
        hints = _hints(kind)
        fields = [f for f in dataclasses.fields(kind) if f.init]
        for f in fields:
            optional = f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
            if f.name not in entries and not optional:
                raise ValueError(f"{where}.{f.name} must be given, got nothing")
        return kind(
            **{f.name: _read(hints[f.name], entries[f.name], f"{where}.{f.name}") for f in fields if f.name in entries}
        )
    if origin is tuple:
        items = _expect(list, value, where)
        each = [arguments[0]] * len(items) if arguments[1:] == (...,) else list(arguments)
        if len(each) != len(items):
            raise ValueError(f"{where} must be {len(each)} values, got {len(items)}")
        return tuple(_read(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(each, items, strict=True)))
    if origin in (dict, Mapping):
        return {k: _read(arguments[1], v, f"{where}.{k}") for k, v in _expect(dict, value, where).items()}
    if kind is Any:
        _expect_shallow(value, where, left=MOST_DEPTH)
        return value
    return _expect(kind, value, where)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _expect(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{where} must be {kind.__name__}, got {type(value).__name__}")
    return value


def _expect_shallow(value: Any, where: str, *, left: int) -> None:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    if inside is None:
        return
    if not left:
        raise ValueError(f"{where} must be at most {MOST_DEPTH} lists deep, got more")
    for each in inside:
        _expect_shallow(each, where, left=left - 1)
