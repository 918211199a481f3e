"""Rows of `kv-canary bench engine` over several starts of the schedulers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kv_canary.bench.serving import run


def measurement() -> run.Measurement:
    settings = run.Settings(
        models=["tiny"],
        modes=["none", "ours", "sgl"],
        decode=[],
        prefill=[],
        churn=None,
        tiers=None,
        new=32,
        rounds=2,
        starts=2,
        seconds=1.0,
        device="cpu",
        frozen=True,
        shared=False,
        out=Path(),
    )
    return run.Measurement("tiny", settings, say=lambda line: None)


def start(plain: list[float], ours: list[float], *, host: float, sums: float = 1.0) -> Any:
    found = {"none": [{"tokens_per_s": x} for x in plain], "ours": [{"tokens_per_s": x} for x in ours]}
    same = {"none": {"kv_sums": [1.0]}, "ours": {"kv_sums": [sums]}}
    return run._Start(found, {"ours": {"host_us": host, "operations": {"_write": {"count": 1.0, "us": 8.0}}}}, same)


def test_rounds_stand_beside_those_of_none_of_the_same_start() -> None:
    # A slow process of none in the second start, in which ours failed before its second round.
    starts = [start([100.0, 102.0], [99.0, 102.0], host=200.0), start([50.0, 50.0], [49.0], host=300.0)]
    rows = {row.mode: row for row in measurement()._rows_of("decode", "4x32", starts)}
    assert set(rows) == {"none", "ours"}
    ours = rows["ours"]
    assert (ours.n, ours.starts, [each["start"] for each in ours.rounds]) == (3, 2, [0, 0, 1])
    assert (ours.ratio, ours.low, ours.high) == pytest.approx((0.99, 0.98, 1.0))
    assert ours.best == pytest.approx(1.0)
    assert ours.host_us == 250.0
    assert ours.operations == {"_write": {"count": 1.0, "us": 8.0}}
    assert (rows["none"].ratio, rows["none"].low, rows["none"].host_us) == (1.0, 1.0, None)


def test_what_differs_in_any_start_is_said() -> None:
    starts = [start([100.0], [99.0], host=200.0), start([100.0], [99.0], host=200.0, sums=2.0)]
    [_, ours] = measurement()._rows_of("decode", "4x32", starts)
    assert ours.checks == ["kv_sums differ from those of none"]
