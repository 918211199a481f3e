"""The batch of one forward, as the tensors of op calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


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
