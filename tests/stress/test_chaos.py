"""The campaign of faults in the canary: engines notice none of them, and it would notice a canary that spoils one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from kv_canary import ops
from kv_canary.difftest.stress import chaos
from kv_canary.difftest.stress.canary_faults import Faults, InjectedError
from kv_canary.runtime.unverified import Unverified

# Seeds whose lives have many faults.
SEEDS = (200, 205)


def lives(folder: Path, *numbers: int) -> chaos.Tally:
    tally = chaos.Tally()
    for number in numbers:
        tally.add(chaos.run(chaos.Task(number=number, model="", folder=str(folder))))
    return tally


def test_model_engines_notice_nothing(tmp_path: Path) -> None:
    tally = lives(tmp_path, *SEEDS)
    assert (tally.lost, tally.wrong, tally.false_alarms, tally.missed) == ([], [], 0, 0)
    assert not tally.failed
    assert sum(tally.injected.values()) > 20
    assert tally.skipped > 10


def test_transformers_answers_as_without_a_canary(tmp_path: Path) -> None:
    tally = chaos.run(chaos.Task(number=11, model="llama", folder=str(tmp_path)))
    assert (tally.lost, tally.wrong, tally.false_alarms) == ([], [], 0)
    assert tally.steps > 20


@pytest.mark.every_day("contain")
@pytest.mark.parametrize("broken", ["forget", "contain"])
def test_a_canary_that_spoils_an_engine_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    if broken == "forget":
        # Gaps that nobody marks are false alarms.
        monkeypatch.setattr(Unverified, "forget", lambda self, pool, slots: None)
    else:
        monkeypatch.setattr("kv_canary.runtime.guard.Contained.__exit__", leave)
    tally = lives(tmp_path, *SEEDS)
    assert tally.failed
    assert tally.false_alarms if broken == "forget" else tally.lost


def leave(self: Any, kind: Any, error: Any, trace: Any) -> bool:
    self._mode.__exit__(kind, error, trace)
    self.failed = error is not None
    return False


def test_faults_strike_before_and_behind_and_as_often_as_they_are_told() -> None:
    calls: list[int] = []
    faults = Faults(np.random.default_rng(0), rate=0.5)
    call = faults.failing("a call", calls.append)
    raised = 0
    for number in range(400):
        try:
            call(number)
        except InjectedError:
            raised += 1
    assert raised == faults.injected["a call"]
    assert 150 < raised < 250
    # About half of those that raised had done their work.
    assert 400 - raised < len(calls) < 400
    true = ops.write
    with faults.installed():
        assert ops.write is not true
    assert ops.write is true


@pytest.mark.long
def test_the_command_writes_what_came_of_it(tmp_path: Path) -> None:
    path = tmp_path / "chaos.json"
    arguments = ["--minutes", "0.05", "--jobs", "1", "--transformers", "0", "--json", str(path)]
    result = CliRunner().invoke(chaos.main, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert report["lost"] == report["wrong"] == []
    assert report["lives"] > 0
