"""Reading slot records."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Records(NamedTuple):
    """The words of some slots' records, int64 [n] each."""

    identity: torch.Tensor
    chain: torch.Tensor
    kv: torch.Tensor
    writer: torch.Tensor

    @property
    def written(self) -> torch.Tensor:
        """Whether each was ever written: all zero means never."""
        return (self.identity | self.chain | self.kv | self.writer) != 0


def load_records(records: torch.Tensor, slots: torch.Tensor, readable: torch.Tensor) -> Records:
    """Return the record of each of `slots`, zeros where bool [n] `readable` is not set."""
    if not len(records):
        return Records(*[torch.zeros_like(slots)] * 4)
    words = records.index_select(0, torch.where(readable, slots, 0))
    return Records(*[torch.where(readable, word, 0) for word in words.unbind(dim=1)])
