"""`kv-canary bench adapters` with SGLang: steps of drafts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang")

# A process of its own: where another test has begun an engine, one of another model cannot be begun.
AFTER_FEW_STEPS = """
import json, sys
from pathlib import Path
from kv_canary.bench import adapters
adapters.WARM_UP, adapters.TIMED = 40, 20
row = adapters.measure("sglang", "drafts", 12, Path(sys.argv[1]))
Path(sys.argv[1], "row.json").write_text(json.dumps(row))
"""


@pytest.mark.long
def test_steps_of_drafts_are_timed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", AFTER_FEW_STEPS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    row = json.loads((tmp_path / "row.json").read_text())
    assert (row["engine"], row["batch"], row["requests"]) == ("sglang", "drafts", 12)
    assert row["p90_us"] >= row["host_us"] > 0
    # Some of the drafts are right.
    assert 12 < row["tokens"] < 12 * 4
