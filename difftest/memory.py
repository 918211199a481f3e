"""Guarded copies of a call's tensors: where a backend writes beside its outputs, or reads beside its inputs, it shows.

Every tensor is copied into a span of its own between two guard zones, with the layout (strides, gaps between rows,
alignment) of the original. What is not in the tensor is filled with a pattern that differs between runs: a backend
that lets it into a result does not repeat itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kv_canary.specs.interface import KernelSpec, Leaf

GUARD_BYTES = 256


@dataclass(frozen=True, kw_only=True)
class Span:
    """One tensor's guarded copy, and the bytes that lay there before the launch."""

    leaf: Leaf
    raw: torch.Tensor
    before: torch.Tensor
    start: int
    num_bytes: int

    @property
    def data(self) -> torch.Tensor:
        """The bytes of the tensor now, gaps between rows included, on the CPU."""
        return self.raw[self.start : self.start + self.num_bytes].cpu()

    @property
    def data_before(self) -> torch.Tensor:
        return self.before[self.start : self.start + self.num_bytes]

    def guards_intact(self) -> bool:
        """Whether the bytes around the tensor are as they were."""
        now, end = self.raw.cpu(), self.start + self.num_bytes
        before = torch.equal(now[: self.start], self.before[: self.start])
        return before and torch.equal(now[end:], self.before[end:])


def guarded(
    spec: KernelSpec, arguments: Mapping[str, Any], *, device: torch.device | str, fill: int
) -> tuple[dict[str, Any], list[Span]]:
    """Return a guarded copy of `arguments` on `device`, and its spans.

    Outputs are poisoned with a pattern that is the same in every run, so that bytes left untouched compare equal;
    scratch, guard zones and gaps in inputs are filled with the pattern of run `fill`.
    """
    spans: list[Span] = []

    def place(leaf: Leaf) -> torch.Tensor:
        tensor, item = leaf.tensor.cpu(), leaf.tensor.element_size()
        elements = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        num_bytes = elements * item if tensor.numel() else 0
        phase = tensor.data_ptr() % 16
        raw = _pattern(2 * GUARD_BYTES + 16 + num_bytes, seed=fill)
        start = GUARD_BYTES + (phase - (raw.data_ptr() + GUARD_BYTES)) % 16
        start += (-start) % item
        if leaf.role == "out":
            raw[start : start + num_bytes] = _pattern(num_bytes, seed=zlib.crc32(leaf.path.encode()))
        elif leaf.role != "scratch" and num_bytes:
            # Gaps between the rows of an in/out tensor must come back as they were, so they are alike in every run.
            gaps = fill if leaf.role == "in" else zlib.crc32(leaf.path.encode())
            raw[start : start + num_bytes] = _pattern(num_bytes, seed=gaps)
            _view(raw, start, tensor).copy_(tensor)
        placed = raw.to(device)
        spans.append(Span(leaf=leaf, raw=placed, before=raw.clone(), start=start, num_bytes=num_bytes))
        return _view(placed, start, tensor)

    return spec.map_tensors(arguments, place), spans


def _view(raw: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """View `raw`, from byte `start` on, as a tensor of the layout of `like`."""
    if like.numel() == 0:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=raw.device)
    item = like.element_size()
    whole = raw[start % item : start % item + (len(raw) - start % item) // item * item].view(like.dtype)
    return whole.as_strided(like.shape, like.stride(), whole.storage_offset() + start // item)


def _pattern(num_bytes: int, *, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
