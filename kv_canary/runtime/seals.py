"""Seals at work: new tokens are sealed behind their forward, and a scrub goes round the pools and verifies them."""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kv_canary import ops
from kv_canary.constants import Tag
from kv_canary.runtime.context import CanaryContext
from kv_canary.runtime.cost import DeviceTimer
from kv_canary.runtime.host import HostWords, Mailbox, aligned, front
from kv_canary.runtime.pools import BufferGroup, KvPool
from kv_canary.runtime.replays import round_up
from kv_canary.runtime.summary import ScrubFacts

# Steps from one piece of a scrub to the next: launches cost the host more than what they read costs the device.
SCRUB_EVERY = 16
# Bytes a second that a piece is taken to read before one has been timed, on a GPU and on a CPU.
_UNKNOWN_BANDWIDTH, _SLOW_BANDWIDTH = 100e9, 10e6
# Seconds without a step that a piece makes up for, at most.
_LONGEST = 1.0
# Words that `verify_seals` counts in: launches, slots, slots without a seal, bands that differ.
SEAL_COUNTS = 4
# Lists that are looked at by one launch, at most, and words of each that it counts in: all but its launches.
MOST_LISTS, LIST_COUNTS = 64, SEAL_COUNTS - 1
# Slots that one launch which is replayed takes, at most, unless one request may have more; of how many requests, if all
# are as long as they may be.
_MOST_LISTED, _LONGEST_LISTED = 1 << 17, 8
# Pieces of a scrub that are remembered, and damaged slots.
_MOST_PIECES, _MOST_DAMAGED = 4096, 4096
# Pieces of a scrub from one that is timed to the next: the events take the host's time.
_TIMED_EVERY = 16
# As many slots as there are.
_ALL = (1 << 63) - 1


def seal_written(
    context: CanaryContext, group: BufferGroup, slots: torch.Tensor, *, step: torch.Tensor | None = None
) -> None:
    """Seal those of int64 `slots` that have been recorded in a step, of the bytes that lie there now.

    Args:
        context: of the canary.
        group: whose pool it is.
        slots: on the device; others than that step's may be among them.
        step: its number, int64 [1]; None: the present one.
    """
    seals = group.pool.seals
    if seals is None:
        return
    ops.seal(
        slots=slots,
        span=seals.everything,
        endpoint=context.endpoint(group, group.tail_tag, with_bytes=True),
        layers_per_band=seals.layers_per_band,
        seed=seals.seed,
        written_in=context.state.step if step is None else step,
        seals=seals.words,
        backend=context.backend,
    )


