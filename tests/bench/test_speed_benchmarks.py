"""Benchmarks for pytest-benchmark, at the size that a CI machine does: what each case launches, checked and timed.

`make test` runs each once, as a test. To time: `.venv/bin/pytest tests/bench/test_speed_benchmarks.py`; to compare two
states of the code: `--benchmark-save` and `--benchmark-compare`.
"""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from kv_canary.bench.speed.cases import CASES, quick
from kv_canary.bench.speed.checking import check, expect_silence
from kv_canary.bench.speed.state import build, pool_bytes, random_bytes
from kv_canary.bench.speed.workload import work_of

BY_NAME = {case.name: case for case in CASES}
NAMES = (
    "decode 256x4096",
    "decode 256x4096, pages of 16",
    "prefill 4x2048",
    "chunk 4096 after 16384",
    "mixed",
    "SWA 128",
    "decode 256x4096, whole rows",
    "write 8192x2KiB, all bytes",
    "scatter 256x4096",
    "chain_tails 256x4096",
    "retire",
    "move",
    "sweep 1M slots",
)


def timed(benchmark: BenchmarkFixture, name: str, backend: str) -> None:
    case = quick(BY_NAME[name])
    state = build(case, random_bytes(pool_bytes(case, case.most_layers), torch.device("cpu")), backend=backend)
    work = work_of(state)
    check(state, work)
    before = state.records.clone()
    benchmark(work.whole)
    # Launched over and over, it does the same over and over.
    expect_silence(state, name)
    assert torch.equal(state.records, before)


@pytest.mark.parametrize("name", NAMES)
def test_reference(benchmark: BenchmarkFixture, name: str) -> None:
    timed(benchmark, name, "reference")


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in the interpreter")
def test_kernels_in_the_interpreter(benchmark: BenchmarkFixture) -> None:
    timed(benchmark, "chunk 4096 after 16384", "triton")
