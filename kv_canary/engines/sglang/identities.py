"""What the KV of SGLang's requests depends on besides their tokens, as words.

Read off the request and the engine, and not off the key that the prefix cache is searched with: a key that forgets the
adapter is what is to be found.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from kv_canary.identity import identity_word

# Images stand in the tokens themselves, by hashes of their content. Keys and salts change no byte of KV: they say who
# may find it.
_ADAPTER, _KEYS = ("lora_id",), ("extra_key", "cache_salt")


# Names and values, one behind the other.
_Words = tuple[str, ...]


class Identities:
    """Gives each request its word, which stays with it for as long as its KV does.

    Args:
        counts_weights: whether KV of the weights before an update is another's; not so where KV comes from a process
            that counts its own updates.
    """

    def __init__(self, *, counts_weights: bool = True) -> None:
        self._counts_weights = counts_weights
        self._updates = 0
        # Of each request: how often it had been put off when its word was made, and the word.
        self._of: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        # Of each session that streams: what its turns hand on to each other, and the keys it was computed under.
        self._streams: weakref.WeakKeyDictionary[Any, tuple[Any, _Words]] = weakref.WeakKeyDictionary()

    @property
    def updates(self) -> int:
        """How often the weights have changed."""
        return self._updates

    def weights_changed(self) -> None:
        """Take in that what was computed up to here is not to be used again."""
        self._updates += self._counts_weights

    def of(self, req: Any) -> int:
        """Return the word of a request; 0 for nothing."""
        put_off = getattr(req, "retraction_count", 0)
        known = self._of.get(req)
        if known is None or known[0] != put_off:
            keys, stays = self._keys(req)
            known = (put_off, _word(req, keys, self._updates))
            if stays:
                self._of[req] = known
        return known[1]

    def _keys(self, req: Any) -> tuple[_Words, bool]:
        """Return the keys that a request's KV is found by, and whether these stay.

        Turns of a session that streams get the KV of the turns before, under whatever keys they come themselves.
        """
        mine, session = _named(req, _KEYS), getattr(req, "session", None)
        if session is None or not getattr(session, "streaming", False):
            return mine, True
        if not req.kv.holds_kv:
            return mine, False
        kept = self._streams.get(session)
        if kept is None or kept[0] is not req.kv:
            kept = self._streams[session] = (req.kv, mine)
        return kept[1], True


def depends_on_nothing(req: Any) -> bool:
    """Return whether a request's KV depends on its tokens and the weights alone, images among the tokens left out."""
    return _word(req, _named(req, _KEYS), 0) == 0 and getattr(req, "multimodal_inputs", None) is None


def _named(req: Any, names: Iterable[str]) -> _Words:
    parts = [(name, getattr(req, name, None)) for name in names]
    return tuple(text for name, value in parts if value for text in (name, str(value)))


def _word(req: Any, keys: _Words, updates: int) -> int:
    return identity_word(*_named(req, _ADAPTER), *keys, *(("weights", updates) if updates else ()))
