"""What observers are told, and the two that are always there; the others have test files of their own."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import kv_canary as kc
from kv_canary import ratelimit
from kv_canary.difftest.simulator import Action
from kv_canary.observers import HealthCheck, Observer, OverflowWarner, StepFacts
from kv_canary.ranks import RankReport
from kv_canary.ratelimit import RateLimit

from .engine import Engine, full_engine, make_pool
from .observed import live, make_engine


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def facts(**changes: Any) -> StepFacts:
    """Return a step at which nothing happened."""
    plain: dict[str, Any] = {
        "step": 1,
        "watching": "complete",
        "requests": 1,
        "relied_on": 8,
        "verified": 8,
        "counters": tuple((0, 0) for _ in kc.Tag),
        "statuses": (),
        "missing": {},
        "violations": 0,
        "found": {},
        "discarded": 0,
        "stride": 1,
    }
    return StepFacts(**{**plain, **changes})


def rank_report() -> RankReport:
    """Return that rank 1 stands out."""
    return RankReport(
        step=4,
        key=9,
        request_id="a",
        groups=("full",),
        ranks=(1,),
        differences=("prefix length",),
        stands=(),
        cause="the ranks disagree on the hit length",
        sentence="step 4: rank 1 stands out",
    )


class Listener(Observer):
    """Keeps what it is told, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def on_forward(self, forward: kc.SingleForwardManager, batch: kc.ForwardBatch) -> None:
        self.told.append(("forward", forward.context.step))

    def on_report(self, report: kc.ViolationReport) -> None:
        self.told.append(("report", report.step))

    def on_step(self, facts: StepFacts) -> None:
        self.told.append(("step", facts))

    def close(self) -> None:
        self.told.append(("close", None))

    def steps(self) -> list[StepFacts]:
        return [news for kind, news in self.told if kind == "step"]


def listened(observers: list[Observer], **settings: Any) -> Engine:
    """Return an engine of one full group whose canary tells these observers too."""
    engine = full_engine(**settings)
    engine.manager.accounts.join(*observers)
    return engine


def flip(engine: Engine, name: str, position: int) -> None:
    """Flip a bit of the K that a request has at a position, in the first group."""
    group = engine.groups[0]
    layer = group.pool.k_source.coverage(position)[0]
    group.pool.k_source.layers[layer][engine.slot_of(group, engine.requests[name], position), 0] ^= 1


def lines(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    return [r.message for r in caplog.records if part in r.message]


def test_one_line_per_key_and_interval() -> None:
    clock = Clock()
    limit = RateLimit(10.0, clock=clock)
    assert [limit.admit("a"), limit.admit("a"), limit.admit("b"), limit.admit("a")] == [0, None, 0, None]
    clock.now += 9.9
    assert limit.admit("a") is None
    clock.now += 0.1
    assert [limit.admit("a"), limit.admit("a"), limit.admit("b")] == [3, None, 0]
    clock.now += 10
    assert [limit.line("a", "text"), limit.line("a", "text")] == ["text (1 more like it were held back)", None]
    clock.now += 100
    assert limit.line("c", "text") == "text"


def test_no_interval_lets_everything_through_and_less_than_none_is_refused() -> None:
    limit = RateLimit(0.0, clock=Clock())
    assert [limit.admit("a") for _ in range(3)] == [0, 0, 0]
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="kv-canary: RateLimit: interval must be at least 0 seconds, got"):
            RateLimit(wrong)


def test_keys_are_forgotten_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ratelimit, "MOST_KEYS", 2)
    clock = Clock()
    limit = RateLimit(10.0, clock=clock)
    limit.admit("a")
    limit.admit("b")
    clock.now += 10
    limit.admit("a")
    limit.admit("c")
    # `b` was let through longest ago and went; the others are still held.
    assert [limit.admit("a"), limit.admit("c"), limit.admit("b")] == [None, None, 0]


def test_reports_come_before_their_step_whose_facts_count_them() -> None:
    listener = Listener()
    engine = listened([listener], max_reports_per_step=1)
    engine.add("a", 30)
    engine.step((engine.requests["a"], 6))
    for position in (1, 2, 3):
        flip(engine, "a", position)
    engine.step((engine.requests["a"], 1))
    engine.manager.flush()
    assert [kind for kind, _ in listener.told] == ["forward", "step", "forward", "report", "step"]
    first, second = listener.steps()
    assert (first.violations, sum(first.found.values())) == (0, 0)
    assert (second.step, second.violations, second.found["full", "K"]) == (2, 3, 3)
    assert {key for key, count in second.found.items() if count} == {("full", "K")}
    assert (second.relied_on, second.verified, second.requests) == (6, 6, 1)


