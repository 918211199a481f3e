"""The measurement of what a step costs, with a device that is made up: it leaves the engine's random numbers alone."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import kv_canary as kc
from kv_canary.runtime import calibration
from kv_canary.runtime.budget import Budget
from kv_canary.runtime.context import CanaryContext

from .engine import make_pool

LIMITS = kc.CanaryLimits(max_rows=4, max_requests=4, max_tokens=8, max_len=64)


class _Event:
    """An event of a device where everything takes a millisecond."""

    def __init__(self, **_: Any) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, _: _Event) -> float:
        return 1.0


class _Stream:
    """A stream of a device that is never behind."""

    def __init__(self, *_: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is measured find a device."""
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", _Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(calibration, "capture_graph", lambda launch: launch)
    monkeypatch.setattr(calibration, "_MANY", 1 << 11)


@pytest.mark.usefixtures("device")
def test_what_is_sampled_behind_it_is_what_would_have_been() -> None:
    group = kc.BufferGroup(name="full", pool=make_pool(64))
    context = CanaryContext([group], limits=LIMITS, config=kc.CanaryConfig(backend="reference"))
    torch.manual_seed(7)
    expected = torch.rand(4)
    torch.manual_seed(7)
    cost = calibration.measure_cost(context)
    assert torch.equal(torch.rand(4), expected)
    assert cost.fixed > 0


@pytest.mark.parametrize(("mode", "measured"), [("off", 0), ("log", 1)])
def test_a_canary_that_is_off_measures_nothing(mode: Any, measured: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[CanaryContext] = []

    def measure(context: CanaryContext) -> None:
        calls.append(context)

    monkeypatch.setattr("kv_canary.runtime.manager.measure_cost", measure)
    monkeypatch.setattr(Budget, "__init__", _choosing(Budget.__init__))
    group = kc.BufferGroup(name="full", pool=make_pool(64))
    kc.CanaryManager([group], limits=LIMITS, config=kc.CanaryConfig(mode=mode, backend="reference"))
    assert len(calls) == measured


def _choosing(init: Any) -> Any:
    """Return a budget's beginning on a GPU."""

    def begin(budget: Budget, *args: Any, **kwargs: Any) -> None:
        init(budget, *args, **kwargs)
        budget.chooses = True

    return begin
