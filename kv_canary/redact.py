"""Keyed hashes in the place of what users have written: tokens, names of requests, and what tokens can be had from.

With the key, or within one process, equal things have equal hashes, so that a report still says which tokens differ and
which requests meet. Without it nothing can be tried out against them: chains and fingerprints are hashed too, because
they follow from the tokens by functions that everybody knows.
"""

from __future__ import annotations

import dataclasses
import secrets
from hashlib import blake2b
from typing import TYPE_CHECKING

from kv_canary.constants import MASK64, to_signed
from kv_canary.specs.violation_row import ViolationRow

if TYPE_CHECKING:
    from kv_canary.config import CanaryConfig
    from kv_canary.reports.neighbourhood import Neighbourhood

# Words of a violation row that follow from tokens and bytes, beside the two that hold a token itself.
_HASHED_WORDS = ("chain", "expected_chain", "kv", "observed_kv")


class Redactor:
    """Replaces tokens, names and words by hashes under one key.

    Args:
        key: None: one that nobody knows, of this object alone.
    """

    def __init__(self, key: str | None = None) -> None:
        self._key = secrets.token_bytes(32) if key is None else blake2b(key.encode(), digest_size=32).digest()

    @classmethod
    def of(cls, config: CanaryConfig) -> Redactor | None:
        """Return what the configuration asks for; None: nothing is to be hidden."""
        return cls(config.redact_key) if config.redact else None

    def token(self, token: int | None) -> int | None:
        """Return 32 bits that stand for a token; None, or a negative number, for what is not known, stays."""
        return token if token is None or token < 0 else self._hash("token", token) & 0xFFFFFFFF

    def word(self, word: int) -> int:
        """Return 64 bits, unsigned, that stand for a chain or a fingerprint; 0 for none stays."""
        return self._hash("word", word & MASK64) if word else 0

    def name(self, name: str | None) -> str | None:
        """Return a name that stands for a request's; None for what is not known stays."""
        return None if name is None else f"redacted-{self._hash('name', name):016x}"

    def row(self, row: ViolationRow) -> ViolationRow:
        """Return a violation row that says the same of where and why, and nothing of which tokens."""
        identity = row.identity
        if row.has_record:
            token = self.token(identity & 0xFFFFFFFF)
            identity = to_signed(((identity & MASK64) >> 32 << 32) | (token or 0))
        return row._replace(
            identity=identity,
            token=row.token if row.token < 0 else self._hash("token", row.token) & 0xFFFFFFFF,
            **{name: to_signed(self.word(getattr(row, name))) for name in _HASHED_WORDS},
        )

    def neighbourhood(self, around: Neighbourhood) -> Neighbourhood:
        """Return what lies around a fault without its tokens; writers' names are those of a decoder, hidden already."""
        rows = tuple(
            dataclasses.replace(row, token=self.token(row.token), expected_token=self.token(row.expected_token))
            for row in around.rows
        )
        return dataclasses.replace(around, request=self.name(around.request), rows=rows)

    def _hash(self, kind: str, value: int | str) -> int:
        data = f"{kind}:{value}".encode("utf-8", "surrogatepass")
        return int.from_bytes(blake2b(data, digest_size=8, key=self._key).digest(), "little")
