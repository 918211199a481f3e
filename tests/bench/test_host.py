"""The host's benchmark runs whole, and says so when the canary did not see everything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kv_canary.bench import host
from kv_canary.constants import KV_WORD


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "WARM_UP", 2)
    monkeypatch.setattr(host, "TIMED", 6)


def test_it_measures_every_phase_of_healthy_forwards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "host.json"
    assert host.main(["--device", "cpu", "--batches", "2x8,3x5", "--out", str(out), "--commit", "abc"]) == 0
    result = json.loads(out.read_text())
    assert result["commit"] == "abc"
    assert [(r["requests"], r["prefix"], r["graphs"]) for r in result["rows"]] == [(2, 8, False), (3, 5, False)]
    for row in result["rows"]:
        parts = [row["us"][name] for name in host.PHASES]
        assert all(us > 0 for us in parts)
        assert row["us"]["forward"] >= max(parts)
        assert row["device_allocations"] == 0
    assert "2x8" in capsys.readouterr().out


def test_a_run_that_is_not_clean_is_no_measurement() -> None:
    batches = host.Batches(requests=2, prefix=6, graphs=False, device="cpu")
    batches.manager.groups[0].pool.records[batches.table[1, 3], KV_WORD] ^= 1
    with pytest.raises(RuntimeError, match="a healthy run must be clean and complete"):
        host.measure(batches, graphs=False, prefix=6)


def test_positions_that_were_not_verified_are_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = host.Batches(requests=2, prefix=6, graphs=False, device="cpu")
    run = batches.run

    def blind(chunk: int = 1) -> list[int]:
        batches.manager.state.counters.zero_()
        return run(chunk)

    monkeypatch.setattr(batches, "run", blind)
    with pytest.raises(RuntimeError, match="a healthy run must be clean and complete"):
        host.measure(batches, graphs=False, prefix=6)
