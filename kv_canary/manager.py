"""The canary of one engine: its groups, its state, its forwards, and what becomes of what they find."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from kv_canary import ops, output
from kv_canary.accounts import Accounts, StepRecord
from kv_canary.backends import select_backend
from kv_canary.budget import Budget
from kv_canary.calibration import measure_cost
from kv_canary.capacities import CanaryLaunchCapacities, CanaryLimits
from kv_canary.composition import BatchRequests, Int64s
from kv_canary.config import CanaryConfig
from kv_canary.constants import OWNER_MASK, Tag
from kv_canary.drain import Drain, Findings
from kv_canary.errors import must_be
from kv_canary.forward import ForwardBatch, SingleForwardManager, relied_on
from kv_canary.guard import Guard
from kv_canary.observers import HealthCheck, Observer, observers_of
from kv_canary.oracle import TokenOracle
from kv_canary.output import logger
from kv_canary.perturb import PerturbConfig, Perturber
from kv_canary.pools import BufferGroup, KvPool
from kv_canary.ranks import RankGroup, RankReport, RankWatch
from kv_canary.replays import Replays, capture_graph
from kv_canary.reports import CanaryViolationError, Incident, ViolationReport
from kv_canary.rows import OwnerNames
from kv_canary.specs.structures import Endpoint
from kv_canary.state import Advance, CanaryDeviceState
from kv_canary.summary import CanarySummary
from kv_canary.sweep import CachedSlots, Sweeper
from kv_canary.transfer import record_prefix
from kv_canary.unverified import Unverified

# A token table this small is kept whatever the pool's size.
SMALL_TABLE_BYTES = 16 << 20
# Steps from one look at whether any slot is still marked as unverified to the next.
_TIDY_EVERY = 256
# Kinds of forwards that go by unwatched that are told of, one line each.
_MOST_TOLD = 64
# Slots beyond which kernels go about more of them as they do about any number.
_MOST_AT_ONCE = 512
# Seconds that `close` waits for what is still to be said and saved.
_LAST_WORDS = 2.0


class CanaryManager:
    """The canary of one engine, or of one rank of it.

    In log mode nothing that goes wrong inside it leaves its methods once it is made: that is counted, said once and
    shown in the summary, what was not recorded is marked as unverified, and the engine and the canary go on. In raise
    mode what was found is raised by `begin`, before the forward, and by `flush`; its own failures are raised where they
    happen; either leaves the engine and the canary usable. In mode "off" nothing is done.

    Args:
        groups: the engine's attention groups and their pools.
        limits: the engine's limits.
        config: how to behave.
        rows: where owners come from, for their names in reports; None if the engine has its own.
        on_report: called with every report that is written out; what it raises is logged and goes no further.
        observers: told of every step and report, beside those that the config asks for.
        perturb: faults to inject; None: those that the environment asks for, which are none by default.
        cached: walks the engine's prefix cache, for sweeps; None: there is nothing to sweep.
        ranks: the ranks whose canaries compare digests, and raise together; None: this one is alone. With ranks, every
            one of them has to make its manager, which waits for the others.

    Raises:
        ValueError: groups are missing, share a name, or lie on several devices.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        groups: Sequence[BufferGroup],
        *,
        limits: CanaryLimits,
        config: CanaryConfig | None = None,
        rows: OwnerNames | None = None,
        on_report: Callable[[ViolationReport], None] | None = None,
        observers: Sequence[Observer] = (),
        perturb: PerturbConfig | None = None,
        cached: Callable[[], Sequence[CachedSlots]] | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        if not groups:
            raise ValueError(must_be("CanaryManager", "groups", "at least one group", "none"))
        names = [g.name for g in groups]
        if len(set(names)) != len(names):
            raise ValueError(must_be("CanaryManager", "groups", "of different names", str(names)))
        devices = {g.pool.records.device for g in groups}
        if len(devices) != 1:
            raise ValueError(must_be("CanaryManager", "groups", "on one device", str(sorted(map(str, devices)))))
        self.groups = tuple(groups)
        self.limits = limits
        self.config = config or CanaryConfig()
        self.guard = Guard(contains=self.config.mode != "raise", redacts=self.config.redact)
        self.device = devices.pop()
        self.backend = select_backend(self.config.backend, self.device)
        self.pools: tuple[KvPool, ...] = tuple(dict.fromkeys(g.pool for g in groups))
        if self.config.records == "head_and_tail":
            for pool in self.pools:
                pool.keep_head_records()
        self.state = CanaryDeviceState(
            replays=self.new_replays(),
            max_rows=limits.max_rows,
            ring_capacity=self.config.ring_capacity,
            keep_tokens=self._keeps_tokens(),
            offsets=[g.token_offset for g in groups],
            device=self.device,
        )
        self.oracle = TokenOracle(max_rows=limits.max_rows, device=self.device)
        self._endpoints: dict[tuple[str, Tag, bool], Endpoint] = {}
        # All that may refuse comes before the observers, which hold files and ports.
        self.budget = Budget(self.config, self.device, max_rows=limits.max_rows)
        if self.budget.chooses:
            self.budget.cost = measure_cost(self)
        perturb = PerturbConfig.from_env() if perturb is None else perturb
        self.perturber = None if perturb is None else Perturber(perturb, self.groups)
        self.accounts = Accounts(
            self.groups,
            config=self.config,
            guard=self.guard,
            rows=rows,
            on_report=on_report,
            observers=[*(() if self.is_off else observers_of(self.config)), *observers],
        )
        self._drain = Drain(self.state)
        self.unverified = Unverified(self)
        self._sweeper = Sweeper(self)
        self._cached = cached or (lambda: ())
        self._forwards: dict[str, SingleForwardManager] = {}
        self._open: StepRecord | None = None
        self._explicit = False
        # The forward between its begin and its end.
        self._running: SingleForwardManager | None = None
        self._number = 0
        # Forwards that went by unwatched.
        self.skipped = 0
        self._skips_told: set[str] = set()
        if self.config.digest_every and ranks is None:
            logger.warning("kv-canary: digest_every is set, but there are no ranks to compare digests with")
        try:
            self.ranks = None if ranks is None else RankWatch(self, ranks)
        except BaseException:
            self.accounts.close()
            raise
        if self.device.type == "cuda":
            # Forwards may run on another stream than the one that all of this was made on.
            torch.cuda.current_stream(self.device).synchronize()

    @property
    def is_off(self) -> bool:
        """Whether the configuration turns the canary off: nothing is verified, recorded or said."""
        return self.config.mode == "off"

    @property
    def reports(self) -> deque[ViolationReport]:
        """The latest reports, oldest first."""
        return self.accounts.reports

    @property
    def incidents(self) -> list[Incident]:
        """The latest incidents, oldest first: violations by their likely cause."""
        return self.accounts.incidents

    @property
    def rank_reports(self) -> deque[RankReport]:
        """The latest differences between ranks, oldest first."""
        return self.accounts.rank_reports

    @property
    def health(self) -> HealthCheck:
        """When the last step was drained: for who asks, from any thread, whether the canary still runs."""
        return next(o for o in self.accounts.observers if isinstance(o, HealthCheck))

    def forward(
        self, name: str = "target", *, groups: Sequence[str] | None = None, inner: bool = False
    ) -> SingleForwardManager:
        """Return the manager of the forward called `name`; the same one every time.

        Args:
            name: of the forward.
            groups: names of the groups that it works on; None: all. Read when it is made.
            inner: see `SingleForwardManager`. Read when it is made.
        """
        if name not in self._forwards:
            known = {g.name: g for g in self.groups}
            chosen = list(known) if groups is None else list(groups)
            for group in chosen:
                if group not in known:
                    raise ValueError(must_be("forward", "groups", f"some of {', '.join(known)}", repr(group)))
            self._forwards[name] = SingleForwardManager(self, name=name, groups=[known[g] for g in chosen], inner=inner)
        return self._forwards[name]

    def warm_up(self, tables: Mapping[str, torch.Tensor], *, is_given: bool = False) -> None:
        """Compile every kernel that the forwards made so far will launch, and say how long that took.

        To be called on the stream of the forwards, between them, before the engine serves: what is not compiled then is
        compiled while requests wait, for seconds. Nothing is done where there is nothing to compile.

        Args:
            tables: the engine's, by group name, of the width that they will have.
            is_given: whether batches will say which rows and lengths the attention backend is given.
        """
        if self.is_off or not self.new_replays().rounds_up:
            return
        with self.guard.contain("compiling kernels"):
            logger.info("kv-canary: compiling kernels; what a cache of Triton's holds already is taken from there")
            began, sizes = time.monotonic(), 0
            for forward in self._forwards.values():
                its = {g.name: tables[g.name] for g in forward.groups}
                sizes += forward.warm_up(tables=its, is_given=is_given)
            self.state.warm_up(backend=self.backend)
            nowhere = torch.zeros(_MOST_AT_ONCE + 1, dtype=torch.int64, device=self.device)
            for pool in self.pools:
                self.retire(pool, nowhere[:1])
                for count in (1, _MOST_AT_ONCE // 4 + 1, _MOST_AT_ONCE // 2 + 1, _MOST_AT_ONCE + 1):
                    self.move(pool, nowhere[:count], nowhere[:count], owner=0)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
            took = time.monotonic() - began
            logger.info("kv-canary: kernels for %d sizes of forwards are compiled, in %.1f s", sizes, took)

    def capacities(self, group: BufferGroup) -> CanaryLaunchCapacities:
        """Return the sizes that launches of `group` are made for."""
        return CanaryLaunchCapacities.from_args(
            limits=self.limits, window=group.window, verify_capacity=self.config.verify_capacity
        )

    @property
    def step(self) -> int:
        """Number of the current or last step; the first is 1."""
        return self._number

    def endpoint(self, group: BufferGroup, tag: Tag, *, with_bytes: bool) -> Endpoint:
        """Return the launch site `tag` of `group`; the same one every time."""
        key = (group.name, tag, with_bytes)
        if key not in self._endpoints:
            self._endpoints[key] = group.endpoint(tag, with_bytes=with_bytes)
        return self._endpoints[key]

    def new_replays(self) -> Replays:
        """Return what runs launches: on a GPU, with Triton, by graphs where they come again, unless that is off."""
        own_graphs = self.config.own_graphs and self.device.type == "cuda" and self.backend == "triton"
        return Replays(capture_graph if own_graphs else None)

    def retire(self, pool: KvPool, slots: torch.Tensor, *, owner: int = 0) -> None:
        """Mark int64 `slots` of `pool` as freed: their content can be reached no more.

        To be called on the stream of the forwards, behind every forward that was prepared before the slots were freed.
        """
        if self.is_off or not self.config.track_lifetime or not len(slots):
            return
        with self.guard.contain("taking in what was freed") as part:
            ops.retire(
                slots=slots.to(self.device),
                # The bits that a record holds; a larger number would be another kind of argument to the kernel.
                owner=owner & OWNER_MASK,
                step=self.state.step,
                records=pool.buffers,
                backend=self.backend,
            )
            self.unverified.freed(pool, slots.to(self.device))
        if part.failed:
            self.unverify(pool, slots)

    def move(self, pool: KvPool, src: torch.Tensor, dst: torch.Tensor, *, owner: int) -> None:
        """Carry the records of int64 `src` to `dst`, because the KV was copied so."""
        if self.is_off or not len(src):
            return
        with self.guard.contain("taking in what was copied") as part:
            src, dst = src.to(self.device), dst.to(self.device)
            ops.move(
                src=src,
                dst=dst,
                owner=owner & OWNER_MASK,
                step=self.state.step,
                records=pool.buffers,
                backend=self.backend,
            )
            self.unverified.moved(pool, src, dst)
        if part.failed:
            self.unverify(pool, dst)

    def adopt(
        self, group: str, slots: torch.Tensor, tokens: Sequence[int], *, owner: int, start: int = 0, identity: int = 0
    ) -> None:
        """Record KV that is there already, as what it should be: nobody has seen it written, or its positions changed.

        For a cache that was in use before the canary came, KV that came without records, and a context shift, which
        gives cells other positions and rotates their K in place. What lies there now counts as right, and how much of
        it was taken so is in the summary (`uncovered`). To be called on the stream of the forwards, between them.

        Args:
            group: the name of a group.
            slots: int64 [n], the slots of positions [start, start + n) of a request; 0 where none is to be recorded.
            tokens: [start + n] the request's own tokens from the first on; one more for a group whose slots hold the
                token behind their own.
            owner: the request's serial number.
            start: the first position that is recorded.
            identity: see `ForwardRequest`.

        Raises:
            ValueError: in raise mode, there is no such group, or tokens are not as many as slots.
            TypeError: in raise mode, slots are not int64.
        """
        if self.is_off:
            return
        with self.guard.contain("adopting KV") as part:
            if not len(slots):
                return
            known = {g.name: g for g in self.groups}
            if group not in known:
                raise ValueError(must_be("adopt", "group", f"one of {', '.join(known)}", repr(group)))
            chosen = known[group]
            if slots.dtype != torch.int64 or slots.dim() != 1:
                got = f"{slots.dtype} {list(slots.shape)}"
                raise TypeError(must_be("adopt", "slots", "of dtype torch.int64 and shape [n]", got))
            if start < 0:
                raise ValueError(must_be("adopt", "start", "at least 0", str(start)))
            needed = start + len(slots) + chosen.token_offset
            if len(tokens) != needed:
                raise ValueError(must_be("adopt", "tokens", f"{needed}, start and slots together", str(len(tokens))))
            slots = slots.to(self.device)
            record_prefix(
                self,
                chosen,
                slots=torch.cat([slots.new_zeros(start), slots]),
                tokens=tokens[chosen.token_offset :],
                owner=owner,
                identity=identity,
            )
            self.unverified.written(chosen.pool, slots)
            # Its text may be another one from here on.
            self.state.forget_owner(owner)
            self.accounts.uncovered += len(slots)
        if part.failed and group in {g.name for g in self.groups}:
            self.unverify(next(g.pool for g in self.groups if g.name == group), slots)

    def unverify(self, pool: KvPool, slots: torch.Tensor) -> None:
        """Take in that nobody can say what int64 `slots` of `pool` hold: a free, a copy or a write was not followed.

        Their records are dropped. Who relies on such a slot next has it taken in anew, from its own tokens and the
        bytes that lie there then; how many were is in the summary. To be called on the stream of the forwards.
        """
        if not self.is_off:
            with self.guard.contain("marking slots as unverified"):
                self.unverified.forget(pool, slots)

    def clear(self) -> None:
        """Forget every record, because the engine emptied its cache."""
        if self.is_off:
            return
        with self.guard.contain("taking in an emptied cache") as part:
            for pool in self.pools:
                for records in pool.buffers:
                    records.zero_()
            self.unverified.clear()
        if part.failed:
            for pool in self.pools:
                self.unverified.forget_all(pool)

    def sweep(self) -> None:
        """Verify everything that the prefix cache holds, also what no request uses now, and freed slots in quarantine.

        Outside any graph; findings are reported with those of the next step.

        Raises:
            RuntimeError: in raise mode, a forward is under way: slots that it has written have no records yet.
        """
        if not self.is_off:
            with self.guard.contain("a sweep"):
                self.expect_idle("sweep")
                self._sweep()

    def _sweep(self) -> None:
        self.unverified.settle_debts()
        self._sweeper.sweep(self._cached())
        self._sweeper.quarantine()

    def scrub(self) -> None:
        """Sweep in idle time: report what earlier steps and the sweep found now.

        Raises:
            CanaryViolationError: in raise mode, if there was anything to report.
        """
        self.sweep()
        self.flush()

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """Make the forwards inside the block one step: a draft model's and the target's, say.

        Raises:
            RuntimeError: in raise mode, a step is under way; or, at its end, a forward still is.
        """
        began = False
        with self.guard.contain("the beginning of a step"):
            if self._open is not None:
                raise RuntimeError("kv-canary: a step must begin when none is under way, got it inside another")
            if not self.is_off:
                self._begin_step()
                self._explicit = began = True
        complete = False
        try:
            yield
            complete = True
        finally:
            if began:
                with self.guard.contain("the end of a step"):
                    self._end_explicit(complete=complete)

    def _end_explicit(self, *, complete: bool) -> None:
        """End the step that `one_step` began; a forward that is still under way is given up, and told of."""
        self._explicit = False
        left, self._running = self._running, None
        if left is not None:
            left.abort()
        self._end_step()
        if left is not None and complete:
            expected = "the end of a step must come when no forward is under way"
            raise RuntimeError(f"kv-canary: {expected}, got it inside forward {left.name}")

    def expect_idle(self, call: str) -> None:
        """Raise RuntimeError, naming `call`, if a forward is between its begin and its end."""
        if self._running is not None:
            raise RuntimeError(
                f"kv-canary: {call} must come when no forward is under way, got it inside forward {self._running.name}"
            )

    def perturb(self, batch: ForwardBatch) -> None:
        """Inject what is to be injected before a forward; called by its `begin`, once nothing can refuse it."""
        if self.perturber is not None:
            checks_inputs = batch.expected_input_ids is not None or self.config.check_inputs
            self.perturber.before(batch, step=self._number, checks_inputs=checks_inputs, cached=self._cached)

    def begin_forward(
        self, forward: SingleForwardManager, requests: BatchRequests, *, may_wait: bool
    ) -> tuple[Int64s, Advance | None]:
        """Report what earlier steps found, and bring tails up; called by the forward's `begin`.

        Return the strides, and with `may_wait` the launch that the forward has to make before HEAD. What is raised the
        forward takes to `abort_forward`.
        """
        self.unverified.settle_debts()
        if self._open is None:
            self._begin_step()
        step = self._open
        if step is None:
            raise RuntimeError("kv-canary: a step must be under way, got none")
        self._running = forward
        for group, status, earlier in forward.statuses:
            # The forward has run in this step before, with the same word.
            if status in step.statuses:
                self.state.keep_status(status, earlier, fresh=earlier not in step.statuses)
                step.statuses[earlier] = group
        fresh, offsets = requests, {g.token_offset for g in forward.groups}
        if forward.inner:
            # The others go on where an inner forward of this step has brought them.
            fresh = BatchRequests.of(
                [r for r in requests if {step.inner.pop((o, r.row), None) for o in offsets} != {r.prefix_len}]
            )
        # What is taken in anew is taken in behind it, and before HEAD.
        may_wait = may_wait and not any(self.unverified.has_gaps(g.pool) for g in forward.groups)
        try:
            advance = self.state.advance(fresh, backend=self.backend, may_wait=may_wait)
        except BaseException:
            # How far the rows have come is not known; from here on they are brought up from their first token.
            self.state.forget(fresh.rows)
            raise
        if forward.inner:
            self.state.branch(fresh.rows, offsets)
        step.forwards.append(requests)
        step.relied_on += sum(relied_on(requests, g) for g in forward.groups)
        return self.budget.strides(forward.name, requests, step=step.number), advance

    def take_in_gaps(self, forward: SingleForwardManager, batch: ForwardBatch) -> None:
        """Record anew what a forward is about to read and nobody has recorded; called by its `begin`."""
        for group in forward.groups:
            self.unverified.take_in(group, batch.tables[group.name], batch.requests)

    def end_forward(self, forward: SingleForwardManager, batch: ForwardBatch | None) -> None:
        """Take in what the forward launched; called by its `end`, which takes what this raises to `abort_forward`."""
        step, self._running = self._open, None
        if step is None:
            raise RuntimeError("kv-canary: a step must be under way, got none")
        if batch is not None:
            if self.perturber is not None:
                self.perturber.after(batch, step=self._number)
            if self.ranks is not None:
                self.ranks.see(forward, batch)
            step.tables.update(batch.tables)
            self.accounts.see_forward(forward, batch)
            if forward.inner:
                offsets = {g.token_offset for g in forward.groups}
                step.inner.update({(o, r.row): r.prefix_len + r.extend_len for o in offsets for r in batch.requests})
        step.statuses.update({status: group for group, status, _ in forward.statuses})
        step.launches.update(forward.launches)
        if not self._explicit:
            self._end_step()

    def skip_forward(self, forward: SingleForwardManager, out_slots: Mapping[str, torch.Tensor]) -> None:
        """Take in that a forward goes by unwatched, and mark what it writes; called by its `skip`, never raises."""
        self.skipped += 1
        self.guard.touched = True
        groups = {g.name: g for g in forward.groups}
        for group in groups.values():
            slots = out_slots.get(group.name)
            if slots is None:
                # Nobody can say where it writes.
                self.unverified.forget_all(group.pool)
            else:
                self.unverified.forget(group.pool, slots)
        self.abort_forward(forward)

    def say_skipped(self, forward: str, why: str) -> None:
        """Say that a forward goes by unwatched, once for each reason; called by its `skip`."""
        if why not in self._skips_told and len(self._skips_told) < _MOST_TOLD:
            self._skips_told.add(why)
            logger.warning(
                "kv-canary: forward %s goes by unwatched, and what it writes counts as unverified: %s. Others of this "
                "kind are counted, see summary().skipped",
                forward,
                why,
            )

    def abort_forward(self, forward: SingleForwardManager) -> None:
        """Take in that a forward was given up; called by its `abort`, and by its `begin` if that raised."""
        self._running = None
        self.budget.forget(forward.name)
        with self.guard.contain("giving up a forward"):
            if self.perturber is not None:
                self.perturber.restore()
        if self._open is not None:
            self._open.broken = True
            if not self._explicit:
                with self.guard.contain("the end of a step"):
                    self._end_step()

    def doubt(self, pool: KvPool, slots: torch.Tensor) -> None:
        """Take in that int64 `slots` may have been written to without a record; called by a forward's `abort`."""
        if self.config.quarantine:
            self.unverified.doubt(pool, slots)

    def begin_launches(self, forward: SingleForwardManager) -> None:
        """Take in that launches follow which belong to no step; called by a forward."""
        self._running = forward
        self.state.number = self._number

    def end_launches(self) -> None:
        """Take in that they are over."""
        self._running = None
        self.accounts.launches_unknown()

    def flush(self, *, all_ranks: bool = False) -> None:
        """Wait for everything that was launched, and report it now; for the end of a run, not for the hot path.

        Args:
            all_ranks: every rank makes this call now, so that the last steps are compared too, and all can raise. Where
                only one does, it is alone, waits for no other, and leaves what it would raise to the next step.

        Raises:
            CanaryViolationError: in raise mode, if there was anything to report.
        """
        if self.is_off:
            return
        with self.guard.contain("flush"):
            self._take(self._drain.poll(wait=True))
            self.unverified.tidy()
            if self.ranks is not None:
                self.ranks.flush(all_ranks=all_ranks)

    def summary(self) -> CanarySummary:
        """Return what the canary has done, as of the last drained step."""
        return self.accounts.summary(
            steps=self._number,
            counters=self._drain.counters,
            stride=self.budget.stride,
            skipped=self.skipped,
            unverified=self.unverified.taken_in + self.unverified.taken_back,
        )

    def close(self) -> None:
        """Give back files, ports and the like that observers hold; the second call does nothing.

        What was counted and reported can still be read. Call `flush` before: what a last step found is reported there.
        """
        self.accounts.close()
        # Not left to the collector, which may destroy a graph while somebody captures another.
        self.state.forget_graphs()
        for forward in self._forwards.values():
            forward.forget_graphs()
        output.drain(_LAST_WORDS)

    def _begin_step(self) -> None:
        tidies = self._number % _TIDY_EVERY == 0 and self.unverified.any_marked
        self._take(self._drain.poll(wait=tidies))
        if tidies:
            self.unverified.tidy()
        if self.ranks is not None:
            self.ranks.begin(self._number + 1)
        self._number += 1
        self.state.number = self._number
        self._open = self.accounts.begin_step(self._number, stride=self.budget.stride)

    def _end_step(self) -> None:
        step, self._open = self._open, None
        if step is None:
            return
        self.budget.observe(relied_on=step.relied_on, now=time.monotonic())
        try:
            if self.ranks is not None:
                self.ranks.end_step(step)
            if self.config.sweep_every and step.number % self.config.sweep_every == 0:
                with self.guard.contain("a sweep"):
                    self._sweep()
        finally:
            self._drain.push(step.number, step.statuses, launches=None if step.broken else dict(step.launches))

    def _take(self, findings: Findings) -> None:
        """Count and report what was drained; with ranks, none of them raises alone: the others would wait for it."""
        try:
            findings = self.unverified.take_back(findings, self.groups)
        except Exception as error:
            # What was found is told all the same.
            self.guard.failed("looking for gaps among what was found", error)
        try:
            self.accounts.take(findings)
        except CanaryViolationError as error:
            if self.ranks is None:
                raise
            self.ranks.note(error)

    def _keeps_tokens(self) -> bool:
        if self.config.check_tokens is not None:
            return self.config.check_tokens
        table = 4 * self.limits.max_rows * self.limits.max_len
        pool = sum(p.kv_bytes for p in self.pools)
        return table <= max(SMALL_TABLE_BYTES, self.config.token_table_share * pool)