def verify_sealed(
    context: CanaryContext,
    group: BufferGroup,
    *,
    slots: torch.Tensor | None,
    span: torch.Tensor | None,
    checked: torch.Tensor,
    tag: Tag | None = None,
    step: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> None:
    """Hold slots of a group's pool against their seals, on the stream of the forwards, between them.

    What is found is reported with the findings of the next step. Nothing is done where none are sealed.

    Args:
        context: of the canary.
        group: whose pool it is.
        slots: int64 [n] on the device; None: those of the pool in order.
        span: int64 [2], see `verify_seals`; None: all of them.
        checked: what it counts in.
        tag: what reports name; None: the group's sweep.
        step: that it is found in, int64 [1]; None: the present one.
        ends, counts: of several lists, see `verify_seals`; None: it is one.
    """
    seals = group.pool.seals
    if seals is None:
        return
    ops.verify_seals(
        slots=slots,
        span=seals.everything if span is None else span,
        endpoint=context.endpoint(group, group.sweep_tag if tag is None else tag, with_bytes=True),
        layers_per_band=seals.layers_per_band,
        seed=seals.seed,
        seals=seals.words,
        step=context.state.step if step is None else step,
        violations=context.state.violations,
        checked=checked,
        ends=ends,
        counts=counts,
        backend=context.backend,
    )


def warm_up(context: CanaryContext) -> None:
    """Verify nothing by every launch that may verify seals, so that all kernels are compiled."""
    nothing = torch.zeros(2, dtype=torch.int64, device=context.device)
    checked = torch.zeros(SEAL_COUNTS, dtype=torch.int64, device=context.device)
    counts = torch.zeros(MOST_LISTS, LIST_COUNTS, dtype=torch.int64, device=context.device)
    ends = torch.zeros(MOST_LISTS, dtype=torch.int64, device=context.device)
    for group in context.groups:
        for slots in (None, nothing):
            verify_sealed(context, group, slots=slots, span=nothing, checked=checked)
        verify_sealed(context, group, slots=nothing, span=nothing, checked=checked, ends=ends, counts=counts)


class ListedSlots:
    """Lists of slots that are held against their seals, by launches that are replayed where the canary has graphs.

    Args:
        context: of the canary.
    """

    def __init__(self, context: CanaryContext) -> None:
        self._context, self._replays = context, context.new_replays()
        # Where launches that are replayed read their slots, and how many of those: int64 [2], see `verify_seals`.
        longest = context.limits.max_len
        words = max(longest, min(_LONGEST_LISTED * longest, _MOST_LISTED)) if self._replays.rounds_up else 0
        self._slots = torch.zeros(words, dtype=torch.int64, device=context.device)
        self._span = torch.zeros(2, dtype=torch.int64, device=context.device)
        self._count = self._span[1:]
        # The span and the ends of several lists.
        self._mailbox = Mailbox(context.device, words=2 + MOST_LISTS)

    @property
    def room(self) -> int:
        """How many slots lists have that are looked at by one launch, at most."""
        return len(self._slots) or _MOST_LISTED

    def verify(
        self,
        group: BufferGroup,
        parts: Sequence[torch.Tensor],
        *,
        checked: torch.Tensor,
        count: torch.Tensor | None = None,
        seen: HostWords | None = None,
    ) -> None:
        """Hold slots of a group's pool against their seals; see `verify_sealed`.

        Args:
            group: whose pool it is.
            parts: the slots, integers on the device, in any number of pieces.
            checked: what it counts in; it stays where it is.
            count: how many of them, from the first on, int64 [1] on the device; None: all.
            seen: where that is brought to; likewise. None: nowhere.
        """
        context, most = self._context, sum(map(len, parts))
        if not most or group.pool.seals is None:
            return
        if count is None:
            self._count.fill_(most)
        else:
            self._count.copy_(count)
        if most > len(self._slots):
            slots = (parts[0] if len(parts) == 1 else torch.cat(list(parts))).to(torch.int64)
            verify_sealed(context, group, slots=aligned(slots), span=self._span, checked=checked)
            if seen is not None:
                seen.bring(checked)
            return
        size = round_up(most, len(self._slots))
        # Behind a forward the number of its step lies where that has read it, and need not be sent again.
        slots, step = front(self._slots, size), context.state.step

        def launch() -> None:
            verify_sealed(context, group, slots=slots, span=self._span, checked=checked, step=step)
            if seen is not None:
                seen.bring(checked)

        start = 0
        for part in parts:
            end = start + len(part)
            slots[start:end].copy_(part)
            start = end
        self._replays.run((group.name, size, checked.data_ptr(), step.data_ptr()), launch)

    def verify_lists(
        self,
        group: BufferGroup,
        parts: Sequence[torch.Tensor],
        ends: Sequence[int],
        *,
        checked: torch.Tensor,
        counts: torch.Tensor,
    ) -> None:
        """Hold lists of slots of a group's pool against their seals, by one launch; see `verify_sealed`.

        Args:
            group: whose pool it is.
            parts: the slots of all, int64 on the device, in any number of pieces.
            ends: where each list ends in them.
            checked: what it counts in; it stays where it is.
            counts: what it counts each list's in, int64 [lists at most, 3]; likewise.
        """
        context, total = self._context, ends[-1]
        if not total or group.pool.seals is None:
            return
        # Few graphs serve all: where there are fewer lists, what is behind the last one is of none.
        most = round_up(len(ends), len(counts))
        span, theirs = self._mailbox.post((0, total), [*ends, *[total] * (most - len(ends))])
        counts, step = front(counts, most), context.state.step
        if total > len(self._slots):
            slots = parts[0] if len(parts) == 1 else torch.cat(list(parts))
            verify_sealed(
                context, group, slots=aligned(slots), span=span, checked=checked, step=step, ends=theirs, counts=counts
            )
            return
        size = round_up(total, len(self._slots))
        slots = front(self._slots, size)

        def launch() -> None:
            verify_sealed(
                context, group, slots=slots, span=span, checked=checked, step=step, ends=theirs, counts=counts
            )

        torch.cat(list(parts), out=front(self._slots, total))
        self._replays.run((group.name, size, most, checked.data_ptr(), step.data_ptr()), launch)

    def forget_graphs(self) -> None:
        """Destroy the graphs that launches are replayed from."""
        self._replays.forget()


class _Piece(NamedTuple):
    """Slots that were held against their seals, all at once."""

    pool: KvPool
    first: int
    end: int
    step: int


class Scrub:
    """Goes round the pools, piece by piece, and holds every slot against its seal.

    Args:
        context: of the canary.
    """

    def __init__(self, context: CanaryContext) -> None:
        self._context = context
        groups = {g.pool: g for g in context.groups if g.pool.seals is not None}
        self._turns: list[tuple[BufferGroup, KvPool]] = [(group, pool) for pool, group in groups.items()]
        self._on_gpu = context.device.type == "cuda"
        self._turn, self._cursor = 0, 1
        self._checked = torch.zeros(SEAL_COUNTS, dtype=torch.int64, device=context.device)
        self._seen = HostWords(SEAL_COUNTS, context.device)
        # Launches are replayed, that of each pool on the same span and step.
        self._replays, self._mailbox = context.new_replays(), Mailbox(context.device, words=4)
        self._bandwidth = _UNKNOWN_BANDWIDTH if self._on_gpu else _SLOW_BANDWIDTH
        self._timing: tuple[DeviceTimer, int] | None = None
        # Pieces since the last one that was timed.
        self._untimed = _TIMED_EVERY
        self._rounds, self._began, self._last_began = 0, time.monotonic(), 0.0
        self._last_piece = time.monotonic()
        # The last ones, oldest first; and by slot and WRITER what is known of those that were found damaged.
        self._pieces: deque[_Piece] = deque(maxlen=_MOST_PIECES)
        self._damaged: OrderedDict[tuple[KvPool, int, int], int] = OrderedDict()

    def intact_at(self, pool: KvPool, slot: int, *, writer: int, written: int, found: int) -> int:
        """Return the last step of which it is known that a slot's bytes were those that were sealed.

        To be asked of every slot that is found damaged, when it is: what was damaged once is not looked at as if it had
        been intact before the next look.

        Args:
            pool: of the slot.
            slot: that was found damaged.
            writer: WRITER of its record.
            written: the step of that.
            found: the step that it was found in.
        """
        key = pool, slot, writer
        if key not in self._damaged:
            looks = [p for p in self._pieces if p.pool is pool and p.first <= slot < p.end]
            # What has found it is not among those before.
            self._damaged[key] = max((p.step for p in looks if written <= p.step < found), default=written)
            if len(self._damaged) > _MOST_DAMAGED:
                self._damaged.popitem(last=False)
        return self._damaged[key]

    def forget_looks(self) -> None:
        """Take in that some of what was found damaged is not known: no look up to here says that a slot was intact."""
        self._pieces.clear()

    def piece(self) -> None:
        """Hold as many slots against their seals as the time since the last piece allows, where any are sealed.

        On the stream of the forwards, between them. What is found is reported with the findings of the next step.
        """
        if not self._turns:
            return
        self._take_timing()
        now = time.monotonic()
        seconds, self._last_piece = min(now - self._last_piece, _LONGEST), now
        self._verify(int(self._context.config.scrub_share * seconds * self._bandwidth))

    def all(self) -> None:
        """Hold every slot against its seal now."""
        for _ in self._turns:
            self._cursor = 1
            self._verify(_ALL, timed=False)

    def forget_graphs(self) -> None:
        """Destroy the graphs that launches are replayed from."""
        self._replays.forget()

    @property
    def facts(self) -> ScrubFacts | None:
        """What scrubs have done, as of some steps ago; None where nothing is sealed."""
        if not self._turns:
            return None
        _, verified, unsealed, _ = self._seen.host.tolist()
        oldest = time.monotonic() - self._last_began if self._rounds else None
        return ScrubFacts(verified=verified, unsealed=unsealed, rounds=self._rounds, oldest=oldest)

    def _verify(self, most_bytes: int, *, timed: bool = True) -> None:
        """Verify the next slots of the pool whose turn it is, up to so many bytes, but at least one."""
        context, (group, pool) = self._context, self._turns[self._turn]
        each = max(1, pool.kv_bytes // pool.num_slots)
        count = max(1, min(most_bytes // each, pool.num_slots - self._cursor))
        self._untimed += 1
        times = timed and self._on_gpu and self._timing is None and self._untimed >= _TIMED_EVERY
        timer = DeviceTimer(context.device) if times else None

        span, step = self._mailbox.post((self._cursor, count), (context.step,))

        def launch() -> None:
            verify_sealed(context, group, slots=None, span=span, checked=self._checked, step=step)
            self._seen.bring(self._checked)

        began = time.monotonic()
        with contextlib.nullcontext() if timer is None else timer.span():
            self._replays.run(self._turn, launch)
        if timer is not None:
            self._timing, self._untimed = (timer, count * each), 0
        elif timed and not self._on_gpu:
            self._timed(count * each, time.monotonic() - began)
        self._pieces.append(_Piece(pool, self._cursor, self._cursor + count, context.step))
        self._cursor += count
        if self._cursor >= pool.num_slots:
            self._turn, self._cursor = (self._turn + 1) % len(self._turns), 1
            if not self._turn:
                self._rounds += 1
                self._last_began, self._began = self._began, time.monotonic()

    def _take_timing(self) -> None:
        """Take in how fast the piece was that was timed, once it is over."""
        if self._timing is None:
            return
        timer, size = self._timing
        seconds = timer.seconds()
        if seconds is not None:
            self._timing = None
            self._timed(size, seconds)

    def _timed(self, size: int, seconds: float) -> None:
        """Take in how long reading so many bytes took."""
        if seconds > 0:
            self._bandwidth += (size / seconds - self._bandwidth) / 4
