"""The token oracle: which input ids a forward should be given."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kv_canary.runtime.host import send

if TYPE_CHECKING:
    from kv_canary.runtime.composition import ForwardRequest

UNKNOWN = -1


class TokenOracle:
    """Says what a forward should be given: the requests' own tokens, and for those that the host has not seen yet, what
    was sampled for the row last.

    Args:
        max_rows: rows, row 0 (padding) included.
        device: where expectations are needed.
    """

    def __init__(self, *, max_rows: int, device: torch.device) -> None:
        self._sampled = torch.full((max_rows,), UNKNOWN, dtype=torch.int64, device=device)

    def sampled(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Take in what was sampled behind a forward: int64 `tokens` [n] of `rows` [n], both on the device.

        For engines whose next forward begins before the host has read them; others need not call it. May be captured.
        """
        self._sampled.index_copy_(0, rows, tokens)

    def expected(self, requests: Sequence[ForwardRequest], *, offset: int = 0) -> torch.Tensor:
        """Return int64 [tokens], on the device, of what the requests' next tokens are; UNKNOWN where nobody can say.

        Args:
            requests: of a forward, in its order.
            offset: how many tokens later than its position the token of a slot stands.
        """
        known: list[int] = []
        for r in requests:
            own = list(r.tokens(r.prefix_len + offset, r.prefix_len + r.extend_len + offset))[: r.extend_len]
            known += own + [UNKNOWN] * (r.extend_len - len(own))
        rows = list(itertools.chain.from_iterable([r.row] * r.extend_len for r in requests))
        tokens, of = send(self._sampled.device, known, rows)
        return torch.where(tokens < 0, self._sampled[of], tokens)
