"""The best that memory can do, measured in the same run: a copy, and a gather of the very sectors that HEAD reads."""

# Kernels annotate their compile-time arguments only.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kv_canary.bench.speed.state import State
from kv_canary.bench.speed.timing import Clock, Launch, launchable
from kv_canary.bench.speed.workload import SECTOR, Entries

COPY_BYTES = 2 << 30
COPY_BLOCKS = (1024, 2048, 4096)
GATHER_BLOCKS = (128, 256, 512)
INTERPRETED_WORDS = 1 << 14


@triton.jit
def _copy(source_ptr, target_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # at < n
    tl.store(target_ptr + at, tl.load(source_ptr + at, mask=at < n), mask=at < n)


@triton.jit
def _gather(records_ptr, slots_ptr, memory_ptr, k_ptr, v_ptr, n, out_ptr, BLOCK: tl.constexpr):
    """Read the record, 16 bytes of K and 16 bytes of V of each entry, and keep their sum for nobody."""
    pid = tl.program_id(0).to(tl.int64)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    # Indices count sectors: 4 words of a record buffer, and of the memory that K and V lie in.
    slot = tl.load(slots_ptr + i, mask=inside, other=0).to(tl.int64) * 4
    k = tl.load(k_ptr + i, mask=inside, other=0).to(tl.int64) * 4
    v = tl.load(v_ptr + i, mask=inside, other=0).to(tl.int64) * 4
    pair = tl.arange(0, 2)[None, :]
    total = tl.load(records_ptr + slot[:, None] + pair, mask=inside[:, None], other=0)
    total += tl.load(records_ptr + slot[:, None] + pair + 2, mask=inside[:, None], other=0)
    total += tl.load(memory_ptr + k[:, None] + pair, mask=inside[:, None], other=0)
    total += tl.load(memory_ptr + v[:, None] + pair, mask=inside[:, None], other=0)
    tl.store(out_ptr + pid, tl.sum(tl.sum(total, axis=1), axis=0))


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """The rates that the device reaches on its own.

    Args:
        copy_bytes_per_ms: read and written.
        empty_ms: what is measured for a launch of nearly nothing, where nothing disturbs it: the 10th of 100 parts.
    """

    copy_bytes_per_ms: float
    empty_ms: float

    def share(self, size: float, ms: float) -> float:
        """Return the share of the copy bandwidth at which `size` bytes are moved in `ms`."""
        return size / ms / self.copy_bytes_per_ms


def measure(clock: Clock, *, with_kernels: bool) -> Ceilings:
    """Measure the copy bandwidth and the empty launch.

    Args:
        with_kernels: whether Triton runs here; else PyTorch copies.
    """
    device = clock.device
    on_gpu = device.type == "cuda"
    words = COPY_BYTES // 8 if on_gpu else INTERPRETED_WORDS
    source = torch.empty(words, dtype=torch.int64, device=device).random_()
    target, word = torch.zeros_like(source), torch.zeros(1, device=device)

    def by_kernel(block: int) -> Launch:
        return lambda: _copy[(triton.cdiv(words, block),)](source, target, words, BLOCK=block, num_warps=8)

    launches: dict[str, Launch] = {"copy": lambda: target.copy_(source)}
    if with_kernels:
        # The interpreter takes about a millisecond a program.
        launches = {f"copy {b}": by_kernel(b) for b in (COPY_BLOCKS if on_gpu else (INTERPRETED_WORDS,))}
    for copy in launches.values():
        target.zero_()
        copy()
        if not torch.equal(source, target):
            raise RuntimeError("kv-canary: bench: the copy that measures bandwidth did not copy")
    launches["nothing"] = lambda: word.add_(1)
    things = {name: launchable(f, device=device, graph=on_gpu).launch for name, f in launches.items()}
    times = clock.by_turns(things)
    nothing = times.pop("nothing")
    return Ceilings(copy_bytes_per_ms=2 * 8 * words / min(t.ms for t in times.values()), empty_ms=nothing.p10_ms)


def gather_ms(clock: Clock, state: State, entries: Entries, memory: torch.Tensor) -> float:
    """Return the time of reading HEAD's sectors and nothing else: the record, and one sector of K and one of V.

    Args:
        entries: which HEAD verifies, in its order.
        memory: uint8, what the pool's K and V are views of.
    """
    k, v = (_sectors(state, source.layers, entries, memory) for source in (state.k_source, state.v_source))
    slots = entries.slots.to(torch.int32)
    n = len(entries)
    out = torch.zeros(triton.cdiv(n, min(GATHER_BLOCKS)), dtype=torch.int64, device=state.device)
    words = memory[: len(memory) // 8 * 8].view(torch.int64)

    def launch(block: int) -> Launch:
        return lambda: _gather[(triton.cdiv(n, block),)](
            state.records, slots, words, k, v, n, out, BLOCK=block, num_warps=4
        )

    on_gpu = state.device.type == "cuda"
    blocks = GATHER_BLOCKS if on_gpu else GATHER_BLOCKS[:1]
    things = {str(b): launchable(launch(b), device=state.device, graph=on_gpu).launch for b in blocks}
    return min(t.ms for t in clock.by_turns(things).values())


def _sectors(state: State, layers: tuple[torch.Tensor, ...], entries: Entries, memory: torch.Tensor) -> torch.Tensor:
    """Return which sector of `memory` each entry's covered bytes begin in, int32."""
    case = state.case
    starts = torch.tensor([layer.data_ptr() - memory.data_ptr() for layer in layers], device=state.device)
    windows = -(-case.row_bytes // case.read_bytes)
    window = entries.positions // len(layers) % windows
    at = starts[entries.positions % len(layers)] + entries.slots * case.row_bytes + window * case.read_bytes
    return (at // SECTOR).to(torch.int32)
