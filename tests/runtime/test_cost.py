"""What the canary says of its own cost: by the host's clock, by the device's events, and when it is too much."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

import kv_canary as kc
from kv_canary.commands.trial import measure_cost
from kv_canary.runtime.cost import TIMED_EVERY, CanaryCost, Costs
from kv_canary.runtime.guard import Guard

from .engine import Engine, Request, full_engine, make_pool


def costs(*, host: float, step: float, waits: Callable[[int], bool], on_gpu: bool = True, timing: float = 0.0) -> Costs:
    """Return what 100 steps have cost."""
    found = Costs(0.01, on_gpu=on_gpu)
    for n in range(100):
        found.observe(now=n * step, host=host, waited=waits(n))
    if timing:
        found.add_timing(timing)
    return found


def test_medians_of_steps_are_told_in_microseconds() -> None:
    cost = costs(host=2e-4, step=4e-3, waits=lambda n: False, timing=6e-5).cost
    assert cost is not None
    assert (cost.step_us, cost.host_us, cost.device_us) == pytest.approx((4000, 200, 60))
    assert (cost.device_waits, cost.share) == (False, pytest.approx(0.015))
    assert Costs(0.01, on_gpu=True).cost is None


@pytest.mark.parametrize(
    ("waits", "on_gpu", "told"), [(1.0, True, True), (0.95, True, True), (0.5, True, False), (1.0, False, False)]
)
def test_a_host_that_the_device_waits_for_is_told_of_once(
    waits: float, on_gpu: bool, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    found = costs(host=2e-4, step=4e-3, waits=lambda n: n % 20 < 20 * waits, on_gpu=on_gpu, timing=6e-5)
    found.add_timing(6e-5)
    cost = found.cost
    assert cost is not None
    assert cost.device_waits == told
    lines = [r.getMessage() for r in caplog.records if "waits for the host" in r.getMessage()]
    assert len(lines) == told
    if told:
        assert "200 us of the host's time are 5.0 % of a step of 4000 us, more than overhead_target (1 %)" in lines[0]
        assert cost.share == pytest.approx(0.065)


def test_a_host_that_keeps_to_the_target_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    costs(host=3e-5, step=4e-3, waits=lambda n: True, timing=6e-5)
    assert caplog.records == []


def test_the_guards_clock_counts_what_is_inside_of_any_part_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0
    monkeypatch.setattr("kv_canary.runtime.guard.perf_counter", lambda: now)
    guard = Guard(contains=True)
    with guard.contain("outer"):
        with guard.contain("inner"):
            now += 2
        with guard.contain("failing"):
            raise RuntimeError
    now += 5
    with guard.contain("another"):
        now += 1
    assert guard.spent == 3
    assert guard.depth == 0


def test_a_summary_says_what_steps_cost() -> None:
    engine = full_engine()
    a = engine.add("a", 60)
    engine.step((a, 3))
    assert engine.manager.summary().cost is None
    for _ in range(30):
        engine.step((a, 1))
        time.sleep(0.001)
    cost = engine.manager.summary().cost
    assert cost is not None
    assert 0 < cost.host_us < cost.step_us - 900
    assert cost.device_us is None
    assert engine.manager.summary().as_dict()["cost"]["host_us"] == cost.host_us


def test_two_summaries_together_cost_what_the_larger_does() -> None:
    one = kc.CanarySummary(watching="complete", cost=CanaryCost(step_us=10, host_us=3, device_us=1))
    other = kc.CanarySummary(watching="complete", cost=CanaryCost(step_us=8, host_us=4, device_waits=True))
    both = CanaryCost(step_us=10, host_us=4, device_us=1, device_waits=True)
    assert (one + other).cost == both
    assert (one + kc.CanarySummary(watching="complete")).cost == one.cost
    assert (kc.CanarySummary(watching="complete") + kc.CanarySummary(watching="complete")).cost is None


def test_the_budget_takes_the_fixed_part_from_what_was_timed() -> None:
    from kv_canary.runtime.budget import StepCost

    engine = full_engine()
    budget = engine.manager.budget
    budget.chooses, budget.cost = True, StepCost(fixed=0.0, entry=1e-8)
    for n in range(40):
        budget.observe(relied_on=10_000, now=0.01 * n)
    # 100 us of 10 ms are just the target.
    assert budget.stride == 1
    for _ in range(3):
        budget.add_timing(1.9e-4, entries=10_000)
    for n in range(40, 80):
        budget.observe(relied_on=10_000, now=0.01 * n)
    assert budget.stride == 16


def test_a_trial_says_what_a_step_costs_here() -> None:
    cost = measure_cost()
    assert cost is not None
    # On a CPU all of a step is the canary's. Both are medians, by clocks that are read at different moments.
    assert 0 < cost.host_us < 1.5 * cost.step_us


def test_a_step_in_which_nothing_was_timed_keeps_no_other_timing_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an engine's graph has HEAD and TAIL in it, the host sees none of their launches."""
    monkeypatch.setattr("kv_canary.runtime.cost.torch.Event", _Event)
    engine = Engine([kc.BufferGroup(name="full", pool=make_pool(400))], kc.CanaryConfig(backend="reference"))
    steps = engine.manager._steps
    # As on a GPU.
    monkeypatch.setattr(steps, "_times", True)
    tokens = [engine.add(f"r{i}", 120) for i in range(3)]
    launch = type(engine.forward)._timed
    monkeypatch.setattr(type(engine.forward), "_timed", lambda forward, launch: launch())
    _decode(engine, tokens, 3 * TIMED_EVERY)
    assert not steps._timings
    monkeypatch.setattr(type(engine.forward), "_timed", launch)
    _decode(engine, tokens, 2 * TIMED_EVERY)
    cost = engine.manager.summary().cost
    assert cost is not None
    assert cost.device_us == pytest.approx(200)


def test_events_that_have_timed_a_step_time_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[_Event] = []

    class Counted(_Event):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr("kv_canary.runtime.cost.torch.Event", Counted)
    engine = Engine([kc.BufferGroup(name="full", pool=make_pool(400))], kc.CanaryConfig(backend="reference"))
    monkeypatch.setattr(engine.manager._steps, "_times", True)
    tokens = [engine.add(f"r{i}", 120) for i in range(3)]
    _decode(engine, tokens, TIMED_EVERY + 1)
    first = len(made)
    assert first > 0
    _decode(engine, tokens, 4 * TIMED_EVERY)
    assert len(made) == first
    cost = engine.manager.summary().cost
    assert cost is not None
    assert cost.device_us == pytest.approx(200)


def _decode(engine: Engine, requests: list[Request], steps: int) -> None:
    """Let each of the requests decode its share of so many steps."""
    for step in range(steps):
        engine.step((requests[step % len(requests)], 1))


class _Event:
    """An event of a device on which what lies between two of them takes 100 us."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: _Event) -> float:
        return 0.1
