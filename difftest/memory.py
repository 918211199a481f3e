"""Guarded copies of a call's tensors: where a backend writes beside its outputs, or reads beside its inputs, it shows.

Every tensor is copied into a span of its own between two guard zones, with the layout (strides, gaps between rows,
alignment) of the original. What is not in the tensor is filled with a pattern that differs between runs: a backend
that lets it into a result does not repeat itself.

A tensor whose rows lie so far apart that its span is giant (addresses past 2**31 elements, say) is never filled or
compared as a whole: its copy lies in storage whose pages are committed when touched, and only the rows, and guard
bytes around every row, are. `pack` and `unpack` carry such a tensor from process to process.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kv_canary.difftest.locks import own_lock
from kv_canary.errors import must_be
from kv_canary.specs.interface import KernelSpec, Leaf

GUARD_BYTES = 256
# Spans longer than this, with gaps between their rows, are giant.
GIANT_BYTES = 64 << 20
# Integers by their size in bytes: not every dtype can be indexed or counted, and these can.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# The mmap module names the flag from Python 3.13 on; this is its value on every Linux that PyTorch is built for.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


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
    spec: KernelSpec, arguments: Mapping[str, Any], *, device: torch.device | str, fill: int
) -> tuple[dict[str, Any], list[Span]]:
    """Return a guarded copy of `arguments` on `device`, and its spans.

    Outputs are poisoned with a pattern that is the same in every run, so that bytes left untouched compare equal;
    scratch, guard zones and gaps in inputs are filled with the pattern of run `fill`: around integers small numbers
    where it is odd, else any bytes.

    Around every row of a giant tensor up to `GUARD_BYTES` of the gap on each side are guard bytes; what lies further
    from the rows is neither filled nor compared. On the CPU a row costs the pages it lies in; a GPU has no storage
    that is committed when touched, so there the whole span is allocated, for one call at a time (`room_for`).
    """
    spans: list[Span] = []

    def place(leaf: Leaf) -> torch.Tensor:
        make = _place_giant if is_giant(leaf.tensor) else _place
        placed, span = make(leaf, torch.device(device), fill)
        spans.append(span)
        return placed

    return spec.map_tensors(arguments, place), spans


def is_giant(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is rows, each contiguous, with gaps between them that make its span giant."""
    if tensor.numel() == 0 or tensor.dim() == 0 or _span_bytes(tensor) <= GIANT_BYTES:
        return False
    return tensor[0].is_contiguous() and tensor.stride(0) > tensor[0].numel()


