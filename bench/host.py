"""The canary's cost to the host thread, in microseconds per forward.

A decode batch without a model: every forward extends each request by one token, and the host times `begin`, `head`,
`tail` and `end`; the device is waited for every so many forwards only, so that the host is never held up by it. Once
with the canary's own graphs and once without. Counted too: what PyTorch's allocators hand out per forward once all is
warm. A wait for the device, as far as PyTorch can see it, is an error.
Run: `python -P -m kv_canary.bench.host --out bench/results/h200_host.json`
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import pstats
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import kv_canary as kc
from kv_canary.commands.facts import facts

ROW_BYTES = 256
PHASES = ("begin", "head", "tail", "end")
WARM_UP, TIMED, BETWEEN_WAITS = 40, 200, 20


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement.

    Args:
        requests, prefix: of the batch.
        graphs: whether HEAD and TAIL were replayed.
        us: median microseconds of each phase, and of the four together.
        p90_us: of the four together, what nine of ten forwards stay below.
        device_allocations, pinned_allocations: per forward; the latter None where PyTorch does not count them.
    """

    requests: int
    prefix: int
    graphs: bool
    us: dict[str, float]
    p90_us: float
    device_allocations: float
    pinned_allocations: float | None


class Batches:
    """A pool and a table, and one forward after the other of the same requests."""

    def __init__(self, *, requests: int, prefix: int, graphs: bool, device: str) -> None:
        length = prefix + WARM_UP + TIMED + 100
        num_slots = requests * length + 1
        layers = tuple(
            torch.randint(0, 256, (num_slots, ROW_BYTES), dtype=torch.uint8, device=device) for _ in range(2)
        )
        k, v = (kc.KvSource(layers=(x,), page_size=1, bytes_per_token=ROW_BYTES) for x in layers)
        pool = kc.KvPool(name="pool", num_slots=num_slots, k_source=k, v_source=v, device=device)
        self.manager = kc.CanaryManager(
            [kc.BufferGroup(name="full", pool=pool)],
            limits=kc.CanaryLimits(
                max_rows=requests + 1, max_requests=requests, max_tokens=max(requests, 2048), max_len=length
            ),
            config=kc.CanaryConfig(own_graphs=graphs, stride=1, check_tokens=False),
        )
        self.forward = self.manager.forward()
        self.table = torch.zeros(requests + 1, length, dtype=torch.int32, device=device)
        self.table[1:] = 1 + torch.randperm(requests * length, device=device).view(requests, length)
        self.tokens = torch.randint(0, 1 << 17, (length,)).tolist()
        self.on_device = torch.tensor(self.tokens, device=device)
        self.count, self.cached, self.device = requests, 0, device
        while self.cached < prefix:
            chunk = min(prefix - self.cached, 2048 // requests or 1)
            self.run(chunk)

    def batch(self, chunk: int) -> kc.ForwardBatch:
        """Return the forward that extends every request by so many tokens."""
        first, last = self.cached, self.cached + chunk
        requests = [
            kc.ForwardRequest(
                request_id=f"request {row}",
                row=row,
                owner=row,
                prefix_len=first,
                extend_len=chunk,
                tokens=lambda a, b: self.tokens[a:b],
            )
            for row in range(1, self.count + 1)
        ]
        return kc.ForwardBatch(
            requests=requests,
            input_ids=self.on_device[first:last].repeat(self.count),
            positions=torch.arange(first, last, device=self.device).repeat(self.count),
            out_slots={"full": self.table[1:, first:last].reshape(-1).long()},
            tables={"full": self.table},
        )

    def run(self, chunk: int = 1) -> list[int]:
        """Run one forward; return the nanoseconds of each phase."""
        batch = self.batch(chunk)
        forward, clock = self.forward, time.perf_counter_ns
        times = [clock()]
        forward.begin(batch)
        times.append(clock())
        forward.head()
        times.append(clock())
        forward.tail()
        times.append(clock())
        forward.end()
        times.append(clock())
        self.cached += chunk
        return [b - a for a, b in itertools.pairwise(times)]


def measure(batches: Batches, *, graphs: bool, prefix: int) -> Row:
    """Return the costs of a forward, once all is warm.

    Raises:
        RuntimeError: a healthy pool gave a violation, or the canary did not see everything.
    """
    on_gpu = batches.device != "cpu"
    for _ in range(WARM_UP):
        batches.run()
    times: list[list[int]] = []
    before = _allocations(on_gpu)
    for i in range(TIMED):
        if on_gpu and i % BETWEEN_WAITS == 0:
            torch.cuda.synchronize()
        with _no_waits(on_gpu):
            times.append(batches.run())
    after = _allocations(on_gpu)
    # The inputs of each forward are made here, on the device; that is not the canary's.
    made = _allocations(on_gpu)
    for _ in range(10):
        batches.batch(1)
    inputs = (_allocations(on_gpu)[0] - made[0]) / 10
    batches.manager.flush()
    summary = batches.manager.summary()
    if (
        summary.violations
        or summary.watching != "complete"
        or summary.positions_verified != summary.positions_relied_on
    ):
        raise RuntimeError(f"kv-canary: host: a healthy run must be clean and complete, got {summary}")
    totals = [sum(t) for t in times]
    us = {name: statistics.median(column) / 1000 for name, column in zip(PHASES, zip(*times, strict=True), strict=True)}
    us["forward"] = statistics.median(totals) / 1000
    pinned = None if after[1] is None or before[1] is None else (after[1] - before[1]) / TIMED
    return Row(
        requests=batches.count,
        prefix=prefix,
        graphs=graphs,
        us={name: round(value, 1) for name, value in us.items()},
        p90_us=round(statistics.quantiles(totals, n=10)[-1] / 1000, 1),
        device_allocations=round((after[0] - before[0]) / TIMED - inputs, 3),
        pinned_allocations=None if pinned is None else round(pinned, 3),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every batch with and without graphs, print a table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="where the pool lies")
    parser.add_argument("--batches", default="8x512,64x2048,256x1024", help="requests x prefix, by commas")
    parser.add_argument("--profile", action="store_true", help="say where the host's time goes, for the last batch")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--commit", default="unknown", help="the commit measured, for the JSON")
    arguments = parser.parse_args(argv)
    rows: list[Row] = []
    work = [(tuple(map(int, b.split("x"))), graphs) for b in arguments.batches.split(",") for graphs in (True, False)]
    if arguments.device == "cpu":
        work = [(batch, graphs) for batch, graphs in work if not graphs]
    console = Console(stderr=True)
    for (requests, prefix), graphs in track(work, description="batches", console=console):
        batches = Batches(requests=requests, prefix=prefix, graphs=graphs, device=arguments.device)
        rows.append(measure(batches, graphs=graphs, prefix=prefix))
        if arguments.profile:
            profile = cProfile.Profile()
            profile.enable()
            for _ in range(20):
                batches.run()
            profile.disable()
            pstats.Stats(profile).sort_stats("cumtime").print_stats(60)
        del batches
    Console().print(_table(rows))
    if arguments.out:
        result = {
            **facts(arguments.device, commit=arguments.commit, kind="host"),
            "rows": [asdict(row) for row in rows],
        }
        arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title="Host time of a forward, microseconds (medians)")
    for name in ("batch", "own graphs", *PHASES, "forward", "p90", "device allocations", "pinned"):
        table.add_column(name, justify="right")
    for row in rows:
        times = [f"{row.us[name]:.0f}" for name in (*PHASES, "forward")]
        pinned = "?" if row.pinned_allocations is None else f"{row.pinned_allocations:g}"
        batch, graphs = f"{row.requests}x{row.prefix}", "yes" if row.graphs else "no"
        table.add_row(batch, graphs, *times, f"{row.p90_us:.0f}", f"{row.device_allocations:g}", pinned)
    return table


def _allocations(on_gpu: bool) -> tuple[int, int | None]:
    """Return how often PyTorch's device and pinned allocators have handed out memory so far."""
    if not on_gpu:
        return 0, None
    device = torch.cuda.memory_stats()["allocation.all.allocated"]
    stats: Any = getattr(torch.cuda, "host_memory_stats", None)
    return device, None if stats is None else stats().get("active_requests.allocated")


@contextmanager
def _no_waits(on_gpu: bool) -> Iterator[None]:
    """Raise where the block waits for the device in a way that PyTorch can see."""
    if not on_gpu:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


if __name__ == "__main__":
    raise SystemExit(main())
