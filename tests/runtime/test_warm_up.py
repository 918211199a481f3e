"""After a warm-up no forward has to wait for Triton's compiler, whatever its size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

PROCESS = Path(__file__).parent / "warm_up_process.py"


def run(kind: str) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", str(PROCESS), kind],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


# What a cold start compiles, of one group; of an engine with a window's beside it.
MOST_KERNELS = {"window": 56, "ring": 64}
KINDS = ["given", "plain", "window", "sealed", "writes", "both", "rows", "pending", "ring"]


@pytest.mark.every_day("given", "writes")
@pytest.mark.parametrize("kind", KINDS)
def test_a_soak_of_varied_sizes_compiles_nothing_after_the_warm_up(kind: str) -> None:
    result = run(kind)
    assert result["failures"] == {}
    assert result["forwards"] == 60
    assert [x["name"] for x in result["after"]] == [], result["after"]
    assert len(result["warm_up"]) <= MOST_KERNELS.get(kind, 54), Counter(result["warm_up"])
