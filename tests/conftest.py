"""Options and set-up for every test."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where Triton runs: cpu (its interpreter) or cuda")
    parser.addoption("--examples", type=int, default=200, help="generated cases per op")


def pytest_configure(config: pytest.Config) -> None:
    # Triton decides when a kernel is decorated, so this comes before any import of one.
    if config.getoption("--device") == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        torch.set_num_threads(1)
    # What collecting imports stays, so that there is no garbage to look for meanwhile.
    gc.disable()
    settings.register_profile(
        "kv-canary",
        max_examples=config.getoption("--examples"),
        deadline=None,
        print_blob=True,
        # The same cases at every run of CI, so that a change is judged by its own merits; fuzzing looks further.
        derandomize="CI" in os.environ,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
    settings.load_profile("kv-canary")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as long what `every_day` does not name."""
    unseen: dict[str, set[str]] = {}
    for item in items:
        marker = item.get_closest_marker("every_day")
        if marker is not None:
            parameters = item.callspec.id  # type: ignore[attr-defined]
            unseen.setdefault(item.nodeid.split("[")[0], set(marker.args)).discard(parameters)
            if parameters not in marker.args:
                item.add_marker(pytest.mark.long)
    wrong = {test: ids for test, ids in unseen.items() if ids}
    if wrong and not any("[" in argument for argument in config.args):
        raise pytest.UsageError(f"every_day names parameters that are not there: {wrong}")


def pytest_collection_finish() -> None:
    """Let the garbage collector leave alone what is there for good, which are some million objects of libraries."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device that Triton runs on in this session."""
    return torch.device(request.config.getoption("--device"))


class DrainedLog:
    """pytest's `caplog`, which waits for the canary's output thread before it is read."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def __getattr__(self, name: str) -> Any:
        from kv_canary import output

        if not output.drain(10.0):
            raise RuntimeError("the output thread has not come to an end")
        return getattr(self._caplog, name)


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> DrainedLog:
    """What was logged, also by the canary's output thread, and by nothing that an earlier test has left to it."""
    drained = DrainedLog(caplog)
    drained.clear()
    return drained


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> None:
    """Make Triton's interpreter quicker, where Triton is interpreted."""
    from kv_canary.backends import interpreting

    if interpreting() and importlib.util.find_spec("triton") is not None:
        from kv_canary.difftest.interpreter import quicken

        quicken()


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    """Forget after every test what it registered."""
    from kv_canary import backends, ops, specs
    from kv_canary.difftest import strategies

    tables: list[dict[Any, Any]] = [specs._REGISTERED, backends._implementations, ops._OPS, strategies._REGISTERED]
    before = [dict(table) for table in tables]
    yield
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.update(content)
