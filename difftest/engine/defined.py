"""Which calls have an outcome that is defined; the others are excluded from generation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch


def is_defined(op: str, arguments: Mapping[str, Any]) -> bool:
    """Whether the call of a built-in op has one outcome only.

    Undefined are: the same slot stored twice in one write; the same destination twice in one move; the same row twice
    in one write, scatter or chain_tails. (Storing a slot twice with equal identity, chain and owner would be defined;
    it is left to the strategy of write.)
    """
    if op == "write":
        return _write_is_defined(arguments)
    if op == "move":
        return _distinct(arguments["dst"].tolist(), below=len(arguments["records"][0]))
    if op == "chain_tails":
        return _distinct(arguments["rows"].tolist(), below=len(arguments["tails"]))
    if op == "scatter_token_ids":
        return _distinct(arguments["rows"].tolist(), below=len(arguments["pool"]))
    return True


def _write_is_defined(arguments: Mapping[str, Any]) -> bool:
    plan, slots = arguments["write_plan"], arguments["out_slots"]
    count = min(max(int(plan.num_requests), 0), len(plan.rows))
    num_rows, num_slots = len(arguments["tails"]), len(arguments["endpoint"].records)
    rows, offsets = plan.rows[:count].tolist(), plan.offsets[: count + 1].tolist()
    stored: list[torch.Tensor] = []
    for r, row in enumerate(rows):
        if 0 < row < num_rows:
            stored.append(slots[max(offsets[r], 0) : max(min(offsets[r + 1], len(slots)), 0)])
    written = torch.cat(stored).tolist() if stored else []
    return _distinct(rows, below=num_rows) and _distinct(written, below=num_slots)


def _distinct(values: Iterable[int], *, below: int) -> bool:
    """Whether no value in (0, below) occurs twice."""
    inside = [v for v in values if 0 < v < below]
    return len(set(inside)) == len(inside)
