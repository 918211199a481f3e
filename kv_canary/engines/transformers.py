"""The adapter for Hugging Face transformers' continuous batching.

It wraps methods on the instances that a model or a manager makes: around every model forward it verifies and records,
and where the engine frees or copies KV blocks it keeps the records in step. Nothing of transformers is patched, and
its outputs are unchanged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers
from transformers.generation.continuous_batching import ContinuousBatchingManager

from kv_canary.accounts import CanarySummary
from kv_canary.capacities import CanaryLimits
from kv_canary.config import CanaryConfig
from kv_canary.engines.patches import Patches
from kv_canary.engines.transformers_layouts import Events, Layout, layout_class
from kv_canary.errors import must_be
from kv_canary.forward import ForwardBatch, ForwardRequest
from kv_canary.manager import CanaryManager
from kv_canary.pools import KvPool
from kv_canary.reports import CanaryViolationError, ViolationReport
from kv_canary.rows import RowTable
from kv_canary.state import widen

OnReport = Callable[[ViolationReport], None]

WARMUP_PREFIX = "__warmup_"


def install(target: Any, *, config: CanaryConfig, on_report: OnReport | None = None) -> TransformersCanary:
    """Install into a model (every manager it makes from now on) or into a `ContinuousBatchingManager`."""
    layout_class(transformers.__version__)
    if not isinstance(target, ContinuousBatchingManager) and not hasattr(target, "init_continuous_batching"):
        expected = "a model that can generate, or a ContinuousBatchingManager"
        raise TypeError(must_be("install", "target", expected, type(target).__name__))
    return TransformersCanary(target, config=config, on_report=on_report)


class TransformersCanary:
    """A canary in transformers: one session per batch processor, that is per cache, one after the other."""

    def __init__(self, target: Any, *, config: CanaryConfig, on_report: OnReport | None) -> None:
        self._config = config
        self._on_report = on_report
        self._patches = Patches()
        self._sessions: list[_Session] = []
        self._managers: list[Any] = []
        try:
            if isinstance(target, ContinuousBatchingManager):
                self._watch_manager(target)
            else:
                self._watch_model(target)
        except BaseException:
            self.uninstall()
            raise

    @property
    def manager(self) -> CanaryManager:
        """The canary of the newest cache; RuntimeError where the engine has not made one yet."""
        return self._newest().manager

    @property
    def layout(self) -> Layout:
        """Where the newest cache keeps what; RuntimeError where the engine has not made one yet."""
        return self._newest().layout

    @property
    def reports(self) -> list[ViolationReport]:
        """The latest reports, oldest first."""
        return [r for s in self._sessions for r in s.manager.reports]

    def summary(self) -> CanarySummary:
        """Return what the canary has done, over all caches."""
        parts = [s.manager.summary() for s in self._sessions]
        if not parts:
            return CanarySummary(
                status="disabled", steps=0, positions_verified=0, violations=0, reasons={}, launches={}
            )
        total = parts[0]
        for part in parts[1:]:
            total = dataclasses.replace(
                total,
                status=part.status if total.status != "degraded" else total.status,
                steps=total.steps + part.steps,
                positions_verified=total.positions_verified + part.positions_verified,
                violations=total.violations + part.violations,
                reasons=_add(total.reasons, part.reasons),
                launches=_add(total.launches, part.launches),
            )
        return total

    def flush(self) -> None:
        """Wait for everything launched, and report it now; in raise mode, raise what a forward found.

        Raises:
            CanaryViolationError: in raise mode, also where the engine swallowed it.
        """
        for session in self._sessions:
            session.manager.flush()
            if session.error is not None:
                error, session.error = session.error, None
                raise error

    def uninstall(self) -> None:
        """Leave the engine as it was found. What was recorded and reported can still be read."""
        self._patches.undo_all()
        for session in self._sessions:
            session.detach()

    def _newest(self) -> _Session:
        if not self._sessions:
            raise RuntimeError("kv-canary: transformers adapter: the cache must exist by now, got none yet")
        return self._sessions[-1]

    def _watch_model(self, model: Any) -> None:
        def make(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            manager = original(*args, **kwargs)
            self._watch_manager(manager)
            return manager

        def generate(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            # The engine turns an exception of a forward into failed requests; here it comes out again.
            result = original(*args, **kwargs)
            self.flush()
            return result

        self._patches.wrap(model, "init_continuous_batching", make)
        self._patches.wrap(model, "generate_batch", generate)

    def _watch_manager(self, manager: Any) -> None:
        if any(m is manager for m in self._managers):
            return
        self._managers.append(manager)

        def create(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            processor = original(*args, **kwargs)
            self._attach(processor)
            return processor

        self._patches.wrap(manager, "_create_batch_processor", create)
        if getattr(manager, "batch_processor", None) is not None:
            self._attach(manager.batch_processor)

    def _attach(self, processor: Any) -> None:
        if any(s.processor is processor for s in self._sessions):
            return
        for session in self._sessions:
            session.detach()
        self._sessions.append(_Session(processor, config=self._config, on_report=self._on_report))


class _Session:
    """The canary of one batch processor and its cache."""

    def __init__(self, processor: Any, *, config: CanaryConfig, on_report: OnReport | None) -> None:
        self.processor: Any = processor
        self.error: CanaryViolationError | None = None
        cache, io = processor.cache, processor.inputs_and_outputs
        if hasattr(io, "io_pairs"):
            raise ValueError(must_be("transformers adapter", "use_async_batching", "False", "True"))
        if getattr(cache, "max_blocks_per_request", 0) > 0:
            expected = "0: the decode fast path gives no slot indices to check"
            raise ValueError(
                must_be("transformers adapter", "max_blocks_per_request", expected, str(cache.max_blocks_per_request))
            )
        self.layout: Layout = layout_class(transformers.__version__)(processor, read_bytes=config.read_bytes)
        if not self.layout.empty():
            raise RuntimeError(must_be("transformers adapter", "the cache", "empty when installed", "requests in it"))
        max_requests = io.max_requests_per_batch
        limits = CanaryLimits(
            max_rows=2 * max_requests + 1,
            max_requests=max_requests,
            max_tokens=cache.max_batch_tokens,
            max_len=max(g.pool.num_slots for g in self.layout.groups),
        )
        self._rows = RowTable(limits.max_rows)
        self.manager = CanaryManager(
            self.layout.groups, limits=limits, config=config, rows=self._rows, on_report=on_report
        )
        self._stream: torch.cuda.Stream | None = io.compute_stream
        self._tables = [
            torch.zeros(limits.max_rows, 256, dtype=torch.int32, device=self.manager.device) for _ in self.layout.groups
        ]
        self._freed: dict[tuple[KvPool, int], list[torch.Tensor]] = {}
        self._patches = Patches()
        try:
            self._patches.wrap(processor.model_runner, "compute_batch", self._compute_batch)
            self.layout.watch(
                self._patches,
                Events(
                    freed=self._note_freed,
                    copied=self._copied,
                    request_freed=self._rows.release,
                    all_freed=self._rows.release_all,
                    cleared=self._cleared,
                    before_copy=self._retire_freed,
                ),
            )
        except BaseException:
            self._patches.undo_all()
            raise

    def detach(self) -> None:
        """Stop watching. The processor and its cache are let go of, so that their memory can be freed."""
        self._patches.undo_all()
        self.processor = None

    def _compute_batch(self, original: Callable[..., Any], model: Any, batch_data: dict[str, Any]) -> Any:
        requests = self.processor.inputs_and_outputs.requests_in_batch
        if any(f.state.request_id.startswith(WARMUP_PREFIX) for f in requests):
            return original(model, batch_data)
        forward = self.manager.forward()
        with self._on_stream():
            self._retire_freed()
            try:
                forward.begin(self._batch(requests, batch_data))
            except CanaryViolationError as error:
                self.error = error
                raise
        try:
            with self._on_stream():
                forward.head()
            result = original(model, batch_data)
            with self._on_stream():
                forward.tail()
        except BaseException:
            forward.abort()
            raise
        with self._on_stream():
            forward.end()
        return result

    def _batch(self, requests: Sequence[Any], batch_data: dict[str, Any]) -> ForwardBatch:
        keep = {f.state.request_id for f in requests}
        described = []
        for future in requests:
            state, extend = future.state, future.query_length
            described.append(
                ForwardRequest(
                    request_id=state.request_id,
                    row=self._rows.row(state.request_id, keep=keep),
                    owner=self._rows.owner(state.request_id),
                    # The engine has already counted this forward's tokens.
                    prefix_len=state.position_offset - extend,
                    extend_len=extend,
                    tokens=_history(state),
                )
            )
        tokens = sum(r.extend_len for r in described)
        out_slots, tables = {}, {}
        for g, group in enumerate(self.layout.groups):
            out_slots[group.name] = self.layout.to_slots(g, batch_data["write_index"][g][:tokens])
            self._fill_table(g, described, batch_data["read_index"][g])
            tables[group.name] = self._tables[g]
        return ForwardBatch(
            requests=described,
            input_ids=batch_data["input_ids"][0, :tokens],
            positions=batch_data["position_ids"][0, :tokens],
            out_slots=out_slots,
            tables=tables,
        )

    def _fill_table(self, g: int, requests: Sequence[ForwardRequest], read_index: torch.Tensor) -> None:
        """Write the slots that the model is about to read into the group's table, by row and position.

        The engine's read index holds, per request, the slots of its cached positions and then one entry per new token.
        """
        if read_index.numel() == 0:
            return
        group, device = self.layout.groups[g], self.manager.device
        cached = [min(r.prefix_len, group.window) if group.window else r.prefix_len for r in requests]
        longest = max((r.prefix_len for r in requests), default=0)
        if longest > self._tables[g].shape[1]:
            self._tables[g] = widen(self._tables[g], longest)
        begin = [0, *itertools.accumulate(cached)][:-1]
        base = [0, *itertools.accumulate(n + r.extend_len for r, n in zip(requests, cached, strict=True))][:-1]
        first = [r.prefix_len - n for r, n in zip(requests, cached, strict=True)]
        rows = [r.row for r in requests]
        numbers = torch.tensor([cached, begin, base, first, rows], dtype=torch.int64).to(device, non_blocking=True)
        of = torch.repeat_interleave(torch.arange(len(requests), device=device), numbers[0], output_size=sum(cached))
        k = torch.arange(len(of), device=device) - numbers[1][of]
        slots = self.layout.to_slots(g, read_index[numbers[2][of] + k])
        self._tables[g][numbers[4][of], numbers[3][of] + k] = slots.to(torch.int32)

    def _copied(self, pool: KvPool, src: torch.Tensor, dst: torch.Tensor, request_id: str) -> None:
        with self._on_stream():
            self.manager.move(pool, src, dst, owner=self._rows.owner(request_id))

    def _note_freed(self, pool: KvPool, slots: torch.Tensor, request_id: str | None) -> None:
        owner = 0 if request_id is None else self._rows.owner(request_id)
        self._freed.setdefault((pool, owner), []).append(slots)

    def _retire_freed(self) -> None:
        with self._on_stream():
            for (pool, owner), parts in self._freed.items():
                self.manager.retire(pool, torch.cat(parts), owner=owner)
        self._freed.clear()

    def _cleared(self) -> None:
        self._freed.clear()
        with self._on_stream():
            self.manager.clear()

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Run on the stream of the forward, behind what the caller's stream has launched."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield


def _history(state: Any) -> Callable[[int, int], list[int]]:
    """Return a function that gives a request's own tokens, prompt first; it follows the state as it grows."""

    def tokens(start: int, end: int) -> list[int]:
        prompt: list[int] = state.initial_tokens
        if start >= len(prompt):
            return list(state.generated_tokens[start - len(prompt) : end - len(prompt)])
        return list(prompt[start:end]) + list(state.generated_tokens[: max(0, end - len(prompt))])

    return tokens


def _add(left: dict[str, int], right: dict[str, int]) -> dict[str, int]:
    return {key: left.get(key, 0) + right.get(key, 0) for key in {**left, **right}}
