"""`kv-canary bench engine` in its form for a CPU, which checks the benchmark itself."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

from click.testing import CliRunner

from kv_canary.bench.serving import modes, run, worker
from kv_canary.cli import main

CONFIG = modes.Shape.config

SMALL = ["--device", "cpu", "--models", "tiny", "--decode", "4x32", "--prefill", "2x96", "--new", "40", "--rounds", "1"]


@pytest.mark.long
@pytest.mark.parametrize("starts", [1, 2])
def test_modes_serve_the_same_and_rows_say_what_they_cost(starts: int, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    arguments = [
        *SMALL,
        "--modes",
        "none,ours",
        "--churn",
        "4x32x24x20",
        "--starts",
        str(starts),
        "--json",
        str(path),
        "--out",
        str(tmp_path / "out"),
    ]
    ran = CliRunner().invoke(main, ["bench", "engine", *arguments])
    assert ran.exit_code == 0, ran.output
    rows = json.loads(path.read_text())
    assert [(r["phase"], r["shape"], r["mode"]) for r in rows] == [
        (phase, shape, mode)
        for phase, shape in (("prefill", "2x96"), ("decode", "4x32"), ("churn", "4x32x24x20"))
        for mode in ("none", "ours")
    ]
    assert rows[0]["failed"] == {"tiny": {}}
    assert rows[0]["sources"]
    for row in rows:
        turns = [each["start"] for each in row["rounds"]]
        assert (row["n"], row["starts"], turns) == (starts, starts, list(range(starts)))
        assert row["checks"] == []
        assert (row["ratio"] == 1.0) == (row["mode"] == "none")
        assert 0 < row["low"] <= row["ratio"] <= row["high"]
    # On a CPU the canary is its references, which take their time.
    assert {r["mode"]: r["host_us"] > 100 for r in rows if r["phase"] != "prefill"} == {"none": False, "ours": True}


@pytest.mark.long
def test_documents_that_no_pool_holds_come_back_from_host_memory(tmp_path: Path) -> None:
    path, shapes = tmp_path / "cost.json", "4x12x160,4x12x160x24"
    arguments = [*SMALL, "--tiers", shapes, "--modes", "none,ours", "--json", str(path), "--out", str(tmp_path)]
    ran = CliRunner().invoke(main, ["bench", "engine", *arguments])
    assert ran.exit_code == 0, ran.output
    rows = json.loads(path.read_text())
    assert [(r["phase"], r["shape"], r["mode"]) for r in rows] == [
        ("tiers", shape, mode) for shape in shapes.split(",") for mode in ("none", "ours")
    ]
    # Four fifths of each prompt, though the pool holds half of what is asked for.
    assert [(r["hit"], r["checks"]) for r in rows] == [(0.8, [])] * len(rows)


@pytest.mark.parametrize(
    ("tokens", "why", "is_whole"), [(3, "length", True), (2, "length", False), (3, "abort", False), (0, "abort", False)]
)
def test_a_request_that_is_refused_is_no_round(tokens: int, why: str, is_whole: bool) -> None:
    """It ends as well, and faster than any that is served; it may have a token even so."""
    serving = worker.Worker.__new__(worker.Worker)
    serving._asked = {"request 1": 3}
    finished = SimpleNamespace(to_json=lambda: {"type": why})
    req = SimpleNamespace(rid="request 1", output_ids=[5] * tokens, finished_reason=finished)
    if is_whole:
        serving._expect_answered([req])
        return
    with pytest.raises(RuntimeError, match=f"request 1 must be answered with 3 tokens, got {tokens} .*{why}"):
        serving._expect_answered([req])


def test_a_model_has_room_for_what_is_asked_of_it() -> None:
    rooms = {positions: CONFIG(modes.MODELS["8b"], positions=positions) for positions in (0, 8191, 8192, 10272)}
    assert {asked: config["max_position_embeddings"] for asked, config in rooms.items()} == {
        0: 8192,
        8191: 8192,
        8192: 16384,
        10272: 16384,
    }


@pytest.mark.long
def test_a_mode_that_fails_is_said_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are batches missed that are left out."""
    monkeypatch.setenv("KV_CANARY_STRIDE", "-7")
    path = tmp_path / "cost.json"
    arguments = [*SMALL, "--decode", "", "--modes", "none,ours", "--json", str(path), "--out", str(tmp_path / "out")]
    ran = CliRunner().invoke(main, ["bench", "engine", *arguments])
    assert ran.exit_code == 1
    rows = json.loads(path.read_text())
    assert [(r["phase"], r["shape"], r["mode"]) for r in rows] == [("prefill", "2x96", "none")]
    assert list(rows[0]["failed"]["tiny"]) == ["ours"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--modes", "ours"], "must have none among them"),
        (["--modes", "none,theirs"], "must be of none, ours"),
        (["--decode", "4"], "--decode: must be 2 numbers"),
        (["--decode", "4xa"], "must be numbers as in 256x1024"),
        (["--churn", "4x32"], "--churn: must be 4 numbers"),
        (["--tiers", "4x32"], "--tiers: must be 3 or 4 numbers"),
        (["--tiers", "4x12x160x8"], "--tiers: answers must be of up to 16 tokens or more, got 8"),
        (["--tiers", "4x8x64,4x8x96"], "--tiers: documents must be of as many tokens in all of them"),
    ],
)
def test_misuse_is_told_and_ends_with_2(arguments: list[str], said: str) -> None:
    ran = CliRunner().invoke(main, ["bench", "engine", *arguments])
    assert ran.exit_code == 2
    assert said in " ".join(ran.output.split())


def test_batches_share_the_time_that_is_left_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(run.time, "monotonic", lambda: now[0])
    settings = run.Settings(
        models=("tiny",),
        modes=("none",),
        decode=(),
        prefill=(),
        churn=None,
        tiers=(),
        new=40,
        rounds=1,
        starts=1,
        seconds=400.0,
        device="cpu",
        frozen=True,
        shared=False,
        out=tmp_path,
    )
    measured = run.Measurement("tiny", settings, say=print)
    left, ends = [1, 2, 3], []
    for took in (20.0, 230.0, 0.0):
        measured._share(left)
        ends.append(measured._until - now[0])
        now[0] += took
    # What one has not used is for those behind it, and what one has used too much is theirs, too.
    assert ends == [pytest.approx(400 / 3), pytest.approx(190.0), pytest.approx(150.0)]
    assert left == []
