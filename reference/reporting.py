"""Appending rows to the violation log."""

from __future__ import annotations

import torch

from kv_canary.constants import VIOLATION_WORDS
from kv_canary.specs.structures import ViolationLog


def report(log: ViolationLog, chosen: torch.Tensor, words: dict[int, torch.Tensor | int]) -> None:
    """Append one row per entry of bool [n] `chosen`; word w of entry i is `words[w][i]`, words not named are 0."""
    rows = torch.zeros(len(chosen), VIOLATION_WORDS, dtype=torch.int64, device=chosen.device)
    for word, values in words.items():
        rows[:, word] = values
    rows = rows[chosen]
    index = log.count + torch.arange(len(rows), device=rows.device)
    fits = (index >= 0) & (index < len(log.ring))
    log.ring[index[fits]] = rows[fits]
    log.count.add_(len(rows))
