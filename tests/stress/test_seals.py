"""The campaign on seals finds every fault and its place; and without seals, or with the wrong place, it fails."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from kv_canary.config import CanaryConfig
from kv_canary.difftest.stress import seals


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seals, "FAULTS", 3)


def outcomes(name: str, *, layers: int, number: int = 0) -> list[seals.Outcome]:
    case = seals.Case(name=name, layers=layers, runs=3)
    return seals.run(seals.Task(case=case, number=number, backend="reference", device="cpu"))


@pytest.mark.parametrize(("name", "layers"), [(seals.BIT, 32), (seals.ONE_PAGE, 6), (seals.DRAFTER, 1)])
def test_every_fault_is_found_and_nothing_else(name: str, layers: int) -> None:
    found = outcomes(name, layers=layers)
    assert len(found) == 3
    assert all(outcome.by for outcome in found)
    assert [outcome.blamed_wrongly for outcome in found] == [()] * 3


def test_without_seals_most_bits_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsealed(**settings: Any) -> CanaryConfig:
        return CanaryConfig(**{**settings, "seals": "off"})

    monkeypatch.setattr(seals, "CanaryConfig", unsealed)
    found = [outcome.by for number in range(2) for outcome in outcomes(seals.BIT, layers=6, number=number)]
    assert found.count("") + found.count("gone") >= 5


def test_a_report_of_another_place_is_blamed_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = seals.make_engine(
        seals.Case(name=seals.BIT, layers=6, runs=1), np.random.default_rng(0), backend="reference", device="cpu"
    )
    damaged: list[seals.Damage] = []
    choose = seals._damage

    def noted(*args: Any) -> seals.Damage | None:
        found = choose(*args)
        damaged.extend([] if found is None else [found])
        return found

    monkeypatch.setattr(seals, "_damage", noted)
    outcome = seals._one(engine, seals.Case(name=seals.BIT, layers=6, runs=1), np.random.default_rng(1))
    (report, *_), (damage,) = engine.manager.reports, damaged
    assert (outcome.by != "", damage.explains(report)) == (True, True)
    other = {"K": "V", "V": "K"}[damage.halves]
    for change in ({"slots": (999,)}, {"halves": other}, {"layer": 77}):
        assert not dataclasses.replace(damage, **change).explains(report)
    assert not damage.explains(dataclasses.replace(report, reasons=(*report.reasons, "CHAIN")))
    assert not damage.explains(dataclasses.replace(report, places=()))


def test_what_is_gone_is_told_apart_and_what_is_missed_fails() -> None:
    cell = seals.Cell(case=seals.Case(name=seals.BIT, layers=32, runs=2))
    assert not cell.take([seals.Outcome(by="gone"), seals.Outcome(by="scrub", late=7)])
    assert cell.take([seals.Outcome(by="completion", late=3), seals.Outcome(by="")])
    assert cell.passed
    row = cell.as_dict()
    assert (row["runs"], row["found"], row["gone"], row["late_steps_median"], row["late_steps_max"]) == (2, 2, 1, 5, 7)
    assert row["by"] == {"completion": 1, "scrub": 1}
    missed = seals.Cell(case=cell.case)
    missed.take([seals.Outcome(by=""), seals.Outcome(by="scrub")])
    assert not missed.passed
    assert missed.as_dict()["found"] == 1
    blamed = seals.Cell(case=cell.case)
    blamed.take([seals.Outcome(by="scrub"), seals.Outcome(by="scrub", blamed_wrongly=("another",))])
    assert not blamed.passed


def test_the_program_writes_its_rows_and_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In this process; how the program's own processes are fed is tested for all campaigns at once.
    monkeypatch.setattr(seals, "processes", lambda jobs: contextlib.nullcontext())
    monkeypatch.setattr(seals, "run_tasks", lambda run, tasks, *, take, **_: not any(take(run(task)) for task in tasks))
    path = tmp_path / "seals.json"
    done = CliRunner().invoke(seals.main, ["--runs", "2", "--layers", "2", "--json", str(path), "--commit", "none"])
    assert done.exit_code == 0, done.output
    rows = json.loads(path.read_text())
    assert [(row["case"], row["layers"], row["runs"], row["found"]) for row in rows] == [
        (seals.BIT, 2, 2, 2),
        (seals.ONE_PAGE, 2, 1, 1),
        (seals.DRAFTER, 1, 1, 1),
    ]
    assert rows[0]["commit"] == "none"
    assert "sources" in rows[0]
    done = CliRunner().invoke(seals.main, ["--layers", "0"])
    assert done.exit_code == 2
    assert "layers must be at least 1, got 0" in done.output
