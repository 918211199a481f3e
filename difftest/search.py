"""The search for a failing case of an op, and the checks that every call is put through."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, reject, settings
from hypothesis import seed as with_seed
from hypothesis.database import ExampleDatabase
from hypothesis.errors import Flaky
from hypothesis.stateful import run_state_machine_as_test

from kv_canary.cases.casefile import check_round_trip
from kv_canary.cases.comparison import Mismatch
from kv_canary.difftest.features import of_call
from kv_canary.difftest.machine import Disagreement, default_implementations, engine_machine
from kv_canary.difftest.misuse import check_misuse
from kv_canary.difftest.simulator import STEPS, Action
from kv_canary.difftest.strategies import cases
from kv_canary.difftest.strategies.engine import engine_rounds
from kv_canary.specs import get_spec
from kv_canary.specs.interface import KernelSpec

Check = Callable[[KernelSpec, Mapping[str, Any]], Mismatch | None]
# Whether a failure of a call inside a history or a round is the one that is looked for.
Hunted = Callable[[KernelSpec, Mapping[str, Any], Mismatch], bool]
# Is given the features of each call of a round.
Told = Callable[[list[frozenset[str]]], None]


def check_call(spec: KernelSpec, case: Mapping[str, Any], *, check: Check, first: bool) -> Mismatch | None:
    """Put one call through every check that its op gets; return how it failed, or None.

    Args:
        check: runs `check_case` somewhere.
        first: whether to check as well what hardly depends on the case: that misuse is refused, and that the call is
            the same once saved and loaded.
    """
    if first:
        try:
            check_misuse(spec, case)
            check_round_trip(spec, case)
        except Mismatch as mismatch:
            return mismatch
    return check(spec, case)


def search(
    spec: KernelSpec,
    fails: Callable[[Mapping[str, Any]], bool],
    *,
    examples: int,
    seed: int,
    database: ExampleDatabase | None,
) -> None:
    """Draw up to `examples` calls of an op until one fails, then smaller ones that fail too; `fails` sees them all."""

    # The settings come last: a seed forgets the database.
    @_settings(examples, database)
    @with_seed(seed)
    @given(case=cases(spec.name))
    def test(case: dict[str, Any]) -> None:
        if fails(case):
            raise _Found

    # What tells the examples of one op from those of another, as pytest tells the parameters of a test.
    test.hypothesis.inner_test._hypothesis_internal_add_digest = spec.name.encode()  # type: ignore[attr-defined]
    # A failure that comes and goes was saved when it came.
    with suppress(_Found, Flaky):
        test()


# After ten examples Hypothesis mostly varies the one before, which finds little that it did not: many short rounds,
# each with a seed of its own, draw more different calls than a long one.
ROUND_EXAMPLES = 10
# The first history of a round is an empty one.
ROUND_HISTORIES = 3
HISTORY_STEPS = 15


def search_engine(
    check: Check,
    fails: Hunted,
    on_step: Told,
    *,
    seed: int,
    database: ExampleDatabase | None,
) -> None:
    """Draw a round of histories of an engine until a call inside one fails.

    The plain implementation and the reference each keep a memory of their own; Triton's calls are put to `check`, and
    where it agrees, to the byte, what the reference leaves is what Triton left.

    Args:
        check: runs `check_case` somewhere.
        fails: called with a failure inside a history; whether it is the one that is looked for.
        on_step: called before each action; after a round (a step, and what happened between it and the one before)
            with the features of each of its calls, else with none.
    """
    seen: list[frozenset[str]] = []
    launches = default_implementations()
    reference = launches["reference"]

    def note(op: str, arguments: Mapping[str, Any]) -> None:
        seen.append(of_call(op, arguments))
        reference(op, arguments)

    def triton(op: str, arguments: Mapping[str, Any]) -> None:
        spec = get_spec(op)
        mismatch = check(spec, arguments)
        if mismatch is not None and fails(spec, spec.bind(arguments), mismatch):
            raise mismatch
        reference(op, arguments)

    def end_round() -> None:
        calls = list(seen)
        seen.clear()
        on_step(calls)

    class History(engine_machine({**launches, "reference": note, "triton": triton})):  # type: ignore[misc]
        def _perform(self, action: Action) -> None:
            on_step([])
            try:
                super()._perform(action)
            except Disagreement as found:
                if fails(get_spec(found.op), found.arguments, found):
                    raise
                reject()
            if action.kind in STEPS:
                end_round()

        def teardown(self) -> None:
            end_round()

    with suppress(Mismatch, Flaky):
        run_state_machine_as_test(with_seed(seed)(History), settings=_settings(ROUND_HISTORIES, database))


def search_rounds(
    check: Check,
    fails: Hunted,
    on_round: Told,
    *,
    seed: int,
    database: ExampleDatabase | None,
) -> None:
    """Draw rounds of engines with a past, damaged half of the time, until a call inside one fails.

    Histories grow a step at a time and shrink as such; these are in the thick of it at once.

    Args:
        check, fails: as for `search_engine`.
        on_round: called before each round with the features of each of its calls.
    """

    @_settings(ROUND_EXAMPLES, database)
    @with_seed(seed)
    @given(calls=engine_rounds())
    def test(calls: list[tuple[str, dict[str, Any]]]) -> None:
        on_round([of_call(op, arguments) for op, arguments in calls])
        for op, arguments in calls:
            spec = get_spec(op)
            mismatch = check(spec, arguments)
            if mismatch is not None and fails(spec, spec.bind(arguments), mismatch):
                raise _Found

    with suppress(_Found, Flaky):
        test()


def draw_cases(op: str, *, examples: int, seed: int) -> list[dict[str, Any]]:
    """Return `examples` generated calls of `op`, the same ones for the same `seed`."""
    drawn: list[dict[str, Any]] = []
    for batch in range(-(-examples // (ROUND_EXAMPLES - 2))):
        # The first two of a round are the simplest call there is.
        drawn += _draw_round(op, seed=(seed << 32) + batch)[2 if batch else 1 :][: examples - len(drawn)]
    return drawn


def _draw_round(op: str, *, seed: int) -> list[dict[str, Any]]:
    drawn: list[dict[str, Any]] = []

    @settings(_settings(ROUND_EXAMPLES, None), phases=[Phase.generate])
    @with_seed(seed)
    @given(case=cases(op))
    def collect(case: dict[str, Any]) -> None:
        drawn.append(case)

    collect()
    return drawn


class _Found(Exception):  # noqa: N818 - it ends a search, it is no error
    """The case at hand is what is looked for."""


def _settings(examples: int, database: ExampleDatabase | None) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=HISTORY_STEPS,
        database=database,
        deadline=None,
        verbosity=Verbosity.quiet,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
