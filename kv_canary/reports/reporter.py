"""The reporter of drained violations: incidents, their lines in the log, what lies around them, and bundles."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from kv_canary.backends import interpreting, select_backend
from kv_canary.config import CanaryConfig
from kv_canary.constants import Tag
from kv_canary.errors import short_name
from kv_canary.output import logger, post
from kv_canary.ratelimit import PER_MINUTE, RateLimit
from kv_canary.reports.bundle import MOST_BUNDLES, MOST_ROWS, Bundle, BundleFolder, utc_now
from kv_canary.reports.decode import Decoder
from kv_canary.reports.incidents import Incident, IncidentTracker, goes_on
from kv_canary.reports.neighbourhood import Neighbourhood, SlotReader
from kv_canary.reports.report import ViolationReport
from kv_canary.reports.versions import versions
from kv_canary.runtime.history import StepHistory
from kv_canary.runtime.pools import BufferGroup
from kv_canary.specs.violation_row import ViolationRow

# Positions on each side of a fault that its neighbourhood shows, and that a bundle's timeline shows.
SIDE = 8
TIMELINE_SIDE = 256
# Incidents of one drain around which it looks where it saves none: each look waits for the device. And of a minute.
MOST_LOOKS = 4
LOOKS_PER_MINUTE = 32
# Violation rows that are grouped at once, after a while without any; in a second; and in every drain in any case. The
# rest of a storm is counted, and no more: grouping a row takes some ten microseconds of the engine's time.
GROUPED_AT_ONCE = 1024
GROUPED_PER_SECOND = 128
GROUPED_ALWAYS = 16
# New incidents of a drain that observers are told of.
MOST_OPENED = 64
# Seconds between two lines about the same incident.
INTERVAL = 10.0

_NOT_SAVED = "kv-canary: incident %d could not be saved; the canary goes on"


class IncidentReporter:
    """Groups what was drained, logs it, looks around it and saves it.

    Args:
        decoder: gives reports and names.
        config: how many lines and reports a drain may make, where bundles go, and who verifies.
        steps: those that are remembered.
        summary: returns what the canary has done, JSON-ready, for bundles.
        numbers: of new incidents; None: from 1 on.
        clock: seconds that only grow; for tests.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        config: CanaryConfig,
        steps: StepHistory,
        summary: Callable[[], dict[str, Any]],
        numbers: Iterator[int] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._decoder, self._config, self._steps, self._summary = decoder, config, steps, summary
        self._book = IncidentTracker(decoder, arrived=steps.arrived, numbers=numbers)
        self._clock = clock or time.monotonic
        self._limit = RateLimit(INTERVAL, per_minute=PER_MINUTE, clock=self._clock)
        self._looks = RateLimit(0, per_minute=LOOKS_PER_MINUTE, clock=self._clock)
        # How many rows may be grouped, as of a time.
        self._room, self._as_of = float(GROUPED_AT_ONCE), self._clock()
        self._bundles = None if config.bundles is None else BundleFolder(config.bundles)
        # Those that the last drain has opened, as far as they are remembered.
        self.opened: list[Incident] = []

    @property
    def incidents(self) -> list[Incident]:
        """The incidents that are remembered, oldest first."""
        return self._book.incidents()

    @property
    def count(self) -> int:
        """How many incidents there were so far."""
        return self._book.count

    @property
    def befallen(self) -> tuple[str, ...]:
        """Names of requests that read or wrote where something was found, some of them."""
        return tuple(self._book.befallen)

    def take(
        self, rows: Sequence[ViolationRow], *, reports: Sequence[ViolationReport], total: int
    ) -> tuple[Incident, ...]:
        """Take in what was drained; return the incidents it belongs to. Whatever goes wrong here is logged, not raised.

        Args:
            rows: violation rows, as many as the ring had room for.
            reports: those of them that are written out.
            total: violations.
        """
        self.opened = []
        try:
            return self._take(rows, reports, total)
        except Exception as error:
            if self._limit.admit("grouping") is not None:
                logger.failure(
                    "kv-canary: grouping the reports failed; here they are one by one",
                    error=error,
                    redacts=self._config.redact,
                )
            for report in reports:
                self._log(report.sentence, partial(str, report.sentence))
            return ()

    def _take(
        self, rows: Sequence[ViolationRow], reports: Sequence[ViolationReport], total: int
    ) -> tuple[Incident, ...]:
        news = self._book.take(most_telling(rows, self._affordable(len(rows))))
        known = [number for number in news if self._book.knows(number)]
        new = [number for number in known if news[number] == "new"]
        told = 0
        for number in new[: self._config.max_reports_per_step]:
            held = self._limit.admit(number)
            if held is not None:
                told += 1
                before = f" ({held} lines of before were held back)" if held else ""
                logger.error("kv-canary: %s%s", self._book.incident(number).sentence, before)
        more = sum(what == "new" for what in news.values()) - told
        if more:
            self._log("incidents", lambda: f"{more} more incidents are not written out")
        for number in known:
            if news[number] != "new":
                self._log(number, partial(self._goes_on, number))
        if total > len(reports):
            self._log(
                "violations", lambda: f"{total - len(reports)} of {total} violations are not written out one by one"
            )
        for i, number in enumerate(new):
            saving = self._bundles is not None and not self._bundles.is_full
            if (saving or i < MOST_LOOKS) and self._looks.admit("look") is not None:
                self._look(self._book.incident(number), rows, saving=saving)
        self.opened = [self._book.incident(number) for number in new[:MOST_OPENED]]
        # Whoever raises wants all of them; nobody else looks at them now.
        if self._config.mode != "raise":
            return ()
        return tuple(self._book.incident(number) for number in known)

    def _goes_on(self, number: int) -> str:
        return goes_on(self._book.incident(number))

    def _affordable(self, count: int) -> int:
        """Return how many of `count` rows are to be grouped now."""
        now = self._clock()
        self._room = min(float(GROUPED_AT_ONCE), self._room + max(0.0, now - self._as_of) * GROUPED_PER_SECOND)
        self._as_of = now
        grouped = min(count, max(GROUPED_ALWAYS, int(self._room)))
        self._room = max(0.0, self._room - grouped)
        return grouped

    def _log(self, key: int | str, text: Callable[[], str]) -> None:
        """Log the line that `text` returns, unless one of this key was logged just now, or too many were."""
        held = self._limit.admit(key)
        if held is not None:
            more = f" ({held} more like it were held back)" if held else ""
            logger.error("kv-canary: %s%s", text(), more)

    def _look(self, incident: Incident, rows: Sequence[ViolationRow], *, saving: bool) -> None:
        """Look around an incident and save it; what goes wrong is logged and goes no further."""
        number = incident.number
        timeline = None
        try:
            timeline = self._surroundings(incident, TIMELINE_SIDE if saving else SIDE)
            if timeline is not None and self._decoder.redactor is not None:
                timeline = self._decoder.redactor.neighbourhood(timeline)
            self._book.attach(number, _near(timeline, incident))
        except Exception as error:
            logger.failure(
                "kv-canary: looking around incident %d failed; the canary goes on",
                number,
                error=error,
                redacts=self._config.redact,
            )
        if not saving or self._bundles is None:
            return
        bundles = self._bundles
        try:
            bundle = self._bundle(self._book.incident(number), rows, timeline)
        except Exception as error:
            logger.failure(_NOT_SAVED, number, error=error, redacts=self._config.redact)
            return
        bundles.reserve()
        post(lambda: _save(bundles, bundle, redacts=self._config.redact))

    def _bundle(self, incident: Incident, rows: Sequence[ViolationRow], timeline: Neighbourhood | None) -> Bundle:
        redactor = self._decoder.redactor
        positions, steps = (*incident.positions, *incident.followers), (incident.first_step, incident.last_step)
        mine = [
            row
            for row in rows
            if Tag(row.tag).name in incident.tags and _within(row.step, [steps]) and _within(row.position, positions)
        ][:MOST_ROWS]
        return Bundle(
            written=utc_now(),
            incident=incident,
            reports=tuple(self._decoder.decode(row) for row in mine),
            rows=tuple(tuple(row if redactor is None else redactor.row(row)) for row in mine),
            timeline=timeline,
            config={name: _plain(value) for name, value in self._config.shown().items()},
            versions=versions(),
            summary=self._summary(),
        )

    def warm_up(self, groups: Sequence[BufferGroup]) -> None:
        """Look around nothing in each group, so that all kernels are compiled."""
        for group in groups:
            self._looker(group).warm_up(group)

    def _looker(self, group: BufferGroup) -> SlotReader:
        device = group.pool.records.device
        # A tier of an engine on a GPU is on the CPU.
        can_choose = device.type == "cuda" or interpreting()
        return SlotReader(
            backend=select_backend(self._config.backend, device) if can_choose else "reference",
            track_lifetime=self._config.track_lifetime,
            name_of_owner=self._decoder.name_of_owner,
            handed_out=self._decoder.facts.handed_out,
        )

    def _surroundings(self, incident: Incident, side: int) -> Neighbourhood | None:
        """Return what lies around an incident now, or None where no table tells."""
        first, newest = incident.first, 0 if self._steps.newest is None else self._steps.newest.number
        tag = Tag[first.tag]
        group = self._decoder.group_named(first.group)
        start, end = incident.positions[0]
        looker = self._looker(group)
        if not first.row:
            rows = looker.slots(group, tag, within=range(first.slot - side, first.slot + side + 1))
            return Neighbourhood(as_of_step=newest, request=None, group=group.name, moved=False, rows=rows)
        found = self._steps.latest(first.step, first.row)
        if found is None or group.name not in found[0].tables:
            return None
        step, request = found
        extended = 0 if step.broken else request.extend_len
        within = range(start - side, min(end, start + 2 * SIDE) + side + 1)
        rows = looker.positions(
            group, tag, step.tables[group.name], request, within=within, written=request.prefix_len + extended
        )
        here = next((r.slot for r in rows if r.position == first.position), first.slot)
        return Neighbourhood(
            as_of_step=newest,
            request=short_name(request.request_id),
            group=group.name,
            moved=here != first.slot,
            rows=rows,
        )


