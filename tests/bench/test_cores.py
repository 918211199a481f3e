"""Measurements beside each other on one host have cores of their own."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, NoReturn

import pytest

from kv_canary.bench.serving import cores, run
from kv_canary.bench.vllm import engines


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let there be ten cores, one of which is not this process's, and locks of the test's own."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 5, 6, 7, 8, 9})
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))


def test_another_measurement_has_other_cores() -> None:
    with cores.taken(4) as first, cores.taken(4) as second:
        assert (first, second) == ((6, 7, 8, 9), (1, 2, 3, 5))
    with cores.taken(4) as again:
        assert again == first


def test_where_others_have_all_cores_that_is_told() -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(cores.taken(4))
        with pytest.raises(cores.NoneLeftError, match="4 that no other measurement has, got 9, which others"):
            stack.enter_context(cores.taken(4))


def test_cores_of_which_another_one_has_some_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with cores.taken(4):
        # Pinned elsewhere, so that its groups are others.
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 5, 6, 7})
        with cores.taken(3) as its:
            assert its == (1, 2, 3)
    with cores.taken(3) as its:
        assert its == (5, 6, 7)


def test_a_host_of_few_cores_is_used_as_it_is() -> None:
    with cores.taken(9) as all_of_them, cores.taken(9) as too:
        assert all_of_them == too == ()


@pytest.mark.parametrize("engine", ["SGLang", "vLLM"])
def test_the_processes_of_a_measurement_are_given_its_cores(
    engine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[tuple[str, Any]] = []

    class Process:
        """One that is told what it is to do, and then ends."""

        def __init__(self, mode: str, spec: Any, *_: Any) -> None:
            given.append((mode, spec.cores))

        def answer(self, seconds: float) -> NoReturn:
            raise RuntimeError("it has ended")

        def stop(self) -> None:
            """It has ended already."""

    monkeypatch.setattr(run, "Scheduler", Process)
    monkeypatch.setattr(engines, "_Engine", Process)
    modes = ("none", "ours")
    settings = run.Settings(
        models=("tiny",),
        modes=modes,
        decode=((2, 40),),
        prefill=(),
        churn=None,
        tiers=(),
        new=4,
        rounds=1,
        starts=1,
        seconds=10.0,
        device="cpu",
        frozen=False,
        shared=False,
        out=tmp_path,
    )
    made = {
        "SGLang": lambda: run.Measurement("tiny", settings, say=lambda _: None),
        "vLLM": lambda: engines.Engines("tiny", settings, runner="V1", say=lambda _: None),
    }
    # Another measurement has the last four.
    with cores.taken(4):
        measurement = made[engine]()
        measurement.run()
    assert given == [(mode, (1, 2, 3, 5)) for mode in modes]
    assert set(measurement.failed) == set(modes)
