"""Slot records inside kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kv_canary.constants import RECORD_WORDS

_WORDS = tl.constexpr(RECORD_WORDS)


class Records(NamedTuple):
    """A record buffer, as a kernel is given it.

    Fields: address of the first record, records from one slot's to the next one's, and slots.
    """

    ptr: Any
    stride: Any
    num_slots: Any


def records_of(buffer: torch.Tensor) -> Records:
    """Return what a kernel is told of int64 [num_slots, 4] records."""
    # In records, not words: the compiler sees that every one is 32 bytes wide and where it begins.
    return Records(buffer, buffer.stride(0) // RECORD_WORDS, buffer.shape[0])


@triton.jit
def record_address(records, slot):
    """The address of each slot's record."""
    return records.ptr + slot * records.stride * _WORDS


@triton.jit
def load_record(records, slot, valid):
    """IDENTITY, CHAIN, KV and WRITER of each valid slot's record, by loads of 16 bytes; zeros for the others.

    They go past the L1 cache, which is for what programs share.

    valid: only where 0 <= slot < num_slots.
    """
    address = record_address(records, slot)[:, None] + tl.arange(0, 2)[None, :]
    ident, chain = tl.split(tl.load(address, mask=valid[:, None], other=0, cache_modifier=".cg"))
    kv, writer = tl.split(tl.load(address + 2, mask=valid[:, None], other=0, cache_modifier=".cg"))
    return ident, chain, kv, writer


@triton.jit
def store_record(records, slot, ident, chain, kv, writer, valid):
    """Store each valid slot's record, by stores of 16 bytes; valid: only where 0 <= slot < num_slots."""
    address = record_address(records, slot)[:, None] + tl.arange(0, 2)[None, :]
    tl.store(address, tl.join(ident, chain), mask=valid[:, None])
    tl.store(address + 2, tl.join(kv, writer), mask=valid[:, None])
