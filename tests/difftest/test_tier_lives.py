"""Campaigns of tiers: what they keep rests on the code of their own engine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from kv_canary.commands.evidence import KINDS
from kv_canary.difftest.stress import tier_lives

ROW = {
    "fault": "one bit",
    "engine": "torch",
    "runs": 2,
    "found": 2,
    "where": {"step": 2},
    "late_steps_max": 1,
    "blamed_wrongly": 0,
    "causes": {"right": 2, "half": 0, "wrong": 0},
    "says": [],
    "wrong_text": 0,
    "came_back": 8,
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    name: str = "plain"


@pytest.mark.parametrize("kind", ["tiers", "vllm_tiers"])
def test_rows_are_stamped_with_the_sources_of_their_kind(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_lives, "campaign", lambda *_args, **_options: [ROW])
    path = tmp_path / "rows.json"
    options = {"lives": 2, "chosen": (), "where": (), "seed": 0, "json_path": path, "commit": "abc"}
    with pytest.raises(SystemExit) as ended:
        tier_lives.run("torch", lambda *_: None, [Setting()], [], kind=kind, **options)
    assert ended.value.code == 0
    [row] = json.loads(path.read_text())
    assert row["sources"].keys() == set(KINDS[kind].sources)


@pytest.mark.parametrize(
    ("change", "objection"),
    [
        ({"found": 1}, "found in 1 of 2 lives"),
        ({"fault": tier_lives.HEALTHY}, "2 of 2 healthy lives were reported"),
        ({"blamed_wrongly": 1}, "1 lives blame somebody else"),
        (
            {"causes": {"right": 1, "half": 0, "wrong": 1}, "says": ["it rained"]},
            "1 lives are told a wrong cause, of ['it rained']",
        ),
        ({"came_back": 0}, "nothing came back from the host"),
    ],
)
def test_what_speaks_against_the_canary_is_objected_to(change: dict[str, object], objection: str) -> None:
    assert list(tier_lives.objections(ROW)) == []
    assert list(tier_lives.objections({**ROW, **change})) == [objection]
