"""Appending rows to the violation log from inside a kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from kv_canary.constants import VIOLATION_WORDS

_WORDS = tl.constexpr(VIOLATION_WORDS)


@triton.jit
def claim_rows(chosen, count_ptr, ring_ptr, ring_cap):
    """Count the chosen lanes in the log; return each one's row pointer and whether the row fits the ring."""
    ones = chosen.to(tl.int64)
    first = tl.atomic_add(count_ptr, tl.sum(ones, axis=0))
    index = first + tl.cumsum(ones, axis=0) - 1
    # Only rows inside the ring are stored; the counter keeps the truth.
    return ring_ptr + index * _WORDS, chosen & (index >= 0) & (index < ring_cap)
