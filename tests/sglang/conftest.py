"""SGLang's tests are collected where SGLang is, which is not the usual environment (make test-sglang)."""

from __future__ import annotations

import importlib.util
import logging
import os
from typing import Any

import pytest

IS_HERE = importlib.util.find_spec("sglang") is not None

collect_ignore = ["environment"]
if not IS_HERE:
    collect_ignore_glob = ["*"]

# One process plays all scenes of these.
OF_ONE_WORKER = ("test_pd.py",)

# SGLang reads it when it is imported.
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-minutes", default="0.3", help="how long the canary is made to fail in SGLang's engine")
    parser.addoption("--chaos-result", help="file to write what came of it to")
    parser.addoption("--chaos-seed", default="1", help="the first life's seed; others count on")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let any worker have any test, but those of a file that share what is costly, which are one worker's."""
    # `--dist loadgroup` does nothing with pytest 9.2, whose tests do not take the names that xdist 3.8 gives them.
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Grouped(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return file if file.endswith(OF_ONE_WORKER) else nodeid

    return Grouped(config, log)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Take back what the other tests want of Triton: SGLang's processes run as they do outside of tests."""
    if not IS_HERE:
        # This file is loaded with the other tests, too.
        return
    os.environ.pop("TRITON_INTERPRET", None)
    # It warns of every model that it cannot import, and of the small pools.
    logging.getLogger("sglang").setLevel(logging.ERROR)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny Llama."""
    from kv_canary.demo.models import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def mellum(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny Mellum, whose sliding layers have a pool of their own."""
    from kv_canary.demo.models import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("models") / "mellum", "mellum")
