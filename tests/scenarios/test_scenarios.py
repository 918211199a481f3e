"""Each bug's life without the bug is silent; with it, the bug is found at once, at its slot, and nothing else is."""

from __future__ import annotations

import difflib

import pytest
import transformers

from kv_canary import Reason, ViolationReport

from .catalog import CLASSES, ON_TRANSFORMERS, SCENARIOS
from .causes import CAUSES
from .document import PATH, document
from .harness import CHECKS, Scenario, facts, lives
from .life import Act, Life, Touch, first_difference

VISIBLE = [s for s in SCENARIOS if s.expected]
INVISIBLE = [s for s in SCENARIOS if not s.expected]
other_version = pytest.mark.skipif(
    not transformers.__version__.startswith("5.23."), reason="the scenarios patch transformers 5.23"
)


def each(scenarios: list[Scenario]) -> pytest.MarkDecorator:
    marked = [
        pytest.param(s, id=f"{s.fault}-{s.name}", marks=[other_version] if s in ON_TRANSFORMERS else [])
        for s in scenarios
    ]
    return pytest.mark.parametrize("scenario", marked)


@each(list(SCENARIOS))
def test_the_life_without_the_bug_is_silent(scenario: Scenario) -> None:
    healthy, _ = lives(scenario)
    assert [r.sentence for r in healthy.reports] == []
    assert healthy.acts == []
    assert (healthy.summary.watching, healthy.summary.violations) == ("complete", 0)
    assert healthy.summary.positions_verified == healthy.summary.positions_relied_on > 0
    assert sum(len(text) for text in healthy.texts.values()) > 0


@each(VISIBLE)
def test_the_bug_is_found_at_the_first_step_that_uses_what_it_spoiled(scenario: Scenario) -> None:
    _, faulty = lives(scenario)
    assert faulty.acts
    assert len(faulty.reports) == faulty.summary.violations > 0
    first = min(r.step for r in faulty.reports)
    assert first == faulty.first_visible()
    reasons = {name for r in faulty.reports if r.step == first for name in r.reasons}
    assert reasons & names(scenario.expected)
    assert reasons & names(CHECKS[scenario.fault] | scenario.beyond)


@each(VISIBLE)
def test_no_other_slot_or_request_is_blamed(scenario: Scenario) -> None:
    _, faulty = lives(scenario)
    assert [r.sentence for r in faulty.reports if not faulty.blames_rightly(r)] == []


@each(VISIBLE)
def test_the_cause_that_is_said_is_the_one_that_was_judged(scenario: Scenario) -> None:
    assert CAUSES[scenario.name].says in facts(scenario).cause


@each(INVISIBLE)
def test_what_is_not_visible_makes_the_text_wrong_in_silence(scenario: Scenario) -> None:
    _, faulty = lives(scenario)
    assert faulty.acts
    assert [r.sentence for r in faulty.reports] == []
    assert faulty.summary.watching == "complete"
    assert facts(scenario).text_late is not None


def test_every_class_has_scenarios_or_says_why_not() -> None:
    assert {s.fault for s in SCENARIOS} == set(CHECKS)
    assert [c.letter for c in CLASSES] == list("ABCDEFGHIJK")
    assert all(c.note for c in CLASSES if c.letter not in CHECKS)
    assert len({s.name for s in SCENARIOS}) == len(SCENARIOS)
    assert set(CAUSES) == {s.name for s in VISIBLE}


@other_version
def test_the_page_says_what_the_scenarios_give() -> None:
    kept, made = (text.splitlines() for text in (PATH.read_text(encoding="utf-8"), document()))
    changes = [line for line in difflib.unified_diff(kept, made, lineterm="", n=0) if line not in ("--- ", "+++ ")]
    assert changes == [], "cd /tmp && python tests/scenarios/write_table.py writes it anew"


def names(reasons: Reason) -> set[str]:
    return {r.name for r in Reason if r in reasons}


def report(**changes: object) -> ViolationReport:
    fields = dict.fromkeys(ViolationReport.__dataclass_fields__)
    plain = {"reasons": ("TOKEN",), "step": 2, "group": "full", "slot": 5, "previous_slot": 4, "request_id": "1"}
    return ViolationReport(**{**fields, **plain, **changes})


@pytest.mark.parametrize(
    ("changes", "right"),
    [
        ({}, True),
        ({"slot": 6}, False),
        ({"request_id": "2"}, False),
        ({"group": "lut"}, False),
        ({"group": "full or draft"}, True),
        # The record behind a foreign one is told by its chain, and by nothing else.
        ({"slot": 6, "previous_slot": 5}, False),
        ({"slot": 6, "previous_slot": 5, "reasons": ("CHAIN",)}, True),
        ({"slot": 6, "previous_slot": 5, "reasons": ("CHAIN", "TOKEN")}, False),
    ],
)
def test_a_report_blames_rightly_where_the_bug_was(changes: dict[str, object], right: bool) -> None:
    act = Act(step=2, slots={"full": frozenset({5})}, requests=frozenset({"1"}))
    assert Life(acts=[act]).blames_rightly(report(**changes)) is right


def test_a_spoiled_slot_is_visible_to_those_who_use_it() -> None:
    touches = [
        Touch(step=1, request="1", group="full", slot=5, kind="read"),
        Touch(step=2, request="2", group="full", slot=5, kind="read"),
        Touch(step=3, request="1", group="lut", slot=5, kind="read"),
        Touch(step=4, request="1", group="full", slot=5, kind="write"),
        Touch(step=5, request="1", group="full", slot=5, kind="read"),
    ]
    slots = {"full": frozenset({5})}
    mine = frozenset({"1"})
    assert Life(touches=touches, acts=[Act(step=2, slots=slots, requests=mine)]).first_visible() == 4
    assert Life(touches=touches, acts=[Act(step=2, slots=slots, requests=mine, later=True)]).first_visible() == 5
    assert Life(touches=touches, acts=[Act(step=5, slots=slots, requests=mine, later=True)]).first_visible() is None
    assert Life(touches=touches, acts=[Act(step=2, slots=slots, requests=None)]).first_visible() == 2
    by_first = Act(step=2, slots=slots, requests=None, shown_by=mine)
    assert Life(touches=touches, acts=[by_first]).first_visible() == 4


def test_the_first_wrong_token_is_told_by_its_step() -> None:
    right = {"1": [(1, 7), (2, 8), (3, 9)], "2": [(1, 5)]}
    assert first_difference(right, right) is None
    assert first_difference(right, {"1": [(1, 7), (4, 0), (5, 0)], "2": [(1, 5), (6, 6)]}) == 4
