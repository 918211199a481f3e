"""The steps of a canary: what is done before, between and behind their forwards, and what becomes of what they find."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from kv_canary.output import logger
from kv_canary.perturb import Perturber
from kv_canary.ranks import RankWatch
from kv_canary.reports import CanaryViolationError
from kv_canary.runtime.accounts import Accounts
from kv_canary.runtime.audits import Audits, Ended
from kv_canary.runtime.batch import ForwardBatch, WatchedForward, relied_on
from kv_canary.runtime.budget import Budget
from kv_canary.runtime.composition import BatchRequests, Int64s
from kv_canary.runtime.context import CanaryContext
from kv_canary.runtime.cost import TIMED_EVERY, Costs, DeviceTimer
from kv_canary.runtime.drain import Drain, Findings, Sheet
from kv_canary.runtime.handed import HandedOver
from kv_canary.runtime.history import StepRecord
from kv_canary.runtime.host import let_go
from kv_canary.runtime.pools import KvPool
from kv_canary.runtime.seals import SCRUB_EVERY, Scrub
from kv_canary.runtime.sweep import Sweeper
from kv_canary.runtime.tails import Advance
from kv_canary.runtime.unverified import Unverified
from kv_canary.specs.violation_row import ViolationRow

# Steps from one look at whether any slot is still marked as unverified to the next.
_TIDY_EVERY = 256
# Seconds of a step, and steps in a row, from which on the host has time to spare: see docs/performance.md.
_LONG_STEP, _UNHURRIED = 0.008, 16
# Kinds of forwards that go by unwatched that are told of, one line each.
_MOST_TOLD = 64
# Steps that are repeated on a GPU in log mode before the words of those before them are read, at most.
_MOST_UNREAD = 8
# Lists of tensors that are kept for launches that read them, at most.
_MOST_KEPT = 256
# Violations found outside of forwards that wait for the next step, at most; then the oldest go.
_MOST_ASIDE = 4096


class Steps:
    """The step under way, its forwards, and the drain of the steps before it.

    Args:
        context: of the canary.
        accounts: takes in what is drained.
        budget: chooses what of a step is verified.
        costs: takes in what steps cost.
        unverified: the slots of which the records say nothing.
        sweeper: verifies what no forward is about to read.
        scrub: holds slots against their seals.
        audits: holds requests against the seals of their slots.
        handed: keeps what models hand over to be cached.
        perturber: injects faults; None: there are none.
        ranks: compares this rank with the others; None: it is alone.
    """

    def __init__(
        self,
        context: CanaryContext,
        *,
        accounts: Accounts,
        budget: Budget,
        costs: Costs,
        unverified: Unverified,
        sweeper: Sweeper,
        scrub: Scrub,
        audits: Audits,
        handed: HandedOver,
        perturber: Perturber | None,
        ranks: RankWatch | None,
    ) -> None:
        self.context, self.budget, self.unverified = context, budget, unverified
        self.perturber, self.scrub, self.audits, self.handed = perturber, scrub, audits, handed
        self._accounts, self._costs, self._sweeper, self._ranks = accounts, costs, sweeper, ranks
        self._drain = Drain(
            context.state, failed=lambda error: context.guard.failed("emptying the ring of violations", error)
        )
        self._times = context.device.type == "cuda"
        # How many steps' words may wait to be read while steps are repeated: who is to raise does so at once.
        self._most_unread = _MOST_UNREAD if self._times and context.config.mode != "raise" else 0
        # What times the launches of the step under way; the timings that are under way, with the steps' entries; and
        # the host's time, as it was when the last step ended.
        self.timer: DeviceTimer | None = None
        self._timings: deque[tuple[DeviceTimer, float]] = deque()
        self._spare_timers: list[DeviceTimer] = []
        self._spent, self._waited = 0.0, False
        # When the last step ended; and steps in a row that were long, and found the device busy with the one before.
        self._ended, self._unhurried = 0.0, 0
        self._open: StepRecord | None = None
        self._explicit = False
        # The forward between its begin and its end.
        self._running: WatchedForward | None = None
        # The last step that was drained.
        self.drained = 0
        # Forwards that went by unwatched.
        self.skipped = 0
        self._skips_told: set[str] = set()
        # Tensors that launches read which come before a step, with its number.
        self._kept: deque[tuple[int, Sequence[torch.Tensor]]] = deque()
        # Violations that were found outside of forwards, by other threads too.
        self._found_aside: deque[ViolationRow] = deque(maxlen=_MOST_ASIDE)

    @property
    def counters(self) -> list[int]:
        """Launches, then entries, of each tag, as of the last drained step."""
        return self._drain.counters

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """Make the forwards inside the block one step; see `CanaryManager.one_step`."""
        guard, began = self.context.guard, False
        with guard.contain("the beginning of a step"):
            if self._open is not None:
                raise RuntimeError("kv-canary: a step must begin when none is under way, got it inside another")
            if not self.context.is_off:
                self._begin_step()
                self._explicit = began = True
        complete = False
        try:
            yield
            complete = True
        finally:
            if began:
                with guard.contain("the end of a step"):
                    self._end_explicit(complete=complete)

    @property
    def is_idle(self) -> bool:
        """Whether no forward is between its begin and its end."""
        return self._running is None

    def expect_idle(self, call: str) -> None:
        """Raise RuntimeError, naming `call`, if a forward is between its begin and its end."""
        if self._running is not None:
            raise RuntimeError(
                f"kv-canary: {call} must come when no forward is under way, got it inside forward {self._running.name}"
            )

    def begin_forward(
        self, forward: WatchedForward, requests: BatchRequests, *, may_wait: bool
    ) -> tuple[Int64s, Advance | None]:
        """Report what earlier steps found, and bring tails up.

        Return the strides, and with `may_wait` the launch that the forward has to make before HEAD. Who calls takes
        what is raised to `abort_forward`.
        """
        state, unverified = self.context.state, self.unverified
        unverified.settle_debts()
        step = self._open
        if step is None:
            step = self._begin_step()
        self._running = forward
        for group, status, earlier in forward.statuses:
            # The forward has run in this step before, with the same word.
            if status in step.statuses:
                state.keep_status(status, earlier, fresh=earlier not in step.statuses)
                step.statuses = {**step.statuses, earlier: group}
        fresh, offsets = requests, {g.token_offset for g in forward.groups} if forward.inner else set()
        if forward.inner:
            # The others go on where an inner forward of this step has brought them.
            inner = dict(step.inner)
            fresh = BatchRequests.of(
                [r for r in requests if {inner.pop((o, r.row), None) for o in offsets} != {r.prefix_len}]
            )
            step.inner = inner
        # What is taken in anew is taken in behind it, and before HEAD.
        may_wait = may_wait and not any(unverified.has_gaps(g.pool) for g in forward.groups)
        try:
            advance = state.advance(fresh, backend=self.context.backend, may_wait=may_wait)
        except BaseException:
            # How far the rows have come is not known; from here on they are brought up from their first token.
            state.forget(fresh.rows)
            raise
        if forward.inner:
            state.branch(fresh.rows, offsets)
        step.forwards.append(requests)
        step.relied_on += sum(relied_on(requests, g) for g in forward.groups)
        return self.budget.strides(forward.name, requests, step=step.number), advance

    def repeat(self, forward: WatchedForward, requests: BatchRequests, *, relied_on: int) -> bool:
        """Begin a step of one forward for which nothing is to be done but what every step asks for.

        Return False, with nothing done, where more is. Who calls brings up tails, and takes what is raised behind this
        to `abort_forward`.

        Args:
            forward: of the step.
            requests: of the forward.
            relied_on: cached positions that it is about to read.

        Raises:
            CanaryViolationError: in raise mode, for what the step before found; nothing else is done then.
        """
        idle = self._open is None and self._running is None
        if not idle or self.perturber is not None or self._ranks is not None or not self.unverified.is_clean:
            return False
        if len(self._drain.pending) > self._most_unread or self._found_aside:
            self.look()
        self._open = step = self._next_step()
        self._running = forward
        step.forwards.append(requests)
        step.relied_on = relied_on
        return True

    @property
    def host_has_time(self) -> bool:
        """Whether the host's time is hidden behind the device's, by the last steps, and no launches are timed in this.

        Where it is, what takes more of it, and less of the device's, pays.
        """
        return self._unhurried >= _UNHURRIED and not self._waited and self.timer is None

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep tensors until the next step is drained; see `CanaryManager.keep`."""
        self._kept.append((self.context.state.number + 1, tensors))
        if len(self._kept) > _MOST_KEPT:
            # No step begins, that would be drained.
            let_go(*self._kept.popleft()[1])

    def new_sheet(self) -> Sheet:
        """Return what a launch may copy a step's words to, for `end_forward`."""
        return self._drain.new_sheet()

    @property
    def shows_forwards(self) -> bool:
        """Whether anybody looks at forwards when they are over."""
        return self.perturber is not None or self._ranks is not None or self._accounts.shows_forwards

    def take_in_gaps(self, forward: WatchedForward, batch: ForwardBatch) -> None:
        """Record anew what a forward is about to read and nobody has recorded."""
        for group in forward.groups:
            self.unverified.take_in(group, batch.tables[group.name], batch.requests)

    def admit(self, forward: WatchedForward, requests: BatchRequests, tables: Mapping[str, torch.Tensor]) -> None:
        """Hold the prefixes of requests that come new to a forward against their seals."""
        if self.audits.admits:
            with self.context.guard.contain("an admission"):
                self.audits.admit(forward.groups, requests, tables)

    def complete(self, ended: Sequence[Ended]) -> None:
        """Hold what requests have rested on against its seals; see `CanaryManager.complete_all`."""
        if self.audits.completes:
            self.audits.complete(ended)

    def perturb(self, batch: ForwardBatch) -> None:
        """Inject what is to be injected before a forward, once nothing can refuse it."""
        if self.perturber is not None:
            checks_inputs = batch.expected_input_ids is not None or self.context.config.check_inputs
            self.perturber.before(
                batch, step=self.context.step, checks_inputs=checks_inputs, cached=self._sweeper.cached
            )

    def end_forward(self, forward: WatchedForward, batch: ForwardBatch | None, *, sheet: Sheet | None = None) -> None:
        """Take in what a forward launched. Who calls takes what is raised to `abort_forward`.

        Args:
            forward, batch: what is over.
            sheet: what a launch has copied the step's words to.
        """
        step, self._running = self._open, None
        if step is None:
            raise RuntimeError("kv-canary: a step must be under way, got none")
        if batch is not None:
            if self.perturber is not None:
                self.perturber.after(batch, step=self.context.step)
            if self._ranks is not None:
                self._ranks.see(forward, batch)
            step.tables = {**step.tables, **batch.tables} if step.tables else batch.tables
            if self._accounts.shows_forwards:
                self._accounts.see_forward(forward, batch)
            if forward.inner:
                offsets = {g.token_offset for g in forward.groups}
                ends = {(o, r.row): r.prefix_len + r.extend_len for o in offsets for r in batch.requests}
                step.inner = {**step.inner, **ends}
        if not step.launches:
            # As nearly always: what the forward says of itself is not copied.
            step.statuses, step.launches = forward.groups_of_statuses, forward.launches
        else:
            step.statuses = {**step.statuses, **forward.groups_of_statuses}
            step.launches = Counter(step.launches) + Counter(forward.launches)
        if not self._explicit:
            self._end_step(sheet)

    def skip_forward(self, forward: WatchedForward, out_slots: Mapping[str, torch.Tensor]) -> None:
        """Take in that a forward goes by unwatched, and mark what it writes; never raises."""
        self.skipped += 1
        self.context.guard.touched = True
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
        """Say that a forward goes by unwatched, once for each reason."""
        if why not in self._skips_told and len(self._skips_told) < _MOST_TOLD:
            self._skips_told.add(why)
            logger.warning(
                "kv-canary: forward %s goes by unwatched, and what it writes counts as unverified: %s. Others of this "
                "kind are counted, see summary().skipped",
                forward,
                why,
            )

    def abort_forward(self, forward: WatchedForward) -> None:
        """Take in that a forward was given up."""
        self._running = None
        self.budget.forget(forward.name)
        with self.context.guard.contain("giving up a forward"):
            if self.perturber is not None:
                self.perturber.restore()
        # What was launched of it says nothing of a whole step.
        self.timer = None
        if self._open is not None:
            self._open.broken = True
            if not self._explicit:
                with self.context.guard.contain("the end of a step"):
                    self._end_step()

    def doubt(self, pool: KvPool, slots: torch.Tensor) -> None:
        """Take in that int64 `slots` may have been written to without a record."""
        if self.context.config.quarantine:
            self.unverified.doubt(pool, slots)

    def begin_launches(self, forward: WatchedForward) -> None:
        """Take in that a forward makes launches which belong to no step, until `end_launches`."""
        self._running = forward

    def end_launches(self) -> None:
        """Take in that launches which belong to no step are over."""
        self._running = None
        self._accounts.launches_unknown()

    def warm_up(self) -> None:
        """Compile the kernels of what is verified outside of forwards; behind those of all forwards."""
        self._sweeper.warm_up()
        self._accounts.warm_up(self.context.groups)
        self.handed.forget_counts()

    def sweep(self) -> None:
        """Verify what the prefix cache holds, and freed slots in quarantine."""
        self.unverified.settle_debts()
        self._sweeper.sweep()
        self._sweeper.quarantine()

    def flush(self, *, all_ranks: bool) -> None:
        """Wait for everything that was launched, and report it now; see `CanaryManager.flush`."""
        self.look(wait=True)
        self._accounts.take_verdicts(self.audits.poll(wait=True))
        self.unverified.tidy()
        if self._ranks is not None:
            self._ranks.flush(all_ranks=all_ranks)

    def report(self, rows: Sequence[ViolationRow]) -> None:
        """Take in violations that were found outside of forwards, from any thread; the next step tells them."""
        self._found_aside.extend(rows)

    @property
    def has_reports(self) -> bool:
        """Whether any of these have not been told yet."""
        return bool(self._found_aside)

    def _begin_step(self) -> StepRecord:
        tidies = self.context.state.number % _TIDY_EVERY == 0 and self.unverified.any_marked
        self.look(wait=tidies)
        if tidies:
            self.unverified.tidy()
        if self._ranks is not None:
            self._ranks.begin(self.context.state.number + 1)
        self._open = self._next_step()
        return self._open

    def look(self, *, wait: bool = False) -> None:
        """Take in what the steps have found whose words have arrived; with `wait`, all of them.

        Raises:
            CanaryViolationError: in raise mode, if there is anything to report.
        """
        drain = self._drain
        findings = drain.poll(wait=wait, merges=not self._accounts.wants_quiet_steps)
        self.drained, self._waited = drain.drained, drain.is_empty
        while self._kept and self._kept[0][0] <= self.drained:
            self._kept.popleft()
        self._take(findings)
        if not self.audits.is_idle:
            self._accounts.take_verdicts(self.audits.poll())

    def _next_step(self) -> StepRecord:
        """Count a step, and return its record."""
        state = self.context.state
        state.number += 1
        if self._times and state.number % TIMED_EVERY == 0:
            self._time()
        return self._accounts.begin_step(state.number, stride=self.budget.stride)

    def _time(self) -> None:
        """Take in the timings that are over, and let the launches of the step that begins be timed."""
        while self._timings and (seconds := self._timings[0][0].seconds()) is not None:
            timer, entries = self._timings.popleft()
            self._costs.add_timing(seconds)
            self.budget.add_timing(seconds, entries=entries)
            timer.restart()
            self._spare_timers.append(timer)
        self.timer = self._spare_timers.pop() if self._spare_timers else DeviceTimer(self.context.device)

    def _end_step(self, sheet: Sheet | None = None) -> None:
        step, self._open = self._open, None
        if step is None:
            return
        now, spent = time.monotonic(), self.context.guard.spent
        hurries = self._waited or now - self._ended < _LONG_STEP
        self._ended, self._unhurried = now, 0 if hurries else self._unhurried + 1
        self.budget.observe(relied_on=step.relied_on, now=now)
        self._costs.observe(now=now, host=spent - self._spent, waited=self._waited)
        self._spent = spent
        if self.timer is not None and self.timer.has_spans:
            self._timings.append((self.timer, step.relied_on / step.stride))
        self.timer = None
        every = self.context.config.sweep_every
        try:
            if self._ranks is not None:
                self._ranks.end_step(step)
            if every and step.number % every == 0:
                with self.context.guard.contain("a sweep"):
                    self.sweep()
            if step.number % SCRUB_EVERY == 0:
                with self.context.guard.contain("a scrub"):
                    self.scrub.piece()
        finally:
            launches = None if step.broken else step.launches
            self._drain.push(step.number, step.statuses, launches=launches, sheet=sheet)

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

    def _take(self, findings: Findings) -> None:
        """Count and report what was drained; with ranks, none of them raises alone: the others would wait for it."""
        if not findings.total and not self._found_aside:
            # As nearly always.
            self._accounts.take(findings)
            return
        # A step that is repeated is begun in whatever mode the engine is.
        with torch.inference_mode(False):
            if findings.rows and self.unverified.any_marked:
                try:
                    findings = self.unverified.take_back(findings, self.context.groups)
                except Exception as error:
                    # What was found is told all the same.
                    self.context.guard.failed("looking for gaps among what was found", error)
            if self._found_aside:
                aside = [self._found_aside.popleft() for _ in range(len(self._found_aside))]
                findings = replace(findings, total=findings.total + len(aside), rows=[*findings.rows, *aside])
            try:
                self._accounts.take(findings)
            except CanaryViolationError as error:
                if self._ranks is None:
                    raise
                self._ranks.note(error)
