"""The engine with an overlapped scheduler: healthy and silent; wrong text and a report where it frees too early."""

from __future__ import annotations

import dataclasses
import gc
import json
import weakref
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kv_canary.config import CanaryConfig
from kv_canary.difftest.stress import overlap
from kv_canary.difftest.stress.overlapped_engine import OverlapConfig, OverlappedEngine

CANARY = CanaryConfig(backend="reference", sweep_every=5, check_tokens=True, check_inputs=True)
SEALS = dataclasses.replace(CANARY, seals="layer", scrub_share=0.1)


@pytest.mark.every_day("in time", "late, windowed")
@pytest.mark.parametrize(
    "options",
    [{}, {"late": True}, {"window": 40}, {"window": 40, "late": True}],
    ids=["in time", "late", "in time, windowed", "late, windowed"],
)
def test_a_step_ahead_of_the_device_there_is_no_false_alarm(options: dict[str, Any]) -> None:
    engine = OverlappedEngine(OverlapConfig(**options), canary=SEALS, device="cpu")
    engine.run(80)
    assert engine.manager is not None
    engine.manager.scrub()
    summary = engine.manager.summary()
    assert (summary.watching, summary.violations, engine.wrong_tokens) == ("complete", 0, 0), engine.manager.reports
    assert summary.positions_verified == summary.positions_relied_on > 10_000
    assert engine.finished > 20
    assert engine.retracted
    assert summary.audits is not None
    assert summary.audits.completed > 20
    assert summary.audits.unsealed == 0
    assert summary.audits.admitted > 0 or options.get("window")
    # The scheduler learns late that requests have ended.
    assert engine.ran_on > 20
    # Only a slow device reads rows that are another's by then.
    assert bool(summary.discarded) == bool(options.get("late"))


def test_without_an_eye_for_discarded_results_it_would_cry_wolf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_canary.difftest.stress.overlapped_engine._Work.discarded", lambda self: False)
    engine = OverlappedEngine(OverlapConfig(late=True), canary=CANARY, device="cpu")
    engine.run(80)
    assert engine.manager is not None
    assert engine.manager.summary().violations


def test_a_closed_engine_leaves_no_graph_to_the_collector_and_can_still_be_read() -> None:
    engine = OverlappedEngine(OverlapConfig(), canary=CANARY, device="cpu")
    # None is captured on a CPU.
    graph = type("Graph", (), {})()
    engine._graphs.append((4, graph))
    dead = weakref.ref(graph)
    del graph
    gc.disable()
    try:
        with closing(engine):
            engine.run(20)
        assert dead() is None
    finally:
        gc.enable()
    assert engine.guarded.summary().positions_verified > 0


def test_slots_retired_before_the_step_that_still_reads_them_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order matters: behind every forward that was prepared before the free."""
    release = OverlappedEngine._release

    def at_once(self: OverlappedEngine, pages: Any, *, owner: int) -> None:
        release(self, pages, owner=owner)
        self._retire_freed()

    monkeypatch.setattr(OverlappedEngine, "_release", at_once)
    monkeypatch.setattr("kv_canary.difftest.stress.overlapped_engine._Work.discarded", lambda self: False)
    engine = OverlappedEngine(OverlapConfig(late=True), canary=CANARY, device="cpu")
    engine.run(80)
    assert engine.manager is not None
    assert "FREED" in engine.manager.summary().reasons


def test_slots_given_away_while_in_use_are_wrong_text_and_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocator that forgets a holder: what is read is another's."""
    release = OverlappedEngine._release

    def twice(self: OverlappedEngine, pages: Any, *, owner: int) -> None:
        release(self, pages, owner=owner)
        shared = [page for page in pages if self.pages.holders[page] > 1]
        if shared:
            release(self, shared[:1], owner=owner)

    monkeypatch.setattr(OverlappedEngine, "_release", twice)
    engine = OverlappedEngine(OverlapConfig(overlap=False), canary=CANARY, device="cpu")
    engine.run(150)
    assert engine.manager is not None
    assert engine.wrong_tokens
    assert set(engine.manager.summary().reasons) & {"FREED", "OVERWRITE", "TOKEN", "POSITION", "CHAIN"}


def test_the_program_says_what_it_saw(tmp_path: Path) -> None:
    out = tmp_path / "overlap.json"
    done = CliRunner().invoke(overlap.main, ["--steps", "30", "--json", str(out)])
    assert done.exit_code == 0, done.output
    result = json.loads(out.read_text())
    assert {life["engine"] for life in result["lives"]} == set(overlap.lives("cpu"))
    assert all(life["false_alarms"] == 0 and life["steps"] == 30 for life in result["lives"])
    assert CliRunner().invoke(overlap.main, ["--steps", "0"]).exit_code == 2
