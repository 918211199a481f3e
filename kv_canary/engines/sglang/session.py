"""The canary of one scheduler process: what SGLang calls, see `hooks`, and what becomes of it.

HEAD runs before `ModelRunner.forward` and TAIL behind it, on the stream that it is called on and outside CUDA graphs:
captured graphs and their memory stay as they are, and a replay is a forward like any other.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from kv_canary.config import CanaryConfig
from kv_canary.engines.ending import at_exit
from kv_canary.engines.patches import Patches
from kv_canary.engines.sglang import (
    batches,
    beams,
    completion,
    compose,
    graphs,
    hicache,
    hooks,
    lifetime,
    pools,
    radix,
    speculative,
    support,
    transfer,
    writes,
)
from kv_canary.engines.sglang.identities import Identities
from kv_canary.output import logger
from kv_canary.reports import CanaryViolationError
from kv_canary.runtime.batch import ForwardBatch, ModelInputs
from kv_canary.runtime.cached import CachedSlots
from kv_canary.runtime.capacities import CanaryLimits
from kv_canary.runtime.composition import BatchRequests
from kv_canary.runtime.forward import SingleForwardManager
from kv_canary.runtime.guard import Contained
from kv_canary.runtime.host import front, send
from kv_canary.runtime.manager import CanaryManager
from kv_canary.runtime.pools import BufferGroup
from kv_canary.runtime.summary import Watching
from kv_canary.settings import is_asked_for

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
    if not is_asked_for():
        return
    hooks.expect_live()
    _current = Session(scheduler, config=CanaryConfig.from_env())
    at_exit(_current.close)


def note_requests(forward_batch: Any, _cls: Any, schedule_batch: Any, *_: Any, **__: Any) -> None:
    """Called after `ForwardBatch.init_new`: keep who the forward is of."""
    if _current is not None:
        _current.note(forward_batch, schedule_batch)


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
        _current.show(result.internal_state)


def weights_changed(_updater: Any, request: Any, *_: Any, **__: Any) -> None:
    """Called before `SchedulerWeightUpdaterManager.flush_cache_after_weight_update`: the weights are others now."""
    if _current is not None:
        _current.weights_changed(request)


def memory_goes(*_: Any, **__: Any) -> None:
    """Called before `SchedulerWeightUpdaterManager.release_memory_occupation`: pools may have no memory behind it."""
    if _current is not None:
        _current.memory_goes()


# What hooks call, by the name that each has there.
HOOKED: Mapping[str, Callable[..., Any]] = {
    "install": install,
    "note_requests": note_requests,
    "forward": forward,
    "idle": idle,
    "add_to_internal_state": add_to_internal_state,
    "weights_changed": weights_changed,
    "memory_goes": memory_goes,
}


class _Following:
    """The context of one part, behind which `forgets` is called where it was cut short, and goes no further.

    A class, and no generator: it is entered for every page that is freed, while a batch waits for the host.
    """

    __slots__ = ("_forgets", "_part")

    def __init__(self, part: Contained, forgets: Callable[[], None]) -> None:
        self._part, self._forgets = part, forgets

    def __enter__(self) -> None:
        self._part.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        is_contained = self._part.__exit__(kind, error, trace)
        if self._part.failed and is_contained:
            self._forgets()
        return is_contained


class Session:
    """The canary of one scheduler.

    Args:
        scheduler: SGLang's `Scheduler`, whose pools and prefix cache exist and hold nothing yet.
        config: how to behave.

    Raises:
        ValueError: the scheduler is configured in a way that the adapter does not serve; the text says which.
    """

    @torch.inference_mode(False)
    def __init__(self, scheduler: Any, *, config: CanaryConfig) -> None:
        support.check(scheduler)
        speculative.check_supported(scheduler.server_args)
        radix.check(scheduler.tree_cache)
        hicache.check(scheduler)
        if transfer.needs_both_records(scheduler.server_args):
            config = dataclasses.replace(config, records="head_and_tail")
        if config.shared_seals is None and hicache.has_storage(scheduler):
            config = dataclasses.replace(config, shared_seals=True)
        if config.metrics_port:
            # Every rank is a process with a port of its own.
            config = dataclasses.replace(config, metrics_port=config.metrics_port + support.rank(scheduler))
        self.scheduler = scheduler
        # Why the canary is off: "closed", once it is.
        self.off = ""
        # Requests that were left out of forwards, by what is not known of them.
        self.left_out: Counter[str] = Counter()
        self.owners = batches.Owners()
        self._identities = Identities(counts_weights=not transfer.needs_both_records(scheduler.server_args))
        self._patches = Patches()
        self._graphs = graphs.Graphs()
        # By runner, and whether it drafts.
        self._forwards: dict[tuple[Any, bool], SingleForwardManager] = {}
        self._anchored = False
        # Whether the forward under way is described with all of its tokens, in the model's order.
        self._in_order = True
        # None where the prefix cache has no host tier, and until it is watched.
        self._host_tiers: hicache.HostTiers | None = None
        # None until the prefix cache is watched.
        self._ended: completion.Ended | None = None
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
                unverify=lambda pool, slots: self.manager.unverify(pool, slots),
                arrived=lambda pool, slots, seals: self.manager.arrived(pool, slots, seals),
                keeps=lambda tensors: self.manager.keep(tensors),
                following=self._following,
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
                    scheduler.draft_worker,
                    max_rows=table.shape[0],
                    owner_of=self.owners.owner,
                    patches=self._patches,
                    step=self.manager.one_step,
                    begins=self._follow_freed,
                    forward=self.forward,
                    following=self._contain,
                )
            source = None if self._speculation is None else self._speculation.source
            self._composer = compose.Composer(self.owners, self._identities, source)
            self._patches.wrap(scheduler.tree_cache, "checkpoint", self._checkpoint)
            self._ended = completion.Ended(
                scheduler.tree_cache,
                [(runner.req_to_token_pool.req_to_token, mine) for runner, mine in self._groups.items()],
                patches=self._patches,
                row_ended=self._row_ended,
                frees=self._frees,
                keeps=self.manager.keep,
                # The slots that it copies are only read, whatever mode they are made in.
                noting=self._contain("noting a request that has ended", allocates=False),
                # What a decode server frees may be filled by a transfer before the step that would look there.
                completes=self.manager.completes and scheduler.server_args.disaggregation_mode != "decode",
            )
            if config.check_writes:
                writes.watch(
                    [(runner.token_to_kv_pool, mine) for runner, mine in self._groups.items()],
                    handed=self.manager.handed,
                    in_order=lambda: self._in_order,
                    patches=self._patches,
                    following=self._contain,
                )
                if self._speculation is None:
                    writes.capture_again(target, keeps=self.manager)
            if getattr(scheduler.tree_cache, "cache_controller", None) is not None:
                self._host_tiers = hicache.HostTiers(
                    scheduler,
                    self.manager,
                    [(runner.token_to_kv_pool, mine) for runner, mine in self._groups.items()],
                    patches=self._patches,
                    ended=self._ended,
                    complete_ended=self._complete_ended,
                    retire_freed=self._retire_freed,
                    following=self._following,
                    updates=lambda: self._identities.updates,
                )
            transfer.watch(
                scheduler,
                self.manager,
                [(runner.token_to_kv_pool, mine) for runner, mine in self._groups.items()],
                patches=self._patches,
                owner_of=self.owners.owner,
                identity_of=self._identities.of,
                retire_freed=self._retire_freed,
                following=self._following,
            )
        except BaseException:
            self._patches.undo_all()
            if self._host_tiers is not None:
                self._host_tiers.close()
            self.manager.close()
            raise
        # Parts of every forward, which allocate nothing, so that they may be entered again.
        self._notes, self._asks, self._repeats, self._ends, self._retires = (
            self._contain(part, allocates=False)
            for part in (
                "noting the requests of a batch",
                "asking whether HEAD may come later",
                "following a forward",
                "ending a forward",
                "following what was freed",
            )
        )
        self._lookahead = max(g.token_offset for g in groups)
        self._describer = batches.Describer(
            owners=self.owners,
            identities=self._identities,
            tokens_of=batches.own_tokens if self._speculation is None else self._speculation.tokens,
            known=batches.known_tokens if self._speculation is None else self._speculation.known,
            lookahead=self._lookahead,
            overlap=bool(scheduler.enable_overlap),
        )
        self._warm_up()
        logger.info(
            "kv-canary: installed into sglang %s: mode %s, backend %s, groups %s, lifetime tracked: %s",
            hooks.sglang_version(),
            config.mode,
            self.manager.backend,
            ", ".join(f"{g.name} ({g.pool.num_slots} slots)" for g in groups),
            self._lifetime.tracks,
        )

    def _warm_up(self) -> None:
        """Compile the kernels of every forward that the scheduler may run."""
        tables: dict[str, torch.Tensor] = {}
        for runner, groups in self._groups.items():
            tables |= {g.name: runner.req_to_token_pool.req_to_token for g in groups}
            for drafts in (False, True) if groups[0].token_offset else (False,):
                self._forward_of(runner, drafts=drafts)
        graph_tokens = self._graphs.tokens_of(self.scheduler.tp_worker.model_runner)
        self.manager.warm_up(tables, is_given=True, graph_tokens=graph_tokens)

    def note(self, forward_batch: Any, schedule_batch: Any) -> None:
        """Keep with a forward batch who the forward is of."""
        with self._notes:
            if self._speculation is None:
                # The device has nothing to do meanwhile; behind the launch it has.
                is_later = self._host_tiers is not None and self._host_tiers.is_loading
            else:
                # Mostly a graph makes drafts, which nobody watches.
                is_later = speculative.is_draft(forward_batch)
            if is_later:
                batches.note_later(forward_batch, schedule_batch)
            else:
                self._compose(forward_batch, schedule_batch)

    def _compose(self, forward_batch: Any, schedule_batch: Any) -> None:
        composition = None
        mode = forward_batch.forward_mode
        # The first token of a draft model's prompt is nobody's, and each of its drafts is described one by one.
        is_composed = self._speculation is None or mode.is_target_verify() or mode.is_draft_extend_v2()
        if is_composed and not beams.has_rows(schedule_batch):
            composition = self._composer.compose(schedule_batch)
        if composition is None:
            batches.note(forward_batch, schedule_batch)
        else:
            batches.note_composed(forward_batch, composition)

    def forward(self, original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Verify what a forward is about to read, run it, and record what it has written.

        Whatever becomes of the canary, the forward runs once, and what it returns or raises is the engine's own.
        """
        is_late = False
        with self._asks:
            is_late = self._may_look_later(runner, forward_batch)
        watched = None if is_late else self._before(runner, forward_batch)
        try:
            result = original(runner, forward_batch, *args, **kwargs)
        except BaseException:
            if is_late:
                try:
                    with self._following("a forward that raised"):
                        watched = self._before(runner, forward_batch, is_late=True)
                except Exception as error:
                    # In raise mode; the engine's own is on its way.
                    logger.error("kv-canary: %s", error)
            if watched is not None:
                self._give_up(watched)
            raise
        if is_late:
            watched = self._before(runner, forward_batch, is_late=True)
        if watched is not None:
            self._after(watched, runner, forward_batch, result)
        return result

    def idle(self) -> None:
        """Report what the last forward found: the scheduler has nothing to do, so that waiting costs nothing."""
        if self.off:
            return
        if self._host_tiers is not None:
            self._host_tiers.settle()
        if self._speculation is not None:
            with self._contain("what was chosen"):
                self._speculation.settle()
        if self._pending or self.manager.has_reports:
            self._pending = False
            self.manager.flush()
            if self._ended:
                self._complete_ended()
                self.manager.flush()

    def weights_changed(self, request: Any) -> None:
        """Take in an update of the weights; who asks for none of the cache to be flushed goes on with it on purpose."""
        with self._contain("following an update of the weights"):
            if request.flush_cache:
                self._identities.weights_changed()
                # Requests that are put off and come again are others' by then.
                self._composer.forget()

    def memory_goes(self) -> None:
        """Read all that is still to be read of the pools, and wait for it: no launch survives without its memory."""
        if self.off:
            return
        with self._contain("looking at the pools before their memory goes"):
            if self._host_tiers is not None:
                self._host_tiers.settle()
            self._retire_freed()
            self.manager.flush()
            if self.manager.device.type == "cuda":
                torch.cuda.synchronize(self.manager.device)

    def show(self, internal_state: dict[str, Any]) -> None:
        """Put the status into what SGLang shows of a scheduler."""
        with self._contain("the status"):
            internal_state["kv-canary"] = self.status()

    def status(self) -> dict[str, Any]:
        """Return what the canary has done, which hooks are live, and what it could not follow; JSON-ready."""
        summary = self.manager.summary().as_dict()
        if self.off:
            summary["watching"] = Watching.OFF
        return {
            **summary,
            "left_out": dict(self.left_out),
            "off": self.off,
            "mode": self.manager.config.mode,
            "groups": [g.name for g in self.manager.groups],
            "lifetime": self._lifetime.tracks,
            "host_tiers": {} if self._host_tiers is None else self._host_tiers.facts,
            "hooks": hooks.live(),
        }

    def close(self) -> None:
        """Report what is left, and leave the engine as it was found; the second call does nothing."""
        global _current
        if _current is self:
            _current = None
        self._patches.undo_all()
        if not self.off:
            self.off = "closed"
            if self._host_tiers is not None:
                self._host_tiers.close()
            try:
                self.manager.flush()
            except CanaryViolationError as error:
                logger.error("kv-canary: %s", error)
            finally:
                self.manager.close()

    def _contain(self, part: str, *, allocates: bool = True) -> Contained:
        return self.manager.guard.contain(part, allocates=allocates)

    def _following(self, what: str, *, allocates: bool = True) -> _Following:
        """Contain the following of what becomes of slots: where that fails, no record can be relied on."""
        return _Following(self._contain(f"following {what}", allocates=allocates), self._forget)

    def _forget(self) -> None:
        """Take in that nobody can say what any slot holds: all of them are taken in anew, as they are read."""
        # What could not be retired in time must not be later: whoever has such a slot by then would lose its mark.
        self._lifetime.forget()
        if self._host_tiers is not None:
            self._host_tiers.forget()
        if self._ended is not None:
            # What they rested on may have been written to without a seal.
            self._ended.forget()
        for pool in self.manager.pools:
            self.manager.unverified.forget_all(pool)

    def _may_look_later(self, runner: Any, forward_batch: Any) -> bool:
        """Whether HEAD is to come behind the forward, in front of TAIL, so that nothing waits in front of it.

        The engine waits for each layer that is on its way from the host where the model reads it, and HEAD would wait
        for all of them; and the lengths of a step of drafts may be known on the device alone, until the step before is
        over. What the model reads is still there behind it. Not where something else is to be known in front of it.
        """
        tiers, config = self._host_tiers, self.manager.config
        is_loading = tiers is not None and tiers.is_loading
        if self._speculation is not None:
            reads_chosen = not config.check_inputs and self._speculation.reads_chosen(forward_batch)
            if is_loading or not reads_chosen:
                return False
        elif not is_loading:
            return False
        if self.off or runner not in self._groups or not forward_batch.batch_size:
            return False
        if config.check_writes or not self.manager.unverified.is_clean:
            return False
        if forward_batch.contains_mm_inputs():
            # The model takes the places of images out of the input ids, where these are.
            return False
        if tiers is not None and is_loading:
            # What ended requests rested on is looked at before somebody writes there; what was freed is retired later.
            if self._ended:
                self._complete_ended()
            tiers.look_beside()
        else:
            self._follow_freed()
        return True

    def _before(self, runner: Any, forward_batch: Any, *, is_late: bool = False) -> SingleForwardManager | None:
        """Begin a forward and run HEAD; return what is to be ended behind it, or None where it goes by unwatched.

        Args:
            runner, forward_batch: of the forward.
            is_late: whether it is launched already, see `_may_look_later`.
        """
        if self.off or runner not in self._groups or not forward_batch.batch_size:
            return None
        if not is_late:
            self._follow_freed()
        if self._host_tiers is not None:
            self._host_tiers.before_forward(is_beside=is_late and self._host_tiers.is_loading)
        requests, self._in_order = None, True
        with self._repeats as part:
            requests = self._composed(forward_batch)
            if requests is not None and (watched := self._repeat(runner, forward_batch, requests)) is not None:
                return watched
        if part.failed:
            self._forget()
            return None
        with self.manager.guard.contain("following a forward") as part:
            watched = self._watched(runner, forward_batch)
            batch, why = self._described(runner, forward_batch, requests)
            if batch is None:
                self._describer.forget()
                watched.skip(self._out_slots(runner, forward_batch.out_cache_loc), why=why)
                return None
            self._begin(watched, batch)
            return watched
        if part.failed:
            # Slots that it writes without us know of nobody's: see _following.
            self._forget()
        return None

    def _composed(self, forward_batch: Any) -> BatchRequests | None:
        """Return the requests of a forward in arrays; None: they have to be described one by one."""
        try:
            if (made_of := batches.noted_later(forward_batch)) is not None:
                self._compose(forward_batch, made_of)
            if self._speculation is not None:
                return self._speculation.requests(forward_batch, lookahead=self._lookahead)
            return self._composer.requests(forward_batch, lookahead=self._lookahead)
        except batches.UnknownKindError:
            # Of none of its requests, or of some: that is told where they are described.
            return None
        except Exception as error:
            self.manager.guard.take("describing a forward", error)
            return None

    def _repeat(self, runner: Any, forward_batch: Any, requests: BatchRequests) -> SingleForwardManager | None:
        """Begin a forward that is like one before but for its numbers, and run HEAD; None: it is not known to be."""
        watched = None if requests.drafts else self._forwards.get((runner, False))
        if watched is None:
            return None
        slots = forward_batch.out_cache_loc
        given = None
        if not self._graphs.may_replay(runner, forward_batch):
            given = lambda: self._inputs(runner, forward_batch, requests.num_tokens)  # noqa: E731
        try:
            repeats = watched.repeat(
                requests,
                out_slots=lambda: self._out_slots(runner, front(slots, requests.num_tokens)),
                given=given,
            )
        except BaseException:
            watched.abort()
            raise
        return watched if repeats else None

    def _begin(self, watched: SingleForwardManager, batch: ForwardBatch) -> None:
        failures = self.manager.guard.failures.total()
        try:
            watched.begin(batch)
            watched.head()
        except BaseException:
            self._describer.forget()
            watched.abort()
            raise
        if self.manager.guard.failures.total() != failures:
            # How far it came is not known.
            self._describer.forget()

    def _after(self, watched: SingleForwardManager, runner: Any, forward_batch: Any, result: Any) -> None:
        self._pending = True
        with self._ends:
            try:
                watched.finish(given=self._given(watched, runner, forward_batch, result))
            except BaseException:
                watched.abort()
                raise

    def _given(self, watched: SingleForwardManager, runner: Any, forward_batch: Any, result: Any) -> ModelInputs | None:
        """Return what the model has read, in place where a graph of the decode's has; None: as it was described."""
        try:
            given = self._graphs.inputs_of(
                runner,
                result,
                watched.groups,
                count=forward_batch.batch_size,
                positions=forward_batch.positions,
            )
            if given is None and watched.repeats:
                given = self._inputs(runner, forward_batch, forward_batch.batch_size)
        except Exception as error:
            self.manager.guard.take("reading what the model was given", error)
            return None
        return given

    def _inputs(self, runner: Any, forward_batch: Any, tokens: int) -> ModelInputs:
        """Return what a forward batch gives the model of so many tokens, which are all but padding."""
        return ModelInputs(
            input_ids=front(forward_batch.input_ids, tokens),
            positions=front(forward_batch.positions, tokens),
            out_slots=self._out_slots(runner, front(forward_batch.out_cache_loc, tokens)),
            rows=forward_batch.req_pool_indices,
            lengths=forward_batch.seq_lens,
        )

    def _give_up(self, watched: SingleForwardManager) -> None:
        """Take in that the engine's forward has raised, which goes on to the engine, and nothing else."""
        try:
            watched.abort()
        except Exception as error:
            logger.failure(
                "kv-canary: sglang adapter: a forward that raised could not be given up",
                error=error,
                redacts=self.manager.config.redact,
            )

    def _watched(self, runner: Any, forward_batch: Any) -> SingleForwardManager:
        """Return the canary of a forward of this kind; drafts that may be rejected are told apart."""
        is_draft = bool(self._groups[runner][0].token_offset) and speculative.is_draft(forward_batch)
        return self._forward_of(runner, drafts=is_draft)

    def _forward_of(self, runner: Any, *, drafts: bool) -> SingleForwardManager:
        known = self._forwards.get((runner, drafts))
        if known is None:
            known = self._forwards[runner, drafts] = self._new_forward(runner, drafts=drafts)
        return known

    def _new_forward(self, runner: Any, *, drafts: bool) -> SingleForwardManager:
        groups = [g.name for g in self._groups[runner]]
        if not self._groups[runner][0].token_offset:
            return self.manager.forward("target", groups=groups)
        return self.manager.forward(f"{groups[0]}, drafting" if drafts else groups[0], groups=groups, inner=drafts)

    def _described(
        self, runner: Any, forward_batch: Any, requests: BatchRequests | None
    ) -> tuple[ForwardBatch | None, str]:
        """Return what can be said of a forward; None, and why, where that is nothing."""
        why = "the canary has failed to describe it"
        with self._contain("describing a forward"):
            try:
                return self._batch(runner, forward_batch, requests), ""
            except batches.UnknownKindError as error:
                why = str(error)
        return None, why

    def _batch(self, runner: Any, forward_batch: Any, arrays: BatchRequests | None) -> ForwardBatch:
        speculation = self._speculation
        if arrays is not None:
            self._anchored |= bool(arrays.composition.identities.any())
            given = self._inputs(runner, forward_batch, arrays.num_tokens)
            rows, lengths = given.rows, given.lengths
            if arrays.drafts:
                rows, lengths = self._given_lengths(forward_batch, len(arrays))
            return ForwardBatch(
                requests=arrays,
                input_ids=given.input_ids,
                positions=given.positions,
                out_slots=given.out_slots,
                tables={g.name: runner.req_to_token_pool.req_to_token for g in self._groups[runner]},
                rows=rows,
                lengths=lengths,
                is_given_at_tail=self._graphs.may_replay(runner, forward_batch),
            )
        described = self._describer.describe(
            batches.noted(forward_batch),
            batches.lengths(forward_batch) if speculation is None else speculation.describe(forward_batch),
            drafts=not forward_batch.forward_mode.is_extend_without_speculative(),
            ahead=0 if speculation is None else speculation.ahead(forward_batch),
        )
        if described.left_out and not described.requests:
            raise batches.UnknownKindError(described.left_out[0])
        self._anchored |= any(r.identity for r in described.requests)
        flat = [t[: described.tokens] for t in (forward_batch.out_cache_loc, forward_batch.input_ids)]
        slots, input_ids, positions = *flat, forward_batch.positions[: described.tokens]
        self._in_order = described.kept is None
        if described.kept is not None and self.manager.config.check_writes and self._graphs.tokens_of(runner):
            # What a graph hands over is of all of its requests.
            raise batches.UnknownKindError(f"with check_writes, a batch with others of which {described.left_out[0]}")
        if described.kept is not None:
            self._leave_out(runner, slots, described)
            (kept,) = send(self.manager.device, described.kept)
            slots, input_ids, positions = slots[kept], input_ids[kept], positions[kept]
        rows, lengths = None, None
        if described.kept is None:
            rows, lengths = self._given_lengths(forward_batch, len(described.requests))
        return ForwardBatch(
            requests=described.requests,
            input_ids=input_ids,
            positions=positions,
            out_slots=self._out_slots(runner, slots),
            tables={g.name: runner.req_to_token_pool.req_to_token for g in self._groups[runner]},
            rows=rows,
            lengths=lengths,
        )

    def _given_lengths(self, forward_batch: Any, count: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the rows and lengths that the attention backend is given; None and None where they are not told.

        Args:
            forward_batch: all of whose requests are described.
            count: of these.
        """
        lengths = forward_batch.seq_lens if self._speculation is None else speculative.given_lengths(forward_batch)
        rows = forward_batch.req_pool_indices
        if lengths is None or not len(rows) == len(lengths) == count:
            return None, None
        return rows, lengths

    def _leave_out(self, runner: Any, slots: torch.Tensor, described: batches.Described) -> None:
        """Take in that some requests of a forward go by unwatched; the others lose nothing by it."""
        for why in described.left_out:
            if why not in self.left_out:
                logger.warning(
                    "kv-canary: sglang adapter: left out of the forwards that it is in, which writes what counts as "
                    "unverified: %s. Others of this kind are counted, see left_out in the internal state",
                    why,
                )
            self.left_out[why] += 1
        mine = set(described.kept or ())
        (others,) = send(self.manager.device, [n for n in range(described.tokens) if n not in mine])
        for group in self._groups[runner]:
            self.manager.unverify(group.pool, self._out_slots(runner, slots[others])[group.name])

    def _out_slots(self, runner: Any, slots: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Return the slots that a forward writes, by group; nothing where nobody can say."""
        if slots is None:
            return {}
        return {g.name: slots if g.lut is None else g.lut[slots] for g in self._groups[runner]}

    def _complete_ended(self) -> None:
        """Hold what ended requests rested on against its seals."""
        with self._contain("completing requests"):
            if self._ended:
                self.manager.complete_all(self._ended.take())

    def _follow_freed(self) -> None:
        """Take in what was given back, if anything was, before anybody else writes there."""
        if not self.off and (self._lifetime.has_freed or self._ended):
            self._retire_freed()

    def _retire_freed(self) -> None:
        if self._ended:
            self._complete_ended()
        with self._retires as part:
            for pool, slots, owner in self._lifetime.take():
                self.manager.retire(pool, slots, owner=owner)
        if part.failed:
            self._forget()

    def _frees(self, req: Any) -> None:
        """Take in whose slots are given back from here on; None: nobody's whom the engine names."""
        self._lifetime.freer = 0 if req is None else self.owners.owner(req)

    def _row_ended(self, row: int) -> None:
        """Take in that a request has given its row back, for good or for a while."""
        self._composer.row_ended(row)
        if self._speculation is not None:
            self._speculation.row_ended(row)
        self.manager.row_ended(row)

    def _cached(self) -> Sequence[CachedSlots]:
        return radix.cached(self.scheduler.tree_cache, self.manager.groups, anchored=self._anchored)

    def _checkpoint(self, original: Callable[..., Any], req: Any, *args: Any, **kwargs: Any) -> Any:
        """Called around the prefix cache's own: what it has already, it gives the request's row in place of its own."""
        result = original(req, *args, **kwargs)
        with self._contain("following the prefix cache"):
            if (row := batches.row_of(req)) is not None:
                self.manager.unverified.look_again([row])
        return result

    def _cleared(self) -> None:
        self._complete_ended()
        self.manager.clear()
