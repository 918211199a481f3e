"""The canary of one cache of transformers' continuous batching: what it does around every forward.

HEAD runs before the engine's `compute_batch` and TAIL behind it, on the engine's compute stream and outside its CUDA
graphs. The engine keeps a graph for every padded size it meets, and captures it when it first meets it; inside, HEAD
and TAIL would need static tables for each, and graphs that exist could not be watched. Outside, they are a few more
launches, the engine's graphs and their memory stay as they are, and a replay is a forward like any other: what it
reads and writes lies in the engine's static tensors, which is what the canary looks at.

With asynchronous batching the host prepares a forward while the one before it still runs. The engine takes in the
tokens of forward N - 1 before it prepares forward N + 1, so the tokens of every prefix are known by then; the new ones
are not, if they were sampled by forward N. They are taken from the device: carried over for HEAD as the engine is about
to do it, and as the model was given them for TAIL.

What goes wrong in here stays in here, in log mode: a forward that cannot be described goes by unwatched, and where the
engine tells something that could not be followed, every slot counts as unverified.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from kv_canary.config import CanaryConfig
from kv_canary.constants import BAD_SLOT
from kv_canary.engines.patches import Patches
from kv_canary.engines.transformers_base import Events, Layout
from kv_canary.engines.transformers_requests import Composer
from kv_canary.errors import must_be
from kv_canary.identity import Identity
from kv_canary.reports import CanaryViolationError, ViolationReport
from kv_canary.runtime.batch import ForwardBatch
from kv_canary.runtime.cached import CachedSlots
from kv_canary.runtime.capacities import CanaryLimits
from kv_canary.runtime.composition import BatchRequests, Int64s
from kv_canary.runtime.device_state import widen
from kv_canary.runtime.forward import SingleForwardManager
from kv_canary.runtime.guard import Contained
from kv_canary.runtime.host import send
from kv_canary.runtime.manager import CanaryManager
from kv_canary.runtime.pools import KvPool
from kv_canary.runtime.rows import RowTable

_NAME = attrgetter("request_id")


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
        self._written: dict[str, int] = {}
        device = torch.device(processor.cache.device)
        if device.type not in ("cpu", "cuda"):
            raise ValueError(must_be("transformers adapter", "device", "a CPU or a CUDA device", str(device)))
        self._stream: torch.cuda.Stream | None = (
            processor.inputs_and_outputs.compute_stream if device.type == "cuda" else None
        )
        # Forwards run in the engine's thread; flushes and uninstalling come from others.
        self._lock = threading.RLock()
        self._freed: dict[tuple[KvPool, int], list[torch.Tensor]] = {}
        # Requests that have ended, with the slots of each by group.
        self._ended: list[tuple[str, dict[str, torch.Tensor]]] = []
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
            written=lambda request_id: self._written.get(request_id, 0),
        )
        try:
            with self._on_stream():
                # What it allocates is had now or never.
                self.manager.forward()
                self._tables = [
                    torch.zeros(limits.max_rows, 256, dtype=torch.int32, device=self.manager.device)
                    for _ in self.layout.groups
                ]
                self.manager.warm_up({g.name: t for g, t in zip(self.layout.groups, self._tables, strict=True)})
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
        begun = self._before(batch_data)
        if begun is None:
            return original(model, batch_data)
        forward, batch = begun
        try:
            result = original(model, batch_data)
        except BaseException:
            with self._lock, self._contained("giving up a forward"), self._on_stream():
                forward.abort()
            raise
        self._after(forward, batch, batch_data)
        return result

    def _before(self, batch_data: dict[str, Any]) -> tuple[SingleForwardManager, ForwardBatch] | None:
        """Verify what the forward is about to read; return it and its batch, or None if it is not to be watched."""
        with self._lock:
            if self.processor is None or self.manager.is_off:
                # Uninstalled, by another thread, since the engine made this call; or never turned on.
                return None
            try:
                # First of all: a forward that goes by unwatched may write to slots that were freed before.
                self._retire_freed()
                with self._contained("describing a forward") as part, self._on_stream():
                    batch = self._described(batch_data)
                if part.failed:
                    self._skip(batch_data)
                    return None
                if batch is None:
                    return None
                with self._contained("beginning a forward"), self._on_stream():
                    forward = self.manager.forward()
                    try:
                        forward.begin(batch)
                        forward.head()
                    except BaseException:
                        forward.abort()
                        raise
                    return forward, batch
            except CanaryViolationError as error:
                self.error = error
                raise
            return None

    def _after(self, forward: SingleForwardManager, batch: ForwardBatch, batch_data: dict[str, Any]) -> None:
        """Record what the forward has written."""
        with self._lock, self._contained("ending a forward"), self._on_stream():
            if self.processor is None:
                forward.abort()
                return
            try:
                forward.tail(input_ids=_input_ids(batch_data) if _is_async(self.processor) else None)
                requests = batch.arrays
                ends = (requests.prefix + requests.extend).tolist()
                self._written.update(zip(map(_NAME, requests.composition.members), ends, strict=True))
                forward.end()
            except BaseException:
                forward.abort()
                raise

    def _contained(self, part: str) -> Contained:
        return self.manager.guard.contain(f"transformers adapter: {part}")

    def _described(self, batch_data: dict[str, Any]) -> ForwardBatch | None:
        """Return what the engine is about to run, or None for a warm-up."""
        futures = _host_inputs(self.processor).requests_in_batch
        requests = self._composer.requests_of(futures)
        if requests is None:
            self._forget_blocks(f.state.request_id for f in futures)
            return None
        return self._batch(requests, batch_data)

    def _skip(self, batch_data: dict[str, Any]) -> None:
        """Let a forward go by unwatched; what it writes counts as unverified, or everything where that is not known."""
        slots: dict[str, torch.Tensor] = {}
        futures = _host_inputs(self.processor).requests_in_batch
        with self._contained("finding what a forward writes"), self._on_stream():
            tokens = sum(f.query_length for f in futures)
            (prefix,) = send(self.manager.device, [f.state.position_offset - f.query_length for f in futures])
            for g, group in enumerate(self.layout.groups):
                slots[group.name] = self._out_slots(g, prefix, tokens, batch_data)
        with self._contained("skipping a forward"), self._on_stream():
            self.manager.forward().skip(slots, why="it could not be described")
        self._written.update((f.state.request_id, f.state.position_offset) for f in futures)

    def _out_slots(self, g: int, prefix: torch.Tensor, tokens: int, batch_data: dict[str, Any]) -> torch.Tensor:
        """Return the slots that the model is about to write in a group.

        Args:
            g: number of the group.
            prefix: int64 [requests] on the device.
            tokens: that are written.
            batch_data: of the engine.
        """
        pages, page = batch_data.get("block_table"), self.layout.page
        if pages is None:
            return self.layout.to_slots(g, batch_data["write_index"][g][:tokens])
        # Such a step has one new token a request.
        columns = (prefix // page).clamp(max=pages.shape[-1] - 1)
        first = pages[g, : len(prefix)].gather(1, columns[:, None])[:, 0].long() * page
        return self.layout.to_slots(g, first + prefix % page)

    def _batch(self, requests: BatchRequests, batch_data: dict[str, Any]) -> ForwardBatch:
        tokens, groups = requests.num_tokens, self.layout.groups
        cached = [np.minimum(requests.prefix, g.window) if g.window else requests.prefix for g in groups]
        prefix, rows, *begins = send(
            self.manager.device, requests.prefix, requests.rows, *(_begins(requests, count) for count in cached)
        )
        longest, out_slots, tables = int(requests.prefix.max(initial=0)), {}, {}
        for g, group in enumerate(groups):
            if longest:
                if batch_data.get("block_table") is None:
                    needed = int(cached[g].sum()) + tokens
                    slots = self._slots_by_index(g, batch_data["read_index"][g], begins[g], longest, needed=needed)
                else:
                    slots = self._slots_by_pages(g, batch_data["block_table"][g][: len(rows)], longest)
                self._table(g, longest)[:, :longest].index_copy_(0, rows, slots)
            out_slots[group.name] = self._out_slots(g, prefix, tokens, batch_data)
            tables[group.name] = self._table(g, longest)
        input_ids = _input_ids(batch_data)
        if _is_async(self.processor):
            io = self.processor.inputs_and_outputs
            input_ids = input_ids.clone()
            carry_over_ids, previous_ids, _ = io.get_cb_kwargs()
            io.carry_over_tokens(input_ids[None], carry_over_ids, previous_ids)
        return ForwardBatch(
            requests=requests,
            input_ids=input_ids[:tokens],
            positions=batch_data["position_ids"][0, :tokens],
            out_slots=out_slots,
            tables=tables,
        )

    def _table(self, g: int, length: int) -> torch.Tensor:
        """Return the table of a group, with room for so many positions."""
        if length > self._tables[g].shape[1]:
            self._tables[g] = widen(self._tables[g], length)
        return self._tables[g]

    def _slots_by_index(
        self, g: int, read_index: torch.Tensor, begins: torch.Tensor, longest: int, *, needed: int
    ) -> torch.Tensor:
        """Return the slots that the model is about to read, int32 [requests, longest], by the engine's read index.

        What a request does not read, or past its prefix, is anything.

        Args:
            g: number of the group.
            read_index: holds, per request, the slots of its cached positions and then one entry per new token.
            begins: int64 [requests] where the slot of position 0 is, or would be.
            longest: of the prefixes.
            needed: entries that the engine has for all requests.
        """
        slots = self.layout.to_slots(g, read_index[:needed]).to(torch.int32)
        # What the index lacks is reported as out of range, instead of being looked up there.
        short = needed - len(slots)
        padded = torch.nn.functional.pad(slots, (longest, longest + short), value=BAD_SLOT)
        # Row i of it is what begins at entry i.
        return padded.as_strided((needed + longest, longest), (1, 1)).index_select(0, begins + longest)

    def _slots_by_pages(self, g: int, pages: torch.Tensor, longest: int) -> torch.Tensor:
        """Return the slots that the model is about to read, int32 [requests, longest], by the engine's block table.

        Decode steps through a kernel that finds slots itself have it: per request of the batch, where its blocks begin,
        counted in pages.
        """
        page = self.layout.page
        first = pages[:, : -(-longest // page)].long() * page
        slots = self.layout.to_slots(g, (first[:, :, None] + torch.arange(page, device=first.device)).flatten(1))
        slots = slots.to(torch.int32)[:, :longest]
        return torch.nn.functional.pad(slots, (0, longest - slots.shape[1]), value=BAD_SLOT)

    def _cached(self) -> Sequence[CachedSlots]:
        return self.layout.cached(anchored=self._anchored)

    def _forget_blocks(self, request_ids: Iterable[str]) -> None:
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

    def _forget(self, request_id: str) -> None:
        self._composer.forget([request_id])
        self._written.pop(request_id, None)

    def _forget_all(self) -> None:
        self._composer.forget()
        self._written.clear()

    def _copied(self, pool: KvPool, src: torch.Tensor, dst: torch.Tensor, request_id: str) -> None:
        with self._on_stream():
            sources, targets = send(self.manager.device, src.tolist(), dst.tolist())
            self.manager.move(pool, sources, targets, owner=self._rows.owner(request_id))

    def _note_freed(self, pool: KvPool, slots: torch.Tensor, request_id: str | None) -> None:
        owner = 0 if request_id is None else self._rows.owner(request_id)
        self._freed.setdefault((pool, owner), []).append(slots)

    def _note_ended(self, request_id: str) -> None:
        if not self.manager.completes:
            return
        slots = {
            group.name: self.layout.block_slots(group.pool, self.layout.block_table(g).get(request_id, []))
            for g, group in enumerate(self.layout.groups)
        }
        self._ended.append((request_id, slots))

    def _complete_ended(self) -> None:
        """Hold what ended requests rested on against its seals, before its slots are retired."""
        ended, self._ended = self._ended, []
        with self._contained("completing requests"), self._on_stream():
            for request_id, slots in ended:
                sent = send(self.manager.device, *(its.tolist() for its in slots.values()))
                self.manager.complete(request_id, dict(zip(slots, sent, strict=True)))

    def _retire_freed(self) -> None:
        if self._ended:
            self._complete_ended()
        if not self._freed:
            return
        freed, self._freed = self._freed, {}
        with self._contained("following what was freed") as failing, self._on_stream():
            for (pool, owner), parts in freed.items():
                (slots,) = send(self.manager.device, torch.cat(parts).tolist())
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
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield


def _begins(requests: BatchRequests, cached: Int64s) -> Int64s:
    """Return where the entries of each request begin in the engine's read index, as if it began with position 0.

    Args:
        requests: of the forward.
        cached: int64 [requests] cached positions that are in the index, the last ones.
    """
    entries = cached + requests.extend
    begins: Int64s = np.cumsum(entries) - entries - (requests.prefix - cached)
    return begins


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