def test_facts_say_status_and_stride_and_discarded() -> None:
    listener = Listener()
    engine = listened([listener], stride=4)
    a = engine.add("a", 60)
    engine.step((a, 40))
    flip(engine, "a", 39)
    batch = engine.batch((a, 1))
    thrown = kc.ForwardRequest(**{**vars(batch.requests[0]), "discarded": lambda: True})
    engine.run(kc.ForwardBatch(**{**vars(batch), "requests": [thrown]}))
    engine.manager.flush()
    assert [s.stride for s in listener.steps()] == [4, 4]
    assert [s.discarded for s in listener.steps()] == [0, 1]
    assert [s.violations for s in listener.steps()] == [0, 0]
    assert [s.watching for s in listener.steps()] == ["complete", "complete"]
    assert engine.manager.summary().discarded == 1


def test_what_a_sweep_finds_is_counted_under_the_group_that_its_report_names() -> None:
    listener = Listener()
    engine = make_engine(sweep_every=1)
    engine.manager.accounts.join(listener)
    live(engine, steps=3, prompt=40)
    for _ in range(2):
        engine.run(Action(kind="finish"))
    # What the cache keeps, and no request uses.
    cached = next(c for c in engine.cached_slots() if c.group == "lut")
    source = engine.groups[1].config.k_source
    layer, start, _ = source.coverage(int(cached.positions[-1]))
    source.layers[layer][int(cached.slots[-1]), start] ^= 1
    engine.manager.scrub()
    (report,) = engine.manager.reports
    assert (report.tag, report.group, report.reasons) == ("SWEEP_SWA", "lut", ("K",))
    live(engine, steps=1)
    engine.manager.flush()
    assert listener.steps()[-1].found["lut", "K"] == engine.manager.summary().violations > 0


def test_close_comes_once_and_whatever_an_observer_does(caplog: pytest.LogCaptureFixture) -> None:
    class Sour(Observer):
        def close(self) -> None:
            raise OSError("the disk is full")

    listener = Listener()
    engine = listened([Sour(), listener])
    engine.manager.close()
    engine.manager.close()
    assert listener.told == [("close", None)]
    assert caplog.text.count("Sour.close failed") == 1
    assert list(engine.manager.summary().failures.values()) == [1]
    # Closed is not deaf: what a last step found is still told.
    a = engine.add("a", 8)
    engine.step((a, 4))
    engine.manager.flush()
    assert [s.step for s in listener.steps()] == [1]


