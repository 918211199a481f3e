"""retire: the Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kv_canary.kernels.hashing import as_i64, writer_word
from kv_canary.kernels.launching import persistent_grid
from kv_canary.kernels.records import load_record, record_address, records_of

BLOCK_SLOTS = 128
# Elements that are taken at a time, by what they are.
TILES = {"slots": BLOCK_SLOTS}


@triton.jit(do_not_specialize=["n"])
def _retire(slots_ptr, n, owner_ptr, step_ptr, records, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    retired = as_i64(writer_word(tl.load(step_ptr), tl.load(owner_ptr)) | 0x8000000000000000)
    for first in range(pid * BLOCK, n, tl.num_programs(0).to(tl.int64) * BLOCK):
        i = first + tl.arange(0, BLOCK)
        # i < n
        slot = tl.load(slots_ptr + i, mask=i < n, other=0)
        readable = (i < n) & (slot > 0) & (slot < records.num_slots)
        # readable: 0 < slot < num_slots
        ident, chain, kv, writer = load_record(records, slot, readable)
        written = (ident | chain | kv | writer) != 0
        tl.store(record_address(records, slot) + 3, retired, mask=readable & written)


def retire(*, slots: torch.Tensor, owner: torch.Tensor, step: torch.Tensor, records: tuple[torch.Tensor, ...]) -> None:
    """Mark the records of freed slots; see specs/retire.py."""
    n = slots.shape[0]
    if n == 0:
        return
    grid = persistent_grid(triton.cdiv(n, BLOCK_SLOTS), slots.device)
    for buffer in records:
        _retire[grid](slots, n, owner, step, records_of(buffer), BLOCK=BLOCK_SLOTS)
