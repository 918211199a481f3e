"""Options and set-up for every test."""

from __future__ import annotations

import os

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
    settings.register_profile(
        "kv-canary",
        max_examples=config.getoption("--examples"),
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
    settings.load_profile("kv-canary")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device that Triton runs on in this session."""
    return torch.device(request.config.getoption("--device"))
