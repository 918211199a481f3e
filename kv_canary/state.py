"""What the canary keeps on the device, and what it knows on the host about each row's tail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kv_canary import ops
from kv_canary.constants import ANCHOR, Tag
from kv_canary.specs.structures import ViolationLog

if TYPE_CHECKING:
    from kv_canary.forward import ForwardRequest


class CanaryDeviceState:
    """The violation log, the counters, the step number, and each row's tail and tokens.

    Args:
        max_rows: rows, row 0 (padding) included.
        ring_capacity: rows of the violation ring.
        keep_tokens: keep every request's tokens, for TOKEN.
        device: where all of it lives.
    """

    def __init__(self, *, max_rows: int, ring_capacity: int, keep_tokens: bool, device: torch.device) -> None:
        self.device = device
        self.violations = ViolationLog.allocate(ring_cap=ring_capacity, device=device)
        self.counters = torch.zeros(len(Tag), 2, dtype=torch.int64, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.tails = torch.full((max_rows,), ANCHOR, dtype=torch.int64, device=device)
        self.token_pool = torch.zeros(max_rows, 1, dtype=torch.int32, device=device) if keep_tokens else None
        self._status = torch.zeros(1, dtype=torch.int32, device=device)
        # Of each row: whose it is, and how many of that request's tokens the tail has advanced over.
        self._tail_owner = [0] * max_rows
        self._tail_len = [0] * max_rows

    def advance_tails(self, requests: Sequence[ForwardRequest], *, backend: str | None) -> None:
        """Bring the tail, and the tokens, of every request's row up to its prefix, from the request's own tokens.

        A row that changed hands, or whose prefix shrank, restarts from 0.
        """
        rows: list[int] = []
        starts: list[int] = []
        lengths: list[int] = []
        owners: list[int] = []
        flat: list[int] = []
        for r in requests:
            start = self._tail_len[r.row]
            if self._tail_owner[r.row] != r.owner or r.prefix_len < start:
                start = 0
            elif start == r.prefix_len:
                continue
            tokens = r.tokens(start, r.prefix_len)
            if len(tokens) != r.prefix_len - start:
                raise ValueError(
                    f"kv-canary: request {r.request_id}: tokens({start}, {r.prefix_len}) must be "
                    f"{r.prefix_len - start} tokens, got {len(tokens)}"
                )
            rows.append(r.row)
            owners.append(r.owner)
            starts.append(start)
            lengths.append(len(tokens))
            flat.extend(tokens)
        if not rows:
            return
        offsets = [0]
        for n in lengths:
            offsets.append(offsets[-1] + n)
        segments = {
            name: torch.tensor(values, dtype=torch.int64).to(self.device, non_blocking=True)
            for name, values in (("flat", flat), ("offsets", offsets), ("rows", rows), ("starts", starts))
        }
        ops.chain_tails(**segments, tails=self.tails, status=self._status, backend=backend)
        if self.token_pool is not None:
            longest = max(start + n for start, n in zip(starts, lengths, strict=True))
            if longest > self.token_pool.shape[1]:
                self.token_pool = widen(self.token_pool, longest)
            ops.scatter_token_ids(**segments, pool=self.token_pool, status=self._status, backend=backend)
        # Only now, so that a history that could not be had leaves every row as it was.
        for row, owner, start, n in zip(rows, owners, starts, lengths, strict=True):
            self._tail_owner[row], self._tail_len[row] = owner, start + n


def widen(table: torch.Tensor, length: int) -> torch.Tensor:
    """Return int32 [rows, length or more] that begins with `table`; grows by doubling, so it is seldom called."""
    width = max(length, 2 * table.shape[1], 256)
    wider = torch.zeros(table.shape[0], width, dtype=table.dtype, device=table.device)
    wider[:, : table.shape[1]] = table
    return wider