def _near(timeline: Neighbourhood | None, incident: Incident) -> Neighbourhood | None:
    """Return the part of a timeline that is near an incident."""
    if timeline is None:
        return None
    start, end = incident.positions[0]
    wanted = range(start - SIDE, min(end, start + 2 * SIDE) + SIDE + 1)
    if timeline.request is None:
        wanted = range(incident.first.slot - SIDE, incident.first.slot + SIDE + 1)
        return dataclasses.replace(timeline, rows=tuple(r for r in timeline.rows if r.slot in wanted))
    return dataclasses.replace(timeline, rows=tuple(r for r in timeline.rows if r.position in wanted))


def _within(number: int, parts: Sequence[tuple[int, int]]) -> bool:
    return any(first <= number <= last for first, last in parts)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def most_telling(rows: Sequence[ViolationRow], count: int) -> Sequence[ViolationRow]:
    """Return up to `count` violation rows: first one of every kind (tag, reasons, row), then the rest, in order."""
    if len(rows) <= count:
        return rows
    first: dict[tuple[int, int, int], int] = {}
    for index, row in enumerate(rows):
        first.setdefault((row.tag, row.reasons, row.row), index)
    leading = sorted(first.values())[:count]
    chosen = set(leading)
    rest = (i for i in range(len(rows)) if i not in chosen)
    return [rows[i] for i in sorted([*leading, *itertools.islice(rest, count - len(leading))])]


def _save(bundles: BundleFolder, bundle: Bundle, *, redacts: bool) -> None:
    """Save a bundle and say where; what goes wrong is said and goes no further."""
    number = bundle.incident.number
    try:
        path = bundles.save(bundle)
    except Exception as error:
        bundles.give_back()
        logger.failure(_NOT_SAVED, number, error=error, redacts=redacts)
        return
    logger.warning("kv-canary: incident %d is saved: kv-canary report %s", number, path)
    if bundles.is_full:
        logger.warning("kv-canary: %d bundles are saved, no more will be", MOST_BUNDLES)
