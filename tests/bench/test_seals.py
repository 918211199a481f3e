"""`kv-canary bench seals` checks itself before it times anything, and writes what it saw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from kv_canary import ops
from kv_canary.bench import seals
from kv_canary.cli import main


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seals, "SHAPES", (seals.Shape(name="tiny", layers=3, row_bytes=64),))
    monkeypatch.setattr(seals, "_FEW_SLOTS", 60)
    monkeypatch.setattr(seals, "COUNTS", (7, 40, 1000))


def test_a_row_for_each_op_and_number_of_slots(tmp_path: Path) -> None:
    path = tmp_path / "seals.json"
    done = CliRunner().invoke(main, ["bench", "seals", "--device", "cpu", "--json", str(path)])
    assert done.exit_code == 0, done.output
    rows = json.loads(path.read_text())
    taken = [
        (op, *which) for op in ("seal", "verify_seals") for which in (("random", 7), ("random", 40), ("range", 59))
    ]
    assert [(row["op"], row["slots"], row["tokens"]) for row in rows] == taken
    for row in rows:
        assert row["gb_s"] == pytest.approx(row["tokens"] * 2 * 3 * 64 / row["ms"] / 1e6)
    moments = rows[0]["moments"]
    whole = rows[-1]["gb_s"]
    assert moments["scrub_100_gb_tiny_s"] == pytest.approx(100 / whole / 0.005)
    assert rows[0]["sources"]


@pytest.mark.parametrize("broken", ["seal", "verify_seals"])
def test_nothing_is_timed_where_a_changed_byte_is_not_found(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(**_: Any) -> None:
        return

    monkeypatch.setattr(ops, broken, nothing)
    sealed = seals.Sealed(seals.SHAPES[0], num_slots=60, device=torch.device("cpu"), backend=None)
    with pytest.raises(RuntimeError, match="a byte of slot 20 was changed, got 0 violations"):
        sealed.check()