def fewer_launches(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    """Let the engine's forward claim one launch of TAIL more than it makes."""
    true = type(engine.forward).launches.func
    monkeypatch.setattr(
        type(engine.forward), "launches", property(lambda self: {**true(self), kc.Tag.TAIL_FULL: 3}), raising=True
    )


def test_missing_launches_are_an_error_once_and_then_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = full_engine()
    a = engine.add("a", 40)
    engine.step((a, 4))
    fewer_launches(monkeypatch, engine)
    for _ in range(5):
        engine.step((a, 1))
    engine.manager.flush()
    (line,) = lines(caplog, "launches missing")
    assert line.startswith("kv-canary: step 2 went by with launches missing: 1 of TAIL_FULL.")
    assert [r.levelname for r in caplog.records if r.message == line] == ["ERROR"]
    assert engine.manager.summary().watching == "stale"


def test_the_line_about_missing_launches_counts_what_was_held_back(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    check = HealthCheck(limit=RateLimit(10.0, clock=clock), clock=clock)
    for step in range(1, 5):
        check.on_step(facts(step=step, missing={"HEAD_FULL": 1}))
    check.on_step(facts(step=5, missing={"HEAD_SWA": 2}))
    clock.now += 10
    check.on_step(facts(step=6, missing={"HEAD_FULL": 1}))
    first, other, later = lines(caplog, "launches missing")
    assert ("step 1" in first, "2 of HEAD_SWA" in other) == (True, True)
    assert "held back" not in first
    assert later.endswith("(3 more like it were held back)")


def test_a_step_of_unknown_launches_repeats_no_earlier_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Listener()
    engine = listened([listener])
    a = engine.add("a", 40)
    engine.step((a, 4))
    with monkeypatch.context() as patch:
        fewer_launches(patch, engine)
        engine.step((a, 1))
    with pytest.raises(ValueError, match="model"), engine.forward.around(engine.batch((a, 1))):
        raise ValueError("the model failed")
    engine.manager.flush()
    assert [dict(s.missing) for s in listener.steps()] == [{}, {"TAIL_FULL": 1}, {}]
    # What is not known to be better is not called so.
    assert [s.watching for s in listener.steps()] == ["complete", "stale", "stale"]


def test_health_tells_the_last_drained_step_and_how_long_ago() -> None:
    clock = Clock()
    check = HealthCheck(clock=clock)
    assert (check.step, check.age()) == (0, None)
    check.on_step(facts(step=7))
    clock.now += 2.5
    assert (check.step, check.age()) == (7, 2.5)


def test_the_manager_has_its_health_at_hand() -> None:
    engine = full_engine()
    assert (engine.manager.health.step, engine.manager.health.age()) == (0, None)
    a = engine.add("a", 8)
    engine.step((a, 4))
    engine.step((a, 1))
    engine.manager.flush()
    assert engine.manager.health.step == 2
    assert engine.manager.health.age() is not None


def test_an_overflow_says_what_was_left_out(caplog: pytest.LogCaptureFixture) -> None:
    engine = full_engine(verify_capacity=5)
    a = engine.add("a", 40)
    engine.step((a, 8))
    for _ in range(4):
        engine.step((a, 1))
    engine.manager.flush()
    (line,) = lines(caplog, "incomplete")
    assert "group full: the plan of step 2 was incomplete: OVERFLOW: more positions than the plan had room for" in line
    assert line.endswith("Of 8 positions that the step relied on, 5 were verified")
    assert [r.levelname for r in caplog.records if r.message == line] == ["WARNING"]


def test_every_status_bit_has_its_words(caplog: pytest.LogCaptureFixture) -> None:
    warner = OverflowWarner(limit=RateLimit(0.0))
    for bit in kc.Status:
        warner.on_step(facts(statuses=(("full", int(bit)),), relied_on=10, verified=4, stride=3))
    warner.on_step(facts(statuses=(("full", 1), ("swa", 15))))
    found = lines(caplog, "incomplete")
    assert len(found) == len(kc.Status) + 2
    for bit, line in zip(kc.Status, found, strict=False):
        assert f"was incomplete: {bit.name}: " in line
        assert line.endswith("Of 10 positions that the step relied on, 4 were verified, at stride 3")
    assert (
        "group swa: the plan of step 1 was incomplete: OVERFLOW + ROW_RANGE + LENGTH_RANGE + LUT_RANGE: " in found[-1]
    )


def test_an_index_outside_the_lut_is_named(caplog: pytest.LogCaptureFixture) -> None:
    pool, lut = make_pool(name="swa"), torch.arange(60, dtype=torch.int64)
    engine = Engine(
        [
            kc.BufferGroup(name="full", pool=make_pool(name="full")),
            kc.BufferGroup(name="swa", pool=pool, window=6, lut=lut),
        ]
    )
    a = engine.add("a", 40)
    engine.step((a, 10))
    engine.tables["swa"][a.row, 7] = 60
    engine.step((a, 1))
    engine.manager.flush()
    assert "group swa: the plan of step 2 was incomplete: LUT_RANGE" in caplog.text


def test_statistics_come_every_so_many_steps(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kv_canary"):
        engine = full_engine(stats_every=3)
        a = engine.add("a", 40)
        engine.step((a, 6))
        flip(engine, "a", 2)
        for _ in range(7):
            engine.step((a, 1))
        engine.manager.flush()
    first, second = lines(caplog, "statistics")
    assert first == (
        "kv-canary: statistics: 3 steps up to 3: requests=3 relied_on=13 verified=13 (100.00%) violations=2 stride=1"
        " watching=complete entries: HEAD_FULL=13 TAIL_FULL=21"
    )
    assert second == (
        "kv-canary: statistics: 3 steps up to 6: requests=3 relied_on=27 verified=27 (100.00%) violations=3 stride=1"
        " watching=complete entries: HEAD_FULL=27 TAIL_FULL=30"
    )


def test_statistics_tell_a_coverage_that_is_not_whole(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kv_canary"):
        engine = full_engine(stats_every=2, verify_capacity=4)
        a = engine.add("a", 40)
        engine.step((a, 8))
        engine.step((a, 1))
        engine.manager.flush()
    (line,) = lines(caplog, "statistics")
    assert "relied_on=8 verified=4 (50.00%)" in line
    assert "watching=partial" in line


def test_a_config_without_wishes_has_the_two_that_are_always_there() -> None:
    kinds = [type(o) for o in kc.observers.observers_of(kc.CanaryConfig())]
    assert kinds == [HealthCheck, OverflowWarner]
