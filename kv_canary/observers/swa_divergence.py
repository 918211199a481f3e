"""Differences between windowed groups and full ones: evidence that a run really exercised sliding-window attention.

Every so many steps a line `kv_canary_swa_divergence={json}` goes into the log, at level INFO. A test of an engine reads
it back: a run in which windowed layers shared the full layers' slots, or in which no request outgrew the window, says
nothing about sliding-window attention, however silent the canary was.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kv_canary.constants import Tag
from kv_canary.observers.base import Observer, StepFacts
from kv_canary.output import logger

if TYPE_CHECKING:
    from kv_canary.runtime.batch import ForwardBatch, VerifiedEntries, WatchedForward
    from kv_canary.runtime.pools import BufferGroup

_KEY = "kv_canary_swa_divergence="


@dataclass(frozen=True, kw_only=True)
class SwaDivergence:
    """Differences between one forward's windowed groups and its full group.

    Args:
        forward_ct: number of the step that the forward is of.
        verify_full: entries that full groups' HEAD and TAIL have taken so far.
        verify_swa: those of windowed groups.
        swa_full_idx_divergence: positions that the forward's windowed groups verified in another slot than the one that
            the full group's table names for the same row and position; 0 where the forward has no full group.
        swa_out_of_window_tokens: cached positions that lie before a windowed group's window and that the full group
            relies on, over the forward's requests and windowed groups; 0 where it has no full group.
    """

    forward_ct: int
    verify_full: int
    verify_swa: int
    swa_full_idx_divergence: int
    swa_out_of_window_tokens: int

    @property
    def all_signals(self) -> bool:
        """Whether full and windowed groups were verified, their slots differed, and a request outgrew the window."""
        return all(value > 0 for name, value in asdict(self).items() if name != "forward_ct")


def format_line(facts: SwaDivergence) -> str:
    """Return the line of the log, without the logger's own prefix."""
    return _KEY + json.dumps(asdict(facts))


def parse_line(line: str) -> SwaDivergence | None:
    """Return what a line of a log says, whatever stands before and behind; None where it says nothing of the kind."""
    _, key, rest = line.partition(_KEY)
    if not key:
        return None
    try:
        facts, _ = json.JSONDecoder().raw_decode(rest)
    except ValueError:
        return None
    names = SwaDivergence.__dataclass_fields__
    if not isinstance(facts, dict) or set(facts) != set(names) or any(type(v) is not int for v in facts.values()):
        return None
    return SwaDivergence(**facts)


def find_last(text: str) -> SwaDivergence | None:
    """Return what the last such line of a log says, or None where it has none."""
    return next(_found(text), None)


def assert_all_signals(run: Callable[[], str], *, attempts: int = 3) -> SwaDivergence:
    """Run an engine until one forward shows every sign of sliding-window attention at once, and return it.

    Args:
        run: runs the engine with `swa_divergence_every` on, and returns its log, level INFO included.
        attempts: how often; which requests meet in a forward may be left to chance.

    Raises:
        AssertionError: no forward did; it says what the last line was.
    """
    last = None
    for _ in range(attempts):
        text = run()
        for facts in _found(text):
            if facts.all_signals:
                return facts
        last = find_last(text)
    seen = "no line at all" if last is None else format_line(last)
    raise AssertionError(f"kv-canary: swa_divergence: all signals must be above 0 in one line, got {seen}")


class SwaDivergenceLogger(Observer):
    """Logs the divergence of every forward that has windowed groups, in every so many-th step.

    Args:
        every: steps from one to the next.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._pending: deque[_Pending] = deque()

    def on_forward(self, forward: WatchedForward, batch: ForwardBatch) -> None:
        self._log_arrived()
        windowed = [g for g in forward.groups if g.window]
        context = forward.context
        if not windowed or context.step % self._every:
            return
        full = next((g for g in forward.groups if not g.window), None)
        divergence = torch.zeros(1, dtype=torch.int64, device=context.device)
        beyond = 0
        if full is not None:
            for group in windowed:
                divergence += _divergence(forward.verified(group.name), full, batch)
                beyond += sum(max(0, r.prefix_len - group.window) for r in batch.requests)
        words = torch.cat((divergence, context.state.counters[:, 1]))
        self._pending.append(_send(words, forward_ct=context.step, beyond=beyond))
        self._log_arrived()

    def on_step(self, facts: StepFacts) -> None:
        self._log_arrived()

    def close(self) -> None:
        for pending in self._pending:
            if pending.event is not None:
                pending.event.synchronize()
        self._log_arrived()

    def _log_arrived(self) -> None:
        while self._pending and (self._pending[0].event is None or self._pending[0].event.query()):
            pending = self._pending.popleft()
            divergence, *entries = pending.words.tolist()
            facts = SwaDivergence(
                forward_ct=pending.forward_ct,
                verify_full=entries[Tag.HEAD_FULL] + entries[Tag.TAIL_FULL],
                verify_swa=entries[Tag.HEAD_SWA] + entries[Tag.TAIL_SWA],
                swa_full_idx_divergence=divergence,
                swa_out_of_window_tokens=pending.beyond,
            )
            logger.info("%s", format_line(facts))


@dataclass(frozen=True, kw_only=True)
class _Pending:
    """Words on their way to the host; they are there once the event has happened."""

    forward_ct: int
    beyond: int
    words: torch.Tensor
    event: torch.cuda.Event | None


def _send(words: torch.Tensor, *, forward_ct: int, beyond: int) -> _Pending:
    """Copy `words` to the host behind what is launched, without waiting for the device."""
    if not words.is_cuda:
        return _Pending(forward_ct=forward_ct, beyond=beyond, words=words, event=None)
    host = torch.empty(words.shape, dtype=words.dtype, device="cpu", pin_memory=True)
    host.copy_(words, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(words.device))
    return _Pending(forward_ct=forward_ct, beyond=beyond, words=host, event=event)


def _divergence(verified: VerifiedEntries, full: BufferGroup, batch: ForwardBatch) -> torch.Tensor:
    """Return, on the device, how many of the slots are not those that the table of `full` names; int64 [1]."""
    table, requests = batch.tables[full.name], batch.arrays
    rows, length = table.shape[0], table.shape[1] * full.page_size
    row, position = verified.rows, verified.positions
    if requests.table_rows is not None:
        places = np.zeros(1 + int(requests.rows.max(initial=0)), np.int64)
        places[requests.rows] = requests.table_rows
        row = torch.from_numpy(places).to(row.device)[row.clamp(0, len(places) - 1)]
    # What is not valid is arbitrary, and the table may be shorter than a windowed group's.
    inside = (row >= 0) & (row < rows) & (position >= 0) & (position < length)
    named = full.slots_named(table, row.clamp(0, rows - 1), position.clamp(0, length - 1))
    differs = ~inside | (named != verified.slots)
    return (verified.valid & differs).sum().view(1)


def _found(text: str) -> Iterator[SwaDivergence]:
    """Yield what the lines of a log say, the last one first."""
    for line in reversed(text.splitlines()):
        facts = parse_line(line)
        if facts is not None:
            yield facts
