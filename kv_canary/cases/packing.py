"""Tensors as they are saved and sent: layout and content without gaps, and storage for what spans more than there is.

A tensor whose rows lie so far apart that its span is giant (addresses past 2**31 elements, say) is never filled as a
whole: it lies in storage whose pages are committed when they are touched.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from kv_canary.errors import must_be

# Spans longer than this, with gaps between their rows, are giant.
GIANT_BYTES = 64 << 20
# Integers by their size in bytes: not every dtype can be indexed or counted, and these can.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# The mmap module names the flag from Python 3.13 on; this is its value on every Linux that PyTorch is built for.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


MOST_DIMENSIONS = 16
# The address space that a giant tensor may lie in; it takes no memory.
MOST_ADDRESSES = 1 << 44
_PAGE = 4096
_KEYS = {"shape", "stride", "dtype", "phase", "rows", "content"}


def is_giant(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is rows, each contiguous, with gaps between them that make its span giant."""
    if tensor.numel() == 0 or tensor.dim() == 0 or span_bytes(tensor) <= GIANT_BYTES:
        return False
    return tensor[0].is_contiguous() and tensor.stride(0) > tensor[0].numel()


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
    content = content_of(tensor)
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
    num_bytes = span_bytes(like) + 32
    # NumPy's zeros take no memory before they are touched, and PyTorch's do: rows that are left out cost nothing.
    raw = sparse_storage(num_bytes) if is_giant(like) else torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))
    start = start_of(raw, at_least=0, phase=packed["phase"], item=like.element_size())
    tensor = view_of(raw, start, like)
    rows, content = packed["rows"], packed["content"]
    if is_giant(like):
        into = rows_of(raw, start, like)
        chosen = torch.arange(len(into)) if rows is None else rows
        into[chosen] = content.view(len(chosen), into.shape[1])
    elif rows is not None:
        # Only these rows are touched.
        words = INTEGERS.get(like.element_size(), dtype)
        tensor.view(words)[rows] = content.view(words).view(len(rows), *shape[1:])
    elif like.numel():
        tensor.copy_(content.view(dtype).view(shape))
    return tensor


def packed_bytes(packed: Any) -> int:
    """Return how many bytes of memory `unpack` takes for a packed tensor at most.

    Raises:
        ValueError: its shape, strides, dtype, alignment, rows and content do not fit each other.
    """
    if not isinstance(packed, dict) or packed.keys() != _KEYS:
        raise ValueError(f"a tensor is packed as {', '.join(sorted(_KEYS))}")
    shape, stride = _numbers("shape", packed["shape"]), _numbers("stride", packed["stride"])
    dtype, phase = packed["dtype"], packed["phase"]
    if len(shape) != len(stride):
        raise ValueError(f"a tensor of {len(shape)} dimensions has {len(stride)} strides")
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a dtype is one of PyTorch's")
    if type(phase) is not int or not 0 <= phase < 16:
        raise ValueError("an address is from 0 to 15, modulo 16")
    item = dtype.itemsize
    elements = math.prod(shape)
    last = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if elements else 0
    span = (last + 1) * item
    if span > MOST_ADDRESSES:
        raise ValueError(f"a tensor of shape {list(shape)} and strides {list(stride)} spans {span} bytes")
    if elements and _overlaps(shape, stride):
        raise ValueError(f"a tensor of shape {list(shape)} and strides {list(stride)} has elements in one place")
    row_bytes = elements // shape[0] * item if elements and shape else 0
    _check_content(packed["content"], packed["rows"], shape, num_bytes=elements * item, row_bytes=row_bytes)
    if not elements:
        # It has no bytes; what is made of its sizes may.
        return math.prod(max(n, 1) for n in shape) * item
    if is_giant(torch.empty_strided(shape, stride, dtype=dtype, device="meta")):
        return min(span, shape[0] * (row_bytes + 2 * _PAGE))
    return span


def _numbers(name: str, numbers: Any) -> tuple[int, ...]:
    if not isinstance(numbers, tuple) or len(numbers) > MOST_DIMENSIONS:
        raise ValueError(f"a {name} is of at most {MOST_DIMENSIONS} numbers")
    if not all(type(n) is int and 0 <= n < MOST_ADDRESSES for n in numbers):
        raise ValueError(f"a {name} is of numbers from 0 to {MOST_ADDRESSES}")
    return numbers


def _overlaps(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether an axis steps less far than all that lies inside of it reaches."""
    reach = 1
    for step, extent in sorted((s, n) for n, s in zip(shape, stride, strict=True) if n > 1):
        if step < reach:
            return True
        reach += step * (extent - 1)
    return False


def _check_content(content: Any, rows: Any, shape: tuple[int, ...], *, num_bytes: int, row_bytes: int) -> None:
    if not _is_flat(content, torch.uint8):
        raise ValueError("the content of a tensor is of bytes")
    if rows is not None:
        if not _is_flat(rows, torch.int64) or not num_bytes or not shape:
            raise ValueError("the rows of a tensor are numbers, of a tensor that has rows")
        inside = not len(rows) or (int(rows[0]) >= 0 and int(rows[-1]) < shape[0])
        if not inside or not bool((rows[1:] > rows[:-1]).all()):
            raise ValueError(f"the rows of a tensor rise, from 0 to {shape[0] - 1}")
        num_bytes = len(rows) * row_bytes
    if len(content) != num_bytes:
        raise ValueError(f"a tensor of shape {list(shape)} has {num_bytes} bytes of content, not {len(content)}")


def _is_flat(value: Any, dtype: torch.dtype) -> bool:
    return type(value) is torch.Tensor and value.dtype == dtype and value.dim() == 1


def span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first element of `tensor` to the end of its last one."""
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def start_of(raw: torch.Tensor, *, at_least: int, phase: int, item: int) -> int:
    """Return the first byte of `raw`, from `at_least` on, whose address is `phase` mod 16; elements stay aligned."""
    start = at_least + (phase - (raw.data_ptr() + at_least)) % 16
    return start + (-start) % item


def view_of(raw: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """View `raw`, from byte `start` on, as a tensor of the layout of `like`."""
    if like.numel() == 0:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=raw.device)
    item = like.element_size()
    whole = raw[start % item : start % item + (len(raw) - start % item) // item * item].view(like.dtype)
    return whole.as_strided(like.shape, like.stride(), whole.storage_offset() + start // item)


def rows_of(raw: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """View `raw`, from byte `start` on, as the bytes of the rows of `like`: `[rows, bytes of a row]`."""
    item = like.element_size()
    return raw.as_strided((like.shape[0], like[0].numel() * item), (like.stride(0) * item, 1), start)


def content_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the elements of `tensor`, flat, on the CPU."""
    # A tensor of one element may have any stride and count as contiguous.
    return tensor.detach().clone(memory_format=torch.contiguous_format).cpu().reshape(-1).view(torch.uint8)
