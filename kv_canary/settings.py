"""Settings out of the environment: variables `KV_CANARY_...`, read into the fields of a dataclass by their types."""

from __future__ import annotations

import difflib
import os
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

ENVIRONMENT = "KV_CANARY_"
# How the environment says "off" where that is one of the values.
_OFF = ("", "off", "none", "0")
_SWITCHES = {**dict.fromkeys(("1", "true", "on", "yes"), True), **dict.fromkeys(("0", "false", "off", "no"), False)}


def is_asked_for(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment asks for a canary: `KV_CANARY_MODE` is there, and not off."""
    return environ.get(f"{ENVIRONMENT}MODE", "").lower() not in _OFF


def read_settings(
    cls: type,
    prefix: str,
    environ: Mapping[str, str],
    given: Mapping[str, Any],
    *,
    others: Mapping[str, type] = types.MappingProxyType({}),
) -> dict[str, Any]:
    """Return `given`, and the fields of the dataclass `cls` that `environ` has under `prefix`.

    Args:
        others: what follows the prefix in variables of other parts, and whose fields these are: they are left alone.

    Raises:
        ValueError: a variable names no field, or its text is none of the field's values.
    """
    settings, hints = dict(given), typing.get_type_hints(cls)
    for name, text in environ.items():
        rest = name.removeprefix(prefix)
        if rest == name or rest.startswith(tuple(others)):
            continue
        field = rest.lower()
        if field not in hints:
            theirs = [part.lower() + known for part, of in others.items() for known in typing.get_type_hints(of)]
            near = nearest(field, [*hints, *theirs])
            hint = f" (did you mean {prefix}{near.upper()}?)" if near else ""
            raise ValueError(f"kv-canary: environment: {name} must be a known setting, got an unknown one{hint}")
        if field not in settings:
            settings[field] = _parse(name, text, hints[field])
    return settings


def nearest(name: str, known: Sequence[str]) -> str | None:
    """Return the one of the `known` names that is most like `name`; None where none is."""
    return next(iter(difflib.get_close_matches(name, known, n=1)), None)


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """Return the alternatives of a type hint."""
    return get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union else (hint,)


def _parse(name: str, text: str, hint: Any) -> Any:
    """Return the value that `text` stands for."""
    kinds = kinds_of(hint)
    if type(None) in kinds and text.lower() == "none":
        return None
    for kind in kinds:
        if kind is bool and text.lower() in _SWITCHES:
            return _SWITCHES[text.lower()]
        if kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
        if "off" in get_args(kind) and text.lower() in _OFF:
            return "off"
        if kind in (str, Path) or typing.get_origin(kind) is Literal:
            return Path(text) if kind is Path else text
    expected = "1 or 0" if bool in kinds else " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
    raise ValueError(f"kv-canary: environment: {name} must be {expected}, got {text!r}")
