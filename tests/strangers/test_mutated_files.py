"""Files from strangers, mutated: whatever a file holds, reading and showing it ends soon, takes little, and says why.

Each of the mutations is its own seed: `mutate.py` in this folder makes and reads them, in a process of its own. Case
files are also damaged inside their archive, with the right checksums, and given shapes for which a few bytes stand.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# What the process may grow by, all of its mutations included; a resident size counts what is touched, so that the
# address space of a sparse tensor, which is free, does not count.
MOST_MIB = 1024
MOST_SECONDS = 5.0


@pytest.mark.every_day("300-cases", "300-bundles")
@pytest.mark.parametrize("what", ["cases", "bundles"])
@pytest.mark.parametrize("count", [300, 5000])
def test_mutations_are_read_or_refused_with_a_named_error(what: str, count: int, tmp_path: Path) -> None:
    script = Path(__file__).with_name("mutate.py")
    done = subprocess.run(
        [sys.executable, str(script), what, str(count), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    # No crash, of which there would be no account.
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["num_unclean"] == 0, "\n".join(told["unclean"])
    assert told["slowest_s"] < MOST_SECONDS
    assert told["grown_mib"] < MOST_MIB
    # Both ways out are taken often, or the mutations would show little.
    assert sum(told["ended"].values()) == count
    assert told["ended"]["refused"] > 0.5 * count
    assert told["ended"]["read"] > 0.05 * count
