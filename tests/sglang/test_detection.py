"""The faults of `kv-canary stress sglang` before a running SGLang: kv-canary finds each, and the page says what was."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from kv_canary.commands.evidence_pages import fill
from kv_canary.difftest.stress.sglang import detection
from kv_canary.difftest.stress.sglang.detection import KNOWN, _covered, campaign, objections
from kv_canary.difftest.stress.sglang.faults import FAULTS
from kv_canary.difftest.stress.sglang.lives import COLUMNS, SWEEP_EVERY, Seen
from kv_canary.difftest.stress.sglang.page import page

ROOT = Path(__file__).resolve().parents[2]
COLUMN = {c.name: c for c in COLUMNS}


@pytest.fixture(scope="module")
def kept() -> list[dict[str, Any]]:
    """The rows that the page was written from."""
    rows: list[dict[str, Any]] = json.loads((ROOT / "bench/results/sglang_detection.json").read_text())
    return rows


@pytest.fixture(scope="module")
def lived() -> list[dict[str, Any]]:
    """Every fault once, before kv-canary as it comes."""
    return campaign(KNOWN, [0], columns=[COLUMN["ours"]])


def test_the_page_says_what_the_rows_say(kept):
    assert (ROOT / "docs/sglang-detection.md").read_text(encoding="utf-8") == fill(page(kept))


def test_the_rows_hold_every_fault_and_nothing_against_the_canary(kept):
    assert {r["fault"] for r in kept} == {f.name for f in KNOWN}
    assert [text for row in kept for text in objections(row)] == []


def test_progress_ends_where_a_campaign_does(monkeypatch):
    """Without a canary the traffic lives without the fault, too: as many lives more as there are kinds of it."""
    monkeypatch.setattr(detection, "run", lambda *args, model: ((task, Seen(outputs={})) for task in args[2]))
    monkeypatch.setattr(detection, "_row", lambda *_, **__: {})
    monkeypatch.setattr(detection, "show", lambda *_, **__: None)
    monkeypatch.setattr(detection, "objections", lambda _: iter(()))
    totals, ticks = [], []
    bar = SimpleNamespace(add_task=lambda _, total: totals.append(total), update=lambda *_, **__: ticks.append(1))
    monkeypatch.setattr(detection, "progress_bar", lambda *_: contextlib.nullcontext(bar))
    done = CliRunner().invoke(detection.main, ["--fault", "one byte, anywhere", "--seeds", "3"])
    assert (done.exit_code, totals) == (0, [len(ticks)]), done.output
    chosen = [f for f in FAULTS if f.name.startswith("one byte, anywhere")]
    assert len(ticks) == 3 * (len(chosen) * (len(COLUMNS) + 1) + len({(f.script, f.page_size) for f in chosen}))


@pytest.mark.long
def test_every_fault_is_found_and_nothing_is_reported_without_one(lived):
    assert {r["fault"] for r in lived} == {f.name for f in KNOWN}
    assert [f"{row['fault']}: {text}" for row in lived for text in objections(row)] == []


@pytest.mark.long
def test_the_rows_are_those_of_this_canary(kept, lived):
    """What was kept is what is found today; texts may differ in a token where another CPU rounds otherwise."""
    same = ("fault", "where", "ours", "ours_covered", "ours_steps_late", "ours_reasons")
    today = [tuple(r[name] for name in same) for r in lived]
    assert today == [tuple(r[name] for name in same) for r in kept if r["seed"] == 0]


@pytest.mark.long
def test_faults_that_change_a_stretch_make_the_text_wrong(lived):
    harmless = [r["fault"] for r in lived if r["fault"].startswith(("stretch", "page")) and not r["output_wrong"]]
    assert harmless == []


@pytest.mark.long
def test_a_canary_without_lifetimes_sees_a_freed_slot_later():
    """The judge sees the difference: the same life before a canary that is blind to frees."""
    blind = dataclasses.replace(
        COLUMN["ours"], environment={**COLUMN["ours"].environment, "KV_CANARY_TRACK_LIFETIME": "0"}
    )
    [row] = campaign([f for f in FAULTS if f.name == "freed while in use"], [0], columns=[blind])
    assert row["ours"]
    assert "FREED" not in row["ours_reasons"]
    assert row["ours_steps_late"] > 3


@pytest.mark.long
def test_the_builtin_canary_reads_the_first_layer_only():
    """As SGLang's operators turn it on, beside the same lives: what the page compares with really runs."""
    wanted = [f"stretch, K of the {layer} layer, in use" for layer in ("first", "last")]
    rows = campaign([f for f in FAULTS if f.name in wanted], [0], columns=[COLUMN["builtin"]])
    assert [(r["builtin"], r["output_wrong"]) for r in rows] == [(True, True), (False, True)]


@pytest.mark.long
def test_a_byte_anywhere_is_found_by_seals():
    """Found by a scrub, in time and whether it is sampled or not; and without a scrub the judge objects."""
    anywhere = [f for f in FAULTS if f.name == "one byte, anywhere, in use"]
    rows = campaign(anywhere, range(4), columns=[COLUMN["ours"], COLUMN["ours_sealed"]])
    assert len({r["where"].split(",")[0] for r in rows}) > 1
    assert all(r["ours_sealed"] and r["ours_sealed_steps_late"] <= SWEEP_EVERY for r in rows)
    assert not all(r["ours"] for r in rows)
    assert [text for row in rows for text in objections(row)] == []
    assert list(objections({**rows[0], "ours_sealed": False})) == ["ours_sealed: not found"]


def test_a_byte_is_covered_by_the_layer_that_changed_and_by_any_seal():
    [fault] = [f for f in FAULTS if f.name == "one byte, anywhere, cached"]
    # Position 4 is sampled in layer 1 of 3, in its second window.
    covered = {
        (layer, byte): [
            _covered(fault, Seen(outputs={}, position=4, byte=byte, layer=layer), COLUMN[name])
            for name in ("ours", "ours_whole_rows", "ours_sealed")
        ]
        for layer, byte in ((0, 20), (1, 20), (1, 90))
    }
    assert covered == {
        (0, 20): [False, False, True],
        (1, 20): [True, True, True],
        (1, 90): [False, True, True],
    }


@pytest.mark.parametrize(
    ("change", "objection"),
    [
        ({"ours": False}, "ours: not found"),
        ({"ours_covered": False}, "ours: false alarm: step 1"),
        ({"ours_error": "it broke"}, "ours: it broke"),
        ({"place": "healthy", "ours_output_changed": True}, "ours: the canary changed what was generated"),
        ({"ours_cause_is": "wrong", "ours_cause": "it rained"}, "ours: told a wrong cause: it rained"),
    ],
)
def test_objections(change, objection):
    row = {
        "place": "in use",
        "engine_error": "",
        "ours": True,
        "ours_covered": True,
        "ours_report": "step 1",
        "ours_error": "",
        "ours_output_changed": False,
    }
    assert list(objections(row)) == []
    assert list(objections({**row, **change})) == [objection]
