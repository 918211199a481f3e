"""The tokens that SGLang's target has chosen, some of them drafts: on their way to the host, and there, row by row."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from kv_canary.runtime.composition import Composition, Int64s, Newest

# Steps whose tokens have not been put into rows: those before the last of them have arrived for certain.
_MOST_WAITING = 8


class Chosen:
    """The tokens that the target has chosen in one step, on their way to the host.

    Args:
        tokens: int [requests x most], on the device; copied at once, behind what has been launched.
        counts: int [requests] of them, likewise; None: all.
    """

    def __init__(self, tokens: torch.Tensor, counts: torch.Tensor | None) -> None:
        self._tokens = _to_host(tokens)
        self._counts = None if counts is None else _to_host(counts)
        self._copied: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> None:
        """Wait for the tokens, if they are not there yet."""
        if self._copied is not None:
            self._copied.synchronize()

    def of(self, number: int, requests: int) -> list[int]:
        """Return the tokens of the request with this number among so many; waits for them."""
        self.wait()
        mine: list[int] = self._tokens.view(requests, -1)[number].tolist()
        return mine if self._counts is None else mine[: int(self._counts[number])]

    def all(self, requests: int) -> tuple[Int64s, Int64s]:
        """Return the tokens of all requests, int64 [requests, most], and how many of each count; waits for them."""
        self.wait()
        tokens: Int64s = self._tokens.view(requests, -1).numpy().astype(np.int64)
        if self._counts is None:
            return tokens, np.full(requests, tokens.shape[1])
        return tokens, self._counts.numpy().astype(np.int64)


class Unread(NamedTuple):
    """Tokens of one request, from its token `start` on, that the scheduler may not have taken in yet."""

    start: int
    number: int
    of: int
    chosen: Chosen

    def read(self) -> list[int]:
        """Return them; waits for them."""
        return self.chosen.of(self.number, self.of)


@dataclass(frozen=True, eq=False, kw_only=True)
class Step:
    """What the target has chosen in one step.

    Args:
        members: SGLang's requests.
        rows, owners: int64 [requests], theirs; row 0 where one has none that is known.
        starts: int64 [requests], the place in its text of the first token that was chosen for each.
        counts: bool [requests], for whom anything was; None: for all.
        chosen: the tokens.

    Attributes:
        ended: rows that were given back since.
    """

    members: Sequence[Any]
    rows: Int64s
    owners: Int64s
    starts: Int64s
    counts: np.ndarray[Any, np.dtype[np.bool_]] | None = None
    chosen: Chosen
    ended: list[int] = field(default_factory=list)

    @cached_property
    def _numbers(self) -> dict[int, int]:
        return {id(member): number for number, member in enumerate(self.members)}

    def of(self, req: Any) -> Unread | None:
        """Return what was chosen for a request; None: nothing."""
        number = self._numbers.get(id(req))
        if number is None or (self.counts is not None and not self.counts[number]):
            return None
        return Unread(int(self.starts[number]), number, len(self.members), self.chosen)


class ChosenTokens:
    """The newest tokens of every row, by what the target has chosen, and what the scheduler may not have taken in yet.

    Args:
        max_rows: of SGLang's table.
    """

    def __init__(self, max_rows: int) -> None:
        # The scheduler has taken in what was chosen before.
        self._steps: deque[Step] = deque(maxlen=2)
        self._waiting: list[Step] = []
        self._owners, self._base, self._first, self._end = (np.zeros(max_rows, np.int64) for _ in range(4))
        self._tokens = np.zeros((max_rows, 2), np.int64)

    def add(self, step: Step) -> None:
        """Take in what is chosen in a step, without waiting for it."""
        if step.counts is not None and not step.counts.any():
            # Of prompts that go on: nobody asks for it.
            return
        self._steps.append(step)
        self._waiting.append(step)
        if len(self._waiting) > _MOST_WAITING:
            self._put(self._waiting.pop(0))

    def unread(self, req: Any) -> list[Unread]:
        """Return what was chosen for a request that the scheduler may not have taken in yet, in order."""
        found: list[Unread] = []
        for step in reversed(self._steps):
            mine = step.of(req)
            # What was chosen in the place of these counts no more: the request was put off before it was taken in.
            if mine is not None and (not found or mine.start < found[-1].start):
                found.append(mine)
        return found[::-1]

    def row_ended(self, row: int) -> None:
        """Take in that a request has given its row back: if it comes again, its text may be another one."""
        self._owners[row] = 0
        for step in self._waiting:
            step.ended.append(row)

    def newest(self, composition: Composition) -> Newest:
        """Return the newest tokens of requests; waits for all that was chosen. Of whom nothing is known, none."""
        self._put_all()
        rows = composition.rows
        mine = self._owners[rows] == composition.owners
        return Newest(self._base[rows], self._first[rows], np.where(mine, self._end[rows], 0), self._tokens[rows])

    def settle(self) -> None:
        """Keep no request: the scheduler has taken in all that was chosen."""
        self._put_all()
        self._steps.clear()

    def _put_all(self) -> None:
        for step in self._waiting:
            self._put(step)
        self._waiting.clear()

    def _put(self, step: Step) -> None:
        """Put what was chosen in a step into the requests' rows."""
        tokens, counts = step.chosen.all(len(step.members))
        rows, owners, starts = step.rows, step.owners, step.starts
        is_in = (rows > 0) & (counts > 0)
        if step.counts is not None:
            is_in &= step.counts
        if step.ended:
            is_in &= ~np.isin(rows, step.ended)
        if not is_in.all():
            rows, owners, starts, tokens, counts = (x[is_in] for x in (rows, owners, starts, tokens, counts))
        width = tokens.shape[1] + 1
        if width > self._tokens.shape[1]:
            wider = np.zeros((len(self._tokens), width), np.int64)
            wider[:, : self._tokens.shape[1]] = self._tokens
            self._tokens = wider
        # The one before them, on which the target has gone on.
        before = starts - 1
        goes_on = (self._owners[rows] == owners) & (self._first[rows] <= before) & (before < self._end[rows])
        at = np.where(goes_on, before - self._base[rows], 0)
        self._tokens[rows, 0] = self._tokens[rows, at]
        self._tokens[rows, 1:width] = tokens
        self._owners[rows], self._base[rows] = owners, before
        self._first[rows], self._end[rows] = np.where(goes_on, before, starts), starts + counts


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)
