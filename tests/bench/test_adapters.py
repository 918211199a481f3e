"""`kv-canary bench adapters`: what it refuses, and which rows a file keeps."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from kv_canary.bench import adapters
from kv_canary.cli import main
from kv_canary.difftest.stress.processes import in_fork


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--engine", "sglang"), "sglang is not installed here"),
        (("--engine", "transformers", "--batch", "drafts"), "drafts are timed with sglang and vllm"),
        (("--engine", "sglang", "--requests", "many"), "must be numbers by commas, got 'many'"),
        ((), "--engine"),
    ],
)
def test_misuse_is_told(arguments: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_here = "drafts" in arguments
    nothing = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: is_here or None))
    monkeypatch.setattr(adapters, "importlib", nothing)
    done = CliRunner().invoke(main, ["bench", "adapters", *arguments])
    assert done.exit_code == 2
    assert says in done.output


def test_other_rows_stay_while_they_are_of_this_code(tmp_path: Path) -> None:
    path, here = tmp_path / "adapters_host.json", {"sources": {"kernels": "1"}}

    def row(engine: str, batch: str = "decode") -> dict[str, Any]:
        return {"engine": engine, "batch": batch, "requests": 64, "caches": "warm"}

    for rows in ([row("sglang"), row("sglang", "churn")], [row("vllm V1")], [row("sglang") | {"host_us": 5}]):
        adapters._keep(path, rows, here)
    assert json.loads(path.read_text())["rows"] == [
        row("sglang", "churn"),
        row("vllm V1"),
        row("sglang") | {"host_us": 5},
    ]
    adapters._keep(path, [row("vllm V1")], {"sources": {"kernels": "2"}})
    told = json.loads(path.read_text())
    assert told["rows"] == [row("vllm V1")]
    assert told["sources"] == {"kernels": "2"}


def test_cold_caches_are_made_before_a_call_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    class Clock:
        def _timed(self, original: Callable[..., Any], *, events: bool) -> Callable[..., Any]:
            def timed(*arguments: Any) -> Any:
                happened.append("timed")
                return original(*arguments)

            return timed

    monkeypatch.setattr(adapters, "EVICTING", 64)
    monkeypatch.setattr(np, "add", lambda *_, out: happened.append(f"evicted {out.nbytes}"))
    assert adapters._cold(Clock)()._timed(len, events=False)("four") == 4
    assert happened == ["evicted 64", "timed"]


@pytest.mark.parametrize("batch", ["decode", "churn"])
def test_the_adapter_for_transformers_is_timed_in_steps_that_are_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: str
) -> None:
    monkeypatch.setattr(adapters, "WARM_UP", 4)
    monkeypatch.setattr(adapters, "TIMED", 12)
    row = in_fork(functools.partial(adapters.measure, "transformers", batch, 16, tmp_path), patience=60)
    assert "error" not in row
    assert (row["engine"].split()[0], row["batch"], row["requests"]) == ("transformers", batch, 16)
    assert row["p90_us"] >= row["host_us"] > 0
    assert row["mean_us"] > 0
    assert row["tokens"] == 16 if batch == "decode" else 8 < row["tokens"] <= 16
    assert row["repeated"] > 0.8
