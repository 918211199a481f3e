"""A call as it is now, for later: every tensor copied, in its layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kv_canary.specs import get_spec
from kv_canary.specs.interface import Leaf


def snapshot(op: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a call's complete CPU arguments: same shapes, strides and addresses mod 16; gaps are zero."""
    return get_spec(op).map_tensors(arguments, _copy)


def _copy(leaf: Leaf) -> torch.Tensor:
    tensor, item = leaf.tensor, leaf.tensor.element_size()
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    # Addresses are multiples of the item, so whole items are enough to move by.
    raw = torch.zeros(span + 16 // item, dtype=tensor.dtype)
    start = (tensor.data_ptr() - raw.data_ptr()) % 16 // item
    return raw.as_strided(tensor.shape, tensor.stride(), start).copy_(tensor)
