"""What seals cost: the bandwidth of their two ops beside a copy's, and what the moments take at which they are made."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import kv_canary as kc
from kv_canary import ops
from kv_canary.bench.speed import ceilings
from kv_canary.bench.speed.state import random_bytes
from kv_canary.bench.speed.timing import Clock, Launch, launchable
from kv_canary.specs.structures import Endpoint, ViolationLog

# Rounds that everything has a turn in, and launches in each.
_ROUNDS, _REPLAYS = 7, 15
# Bytes whose scrub is timed: a pool of so many where the GPU has them free, or else worked out from one of fewer.
_SCRUBBED, _POOL_BYTES = 100e9, 24 << 30
# Requests that end together.
_TOGETHER = 16
# Slots on a CPU, where only the benchmark is checked.
_FEW_SLOTS = 300
_STEP = 7


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The KV of a model.

    Args:
        name: of it.
        layers, row_bytes: and the bytes of K, and of V, of a token in a layer.
    """

    name: str
    layers: int
    row_bytes: int

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of a token."""
        return 2 * self.layers * self.row_bytes


SHAPES = (Shape(name="1b", layers=16, row_bytes=1024), Shape(name="8b", layers=32, row_bytes=2048))
# Slots of a launch: those of decode steps, of chunks, of prefixes.
COUNTS = (64, 256, 1024, 2048, 8192)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One launch, timed.

    Args:
        model: whose KV.
        op: "seal" or "verify_seals".
        slots: "random" by a list; "range": those of the pool in order.
        tokens: how many.
        ms, p10_ms, p90_ms: of a launch, from a CUDA graph.
        gb_s: bytes of K and V over the time, in GB a second.
        of_copy: the same as a share of the copy bandwidth of the same run, which reads and writes.
    """

    model: str
    op: str
    slots: str
    tokens: int
    ms: float
    p10_ms: float
    p90_ms: float
    gb_s: float
    of_copy: float


class Sealed:
    """A pool of random bytes, with a record in every slot and a seal of it.

    Args:
        shape: of the KV.
        num_slots: of the pool.
        device: where it lies.
        backend: whose ops; None: the device's.
    """

    def __init__(self, shape: Shape, *, num_slots: int, device: torch.device, backend: str | None) -> None:
        self.shape, self.num_slots, self.device, self._backend = shape, num_slots, device, backend
        memory = random_bytes(num_slots * shape.token_bytes, device)[: num_slots * shape.token_bytes]
        halves = memory.view(2, shape.layers, num_slots, shape.row_bytes).unbind(0)
        k, v = (kc.KvSource(layers=half.unbind(0), page_size=1, bytes_per_token=shape.row_bytes) for half in halves)
        self.memory = halves
        pool = kc.KvPool(name="pool", num_slots=num_slots, k_source=k, v_source=v, device=device)
        pool.records.random_(1, 1 << 40)
        pool.keep_seals(by_layer=True, seed=5)
        if pool.seals is None:
            raise RuntimeError("kv-canary: bench: seals must be kept of a pool that has bytes, got none")
        self.seals = pool.seals
        self.endpoint = Endpoint(tag=kc.Tag.SWEEP_FULL, records=pool.records, k_source=k, v_source=v)
        self.log = ViolationLog.allocate(device=device, ring_cap=64)
        self.checked = torch.zeros(4, dtype=torch.int64, device=device)
        self._step = torch.tensor([_STEP], dtype=torch.int64, device=device)
        self._all = torch.tensor([0, 1 << 62], dtype=torch.int64, device=device)

    def launch(self, op: str, slots: torch.Tensor | None) -> Launch:
        """Return the launch of an op over some slots; None: over all."""
        common: dict[str, Any] = {
            "slots": slots,
            "span": self._all,
            "endpoint": self.endpoint,
            "layers_per_band": self.seals.layers_per_band,
            "seed": self.seals.seed,
            "seals": self.seals.words,
            "backend": self._backend,
        }
        if op == "seal":
            return lambda: ops.seal(written_in=None, **common)
        return lambda: ops.verify_seals(step=self._step, violations=self.log, checked=self.checked, **common)

    def check(self) -> None:
        """See that a seal is of every byte: one that is changed is found, and nothing else.

        Raises:
            RuntimeError: it is not so.
        """
        self.launch("seal", None)()
        verify = self.launch("verify_seals", None)
        verify()
        if int(self.log.count):
            raise RuntimeError(f"kv-canary: bench: sealed bytes must be silent, got {int(self.log.count)} violations")
        layer, slot, byte = self.shape.layers // 2, self.num_slots // 3, self.shape.row_bytes - 1
        self.memory[1][layer, slot, byte] ^= 1
        verify()
        found = int(self.log.count), self.log.ring[0].tolist()
        self.memory[1][layer, slot, byte] ^= 1
        self.log.count.zero_()
        if found[0] != 1 or found[1][2] != slot:
            raise RuntimeError(f"kv-canary: bench: a byte of slot {slot} was changed, got {found[0]} violations")

    def random(self, count: int) -> torch.Tensor:
        """Return so many different slots, in any order."""
        return 1 + torch.randperm(self.num_slots - 1, device=self.device)[:count]


