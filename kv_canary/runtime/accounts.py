"""The accounts of a canary: violations counted and reported, observers told, and its own health judged."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from kv_canary.config import CanaryConfig
from kv_canary.constants import MASK64, OWNER_BITS, STEP_MASK, Reason, Status, Tag
from kv_canary.errors import short_name
from kv_canary.observers import HealthCheck, Observer, RequestVerdict, StepFacts
from kv_canary.output import OUTPUT, logger
from kv_canary.ranks import RankReport
from kv_canary.redact import Redactor
from kv_canary.reports import CanaryViolationError, Decoder, Incident, ViolationReport
from kv_canary.reports.causes import Facts
from kv_canary.reports.decode import SEALS, reason_names
from kv_canary.reports.lost import LostRecords
from kv_canary.reports.neighbourhood import own_tokens
from kv_canary.reports.reporter import IncidentReporter, most_telling
from kv_canary.runtime.arrivals import Arrivals
from kv_canary.runtime.audits import Audits
from kv_canary.runtime.batch import ForwardBatch, WatchedForward
from kv_canary.runtime.cost import Costs
from kv_canary.runtime.drain import Findings, StepWords
from kv_canary.runtime.frees import Frees
from kv_canary.runtime.guard import Guard
from kv_canary.runtime.history import StepHistory, StepRecord
from kv_canary.runtime.pools import BufferGroup
from kv_canary.runtime.rows import OwnerNames
from kv_canary.runtime.seals import Scrub
from kv_canary.runtime.summary import RECENT_STEPS, CanarySummary, Watching, WriteFacts
from kv_canary.specs.violation_row import ViolationRow

T = TypeVar("T")

# Requests that a report names, of those that have had a damaged slot in their rows.
_MOST_READERS = 8
# The entries that HEAD has verified, among the counters.
_HEAD_FULL, _HEAD_SWA = 2 * Tag.HEAD_FULL + 1, 2 * Tag.HEAD_SWA + 1


class Accounts:
    """Takes in what is drained: counts it, decodes it, and tells the log, the caller and the observers.

    Args:
        groups: the buffer groups.
        config: how to react.
        guard: takes in what callbacks and observers raise; none of it goes further.
        costs: says what steps cost.
        scrub, audits: say what of the pools has been held against its seals.
        arrivals: say what has come from elsewhere.
        frees: say who has freed slots, and when.
        rows: where owners come from, for their names; None if the engine has its own.
        on_report: called with every report that is written out.
        observers: told of every step and report.
        numbers: of new incidents; None: from 1 on.
    """

    def __init__(
        self,
        groups: Sequence[BufferGroup],
        *,
        config: CanaryConfig,
        guard: Guard,
        costs: Costs,
        scrub: Scrub,
        audits: Audits,
        arrivals: Arrivals,
        frees: Frees,
        rows: OwnerNames | None,
        on_report: Callable[[ViolationReport], None] | None,
        observers: Sequence[Observer],
        numbers: Iterator[int] | None = None,
    ) -> None:
        self.reports: deque[ViolationReport] = deque(maxlen=1024)
        self.rank_reports: deque[RankReport] = deque(maxlen=1024)
        self.observers: tuple[Observer, ...] = ()
        # Whether any of them wants to know of each quiet step; and whether any looks at forwards.
        self.wants_quiet_steps = self.shows_forwards = False
        # They want to know how far steps have been drained, and of most no more than the number.
        self._checks: list[HealthCheck] = []
        self.join(*observers)
        self._config, self._guard, self._costs = config, guard, costs
        self._scrub, self._audits, self._arrivals = scrub, audits, arrivals
        self._rows, self._on_report = rows, on_report
        self._steps = StepHistory()
        self.redactor = Redactor.of(config)
        self._decoder = Decoder(
            groups,
            name_of_row=self._name_of_row,
            name_of_owner=self._name_of_owner,
            redactor=self.redactor,
            intact_at=self._intact_at,
            readers_since=self._readers_since,
            facts=Facts(
                wrote=self._steps.wrote,
                came=self._came,
                freed=lambda step, owner: frees.any_by(owner, step),
                handed_out=lambda step, owner: frees.handed_out(owner, step),
                whole=self._was_whole,
                token=self._own_token,
                lost=lambda row: self._held("looking for a record that is lost", self._lost.find, row),
                own=self._own_step,
                named=lambda row: self._held("asking which slot a table names", self._lost.named, row),
            ),
        )
        self._lost = LostRecords(self._steps, group_of=self._decoder.group_of, came=self._came)
        self._desk = IncidentReporter(
            self._decoder, config=config, steps=self._steps, summary=self._summary_now, numbers=numbers
        )
        # Counters as of the last drained step; None where the launches since then are not known.
        self._before: Sequence[int] | None = [0] * (2 * len(Tag))
        self._counters: Sequence[int] = [0] * (2 * len(Tag))
        self._relied_on = self._verified = self._violations = self._discarded = 0
        self._reasons: Counter[str] = Counter()
        # From 0 on, so that who watches sees the first of each.
        self._found = Counter({(g.name, r.name or str(r)): 0 for g in groups for r in Reason})
        self._statuses: Counter[Status] = Counter()
        self._missing: dict[str, int] = {}
        self._apart = self._closed = False
        # The last step in which something was incomplete or failed.
        self._last_trouble: int | None = None
        # Counted by who lands them.
        self.uncovered = 0

    def warm_up(self, groups: Sequence[BufferGroup]) -> None:
        """Compile the kernels that look around what is found."""
        self._desk.warm_up(groups)

    def join(self, *observers: Observer) -> None:
        """Tell these observers too, from now on."""
        self.observers += observers
        self.wants_quiet_steps |= any(o.wants_quiet_steps for o in observers)
        self.shows_forwards |= any(type(o).on_forward is not Observer.on_forward for o in observers)
        self._checks += [o for o in observers if isinstance(o, HealthCheck)]

    @property
    def incidents(self) -> list[Incident]:
        """The incidents that are remembered, oldest first."""
        return self._desk.incidents

    def begin_step(self, number: int, *, stride: int) -> StepRecord:
        """Return the record of a new step."""
        step = StepRecord(number=number, stride=stride)
        self._steps.append(step)
        return step

    def see_forward(self, forward: WatchedForward, batch: ForwardBatch) -> None:
        """Show a forward that is over to the observers."""
        for observer in self.observers:
            self._call(observer.on_forward, forward, batch)

    def launches_unknown(self) -> None:
        """Take in that launches were made that no step accounts for."""
        self._before = None

    def close(self, summary: CanarySummary | None = None) -> None:
        """Let every observer give back what it holds; the second call does nothing.

        Args:
            summary: the last one, which observers are told before; None: the canary has not begun.
        """
        if self._closed:
            return
        self._closed = True
        for observer in self.observers:
            if summary is not None:
                self._call(observer.on_end, summary)
            self._call(observer.close)

    def degrade(self) -> None:
        """Take in that the ranks are not compared from here on; who calls has said so in the log."""
        self._apart = True

    def restore(self) -> None:
        """Take in that the ranks are compared again."""
        self._apart = False

    def take_ranks(self, report: RankReport) -> None:
        """Log a difference between ranks, and hand it on."""
        self.rank_reports.append(report)
        logger.error("kv-canary: %s", report.sentence)
        for observer in self.observers:
            self._call(observer.on_ranks, report)

    def take_verdicts(self, verdicts: Sequence[RequestVerdict]) -> None:
        """Hand on what became of requests that have ended."""
        for verdict in verdicts:
            name: str | None = short_name(verdict.request_id)
            if self.redactor is not None:
                name = self.redactor.name(name)
            shown = verdict if name == verdict.request_id else replace(verdict, request_id=name or "")
            for observer in self.observers:
                self._call(observer.on_request, shown)

    def take(self, findings: Findings) -> None:
        """Count, log and hand on what was drained; all counters are up to date before anything can raise.

        Observers are told of the reports first, then of the steps, whose facts count those reports in.

        Raises:
            CanaryViolationError: in raise mode, if there is anything to report.
        """
        if not findings.total and not findings.rows:
            # As nearly always.
            for words in findings.steps:
                step = self._take_step(words)
                if step is not None:
                    self._tell_step(step)
            return
        if findings.total > len(findings.rows):
            self._scrub.forget_looks()
        for row in findings.rows:
            if row.reasons & SEALS:
                # Of each when it is found, told or not.
                self._held("asking since when a slot is damaged", self._intact_at, row)
        seen = dict.fromkeys((row.step, row.row) for row in findings.rows)
        what = "asking whether a result was thrown away"
        verdicts = {key: self._held(what, self._was_discarded, *key) for key in seen}
        rows = [row for row in findings.rows if not verdicts[row.step, row.row]]
        discarded = len(findings.rows) - len(rows)
        if discarded and not rows:
            # Those that the ring had no room for are most likely of the same rows: nobody can say, so no alarm.
            discarded = findings.total
        self._discarded += discarded
        total = findings.total - discarded
        self._violations += total
        self._held("counting what was found by reason", self._count_reasons, rows)
        facts = [self._held("counting a step", self._take_step, step) for step in findings.steps]
        reports: list[ViolationReport] = []
        incidents: tuple[Incident, ...] = ()
        if total:
            # What was found is counted by now, and raised below whatever fails in between.
            try:
                telling = most_telling(rows, self._config.max_reports_per_step)
                reports = [self._decoder.decode(row) for row in telling]
            except Exception as error:
                self._guard.failed("describing what was found", error, own=False)
            self.reports.extend(reports)
            incidents = self._desk.take(rows, reports=reports, total=total)
            for incident in self._desk.opened:
                for observer in self.observers:
                    self._call(observer.on_incident, incident)
            for report in reports:
                self._tell(report)
        for step in facts:
            if step is not None:
                self._tell_step(step)
        if total and self._config.mode == "raise":
            raise CanaryViolationError(reports, total, incidents)

    def _count_reasons(self, rows: Sequence[ViolationRow]) -> None:
        for (group, reasons), count in Counter((self._decoder.group_of(row).name, row.reasons) for row in rows).items():
            for name in reason_names(reasons):
                self._reasons[name] += count
                self._found[group, name] += count

    def _held(self, what: str, part: Callable[..., T], *args: object) -> T | None:
        """Return what a part gives; None where it fails, which loses none of what was found."""
        try:
            return part(*args)
        except Exception as error:
            self._guard.failed(what, error)
            return None

    def summary(
        self,
        *,
        steps: int,
        counters: Sequence[int],
        stride: int,
        skipped: int = 0,
        unverified: int = 0,
        writes: WriteFacts | None = None,
        memory: dict[str, int] | None = None,
    ) -> CanarySummary:
        """Return all of it in numbers.

        Args:
            steps: how many were begun.
            counters: launches, then entries, of each tag.
            stride: how many steps a cached position waits for its turn at most.
            skipped, unverified, writes, memory: see `CanarySummary`.
        """
        incomplete: Counter[str] = Counter()
        for status, count in self._statuses.items():
            incomplete.update({bit.name or str(bit): count for bit in Status if bit in status})
        return CanarySummary(
            watching=self._watching() if steps or skipped else Watching.OFF,
            steps=steps,
            positions_relied_on=self._relied_on,
            positions_verified=self._verified,
            bytes_held="" if not steps else "by sample" if self._scrub.facts is None else "sealed",
            violations=self._violations,
            incidents=self._desk.count,
            requests=self._desk.befallen,
            discarded=self._discarded,
            uncovered=self.uncovered,
            reasons=dict(self._reasons),
            launches={tag.name: counters[2 * tag] for tag in Tag if counters[2 * tag]},
            stride=stride,
            incomplete=dict(incomplete),
            skipped=skipped,
            unverified=unverified,
            failures=dict(self._guard.failures),
            dropped=OUTPUT.dropped,
            cost=self._costs.cost,
            scrub=self._scrub.facts,
            audits=self._audits.facts,
            writes=writes,
            memory=memory or {},
        )

    def _summary_now(self) -> dict[str, Any]:
        """Return the summary as of what is being taken in."""
        newest = self._steps.newest or StepRecord(number=0)
        return self.summary(steps=newest.number, counters=self._counters, stride=newest.stride).as_dict()

    def _watching(self) -> Watching:
        newest = 0 if self._steps.newest is None else self._steps.newest.number
        if self._guard.take_touched():
            self._last_trouble = newest
        recent = self._last_trouble is not None and newest - self._last_trouble < RECENT_STEPS
        if self._missing:
            return Watching.STALE
        return Watching.PARTIAL if recent or self._apart else Watching.COMPLETE

    def _take_step(self, words: StepWords) -> StepFacts | None:
        """Count a step, or several; return what observers are told of it, or None where nobody wants to know."""
        counters = self._counters = words.counters
        for _, bits in words.statuses:
            self._statuses[Status(bits)] += 1
            self._last_trouble = words.step
        record = self._steps.find(words.step)
        relied_on = 0 if record is None else record.relied_on
        if words.first < words.step:
            relied_on = self._steps.relied_on(words.first, words.step)
        before, self._before = self._before, None if words.launches is None else counters
        missing: dict[str, int] = {}
        if words.first < words.step:
            # They are told as one only where none is.
            self._missing = missing
        elif before is not None and words.launches is not None:
            missing = self._missing = _missing(counters, before, words.launches)
        total = counters[_HEAD_FULL] + counters[_HEAD_SWA]
        verified, self._verified = total - self._verified, total
        self._relied_on += relied_on
        is_quiet = not (words.statuses or missing)
        if is_quiet and not self.wants_quiet_steps:
            for check in self._checks:
                check.drained(words.step)
            return None
        return StepFacts(
            step=words.step,
            watching=self._watching(),
            requests=0 if record is None else record.num_requests,
            relied_on=relied_on,
            verified=verified,
            counters=tuple(zip(counters[::2], counters[1::2], strict=True)),
            statuses=tuple(words.statuses),
            missing=dict(missing),
            violations=self._violations,
            incidents=self._desk.count,
            found=dict(self._found),
            discarded=self._discarded,
            stride=1 if record is None else record.stride,
            cost=self._costs.cost,
            scrub=self._scrub.facts,
            audits=self._audits.facts,
        )

    def _tell_step(self, step: StepFacts) -> None:
        for observer in self.observers:
            self._call(observer.on_step, step)

    def _tell(self, report: ViolationReport) -> None:
        if self._on_report is not None:
            self._call(self._on_report, report)
        for observer in self.observers:
            self._call(observer.on_report, report)

    def _call(self, callback: Callable[..., None], *news: object) -> None:
        """Call what is not the canary's own; what it raises is taken in and goes no further, in any mode."""
        try:
            callback(*news)
        except Exception as error:
            name = getattr(callback, "__qualname__", type(callback).__name__)
            self._guard.failed(name, error, own=False)

    def _was_discarded(self, step: int, row: int) -> bool:
        """Whether the engine threw away the result of the request in `row` of a step; if it cannot say, no."""
        request = self._steps.request(step, row)
        if request is None or request.discarded is None:
            return False
        try:
            return bool(request.discarded())
        except Exception as error:
            self._guard.failed("discarded", error, own=False)
            return False

    def _intact_at(self, row: ViolationRow) -> int:
        """Return the last step of which it is known that the bytes of a slot were those that were sealed."""
        pool = self._decoder.group_of(row).pool
        written = ((row.writer & MASK64) >> OWNER_BITS) & STEP_MASK
        return self._scrub.intact_at(pool, row.slot, writer=row.writer, written=written, found=row.step)

    def _came(self, row: ViolationRow) -> int | None:
        """Return the step behind which what lies in a slot came from elsewhere; None where that is not known."""
        return self._arrivals.step_of(self._decoder.group_of(row).pool, row)

    def _was_whole(self, number: int) -> bool | None:
        """Whether a step has verified all that its requests had in the cache; None: that is forgotten."""
        step = self._steps.find(number)
        return None if step is None else step.stride == 1 and not step.broken

    def _own_token(self, row: ViolationRow) -> int | None:
        """Return the own token of a violation's position, as its request has it now; None where it cannot say."""
        request = self._steps.request(row.step, row.row) if row.row else None
        if request is None:
            return None
        at = row.position + self._decoder.group_of(row).token_offset
        (token,) = own_tokens(request, at, at + 1)
        return int(token) if token >= 0 else None

    def _own_step(self, row: ViolationRow) -> int | None:
        """Return the last step behind which a violation's position was its request's own; None: none is known."""
        window = self._decoder.group_of(row).window
        return self._steps.own(row.step, row.row, row.position, window=window) if row.row else None

    def _readers_since(self, row: ViolationRow, step: int) -> list[str]:
        """Return the requests that have had a slot in their rows behind a step, as far as that is remembered."""
        group = self._decoder.group_of(row)
        return [short_name(name) for name in self._steps.readers(group, row.slot, after=step, most=_MOST_READERS)]

    def _name_of_row(self, step: int, row: int) -> str | None:
        request = self._steps.request(step, row)
        return None if request is None else short_name(request.request_id)

    def _name_of_owner(self, owner: int) -> str | None:
        if self._rows is not None:
            name = self._rows.name(owner)
            return None if name is None else short_name(name)
        # An engine with rows of its own: the requests of the steps that are remembered.
        request = self._steps.owned(owner)
        return None if request is None else short_name(request.request_id)


def _missing(counters: Sequence[int], before: Sequence[int], wanted: Mapping[int, int]) -> dict[str, int]:
    """Return how many of the launches that a step was to make are missing, by the name of the tag."""
    missing = {}
    for tag, count in wanted.items():
        made = counters[2 * tag] - before[2 * tag]
        if made < count:
            missing[Tag(tag).name] = count - made
    return missing
