"""retire: the Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kv_canary.kernels.hashing import as_i64, writer_word
from kv_canary.kernels.launching import persistent_grid

BLOCK_SLOTS = 256


@triton.jit
def _retire(slots_ptr, n, owner, step_ptr, records_ptr, record_stride, num_slots, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    retired = writer_word(tl.load(step_ptr), tl.zeros([BLOCK], tl.int64) + owner) | 0x8000000000000000
    for first in range(pid * BLOCK, n, tl.num_programs(0).to(tl.int64) * BLOCK):
        i = first + tl.arange(0, BLOCK)
        # i < n
        slot = tl.load(slots_ptr + i, mask=i < n, other=0)
        readable = (i < n) & (slot > 0) & (slot < num_slots)
        record_ptr = records_ptr + slot * record_stride
        # readable: 0 < slot < num_slots
        any_bits = tl.load(record_ptr, mask=readable, other=0) | tl.load(record_ptr + 1, mask=readable, other=0)
        any_bits |= tl.load(record_ptr + 2, mask=readable, other=0) | tl.load(record_ptr + 3, mask=readable, other=0)
        tl.store(record_ptr + 3, as_i64(retired), mask=readable & (any_bits != 0))


def retire(*, slots: torch.Tensor, owner: int, step: torch.Tensor, records: tuple[torch.Tensor, ...]) -> None:
    """Mark the records of freed slots; see specs/retire.py."""
    n = slots.shape[0]
    if n == 0:
        return
    grid = persistent_grid(triton.cdiv(n, BLOCK_SLOTS), slots.device)
    for buffer in records:
        _retire[grid](slots, n, owner, step, buffer, buffer.stride(0), buffer.shape[0], BLOCK=BLOCK_SLOTS)
