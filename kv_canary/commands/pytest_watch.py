"""The pytest plugin that watches engines in anybody's test suite: `pytest --kv-canary=log`.

pytest finds it where kv-canary is installed. Without the option it does nothing until a test asks for the fixture
`kv_canary`. With it, engines that find kv-canary by themselves (SGLang, vLLM) are watched in the tests and in the
processes that they start, `CanaryConfig.from_env()` and `kv_canary.install(model)` take their mode from it, a test in
which something is found fails with what it was, and the run ends with a verdict, as `kv-canary run` does.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from kv_canary.settings import ENVIRONMENT

MODE, EVENT_LOG = f"{ENVIRONMENT}MODE", f"{ENVIRONMENT}EVENT_LOG"
_FOLDER, _LOG = "kv_canary_folder", "events.jsonl"
_EVER = datetime.fromtimestamp(0, UTC)
_FOLDERS = pytest.StashKey[Any]()
_BEFORE = pytest.StashKey[dict[str, str | None]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kv-canary-watch", "engines watched while they are tested (kv-canary)")
    group.addoption(
        "--kv-canary",
        dest="kv_canary_mode",
        choices=["log", "raise"],
        help="watch engines: log fails the test in which something is found, raise ends the engine's step too",
    )


def pytest_configure(config: pytest.Config) -> None:
    mode = config.getoption("kv_canary_mode")
    if mode is None:
        return
    worker = getattr(config, "workerinput", None)
    if worker is None:
        folder = config.stash[_FOLDERS] = tempfile.TemporaryDirectory(prefix="kv-canary-pytest-")
        path = Path(folder.name, _LOG)
    else:
        path = Path(worker[_FOLDER], f"{worker['workerid']}-{_LOG}")
    config.stash[_BEFORE] = {name: os.environ.get(name) for name in (MODE, EVENT_LOG)}
    os.environ[MODE], os.environ[EVENT_LOG] = mode, str(path)
    config.pluginmanager.register(Watch(path), "kv-canary-watching")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a process of pytest-xdist where what it finds is collected."""
    folder = node.config.stash.get(_FOLDERS, None)
    if folder is not None:
        node.workerinput[_FOLDER] = folder.name


def pytest_unconfigure(config: pytest.Config) -> None:
    for name, value in config.stash.get(_BEFORE, {}).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    folder = config.stash.get(_FOLDERS, None)
    if folder is not None:
        folder.cleanup()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    folder = config.stash.get(_FOLDERS, None)
    if folder is None:
        return
    from kv_canary.commands.run import events, verdict_of

    paths = sorted(Path(folder.name).glob(f"*{_LOG}"))
    told = [event for path in paths for event in events(path, since=_EVER)]
    terminalreporter.section("kv-canary")
    terminalreporter.write_line(str(verdict_of(told, exit_code=0)))


@pytest.fixture
def kv_canary(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Return a function that watches a model of transformers' while the test runs: `canary = kv_canary(model)`.

    It takes what `kv_canary.install` takes. The mode is that of `--kv-canary`, "raise" without it. When the test ends
    the canary is taken away again, and the test fails if it has found something.
    """
    from kv_canary import install

    asked = request.config.getoption("kv_canary_mode")
    found: list[str] = []
    with ExitStack() as stack:

        def watch(model: Any, mode: Any = asked or "raise", **options: Any) -> Any:
            canary: Any = install(model, mode, **options)
            stack.callback(lambda: found.extend(incident.sentence for incident in canary.incidents))
            stack.callback(canary.uninstall)
            return canary

        yield watch
    # Where all tests are watched, that says it.
    if found and asked is None:
        pytest.fail(_told(found), pytrace=False)


class Watch:
    """What is found while tests run.

    Args:
        path: of the event log that canaries of this process, and of those that it starts, write to.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        # What was found since the last test, by an engine that outlives tests, was not found in this one.
        self._incidents()
        yield
        self._fail()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        yield
        self._fail()

    def _fail(self) -> None:
        if found := self._incidents():
            pytest.fail(_told(found), pytrace=False)

    def _incidents(self) -> list[str]:
        """Return the incidents that were told of since the last call."""
        from kv_canary.commands.run import events
        from kv_canary.output import drain

        drain()
        told = [event["sentence"] for event in events(self._path, since=_EVER) if event["event"] == "incident"]
        new, self._read = told[self._read :], len(told)
        return new


def _told(found: list[str]) -> str:
    return "\n".join([f"kv-canary: {len(found)} incident{'s' if len(found) > 1 else ''}", *found])
