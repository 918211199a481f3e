"""What a packed tensor says of itself, held against itself before it is unpacked."""

from __future__ import annotations

import math
from typing import Any

import torch

from kv_canary.difftest.memory import is_giant

MOST_DIMENSIONS = 16
# The address space that a giant tensor may lie in; it takes no memory.
MOST_ADDRESSES = 1 << 44
_PAGE = 4096
_KEYS = {"shape", "stride", "dtype", "phase", "rows", "content"}


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
