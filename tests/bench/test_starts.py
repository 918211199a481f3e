"""Rows of `kv-canary bench engine` over several starts of the schedulers."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kv_canary.bench.serving import results, run


def settings(**changed: Any) -> run.Settings:
    given: dict[str, Any] = {
        "models": ["tiny"],
        "modes": ["none", "ours", "sgl"],
        "decode": [],
        "prefill": [],
        "churn": None,
        "tiers": (),
        "new": 32,
        "rounds": 2,
        "starts": 2,
        "seconds": 1e6,
        "device": "cpu",
        "frozen": True,
        "shared": False,
        "out": Path(),
    }
    return run.Settings(**given | changed)


def measurement(**changed: Any) -> run.Measurement:
    return run.Measurement("tiny", settings(**changed), say=lambda line: None)


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


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Schedulers that do nothing: the modes of those that were started, in order.

    "sgl" fails at its first prefill; "ours" has found something when it is started for the second time.
    """
    modes: list[str] = []

    class Scheduler:
        """One that answers at once."""

        def __init__(self, mode: str, *_: Any) -> None:
            self.mode, self.nth = mode, modes.count(mode)
            modes.append(mode)

        def answer(self, seconds: float) -> dict[str, Any]:
            return {"ready": True}

        def ask(self, *, do: str, **_: Any) -> dict[str, Any]:
            if do == "prefill" and self.mode == "sgl":
                raise RuntimeError("it has ended")
            if do == "status":
                return {"violations": 3 if self.mode == "ours" and self.nth else 0}
            return {"tokens_per_s": 100.0 + self.nth}

        def stop(self) -> None:
            """It has nothing to end."""

    monkeypatch.setattr(run, "Scheduler", Scheduler)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    return modes


def test_a_mode_that_has_failed_is_not_started_again(started: list[str], tmp_path: Path) -> None:
    measured = measurement(prefill=[(2, 96)], out=tmp_path)
    measured.run()
    assert started == ["none", "ours", "sgl", "none", "ours"]
    assert list(measured.failed) == ["sgl"]
    rows = {row.mode: row for row in measured.rows}
    assert {mode: (row.n, row.starts) for mode, row in rows.items()} == {"none": (4, 2), "ours": (4, 2)}
    assert [(each["start"], each["tokens_per_s"]) for each in rows["ours"].rounds] == [
        (0, 100.0),
        (0, 100.0),
        (1, 101.0),
        (1, 101.0),
    ]


def test_what_a_canary_has_found_in_any_start_is_said(started: list[str], tmp_path: Path) -> None:
    measured = measurement(prefill=[(2, 96)], out=tmp_path)
    measured.run()
    assert {row.mode: row.checks for row in measured.rows} == {"none": [], "ours": ["3 violations"]}


def test_no_start_begins_once_the_time_is_over(started: list[str], tmp_path: Path) -> None:
    measured = measurement(modes=["none"], prefill=[(2, 96)], starts=3, seconds=-1.0, out=tmp_path)
    measured.run()
    assert started == ["none"]
    assert [(row.n, row.starts) for row in measured.rows] == [(1, 1)]


def test_rows_are_in_their_file_as_they_come(started: list[str], tmp_path: Path) -> None:
    """A run that is cut short has lost nothing of what it had measured."""
    path, seen, facts = tmp_path / "cost.json", [], []
    asked = settings(models=["tiny", "8b"], modes=["none", "ours"], prefill=[(2, 96)], decode=[(4, 32)], out=tmp_path)

    def where() -> dict[str, str]:
        facts.append("asked for")
        return {"device": "a card"}

    file = results.ResultFile(path, where)

    def keep(rows: Sequence[run.Row]) -> None:
        file.keep(rows)
        written = json.loads(path.read_text())
        assert (written[0]["device"], written[0]["unfinished"]) == ("a card", True)
        assert "failed" not in written[0]
        seen.append([(row["model"], row["phase"], row["n"]) for row in written if row["mode"] == "ours"])

    rows, failed = run.measure(asked, say=lambda line: None, keep=keep)
    file.write(rows, failed)
    before = seen_of("tiny")
    assert seen == [*before, *(before[-1] + more for more in seen_of("8b"))]
    written = json.loads(path.read_text())
    assert (written[0]["failed"], "unfinished" in written[0]) == ({"tiny": {}, "8b": {}}, False)
    assert (len(written), facts) == (8, ["asked for"])


def seen_of(model: str) -> list[list[tuple[str, str, int]]]:
    """What two starts of a prefill and a decode leave, one batch after the other."""
    first, then = (model, "prefill"), (model, "decode")
    return [[(*first, 2)], [(*first, 2), (*then, 2)], [(*first, 4), (*then, 2)], [(*first, 4), (*then, 4)]]


def test_rows_go_once_to_what_is_no_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    file = results.ResultFile(pipe, dict)
    # It would wait for a reader.
    file.keep([run.Row(model="tiny", phase="decode", shape="4x32", mode="none")])
    results.ResultFile(None, dict).write([], {})
