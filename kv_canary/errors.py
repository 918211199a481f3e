"""One form for every complaint: `kv-canary: <op or part>: <argument> must be <what>, got <what>`; names in one line."""

from __future__ import annotations

import hashlib

# Characters of a name that are kept.
LONGEST_NAME = 256


def must_be(part: str, argument: str, expected: str, got: str) -> str:
    """Return the text of a complaint about `argument` of `part`."""
    return f"kv-canary: {part}: {argument} must be {expected}, got {got}"


def said_by(error: BaseException, *, redacts: bool) -> str:
    """Return the kind of an exception, and its text unless such texts, which may name requests, are left out."""
    return type(error).__name__ if redacts else f"{type(error).__name__}: {error}"


def printable(text: str) -> str:
    """Return `text` in one line that a terminal and a log can take; names of requests may come from a client."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def short_name(name: str) -> str:
    """Return a name of at most `LONGEST_NAME` characters: a client may give one of any length.

    Of a longer one there is the beginning, and a hash of all of it, which tells it from others.
    """
    if len(name) <= LONGEST_NAME:
        return name
    whole = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"{name[: LONGEST_NAME - len(whole) - 3]}...{whole}"
