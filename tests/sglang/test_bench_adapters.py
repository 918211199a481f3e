"""`kv-canary bench adapters` with SGLang: steps of drafts."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from kv_canary.bench import adapters
from kv_canary.difftest.stress.processes import in_fork


def test_steps_of_drafts_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "WARM_UP", 2)
    monkeypatch.setattr(adapters, "TIMED", 6)
    row = in_fork(functools.partial(adapters.measure, "sglang", "drafts", 12, tmp_path), patience=120)
    assert "error" not in row, row
    assert (row["engine"], row["batch"], row["requests"]) == ("sglang", "drafts", 12)
    assert row["p90_us"] >= row["host_us"] > 0
    assert 0 < row["tokens"] <= 12
