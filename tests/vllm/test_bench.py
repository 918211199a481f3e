"""`kv-canary bench vllm` in its form for a CPU, which checks the benchmark itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from click.testing import CliRunner

from kv_canary.cli import main

SMALL = ["--device", "cpu", "--models", "tiny", "--decode", "4x40", "--prefill", "2x96", "--new", "40", "--rounds", "1"]


@pytest.mark.long
def test_modes_serve_the_same_and_rows_say_what_they_cost(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    given = ["--modes", "none,ours", "--churn", "4x40x20x24", "--json", str(path), "--out", str(tmp_path / "out")]
    ran = CliRunner().invoke(main, ["bench", "vllm", *SMALL, *given])
    assert ran.exit_code == 0, ran.output
    rows = json.loads(path.read_text())
    assert [(r["phase"], r["shape"], r["mode"]) for r in rows] == [
        (phase, shape, mode)
        for phase, shape in (("prefill", "2x96"), ("decode", "4x40"), ("churn", "4x40x20x24"))
        for mode in ("none", "ours")
    ]
    assert rows[0]["failed"] == {"tiny": {}}
    assert rows[0]["runner"] == "V1"
    assert rows[0]["sources"]
    for row in rows:
        assert (row["n"], row["checks"]) == (1, [])
        assert (row["ratio"] == 1.0) == (row["mode"] == "none")
    # On a CPU the canary is its references, which take their time.
    assert {r["mode"]: r["host_us"] > 100 for r in rows} == {"none": False, "ours": True}


@pytest.mark.long
def test_engines_that_do_not_start_are_said(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    # Longer than the model's positions.
    given = ["--modes", "none,ours", "--decode", "1x9000", "--json", str(path), "--out", str(tmp_path / "out")]
    ran = CliRunner().invoke(main, ["bench", "vllm", *SMALL, *given])
    assert ran.exit_code == 1
    assert list(json.loads(path.read_text())[0]["failed"]["tiny"]) == ["none", "ours"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--modes", "ours"], "must have none among them"),
        (["--modes", "none,sgl"], "must be of none, ours"),
        (["--decode", "4"], "--decode: must be 2 numbers"),
        (["--churn", "4x32x9x9,4x32x9x9"], "--churn must be one"),
    ],
)
def test_misuse_is_told_and_ends_with_2(arguments: list[str], said: str) -> None:
    ran = CliRunner().invoke(main, ["bench", "vllm", *arguments])
    assert ran.exit_code == 2
    assert said in " ".join(ran.output.split())
