"""move: the Triton kernels. The first reads every source, the second stores, so that slots may trade places."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kv_canary.kernels.hashing import as_i64, writer_word
from kv_canary.kernels.launching import persistent_grid

BLOCK_SLOTS = 256


@triton.jit
def _stage(src_ptr, n, owner, step_ptr, records_ptr, record_stride, num_slots, staged_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    writer_now = as_i64(writer_word(tl.load(step_ptr), tl.zeros([BLOCK], tl.int64) + owner))
    for first in range(pid * BLOCK, n, tl.num_programs(0).to(tl.int64) * BLOCK):
        i = first + tl.arange(0, BLOCK)
        inside = i < n
        # i < n
        slot = tl.load(src_ptr + i, mask=inside, other=0)
        readable = inside & (slot > 0) & (slot < num_slots)
        record_ptr = records_ptr + slot * record_stride
        # readable: 0 < slot < num_slots
        ident = tl.load(record_ptr, mask=readable, other=0)
        chain = tl.load(record_ptr + 1, mask=readable, other=0)
        kv = tl.load(record_ptr + 2, mask=readable, other=0)
        writer = tl.load(record_ptr + 3, mask=readable, other=0)
        alive = ((ident | chain | kv | writer) != 0) & (writer >= 0)
        tl.store(staged_ptr + i * 4, tl.where(alive, ident, 0), mask=inside)
        tl.store(staged_ptr + i * 4 + 1, tl.where(alive, chain, 0), mask=inside)
        tl.store(staged_ptr + i * 4 + 2, tl.where(alive, kv, 0), mask=inside)
        tl.store(staged_ptr + i * 4 + 3, tl.where(alive, writer_now, 0), mask=inside)


@triton.jit
def _land(dst_ptr, n, staged_ptr, records_ptr, record_stride, num_slots, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    for first in range(pid * BLOCK, n, tl.num_programs(0).to(tl.int64) * BLOCK):
        i = first + tl.arange(0, BLOCK)
        inside = i < n
        # i < n
        slot = tl.load(dst_ptr + i, mask=inside, other=0)
        writable = inside & (slot > 0) & (slot < num_slots)
        for word in tl.static_range(4):
            # writable: 0 < slot < num_slots
            value = tl.load(staged_ptr + i * 4 + word, mask=writable, other=0)
            tl.store(records_ptr + slot * record_stride + word, value, mask=writable)


def move(
    *,
    src: torch.Tensor,
    dst: torch.Tensor,
    owner: int,
    step: torch.Tensor,
    records: tuple[torch.Tensor, ...],
    staged: torch.Tensor,
) -> None:
    """Carry records along when KV is copied from slot to slot; see specs/move.py."""
    n = src.shape[0]
    if n == 0:
        return
    grid = persistent_grid(triton.cdiv(n, BLOCK_SLOTS), src.device)
    for buffer in records:
        num_slots, stride = buffer.shape[0], buffer.stride(0)
        _stage[grid](src, n, owner, step, buffer, stride, num_slots, staged, BLOCK=BLOCK_SLOTS)
        _land[grid](dst, n, staged, buffer, stride, num_slots, BLOCK=BLOCK_SLOTS)