@contextlib.contextmanager
def room_for(spec: KernelSpec, arguments: Mapping[str, Any], *, device: torch.device | str) -> Iterator[None]:
    """Let no other process on this machine have giant tensors on its GPUs for as long as this call has, if it has any.

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


def sparse_storage(num_bytes: int) -> torch.Tensor:
    """Return a zeroed uint8 tensor [num_bytes] on the CPU, whose pages are committed only when they are touched.

    Raises:
        RuntimeError: this platform has no such memory, or refuses that much of it.
    """
    if num_bytes < 0:
        raise ValueError(must_be("sparse storage", "num_bytes", "at least 0", str(num_bytes)))
    if num_bytes == 0:
        return torch.zeros(0, dtype=torch.uint8)
    if not _MAP_NORESERVE:
        raise RuntimeError(must_be("sparse storage", "platform", "one with MAP_NORESERVE, such as Linux", sys.platform))
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except (OSError, OverflowError) as error:
        expected = f"able to reserve {num_bytes} bytes of address space"
        raise RuntimeError(must_be("sparse storage", "platform", expected, str(error))) from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        # A touched row should commit a page or two, not megabytes; a kernel without huge pages refuses the advice.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def pack(tensor: torch.Tensor) -> dict[str, Any]:
    """Return `tensor`'s layout and content, without its gaps, to be saved or sent; `unpack` is the way back.

    Rows (along the first axis) that are all zero are left out where that is smaller.
    """
    content = _content(tensor)
    num_rows = tensor.shape[0] if tensor.dim() and tensor.numel() else 0
    rows = None
    if num_rows:
        by_row = content.view(num_rows, -1)
        kept = by_row.any(dim=1).nonzero().view(-1)
        if len(kept) * (by_row.shape[1] + kept.element_size()) < len(content):
            rows, content = kept, by_row[kept].view(-1)
    return {
        "shape": tuple(tensor.shape),
        "stride": tensor.stride(),
        "dtype": tensor.dtype,
        "phase": tensor.data_ptr() % 16,
        "rows": rows,
        # What is saved of a view is all of its storage.
        "content": content.clone(),
    }


def unpack(packed: Mapping[str, Any]) -> torch.Tensor:
    """Return the tensor that `pack` was given, on the CPU: same shape, strides, dtype and address mod 16.

    Gaps are zeroed; a giant tensor lies in `sparse_storage`. What comes from a file is first put to `packed_bytes`.
    """
    shape, stride, dtype = packed["shape"], packed["stride"], packed["dtype"]
    # A tensor without storage, for its layout.
    like = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    num_bytes = _span_bytes(like) + 32
    # NumPy's zeros take no memory before they are touched, and PyTorch's do: rows that are left out cost nothing.
    raw = sparse_storage(num_bytes) if is_giant(like) else torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))
    start = _start(raw, at_least=0, phase=packed["phase"], item=like.element_size())
    tensor = _view(raw, start, like)
    rows, content = packed["rows"], packed["content"]
    if is_giant(like):
        into = _rows(raw, start, like)
        chosen = torch.arange(len(into)) if rows is None else rows
        into[chosen] = content.view(len(chosen), into.shape[1])
    elif rows is not None:
        # Only these rows are touched.
        words = INTEGERS.get(like.element_size(), dtype)
        tensor.view(words)[rows] = content.view(words).view(len(rows), *shape[1:])
    elif like.numel():
        tensor.copy_(content.view(dtype).view(shape))
    return tensor


def _place(leaf: Leaf, device: torch.device, fill: int) -> tuple[torch.Tensor, Span]:
    """Return a copy of the leaf in a span of its own, filled and compared as a whole."""
    tensor = leaf.tensor.cpu()
    num_bytes = _span_bytes(tensor)
    raw = _pattern(2 * GUARD_BYTES + 16 + num_bytes, seed=fill)
    start = _start(raw, at_least=GUARD_BYTES, phase=tensor.data_ptr() % 16, item=tensor.element_size())
    end = start + num_bytes
    if fill % 2 and leaf.tensor.dtype in (torch.int32, torch.int64):
        _make_plausible(raw, start, leaf.tensor, seed=fill)
    if leaf.role == "out":
        raw[start:end] = _pattern(num_bytes, seed=_seed_of(leaf))
    elif leaf.role != "scratch" and num_bytes:
        # Gaps between the rows of an in/out tensor must come back as they were, so they are alike in every run.
        raw[start:end] = _pattern(num_bytes, seed=fill if leaf.role == "in" else _seed_of(leaf))
        _view(raw, start, tensor).copy_(tensor)
    placed = raw.to(device)
    span = Span(
        leaf=leaf,
        body=placed[start:end],
        body_before=raw[start:end].clone(),
        guards=(placed[:start], placed[end:]),
        guards_before=(raw[:start].clone(), raw[end:].clone()),
    )
    return _view(placed, start, tensor), span


def _place_giant(leaf: Leaf, device: torch.device, fill: int) -> tuple[torch.Tensor, Span]:
    """Return a copy of the leaf in a span of its own, of which only the rows and what is around them are touched."""
    tensor, item = leaf.tensor, leaf.tensor.element_size()
    num_bytes = 2 * GUARD_BYTES + 16 + _span_bytes(tensor)
    if device.type == "cpu":
        raw = sparse_storage(num_bytes)
    else:
        raw = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    start = _start(raw, at_least=GUARD_BYTES, phase=tensor.data_ptr() % 16, item=item)
    rows = _rows(raw, start, tensor)
    if leaf.role in ("in", "inout"):
        content = _content(tensor)
    else:
        content = _pattern(rows.numel(), seed=_seed_of(leaf) if leaf.role == "out" else fill)
    rows.copy_(content.view(rows.shape))

    num_rows, row_bytes, stride = *rows.shape, rows.stride(0)
    after = min(GUARD_BYTES, stride - row_bytes)
    before = min(GUARD_BYTES, stride - row_bytes - after)
    guards = (
        raw[:start],
        raw[start + _span_bytes(tensor) :],
        raw.as_strided((num_rows - 1, after), (stride, 1), start + row_bytes),
        raw.as_strided((num_rows - 1, before), (stride, 1), start + stride - before),
    )
    lengths = [guard.numel() for guard in guards]
    guards_before = _pattern(sum(lengths), seed=fill).split(lengths)
    for guard, pattern in zip(guards, guards_before, strict=True):
        guard.copy_(pattern.view(guard.shape))
    span = Span(leaf=leaf, body=rows, body_before=content, guards=guards, guards_before=guards_before)
    return _view(raw, start, tensor), span


def _span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first element of `tensor` to the end of its last one."""
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _start(raw: torch.Tensor, *, at_least: int, phase: int, item: int) -> int:
    """Return the first byte of `raw`, from `at_least` on, whose address is `phase` mod 16; elements stay aligned."""
    start = at_least + (phase - (raw.data_ptr() + at_least)) % 16
    return start + (-start) % item


def _view(raw: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """View `raw`, from byte `start` on, as a tensor of the layout of `like`."""
    if like.numel() == 0:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=raw.device)
    item = like.element_size()
    whole = raw[start % item : start % item + (len(raw) - start % item) // item * item].view(like.dtype)
    return whole.as_strided(like.shape, like.stride(), whole.storage_offset() + start // item)


def _rows(raw: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """View `raw`, from byte `start` on, as the bytes of the rows of `like`: `[rows, bytes of a row]`."""
    item = like.element_size()
    return raw.as_strided((like.shape[0], like[0].numel() * item), (like.stride(0) * item, 1), start)


def _content(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the elements of `tensor`, flat, on the CPU."""
    # A tensor of one element may have any stride and count as contiguous.
    return tensor.detach().clone(memory_format=torch.contiguous_format).cpu().reshape(-1).view(torch.uint8)


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