def rows_of(sealed: Sealed, clock: Clock, limits: ceilings.Ceilings, counts: Sequence[int]) -> Iterator[Row]:
    """Time both ops over a pool, and yield a row for each number of slots."""
    on_gpu = sealed.device.type == "cuda"
    for op in ("seal", "verify_seals"):
        taken: dict[int, tuple[str, torch.Tensor | None]] = {
            n: ("random", sealed.random(n)) for n in counts if n < sealed.num_slots
        }
        taken[sealed.num_slots - 1] = "range", None
        things = {
            str(n): launchable(sealed.launch(op, slots), device=sealed.device, graph=on_gpu).launch
            for n, (_, slots) in taken.items()
        }
        for n, timed in clock.by_turns(things, cold=on_gpu).items():
            tokens = int(n)
            size = tokens * sealed.shape.token_bytes
            yield Row(
                model=sealed.shape.name,
                op=op,
                slots=taken[tokens][0],
                tokens=tokens,
                ms=timed.ms,
                p10_ms=timed.p10_ms,
                p90_ms=timed.p90_ms,
                gb_s=size / timed.ms / 1e6,
                of_copy=limits.share(size, timed.ms),
            )


def moments(sealed: Sealed) -> dict[str, float]:
    """Return what the host pays for a request that ends, and for one that comes with a cached prefix, in microseconds.

    With a manager of its own, on the pool's bytes.
    """
    shape, device, length, rows = sealed.shape, sealed.device, min(1024, sealed.num_slots // 4), 3
    pool = kc.KvPool(
        name="pool",
        num_slots=sealed.num_slots,
        k_source=sealed.endpoint.k_source,
        v_source=sealed.endpoint.v_source,
        device=device,
    )
    manager = kc.CanaryManager(
        [kc.BufferGroup(name="full", pool=pool)],
        limits=kc.CanaryLimits(max_rows=rows, max_requests=1, max_tokens=length, max_len=length + 1),
        config=kc.CanaryConfig(seals="layer", check_tokens=False, scrub_share=0.0),
    )
    try:
        slots = sealed.random(length)
        together = [(str(n), {"full": slots}) for n in range(_TOGETHER)]
        completing = [_host_us(lambda: manager.complete("request", {"full": slots}), device) for _ in range(50)]
        many = [_host_us(lambda: manager.complete_all(together), device) for _ in range(50)]
        manager.flush()
    finally:
        manager.close()
    return {
        f"complete_{shape.name}_{length}_host_us": statistics.median(completing[10:]),
        f"complete_all_{shape.name}_{_TOGETHER}x{length}_host_us": statistics.median(many[10:]),
    }


def _host_us(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - began) / 1000


def measure(
    *, device: torch.device, backend: str | None, share: float, say: Callable[[str], None]
) -> tuple[list[Row], dict[str, float]]:
    """Measure both ops on the KV of all models, and what the moments take.

    Args:
        device, backend: where, and whose ops.
        share: of the time that a scrub may take, of which its length is worked out.
        say: shows a line to whoever waits.
    """
    on_gpu = device.type == "cuda"
    clock = Clock(device, rounds=_ROUNDS if on_gpu else 1, replays=_REPLAYS if on_gpu else 1)
    clock.warm_up(1.0)
    limits = ceilings.measure(clock, with_kernels=on_gpu)
    found: dict[str, float] = {"copy_gb_s": limits.copy_bytes_per_ms / 1e6}
    rows: list[Row] = []
    for shape in SHAPES:
        num_slots = _pool_bytes(device) // shape.token_bytes if on_gpu else _FEW_SLOTS
        sealed = Sealed(shape, num_slots=num_slots, device=device, backend=backend)
        sealed.check()
        rows += rows_of(sealed, clock, limits, COUNTS)
        whole = next(row for row in rows if (row.model, row.op, row.slots) == (shape.name, "verify_seals", "range"))
        found |= moments(sealed)
        if share:
            found[f"scrub_100_gb_{shape.name}_s"] = _SCRUBBED / (whole.gb_s * 1e9) / share
        taken = 8 * (sealed.seals.words.shape[1] + sealed.endpoint.records.shape[1])
        found[f"records_and_seals_{shape.name}_share"] = taken / shape.token_bytes
        say(f"{shape.name}: {num_slots} slots, a byte that was changed was found; timed")
        del sealed
    return rows, found


def _pool_bytes(device: torch.device) -> int:
    """Return how large the pool is: as large as the scrub that is asked for, where a tenth more than that is free."""
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return int(_SCRUBBED) if free > 1.1 * _SCRUBBED else _POOL_BYTES


def show(rows: Sequence[Row], found: dict[str, float]) -> None:
    """Print the rows, and what else was found."""
    table = Table(title="seals: every byte of K and V")
    for column in ("model", "op", "slots"):
        table.add_column(column)
    for column in ("tokens", "us", "GB/s", "of copy"):
        table.add_column(column, justify="right")
    for row in rows:
        cells = (f"{row.tokens:,}", f"{row.ms * 1e3:,.1f}", f"{row.gb_s:,.0f}", f"{row.of_copy:.0%}")
        table.add_row(row.model, row.op, row.slots, *cells)
    console = Console()
    console.print(table)
    for name, value in found.items():
        console.print(f"{name} {value:,.4g}")


def result(rows: Sequence[Row], found: dict[str, float], facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows as JSON has them; the first one says where they were measured, and what else was found."""
    listed = [asdict(row) for row in rows] or [{}]
    listed[0] |= {**facts, "moments": found}
    return listed
