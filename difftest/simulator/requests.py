"""A request, and the forward of several, as an engine tells the canary of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kv_canary.runtime.batch import ForwardBatch
from kv_canary.runtime.composition import ForwardRequest


@dataclass(eq=False, kw_only=True)
class Request:
    """A request: its own tokens, where they are cached, and how many are.

    Args:
        name: how the canary calls it.
        owner: what records that it writes are stamped with.
        tokens: those it has, generated ones included.
        serial: its number, by which a scheduler tells it from others.
        identity: what its prefixes are kept under; 0 without one.
        row: its row of the tables; 0 while it waits.
        cached: positions in the cache.
        pages: the pages that a scheduler gave it: exactly those of its cached positions, between steps.
        steps: steps since it got its row.
    """

    name: str
    owner: int
    tokens: list[int]
    serial: int = 0
    identity: int = 0
    row: int = 0
    cached: int = 0
    pages: list[int] = field(default_factory=list)
    steps: int = 0

    def history(self, start: int, end: int) -> list[int]:
        """Return its own tokens at [start, end), as they are now."""
        return self.tokens[start:end]

    def extended(self, count: int, **more: Any) -> ForwardRequest:
        """Return what the canary is told of a forward that writes `count` tokens behind the cached ones.

        Args:
            count: of tokens.
            more: fields of `ForwardRequest` that differ.
        """
        fields: dict[str, Any] = {
            "request_id": self.name,
            "row": self.row,
            "owner": self.owner,
            "prefix_len": self.cached,
            "extend_len": count,
            "tokens": self.history,
            "identity": self.identity,
        }
        return ForwardRequest(**{**fields, **more})


def forward_batch(
    work: Sequence[tuple[Request, int]], *, out_slots: Mapping[str, torch.Tensor], tables: Mapping[str, torch.Tensor]
) -> ForwardBatch:
    """Return the forward that extends each request by so many of its tokens, on the device of its slots.

    Args:
        work: requests, with how many tokens each.
        out_slots: int64 [tokens], by group.
        tables: int32 [rows, length], by group.
    """
    device = next(iter(out_slots.values())).device
    ids = [token for request, count in work for token in request.history(request.cached, request.cached + count)]
    positions = [p for request, count in work for p in range(request.cached, request.cached + count)]
    return ForwardBatch(
        requests=[request.extended(count) for request, count in work],
        input_ids=torch.tensor(ids, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        out_slots=out_slots,
        tables=tables,
    )
