"""The canary of one vLLM worker: what its methods call, see `hooks`, and what becomes of it.

HEAD runs where the inputs of a step are complete and the model has not begun, TAIL behind the model; both on the stream
that the model is called on and outside the engine's CUDA graphs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress, count, repeat
from operator import is_not
from typing import Any

import numpy as np
import torch

from kv_canary.config import CanaryConfig
from kv_canary.engines.ending import at_exit
from kv_canary.engines.patches import Patches
from kv_canary.engines.vllm import hooks, offload, pools, support, writes
from kv_canary.engines.vllm.blocks import Blocks, Freed, slots_of, together
from kv_canary.engines.vllm.inputs import RunnerV1, RunnerV2, StepInputs, numbers
from kv_canary.engines.vllm.requests import Composed, Member, Requests, identity_of, with_images
from kv_canary.engines.vllm.results import Once
from kv_canary.engines.vllm.told import Told, told
from kv_canary.errors import must_be
from kv_canary.output import logger
from kv_canary.reports import CanaryViolationError
from kv_canary.runtime.batch import ForwardBatch, ModelInputs
from kv_canary.runtime.capacities import CanaryLimits
from kv_canary.runtime.composition import BatchRequests, Int64s, one_each
from kv_canary.runtime.forward import SingleForwardManager
from kv_canary.runtime.frees import MOST_FREERS
from kv_canary.runtime.guard import Contained
from kv_canary.runtime.host import send
from kv_canary.runtime.manager import CanaryManager
from kv_canary.runtime.summary import Watching
from kv_canary.settings import is_asked_for

# How many steps behind one that something was brought for the scheduler may say that it did not come.
_DISCARDS_WITHIN = 3
# Tokens by which a text grows in a step besides its drafts, and those on both sides that may be asked for with them.
_AROUND = 3
# What is told where nobody tells anything.
_NOTHING_TOLD = Told()
# By the worker; a process has one, but for tests.
_sessions: dict[int, Session] = {}


def install(worker: Any) -> Session | None:
    """Put a canary into a worker whose KV cache has just been made; None where nobody asks for one.

    Raises:
        ValueError: the worker is not one that the adapter serves; the text says why.
    """
    if (before := _sessions.pop(id(worker), None)) is not None:
        before.close()
    if not is_asked_for():
        return None
    _log_where_vllm_does()
    session = _sessions[id(worker)] = Session(worker, config=CanaryConfig.from_env())
    at_exit(session.close)
    return session


def _log_where_vllm_does() -> None:
    """Let the canary's lines be in vLLM's log, in its format, unless somebody has said where they go."""
    mine, theirs = logging.getLogger("kv_canary"), logging.getLogger("vllm")
    if not mine.hasHandlers() and theirs.handlers:
        for handler in theirs.handlers:
            mine.addHandler(handler)
        mine.setLevel(theirs.getEffectiveLevel())


def sessions() -> list[Session]:
    """Return the sessions of this process."""
    return list(_sessions.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrival:
    """KV that a connector brings for a request.

    Args:
        member: the request; its row may be another's later.
        owner: its serial number.
        start, end: positions [start, end) that it relies on.
    """

    member: Member
    owner: int
    start: int
    end: int


class Session:
    """The canary of one worker.

    Args:
        worker: vLLM's, whose KV cache exists and holds nothing yet.
        config: how to behave.

    Raises:
        ValueError: the worker is configured in a way that the adapter does not serve; the text says which.
    """

    @torch.inference_mode(False)
    def __init__(self, worker: Any, *, config: CanaryConfig) -> None:
        support.check(worker)
        self._is_v2, self._is_async = support.is_v2(worker), support.is_async(worker)
        hooks.check_worker(worker, is_v2=self._is_v2)
        if config.metrics_port:
            # Every rank is a process with a port of its own.
            config = dataclasses.replace(config, metrics_port=config.metrics_port + support.number_of(worker))
        self.worker, self.runner = worker, worker.model_runner
        # Why the canary is off: "closed", once it is.
        self.off = ""
        # Whether steps are made up by the worker itself.
        self._warms = False
        layers = support.draft_layers(self.runner, is_v2=self._is_v2)
        self.groups, self.uncovered = pools.attach(
            worker,
            read_bytes=config.read_bytes,
            drafts=layers,
            unfollowed=support.unfollowed_layers(worker, layers, is_v2=self._is_v2),
        )
        mine = [g for g in self.groups if not g.is_draft]
        # Tokens of a block of each pool: all have the same blocks, which may hold fewer tokens of wider layers.
        self._sizes = {g.group.pool: g.block_size for g in self.groups}
        settings = worker.vllm_config
        most, longest = settings.scheduler_config.max_num_seqs, settings.model_config.max_model_len
        # Requests that have ended may be in a step that is under way when others are in their place.
        rows = 2 * most + 2
        self.requests = Requests(num_rows=rows, max_len=longest)
        self._blocks = Blocks(
            pools.first_of_each(mine),
            num_rows=rows,
            max_len=longest,
            num_blocks=self.runner.kv_cache_config.num_blocks,
            caches=bool(settings.cache_config.enable_prefix_caching),
            caches_parts=pools.may_hash_parts(worker),
        )
        self._reader = (RunnerV2 if self._is_v2 else RunnerV1)(self.runner, self.groups)
        self.manager = CanaryManager(
            [g.group for g in self.groups],
            limits=CanaryLimits(
                max_rows=rows, max_requests=most, max_tokens=self.runner.max_num_tokens, max_len=longest
            ),
            config=config,
            rows=self.requests.owners,
            ranks=support.ranks(worker, config),
        )
        self._patches = Patches(failed=lambda name, error: self.manager.guard.failed(f"vllm's {name}", error))
        self._target = self.manager.forward("target", groups=[g.group.name for g in mine])
        its = [g.group.name for g in self.groups if g.is_draft]
        self._draft = self.manager.forward("draft", groups=its) if its else None
        # What the draft model is to write behind the target's forward, and whether it has done so.
        self._to_draft: ForwardBatch | None = None
        self._has_drafted = False
        # The step that both forwards are of, while it is under way.
        self._both = contextlib.ExitStack()
        # What the scheduler says of the step under way, and whether that is still to be taken in; its requests, and the
        # canary around its forward.
        self._scheduled: Any = None
        self._is_put_off = False
        self._batch: Any = None
        self._composed: Composed | None = None
        # Whether the forward under way is described with all of its tokens.
        self._is_whole = True
        # Whether something of what was sampled could not be taken in, by a thread of the engine's.
        self._has_missed = False
        # Parts of every step. What is made in them is only read; what keeps tensors is a part of its own inside.
        self._samples, self._takes, self._begins, self._follows, self._ends = (
            self.manager.guard.contain(part, allocates=False)
            for part in (
                "taking in what was sampled",
                "taking in what was sampled",
                "following the scheduler's step",
                "following a forward",
                "ending a forward",
            )
        )
        # Whether the scheduler has told what only it knows, and whether it must: where KV comes from outside.
        self._is_told = support.has_connector(worker)
        # What connectors have brought for requests of the step under way, and what they bring while it runs.
        self._brought: list[Arrival] = []
        self._arriving: list[Arrival] = []
        # None where there is no host memory that can be followed.
        self.offload: offload.Offload | None = None
        # Steps from now on in which the scheduler may take back what was sampled with KV that did not come.
        self._may_discard = 0
        # Requests that were left out of forwards.
        self.left_out = 0
        self._watched: SingleForwardManager | None = None
        # What its model reads, where all of it lies there at every forward.
        self._given: ModelInputs | None = None
        # The requests of the last forward; and those that it was of, where a decode of them may be taken to go on from
        # it without another look at each.
        self._last: BatchRequests | None = None
        self._steady: Composed | None = None
        # Whether the model may run from CUDA graphs.
        self._has_graphs = support.has_graphs(worker)
        # How many of each prefix's last tokens the step itself writes; None: none of any.
        self._pending_tokens: Int64s | None = None
        # Whether something was launched since the last look at what was found.
        self._pending = False
        # Results that nobody else asks for on this rank, oldest first.
        self._unread: list[Once] = []
        self._reads = not support.is_output_rank(worker)
        # Whether the host knows how long requests are only once it has the results of the step before.
        drafts = settings.speculative_config
        self._waits = self._is_async and drafts is not None
        # Of a request's newest tokens, those that are asked for where it has grown by drafts.
        self._most_new = min(_AROUND + (0 if drafts is None else drafts.num_speculative_tokens), longest)
        try:
            self._hook()
            if (side := offload.find(worker)) is not None:
                self.offload = offload.Offload(
                    side,
                    self.manager,
                    self.groups,
                    patches=self._patches,
                )
            if config.check_writes:
                writes.watch(
                    self.groups,
                    settings.compilation_config.static_forward_context,
                    handed=self.manager.handed,
                    is_followed=self._takes_writes,
                    patches=self._patches,
                    following=self._contain,
                )
            self.manager.warm_up(self._reader.tables, is_given=True, has_table_rows=True)
        except BaseException:
            self._unhook()
            if self.offload is not None:
                self.offload.close()
            self.manager.close()
            raise
        logger.info(
            "kv-canary: installed into vllm %s: model runner %s, mode %s, backend %s, groups %s%s",
            hooks.vllm_version(),
            "V2" if self._is_v2 else "V1",
            config.mode,
            self.manager.backend,
            ", ".join(f"{g.group.name} ({g.group.pool.num_slots} slots)" for g in self.groups),
            f"; not covered: {', '.join(self.uncovered)}" if self.uncovered else "",
        )

    def _takes_writes(self) -> bool:
        """Whether what the model hands over is that of the forward under way, or is captured for those to come."""
        if self._watched is not None:
            return self._is_whole
        return self.manager.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _hook(self) -> None:
        wrap, worker = self._patches.wrap, self.worker
        wrap(worker, "compile_or_warm_up_model", self._compile_or_warm_up_model)
        wrap(worker, "execute_model", self._execute_model)
        wrap(worker, "sample_tokens", self._sample_tokens)
        wrap(worker, "shutdown", self._shutdown)
        wrap(worker, "sleep", self._sleep)
        wrap(worker, "wake_up", self._wake_up)
        worker.kv_canary_status = self.status
        if self._is_v2:
            wrap(self.runner, "prepare_attn", self._prepare_attn)
            self._around_connector()
        else:
            wrap(self.runner, "_model_forward", self._model_forward)
        if self._draft is not None:
            wrap(support.drafter(self.runner, is_v2=self._is_v2), "propose", self._propose)

    def _unhook(self) -> None:
        self._patches.undo_all()
        if isinstance(connector := getattr(self.runner, "kv_connector", None), _Connector):
            self.runner.kv_connector = connector.inner
        vars(self.worker).pop("kv_canary_status", None)

    def _around_connector(self) -> None:
        """Stand in the place of runner V2's connector, which is called right before the model and behind it."""
        self.runner.kv_connector = _Connector(self.runner.kv_connector, self)

    # What vLLM calls.

    def _compile_or_warm_up_model(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Called around `Worker.compile_or_warm_up_model`: runner V2 serves requests there that nobody has sent."""
        self._warms = True
        try:
            return original(*args, **kwargs)
        finally:
            self._warms = False

    def _execute_model(self, original: Callable[..., Any], scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        """Called around `Worker.execute_model`."""
        if self._warms:
            return original(scheduled, *args, **kwargs)
        self._begin_step(scheduled)
        try:
            result = original(scheduled, *args, **kwargs)
        except BaseException:
            self._give_up()
            raise
        finally:
            if self._is_put_off:
                # Nobody has called us before the model.
                self._follow_step(scheduled)
            self._scheduled = None
            self._drop_arrivals()
        if self._watched is not None:
            # Behind the model nobody has called us.
            self._give_up()
        if not scheduled.total_num_scheduled_tokens:
            self.idle()
        return result

    def _sample_tokens(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Called around `Worker.sample_tokens`."""
        result = original(*args, **kwargs)
        with self._samples as part:
            self._take_result(result)
        self._has_missed |= part.failed
        if self._draft is not None:
            self._follow_draft()
        return result

    def _propose(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Called around the forwards of a draft model."""
        result = original(*args, **kwargs)
        self._has_drafted = True
        return result

    def _shutdown(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Called around `Worker.shutdown`."""
        self.close()
        return original(*args, **kwargs)

    def _sleep(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Called around `Worker.sleep`, which gives the memory of the KV cache back."""
        self._forget_all("putting the engine to sleep")
        return original(*args, **kwargs)

    def _wake_up(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Called around `Worker.wake_up`, behind which the KV cache holds nothing that it held."""
        result = original(*args, **kwargs)
        self._forget_all("waking the engine up")
        return result

    def _model_forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Called around the model of runner V1."""
        self.before(None)
        result = original(*args, **kwargs)
        self.after()
        return result

    def _prepare_attn(self, original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Called around what runner V2 does with a batch whose inputs are there."""
        self._batch = batch
        return original(batch, *args, **kwargs)

    def before_model(self, scheduled: Any) -> None:
        """Called right before the model of runner V2, in warm-ups too."""
        batch, self._batch = self._batch, None
        if scheduled is self._scheduled and batch is not None:
            self.before(batch)

    # What becomes of it.

    def before(self, batch: Any) -> None:
        """Begin the forward of the step that is under way, and run HEAD.

        Args:
            batch: V2's `InputBatch`; None: V1's is the runner's own.
        """
        scheduled = self._scheduled
        if scheduled is None or self.off:
            return
        if self._is_put_off:
            self._follow_step(scheduled)
        watched = self._target
        with self._follows as part:
            inputs, requests = None, self._going_on(scheduled, batch)
            if requests is None:
                inputs = self._known(self._reader.read(scheduled, batch))
                if inputs is None:
                    return
                inputs = self._with_images(inputs)
                requests = self._requests(inputs)
            given = self._reader.given if inputs is None else inputs.given
            try:
                if not self._repeat(requests, given):
                    inputs = inputs or _inputs_of(requests, given)
                    described = self._described(requests, inputs)
                    self._to_draft = self._to_be_drafted(described, inputs)
                    watched.begin(described)
                    watched.head()
            except BaseException:
                watched.abort()
                raise
            self._watched, self._given = watched, given if given.stays else None
        if part.failed:
            self._forget()
            # What it samples is nobody's.
            self._composed = self._steady = None
            self.requests.lose(scheduled.num_scheduled_tokens)

    def after(self) -> None:
        """Run TAIL, and end the forward."""
        watched, self._watched = self._watched, None
        if watched is None:
            return
        self._pending = True
        arrivals, self._arriving = self._arriving, []
        with self._ends:
            try:
                if arrivals:
                    with self._contain("taking in what a connector has brought"):
                        self._adopt(arrivals)
                watched.finish(given=self._given)
            except BaseException:
                watched.abort()
                raise

    def _follow_draft(self) -> None:
        """Verify and record what a draft model has read and written behind the target's forward.

        It writes the positions of the target's new tokens, in the same slots, and then some of its own guesses, which
        it writes again before anybody relies on them. So it is one forward, which is told when it is over.
        """
        batch, self._to_draft = self._to_draft, None
        drafted, self._has_drafted = self._has_drafted, False
        draft = self._draft
        if batch is None or draft is None:
            return
        with self._contain("following a draft model") as part:
            if drafted:
                try:
                    draft.begin(batch)
                    draft.head()
                    draft.tail()
                    draft.end()
                except BaseException:
                    draft.abort()
                    raise
            else:
                draft.skip(batch.out_slots, why="the draft model was left out of a step")
        if part.failed:
            self._forget()
        self._both.close()

    def idle(self) -> None:
        """Report what the last forward found: nothing is to be run, so that waiting costs nothing."""
        if self._pending and not self.off:
            self._pending = False
            self.manager.flush()
        if self.offload is not None:
            self.offload.settle()

    def status(self) -> dict[str, Any]:
        """Return what the canary has done and what it does not cover; JSON-ready."""
        self.idle()
        summary = self.manager.summary().as_dict()
        if self.off:
            summary["watching"] = Watching.OFF
        return {
            **summary,
            "left_out": self.left_out,
            "off": self.off,
            "mode": self.manager.config.mode,
            "rank": support.number_of(self.worker),
            "process": os.getpid(),
            "runner": "V2" if self._is_v2 else "V1",
            "groups": [g.group.name for g in self.groups],
            "not_covered": self.uncovered,
            "host_tiers": {} if self.offload is None else self.offload.facts,
        }

    def close(self) -> None:
        """Report what is left, and leave the worker as it was found; the second call does nothing."""
        _sessions.pop(id(self.worker), None)
        self._unhook()
        if self.offload is not None:
            self.offload.close()
        if not self.off:
            self.off = "closed"
            try:
                self._both.close()
                self.manager.flush()
            except CanaryViolationError as error:
                logger.error("kv-canary: %s", error)
            finally:
                self.manager.close()
                if self.offload is not None:
                    self.offload.release()

    def _contain(self, part: str) -> Contained:
        return self.manager.guard.contain(part)

    def _forget(self) -> None:
        """Take in that nobody can say what any slot holds: all of them are taken in anew, as they are read."""
        if self.offload is not None:
            self.offload.forget()
        for pool in self.manager.pools:
            self.manager.unverified.forget_all(pool)

    def _forget_all(self, what: str) -> None:
        with self._contain(what):
            self.manager.flush()
            self.manager.clear()

    def _give_up(self) -> None:
        """Take in that the engine's forward has raised, which goes on to the engine, and nothing else."""
        watched, self._watched = self._watched, None
        if watched is not None:
            try:
                watched.abort()
            except Exception as error:
                logger.failure(
                    "kv-canary: vllm adapter: a forward that raised could not be given up",
                    error=error,
                    redacts=self.manager.config.redact,
                )

    def _begin_step(self, scheduled: Any) -> None:
        """Take in what the scheduler says of a step, now or right before its forward."""
        self._composed = None
        if self._draft is not None:
            self._both.close()
        if self.off:
            return
        self._scheduled, self._is_put_off = scheduled, self._may_put_off(scheduled)
        if not self._is_put_off:
            self._follow_step(scheduled)

    def _may_put_off(self, scheduled: Any) -> bool:
        """Whether a step may be taken in right before its forward, where that costs least: with all else, at once.

        Not where something is to be looked at before the engine changes what it holds, or is to be told before others
        are at work.
        """
        if self.offload is not None or self._draft is not None:
            return False
        try:
            if not scheduled.total_num_scheduled_tokens:
                return False
            if scheduled.finished_req_ids or scheduled.preempted_req_ids or scheduled.scheduled_new_reqs:
                return False
            return not (scheduled.scheduled_cached_reqs.resumed_req_ids or scheduled.kv_cache_block_copies)
        except AttributeError:
            # It is told where the step is taken in.
            return False

    def _follow_step(self, scheduled: Any) -> None:
        """Take in what the scheduler says of a step: who has come and gone, and whose blocks are whose."""
        self._is_put_off = False
        with self._takes as part:
            if self.offload is not None:
                self.offload.settle()
            if self._unread:
                # That of the step under way is not there yet.
                self._read_results(keep=1 if self._is_async else 0)
            self.requests.take()
        with self._begins as step:
            self._blocks.begin_step()
            if self.offload is not None:
                self.offload.queue(scheduled)
            if scheduled.finished_req_ids or scheduled.preempted_req_ids:
                self._leave(scheduled.finished_req_ids, scheduled.preempted_req_ids or ())
            told = self._told(scheduled)
            if self._may_discard:
                self._discard(scheduled.scheduled_cached_reqs)
            for new in scheduled.scheduled_new_reqs:
                self._admit(new, told)
            self._go_on(scheduled.scheduled_cached_reqs, told)
            for coming in told.coming.values():
                self._blocks.promise(coming.blocks, coming.start)
            if self._blocks.handed_out or scheduled.kv_cache_block_copies:
                self._hand_out(scheduled.kv_cache_block_copies or ())
            if self.offload is not None:
                for number, blocks in self.offload.land():
                    self._blocks.came(number, blocks)
                    # What is wrong with it is told even if nothing is run.
                    self._pending = True
            if self._brought:
                arrived, self._brought = self._brought, []
                self._adopt(arrived)
            if self._blocks.has_promises:
                self._unverify_unseen()
        if step.failed or part.failed or self._has_missed:
            # Who is running has text or blocks that nobody knows, and is left out until it ends.
            self._has_missed = False
            self.requests.forget()
            self._blocks.forget()
            self._brought.clear()
            self._forget()
        if self._draft is not None and scheduled.total_num_scheduled_tokens:
            self._both.enter_context(self.manager.one_step())

    def _told(self, scheduled: Any) -> Told:
        """Return what the scheduler tells of a step.

        Raises:
            RuntimeError: one that has told before, or must, tells nothing: KV of some requests would be others'.
        """
        found = told(scheduled)
        if found is None and self._is_told:
            expected = "sent with every step (salts, and what connectors bring)"
            raise RuntimeError(must_be("vllm adapter", "what the scheduler knows", expected, "nothing"))
        self._is_told |= found is not None
        return found or _NOTHING_TOLD

    def _admit(self, new: Any, told: Told) -> None:
        tokens = new.prompt_token_ids if new.prefill_token_ids is None else new.prefill_token_ids
        tokens, shown = with_images(tokens, new.mm_features)
        identity = identity_of(new, salt=told.salts.get(new.req_id))
        prompt = len(new.prompt_token_ids or tokens)
        member = self.requests.start(new.req_id, tokens, identity=identity, shown=shown, prompt=prompt)
        self._place(member, new.block_ids, new.num_computed_tokens, told)

    def _go_on(self, cached: Any, told: Told) -> None:
        """Take in the blocks of requests that go on."""
        resumed, names, new = cached.resumed_req_ids, cached.req_ids, cached.new_block_ids
        # Most have the blocks that they had.
        if not resumed and new.count(None) == len(new):
            return
        changed = range(len(new)) if resumed else compress(count(), map(is_not, new, repeat(None)))
        rows, more = list[int](), list[Sequence[Sequence[int]]]()
        for i in changed:
            blocks = new[i]
            member = self.requests.find(names[i])
            if member is None:
                # Of one that was lost track of.
                continue
            if names[i] in resumed:
                self.requests.resume(names[i], cached.all_token_ids.get(names[i]))
                self._place(member, blocks, cached.num_computed_tokens[i], told)
            elif blocks is not None:
                rows.append(member.row)
                more.append(blocks)
        self._blocks.append_each(rows, more)

    def _place(self, member: Member, blocks: Sequence[Sequence[int]], computed: int, told: Told) -> None:
        """Take in the blocks of a request that begins, or goes on after a break, and what was brought into them."""
        here, now = told.here.get(member.name), told.now.get(member.name)
        brought = here or now
        self._blocks.admit(
            member.row,
            blocks,
            computed,
            hit=None if brought is None else min(brought.start, computed),
            promised=None if here is None else here.blocks,
        )
        if brought is not None and brought.start < (end := min(brought.end, computed)):
            arrival = Arrival(member=member, owner=member.owner, start=brought.start, end=end)
            (self._brought if now is None else self._arriving).append(arrival)
            if now is not None:
                self._may_discard = _DISCARDS_WITHIN

    def _discard(self, cached: Any) -> None:
        """Take in which requests have lost what they sampled: what was to be brought for their step did not come."""
        self._may_discard -= 1
        for name, generated in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            if name not in cached.resumed_req_ids and (member := self.requests.discard(name, generated)) is not None:
                self.manager.row_ended(member.row)

    def _adopt(self, arrivals: Sequence[Arrival]) -> None:
        """Take what connectors have brought for what it should be: nobody has seen it written."""
        for arrival in arrivals:
            member, start, end = arrival.member, arrival.start, arrival.end
            if not member.row or member.owner != arrival.owner:
                continue
            slots = self._blocks.slots(member.row, start, end)
            for group in self.groups:
                unknown = slots[group.number]
                if self.offload is not None:
                    unknown = self.offload.take(group, unknown)
                if not unknown.any():
                    continue
                tokens = self.requests.tokens(member, 0, end + group.group.token_offset)
                self.manager.adopt(
                    group.group.name,
                    unknown,
                    tokens,
                    owner=member.owner,
                    start=start,
                    identity=member.identity,
                )
            for number, its in slots.items():
                if self.offload is not None:
                    self.offload.took(number, its)

    def _unverify_unseen(self) -> None:
        """Take in what was hit of what was brought for others, who were given up before they came, or still wait."""
        for number, slots in self._blocks.take_unseen():
            for group in self.groups:
                if group.number == number:
                    self.manager.unverify(group.group.pool, slots)

    def _drop_arrivals(self) -> None:
        """Take in that nobody can say what was brought for a step whose forward nobody has followed."""
        arrivals, self._arriving = self._arriving, []
        if not arrivals or self.off:
            return
        with self._contain("forgetting what a connector has brought"):
            for arrival in arrivals:
                if arrival.member.row:
                    slots = self._blocks.slots(arrival.member.row, arrival.start, arrival.end)
                    for group in self.groups:
                        self.manager.unverify(group.group.pool, slots[group.number])

    def _leave(self, finished: Iterable[str], preempted: Iterable[str]) -> None:
        """Take in which requests have given their blocks back, for good or for a while."""
        requests, completes, left = self.requests, self.manager.completes, list[tuple[int, Freed]]()
        ended = list[tuple[str, dict[str, torch.Tensor]]]()
        for name, is_over in chain(zip(finished, repeat(True)), zip(preempted, repeat(False))):
            member = requests.end(name) if is_over else requests.pause(name)
            if member is None or not member.row:
                continue
            self.manager.row_ended(member.row)
            lists = is_over and completes
            freed = self._blocks.end(member.row, lists=lists, is_known=not member.is_lost)
            if lists and any(map(len, freed.slots.values())):
                ended.append((member.name, {g.group.name: freed.slots[g.number] for g in self.groups}))
            left.append((member.owner, freed))
            requests.let_go(member)
        if ended:
            self.manager.complete_all(ended)
        if len(left) > MOST_FREERS:
            left = [(0, together(freed for _, freed in left))]
        for owner, freed in left:
            for group in self.groups:
                if len(slots := freed.unreachable[group.number]):
                    self.manager.retire(group.group.pool, slots, owner=owner)

    def _hand_out(self, copies: Sequence[Any]) -> None:
        """Take in blocks that were handed out, in whatever group they have been before, and blocks that are copied."""
        if self.offload is not None:
            self.offload.hand_out(self._blocks.fresh)
        # Of most blocks nothing is left that could be retired; it is where not all that was written was followed.
        fresh = self._blocks.take_fresh(only_recorded=self.manager.unverified.is_clean)
        if len(fresh):
            by_size = {size: torch.from_numpy(slots_of(fresh, size)) for size in set(self._sizes.values())}
            for pool, size in self._sizes.items():
                self.manager.retire(pool, by_size[size])
        for group, slots, row in self._blocks.take_handed_out_twice():
            # Again, so that who reads it is told whose it is now.
            for each in self.groups:
                if each.number == group.number and not each.is_draft:
                    owner = self.requests.owner_of(row)
                    self.manager.retire(each.group.pool, slots, owner=owner, handed_out=True)
        for copied in copies:
            self._blocks.copied_to(copied.dst_block_id)
            for group in self.groups:
                src, dst = (
                    torch.from_numpy(slots_of(numbers(block + 1)[block:], group.block_size))
                    for block in (copied.src_block_id, copied.dst_block_id)
                )
                self.manager.move(group.group.pool, src, dst, owner=0)

    def _going_on(self, scheduled: Any, batch: Any) -> BatchRequests | None:
        """Return the requests of a decode, each one token behind where the last forward has left it.

        None where it is not known to be one of the very requests of that forward. Whoever has come since, or has been
        brought something, makes them others.

        Args:
            scheduled: vLLM's `SchedulerOutput`.
            batch: V2's `InputBatch`.
        """
        last, steady = self._last, self._steady
        if last is None or steady is None or scheduled.scheduled_spec_decode_tokens:
            return None
        decode = self._reader.decode(scheduled, batch)
        if decode is None or self.requests.compose(decode[0]) is not steady:
            return None
        ends = last.ends
        # Bytes cost half of a reduction, where nothing of it is in the processor's caches.
        if decode[1].astype(np.int64).tobytes() != ends.tobytes():
            return None
        goes_on = last.num_tokens == len(ends) and last.pending is None
        newest = self.requests.newest_of(last.rows, ends, after=last.prefix if goes_on else None)
        if newest is None:
            return None
        if goes_on:
            requests = last.following(newest)
        else:
            requests = BatchRequests(
                last.composition, prefix=ends, extend=one_each(len(ends)), newest=newest, table_rows=last.table_rows
            )
        self._composed, self._pending_tokens, self._is_whole, self._last = steady, None, True, requests
        self._blocks.went(requests.rows, requests.ends)
        return requests

    def _known(self, inputs: StepInputs) -> StepInputs | None:
        """Return the inputs of the requests that can be described; None where there are none.

        The others go by unwatched, and what they write counts as unverified.
        """
        if self._waits:
            inputs = self._with_lengths(inputs)
        composed = self.requests.compose(inputs.names)
        short = (self.requests.known(composed.rows) < inputs.prefix).nonzero()[0]
        if len(short):
            self.requests.lose(inputs.names[i] for i in short.tolist())
            composed = self.requests.compose(inputs.names)
        pending = self._blocks.pending(composed.rows, *self._written(composed, inputs))
        self._composed, self._pending_tokens, self._is_whole = composed, pending, composed.which is None
        if composed.which is None:
            return inputs
        others = np.setdiff1d(numbers(len(inputs.names)), composed.which)
        self.left_out += len(others)
        why = "what some requests have sampled, or their blocks, could not be followed"
        # What a graph hands over is of all of its requests.
        if not len(composed.which) or (self.manager.config.check_writes and self._has_graphs):
            self._target.skip(self._slots_of(inputs, is_draft=False), why=why)
            if self._draft is not None:
                self._draft.skip(self._slots_of(inputs, is_draft=True), why=why)
            return None
        unwatched = inputs.only(others).out_slots(g.group.name for g in self.groups)
        for group in self.groups:
            self.manager.unverify(group.group.pool, unwatched[group.group.name])
        if pending is not None:
            self._pending_tokens = pending[composed.which]
        return inputs.only(composed.which)

    def _written(self, composed: Composed, inputs: StepInputs) -> tuple[Int64s, Int64s]:
        """Return the first position that each request's step writes, and how many: what is brought by it included."""
        prefix, extend = inputs.prefix, inputs.extend
        if self._arriving:
            at = {row: n for n, row in enumerate(composed.rows.tolist())}
            prefix, extend = prefix.copy(), extend.copy()
            for arrival in self._arriving:
                if (n := at.get(arrival.member.row)) is not None:
                    extend[n] += prefix[n] - arrival.start
                    prefix[n] = arrival.start
        return prefix, extend

    def _with_lengths(self, inputs: StepInputs) -> StepInputs:
        """Return the inputs with prefixes as they are: the engine's host takes it that every draft was right.

        Waits for the step before: the adapter holds own texts on the host, which know no more than its results.

        Raises:
            RuntimeError: these could not be taken in.
        """
        self._read_results(keep=0)
        self.requests.take()
        if self._has_missed:
            raise RuntimeError("kv-canary: vllm adapter: what was sampled must be taken in, got a failure")
        lengths = self.requests.known(self.requests.compose(inputs.names).rows)
        # The last token of a text has not been through the model yet.
        return dataclasses.replace(inputs, prefix=np.minimum(inputs.prefix, np.maximum(lengths - 1, 0)))

    def _requests(self, inputs: StepInputs) -> BatchRequests:
        """Return the requests of a forward, all of which are known."""
        composed, prefix, pending = self._composed, inputs.prefix, self._pending_tokens
        if composed is None:
            raise RuntimeError("kv-canary: vllm adapter: requests must be composed, got none")
        rows = composed.composition.rows
        newest = self.requests.newest_of(rows, prefix, are_known=True)
        if newest is None and len(prefix) < np.add.reduce(inputs.extend):
            # Beside a prompt's beginning, before which there is none, and nobody asks for it.
            newest = self.requests.before(rows, prefix)
        drafts = bool(self._scheduled.scheduled_spec_decode_tokens)
        may_have_grown = drafts or (self._last is not None and self._last.drafts)
        self._last = requests = BatchRequests(
            composed.composition,
            prefix=prefix,
            extend=inputs.extend,
            pending=pending if pending is not None and pending.any() else None,
            newest=newest,
            table_rows=numbers(len(rows)) if composed.which is None else composed.which,
            drafts=drafts,
            recent=self.requests.recent(rows, self._most_new) if may_have_grown else None,
        )
        ends = requests.ends
        self._blocks.went(rows, ends)
        is_plain = composed.which is None and self._draft is None and not (self._waits or requests.drafts)
        # What is told apart in a request's own tokens is copied.
        shows = self.requests.has_shown and bool((self.requests.shown[rows] > ends).any())
        self._steady = composed if is_plain and not shows else None
        return requests

    def _repeat(self, requests: BatchRequests, given: ModelInputs) -> bool:
        """Begin a decode that is like the last one but for its lengths, and run HEAD; False: it is not known to be."""
        if self._draft is not None or requests.drafts or not given.stays:
            return False

        def written() -> dict[str, torch.Tensor]:
            return self._slots_of(_inputs_of(requests, given), is_draft=False)

        return self._target.repeat(requests, out_slots=written)

    def _described(self, requests: BatchRequests, inputs: StepInputs) -> ForwardBatch:
        """Return a forward of requests that are known."""
        return ForwardBatch(
            requests=requests,
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            out_slots=self._slots_of(inputs, is_draft=False),
            tables={g.group.name: self._reader.tables[g.group.name] for g in self.groups if not g.is_draft},
            lengths=inputs.lengths,
            is_given_at_tail=inputs.given.stays,
        )

    def _slots_of(self, inputs: StepInputs, *, is_draft: bool) -> dict[str, torch.Tensor]:
        """Return the slots that a forward writes; behind its tokens is padding, which is -1."""
        return inputs.out_slots(g.group.name for g in self.groups if g.is_draft == is_draft)

    def _to_be_drafted(self, described: ForwardBatch, inputs: StepInputs) -> ForwardBatch | None:
        """Return what a draft model is about to write behind a forward; its tensors may be others' by then."""
        if self._draft is None or described.input_ids is None or described.positions is None:
            return None
        lengths, tables = described.lengths, self._reader.tables
        return ForwardBatch(
            requests=described.requests,
            input_ids=described.input_ids.clone(),
            positions=described.positions.clone(),
            out_slots={name: slots.clone() for name, slots in self._slots_of(inputs, is_draft=True).items()},
            tables={g.group.name: tables[g.group.name] for g in self.groups if g.is_draft},
            # Kernels are compiled for batches that say them.
            lengths=None if lengths is None else lengths.clone(),
        )

    def _with_images(self, inputs: StepInputs) -> StepInputs:
        """Return the inputs, with placeholders of images told apart as in the requests' own tokens."""
        if self._composed is None or not self.requests.has_shown:
            return inputs
        composition, prefix = self._composed.composition, inputs.prefix
        ends = np.minimum(self.requests.shown[composition.rows], prefix + inputs.extend)
        if not (ends > prefix).any():
            return inputs
        ids, starts = inputs.input_ids.clone(), inputs.extend.cumsum() - inputs.extend
        for n in np.flatnonzero(ends > prefix).tolist():
            own = self.requests.tokens(composition.members[n], int(prefix[n]), int(ends[n]))
            (sent,) = send(ids.device, own)
            ids[int(starts[n]) : int(starts[n]) + len(own)] = sent.to(ids.dtype)
        return inputs.with_input_ids(ids)

    def _take_result(self, result: Any) -> None:
        """Take in what a step has sampled, now or once somebody has waited for it."""
        composed = self._composed
        if composed is None or result is None:
            return
        if not hasattr(result, "get_output"):
            self._take_output(composed, result)
            return
        original = result.get_output

        def read() -> Any:
            try:
                output = original()
            except Exception as error:
                # The engine's own; whoever of it asks is told as well.
                self._has_missed = True
                self.manager.guard.failed("reading what was sampled", error)
                raise
            # In a thread of the engine's, mostly: the guard's clock is not for that.
            try:
                self._take_output(composed, output)
            except Exception as error:
                self.manager.guard.failed("taking in what was sampled", error)
            return output

        once = Once(read)
        if self._reads or self._waits:
            self._unread.append(once)
        # Whoever else asks gets the same: behind some executors, every rank's results are asked for, and vLLM's own
        # answer only once.
        result.get_output = once

    def _take_output(self, composed: Composed, output: Any) -> None:
        try:
            if output.sampled_token_ids:
                self.requests.sampled(composed, output.req_ids, output.sampled_token_ids)
        except Exception:
            self._has_missed = True
            raise

    def _read_results(self, *, keep: int) -> None:
        """Ask for results that nobody else asks for on this rank, or not in time, but for the last `keep`."""
        while len(self._unread) > keep:
            self._unread.pop(0).read()


def _inputs_of(requests: BatchRequests, given: ModelInputs) -> StepInputs:
    """Return the inputs of a forward of known requests."""
    names = [member.name for member in requests.composition.members]
    return StepInputs(names=names, prefix=requests.prefix, extend=requests.extend, given=given)


class _Connector:
    """The KV connector of runner V2, with HEAD behind what it does before the model, and TAIL behind the model."""

    def __init__(self, inner: Any, session: Session) -> None:
        self.inner, self._session = inner, session

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def pre_forward(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        result = self.inner.pre_forward(scheduled, *args, **kwargs)
        self._session.before_model(scheduled)
        return result

    def finish_forward(self, *args: Any, **kwargs: Any) -> Any:
        self._session.after()
        return self.inner.finish_forward(*args, **kwargs)
