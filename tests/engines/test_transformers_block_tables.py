"""Decode steps through a kernel that finds the slots by itself: they are read off its block table.

The engine takes that path with FlashAttention on a GPU only. Here the canary is shown the block table that the engine
would build, and the model runs on the index tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.generation.continuous_batching.model_runner import ModelRunner

import kv_canary

from .clean import Run, run_clean
from .scenarios import PAGE, Prompts, make_model, serve

BLOCKS = 12
Alter = Callable[[torch.Tensor], None]


class BlockTables:
    """Shows the canary block tables in decode steps, and the model what it was to get."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shown = 0
        self.alter: Alter = lambda table: None
        self._kept: dict[str, Any] = {}
        run = ModelRunner.compute_batch

        def inner(runner: Any, model: Any, batch_data: dict[str, Any]) -> Any:
            return run(runner, model, self._kept)

        monkeypatch.setattr(ModelRunner, "compute_batch", inner)

    def show(self, processor: Any) -> None:
        runner = processor.model_runner
        watched = runner.compute_batch

        def outer(model: Any, batch_data: dict[str, Any]) -> Any:
            self._kept = batch_data
            requests = processor.inputs_and_outputs.requests_in_batch
            if all(f.query_length == 1 for f in requests):
                batch_data = {**batch_data, "block_table": self._table(processor.cache, requests)}
                batch_data |= {name: [torch.empty(0, dtype=torch.int64)] for name in ("read_index", "write_index")}
                self.shown += 1
            return watched(model, batch_data)

        runner.compute_batch = outer

    def _table(self, cache: Any, requests: list[Any]) -> torch.Tensor:
        # Rows of padding behind the requests', as with CUDA graphs.
        table = torch.full((1, len(requests) + 3, BLOCKS), -1, dtype=torch.int32)
        for i, future in enumerate(requests):
            past = future.state.position_offset - 1
            cache.fill_block_table(future.state.request_id, past, 1, table[:, i])
        self.alter(table)
        return table


def test_block_tables_are_clean_and_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = BlockTables(monkeypatch)

    def scenario(run: Run) -> None:
        prompts = Prompts()
        tables.show(run.server.manager.batch_processor)
        for _ in range(2):
            run.server.run(prompts.of_lengths(3, PAGE, 2 * PAGE + 1, 40), new_tokens=PAGE + 3)

    config = kv_canary.CanaryConfig(backend="reference", check_tokens=True, verify_bytes_at_tail=True)
    run_clean(monkeypatch, "llama", scenario, config=config)
    assert tables.shown > 30


@pytest.mark.parametrize("wrong", ["swapped", "missing", "far"])
def test_a_wrong_block_table_is_found(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    tables = BlockTables(monkeypatch)

    def alter(table: torch.Tensor) -> None:
        if tables.shown == 4:
            first = table[0, 0]
            if wrong == "swapped":
                first[[0, 1]] = first[[1, 0]]
            else:
                first[1] = {"missing": -1, "far": 1 << 20}[wrong]

    tables.alter = alter
    model = make_model("llama")
    canary = kv_canary.install(model, backend="reference", max_reports_per_step=1024)
    with serve(model) as server:
        tables.show(server.manager.batch_processor)
        server.run([Prompts().random(2 * PAGE + 2)], new_tokens=8)
        canary.flush()
        head = [r for r in canary.reports if r.tag == "HEAD_FULL"]
        positions = {r.position for r in head}
    assert positions >= set(range(PAGE, 2 * PAGE))
    expected = {"swapped": "POSITION", "missing": "SLOT_RANGE", "far": "SLOT_RANGE"}[wrong]
    assert all(expected in r.reasons for r in head if r.position in range(PAGE, 2 * PAGE))
