"""vLLM's tests are collected where vLLM is, which is not the usual environment (make test-vllm)."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable

import pytest

IS_HERE = importlib.util.find_spec("vllm") is not None

collect_ignore = ["environment"]
if not IS_HERE:
    collect_ignore_glob = ["*"]


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Set what vLLM reads when it is imported."""
    if not IS_HERE:
        # This file is loaded with the other tests, too.
        return
    from kv_canary.difftest.stress.vllm.engine import ONE_THREAD, prepare

    os.environ.update(ONE_THREAD)
    prepare()
    import torch

    torch.set_num_threads(1)
    logging.getLogger("vllm").setLevel(logging.ERROR)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Returns the folder of a tiny model, by its kind."""
    from kv_canary.difftest.stress.vllm.engine import save_model

    folder = tmp_path_factory.mktemp("models")
    return lambda kind: save_model(folder / kind, kind)
