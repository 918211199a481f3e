"""A scenario: one engine life, with and without a bug, and what became of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kv_canary import Reason
from kv_canary.difftest.simulator import EngineConfig

from .life import Life, first_difference
from .served import CANARY, ServedEngine

# What may find each class.
CHECKS = {
    "A": Reason.FREED | Reason.OVERWRITE | Reason.NEVER_WRITTEN | Reason.K | Reason.V | Reason.TOKEN,
    "B": Reason.K | Reason.V,
    "C": Reason.PREFIX | Reason.POSITION | Reason.CHAIN | Reason.UNMAPPED | Reason.TOKEN,
    "D": Reason.CHAIN | Reason.PREFIX,
    "F": Reason.WRITE_POSITION | Reason.TOKEN | Reason.CHAIN | Reason.NEVER_WRITTEN,
    "G": Reason.OVERWRITE | Reason.SLOT_RANGE | Reason.K | Reason.V,
    "H": Reason.OVERWRITE | Reason.K | Reason.V,
    "K": Reason.CHAIN | Reason.K | Reason.V,
}
NOTHING = Reason(0)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A documented bug's kind, in a running engine.

    Args:
        name: of the scenario.
        fault: its class, a letter of CHECKS.
        example: the documented bug, as repository#number.
        doc: what the bug does.
        engine: which engine has it.
        expected: reasons of which one must be in the first reports; NOTHING where a checker of slots cannot see it.
        beyond: reasons among them that CHECKS does not name for the class.
        healthy, faulty: live the life, without and with the bug.
    """

    name: str
    fault: str
    example: str
    doc: str
    engine: str
    expected: Reason
    healthy: Callable[[], Life]
    faulty: Callable[[], Life]
    beyond: Reason = NOTHING


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What became of a scenario.

    Args:
        reasons: of all reports of the first step that had any.
        tags: of the same.
        late: steps from the bug's act to them; None: nothing was reported.
        text_late: steps from the bug's act to the first wrong token; None: none was wrong.
        drafts_late: the same for tokens of a draft model.
        sentence: the first report's.
        cause: that the first incident says.
    """

    reasons: tuple[str, ...]
    tags: tuple[str, ...]
    late: int | None
    text_late: int | None
    drafts_late: int | None
    sentence: str
    cause: str


def model_scenario(
    *,
    life: Callable[[Any], None],
    config: Callable[[], EngineConfig],
    faulty: type[ServedEngine],
    healthy: type[ServedEngine] = ServedEngine,
    canary: Any = CANARY,
    **facts: Any,
) -> Scenario:
    """Return the scenario of a bug in the model engine: the same life of two classes, one of which has it."""

    def live(kind: type[ServedEngine]) -> Life:
        engine = kind(config(), canary=canary)
        life(engine)
        return engine.end_life()

    return Scenario(healthy=lambda: live(healthy), faulty=lambda: live(faulty), **facts)


@functools.cache
def lives(scenario: Scenario) -> tuple[Life, Life]:
    """Return the life without the bug and the one with it; they are lived once."""
    return scenario.healthy(), scenario.faulty()


def facts(scenario: Scenario) -> Facts:
    """Return what became of a scenario."""
    healthy, faulty = lives(scenario)
    first = [r for r in faulty.reports if r.step == min(x.step for x in faulty.reports)]

    def after_act(step: int | None) -> int | None:
        return None if step is None else step - faulty.acted

    return Facts(
        reasons=tuple(r.name or "" for r in Reason if any(r.name in x.reasons for x in first)),
        tags=tuple(dict.fromkeys(r.tag for r in first)),
        late=after_act(first[0].step if first else None),
        text_late=after_act(first_difference(healthy.texts, faulty.texts)),
        drafts_late=after_act(first_difference(healthy.drafts, faulty.drafts)),
        sentence=first[0].sentence if first else "",
        cause=min(faulty.incidents, key=lambda incident: incident.number).cause if first else "",
    )
