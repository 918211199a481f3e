"""Requests' segments of flat tensors, laid out element by element."""

from __future__ import annotations

import torch


def elements(first: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return segment and index of every element, where segment r is [first[r], first[r] + lengths[r]): in order.

    Args:
        first: int64 [segments].
        lengths: int64 [segments], none negative.
    """
    segment = torch.repeat_interleave(lengths)
    before = lengths.cumsum(0) - lengths
    index = torch.arange(len(segment), device=first.device) + (first - before).take(segment)
    return segment, index
