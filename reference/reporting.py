"""Appending rows to the violation log."""

from __future__ import annotations

import torch

from kv_canary.specs.structures import ViolationLog
from kv_canary.specs.violation_row import ViolationRow


def report(log: ViolationLog, chosen: torch.Tensor, **words: torch.Tensor | int) -> None:
    """Append a `ViolationRow` for each entry of bool [n] `chosen`; words that are not named are 0.

    A word is a number, or int64 of shape [n], or of shape [1] where it is the same for all.
    """
    index = chosen.nonzero()[:, 0]
    if not len(index):
        return
    rows = torch.zeros(len(index), len(ViolationRow._fields), dtype=torch.int64, device=chosen.device)
    for name, values in words.items():
        word = ViolationRow._fields.index(name)
        rows[:, word] = torch.as_tensor(values, device=chosen.device).expand(len(chosen)).index_select(0, index)
    place = log.count + torch.arange(len(rows), device=rows.device)
    fits = (place >= 0) & (place < len(log.ring))
    log.ring[place[fits]] = rows[fits]
    log.count.add_(len(rows))
