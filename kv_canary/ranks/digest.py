"""The digest of a step's requests on this rank: gathered on the device, brought to the host, packed for the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import torch

from kv_canary.ranks.compare import Flag, Word
from kv_canary.runtime.batch import ForwardBatch, WatchedForward
from kv_canary.runtime.composition import ForwardRequest
from kv_canary.runtime.context import CanaryContext
from kv_canary.specs.structures import ViolationLog

# Entries that are counted at once, which bounds the memory that this takes.
_CHUNK = 1 << 18
_CHAIN_WORD = 1
# Words of a violation row.
_ROW, _STEP = 3, 12


@dataclass(kw_only=True)
class Digest:
    """The digest that a step left: lines of words on their way to the host, and the requests that they are of.

    Args:
        step: its number.
        requests: in the order of the lines, by number of the group; with those whose seed the forward wrote over.
        lines: int64 [groups, requests, words] on the host; None where there is nothing to compare.
        event: recorded behind the copy; None where that is over.
        gave_up: whether a forward of the step was given up.
        given_up: how many steps had a forward that was given up, up to this one.
    """

    step: int
    requests: dict[int, Sequence[tuple[ForwardRequest, bool]]] = field(default_factory=dict)
    lines: torch.Tensor | None = None
    event: torch.cuda.Event | None = None
    gave_up: bool = False
    given_up: int = 0

    def pack(self, words: torch.Tensor) -> dict[int, str]:
        """Write the lines into int64 `words`, zeros where there are none; return the requests' names by their keys."""
        words.zero_()
        names: dict[int, str] = {}
        if self.lines is None:
            return names
        if self.event is not None:
            # Recorded some steps ago: it is long over.
            self.event.synchronize()
        words.copy_(self.lines)
        for group, requests in self.requests.items():
            keys = _keys([r.request_id for r, _ in requests])
            names |= {key: r.request_id for key, (r, _) in zip(keys, requests, strict=True)}
            discarded = torch.tensor([r.discarded is not None and r.discarded() for r, _ in requests], dtype=torch.bool)
            gone = torch.tensor([gone for _, gone in requests], dtype=torch.bool)
            lines = words[group, : len(requests)]
            lines[:, Word.KEY] = torch.tensor(keys, dtype=torch.int64)
            lines[:, Word.PREFIX_LEN] = torch.tensor([r.prefix_len for r, _ in requests], dtype=torch.int64)
            lines[:, Word.FLAGS] = discarded * int(Flag.DISCARDED) + gone * int(Flag.SEED_GONE)
            lines[:, Word.SEED_CHAIN] *= ~gone
            lines[:, Word.VIOLATIONS] *= ~discarded
        return names


class Gatherer:
    """Gathers one step's lines in a static buffer on the device, and copies them to the host without waiting."""

    def __init__(self, context: CanaryContext) -> None:
        self._context = context
        device = context.device
        self._buffer = torch.zeros(self.shape, dtype=torch.int64, device=device)
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._sent: torch.cuda.Event | None = None
        self._requests: dict[int, Sequence[tuple[ForwardRequest, bool]]] = {}

    @property
    def shape(self) -> tuple[int, int, int]:
        """Groups, requests of a forward at most, words."""
        return len(self._context.groups), self._context.limits.max_requests, len(Word)

    def see(self, forward: WatchedForward, batch: ForwardBatch) -> None:
        """Gather the lines of a forward that is over; in a step, the first forward of each group counts."""
        groups = [i for i, g in enumerate(self._context.groups) if g in forward.groups and i not in self._requests]
        if forward.inner or not groups:
            return
        if not self._requests:
            if self._sent is not None:
                # The copy of the last ones is over by now; this makes it certain.
                torch.cuda.current_stream(self._context.device).wait_event(self._sent)
            self._buffer.zero_()
        for i in groups:
            self._gather(i, forward, batch.requests)
            group = self._context.groups[i]
            self._requests[i] = [(r, group.ring and r.extend_len > group.window) for r in batch.requests]

    def digest(self, step: int) -> Digest:
        """Send off what was gathered in this step."""
        requests = self._requests
        if self._side is None:
            return Digest(step=step, requests=requests, lines=self._buffer.clone())
        lines = torch.empty(self.shape, dtype=torch.int64, pin_memory=True)
        self._side.wait_stream(torch.cuda.current_stream(self._context.device))
        with torch.cuda.stream(self._side):
            lines.copy_(self._buffer, non_blocking=True)
            self._sent = torch.cuda.Event()
            self._sent.record()
        return Digest(step=step, requests=requests, lines=lines, event=self._sent)

    def forget(self) -> None:
        """Be ready for the next step."""
        self._requests = {}

    def _gather(self, i: int, forward: WatchedForward, requests: Sequence[ForwardRequest]) -> None:
        context, group = self._context, self._context.groups[i]
        writes = forward.write_plans[group.name]
        lines, records = self._buffer[i, : len(requests)], group.pool.records
        rows, seeds = writes.rows[: len(requests)], writes.seed_slots[: len(requests)]
        inside = (seeds > 0) & (seeds < len(records))
        seed = records[torch.where(inside, seeds, 0)]
        # Slot 0 is never written, so that a slot outside reads as nothing.
        lines[:, Word.SEED_SLOT] = seeds
        lines[:, Word.SEED_CHAIN] = seed[:, _CHAIN_WORD]
        lines[:, Word.TAIL] = context.state.tails[group.token_offset].chains[rows]
        room = context.limits.max_rows
        planned = min(sum(r.prefix_len for r in requests), forward.entry_capacities[group.name])
        lines[:, Word.ENTRIES] = _entries(forward, group.name, planned=planned, rows=room)[rows]
        lines[:, Word.VIOLATIONS] = _violations(context.state.violations, context.state.step, rows=room)[rows]


def _entries(forward: WatchedForward, group: str, *, planned: int, rows: int) -> torch.Tensor:
    """Return int64 [rows] how many entries HEAD verified of each row; there were `planned` at most."""
    result = torch.zeros(rows, dtype=torch.int64, device=forward.context.device)
    for first in range(0, planned, _CHUNK):
        part = forward.verified(group, first=first, end=min(first + _CHUNK, planned))
        result.index_add_(0, part.rows.clamp(0, rows - 1), part.valid.to(torch.int64))
    return result


def _violations(log: ViolationLog, step: torch.Tensor, *, rows: int) -> torch.Tensor:
    """Return int64 [rows] how many of the step's violations in the ring are of each row."""
    ring = log.ring
    valid = (torch.arange(len(ring), device=ring.device) < log.count) & (ring[:, _STEP] == step)
    result = torch.zeros(rows, dtype=torch.int64, device=ring.device)
    return result.index_add_(0, ring[:, _ROW].clamp(0, rows - 1), valid.to(torch.int64))


def _keys(names: Sequence[str]) -> list[int]:
    """Return a word for each name, and for its every turn, that is the same on every rank and never 0."""
    seen: Counter[str] = Counter()
    keys = []
    for name in names:
        text = f"{seen[name]} {name}"
        seen[name] += 1
        keys.append(int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True) or 1)
    return keys
