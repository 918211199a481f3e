"""The canary of one engine, or of one rank of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from kv_canary import ops, output
from kv_canary.config import CanaryConfig
from kv_canary.constants import OWNER_MASK
from kv_canary.errors import must_be
from kv_canary.observers import HealthCheck, Observer, observers_of
from kv_canary.output import logger
from kv_canary.perturb import PerturbConfig, Perturber
from kv_canary.ranks import RankGroup, RankReport, RankWatch
from kv_canary.reports import Incident, ViolationReport
from kv_canary.runtime import aside, seals
from kv_canary.runtime.accounts import Accounts
from kv_canary.runtime.audits import Audits
from kv_canary.runtime.budget import Budget
from kv_canary.runtime.cached import CachedSlots
from kv_canary.runtime.calibration import measure_cost
from kv_canary.runtime.capacities import CanaryLimits
from kv_canary.runtime.context import CanaryContext
from kv_canary.runtime.cost import Costs
from kv_canary.runtime.device_state import CanaryDeviceState
from kv_canary.runtime.forward import SingleForwardManager
from kv_canary.runtime.guard import Guard
from kv_canary.runtime.handed import HandedOver
from kv_canary.runtime.host import aligned, on_device, padded_to_units
from kv_canary.runtime.oracle import TokenOracle
from kv_canary.runtime.pools import BufferGroup, KvPool
from kv_canary.runtime.retirement import Retirement
from kv_canary.runtime.rows import OwnerNames
from kv_canary.runtime.seals import Scrub
from kv_canary.runtime.steps import Steps
from kv_canary.runtime.summary import CanarySummary, say_verdict
from kv_canary.runtime.sweep import Sweeper
from kv_canary.runtime.unverified import Unverified
from kv_canary.specs.violation_row import ViolationRow

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
        incident_numbers: of new incidents, for managers that follow each other; None: from 1 on.

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
        incident_numbers: Iterator[int] | None = None,
    ) -> None:
        self._closed = False
        self.context = context = CanaryContext(groups, limits=limits, config=config or CanaryConfig())
        # All that may refuse comes before the observers, which hold files and ports.
        budget = Budget(self.config, self.device, max_rows=limits.max_rows)
        if budget.chooses and not context.is_off:
            budget.cost = measure_cost(context)
        costs = Costs(self.config.overhead_target, on_gpu=self.device.type == "cuda")
        perturb = PerturbConfig.from_env() if perturb is None else perturb
        perturber = None if perturb is None else Perturber(perturb, self.groups)
        scrub, audits = Scrub(context), Audits(context)
        self.accounts = Accounts(
            context.places,
            config=self.config,
            guard=self.guard,
            costs=costs,
            scrub=scrub,
            audits=audits,
            arrivals=context.arrivals,
            frees=context.frees,
            rows=rows,
            on_report=on_report,
            observers=[*(() if self.is_off else observers_of(self.config)), *observers],
            numbers=incident_numbers,
        )
        unverified = Unverified(context)
        if self.config.digest_every and ranks is None:
            logger.warning("kv-canary: digest_every is set, but there are no ranks to compare digests with")
        try:
            self.ranks = None if ranks is None else RankWatch(context, ranks, accounts=self.accounts)
        except BaseException:
            self.accounts.close()
            raise
        self._steps = Steps(
            context,
            accounts=self.accounts,
            budget=budget,
            costs=costs,
            unverified=unverified,
            sweeper=Sweeper(context, unverified, cached=cached or (lambda: ())),
            scrub=scrub,
            audits=audits,
            handed=HandedOver(context),
            perturber=perturber,
            ranks=self.ranks,
        )
        self._retirement = Retirement(context)
        self._retires = self.guard.contain("taking in what was freed", allocates=False)
        self._forwards: dict[str, SingleForwardManager] = {}
        if self.device.type == "cuda":
            # Forwards may run on another stream than the one that all of this was made on.
            torch.cuda.current_stream(self.device).synchronize()

    @property
    def groups(self) -> tuple[BufferGroup, ...]:
        """The engine's attention groups."""
        return self.context.groups

    @property
    def pools(self) -> tuple[KvPool, ...]:
        """Their pools, each once."""
        return self.context.pools

    @property
    def limits(self) -> CanaryLimits:
        """The engine's limits."""
        return self.context.limits

    @property
    def config(self) -> CanaryConfig:
        """How it behaves."""
        return self.context.config

    @property
    def device(self) -> torch.device:
        """The device that records, pools and forwards are on."""
        return self.context.device

    @property
    def backend(self) -> str:
        """The implementation of the ops that it launches: "reference", "triton" or "shadow"."""
        return self.context.backend

    @property
    def guard(self) -> Guard:
        """What contains the canary's own failures."""
        return self.context.guard

    @property
    def state(self) -> CanaryDeviceState:
        """What it keeps on the device."""
        return self.context.state

    @property
    def budget(self) -> Budget:
        """What chooses how much of a step is verified."""
        return self._steps.budget

    @property
    def unverified(self) -> Unverified:
        """The slots of which the records say nothing."""
        return self._steps.unverified

    @property
    def oracle(self) -> TokenOracle:
        """What says which input ids a forward should be given."""
        return self.context.oracle

    @property
    def perturber(self) -> Perturber | None:
        """What injects faults; None where nobody asked for any."""
        return self._steps.perturber

    @perturber.setter
    def perturber(self, perturber: Perturber | None) -> None:
        self._steps.perturber = perturber

    @property
    def step(self) -> int:
        """Number of the current or last step; the first is 1."""
        return self.context.step

    @property
    def skipped(self) -> int:
        """Forwards that went by unwatched."""
        return self._steps.skipped

    @property
    def is_idle(self) -> bool:
        """Whether no forward is under way."""
        return self._steps.is_idle

    @property
    def is_off(self) -> bool:
        """Whether the configuration turns the canary off: nothing is verified, recorded or said."""
        return self.config.mode == "off"

    @property
    def completes(self) -> bool:
        """Whether requests that have ended are held against the seals of their slots: see `complete`."""
        return self._steps.audits.completes

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
            self._forwards[name] = SingleForwardManager(
                self.context, self._steps, name=name, groups=[known[g] for g in chosen], inner=inner
            )
        return self._forwards[name]

    def warm_up(
        self,
        tables: Mapping[str, torch.Tensor],
        *,
        is_given: bool = False,
        has_table_rows: bool = False,
        graph_tokens: int | None = None,
    ) -> None:
        """Compile every kernel that the forwards made so far will launch, and say how long that took.

        To be called on the stream of the forwards, between them, before the engine serves: what is not compiled then is
        compiled while requests wait, for seconds. Nothing is done where there is nothing to compile.

        Args:
            tables: the engine's, by group name, of the width that they will have.
            is_given: whether batches will say which rows and lengths the attention backend is given; of inner forwards
                they never do.
            has_table_rows: whether their requests will have a `table_row`.
            graph_tokens: of which the engine's largest decode graph has room, where its tensors are read in place.
        """
        if self.is_off or not self.context.new_replays().rounds_up:
            return
        with self.guard.contain("compiling kernels"):
            logger.info("kv-canary: compiling kernels; what a cache of Triton's holds already is taken from there")
            began, sizes = time.monotonic(), 0
            for forward in self._forwards.values():
                its = {g.name: tables[g.name] for g in forward.groups}
                its_given = is_given and not forward.inner
                sizes += forward.warm_up(
                    tables=its, is_given=its_given, has_table_rows=has_table_rows, graph_tokens=graph_tokens
                )
            self.state.warm_up(backend=self.backend)
            self._retirement.warm_up()
            seals.warm_up(self.context)
            aside.warm_up(self.context)
            self._steps.warm_up()
            nowhere = torch.zeros(_MOST_AT_ONCE + 1, dtype=torch.int64, device=self.device)
            for pool in self.pools:
                for count in (1, _MOST_AT_ONCE // 4 + 1, _MOST_AT_ONCE // 2 + 1, _MOST_AT_ONCE + 1):
                    self.move(pool, nowhere[:count], nowhere[:count], owner=0)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
            took = time.monotonic() - began
            logger.info("kv-canary: kernels for %d sizes of forwards are compiled, in %.1f s", sizes, took)

    def retire(
        self,
        pool: KvPool,
        slots: torch.Tensor | list[torch.Tensor],
        *,
        owner: int = 0,
        handed_out: bool = False,
    ) -> None:
        """Mark int64 `slots` of `pool` as freed: their content can be reached no more.

        To be called on the stream of the forwards, behind every forward that was prepared before the slots were freed.

        Args:
            pool: whose slots they are.
            slots: that were freed; those of several tensors by one launch.
            owner: who has freed them; 0: nobody in particular.
            handed_out: whether nobody has: `owner` was handed them while another request had them.

        Raises:
            ValueError: in raise mode, the pool is none of the canary's.
        """
        if self.is_off or not self.config.track_lifetime:
            return
        parts = slots if isinstance(slots, list) else [slots]
        with self._retires as part:
            self._expect_pool("retire", pool)
            if not any(map(len, parts)):
                return
            self.context.frees.note(self.step, owner, handed_out=handed_out)
            parts = [on_device(its, self.device) for its in parts]
            self._retirement.retire(pool, parts, owner=owner)
            if self.unverified.has_gaps(pool):
                for its in parts:
                    self.unverified.freed(pool, its)
        if part.failed and pool in self.pools:
            for its in parts:
                self.unverify(pool, its)

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep tensors that were made on another stream than the forwards' until what comes next there has read them.

        They live until a step is drained that begins behind this call. To record a stream with each would take more of
        the host's time, here and where the tensors die.
        """
        if not self.is_off:
            self._steps.keep(tensors)

    def handed(self, pool: KvPool, layer: int, k: torch.Tensor | None, v: torch.Tensor | None) -> None:
        """Take in the K and V that the model hands over for a layer of a pool, before they are written there.

        Nothing is done where `check_writes` is off. Called for every layer of a forward, between its HEAD and TAIL, on
        its stream or in its CUDA graph; then TAIL holds what lies in the pool against it (SEAL_K, SEAL_V). Of a forward
        of which not all layers were handed over, nothing is said (`CanarySummary.writes`), and of its tokens the first
        1,024 are looked at.

        Args:
            pool: that they are to be written to.
            layer: which of the layers of the pool's sources it is.
            k, v: [tokens, ...] rows in the order of the forward's new tokens, with the bytes that the pool is to keep
                of each: behind any conversion to another type. Rows behind them are padding. None for a half that the
                pool has not got.

        Raises:
            ValueError: in raise mode, there is no such layer, or rows have other bytes than the pool's.
        """
        if not self.is_off and self.config.check_writes:
            with self.guard.contain("taking in what the model hands over"):
                self._steps.handed.take(pool, layer, k, v)

    def complete(self, request_id: str, slots: Mapping[str, torch.Tensor]) -> None:
        """Hold every byte that a request has rested on against its seal, because the request has ended.

        Nothing is done where no seals are kept, or `completion` is off. What is found is reported with the findings of
        the next step, and observers are told the verdict (`Observer.on_request`) once it is known. To be called on the
        stream of the forwards, behind the last forward of the request, and before anybody else is given its slots;
        before `retire`, which ends their seals.

        Args:
            request_id: how reports call the request.
            slots: int64 [n] by name of the group: the slots of all of its positions that may still be read, in any
                order; 0 or less is no slot.

        Raises:
            ValueError: in raise mode, there is no such group.
        """
        self.complete_all([(request_id, slots)])

    def complete_all(self, ended: Sequence[tuple[str, Mapping[str, torch.Tensor]]]) -> None:
        """Hold every byte that requests which have ended have rested on against its seal, by few launches.

        Args:
            ended: what `complete` takes of each.

        Raises:
            ValueError: in raise mode, there is no such group.
        """
        if not self.is_off:
            with self.guard.contain("completing requests"):
                self._steps.expect_idle("complete")
                self._steps.complete(ended)

    def row_ended(self, row: int) -> None:
        """Take in that the request of a row has given the slots that its row names back, for good or for a while.

        Raises:
            ValueError: in raise mode, there is no such row.
        """
        if not self.is_off:
            with self.guard.contain("taking in the end of a row"):
                most = self.context.limits.max_rows
                if not 0 <= row < most:
                    raise ValueError(must_be("row_ended", "row", f"in [1, {most})", str(row)))
                self._steps.audits.forget_row(row)

    def watch_place(self, group: BufferGroup, came: Callable[[ViolationRow], int | None]) -> int:
        """Take in that violations may be found in another place, a tier of one of the pools; return its number.

        Args:
            group: the place.
            came: returns the step in which what is wrong there came there; None: it was right then.

        Raises:
            ValueError: a place of that name is there already.
        """
        places = self.context.places
        if group.name in [place.name for place in places]:
            raise ValueError(must_be("watch_place", "group", "of another name than those there are", group.name))
        places.append(group)
        self.context.arrivals.watch(group.pool, came)
        return len(places)

    def report(self, rows: Sequence[ViolationRow]) -> None:
        """Take in violations that were found outside of forwards, from any thread; they are told with the next step's.

        Args:
            rows: that name a place by the number that `watch_place` returned, or a group by its own.
        """
        if not self.is_off:
            self._steps.report(rows)

    @property
    def has_reports(self) -> bool:
        """Whether something was taken in by `report` that has not been told yet: `flush` tells it."""
        return self._steps.has_reports

    def arrived(self, pool: KvPool, slots: torch.Tensor, seals: torch.Tensor | None) -> None:
        """Take in that int64 `slots` of `pool` are back from elsewhere: give them their seals, and hold them to those.

        To be called on the stream of the forwards, between them, once records and bytes are there.

        Args:
            pool: one of the canary's.
            slots: whose records are there again.
            seals: what `KvPool.take_seals` returned of the slots that they were in before; None: nothing.

        Raises:
            ValueError: in raise mode, the pool is none of the canary's.
        """
        if not self.is_off:
            with self.guard.contain("taking in what came back"):
                self._expect_pool("arrived", pool)
                pool.put_seals(slots, seals)
                self.context.arrivals.note(self.step, pool, slots)
                if seals is not None:
                    self._steps.audits.arrived(pool, slots)

    def move(self, pool: KvPool, src: torch.Tensor, dst: torch.Tensor, *, owner: int) -> None:
        """Carry the records of int64 `src` to `dst`, because the KV was copied so.

        Raises:
            ValueError: in raise mode, the pool is none of the canary's.
        """
        if self.is_off:
            return
        with self.guard.contain("taking in what was copied") as part:
            self._expect_pool("move", pool)
            if not len(src):
                return
            src, dst = on_device(src, self.device), on_device(dst, self.device)
            taken = pool.take_seals(src)
            compiled_for = aligned if len(src) <= _MOST_AT_ONCE else padded_to_units
            ops.move(
                src=compiled_for(src),
                dst=compiled_for(dst),
                owner=owner & OWNER_MASK,
                step=self.state.step,
                records=pool.buffers,
                backend=self.backend,
            )
            pool.put_seals(dst, taken)
            self.unverified.moved(pool, src, dst)
        if part.failed and pool in self.pools:
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
            slots = on_device(slots, self.device)
            aside.record_prefix(
                self.context,
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

        Raises:
            ValueError: in raise mode, the pool is none of the canary's.
        """
        if not self.is_off:
            with self.guard.contain("marking slots as unverified"):
                self._expect_pool("unverify", pool)
                self.unverified.forget(pool, slots)

    def _expect_pool(self, op: str, pool: KvPool) -> None:
        """Refuse a pool that is another manager's, or none: its records are not this one's to change."""
        if pool not in self.pools:
            expected = f"one of the canary's pools ({', '.join(each.name for each in self.pools)})"
            got = f"another pool, {pool.name}" if isinstance(pool, KvPool) else repr(pool)
            raise ValueError(must_be(op, "pool", expected, got))

    def clear(self) -> None:
        """Forget every record, because the engine emptied its cache."""
        if self.is_off:
            return
        with self.guard.contain("taking in an emptied cache") as part:
            for pool in self.pools:
                for records in pool.buffers:
                    records.zero_()
            self.unverified.clear()
            self._steps.audits.forget()
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
                self._steps.expect_idle("sweep")
                self._steps.sweep()

    def scrub(self) -> None:
        """Sweep in idle time, and hold every slot against its seal: report what was found, by earlier steps too, now.

        Raises:
            CanaryViolationError: in raise mode, if there was anything to report.
        """
        self.sweep()
        if not self.is_off:
            with self.guard.contain("a scrub"):
                self._steps.scrub.all()
        self.flush()

    def one_step(self) -> AbstractContextManager[None]:
        """Make the forwards inside the block one step: a draft model's and the target's, say.

        Raises:
            RuntimeError: in raise mode, a step is under way; or, at its end, a forward still is.
        """
        return self._steps.one_step()

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
            self._steps.flush(all_ranks=all_ranks)

    def summary(self) -> CanarySummary:
        """Return what the canary has done, as of the last drained step.

        In log mode it comes even from a device that no longer answers, without what only that one knows.
        """
        # Not by the guard's context, which keeps the time of the engine's thread: any thread may ask.
        try:
            writes = self._steps.handed.facts
        except Exception as error:
            if not self.guard.contains:
                raise
            self.guard.failed("counting the checked writes", error, own=False)
            writes = None
        return self.accounts.summary(
            steps=self.step,
            counters=self._steps.counters,
            stride=self.budget.stride,
            skipped=self._steps.skipped,
            unverified=self.unverified.taken_in + self.unverified.taken_back,
            writes=writes,
            memory=self.context.memory,
        )

    def close(self, *, says_verdict: bool = True) -> None:
        """Say the verdict, and give back files, ports and the like; the second call does nothing.

        What was counted and reported can still be read. Call `flush` before: what a last step found is reported there.

        Args:
            says_verdict: whether it goes to the log; False where who calls says it of several.
        """
        if not (self._closed or self.is_off):
            self._closed = True
            summary = None
            try:
                summary = self.summary()
                if says_verdict:
                    say_verdict(summary)
            finally:
                self.accounts.close(summary)
        # Not left to the collector, which may destroy a graph while somebody captures another.
        self.state.forget_graphs()
        self._retirement.forget_graphs()
        self._steps.audits.forget_graphs()
        self._steps.scrub.forget_graphs()
        for forward in self._forwards.values():
            forward.forget_graphs()
        output.drain(_LAST_WORDS)
