"""The canary of one cache of transformers' continuous batching: what it does around every forward.

HEAD runs before the engine's `compute_batch` and TAIL behind it, on the engine's compute stream and outside its CUDA
graphs. The engine keeps a graph for every padded size it meets, and captures it when it first meets it; inside, HEAD
and TAIL would need static tables for each, and graphs that exist could not be watched. Outside, they are a few more
launches, the engine's graphs and their memory stay as they are, and a replay is a forward like any other: what it
reads and writes lies in the engine's static tensors, which is what the canary looks at.

With asynchronous batching the host prepares a forward while the one before it still runs. The engine takes in the
tokens of forward N - 1 before it prepares forward N + 1, so the tokens of every prefix are known by then; the new ones
are not, if they were sampled by forward N. They are taken from the device: as the model was given them for TAIL, and
where HEAD asks for them, carried over as the engine is about to do it.

Decode steps are repeated: a step of which every request is one token longer than in the one before sends its numbers,
fills the tables from the engine's index tensors of this step, see `transformers_tables`, and launches what was launched
before on the same memory.

What goes wrong in here stays in here, in log mode: a forward that cannot be described goes by unwatched, and where the
engine tells something that could not be followed, every slot counts as unverified.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch

from kv_canary.config import CanaryConfig
from kv_canary.engines.patches import Patches
from kv_canary.engines.transformers_base import Events, Layout
from kv_canary.engines.transformers_requests import Composer, Written
from kv_canary.engines.transformers_tables import Tables
from kv_canary.errors import must_be
from kv_canary.identity import Identity
from kv_canary.reports import CanaryViolationError, ViolationReport
from kv_canary.runtime.batch import ForwardBatch
from kv_canary.runtime.cached import CachedSlots
from kv_canary.runtime.capacities import CanaryLimits
from kv_canary.runtime.composition import BatchRequests
from kv_canary.runtime.frees import MOST_FREERS
from kv_canary.runtime.guard import Contained
from kv_canary.runtime.host import send
from kv_canary.runtime.manager import CanaryManager
from kv_canary.runtime.pools import KvPool
from kv_canary.runtime.rows import RowTable


class Session:
    """The canary of one batch processor and its cache.

    Args:
        processor: the engine's `ContinuousBatchProcessor`.
        layout: makes the layout of its cache.
        config: how to behave.
        on_report: called with every report that is written out.
        identity: tells what a request's KV depends on besides its tokens; asked when the engine takes the request in,
            and again where it comes back after the engine had let go of its cache.
        incident_numbers: of new incidents; None: from 1 on.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        processor: Any,
        *,
        layout: type[Layout],
        config: CanaryConfig,
        on_report: Callable[[ViolationReport], None] | None,
        identity: Callable[[Any], Identity] | None,
        incident_numbers: Iterator[int] | None = None,
    ) -> None:
        self.processor: Any = processor
        self.error: CanaryViolationError | None = None
        self._anchored = identity is not None
        self._written = Written()
        device = torch.device(processor.cache.device)
        if device.type not in ("cpu", "cuda"):
            raise ValueError(must_be("transformers adapter", "device", "a CPU or a CUDA device", str(device)))
        self._stream: torch.cuda.Stream | None = (
            processor.inputs_and_outputs.compute_stream if device.type == "cuda" else None
        )
        # Forwards run in the engine's thread; flushes and uninstalling come from others.
        self._lock = threading.RLock()
        # Blocks by pool and by the owner number of who has freed them.
        self._freed: dict[tuple[KvPool, int], list[int]] = {}
        # Requests that have ended, with the blocks of each group.
        self._ended: list[tuple[Hashable, list[list[int]]]] = []
        self._patches = Patches(failed=self._hook_failed)
        # All that HEAD and TAIL work on is allocated on their stream, so that it is not reused while they run.
        with self._on_stream():
            self.layout = layout(processor, read_bytes=config.read_bytes)
            if not self.layout.empty():
                raise RuntimeError(
                    must_be("transformers adapter", "the cache", "empty when installed", "requests in it")
                )
            max_requests = _host_inputs(processor).max_requests_per_batch
            limits = CanaryLimits(
                max_rows=2 * max_requests + 1,
                max_requests=max_requests,
                max_tokens=processor.cache.max_batch_tokens,
                max_len=max(g.pool.num_slots for g in self.layout.groups),
            )
            self._rows = RowTable(limits.max_rows)
            self._composer = Composer(self._rows, identity)
            self.manager = CanaryManager(
                self.layout.groups,
                limits=limits,
                config=config,
                rows=self._rows,
                on_report=on_report,
                cached=self._cached,
                incident_numbers=incident_numbers,
            )
        events = Events(
            freed=self._note_freed,
            copied=self._copied,
            request_ended=self._note_ended,
            request_freed=self._forget,
            all_freed=self._forget_all,
            reused=self._drop,
            cleared=self._cleared,
            before_copy=self._retire_freed,
            written=self._written.of,
        )
        try:
            with self._on_stream():
                # What it allocates is had now or never.
                self._forward = self.manager.forward()
                self._tables = Tables(self.layout, limits=limits, device=self.manager.device)
                self.manager.warm_up(self._tables.by_group)
            self._patches.wrap(processor.model_runner, "compute_batch", self._compute_batch)
            self.layout.watch(self._patches, events)
            if config.check_writes:
                self.layout.watch_writes(self._patches, self.manager.handed)
        except BaseException:
            self._patches.undo_all()
            self.manager.close()
            raise

    def flush(self) -> None:
        """Wait for everything launched, and report it now.

        Raises:
            CanaryViolationError: in raise mode, if there was anything to report, now or in a forward before.
        """
        with self._lock:
            error, self.error = self.error, None
            self._flush()
        if error is not None:
            raise error

    def close(self) -> None:
        """Leave the engine as it was found, and report what is left; in raise mode it is kept in `error`."""
        self._patches.undo_all()
        with self._lock:
            if self.processor is None:
                return
            self.processor = None
            try:
                self._flush()
            except CanaryViolationError as error:
                self.error = self.error or error
            finally:
                # Who has all caches says it.
                self.manager.close(says_verdict=False)

    def _flush(self) -> None:
        with self._contained("flush"), self._on_stream():
            self.manager.flush()
            # The engine's thread may be in a forward.
            if self._ended and self.manager.is_idle:
                self._complete_ended()
                self.manager.flush()

    def _hook_failed(self, method: str, error: Exception) -> None:
        """Take in that what the engine told by a call of `method` could not be followed."""
        guard = self.manager.guard
        if not guard.contains:
            raise error
        guard.failed(f"transformers adapter: following {method}", error)
        self._forget_records()

    def _forget_records(self) -> None:
        """Take in that nobody can say what any slot holds: all of them are taken in anew, as they are read."""
        # What could not be retired in time must not be later: whoever has such a slot by then would lose its mark.
        self._freed.clear()
        self._ended.clear()
        for pool in self.manager.pools:
            self.manager.unverified.forget_all(pool)

    def _compute_batch(self, original: Callable[..., Any], model: Any, batch_data: dict[str, Any]) -> Any:
        requests = self._before(batch_data)
        if requests is None:
            return original(model, batch_data)
        try:
            result = original(model, batch_data)
        except BaseException:
            with self._lock, self._contained("giving up a forward"), self._on_stream():
                self._forward.abort()
            raise
        self._after(requests, batch_data)
        return result

    def _before(self, batch_data: dict[str, Any]) -> BatchRequests | None:
        """Verify what the forward is about to read; return its requests, or None if it is not to be watched."""
        with self._lock:
            if self.processor is None or self.manager.is_off:
                # Uninstalled, by another thread, since the engine made this call; or never turned on.
                return None
            try:
                # First of all: a forward that goes by unwatched may write to slots that were freed before.
                self._retire_freed()
                requests = None
                with self._contained("describing a forward") as part, self._on_stream():
                    requests = self._described(batch_data)
                    if requests is None or self._repeat(requests):
                        return requests
                if part.failed or requests is None:
                    self._skip(batch_data)
                    return None
                with self._contained("beginning a forward"), self._on_stream():
                    self._begin(requests, batch_data)
                    return requests
            except CanaryViolationError as error:
                self.error = error
                raise
            return None

    def _after(self, requests: BatchRequests, batch_data: dict[str, Any]) -> None:
        """Record what the forward has written."""
        forward = self._forward
        with self._lock, self._contained("ending a forward"), self._on_stream():
            if self.processor is None:
                forward.abort()
                return
            try:
                self._tables.take_given(batch_data)
                # Where HEAD was given input ids, it was before they were carried over.
                carried = _is_async(self.processor) and not forward.repeats
                forward.tail(input_ids=_input_ids(batch_data) if carried else None, given=self._tables.given)
                self._written.note(requests)
                forward.end()
            except BaseException:
                forward.abort()
                raise

    def _contained(self, part: str) -> Contained:
        return self.manager.guard.contain(f"transformers adapter: {part}")

    def _described(self, batch_data: dict[str, Any]) -> BatchRequests | None:
        """Return the requests of what the engine is about to run, or None for a warm-up; fill the tables."""
        futures = _host_inputs(self.processor).requests_in_batch
        requests = self._composer.requests_of(futures)
        if requests is None:
            self._forget_blocks(f.state.request_id for f in futures)
            return None
        if self._tables.widen(requests.longest):
            # They are of tables that nobody fills any more.
            self._forward.forget_graphs()
        self._tables.fill(requests, batch_data)
        return requests

    def _repeat(self, requests: BatchRequests) -> bool:
        """Begin a forward that is like those before it, and run HEAD; return False where it is not known to be."""
        tokens = requests.num_tokens
        try:
            return self._forward.repeat(requests, out_slots=lambda: self._tables.written(tokens))
        except BaseException:
            self._forward.abort()
            raise

    def _begin(self, requests: BatchRequests, batch_data: dict[str, Any]) -> None:
        """Begin a forward that is like none before it, and run HEAD."""
        try:
            self._forward.begin(self._batch(requests, batch_data))
            self._forward.head()
        except BaseException:
            self._forward.abort()
            raise

    def _skip(self, batch_data: dict[str, Any]) -> None:
        """Let a forward go by unwatched; what it writes counts as unverified, or everything where that is not known."""
        slots: dict[str, torch.Tensor] = {}
        futures = _host_inputs(self.processor).requests_in_batch
        with self._contained("finding what a forward writes"), self._on_stream():
            tokens = sum(f.query_length for f in futures)
            prefix = [f.state.position_offset - f.query_length for f in futures]
            slots = self._tables.find_written(prefix, batch_data, tokens=tokens)
        with self._contained("skipping a forward"), self._on_stream():
            self._forward.skip(slots, why="it could not be described")
        self._written.note_futures(futures)

    def _batch(self, requests: BatchRequests, batch_data: dict[str, Any]) -> ForwardBatch:
        tokens, input_ids = requests.num_tokens, _input_ids(batch_data)
        if _is_async(self.processor):
            io = self.processor.inputs_and_outputs
            input_ids = input_ids.clone()
            carry_over_ids, previous_ids, _ = io.get_cb_kwargs()
            io.carry_over_tokens(input_ids[None], carry_over_ids, previous_ids)
        return ForwardBatch(
            requests=requests,
            input_ids=input_ids[:tokens],
            positions=batch_data["position_ids"][0, :tokens],
            out_slots=self._tables.written(tokens),
            tables=dict(self._tables.by_group),
            is_given_at_tail=True,
        )

    def _cached(self) -> Sequence[CachedSlots]:
        return self.layout.cached(anchored=self._anchored)

    def _forget_blocks(self, request_ids: Iterable[Hashable]) -> None:
        """Drop the records of what a warm-up writes into: blocks that were freed, whose bytes change now."""
        for request_id in request_ids:
            for g, group in enumerate(self.layout.groups):
                blocks = self.layout.block_table(g).get(request_id, [])
                self._drop(group.pool, self.layout.block_slots(group.pool, blocks))

    def _drop(self, pool: KvPool, slots: torch.Tensor) -> None:
        with self._on_stream():
            (mine,) = send(self.manager.device, slots.tolist())
            for records in pool.buffers:
                records[mine] = 0
            # Nothing was written there, which is not to be taken for what could not be followed.
            self.manager.unverified.written(pool, mine)

    def _forget(self, request_id: Hashable) -> None:
        self._composer.forget([request_id])
        self._written.forget(request_id)

    def _forget_all(self) -> None:
        self._composer.forget()
        self._written.clear()

    def _copied(self, pool: KvPool, src: torch.Tensor, dst: torch.Tensor, request_id: Hashable) -> None:
        with self._on_stream():
            sources, targets = send(self.manager.device, src.tolist(), dst.tolist())
            self.manager.move(pool, sources, targets, owner=self._rows.owner(request_id))

    def _note_freed(self, pool: KvPool, blocks: Sequence[int], request_id: Hashable | None) -> None:
        if blocks:
            owner = 0 if request_id is None else self._rows.owner(request_id)
            self._freed.setdefault((pool, owner), []).extend(blocks)

    def _note_ended(self, request_id: Hashable) -> None:
        if self.manager.completes:
            groups = range(len(self.layout.groups))
            self._ended.append((request_id, [list(self.layout.block_table(g).get(request_id, ())) for g in groups]))

    def _complete_ended(self) -> None:
        """Hold what ended requests rested on against its seals, before its slots are retired."""
        if not self._ended:
            return
        ended, self._ended = self._ended, []
        with self._contained("completing requests"), self._on_stream():
            slots = dict[str, Sequence[torch.Tensor]]()
            for g, group in enumerate(self.layout.groups):
                lists = [blocks[g] for _, blocks in ended]
                all_of_them = self.layout.block_slots(group.pool, list(chain.from_iterable(lists)))
                slots[group.name] = all_of_them.split([len(its) * self.layout.page for its in lists])
            self.manager.complete_all(
                [
                    (str(request_id), {name: its[number] for name, its in slots.items()})
                    for number, (request_id, _) in enumerate(ended)
                ]
            )

    def _retire_freed(self) -> None:
        self._complete_ended()
        if not self._freed:
            return
        freed, self._freed = self._freed, {}
        with self._contained("following what was freed") as failing, self._on_stream():
            if len({owner for _, owner in freed}) > MOST_FREERS:
                together: dict[tuple[KvPool, int], list[int]] = {}
                for (pool, _), blocks in freed.items():
                    together.setdefault((pool, 0), []).extend(blocks)
                freed = together
            slots_of = self.layout.block_slots
            sent = send(self.manager.device, *(slots_of(pool, blocks).numpy() for (pool, _), blocks in freed.items()))
            for (pool, owner), slots in zip(freed, sent, strict=True):
                self.manager.retire(pool, slots, owner=owner)
        if failing.failed:
            self._forget_records()

    def _cleared(self) -> None:
        self._complete_ended()
        self._freed.clear()
        with self._on_stream():
            self.manager.clear()

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Run on the stream of the forward, behind what the caller's stream has launched."""
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream(self._stream.device)
        if current == self._stream:
            yield
            return
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield


def _is_async(processor: Any) -> bool:
    return hasattr(processor.inputs_and_outputs, "io_pairs")


def _host_inputs(processor: Any) -> Any:
    """Return what the host has prepared for the forward that is about to run."""
    io = processor.inputs_and_outputs
    return io.io_pairs[io.current_pair].host_io if _is_async(processor) else io


def _input_ids(batch_data: dict[str, Any]) -> torch.Tensor:
    """Return the model's flat input ids, padding included."""
    ids: torch.Tensor = batch_data["input_ids"][0]
    return ids
