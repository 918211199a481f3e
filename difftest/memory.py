"""Guarded copies of a call's tensors: where a backend writes beside its outputs, or reads beside its inputs, it shows.

Every tensor is copied into a span of its own between two guard zones, with the layout (strides, gaps between rows,
alignment) of the original. What is not in the tensor is filled with a pattern that differs between runs: a backend
that lets it into a result does not repeat itself.

A tensor whose rows lie so far apart that its span is giant (addresses past 2**31 elements, say) is never filled or
compared as a whole: its copy lies in storage whose pages are committed when touched, and only the rows, and guard
bytes around every row, are.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kv_canary.cases.packing import content_of, is_giant, rows_of, span_bytes, sparse_storage, start_of, view_of
from kv_canary.difftest.locks import own_lock
from kv_canary.specs.interface import KernelSpec, Leaf

GUARD_BYTES = 256


@dataclass(frozen=True, kw_only=True)
class Span:
    """One tensor's guarded copy, and the bytes that lay there before the launch.

    Args:
        leaf: the original.
        body: the bytes of the copy: its whole span, gaps included, or of a giant one the rows, `[rows, row bytes]`.
        guards: the bytes around it, and between the rows of a giant one.
        body_before, guards_before: what they held, packed, on the CPU.
    """

    leaf: Leaf
    body: torch.Tensor
    body_before: torch.Tensor
    guards: tuple[torch.Tensor, ...]
    guards_before: tuple[torch.Tensor, ...]

    @property
    def data(self) -> torch.Tensor:
        """The bytes of the tensor now, flat, on the CPU; gaps between rows included, unless it is giant."""
        return self.body.reshape(-1).cpu()

    @property
    def data_before(self) -> torch.Tensor:
        return self.body_before

    def guards_intact(self) -> bool:
        """Whether the bytes around the tensor are as they were."""
        return all(
            torch.equal(now.reshape(-1).cpu(), before)
            for now, before in zip(self.guards, self.guards_before, strict=True)
        )


def guarded(
    spec: KernelSpec,
    arguments: Mapping[str, Any],
    *,
    device: torch.device | str,
    fill: int,
    keeps_scratch: bool = False,
) -> tuple[dict[str, Any], list[Span]]:
    """Return a guarded copy of `arguments` on `device`, and its spans.

    Outputs are poisoned with a pattern that is the same in every run, so that bytes left untouched compare equal;
    scratch, guard zones and gaps in inputs are filled with the pattern of run `fill`: around integers small numbers
    where it is odd, else any bytes; around each tensor others, so that what is copied from beside one shows beside
    another. With `keeps_scratch`, scratch that is not giant holds what it does in `arguments`.

    Around every row of a giant tensor up to `GUARD_BYTES` of the gap on each side are guard bytes; what lies further
    from the rows is neither filled nor compared. On the CPU a row costs the pages it lies in; a GPU has no storage
    that is committed when touched, so there the whole span is allocated, for one call at a time (`room_for`).
    """
    spans: list[Span] = []

    def place(leaf: Leaf) -> torch.Tensor:
        if is_giant(leaf.tensor):
            placed, span = _place_giant(leaf, torch.device(device), fill)
        else:
            placed, span = _place(leaf, torch.device(device), fill, keeps_scratch=keeps_scratch)
        spans.append(span)
        return placed

    return spec.map_tensors(arguments, place), spans


@contextlib.contextmanager
def room_for(spec: KernelSpec, arguments: Mapping[str, Any], *, device: torch.device | str) -> Iterator[None]:
    """Keep other processes on this machine from giant tensors on its GPUs for as long as this call has any.

    Their memory is there for one such call at a time, and is given back before the next.
    """
    giant = torch.device(device).type == "cuda" and any(is_giant(leaf.tensor) for leaf in spec.leaves(arguments))
    if not giant:
        yield
        return
    with own_lock("giant"):
        try:
            yield
        finally:
            torch.cuda.empty_cache()


def _place(leaf: Leaf, device: torch.device, fill: int, *, keeps_scratch: bool) -> tuple[torch.Tensor, Span]:
    """Return a copy of the leaf in a span of its own, filled and compared as a whole."""
    tensor = leaf.tensor.cpu()
    num_bytes = span_bytes(tensor)
    around = fill + _seed_of(leaf)
    raw = _pattern(2 * GUARD_BYTES + 16 + num_bytes, seed=around)
    start = start_of(raw, at_least=GUARD_BYTES, phase=tensor.data_ptr() % 16, item=tensor.element_size())
    end = start + num_bytes
    if fill % 2 and leaf.tensor.dtype in (torch.int32, torch.int64):
        _make_plausible(raw, start, leaf.tensor, seed=around)
    if leaf.role == "out":
        raw[start:end] = _pattern(num_bytes, seed=_seed_of(leaf))
    elif (leaf.role != "scratch" or keeps_scratch) and num_bytes:
        # Gaps between the rows of an in/out tensor must come back as they were, so they are alike in every run.
        raw[start:end] = _pattern(num_bytes, seed=fill if leaf.role == "in" else _seed_of(leaf))
        view_of(raw, start, tensor).copy_(tensor)
    placed = raw.to(device)
    span = Span(
        leaf=leaf,
        body=placed[start:end],
        body_before=raw[start:end].clone(),
        guards=(placed[:start], placed[end:]),
        guards_before=(raw[:start].clone(), raw[end:].clone()),
    )
    return view_of(placed, start, tensor), span


def _place_giant(leaf: Leaf, device: torch.device, fill: int) -> tuple[torch.Tensor, Span]:
    """Return a copy of the leaf in a span of its own, of which only the rows and what is around them are touched."""
    tensor, item = leaf.tensor, leaf.tensor.element_size()
    num_bytes = 2 * GUARD_BYTES + 16 + span_bytes(tensor)
    if device.type == "cpu":
        raw = sparse_storage(num_bytes)
    else:
        raw = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    start = start_of(raw, at_least=GUARD_BYTES, phase=tensor.data_ptr() % 16, item=item)
    rows = rows_of(raw, start, tensor)
    if leaf.role in ("in", "inout"):
        content = content_of(tensor)
    else:
        content = _pattern(rows.numel(), seed=_seed_of(leaf) if leaf.role == "out" else fill)
    rows.copy_(content.view(rows.shape))

    num_rows, row_bytes, stride = *rows.shape, rows.stride(0)
    after = min(GUARD_BYTES, stride - row_bytes)
    before = min(GUARD_BYTES, stride - row_bytes - after)
    guards = (
        raw[:start],
        raw[start + span_bytes(tensor) :],
        raw.as_strided((num_rows - 1, after), (stride, 1), start + row_bytes),
        raw.as_strided((num_rows - 1, before), (stride, 1), start + stride - before),
    )
    lengths = [guard.numel() for guard in guards]
    guards_before = _pattern(sum(lengths), seed=fill + _seed_of(leaf)).split(lengths)
    for guard, pattern in zip(guards, guards_before, strict=True):
        guard.copy_(pattern.view(guard.shape))
    span = Span(leaf=leaf, body=rows, body_before=content, guards=guards, guards_before=guards_before)
    return view_of(raw, start, tensor), span


def _make_plausible(raw: torch.Tensor, start: int, like: torch.Tensor, *, seed: int) -> None:
    """Fill `raw` with small numbers: what is read beside a table then looks like a slot or a row, and is used."""
    item = like.element_size()
    elements = (len(raw) - start % item) // item
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(1, 9, (elements,), dtype=like.dtype, generator=generator)
    raw[start % item : start % item + elements * item] = numbers.view(torch.uint8)


def _seed_of(leaf: Leaf) -> int:
    return zlib.crc32(leaf.path.encode())


def _pattern(num_bytes: int, *, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
