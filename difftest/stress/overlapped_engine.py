"""A model engine whose scheduler runs a step ahead of the device, guarded by a canary.

While the device runs step N + 1, the host reads what step N sampled, ends requests, frees their rows and slots, gives
them away and fills tables again. So a request that ended runs one step more, perhaps over a row that is another's by
then: its result is thrown away. All of that is how engines with overlapped scheduling work when they are healthy.

What a request generates is a function of its own prompt, by way of the K and V that were written and read back: an
engine that reads a wrong slot generates a wrong token, and `OverlappedEngine.wrong_tokens` counts it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kv_canary.config import CanaryConfig
from kv_canary.constants import HEAD_OF_CHAIN
from kv_canary.difftest.simulator.allocator import PageAllocator
from kv_canary.difftest.simulator.prefix_cache import PrefixCache
from kv_canary.difftest.simulator.requests import Request
from kv_canary.difftest.simulator.scripted_engine import kv_source
from kv_canary.perturb import PerturbConfig
from kv_canary.reports import ViolationReport
from kv_canary.runtime.batch import ForwardBatch
from kv_canary.runtime.cached import CachedSlots
from kv_canary.runtime.capacities import CanaryLimits
from kv_canary.runtime.forward import CapturedForward
from kv_canary.runtime.host import send
from kv_canary.runtime.manager import CanaryManager
from kv_canary.runtime.pools import BufferGroup, KvPool

VOCABULARY = 1021
# About one token in so many ends its request: the host learns of it a step late.
STOP = 61
WORDS = 16


@dataclass(frozen=True, kw_only=True)
class OverlapConfig:
    """The engine's geometry.

    Args:
        slots: of the full pool, the padding page counted.
        page_size: slots in a page.
        max_requests: in one step; there are twice as many rows.
        max_len: tokens of a request.
        chunk: new tokens in one step.
        layers: of the model; K and V rows have 128 bytes each.
        window: cached positions that a query of the sliding layers reads; they have a pool of their own, behind a LUT.
            0: there are none, and finished prefixes are kept for later requests.
        overlap: whether the scheduler runs a step ahead.
        graphs: batch sizes for which decode steps are captured in CUDA graphs; empty: everything runs eagerly.
        late: on a CPU, where nothing runs by itself: run a step only when the next one has been prepared, as if the
            device were slow.
        seed: of prompts and choices.
    """

    slots: int = 2048
    page_size: int = 16
    max_requests: int = 24
    max_len: int = 256
    chunk: int = 96
    layers: int = 4
    window: int = 0
    overlap: bool = True
    graphs: tuple[int, ...] = ()
    late: bool = False
    seed: int = 0


@dataclass(eq=False, kw_only=True)
class _Request(Request):
    """A request as the scheduler sees it; `scheduled` counts the positions of the step in flight too."""

    limit: int
    prompt_len: int
    scheduled: int = 0
    attempt: int = 0
    evicted: int = 0
    in_flight_prefix: int = 0


@dataclass(eq=False, kw_only=True)
class _Work:
    """The work of a step for a request. `used` is None until the host has read the step's result."""

    request: _Request
    attempt: int
    row: int
    prefix: int
    extend: int
    samples: bool
    used: bool | None = None

    def discarded(self) -> bool:
        """Whether the result is, or will be, thrown away."""
        return self.request.attempt != self.attempt if self.used is None else not self.used


@dataclass(eq=False, kw_only=True)
class _Step:
    work: list[_Work]
    batch: ForwardBatch
    sampled: torch.Tensor | None = None
    event: torch.cuda.Event | None = None


