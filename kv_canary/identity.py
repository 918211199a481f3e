"""Identity words: what a request's KV depends on besides its tokens, as one number that is the same everywhere."""

from __future__ import annotations

import hashlib

from kv_canary.constants import MASK64
from kv_canary.errors import must_be

Identity = int | str | bytes | None


def identity_word(*parts: int | str | bytes) -> int:
    """Return a 64-bit word for an adapter, a cache salt, a version of the weights, or several of them together.

    It is the first 8 bytes, little-endian, of BLAKE2b over the parts, each behind its kind and its length: the same on
    every machine and in every process, and another one for other parts, another order or another split. No parts: 0,
    which stands for nothing.

    Raises:
        TypeError: a part is neither an int, a str nor bytes.
    """
    if not parts:
        return 0
    state = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, bytes):
            kind, data = b"b", part
        elif isinstance(part, str):
            kind, data = b"s", part.encode("utf-8", "surrogatepass")
        elif isinstance(part, int) and not isinstance(part, bool):
            kind, data = b"i", part.to_bytes((part.bit_length() + 8) // 8, "little", signed=True)
        else:
            raise TypeError(must_be("identity_word", "parts", "ints, strings or bytes", type(part).__name__))
        state.update(kind + len(data).to_bytes(8, "little") + data)
    # 0 is taken.
    return int.from_bytes(state.digest(), "little") or 1


def word_of(identity: Identity) -> int:
    """Return the word of what an `identity` callback gave: an int as it is, None as 0, anything else hashed.

    Raises:
        TypeError: it is none of these.
        ValueError: an int does not fit 64 bits.
    """
    if identity is None:
        return 0
    if isinstance(identity, int) and not isinstance(identity, bool):
        if not 0 <= identity <= MASK64:
            raise ValueError(must_be("identity", "word", "in [0, 2**64)", str(identity)))
        return identity
    if isinstance(identity, str | bytes):
        return identity_word(identity)
    raise TypeError(must_be("identity", "word", "an int, a str, bytes or None", type(identity).__name__))
