"""move: the Triton kernels. Every source is read before anything is stored, so that slots may trade places."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kv_canary.kernels.hashing import as_i64, writer_word
from kv_canary.kernels.launching import one_program_lanes, persistent_grid
from kv_canary.kernels.records import load_record, records_of, store_record

BLOCK_SLOTS = 128
# Elements that are taken at a time, by what they are.
TILES = {"slots": BLOCK_SLOTS}


@triton.jit
def _read(src_ptr, i, inside, owner, step_ptr, records):
    """The four words that the destination of each move `inside` gets."""
    # inside: i < n
    slot = tl.load(src_ptr + i, mask=inside, other=0)
    # 0 < slot < num_slots
    ident, chain, kv, writer = load_record(records, slot, inside & (slot > 0) & (slot < records.num_slots))
    alive = ((ident | chain | kv | writer) != 0) & (writer >= 0)
    writer_now = as_i64(writer_word(tl.load(step_ptr), tl.cast(owner, tl.int64)))
    return tl.where(alive, ident, 0), tl.where(alive, chain, 0), tl.where(alive, kv, 0), tl.where(alive, writer_now, 0)


@triton.jit(do_not_specialize=["n", "owner"])
def _move_at_once(src_ptr, dst_ptr, n, owner, step_ptr, records, BLOCK: tl.constexpr):
    """One program, for at most BLOCK moves."""
    i = tl.arange(0, BLOCK).to(tl.int64)
    inside = i < n
    ident, chain, kv, writer = _read(src_ptr, i, inside, owner, step_ptr, records)
    # inside: i < n
    slot = tl.load(dst_ptr + i, mask=inside, other=0)
    # Every thread has read what another one may store.
    tl.debug_barrier()
    # 0 < slot < num_slots
    store_record(records, slot, ident, chain, kv, writer, inside & (slot > 0) & (slot < records.num_slots))


@triton.jit(do_not_specialize=["n", "owner"])
def _stage(src_ptr, n, owner, step_ptr, records, staged, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    for first in range(pid * BLOCK, n, tl.num_programs(0).to(tl.int64) * BLOCK):
        i = first + tl.arange(0, BLOCK)
        inside = i < n
        ident, chain, kv, writer = _read(src_ptr, i, inside, owner, step_ptr, records)
        # inside: i < n
        store_record(staged, i, ident, chain, kv, writer, inside)


@triton.jit(do_not_specialize=["n"])
def _land(dst_ptr, n, staged, records, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    for first in range(pid * BLOCK, n, tl.num_programs(0).to(tl.int64) * BLOCK):
        i = first + tl.arange(0, BLOCK)
        inside = i < n
        # inside: i < n
        slot = tl.load(dst_ptr + i, mask=inside, other=0)
        ident, chain, kv, writer = load_record(staged, i, inside)
        # 0 < slot < num_slots
        store_record(records, slot, ident, chain, kv, writer, inside & (slot > 0) & (slot < records.num_slots))


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
        if lanes := one_program_lanes(n, src.device):
            _move_at_once[(1,)](src, dst, n, owner, step, records_of(buffer), BLOCK=lanes, num_warps=lanes // 32)
        else:
            _stage[grid](src, n, owner, step, records_of(buffer), records_of(staged), BLOCK=BLOCK_SLOTS)
            _land[grid](dst, n, records_of(staged), records_of(buffer), BLOCK=BLOCK_SLOTS)
