"""The benchmark of layouts checks what it times, here in the interpreter; kept results name their device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kv_canary.bench import layout

RESULTS = Path(__file__).parents[2] / "bench" / "results"
needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the CPU")


@needs_interpreter
def test_every_record_layout_finds_every_damage() -> None:
    assert layout.main(["--smoke"]) == 0


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda p: p.name)
def test_kept_results_name_their_device(path: Path) -> None:
    facts = json.loads(path.read_text())
    # A table is a list of rows, each of which says it.
    for row in facts if isinstance(facts, list) else [facts]:
        assert ("H200" in row["device"]) == path.name.startswith("h200_")
