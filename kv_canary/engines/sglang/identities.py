"""What the KV of SGLang's requests depends on besides their tokens, as words.

Read off the request and the engine, and not off the key that the prefix cache is searched with: a key that forgets the
adapter is what is to be found.
"""

from __future__ import annotations

import weakref
from typing import Any

from kv_canary.identity import identity_word

# Images stand in the tokens themselves, by hashes of their content.
_NAMES = ("lora_id", "extra_key", "cache_salt")


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
            known = self._of[req] = (put_off, _word(req, self._updates))
        return known[1]


def depends_on_nothing(req: Any) -> bool:
    """Return whether a request's KV depends on its tokens and the weights alone, images among the tokens left out."""
    return _word(req, 0) == 0 and getattr(req, "multimodal_inputs", None) is None


def _word(req: Any, updates: int) -> int:
    parts = [(name, getattr(req, name, None)) for name in _NAMES]
    words = [text for name, value in parts if value for text in (name, str(value))]
    return identity_word(*words, *(("weights", updates) if updates else ()))
