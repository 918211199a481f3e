"""The benchmarks check what they time: both checks run here, in the interpreter, without the timing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kv_canary.bench import layout, step

RESULTS = Path(__file__).parents[2] / "bench" / "results"
needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the CPU")


@needs_interpreter
def test_the_step_benchmark_checks_a_healthy_and_a_damaged_pool() -> None:
    case = step.Case(name="tiny", requests=3, prefix=20, extend=2, page=4)
    tiny = step.Step(case, "cpu")
    tiny.check(case)
    # HEAD ran twice and TAIL once beside a write; the history was one more write.
    assert tiny.counters[:2].tolist() == [[2, 2 * 60], [3, 60 + 60 + 6]]


@needs_interpreter
def test_the_step_benchmark_refuses_a_pool_that_is_damaged_before() -> None:
    case = step.Case(name="tiny", requests=2, prefix=8, extend=1)
    tiny = step.Step(case, "cpu")
    tiny.records[tiny.first_slot, 0] ^= 1
    with pytest.raises(RuntimeError, match="healthy pool gave"):
        tiny.check(case)


@needs_interpreter
def test_every_record_layout_finds_every_damage() -> None:
    assert layout.main(["--smoke"]) == 0


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda p: p.name)
def test_kept_results_name_their_device(path: Path) -> None:
    facts = json.loads(path.read_text())
    # A table is a list of rows, each of which says it.
    for row in facts if isinstance(facts, list) else [facts]:
        assert ("H200" in row["device"]) == path.name.startswith("h200_")
