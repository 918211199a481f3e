"""The canary of one scheduler process: what SGLang calls, see `hooks`, and what becomes of it.

HEAD runs before `ModelRunner.forward` and TAIL behind it, on the stream that it is called on and outside CUDA graphs:
captured graphs and their memory stay as they are, and a replay is a forward like any other.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kv_canary.capacities import CanaryLimits
from kv_canary.config import CanaryConfig
from kv_canary.engines.patches import Patches
from kv_canary.engines.sglang import batches, hooks, lifetime, plugin, pools, radix, speculative, support, transfer
from kv_canary.forward import ForwardBatch, SingleForwardManager
from kv_canary.manager import CanaryManager
from kv_canary.pools import BufferGroup
from kv_canary.reports import CanaryViolationError
from kv_canary.sweep import CachedSlots

logger = logging.getLogger("kv_canary")

_current: Session | None = None


def current() -> Session:
    """Return the session of this process; RuntimeError where there is none."""
    if _current is None:
        raise RuntimeError("kv-canary: sglang adapter: a scheduler must be installed into, got none")
    return _current


def install(scheduler: Any, *_: Any, **__: Any) -> None:
    """Called before `Scheduler.init_disaggregation`: put a canary into the scheduler."""
    global _current
    if _current is not None:
        _current.close()
    if not plugin.wanted():
        return
    hooks.expect_live()
    _current = Session(scheduler, config=CanaryConfig.from_env())
    atexit.register(_current.close)


def note_requests(forward_batch: Any, _cls: Any, schedule_batch: Any, *_: Any, **__: Any) -> None:
    """Called after `ForwardBatch.init_new`: keep who the forward is of."""
    if _current is not None:
        batches.note(forward_batch, schedule_batch)


def forward(original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Called around `ModelRunner.forward`."""
    if _current is None:
        return original(runner, forward_batch, *args, **kwargs)
    return _current.forward(original, runner, forward_batch, *args, **kwargs)


def idle(*_: Any, **__: Any) -> None:
    """Called before `Scheduler.on_idle`: report what the last forward found."""
    if _current is not None:
        _current.idle()


def add_to_internal_state(result: Any, *_: Any, **__: Any) -> None:
    """Called after `Scheduler.get_internal_state`, which `/get_server_info` shows."""
    if _current is not None:
        result.internal_state["kv-canary"] = _current.status()


