"""Does a backend work here: a real plan, write and verify of four tokens, healthy and with one flipped bit.

`python -m kv_canary.commands.probe BACKEND DEVICE` does it in a process of its own, so that neither Triton's
interpreter nor a driver's error stays behind; it prints {"works": ..., "detail": ...}.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch

from kv_canary import ops
from kv_canary.constants import ANCHOR, Reason, Tag
from kv_canary.specs.structures import Endpoint, KvSource, VerifyPlan, ViolationLog, WritePlan
from kv_canary.specs.violation_row import ViolationRow

# Seconds that a process may take; Triton compiles three kernels in it.
TIMEOUT = 300


def probe(backend: str, device: str) -> str:
    """Return "" where the backend works, else what went wrong."""
    try:
        healthy, damaged = _verify_twice(backend, torch.device(device))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if healthy:
        return f"healthy records must be found clean, got {healthy} violations"
    if damaged != [(2, int(Reason.K))]:
        return f"a flipped bit in the K of slot 2 must be found, got {damaged} as (slot, reasons)"
    return ""


def probe_apart(backend: str, device: str, *, interpret: bool) -> str:
    """Return what `probe` returns, from a process of its own, with Triton in its interpreter or not."""
    environment = os.environ | {"TRITON_INTERPRET": "1" if interpret else "0"}
    # -P: the folder that this runs in is none to import from.
    command = [sys.executable, "-P", "-m", "kv_canary.commands.probe", backend, device]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return f"it did not end within {TIMEOUT} seconds"
    try:
        return str(json.loads(done.stdout.splitlines()[-1])["detail"])
    except (ValueError, IndexError, KeyError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return f"its process ended with {done.returncode}: {last}"


def _verify_twice(backend: str, device: torch.device) -> tuple[int, list[tuple[int, int]]]:
    """Write four tokens, verify them, flip a bit of one K and verify again; return what each verify found."""
    n = 4

    def numbers(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    k, v = (torch.arange(8 * 16, dtype=torch.uint8, device=device).reshape(8, 16) for _ in range(2))
    sources = [KvSource(layers=(x,), page_size=1, bytes_per_token=16) for x in (k, v)]
    records = torch.zeros(8, 4, dtype=torch.int64, device=device)
    verify_plan = VerifyPlan.allocate(verify_cap=n, device=device)
    write_plan = WritePlan.allocate(write_cap=1, device=device)
    log = ViolationLog.allocate(ring_cap=8, device=device)
    counters = torch.zeros(len(Tag), 2, dtype=torch.int64, device=device)
    step = numbers(1)

    def endpoint(tag: Tag) -> Endpoint:
        return Endpoint(tag=tag, records=records, k_source=sources[0], v_source=sources[1])

    def plan(prefix: int, extend: int) -> None:
        ops.plan(
            rows=numbers(1),
            prefix_lens=numbers(prefix),
            extend_lens=numbers(extend),
            req_to_token=numbers(0, 0, 0, 0, 1, 2, 3, 4, dtype=torch.int32).reshape(2, n),
            verify_plan=verify_plan,
            write_plan=write_plan,
            status=numbers(0, dtype=torch.int32),
            backend=backend,
        )

    def verify() -> None:
        ops.verify(
            verify_plan=verify_plan,
            endpoint=endpoint(Tag.HEAD_FULL),
            step=step,
            violations=log,
            counters=counters,
            backend=backend,
        )

    plan(0, n)
    ops.write(
        write_plan=write_plan,
        input_ids=numbers(5, 6, 7, 8),
        positions=numbers(0, 1, 2, 3),
        out_slots=numbers(1, 2, 3, 4),
        endpoint=endpoint(Tag.TAIL_FULL),
        tails=torch.full((2,), ANCHOR, dtype=torch.int64, device=device),
        step=step,
        check_positions=numbers(1, dtype=torch.int32),
        violations=log,
        counters=counters,
        backend=backend,
    )
    plan(n, 0)
    verify()
    healthy = int(log.count)
    k[2, 3] ^= 1
    verify()
    rows = log.ring[healthy : int(log.count)].tolist()
    return healthy, [(row.slot, row.reasons) for row in map(ViolationRow._make, rows)]


if __name__ == "__main__":
    failure = probe(sys.argv[1], sys.argv[2])
    print(json.dumps({"works": not failure, "detail": failure}))
