"""What ranks send each other, in words."""

from __future__ import annotations

from typing import Any

from kv_canary.ranks import message


def test_an_exchange_is_as_long_as_the_documents_say() -> None:
    facts: dict[str, Any] = {"number": 5, "seen": 0, "total": 1, "sentence": "x", "digest_step": 0, "digest": None}
    facts["redacts"] = False
    words, _ = message.pack((0, 0, 0), **facts)
    assert len(words) == 70
    # Two groups, four requests of the largest batch, eight words each.
    words, _ = message.pack((2, 4, 8), **facts)
    assert len(words) == 70 + 2 * 4 * 8
