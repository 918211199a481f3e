"""One form for every complaint: `kv-canary: <op or part>: <argument> must be <what>, got <what>`; names in one line."""

from __future__ import annotations


def must_be(part: str, argument: str, expected: str, got: str) -> str:
    """Return the text of a complaint about `argument` of `part`."""
    return f"kv-canary: {part}: {argument} must be {expected}, got {got}"


def printable(text: str) -> str:
    """Return `text` in one line that a terminal and a log can take; names of requests may come from a client."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