class Session:
    """The canary of one scheduler.

    Args:
        scheduler: SGLang's `Scheduler`, whose pools and prefix cache exist and hold nothing yet.
        config: how to behave.

    Raises:
        ValueError: the scheduler is configured in a way that the adapter does not serve; the text says which.
    """

    def __init__(self, scheduler: Any, *, config: CanaryConfig) -> None:
        support.check(scheduler)
        speculative.check_supported(scheduler.server_args)
        radix.check(scheduler.tree_cache)
        if transfer.needs_both_records(scheduler.server_args):
            config = dataclasses.replace(config, records="head_and_tail")
        if config.metrics_port:
            # Every rank is a process with a port of its own.
            config = dataclasses.replace(config, metrics_port=config.metrics_port + support.rank(scheduler))
        self.scheduler = scheduler
        # Why the canary was turned off, if it was.
        self.off = ""
        self.owners = batches.Owners()
        self._overlap = bool(scheduler.enable_overlap)
        self._patches = Patches()
        self._anchored = False
        # Whether something was launched since the last look at what was found.
        self._pending = False
        target = scheduler.tp_worker.model_runner
        self._groups: dict[Any, tuple[BufferGroup, ...]] = {
            target: pools.attach(
                target.token_to_kv_pool,
                name="",
                read_bytes=config.read_bytes,
                window=target.sliding_window_size or 0,
            )
        }
        for number, runner in enumerate(speculative.draft_runners(scheduler)):
            self._groups[runner] = pools.attach(
                runner.token_to_kv_pool,
                name="draft" if not number else f"draft {number + 1}",
                read_bytes=config.read_bytes,
                window=runner.sliding_window_size or 0,
                token_offset=1,
            )
        groups = [g for mine in self._groups.values() for g in mine]
        table = target.req_to_token_pool.req_to_token
        try:
            self._lifetime = lifetime.Lifetime(
                scheduler.token_to_kv_pool_allocator,
                groups,
                patches=self._patches,
                cleared=self._cleared,
                guarded=self._guarded,
            )
            if not self._lifetime.tracks:
                config = dataclasses.replace(config, track_lifetime=False, quarantine=False)
            self.manager = CanaryManager(
                groups,
                limits=CanaryLimits(
                    max_rows=table.shape[0],
                    max_requests=table.shape[0],
                    max_tokens=support.most_tokens(scheduler),
                    max_len=table.shape[1],
                ),
                config=config,
                rows=self.owners,
                cached=self._cached,
                ranks=support.ranks(scheduler, config),
            )
        except BaseException:
            self._patches.undo_all()
            raise
        self._speculation: speculative.Speculation | None = None
        try:
            if not scheduler.spec_algorithm.is_none():
                self._speculation = speculative.Speculation(
                    scheduler.draft_worker, patches=self._patches, step=self._one_step, forward=self.forward
                )
            transfer.watch(
                scheduler,
                self.manager,
                [(runner.token_to_kv_pool, mine) for runner, mine in self._groups.items()],
                patches=self._patches,
                owner_of=self.owners.owner,
                retire_freed=self._retire_freed,
                guarded=self._guarded,
            )
        except BaseException:
            self._patches.undo_all()
            self.manager.close()
            raise
        logger.info(
            "kv-canary: installed into sglang %s: mode %s, backend %s, groups %s, lifetime tracked: %s",
            hooks.sglang_version(),
            config.mode,
            self.manager.backend,
            ", ".join(f"{g.name} ({g.pool.num_slots} slots)" for g in groups),
            self._lifetime.tracks,
        )

    def forward(self, original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Verify what a forward is about to read, run it, and record what it has written."""
        watched = self._guarded(lambda: self._before(runner, forward_batch))
        try:
            result = original(runner, forward_batch, *args, **kwargs)
        except BaseException:
            if watched is not None:
                watched.abort()
            raise
        if watched is not None:
            self._guarded(lambda: self._after(watched))
        return result

    def idle(self) -> None:
        """Report what the last forward found: the scheduler has nothing to do, so that waiting costs nothing."""
        if self._pending and not self.off:
            self._pending = False
            self._guarded(self.manager.flush)

    def status(self) -> dict[str, Any]:
        """Return what the canary has done, which hooks are live, and why it is off if it is; JSON-ready."""
        summary = self.manager.summary().as_dict()
        if self.off:
            summary["status"] = "disabled"
        return {
            **summary,
            "off": self.off,
            "mode": self.manager.config.mode,
            "groups": [g.name for g in self.manager.groups],
            "lifetime": self._lifetime.tracks,
            "hooks": hooks.live(),
        }

    def close(self) -> None:
        """Report what is left, and leave the engine as it was found; the second call does nothing."""
        global _current
        if _current is self:
            _current = None
        atexit.unregister(self.close)
        self._patches.undo_all()
        if not self.off:
            self.off = "closed"
            try:
                self.manager.flush()
            except CanaryViolationError as error:
                logger.error("kv-canary: %s", error)
            finally:
                self.manager.close()

    @contextlib.contextmanager
    def _one_step(self) -> Iterator[None]:
        step = contextlib.ExitStack()
        self._guarded(lambda: step.enter_context(self.manager.one_step()))
        try:
            yield
        finally:
            self._guarded(step.close)

    def _before(self, runner: Any, forward_batch: Any) -> SingleForwardManager | None:
        if self.off or runner not in self._groups or not forward_batch.batch_size:
            return None
        self._retire_freed()
        watched = self._watched(runner, forward_batch)
        batch = self._batch(runner, forward_batch)
        try:
            watched.begin(batch)
            watched.head()
        except BaseException:
            watched.abort()
            raise
        return watched

    def _after(self, watched: SingleForwardManager) -> None:
        self._pending = True
        try:
            watched.tail()
            watched.end()
        except BaseException:
            watched.abort()
            raise

    def _watched(self, runner: Any, forward_batch: Any) -> SingleForwardManager:
        """Return the canary of a forward of this kind; drafts that may be rejected are told apart."""
        groups = [g.name for g in self._groups[runner]]
        if not self._groups[runner][0].token_offset:
            return self.manager.forward("target", groups=groups)
        inner = speculative.is_draft(forward_batch)
        return self.manager.forward(f"{groups[0]}, drafting" if inner else groups[0], groups=groups, inner=inner)

    def _batch(self, runner: Any, forward_batch: Any) -> ForwardBatch:
        speculation = self._speculation
        described = batches.requests(
            batches.noted(forward_batch),
            batches.lengths(forward_batch) if speculation is None else speculation.describe(forward_batch),
            owners=self.owners,
            tokens_of=batches.own_tokens if speculation is None else speculation.tokens,
            overlap=self._overlap,
            drafts=not forward_batch.forward_mode.is_extend_without_speculative(),
        )
        self._anchored |= any(r.identity for r in described)
        tokens = sum(r.extend_len for r in described)
        table = runner.req_to_token_pool.req_to_token
        slots = forward_batch.out_cache_loc[:tokens]
        groups = self._groups[runner]
        return ForwardBatch(
            requests=described,
            input_ids=forward_batch.input_ids[:tokens],
            positions=forward_batch.positions[:tokens],
            out_slots={g.name: slots if g.lut is None else g.lut[slots] for g in groups},
            tables={g.name: table for g in groups},
        )

    def _retire_freed(self) -> None:
        for pool, slots in self._lifetime.take():
            self.manager.retire(pool, slots)

    def _cached(self) -> Sequence[CachedSlots]:
        return radix.cached(self.scheduler.tree_cache, self.manager.groups, anchored=self._anchored)

    def _cleared(self) -> None:
        self.manager.clear()

    def _guarded(self, part: Callable[[], Any]) -> Any:
        """Run a part of the canary; in log mode a fault of its own turns it off, and the engine goes on."""
        try:
            return part()
        except CanaryViolationError:
            raise
        except Exception as error:
            if self.manager.config.mode == "raise":
                raise
            self._turn_off(error)
            return None

    def _turn_off(self, error: Exception) -> None:
        """Stop for good: forwards that nobody has recorded would look like corruption later."""
        logger.exception("kv-canary: sglang adapter: the canary has failed and is OFF; the engine goes on unguarded")
        self.off = f"failed: {type(error).__name__}: {error}"
        self._patches.undo_all()
        self.manager.close()
