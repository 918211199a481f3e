"""The faults of `kv-canary stress vllm` before a running vLLM: kv-canary finds each, and the page says what was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kv_canary.commands.evidence import results
from kv_canary.commands.evidence_pages import fill
from kv_canary.difftest.stress.vllm.churn import Settings, lives
from kv_canary.difftest.stress.vllm.detection import RUNNERS, _kept, _ordered, campaign, objections
from kv_canary.difftest.stress.vllm.faults import KNOWN, healthy
from kv_canary.difftest.stress.vllm.page import page

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def kept() -> list[dict[str, Any]]:
    """The rows that the page was written from."""
    rows: list[dict[str, Any]] = json.loads((ROOT / "bench/results/vllm_detection.json").read_text())
    return rows


def test_the_page_says_what_the_rows_say(kept: list[dict[str, Any]]) -> None:
    assert (ROOT / "docs/vllm-detection.md").read_text(encoding="utf-8") == fill(page(kept))


def test_the_rows_hold_every_fault_and_nothing_against_the_canary(kept: list[dict[str, Any]]) -> None:
    known, found = [(f.name, r) for r in RUNNERS for f in KNOWN], [(r["fault"], r["runner"]) for r in kept]
    assert found == [row for row in known if row in found]
    # What is of an older version, and says so on its page, may lack what has come since.
    is_older = next(r for r in results() if r.name == "vllm_detection.json").note
    assert found == known or (is_older and len(found) >= 40)
    assert [text for row in kept for text in objections(row)] == []


def test_the_kept_churn_was_silent() -> None:
    churn = json.loads((ROOT / "bench/results/vllm_churn.json").read_text())
    assert churn["steps"] >= 3000
    assert churn["wrong"] == []
    assert churn["false_alarms"] == 0
    assert churn["positions_verified"] == churn["positions_relied_on"]


MORE = ("blocks swapped", "handed out twice", "write dropped", "a drafter's layer, cached")


@pytest.mark.parametrize(
    ("runner", "names"),
    [
        ("V1", ("handed out twice",)),
        *(
            pytest.param(
                runner, ("blocks swapped", "write dropped", "a drafter's layer, cached"), marks=pytest.mark.long
            )
            for runner in ("V1", "V2")
        ),
    ],
)
def test_a_few_faults_are_found_and_nothing_is_reported_without_one(runner: Any, names: tuple[str, ...]) -> None:
    chosen = [f for f in KNOWN if f.name in names]
    rows = campaign([*{healthy(chosen[0]).name: healthy(chosen[0])}.values(), *chosen], [0], runners=[runner])
    assert [f"{row['fault']}: {text}" for row in rows for text in objections(row)] == []
    assert [row["fault"] for row in rows[1:]] == list(names)
    # A drafter's KV changes no text: its guesses are only accepted where they are right.
    assert {row["wrong_text"] for row in rows if row["fault"] == "a drafter's layer, cached"} <= {0}


@pytest.mark.long
def test_every_fault_is_found_in_both_runners() -> None:
    rows = campaign(KNOWN, [0])
    assert [f"{row['fault']}, {row['runner']}: {text}" for row in rows for text in objections(row)] == []


def test_a_campaign_goes_on_beside_the_rows_of_the_same_code(tmp_path: Path) -> None:
    path, here = tmp_path / "rows.json", {"kernels": "1"}
    assert _kept(None, here) == _kept(path, here) == {}
    first, last = ({"fault": f.name, "runner": "V1", "sources": here} for f in (KNOWN[0], KNOWN[-1]))
    older = {"fault": KNOWN[1].name, "runner": "V1", "sources": {"kernels": "0"}}
    path.write_text(json.dumps([last, older, first]))
    assert _ordered(_kept(path, here)) == [first, last]


def row(**changed: Any) -> dict[str, Any]:
    plain = {
        "is_healthy": False,
        "runs": 2,
        "found": 2,
        "blamed_wrongly": 0,
        "wrong": [],
        "failures": [],
        "errors": [],
        "canary_changed_text": 0,
        "wrong_text": 1,
    }
    return {**plain, **changed}


@pytest.mark.parametrize(
    ("changed", "objection"),
    [
        ({"found": 1}, "1 found, 2 wanted"),
        ({"is_healthy": True, "wrong_text": 0}, "2 found, 0 wanted"),
        ({"is_healthy": True, "found": 0}, "healthy lives differ"),
        ({"blamed_wrongly": 1, "wrong": ["step 3"]}, "1 lives in which something else is blamed: step 3"),
        ({"failures": ["HEAD"]}, "a failure: HEAD"),
        ({"errors": ["it broke"]}, "a failure: it broke"),
        ({"canary_changed_text": 1}, "the canary changed what was generated"),
        ({"causes": {"wrong": 1}, "says": ["it rained"]}, "1 lives are told a wrong cause, of ['it rained']"),
    ],
)
def test_objections(changed: dict[str, Any], objection: str) -> None:
    assert list(objections(row())) == []
    assert list(objections(row(**changed))) == [objection]


@pytest.mark.long
def test_a_life_of_the_churn_is_clean_and_its_settings_come_of_its_seed(tmp_path: Path) -> None:
    drawn = [Settings.drawn(seed, runners=("V1",)) for seed in range(40)]
    assert drawn == [Settings.drawn(seed, runners=("V1",)) for seed in range(40)]
    assert {(s.kind, s.asynchronous) for s in drawn} >= {("llama", True), ("mistral", False), ("gemma3", True)}
    assert {s.drafts for s in drawn} == {"none", "ngram", "model", "eagle"}
    assert {s.drafts for s in drawn if s.asynchronous} == {"none", "model", "eagle"}
    # Behind an engine with n-grams vLLM's next ones in its process generate other text, with a canary or without.
    seed = next(s.seed for s in drawn if s.drafts == "ngram")
    [(settings, lived)] = lives([seed], steps=12, runners=("V1",), models=tmp_path)
    assert settings.drafts == "ngram"
    assert lived.is_clean, lived
    assert lived.verified > 1000
