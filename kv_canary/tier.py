"""A tier of KV in host memory: records and seals go where the bytes go, and what lies there is held against them.

An engine that keeps KV in host memory copies it there (a backup) and back (a load), between slots of the pool on the
device and slots of the host's. `HostTier` is a pool of the canary's for the host's slots. A backup takes records and
seals along before the bytes are copied, so that bytes which are overwritten on the way differ from them; a load brings
them back, and the canary holds every byte that arrives on the device against its seal. A thread holds what lies in host
memory against the seals too: what has just arrived first, and then all of it, round and round.

Slots of a tier count from 1: the engine's slot 0 of the host is 1 here and in reports.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch

from kv_canary.constants import RECORD_WORDS, RETIRED_BIT, WRITER_WORD, Reason
from kv_canary.errors import must_be
from kv_canary.host_seals import HostSeals
from kv_canary.runtime.host import on_device
from kv_canary.runtime.pools import BufferGroup, KvPool
from kv_canary.specs.structures import KvSource
from kv_canary.specs.violation_row import ViolationRow, site_of

if TYPE_CHECKING:
    from kv_canary.runtime.manager import CanaryManager

# Share of a core that the thread takes; slots that it looks at before it looks at the time again, and bytes of a layer
# of theirs at most. As many as that: a thread that takes Python's lock after every few microseconds of NumPy, as it
# does with 128 KB, makes an engine's beside it more than three times as slow meanwhile.
CHECKED_SHARE, _MOST_AT_ONCE, _BYTES_AT_ONCE = 0.05, 4096, 1 << 21
_LOW = np.uint64(0xFFFFFFFF)
# Slots that are looked through at once for those that hold something.
_SCANNED_AT_ONCE = 1 << 16
# Slots that wait for their first look at most; those beyond are come to in turn.
_MOST_WAITING = 1 << 16
# Bands that are reported of one look at most: where so much is damaged, the next round finds the rest.
_MOST_ROWS = 256
# Seconds that the thread sleeps where there is nothing to look at.
_IDLE = 0.2


@dataclass(frozen=True, kw_only=True)
class TierFacts:
    """What a tier has done so far, in slots.

    Args:
        backed_up, loaded: copied to the host and back, with their records.
        verified: held against their seals on the host; a slot may be several times.
        unsealed: of those looked at, that have no seal.
        waiting: that have arrived on the host and not been looked at.
        rounds: times that all of the tier has been looked at.
        memory: bytes of host memory that records, seals and what is known of each slot take.
        brought, brought_unknown: that came to the host from elsewhere, with records and without.
    """

    backed_up: int = 0
    loaded: int = 0
    brought: int = 0
    brought_unknown: int = 0
    verified: int = 0
    unsealed: int = 0
    waiting: int = 0
    rounds: int = 0
    memory: int = 0


@dataclass(kw_only=True)
class Backup:
    """A backup under way: rows on their way to the host, gaps among them or not.

    `arrived` is None where nothing is to be waited for.
    """

    has_gaps: bool
    slots: np.ndarray
    generations: np.ndarray
    rows: torch.Tensor
    arrived: torch.Event | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Fetched:
    """What slots on the host had at one moment, whoever has them since.

    Args:
        rows: int64 [n, words] on the CPU, records and seals side by side; zeros of slots that had none.
        gaps: bool [n], which of these nobody can say anything of.
    """

    rows: torch.Tensor
    gaps: np.ndarray

    def only(self, which: torch.Tensor) -> Fetched:
        """Return what some of the slots had.

        Args:
            which: int64 [m] on the CPU, their places among these.
        """
        rows = _like(self.rows, len(which))
        torch.index_select(self.rows, 0, which, out=rows)
        return Fetched(rows=rows, gaps=self.gaps[which.numpy()])


@dataclass(kw_only=True)
class _Load:
    """Rows that are to be on the device before the next forward, and bytes that are on their way there.

    What lies on the host in `host` is fetched when they land, or before any of it is another's: `fetched` is None until
    then.
    """

    slots: torch.Tensor
    host: torch.Tensor
    fetched: Fetched | None = None
    arrived: torch.Event | torch.cuda.Event | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Expected:
    """Slots on the host that bytes are about to come to from elsewhere, as they were before.

    Args:
        slots: int64 [n].
        generations: of each.
    """

    slots: torch.Tensor
    generations: np.ndarray


class HostTier:
    """The host's slots of a pool: their records, seals and bytes, and where each of them is.

    `device_pool` is the pool, and `pool` that of the host's slots. Which slots hold something is taken in on the
    engine's own thread; the bytes are looked at in another one.

    Args:
        manager: the canary of the pool.
        group: whose pool it is that is copied to the host and back.
        num_slots: that the engine has on the host.
        k_source, v_source: the bytes on the host, of as many layers and bytes as the pool's, with a `slot_bias` of 1;
            None where they lie in a way that nobody can say: then they are held against their seals on the device only.

    Raises:
        ValueError: the pool is not one of the manager's, keeps two records of a slot, or has other bytes.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        manager: CanaryManager,
        group: BufferGroup,
        *,
        num_slots: int,
        k_source: KvSource | None,
        v_source: KvSource | None,
    ) -> None:
        pool = group.pool
        if pool not in manager.pools:
            raise ValueError(must_be("HostTier", "group", "one of the manager's", group.name))
        if pool.head_records is not None:
            raise ValueError(must_be("HostTier", "records", "one of each slot", "head_and_tail"))
        for half, here, there in (("k_source", k_source, pool.k_source), ("v_source", v_source, pool.v_source)):
            if here is not None and (there is None or _shape(here) != _shape(there)):
                raise ValueError(must_be("HostTier", half, "of the pool's layers and bytes", str(_shape(here))))
        self._manager, self.device_pool = manager, pool
        self.pool = KvPool(
            name=f"{pool.name} on the host",
            num_slots=num_slots + 1,
            k_source=k_source,
            v_source=v_source,
            layer_names=pool.layer_names,
            device="cpu",
        )
        # A hash of K alone would differ from one of K and V.
        is_known = (k_source is None, v_source is None) == (pool.k_source is None, pool.v_source is None)
        self._hash: HostSeals | None = None
        # Records and seals side by side: they come and go together, and seals in any case.
        self._width = RECORD_WORDS + (0 if pool.seals is None else pool.seals.words.shape[1])
        # Ops want records whose rows lie a multiple of their words apart.
        apart = -(-self._width // RECORD_WORDS) * RECORD_WORDS
        self._rows = torch.zeros(num_slots + 1, apart, dtype=torch.int64)[:, : self._width]
        self.pool.records = self._rows[:, :RECORD_WORDS]
        self._seals = None if pool.seals is None else self._rows[:, RECORD_WORDS:]
        if pool.seals is not None:
            per_band, seed = pool.seals.layers_per_band, pool.seals.seed
            if is_known:
                self.pool.keep_seals(by_layer=True, seed=seed, layers_per_band=per_band, words=self._seals)
                self._hash = HostSeals(k_source, v_source, layers_per_band=per_band, seed=seed)
        self.group = BufferGroup(name=f"{group.name} on the host", pool=self.pool, window=group.window)
        self._place = manager.watch_place(self.group, self._came_in)
        widest = max((s.bytes_per_token for s in (k_source, v_source) if s is not None), default=1)
        self._at_once = max(1, min(_MOST_AT_ONCE, _BYTES_AT_ONCE // widest))
        # Of each slot: how often what it holds has changed. What is known of it is known as of a generation, and is
        # forgotten with it: whether bytes and records are there; whether nobody can say what it holds; whether its
        # bytes have been seen to be those of its seal since they came; whether they were not at the first look.
        self._generations = np.ones(num_slots + 1, np.int64)
        self._there, self._unknown, self._intact, self._wrong = (np.zeros(num_slots + 1, np.int64) for _ in range(4))
        self._known = self._generations, self._there, self._unknown, self._intact, self._wrong
        self._backups: deque[Backup] = deque()
        # What has come from elsewhere, with records and seals side by side or without, from any thread.
        self._brought: deque[tuple[Expected, torch.Tensor | None]] = deque()
        self._loads: list[_Load] = []
        self._loading: _Load | None = None
        self._backed_up = self._loaded = self._came = self._came_unknown = 0
        # Slots that have not been looked at since they came, in pieces; how many came, were taken out, and given up.
        self._waiting: deque[np.ndarray] = deque()
        self._queued = self._taken = self._given_up = 0
        # Slots of the round that are next, and the first one that has not been looked through for more.
        self._next, self._cursor, self._rounds = np.zeros(0, np.int64), 1, 0
        self._verified = self._unsealed = 0
        self._looks = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    # What the engine does.

    def backup(self, device_slots: torch.Tensor, host_slots: torch.Tensor) -> Backup:
        """Take records and seals along, for `backed_up`; before the bytes are copied, on the stream that copies them.

        Or on a stream behind which the copy begins.

        Args:
            device_slots: int64 [n], of the pool.
            host_slots: int64 [n] on the CPU, the engine's numbers.
        """
        pool, host = self.device_pool, host_slots.to("cpu", torch.int64).numpy() + 1
        generations = self._forget(host)
        slots = on_device(device_slots, self._manager.device).to(torch.int64)
        if slots.is_cuda:
            # It was made on the scheduler's stream, as that of a load.
            slots.record_stream(torch.cuda.current_stream(slots.device))
        # By few launches: the engine makes up its mind about the next batch meanwhile, and its device may have nothing
        # to do. Who is sealed is said once the words are on the host.
        there = slots.clamp(0, len(pool.records) - 1)
        parts = [pool.records[there]]
        if pool.seals is not None:
            parts.append(pool.seals.words[there])
        here = _unset(len(slots), self._width, slots.device)
        here.copy_(torch.cat(parts, dim=1), non_blocking=True)
        return Backup(
            has_gaps=self._manager.unverified.has_gaps(pool),
            slots=host,
            generations=generations,
            rows=here,
            # Not torch.cuda.Event, whose record() takes seven times as long.
            arrived=torch.Event(slots.device) if slots.is_cuda else None,
        )

    def backed_up(self, backup: Backup) -> None:
        """Take in that the bytes of a backup are copied, on the stream that copies them, or later."""
        if backup.arrived is not None:
            backup.arrived.record()
        self._backups.append(backup)

    def load(self, host_slots: torch.Tensor, device_slots: torch.Tensor) -> None:
        """Take in that slots are about to be copied to the device; nothing waits for the device.

        Args:
            host_slots: int64 [n] on the CPU, the engine's numbers.
            device_slots: int64 [n], of the pool.
        """
        host = host_slots.to("cpu", torch.int64) + 1
        # What has come from elsewhere changes what its slots hold when it is taken in. A backup has done so already: it
        # is taken in while the forward runs that reads what is loaded.
        self._settle_brought()
        slots = on_device(device_slots, self._manager.device).to(torch.int64)
        self._loading = _Load(slots=slots, host=host)
        self._loads.append(self._loading)

    def loaded(self, arrived: torch.Event | torch.cuda.Event | None = None) -> None:
        """Take in that the bytes of the last load are copied, on the stream that copies them.

        Args:
            arrived: what was recorded there behind them, so that the call may come from anywhere; None: nothing was.
        """
        load, self._loading = self._loading, None
        if load is None or not load.slots.is_cuda:
            return
        if arrived is None:
            arrived = torch.Event(load.slots.device)
            arrived.record()
        load.arrived = arrived

    def fetch(self, host_slots: torch.Tensor) -> Fetched:
        """Return what slots have now, for `put_back` once their bytes are on the device, whoever has them by then.

        Args:
            host_slots: int64 [n] on the CPU, the engine's numbers.
        """
        host = host_slots.to("cpu", torch.int64) + 1
        self.settle()
        numbers = host.numpy()
        if self._backups and not (self._is(self._there, numbers) | self._is(self._unknown, numbers)).all():
            # The engine loads only what it knows to have arrived: so it is all but there.
            self.settle(waits=True)
        return self._fetched(host)

    def put_back(self, fetched: Fetched, device_slots: torch.Tensor) -> None:
        """Take in that bytes of slots are on the device, whose records and seals are to be there with `land`.

        Args:
            fetched: what `fetch` returned as they were loaded.
            device_slots: int64 [n], of the pool.
        """
        slots = on_device(device_slots, self._manager.device).to(torch.int64)
        self._loads.append(_Load(slots=slots, host=torch.zeros(0, dtype=torch.int64), fetched=fetched))

    def _fetched(self, host: torch.Tensor) -> Fetched:
        """Return what slots have, zeros of those that have nothing."""
        rows = _unset(len(host), self._width, self._manager.device)
        torch.index_select(self._rows, 0, host, out=rows)
        numbers = host.numpy()
        is_there = self._is(self._there, numbers)
        if not is_there.all():
            rows[torch.from_numpy(~is_there)] = 0
        # What was there had no record either: nobody had seen it written.
        gaps = _is_nothing(rows.numpy())
        if gaps.any():
            gaps &= is_there | self._is(self._unknown, numbers)
        return Fetched(rows=rows, gaps=gaps)

    @property
    def looks(self) -> bool:
        """Whether the bytes on the host are held against their seals while they are there."""
        return self._hash is not None

    @property
    def width(self) -> int:
        """Words of a slot's record and seal together."""
        return self._width

    def rows_of(self, host_slots: torch.Tensor) -> torch.Tensor | None:
        """Return int64 [n, `width`], records and seals of slots side by side; None where one of them has none.

        From any thread, while the engine lets nobody else have the slots.

        Args:
            host_slots: int64 [n] on the CPU, the engine's numbers.
        """
        host = host_slots.to("cpu", torch.int64) + 1
        return self._rows[host] if self._is(self._there, host.numpy()).all() else None

    def expect(self, host_slots: torch.Tensor) -> Expected:
        """Return what `bring` wants of slots that bytes are about to come to; from any thread.

        Args:
            host_slots: int64 [n] on the CPU, the engine's numbers.
        """
        host = host_slots.to("cpu", torch.int64) + 1
        return Expected(slots=host, generations=self._generations[host.numpy()])

    def bring(self, expected: Expected, rows: torch.Tensor | None) -> None:
        """Take in that the bytes of slots have come from elsewhere, if nobody has got the slots meanwhile.

        From any thread, once they are there, and before a load of them. Bytes are held against their seals, in turn.

        Args:
            expected: what `expect` gave before.
            rows: what `rows_of` gave where they were stored; None: nobody can say what has come.
        """
        self._brought.append((expected, rows))

    def free(self, host_slots: torch.Tensor) -> None:
        """Take in that the engine may give slots to others; int64, the engine's numbers."""
        self._forget(host_slots.to("cpu", torch.int64).numpy() + 1)

    def clear(self) -> None:
        """Take in that no slot holds anything."""
        self._fetch_loads()
        self._generations += 1
        self._rows.zero_()
        self._backups.clear()
        self._brought.clear()

    def forget(self) -> None:
        """Take in that nobody can say what any slot holds: what comes back is taken in anew, from what it is then.

        So is what is on its way back: records of what was there before are gone, and its own may not be relied on.
        """
        for load in self._loads:
            count = len(load.slots)
            rows = _unset(count, self._width, self._manager.device).zero_()
            load.fetched = Fetched(rows=rows, gaps=np.ones(count, bool))
        self.clear()
        self._unknown[:] = self._generations

    # What becomes of it.

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is to be done before the next forward."""
        return not self._backups and not self._loads and not self._brought

    def settle(self, *, waits: bool = False) -> None:
        """Take in the records of backups that have arrived, and of what has come from elsewhere.

        Args:
            waits: whether backups that are under way are waited for.
        """
        self._settle_brought()
        self._settle_backups(waits=waits)

    def _settle_backups(self, *, waits: bool = False) -> None:
        while self._backups:
            backup = self._backups[0]
            if backup.arrived is not None and waits:
                backup.arrived.synchronize()
            elif backup.arrived is not None and not backup.arrived.query():
                return
            self._backups.popleft()
            self._take_in(backup)

    def land(self) -> None:
        """Give what was loaded its records and seals, and hold it against these.

        On the stream of the forwards, before the first one that reads it; the stream waits for the bytes.
        """
        fetched_loads = self._fetch_loads()
        loads, self._loads = self._loads, []
        pool, manager = self.device_pool, self._manager
        for load, fetched in zip(loads, fetched_loads, strict=True):
            if load.slots.is_cuda:
                load.slots.record_stream(torch.cuda.current_stream(load.slots.device))
            rows = fetched.rows.to(load.slots.device, non_blocking=True)
            records = rows[:, :RECORD_WORDS]
            if load.arrived is not None:
                load.arrived.wait(torch.cuda.current_stream(load.slots.device))
            pool.records[pool.inside(load.slots)] = records
            # What the pool has not got went there.
            pool.records[0] = 0
            manager.unverified.written(pool, load.slots)
            if fetched.gaps.any():
                # By numbers: how many a mask has, a GPU would have to say first.
                which = torch.from_numpy(np.flatnonzero(fetched.gaps))
                manager.unverify(pool, load.slots[on_device(which, load.slots.device)])
            manager.arrived(pool, load.slots, rows[:, RECORD_WORDS:] if pool.seals is not None else None)
            self._loaded += len(load.slots)

    @property
    def facts(self) -> TierFacts:
        """What the tier has done so far."""
        return TierFacts(
            backed_up=self._backed_up,
            loaded=self._loaded,
            verified=self._verified,
            unsealed=self._unsealed,
            waiting=max(0, self._queued - self._taken - self._given_up),
            rounds=self._rounds,
            memory=self._rows.untyped_storage().nbytes() + sum(known.nbytes for known in self._known),
            brought=self._came,
            brought_unknown=self._came_unknown,
        )

    # The bytes on the host.

    def start(self) -> None:
        """Look at the bytes on the host in a thread of its own, from now on."""
        if self._hash is not None and self._thread is None:
            self._thread = threading.Thread(target=self._look_around, name="kv-canary host tier", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread; the second call does nothing."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
            if not self._thread.is_alive():
                self._thread = None

    def release(self) -> None:
        """Let go of the bytes on the host, which the engine is to give back; behind `close`, and the last reports."""
        if self._thread is None:
            self._hash = self.pool.k_source = self.pool.v_source = None

    def check(self, *, whole: bool = False) -> int:
        """Hold slots on the host against their seals: some that have just arrived, else some in turn.

        Return how many were looked at. What is found is reported with the findings of the next step.

        Args:
            whole: all that there are.
        """
        if self._hash is None:
            return 0
        with self._looks:
            if whole:
                while len(self._next_waiting()):
                    pass
                held, piece = self.held, self._at_once
                return sum(self._look(held[first : first + piece]) for first in range(0, len(held), piece))
            waiting = self._next_waiting()
            return self._look(waiting if len(waiting) else self._next_in_turn())

    def _wait(self, slots: np.ndarray) -> None:
        """Have slots looked at that have just come; where too many wait, the oldest are come to in turn."""
        if self._hash is None:
            return
        self._queued += len(slots)
        if len(slots) > _MOST_WAITING:
            self._given_up += len(slots) - _MOST_WAITING
            slots = slots[-_MOST_WAITING:]
        self._waiting.append(slots)
        while self._queued - self._taken - self._given_up > _MOST_WAITING:
            try:
                self._given_up += len(self._waiting.popleft())
            except IndexError:
                # The other thread has them.
                return

    def _next_waiting(self) -> np.ndarray:
        """Return as many slots that wait as are looked at at once, of few backups or many; they wait no more."""
        pieces, room = list[np.ndarray](), self._at_once
        while room:
            try:
                slots = self._waiting.popleft()
            except IndexError:
                break
            if len(slots) > room:
                self._waiting.appendleft(slots[room:])
                slots = slots[:room]
            pieces.append(slots)
            room -= len(slots)
        self._taken += self._at_once - room
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)

    def _is(self, generations: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Whether something is known of slots, by the generations that it is known as of."""
        known: np.ndarray = generations[slots] == self._generations[slots]
        return known

    @property
    def held(self) -> np.ndarray:
        """The slots whose bytes and records are there, by this pool's numbers."""
        return np.flatnonzero(self._there == self._generations)

    def _next_in_turn(self) -> np.ndarray:
        """Return as many slots as are looked at at once, of those that hold something; none where a round ends."""
        while not len(self._next) and self._cursor < self.pool.num_slots:
            first, self._cursor = self._cursor, min(self._cursor + _SCANNED_AT_ONCE, self.pool.num_slots)
            scanned = slice(first, self._cursor)
            self._next = first + np.flatnonzero(self._there[scanned] == self._generations[scanned])
        slots, self._next = self._next[: self._at_once], self._next[self._at_once :]
        if not len(self._next) and self._cursor >= self.pool.num_slots:
            self._cursor, self._rounds = 1, self._rounds + 1
        return slots

    def _look_around(self) -> None:
        while not self._ended.is_set():
            began, rounds, looked = time.monotonic(), self._rounds, 0
            try:
                looked = self.check()
            except Exception as error:
                self._manager.guard.failed("looking at the host tier", error)
            spent = time.monotonic() - began
            # A tier that is empty is gone round in no time.
            idle = _IDLE if not looked and rounds != self._rounds else 0.0
            self._ended.wait(max(spent * (1 / CHECKED_SHARE - 1), idle))

    def _look(self, slots: np.ndarray) -> int:
        """Hold slots against their seals, and report those that have stayed what they were meanwhile."""
        before = self._generations[slots]
        is_there = self._there[slots] == before
        slots, before = slots[is_there], before[is_there]
        if not len(slots) or self._hash is None or self._seals is None:
            return 0
        records, seals = np.split(self._rows.numpy()[slots], [RECORD_WORDS], axis=1)
        writer = records[:, WRITER_WORD]
        live = records.any(axis=1) & (writer >= 0)
        sealed = live & (seals[:, 0] == writer) & (seals[:, 1] != 0)
        chosen = np.flatnonzero(sealed)
        kept, found = np.ascontiguousarray(seals[chosen, 1:]).view(np.uint64), self._hash.words(slots[chosen])
        differ = kept ^ found
        stayed = self._generations[slots[chosen]] == before[chosen]
        rows = [
            self._row(
                int(slots[chosen[n]]),
                records[chosen[n]],
                (Reason.SEAL_K if differ[n, band] & _LOW else 0) | (Reason.SEAL_V if differ[n, band] >> 32 else 0),
                kv=int(seals[chosen[n], 1 + band]),
                observed_kv=int(found.view(np.int64)[n, band]),
                given=int(band),
            )
            for n, band in islice(zip(*np.nonzero((differ != 0) & stayed[:, None]), strict=True), _MOST_ROWS)
        ]
        wrong = (differ != 0).any(axis=1)[stayed]
        looked, generations = slots[chosen[stayed]], before[chosen[stayed]]
        came_wrong = wrong & (self._intact[looked] != generations)
        self._wrong[looked[came_wrong]] = generations[came_wrong]
        self._intact[looked[~wrong]] = generations[~wrong]
        self._verified += len(chosen)
        self._unsealed += int(live.sum()) - len(chosen)
        if rows:
            self._manager.report(rows)
        return len(slots)

    def _row(self, slot: int, record: np.ndarray, reasons: int, **more: int) -> ViolationRow:
        """Return the violation row of a slot on the host, with its record."""
        identity, chain, kv, writer = record.tolist()
        facts = {"identity": identity, "chain": chain, "kv": kv, "writer": writer, "token": -1}
        return ViolationRow(
            **facts | more,
            site=site_of(self.group.sweep_tag, self._place),
            reasons=int(reasons),
            slot=slot,
            position=(identity >> 32) & 0xFFFFFFFF,
            step=self._manager.step,
        )

    def _came_in(self, row: ViolationRow) -> int | None:
        """Return the step of a violation where the bytes were wrong when they were looked at first; None otherwise."""
        return row.step if self._wrong[row.slot] == self._generations[row.slot] else None

    def _settle_brought(self) -> None:
        while self._brought:
            self._take_in_brought(*self._brought.popleft())

    def _take_in(self, backup: Backup) -> None:
        self._drop_stale(backup.rows.numpy())
        numbers, rows = self._put(backup.slots, backup.rows.numpy(), backup.generations)
        self._backed_up += len(numbers)
        self._report_unowned(numbers, rows[:, :RECORD_WORDS], has_gaps=backup.has_gaps)

    def _put(self, slots: np.ndarray, rows: np.ndarray, generations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Give slots their records and seals, but those that hold something else by now; return whom, and what."""
        stayed = self._generations[slots] == generations
        if not stayed.all():
            slots, rows, generations = slots[stayed], rows[stayed], generations[stayed]
        self._rows.numpy()[slots] = rows
        self._there[slots] = generations
        self._wait(slots)
        return slots, rows

    def _take_in_brought(self, expected: Expected, rows: torch.Tensor | None) -> None:
        slots = expected.slots.numpy()
        stayed = self._generations[slots] == expected.generations
        slots = slots[stayed]
        generations = self._forget(slots)
        if rows is None:
            self._unknown[slots] = generations
            self._came_unknown += len(slots)
            return
        self._put(slots, rows.numpy()[stayed], generations)
        self._came += len(slots)

    def _report_unowned(self, numbers: np.ndarray, records: np.ndarray, *, has_gaps: bool) -> None:
        """Report slots that were backed up when nobody had written them, or had them any more."""
        retired = (records[:, WRITER_WORD] >> RETIRED_BIT) & 1 != 0
        nothing = _is_nothing(records)
        if has_gaps:
            nothing = np.zeros_like(nothing)
        rows = [
            self._row(int(numbers[i]), records[i], Reason.FREED if retired[i] else Reason.NEVER_WRITTEN)
            for i in np.flatnonzero(retired | nothing).tolist()
        ]
        if rows:
            self._manager.report(rows)

    def _forget(self, slots: np.ndarray) -> np.ndarray:
        """Take in that what slots hold is somebody else's from now on; return their generations."""
        self._fetch_loads()
        generations: np.ndarray = self._generations[slots] + 1
        self._generations[slots] = generations
        return generations

    def _fetch_loads(self) -> list[Fetched]:
        """Return what each of the loads under way had on the host, which is fetched before it may be another's."""
        fetched = []
        for load in self._loads:
            if load.fetched is None:
                # The engine loads only what it knows to have arrived.
                self._settle_backups()
                load.fetched = self._fetched(load.host)
            fetched.append(load.fetched)
        return fetched

    def _drop_stale(self, rows: np.ndarray) -> None:
        """Take seals that are not those of their records, and those that were never made, out of records and seals."""
        if self._seals is not None:
            writer, made = rows[:, RECORD_WORDS], rows[:, RECORD_WORDS + 1]
            is_sealed = (writer == rows[:, WRITER_WORD]) & (made != 0)
            if not is_sealed.all():
                rows[~is_sealed, RECORD_WORDS:] = 0


@torch.inference_mode(False)
def _unset(rows: int, width: int, device: torch.device) -> torch.Tensor:
    """Return int64 [rows, width] on the host, whatever is in it, which copies to and from `device` need not wait for.

    In whatever mode the engine is, it can be written to in any other.
    """
    return torch.empty(rows, width, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")


def _like(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return `count` rows of the kind of `rows`, whatever is in them."""
    return _unset(count, rows.shape[1], torch.device("cuda" if rows.is_pinned() else "cpu"))


def _is_nothing(rows: np.ndarray) -> np.ndarray:
    """Return of each of int64 rows that begin with a record whether that is all zeros."""
    nothing: np.ndarray = functools.reduce(np.bitwise_or, (rows[:, word] for word in range(RECORD_WORDS))) == 0
    return nothing


def _shape(source: KvSource) -> tuple[int, int]:
    return len(source.layers), source.bytes_per_token
