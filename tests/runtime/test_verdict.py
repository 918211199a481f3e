"""The verdict: whether the canary is watching, and what it has found, told apart and said at the end."""

from __future__ import annotations

import pytest

import kv_canary as kc
from kv_canary.runtime.summary import Watching

from .engine import full_engine
from .test_observers import flip


def test_what_was_found_and_how_it_was_watched_are_two_things() -> None:
    engine = full_engine(stride=1)
    a = engine.add("a", 20)
    engine.step((a, 6))
    engine.step((a, 1))
    engine.manager.flush()
    clean = engine.manager.summary()
    assert (clean.watching, clean.verdict, clean.is_clean) == ("complete", "clean", True)
    assert str(clean) == "clean; watching complete, 6 of 6 cached positions verified in 2 steps, bytes by sample"
    flip(engine, "a", 2)
    engine.step((a, 1))
    engine.manager.flush()
    found = engine.manager.summary()
    assert (found.watching, found.is_clean, found.incidents, found.requests) == ("complete", False, 1, ("a",))
    assert str(found).startswith("CORRUPTION: 1 incident, 1 violation, requests a; watching complete, 13 of 13 ")
    assert found.as_dict()["verdict"] == found.verdict == "CORRUPTION: 1 incident, 1 violation, requests a"


def test_nothing_that_was_not_watched_is_clean() -> None:
    assert str(kc.CanarySummary(watching=Watching.OFF)) == "no verdict; watched nothing"
    partial = kc.CanarySummary(
        watching=Watching.PARTIAL, steps=1, positions_relied_on=3, positions_verified=1, skipped=2, failures={"x": 1}
    )
    assert str(partial) == (
        "clean; watching partial, 1 of 3 cached positions verified in 1 step, 2 forwards unwatched, "
        "1 failure of the canary's own"
    )


def test_of_two_canaries_the_larger_stride_and_what_the_whole_process_has_dropped_are_said_once() -> None:
    one = kc.CanarySummary(watching=Watching.COMPLETE, stride=4, dropped=7)
    other = kc.CanarySummary(watching=Watching.COMPLETE, stride=1, dropped=9)
    for both in (one + other, other + one):
        assert (both.stride, both.dropped) == (4, 9)


def test_two_canaries_together_name_the_requests_of_both() -> None:
    one = kc.CanarySummary(watching=Watching.COMPLETE, violations=3, incidents=1, requests=("a", "b"))
    other = kc.CanarySummary(watching=Watching.STALE, violations=1, incidents=1, requests=("b", "c"))
    both = one + other
    assert (both.watching, both.incidents, both.requests) == ("stale", 2, ("a", "b", "c"))
    many = kc.CanarySummary(watching=Watching.COMPLETE, violations=9, incidents=9, requests=tuple("abcdefg"))
    assert many.verdict == "CORRUPTION: 9 incidents, 9 violations, requests a, b, c, d and more"


@pytest.mark.parametrize(
    ("faulty", "level", "line"),
    [(False, "INFO", "verdict: clean; watching complete"), (True, "ERROR", "verdict: CORRUPTION: 1 incident, ")],
)
def test_the_last_line_in_the_log_is_the_verdict(
    caplog: pytest.LogCaptureFixture, faulty: bool, level: str, line: str
) -> None:
    caplog.set_level("INFO")
    engine = full_engine(stride=1)
    a = engine.add("a", 20)
    engine.step((a, 6))
    if faulty:
        flip(engine, "a", 2)
    engine.step((a, 1))
    engine.manager.flush()
    for _ in range(2):
        engine.manager.close()
    said = [r for r in caplog.records if "verdict" in r.message]
    assert [r.levelname for r in said] == [level]
    assert line in caplog.records[-1].message


def test_a_canary_that_saw_nothing_says_so_louder(caplog: pytest.LogCaptureFixture) -> None:
    full_engine().manager.close()
    (said,) = [r for r in caplog.records if "verdict" in r.message]
    assert (said.levelname, said.message) == ("WARNING", "kv-canary: verdict: no verdict; watched nothing")


def test_a_canary_that_is_off_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    full_engine(mode="off").manager.close()
    assert not [r for r in caplog.records if "verdict" in r.message]


def test_how_bytes_are_held_is_said_of_what_was_verified() -> None:
    engine = full_engine(seals="layer")
    a = engine.add("a", 20)
    engine.step((a, 6))
    engine.step((a, 1))
    engine.manager.flush()
    sealed = engine.manager.summary()
    assert str(sealed).endswith("cached positions verified in 2 steps, bytes sealed")
    sampled = kc.CanarySummary(watching=Watching.COMPLETE, steps=3, bytes_held="by sample")
    nobody = kc.CanarySummary(watching=Watching.PARTIAL, failures={"x": 1})
    # As well as the worse of them, as far as it is known.
    assert [(sealed + other).bytes_held for other in (sealed, sampled, nobody)] == ["sealed", "by sample", "sealed"]
    assert (nobody + nobody).bytes_held == ""
    assert str(kc.CanarySummary(watching=Watching.COMPLETE)) == (
        "no verdict; watching complete, 0 of 0 cached positions verified in 0 steps"
    )
