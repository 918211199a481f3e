"""How long does each op of a canary step take, on shapes of decode and prefill?

Every case is checked first (a healthy pool gives no violation, one flipped bit gives one), then timed by CUDA-graph
replay: plan, verify of the mapping and the bytes (HEAD), write, verify of the mapping (TAIL), and all four together.
Run: `python -m kv_canary.bench.step --out bench/results/h200_step.json`
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

import kv_canary as kc
from kv_canary.specs.write import max_tiles

ROW_BYTES = 2048
LAYERS = 2
REPLAYS = 50


@dataclass(frozen=True, kw_only=True)
class Case:
    """Requests with so many cached tokens each, which write so many new ones, in pages of random order."""

    name: str
    requests: int
    prefix: int
    extend: int
    page: int = 1


CASES = (
    Case(name="decode 8x512", requests=8, prefix=512, extend=1),
    Case(name="decode 256x4096", requests=256, prefix=4096, extend=1),
    Case(name="decode 256x4096, pages of 16", requests=256, prefix=4096, extend=1, page=16),
    Case(name="prefill 1x8192", requests=1, prefix=0, extend=8192),
    Case(name="chunk 4096 after 16384", requests=1, prefix=16384, extend=4096),
)


class Step:
    """The arguments of every op of one case, and the launches."""

    def __init__(self, case: Case, device: str) -> None:
        n, length = case.requests, case.prefix + case.extend
        pages = -(-length // case.page)
        order = 1 + torch.randperm(n * pages, device=device)
        slots = (order[:, None] * case.page + torch.arange(case.page, device=device)).view(n, -1)[:, :length]
        num_slots = (n * pages + 1) * case.page
        layers = [
            torch.randint(0, 256, (num_slots, ROW_BYTES), dtype=torch.uint8, device=device) for _ in range(2 * LAYERS)
        ]
        self.k, v = layers[:LAYERS], layers[LAYERS:]
        sources = [kc.KvSource(layers=tuple(x), page_size=1, bytes_per_token=ROW_BYTES) for x in (self.k, v)]
        self.records = torch.zeros(num_slots, 4, dtype=torch.int64, device=device)
        self.log = kc.ViolationLog.allocate(ring_cap=64, device=device)
        self.counters = torch.zeros(len(kc.Tag), 2, dtype=torch.int64, device=device)
        self.step = torch.ones(1, dtype=torch.int64, device=device)
        status = torch.zeros(1, dtype=torch.int32, device=device)
        tails = torch.full((n + 1,), kc.ANCHOR, dtype=torch.int64, device=device)
        table = torch.zeros(n + 1, length, dtype=torch.int32, device=device)
        table[1:] = slots
        rows = torch.arange(1, n + 1, device=device)
        tokens = torch.randint(0, 1 << 17, (n, length), device=device)

        def endpoint(tag: kc.Tag, *, with_bytes: bool) -> kc.Endpoint:
            k, v = sources if with_bytes else (None, None)
            return kc.Endpoint(tag=tag, records=self.records, k_source=k, v_source=v)

        def lens(value: int) -> torch.Tensor:
            return torch.full((n,), value, dtype=torch.int64, device=device)

        found: dict[str, Any] = {"step": self.step, "violations": self.log, "counters": self.counters}

        def segment(first: int, last: int) -> dict[str, Any]:
            write_plan = kc.WritePlan.allocate(write_cap=n, device=device)
            verify_plan = kc.VerifyPlan.allocate(verify_cap=max(1, n * first), device=device)
            plan = {
                "rows": rows,
                "prefix_lens": lens(first),
                "extend_lens": lens(last - first),
                "req_to_token": table,
                "verify_plan": verify_plan,
                "write_plan": write_plan,
                "status": status,
                "entry_offsets": torch.zeros(n + 1, dtype=torch.int64, device=device),
            }
            tiles = max_tiles({"num_tokens": n * (last - first)})
            write = {
                "write_plan": write_plan,
                "input_ids": tokens[:, first:last].reshape(-1).contiguous(),
                "positions": torch.arange(first, last, device=device).repeat(n),
                "out_slots": slots[:, first:last].reshape(-1).contiguous(),
                "endpoint": endpoint(kc.Tag.TAIL_FULL, with_bytes=True),
                "tails": tails,
                "check_positions": torch.ones(1, dtype=torch.int32, device=device),
                "tile_sums": torch.zeros(n, tiles, dtype=torch.int64, device=device),
                **found,
            }
            return {"plan": plan, "write": write, "verify_plan": verify_plan}

        if case.prefix:
            history = segment(0, case.prefix)
            kc.ops.plan(**history["plan"])
            kc.ops.write(**history["write"])
            kc.ops.chain_tails(
                flat=history["write"]["input_ids"],
                offsets=torch.arange(n + 1, device=device) * case.prefix,
                rows=rows,
                starts=lens(0),
                tails=tails,
                status=status,
            )
        now = segment(case.prefix, length)
        head = {"verify_plan": now["verify_plan"], "endpoint": endpoint(kc.Tag.HEAD_FULL, with_bytes=True), **found}
        tail = {"verify_plan": now["verify_plan"], "endpoint": endpoint(kc.Tag.TAIL_FULL, with_bytes=False), **found}
        self.launches: dict[str, Callable[[], None]] = {
            "plan": lambda: kc.ops.plan(**now["plan"]),
            "verify_head": lambda: kc.ops.verify(**head),
            "write": lambda: kc.ops.write(**now["write"]),
            "verify_tail": lambda: kc.ops.verify(**tail),
        }
        self.first_slot = int(slots[0, 0])

    def whole(self) -> None:
        """Launch a whole step."""
        for launch in self.launches.values():
            launch()

    def check(self, case: Case) -> None:
        """Raise unless a healthy step finds nothing and a changed byte is found."""
        self.whole()
        if int(self.log.count):
            raise RuntimeError(f"kv-canary: bench: {case.name}: a healthy pool gave {int(self.log.count)} violations")
        if case.prefix:
            self.k[0][self.first_slot, 3] ^= 1
            self.launches["verify_head"]()
            self.k[0][self.first_slot, 3] ^= 1
            if int(self.log.count) != 1:
                raise RuntimeError(
                    f"kv-canary: bench: {case.name}: one changed byte gave {int(self.log.count)} violations"
                )
            self.log.count.zero_()


def replay_ms(launch: Callable[[], None]) -> float:
    """Return the median time of a CUDA-graph replay of `launch`, in milliseconds."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for _ in range(5):
        graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return float(statistics.median(times))


def main(argv: Sequence[str] | None = None) -> int:
    """Check and time every case, print a line each, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200_step.json"), help="where the JSON goes")
    parser.add_argument("--commit", default="unknown", help="the commit measured, for the JSON")
    arguments = parser.parse_args(argv)
    rows = []
    for case in CASES:
        step = Step(case, "cuda")
        step.check(case)
        times = {name: round(replay_ms(launch), 4) for name, launch in step.launches.items()}
        times["step"] = round(replay_ms(step.whole), 4)
        rows.append({"case": case.name, "ms": times})
        print(f"{case.name:32} " + "  ".join(f"{name} {ms:.4f}" for name, ms in times.items()), flush=True)
        del step
        torch.cuda.empty_cache()
    facts = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": arguments.commit,
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
