"""A request, and the batch of one forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(eq=False, kw_only=True)
class Request:
    """A request: its own tokens, where they are cached, and how many are.

    Args:
        serial: its number, by which it is told from others.
        owner: what records it writes are stamped with.
        identity: what its prefixes are kept under; 0 without one.
        tokens: those it has, generated ones included.
        row: its row of the tables; 0 while it waits.
        pages: the pages that it holds: exactly those of its cached positions, between steps.
        cached: positions in the cache.
        steps: steps since it got its row.
    """

    serial: int
    owner: int
    identity: int
    tokens: list[int]
    row: int = 0
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    steps: int = 0


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One forward, padding included, as the tensors that every implementation is given."""

    rows: torch.Tensor
    owners: torch.Tensor | None
    prefix_lens: torch.Tensor
    extend_lens: torch.Tensor
    expected_lens: torch.Tensor
    strides: torch.Tensor | None
    input_ids: torch.Tensor
    positions: torch.Tensor
    expected_input_ids: torch.Tensor | None
    # Per group.
    out_slots: Mapping[str, torch.Tensor]
    step: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Tokens to append to rows: what chain_tails and scatter_token_ids take."""

    flat: torch.Tensor
    offsets: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor
