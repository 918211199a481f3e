"""A campaign: jobs that draw cases, run them in other processes, shrink what fails and save it.

Each job is a process that draws cases with Hypothesis, op by op in rounds; beside it an `Executor` runs them. A
counterexample is saved when it is first seen and again each time that it gets smaller, so that nothing found is lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import multiprocessing
import os
import queue
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.synchronize import Event
from pathlib import Path
from random import Random
from typing import Any

from kv_canary.cases.casefile import SUFFIX, case_file, save
from kv_canary.cases.comparison import Mismatch
from kv_canary.difftest.coverage import Coverage
from kv_canary.difftest.features import of_call
from kv_canary.difftest.search import ROUND_EXAMPLES, check_call, search, search_engine, search_rounds
from kv_canary.difftest.worker import Executor, import_all, prepare
from kv_canary.errors import must_be
from kv_canary.specs import all_specs, get_spec
from kv_canary.specs.interface import KernelSpec

# The model engine with every implementation behind it, beside the ops by themselves.
ENGINE = "engine"

REPORT_EVERY_S = 0.5
# Seconds that the jobs of a campaign which is ended have for the calls that they are at, all together: on a GPU one
# compiles for longer.
_LAST_CALLS_S = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Campaign:
    """The settings of a campaign.

    Args:
        targets: ops, and `ENGINE`; empty: all.
        minutes: run rounds of every target until then; or
        examples: run that many cases of each target, once.
        jobs: processes that draw cases; each has another one that runs them.
        device: where Triton runs, "cpu" or "cuda".
        seed: of everything that is drawn.
        databases: Hypothesis databases, as `open_database` takes them.
        findings: folder for case files.
        imports: Python files or modules that register ops.
        plant: name of a planted bug to run with, or None.
        max_findings: stop after as many different findings; 0: never.
        shrink_s: how long Hypothesis may shrink a finding; the call itself is then minimized for half as long.
    """

    targets: tuple[str, ...] = ()
    minutes: float | None = None
    examples: int | None = None
    jobs: int = 1
    device: str = "cpu"
    seed: int = 0
    databases: tuple[str, ...] = ()
    findings: Path = Path("findings")
    imports: tuple[str, ...] = ()
    plant: str | None = None
    max_findings: int = 0
    shrink_s: float = 60.0

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.examples is None):
            raise ValueError("kv-canary: difftest: exactly one of minutes and examples must be given")
        for target in self.targets:
            if target not in (*all_specs(), ENGINE):
                expected = f"one of {', '.join([*all_specs(), ENGINE])}"
                raise ValueError(must_be("difftest", "op", expected, repr(target)))

        if self.plant is not None:
            from kv_canary.difftest.mutation.planted import find_planted

            find_planted(self.plant)

    def all_targets(self) -> tuple[str, ...]:
        return self.targets or (*all_specs(), ENGINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """A failure, shrunk and saved."""

    op: str
    says: str
    signature: tuple[str, ...]
    file: Path
    found_after_s: float
    cases_before: int


@dataclasses.dataclass(kw_only=True)
class TargetStats:
    """The counts of one target in a campaign."""

    cases: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(kw_only=True)
class CampaignResult:
    """The result of a campaign."""

    stats: dict[str, TargetStats]
    findings: dict[tuple[str, ...], Finding]
    coverage: Coverage
    errors: list[str]
    seconds: float = 0.0
    interrupted: bool = False
    restarts: int = 0

    @property
    def cases(self) -> int:
        return sum(s.cases for s in self.stats.values())

    @property
    def untried(self) -> list[str]:
        """Targets that no case was run of: of these the campaign says nothing."""
        return [target for target, s in self.stats.items() if not s.cases]


def run_campaign(
    campaign: Campaign, *, on_change: Callable[[CampaignResult], None] = lambda result: None
) -> CampaignResult:
    """Run a campaign to its end, or to Ctrl-C, and return what came of it; `on_change` sees it grow.

    Raises:
        ValueError: an import, a database or an op is not to be had.
    """
    from kv_canary.difftest.databases import open_database

    import_all(campaign.imports)
    open_database(campaign.databases)
    context = multiprocessing.get_context("spawn")
    events: Any = context.Queue()
    stop = context.Event()
    result = CampaignResult(
        stats={t: TargetStats() for t in campaign.all_targets()}, findings={}, coverage=Coverage(), errors=[]
    )
    start = time.monotonic()
    jobs = {}
    generations: dict[int, int] = dict.fromkeys(range(campaign.jobs), 0)

    def begin(index: int) -> None:
        arguments = (campaign, index, generations[index], start, events, stop)
        jobs[index] = context.Process(target=_job, args=arguments, daemon=False)
        jobs[index].start()

    for index in generations:
        begin(index)
    try:
        while jobs or not events.empty():
            with contextlib.suppress(queue.Empty):
                _receive(events.get(timeout=0.2), result, campaign, stop)
            result.seconds = time.monotonic() - start
            on_change(result)
            for index, job in list(jobs.items()):
                if job.is_alive():
                    continue
                job.join()
                del jobs[index]
                if job.exitcode and not stop.is_set():
                    result.errors.append(f"job {index} ended with exit code {job.exitcode}")
                    generations[index] += 1
                    if generations[index] <= 3 and campaign.minutes is not None:
                        begin(index)
    except KeyboardInterrupt:
        result.interrupted = True
        stop.set()
        end = time.monotonic() + _LAST_CALLS_S
        for job in jobs.values():
            job.join(timeout=max(0.0, end - time.monotonic()))
    finally:
        stop.set()
        while True:
            try:
                _receive(events.get(timeout=0.2), result, campaign, stop)
            except queue.Empty:
                break
        for job in jobs.values():
            if job.is_alive():
                job.kill()
    result.seconds = time.monotonic() - start
    on_change(result)
    return result


def _receive(event: Mapping[str, Any], result: CampaignResult, campaign: Campaign, stop: Event) -> None:
    if "cases" in event:
        stats = result.stats[event["target"]]
        stats.cases += event["cases"]
        stats.seconds += event["seconds"]
        result.coverage.merge(event["coverage"])
        result.restarts += event["restarts"]
    elif "finding" in event:
        finding: Finding = event["finding"]
        known = result.findings.get(finding.signature)
        if known is not None:
            # Seen first by whoever saw it first; the file is the newest, and the smallest of its job.
            finding = dataclasses.replace(finding, found_after_s=known.found_after_s, cases_before=known.cases_before)
        result.findings[finding.signature] = finding
        if event["final"] and 0 < campaign.max_findings <= len(result.findings):
            stop.set()
    else:
        result.errors.append(event["error"])


def device_name(device: str) -> str:
    """Return what Triton runs on: the GPU's name, or its interpreter."""
    if device == "cpu":
        return "cpu, Triton interpreter"
    import torch

    return torch.cuda.get_device_name()


class _Over(KeyboardInterrupt):
    """The job's time is up: Hypothesis lets it through, as it does Ctrl-C."""


class _Job:
    """A process of a campaign: what it has run, what it knows, and how it tells."""

    def __init__(
        self,
        campaign: Campaign,
        index: int,
        generation: int,
        start: float,
        events: Any,
        stop: Event,
        *,
        is_ended: Callable[[], bool] = lambda: False,
    ) -> None:
        from kv_canary.difftest.databases import open_database

        self.is_ended = is_ended
        self.campaign, self.index, self.generation, self.events, self.stop = campaign, index, generation, events, stop
        # The monotonic clock is the machine's: what the campaign read is comparable here.
        self.start = start
        self.end = None if campaign.minutes is None else start + campaign.minutes * 60
        self.database = open_database(campaign.databases)
        self.executor = Executor(device=campaign.device, imports=campaign.imports, plant=campaign.plant)
        self.known: set[tuple[str, ...]] = set()
        # Targets in which something is known: it no longer counts as failing, so Hypothesis would delete its example.
        self.found_in: set[str] = set()
        self.cases = 0
        self._unsent = 0
        self._coverage = Coverage()
        self._told = time.monotonic()
        self._restarts = 0
        self._hunt: _Hunt | None = None
        self._engine_rounds = 0

    def run(self) -> None:
        targets = self.campaign.all_targets()
        if self.campaign.examples is not None:
            left = [
                (target, batch, min(ROUND_EXAMPLES, self.campaign.examples - batch * ROUND_EXAMPLES))
                for batch in range(-(-self.campaign.examples // ROUND_EXAMPLES))
                for target in targets
            ]
            for target, batch, examples in left[self.index :: self.campaign.jobs]:
                self.round(target, batch, examples)
            return
        for number in itertools.count():
            self.round(targets[(number + self.index) % len(targets)], number, ROUND_EXAMPLES)

    def round(self, target: str, number: int, examples: int) -> None:
        """Draw `examples` cases of a target; shrink and save the first one that fails in a way not seen before."""
        # A run of so many examples draws the same calls whatever the number of jobs; a fuzz job draws its own.
        job = "" if self.campaign.minutes is None else f"{self.index}/{self.generation}"
        seed = Random(f"{self.campaign.seed}/{target}/{job}/{number}").getrandbits(64)
        self._hunt = _Hunt()
        self._told = time.monotonic()
        database = None if target in self.found_in else self.database
        try:
            if target == ENGINE:
                # Lives, and moments in the middle of others.
                look = search_engine if self._engine_rounds % 2 == 0 else search_rounds
                self._engine_rounds += 1
                look(
                    self.executor.check,
                    self.hunted,
                    self.engine_step,
                    seed=seed,
                    database=database,
                )
            else:
                spec = get_spec(target)
                search(spec, lambda case: self.fails(spec, case), examples=examples, seed=seed, database=database)
        finally:
            self.tell(target, force=True)
            if self._hunt.signature is not None:
                self.found_in.add(target)
            self.finish()

    def fails(self, spec: KernelSpec, case: Mapping[str, Any]) -> bool:
        """Whether the case fails in the way that this round hunts; the first new failure decides which."""
        self.pace()
        case = spec.bind(case)
        self.count(spec.name, of_call(spec.name, case))
        mismatch = check_call(spec, case, check=self.executor.check, first=self.cases % ROUND_EXAMPLES == 1)
        return mismatch is not None and self.hunted(spec, case, mismatch)

    def engine_step(self, calls: list[frozenset[str]]) -> None:
        """Before an engine's step: account for the one before, by the features of its calls."""
        self.pace()
        if calls:
            self.count(ENGINE, *calls)

    def hunted(self, spec: KernelSpec, case: Mapping[str, Any], mismatch: Mismatch) -> bool:
        hunt = self._hunt
        if hunt is None or mismatch.signature in self.known:
            return False
        if hunt.signature is None:
            if self.is_ended():
                # What ends a campaign may end compilers first, in the same group of processes: that is no finding.
                raise _Over
            hunt.signature, hunt.since = mismatch.signature, time.monotonic()
            hunt.cases_before, hunt.found_after_s = self.cases, hunt.since - self.start
        if mismatch.signature != hunt.signature:
            return False
        hunt.spec, hunt.case, hunt.mismatch = spec, case, mismatch
        self.save(final=False)
        return True

    def pace(self) -> None:
        """Stop where the time is up; a hunt gets a while to shrink what it has."""
        hunt, now = self._hunt, time.monotonic()
        if hunt is not None and hunt.signature is not None:
            if now - hunt.since > self.campaign.shrink_s:
                raise _Over
        elif self.stop.is_set() or (self.end is not None and now > self.end):
            raise _Over

    def count(self, target: str, *calls: frozenset[str]) -> None:
        self.cases += 1
        self._unsent += 1
        self._coverage.add(*calls)
        if time.monotonic() - self._told > REPORT_EVERY_S:
            self.tell(target)

    def tell(self, target: str, *, force: bool = False) -> None:
        now = time.monotonic()
        if force or self._unsent:
            self.events.put(
                {
                    "target": target,
                    "cases": self._unsent,
                    "seconds": now - self._told,
                    "coverage": self._coverage,
                    "restarts": self.executor.restarts - self._restarts,
                }
            )
        self._unsent, self._coverage, self._told, self._restarts = 0, Coverage(), now, self.executor.restarts

    def finish(self) -> None:
        """Shrink what the round found as a call, whatever drew it, and save it for good."""
        from kv_canary.difftest.minimize import minimize

        hunt, self._hunt = self._hunt, None
        if hunt is None or hunt.spec is None or hunt.signature is None:
            return
        spec, signature = hunt.spec, hunt.signature
        end = time.monotonic() + self.campaign.shrink_s / 2

        def still_fails(case: Mapping[str, Any]) -> bool:
            if time.monotonic() > end:
                raise _Over
            found = self.executor.check(spec, case)
            if found is None or found.signature != signature:
                return False
            hunt.case, hunt.mismatch = case, found
            return True

        try:
            # What does not fail again is kept as it was drawn.
            if hunt.mismatch is not None and hunt.mismatch.backend == "triton" and still_fails(hunt.case):
                minimize(spec, hunt.case, still_fails)
        except _Over:
            pass
        self._hunt = hunt
        self.save(final=True)
        self.known.add(signature)
        self._hunt = None
        if 0 < self.campaign.max_findings <= len(self.known):
            # Whoever runs the campaign hears of it too late to keep this job from another round.
            raise _Over

    def save(self, *, final: bool) -> None:
        hunt = self._hunt
        if hunt is None or hunt.spec is None or hunt.mismatch is None:
            return
        campaign = self.campaign
        facts: dict[str, str | int | float] = {"device": campaign.device, "seed": campaign.seed}
        facts["plant"] = campaign.plant or ""
        file = case_file(hunt.spec, hunt.case, hunt.mismatch, facts=facts, imports=campaign.imports)
        path = campaign.findings / _file_name(hunt.mismatch)
        save(file, path)
        finding = Finding(
            op=hunt.spec.name,
            says=file.says,
            signature=hunt.mismatch.signature,
            file=path,
            found_after_s=hunt.found_after_s,
            cases_before=hunt.cases_before,
        )
        self.events.put({"finding": finding, "final": final})


@dataclasses.dataclass(kw_only=True)
class _Hunt:
    """A round's search: once something failed, the failure that is being shrunk."""

    signature: tuple[str, ...] | None = None
    since: float = 0.0
    found_after_s: float = 0.0
    cases_before: int = 0
    spec: KernelSpec | None = None
    case: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    mismatch: Mismatch | None = None


def _file_name(mismatch: Mismatch) -> str:
    """One name for one kind of failure: what is found again replaces what was saved, and nothing else does."""
    parts = [mismatch.op, mismatch.backend, mismatch.outcome.name.lower(), mismatch.path]
    whole = "-".join(p for p in parts if p)
    name = re.sub(r"[^a-z0-9_]+", "-", whole.lower())
    if name != whole:
        # Others may be called alike, where a file system does not tell capitals apart, too.
        name += "-" + hashlib.sha256(whole.encode()).hexdigest()[:8]
    return name + SUFFIX


def _job(campaign: Campaign, index: int, generation: int, start: float, events: Any, stop: Event) -> None:
    # They are for the process that started us; here they only say that all of this is being ended.
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    prepare("cpu")
    import_all(campaign.imports)
    job = _Job(campaign, index, generation, start, events, stop, is_ended=ended.is_set)
    try:
        job.run()
    except _Over:
        pass
    except Exception:
        events.put({"error": traceback.format_exc()})
    finally:
        job.executor.close()
