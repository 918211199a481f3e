"""One form for every complaint: `kv-canary: <op or part>: <argument> must be <what>, got <what>`."""

from __future__ import annotations


def must_be(part: str, argument: str, expected: str, got: str) -> str:
    """Return the text of a complaint about `argument` of `part`."""
    return f"kv-canary: {part}: {argument} must be {expected}, got {got}"
