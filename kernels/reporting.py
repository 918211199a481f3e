"""The reports of kernels: rows appended to the violation log, and the status of a launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kv_canary.constants import Status
from kv_canary.specs.structures import ViolationLog
from kv_canary.specs.violation_row import VIOLATION_WORDS

_WORDS = tl.constexpr(VIOLATION_WORDS)
_ROW_RANGE = tl.constexpr(int(Status.ROW_RANGE))
_LENGTH_RANGE = tl.constexpr(int(Status.LENGTH_RANGE))


class Log(NamedTuple):
    """A `ViolationLog`, as a kernel is given it."""

    ring: Any
    capacity: Any
    count: Any


def log_of(violations: ViolationLog) -> Log:
    """Return what a kernel is told of `violations`."""
    return Log(ring=violations.ring, capacity=violations.ring.shape[0], count=violations.count)


@triton.jit
def tag_of(site):
    """The tag of a launch site, as `Endpoint.site` has it."""
    return site & 0xFF


@triton.jit
def report(log, chosen, words):
    """Append a row for each chosen lane: `words`, a tuple of as many int64 lanes as a row has words."""
    out_ptr, fits = claim_rows(chosen, log.count, log.ring, log.capacity)
    for word in tl.static_range(_WORDS):
        tl.store(out_ptr + word, words[word], mask=fits)


@triton.jit
def claim_rows(chosen, count_ptr, ring_ptr, ring_cap):
    """Count the chosen lanes in the log; return each one's row pointer and whether the row fits the ring."""
    ones = chosen.to(tl.int64)
    first = tl.atomic_add(count_ptr, tl.sum(ones, axis=0))
    index = first + tl.cumsum(ones, axis=0) - 1
    # Only rows inside the ring are stored; the counter keeps the truth.
    return ring_ptr + index * _WORDS, chosen & (index >= 0) & (index < ring_cap)


@triton.jit
def store_status(rows_ptr, starts_ptr, bs, num_rows, status_ptr):
    """One program: assign the status of a launch over `bs` rows; negative starts matter where there are any."""
    bad_row = tl.zeros([256], dtype=tl.int32)
    bad_start = tl.zeros([256], dtype=tl.int32)
    for first in range(0, bs, 256):
        r = first + tl.arange(0, 256).to(tl.int64)
        # r < bs
        row = tl.load(rows_ptr + r, mask=r < bs, other=0)
        if starts_ptr is not None:
            start = tl.load(starts_ptr + r, mask=r < bs, other=0)
            bad_start |= tl.where(start < 0, _LENGTH_RANGE, 0)
        bad_row |= tl.where((r < bs) & ((row < 0) | (row >= num_rows)), _ROW_RANGE, 0)
    tl.store(status_ptr, tl.max(bad_row, axis=0) | tl.max(bad_start, axis=0))
