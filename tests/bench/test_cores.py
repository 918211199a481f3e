"""Measurements beside each other on one host have cores of their own."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from kv_canary.bench.serving import cores


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
