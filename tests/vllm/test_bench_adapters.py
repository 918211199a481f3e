"""`kv-canary bench adapters` with vLLM: steps of drafts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

# A process of its own: the measurement leaves one behind in which launches do nothing.
AFTER_FEW_STEPS = """
import json, sys
from pathlib import Path
from kv_canary.bench import adapters
adapters.WARM_UP, adapters.TIMED = 10, 20
row = adapters.measure("vllm", "drafts", 3, Path(sys.argv[1]))
Path(sys.argv[1], "row.json").write_text(json.dumps(row))
"""


@pytest.mark.long
def test_steps_of_drafts_are_timed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", AFTER_FEW_STEPS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    row = json.loads((tmp_path / "row.json").read_text())
    assert (row["engine"], row["batch"], row["requests"]) == ("vllm V1", "drafts", 3)
    assert row["p90_us"] >= row["host_us"] > 0
    # The draft model has the target's own weights.
    assert 3 < row["tokens"] <= 3 * 4