@dataclass(eq=False, kw_only=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    captured: CapturedForward
    rows: torch.Tensor
    prefix: torch.Tensor
    extend: torch.Tensor
    ids: torch.Tensor
    out_slots: dict[str, torch.Tensor]


class OverlappedEngine:
    """The engine.

    Args:
        config: its geometry.
        canary: the canary's configuration; None: run without one.
        device: where pools, tables and the canary live.
        perturb: faults to inject.
        on_report: called with every report.
    """

    def __init__(
        self,
        config: OverlapConfig,
        *,
        canary: CanaryConfig | None,
        device: torch.device | str,
        perturb: PerturbConfig | None = None,
        on_report: Callable[[ViolationReport], None] | None = None,
    ) -> None:
        self.config, self.device = config, torch.device(device)
        self.rng = random.Random(config.seed)
        rows = 2 * config.max_requests + 1
        self.free_rows = deque(range(1, rows))
        size = config.page_size
        self.pages = PageAllocator(
            first_slot=size,
            num_pages=config.slots // size - 1,
            page_size=size,
            rng=np.random.default_rng(config.seed),
        )
        self.cache = PrefixCache(size)
        self.waiting: deque[_Request] = deque()
        self.running: list[_Request] = []
        self.table = torch.zeros(rows, config.max_len, dtype=torch.int32, device=self.device)
        self.next_token = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.pools = {"full": self._pool("full", config.slots)}
        self.lut: torch.Tensor | None = None
        self.free_swa: deque[int] = deque()
        self.swa_of: dict[int, int] = {}
        if config.window:
            swa_slots = 1 + config.max_requests * (config.window + 2 * config.chunk)
            self.pools["swa"] = self._pool("swa", swa_slots)
            self.free_swa = deque(range(1, swa_slots))
            self.lut = torch.zeros(config.slots, dtype=torch.int64, device=self.device)
        groups = [BufferGroup(name="full", pool=self.pools["full"])]
        if config.window:
            groups.append(BufferGroup(name="swa", pool=self.pools["swa"], window=config.window, lut=self.lut))
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.manager: CanaryManager | None = None
        if canary is not None:
            self.manager = CanaryManager(
                groups,
                limits=CanaryLimits(
                    max_rows=rows,
                    max_requests=config.max_requests,
                    max_tokens=config.chunk + config.max_requests,
                    max_len=config.max_len,
                ),
                config=canary,
                perturb=perturb,
                on_report=on_report,
                cached=self._cached_slots,
            )
            # The canary's own failures are to be seen here, in log mode too.
            self.manager.guard.contains = False
        self.steps = self.finished = self.retracted = self.ran_on = self.prefix_hits = 0
        self.tokens_generated = self.wrong_tokens = self.replays = 0
        self.outputs: dict[int, list[int]] = {}
        self._serial = 0
        # Freed while a step that may read them was prepared already: retired behind it.
        self._to_retire: list[tuple[str, int, list[int]]] = []
        # Requests that have ended or were put off, with their rows and slots by group.
        self._left: list[tuple[str, int, dict[str, list[int]]]] = []
        self._in_flight: deque[_Step] = deque()
        self._prepared: _Step | None = None
        self._graphs: list[tuple[int, _Graph]] = []
        for size in config.graphs if self.stream is not None else ():
            self._graphs.append((size, self._capture(size)))

    def run(self, steps: int, *, on_step: Callable[[], None] | None = None) -> None:
        """Run so many steps under a load of random requests; then read what the last ones sampled."""
        config = self.config
        for _ in range(steps):
            self._arrivals()
            step = self._prepare()
            if config.late and self._prepared is not None:
                self._launch(self._prepared)
            # Behind every step that was prepared before the free, and before what is prepared with the freed slots.
            self._retire_freed()
            if config.late:
                self._prepared = step
            else:
                self._launch(step)
            self._read_results(keep=1 if config.overlap else 0)
            self.steps += 1
            if on_step is not None:
                on_step()
        if self._prepared is not None:
            self._launch(self._prepared)
            self._prepared = None
        self._read_results(keep=0)
        self._retire_freed()
        if self.manager is not None:
            with self._on_stream():
                self.manager.flush()

    def close(self) -> None:
        """Destroy every CUDA graph, the canary's too; what was counted and reported can still be read.

        Left to the collector, they might be destroyed while another engine captures its own, which no capture survives.
        """
        self._graphs.clear()
        if self.manager is not None:
            self.manager.close(says_verdict=False)

    @property
    def guarded(self) -> CanaryManager:
        """The canary; RuntimeError where the engine runs without one."""
        if self.manager is None:
            raise RuntimeError("kv-canary: overlapped engine: a canary must be there, got none")
        return self.manager

    # The host: requests, pages, rows.

    def _arrivals(self) -> None:
        config, rng = self.config, self.rng
        while len(self.waiting) < 4:
            shared = rng.randrange(4)
            text = random.Random(f"{config.seed} {shared}")
            stem = [text.randrange(VOCABULARY) for _ in range(config.max_len // 2)]
            stem = stem[: rng.choice((0, config.page_size, 3 * config.page_size, rng.randrange(len(stem))))]
            fresh = rng.choice((1, config.page_size - len(stem) % config.page_size, rng.randrange(1, 2 * config.chunk)))
            prompt = (stem + [rng.randrange(VOCABULARY) for _ in range(fresh)])[: config.max_len - 8]
            self._serial += 1
            limit = min(config.max_len - 1, len(prompt) + rng.randrange(1, 60))
            self.waiting.append(
                _Request(
                    name=f"request {self._serial}",
                    serial=self._serial,
                    owner=self._serial,
                    tokens=prompt,
                    limit=limit,
                    prompt_len=len(prompt),
                )
            )

    def _admit(self) -> None:
        config = self.config
        while self.waiting and self.free_rows and len(self.running) < config.max_requests:
            request = self.waiting.popleft()
            request.row = self.free_rows.popleft()
            request.pages, request.scheduled, request.evicted, request.in_flight_prefix = [], 0, 0, 0
            if not config.window:
                # One token or more is left to compute.
                request.pages = self.cache.match(0, request.tokens[:-1])
                self.pages.hold(request.pages)
                request.scheduled = len(request.pages) * config.page_size
                self.prefix_hits += request.scheduled > 0
                self._map(request, 0, request.scheduled)
            self.running.append(request)

    def _prepare(self) -> _Step:
        """Choose what the next step does, give it slots and fill its tables."""
        if self.rng.random() < 0.01 and self.running:
            self._retract(self.rng.choice(self.running))
        if self.rng.random() < 0.01 and self.running:
            self._end(self.rng.choice(self.running), keep=False)
        self._admit()
        room, work = self.config.chunk, list[_Work]()
        for request in list(self.running):
            if request not in self.running or request.scheduled >= self.config.max_len - 1:
                continue
            known = len(request.tokens) - request.scheduled
            extend = 1 if known <= 1 else min(known, room)
            if not extend or not self._make_room(request, request.scheduled + extend):
                continue
            room -= extend if known > 1 else 0
            self._leave_window(request)
            self._map(request, request.scheduled, request.scheduled + extend)
            work.append(
                _Work(
                    request=request,
                    attempt=request.attempt,
                    row=request.row,
                    prefix=request.scheduled,
                    extend=extend,
                    samples=request.scheduled + extend >= len(request.tokens),
                )
            )
            request.in_flight_prefix = request.scheduled
            request.scheduled += extend
        # Making room may have taken a request back that was chosen already.
        return self._describe([w for w in work if w.request.attempt == w.attempt])

    def _make_room(self, request: _Request, length: int) -> bool:
        """Give `request` pages for `length` tokens, at the cost of the cache and of younger requests."""
        size = self.config.page_size
        while len(request.pages) * size < length:
            if not self.pages.num_free and not self._evict():
                victim = self.running[-1]
                self._retract(victim)
                if victim is request:
                    return False
                continue
            request.pages += self.pages.allocate(1)
        return True

    def _evict(self) -> bool:
        page = self.cache.evict(idle=lambda page: self.pages.holders[page] == 1)
        if page is not None:
            self._release([page], owner=0)
        return page is not None

    def _release(self, pages: Sequence[int], *, owner: int) -> None:
        """Let pages go; those that nobody holds are free, their slots retired behind the step in flight."""
        freed = self.pages.slots(self.pages.release(pages))
        self._to_retire.append(("full", owner, freed))
        self._unmap_swa(freed, owner=owner)

    def _unmap_swa(self, slots: Sequence[int], *, owner: int) -> None:
        if self.lut is None:
            return
        here = [slot for slot in slots if slot in self.swa_of]
        freed = [self.swa_of.pop(slot) for slot in here]
        self.free_swa.extend(freed)
        self._to_retire.append(("swa", owner, freed))
        if here:
            (where,) = send(self.device, here)
            self.lut[where] = 0

    def _leave_window(self, request: _Request) -> None:
        """Free the sliding layers' slots before the window, of the step in flight too: that one may still read."""
        first = max(0, request.in_flight_prefix - self.config.window)
        if self.lut is not None and first > request.evicted:
            slots = [self._slot(request, p) for p in range(request.evicted, first)]
            self._unmap_swa(slots, owner=request.serial)
            request.evicted = first

    def _slot(self, request: _Request, position: int) -> int:
        page, offset = divmod(position, self.config.page_size)
        return self.pages.first_slot + request.pages[page] * self.config.page_size + offset

    def _map(self, request: _Request, start: int, end: int) -> None:
        """Fill a row's table, on the scheduler's stream: a step in flight may be reading it."""
        if start == end:
            return
        positions = range(start, end)
        slots = [self._slot(request, p) for p in positions]
        where, values = send(self.device, list(positions), slots)
        self.table[request.row, where] = values.to(torch.int32)
        if self.lut is not None:
            new = [slot for slot in slots if slot not in self.swa_of]
            for slot in new:
                self.swa_of[slot] = self.free_swa.popleft()
            where, values = send(self.device, new, [self.swa_of[slot] for slot in new])
            self.lut[where] = values

    def _retract(self, request: _Request) -> None:
        self.retracted += 1
        self._leave(request)
        self.waiting.appendleft(request)

    def _end(self, request: _Request, *, keep: bool = True) -> None:
        if keep and not self.config.window:
            # What the step in flight writes is not for keeping.
            _, kept = self.cache.insert(0, request.tokens[:-1], request.pages, usable=lambda _: True)
            self.pages.hold(kept)
        self.outputs[request.serial] = request.tokens[request.prompt_len :]
        self.finished += 1
        self._leave(request)

    def _leave(self, request: _Request) -> None:
        request.attempt += 1
        self.running.remove(request)
        full = self.pages.slots(request.pages)
        slots = {"full": full}
        if self.lut is not None:
            slots["swa"] = [self.swa_of[slot] for slot in full if slot in self.swa_of]
        self._left.append((request.name, request.row, slots))
        self._release(request.pages, owner=request.serial)
        # Used again at once.
        self.free_rows.appendleft(request.row)
        request.row, request.pages = 0, []

    def _read_results(self, *, keep: int) -> None:
        """Take in what steps have sampled, but for the last `keep` steps."""
        while len(self._in_flight) > keep:
            step = self._in_flight.popleft()
            if step.event is not None:
                step.event.synchronize()
            if step.sampled is None:
                raise RuntimeError("kv-canary: overlapped engine: a step must be launched before it is read")
            for work, token in zip(step.work, step.sampled.tolist(), strict=False):
                request = work.request
                work.used = request.attempt == work.attempt
                if not work.used:
                    self.ran_on += 1
                elif work.samples:
                    self.tokens_generated += 1
                    self.wrong_tokens += token != self._next_token(request.tokens)
                    request.tokens.append(token)
                    if token % STOP == 0 or len(request.tokens) >= request.limit:
                        self._end(request)

    def _next_token(self, tokens: Sequence[int]) -> int:
        """Return what a healthy engine generates after `tokens`."""
        n, window = len(tokens), self.config.window
        total = sum(_word(t, p, 0, 0) for p, t in enumerate(tokens))
        if window:
            first = max(0, n - 1 - window)
            total += sum(_word(t, p, 1, 1) for p, t in enumerate(tokens[first:], first))
        return total % VOCABULARY

    # The device: the model, the canary, and the streams.

    def _describe(self, work: list[_Work]) -> _Step:
        slots: dict[str, list[int]] = {name: [] for name in self.pools}
        for w in work:
            for position in range(w.prefix, w.prefix + w.extend):
                full = self._slot(w.request, position)
                slots["full"].append(full)
                if self.lut is not None:
                    slots["swa"].append(self.swa_of[full])
        positions = [p for w in work for p in range(w.prefix, w.prefix + w.extend)]
        with self._on_stream():
            columns = send(self.device, positions, *slots.values())
        requests = [w.request.extended(w.extend, row=w.row, prefix_len=w.prefix, discarded=w.discarded) for w in work]
        batch = ForwardBatch(
            requests=requests,
            input_ids=None,
            positions=columns[0],
            out_slots=dict(zip(slots, columns[1:], strict=True)),
            tables=dict.fromkeys(self.pools, self.table),
        )
        return _Step(work=work, batch=batch)

    def _launch(self, step: _Step) -> None:
        with self._on_stream():
            if self.stream is not None:
                self.stream.wait_stream(torch.cuda.default_stream(self.device))
            work = step.work
            graph = self._graph_for(work)
            if graph is None:
                self._run_eagerly(step)
            else:
                self._replay(step, graph)
            rows = send(self.device, [w.row for w in work])[0]
            sampled = self.next_token[rows]
            if self.stream is None:
                step.sampled = sampled
            else:
                step.sampled = torch.empty(len(work), dtype=torch.int64, pin_memory=True)
                step.sampled.copy_(sampled, non_blocking=True)
                step.event = torch.cuda.Event()
                step.event.record()
        self._in_flight.append(step)

    def _run_eagerly(self, step: _Step) -> None:
        work, batch = step.work, step.batch
        of = [i for i, w in enumerate(work) for _ in range(w.extend)]
        # Tokens that only the device knows yet come from what the step before has sampled.
        known = [
            w.request.tokens[p] if p < len(w.request.tokens) else -1
            for w in work
            for p in range(w.prefix, w.prefix + w.extend)
        ]
        rows, prefix, extend, of_, ids = send(
            self.device, [w.row for w in work], [w.prefix for w in work], [w.extend for w in work], of, known
        )
        ids = torch.where(ids < 0, self.next_token[rows[of_]], ids) if len(of) else ids
        if batch.positions is None:
            raise RuntimeError("kv-canary: overlapped engine: positions must be known")
        if self.manager is None:
            self._model(rows, prefix, extend, ids, batch.positions, batch.out_slots)
            return
        forward = self.manager.forward()
        forward.begin(dataclasses.replace(batch, input_ids=ids))
        try:
            forward.head()
            self._model(rows, prefix, extend, ids, batch.positions, batch.out_slots)
            forward.tail()
        except BaseException:
            forward.abort()
            raise
        forward.end()

    def _graph_for(self, work: Sequence[_Work]) -> _Graph | None:
        if not work or any(w.extend > 1 or w.prefix < len(w.request.tokens) - 1 for w in work):
            return None
        return next((graph for size, graph in self._graphs if size >= len(work)), None)

    def _seed_next_tokens(self, work: Sequence[_Work]) -> None:
        """Put tokens that only the host knows where the graph's inputs are taken from."""
        given = [(w.row, w.request.tokens[w.prefix]) for w in work if w.prefix < len(w.request.tokens)]
        if given:
            rows, tokens = send(self.device, [row for row, _ in given], [token for _, token in given])
            self.next_token[rows] = tokens

    def _replay(self, step: _Step, graph: _Graph) -> None:
        n, work, batch = len(step.work), step.work, step.batch
        padding = [0] * (len(graph.rows) - n)
        rows, prefix = send(self.device, [w.row for w in work] + padding, [w.prefix for w in work] + padding)
        self._seed_next_tokens(work)
        graph.rows.copy_(rows)
        graph.prefix.copy_(prefix)
        graph.ids.copy_(self.next_token[rows])
        for name, slots in graph.out_slots.items():
            slots.zero_()
            slots[:n].copy_(batch.out_slots[name])
        if self.manager is not None:
            given = dataclasses.replace(batch, input_ids=graph.ids[:n])
            self.manager.forward().begin(given, captured=graph.captured)
        graph.graph.replay()
        if self.manager is not None:
            self.manager.forward().end()
        self.replays += 1

    def _capture(self, size: int) -> _Graph:
        """Capture a decode step of up to `size` requests, canary and all."""
        if self.manager is None:
            raise ValueError("kv-canary: overlapped engine: graphs must be captured with a canary, got none")
        rows, prefix, ids = (torch.zeros(size, dtype=torch.int64, device=self.device) for _ in range(3))
        # A graph reads its inputs where they lay: they live as long as it does.
        extend = torch.ones(size, dtype=torch.int64, device=self.device)
        out_slots = {name: torch.zeros(size, dtype=torch.int64, device=self.device) for name in self.pools}
        tables = dict.fromkeys(self.pools, self.table)
        torch.cuda.current_stream(self.device).synchronize()
        with self._on_stream():
            self._model(rows, prefix, extend, ids, prefix, out_slots)
            forward = self.manager.forward()
            with forward.capturing(requests=size, tokens=size, tables=tables) as captured:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=self.stream):
                    forward.head(input_ids=ids, positions=prefix)
                    self._model(rows, prefix, extend, ids, prefix, out_slots)
                    forward.tail()
        return _Graph(
            graph=graph, captured=captured, rows=rows, prefix=prefix, extend=extend, ids=ids, out_slots=out_slots
        )

    def _model(
        self,
        rows: torch.Tensor,
        prefix: torch.Tensor,
        extend: torch.Tensor,
        ids: torch.Tensor,
        positions: torch.Tensor,
        out_slots: Mapping[str, torch.Tensor],
    ) -> None:
        """Write K and V of the new tokens; generate a token for every row from the K and V of all of its tokens."""
        words = torch.arange(WORDS, device=self.device)
        for name, pool in self.pools.items():
            for half, source in enumerate((pool.k_source, pool.v_source)):
                for layer, tensor in enumerate(() if source is None else source.layers):
                    value = _words(ids[:, None], positions[:, None], half + 2 * layer, words)
                    # Nobody reads the padding slot.
                    tensor.view(torch.int64).index_copy_(0, out_slots[name], value)
        length = (prefix + extend)[:, None]
        at = torch.arange(self.config.max_len, device=self.device)[None]
        slots = self.table[rows].long().clamp(0, self.config.slots - 1)
        total = (self._read("full", 0, slots) * (at < length)).sum(1)
        if self.lut is not None:
            inside = (at < length) & (at >= length - 1 - self.config.window)
            total += (self._read("swa", 1, self.lut[slots]) * inside).sum(1)
        # Sums of positive words stay positive: words have 48 bits.
        token = total % VOCABULARY
        self.next_token.index_copy_(0, rows, torch.where(rows > 0, token, 0))

    def _read(self, name: str, half: int, slots: torch.Tensor) -> torch.Tensor:
        source = (self.pools[name].k_source, self.pools[name].v_source)[half]
        if source is None:
            raise RuntimeError("kv-canary: overlapped engine: both halves must have a source")
        return source.layers[0].view(torch.int64)[slots, half]

    def _retire_freed(self) -> None:
        """Mark what was freed, behind the step that was launched last: it was prepared before the free."""
        freed, self._to_retire = self._to_retire, []
        left, self._left = self._left, []
        if self.manager is None:
            return
        with self._on_stream():
            for request, row, by_group in left:
                self.manager.row_ended(row)
                sent = send(self.device, *by_group.values())
                self.manager.complete(request, dict(zip(by_group, sent, strict=True)))
            for name, owner, slots in freed:
                if slots:
                    self.manager.retire(self.pools[name], send(self.device, slots)[0], owner=owner)

    def _cached_slots(self) -> list[CachedSlots]:
        columns: tuple[list[int], list[int], list[int]] = ([], [], [])
        for page, place, before in self.cache.walk():
            slots = self.pages.slots([page])
            first = HEAD_OF_CHAIN if before < 0 else self.pages.slots([before])[-1]
            columns[0].extend(slots)
            columns[1].extend(range(place * len(slots), (place + 1) * len(slots)))
            columns[2].extend([first, *slots[:-1]])
        if not columns[0]:
            return []
        slots_, positions, previous = send(self.device, *columns)
        return [CachedSlots(group="full", slots=slots_, positions=positions, previous=previous)]

    def _pool(self, name: str, slots: int) -> KvPool:
        sources = [
            kv_source(slots, WORDS * 8, layers=self.config.layers, read_bytes=16, device=self.device) for _ in range(2)
        ]
        return KvPool(name=name, num_slots=slots, k_source=sources[0], v_source=sources[1], device=self.device)

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        with contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            yield


def _words(token: torch.Tensor, position: torch.Tensor, part: int, word: torch.Tensor) -> torch.Tensor:
    """Return what is written for a token, 48 positive bits a word."""
    x = token * 0x9E3779B1 + position * 0x85EBCA77 + part * 0xC2B2AE3D + word * 0x27D4EB2F
    return (x ^ (x >> 15)) & 0xFFFFFFFFFFFF


def _word(token: int, position: int, part: int, word: int) -> int:
    x = token * 0x9E3779B1 + position * 0x85EBCA77 + part * 0xC2B2AE3D + word * 0x27D4EB2F
    return (x ^ (x >> 15)) & 0xFFFFFFFFFFFF
