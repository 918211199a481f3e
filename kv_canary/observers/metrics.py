"""Prometheus metrics of canaries: what was verified, what was found, and whether the canary runs.

The numbers of all canaries that share a registry are one set of metrics, told apart by labels. They are computed when
they are scraped, from totals: nothing is lost between two scrapes, and nothing is counted twice.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kv_canary.constants import Status, Tag
from kv_canary.errors import must_be
from kv_canary.extras import install_command
from kv_canary.observers.base import Observer, RequestVerdict, StepFacts
from kv_canary.observers.metrics_server import ADDRESS, MetricsServer
from kv_canary.observers.overflow import names_of
from kv_canary.runtime.summary import Watching

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

    from kv_canary.ranks import RankReport
    from kv_canary.reports import ViolationReport
    from kv_canary.runtime.batch import ForwardBatch, WatchedForward
    from kv_canary.runtime.cost import CanaryCost
    from kv_canary.runtime.summary import ScrubFacts

# A label's values, and the number that stands there.
_Sample = tuple[tuple[str, ...], float]


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """One metric.

    Args:
        name: as it is scraped.
        kind: "counter" or "gauge".
        doc: what it counts.
        labels: its own labels, beside those of the canary.
        read: returns its samples.
    """

    name: str
    kind: str
    doc: str
    read: Callable[[_Totals], Iterable[_Sample]]
    labels: tuple[str, ...] = ()


@dataclass(kw_only=True)
class _Totals:
    """The totals of one canary."""

    facts: StepFacts | None = None
    seen_at: float = 0.0
    steps: int = 0
    relied_on: int = 0
    verified: int = 0
    incomplete: Counter[tuple[str, str]] = field(default_factory=Counter)
    missing: Counter[str] = field(default_factory=Counter)
    # Reports of which no step has told yet: a sweep in idle time has none.
    reported: Counter[tuple[str, str]] = field(default_factory=Counter)
    reports: int = 0
    rank_differences: int = 0
    # Requests that have ended, by what became of their K and V.
    verdicts: Counter[str] = field(default_factory=Counter)

    def by_tag(self, column: int) -> Iterator[_Sample]:
        if self.facts is not None:
            for tag in Tag:
                if self.facts.counters[tag][0]:
                    yield (tag.name,), self.facts.counters[tag][column]

    def of_step(self, read: Callable[[StepFacts], float]) -> Iterator[_Sample]:
        if self.facts is not None:
            yield (), read(self.facts)

    def of_cost(self, read: Callable[[CanaryCost], float | None]) -> Iterator[_Sample]:
        """Yield what `read` says; nothing where it is not known."""
        cost = None if self.facts is None else self.facts.cost
        value = None if cost is None else read(cost)
        if value is not None:
            yield (), value

    def of_scrub(self, read: Callable[[ScrubFacts], float | None]) -> Iterator[_Sample]:
        """Yield what `read` says; nothing where nothing is sealed, or it is not known."""
        scrub = None if self.facts is None else self.facts.scrub
        value = None if scrub is None else read(scrub)
        if value is not None:
            yield (), value

    def sealed(self) -> Iterator[_Sample]:
        """Yield how many slots were held against their seals, by when."""
        if self.facts is not None and self.facts.scrub is not None:
            yield ("scrub",), self.facts.scrub.verified
        if self.facts is not None and self.facts.audits is not None:
            yield ("admission",), self.facts.audits.admitted
            yield ("completion",), self.facts.audits.verified

    def found(self) -> Iterator[_Sample]:
        found = {} if self.facts is None else self.facts.found
        for key in {**found, **self.reported}:
            yield key, found.get(key, 0) + self.reported[key]

    def missed(self) -> Iterator[_Sample]:
        for tag in dict.fromkeys([*(tag for (tag,), _ in self.by_tag(0)), *self.missing]):
            yield (tag,), self.missing[tag]


def _one(value: float) -> list[_Sample]:
    return [((), value)]


def _watching(totals: _Totals) -> Iterator[_Sample]:
    current = Watching.OFF if totals.facts is None else totals.facts.watching
    for word in Watching:
        yield (word.value,), float(word == current)


METRICS = (
    MetricSpec(
        name="kv_canary_steps_total",
        kind="counter",
        doc="Steps that were drained.",
        read=lambda t: _one(t.steps),
    ),
    MetricSpec(
        name="kv_canary_positions_relied_on_total",
        kind="counter",
        doc="Cached positions that forwards were about to read.",
        read=lambda t: _one(t.relied_on),
    ),
    MetricSpec(
        name="kv_canary_positions_verified_total",
        kind="counter",
        doc="Those of them that were verified before.",
        read=lambda t: _one(t.verified),
    ),
    MetricSpec(
        name="kv_canary_violations_total",
        kind="counter",
        doc="Violations, also those that are not written out.",
        read=lambda t: _one(t.reports + (0 if t.facts is None else t.facts.violations)),
    ),
    MetricSpec(
        name="kv_canary_incidents_total",
        kind="counter",
        doc="Causes of violations, as far as these were grouped.",
        read=lambda t: _one(0 if t.facts is None else t.facts.incidents),
    ),
    MetricSpec(
        name="kv_canary_violations_by_reason_total",
        kind="counter",
        doc="Violations whose details are known, by group and reason; one of two reasons counts under each.",
        labels=("group", "reason"),
        read=lambda t: t.found(),
    ),
    MetricSpec(
        name="kv_canary_discarded_total",
        kind="counter",
        doc="Violations in rows whose result the engine threw away; they are in no other count.",
        read=lambda t: _one(0 if t.facts is None else t.facts.discarded),
    ),
    MetricSpec(
        name="kv_canary_rank_differences_total",
        kind="counter",
        doc="Requests on which ranks differed, by step; every rank counts all of them.",
        read=lambda t: _one(t.rank_differences),
    ),
    MetricSpec(
        name="kv_canary_incomplete_plans_total",
        kind="counter",
        doc="Plans that left something out, by group and status bit: OVERFLOW, ROW_RANGE, LENGTH_RANGE, LUT_RANGE.",
        labels=("group", "bit"),
        read=lambda t: t.incomplete.items(),
    ),
    MetricSpec(
        name="kv_canary_missing_launches_total",
        kind="counter",
        doc="Launches that steps should have made and did not, by launch site.",
        labels=("tag",),
        read=lambda t: t.missed(),
    ),
    MetricSpec(
        name="kv_canary_launches_total",
        kind="counter",
        doc="Launches, by launch site.",
        labels=("tag",),
        read=lambda t: t.by_tag(0),
    ),
    MetricSpec(
        name="kv_canary_entries_total",
        kind="counter",
        doc="Slots that launches verified or recorded, by launch site.",
        labels=("tag",),
        read=lambda t: t.by_tag(1),
    ),
    MetricSpec(
        name="kv_canary_sealed_slots_verified_total",
        kind="counter",
        doc="Slots all of whose bytes were held against their seals, by when: scrub, admission, completion.",
        labels=("moment",),
        read=lambda t: t.sealed(),
    ),
    MetricSpec(
        name="kv_canary_requests_verified_total",
        kind="counter",
        doc="Requests that have ended, by what became of all bytes that they rested on: intact, partial, damaged.",
        labels=("verdict",),
        read=lambda t: (((verdict,), count) for verdict, count in t.verdicts.items()),
    ),
    MetricSpec(
        name="kv_canary_scrub_rounds_total",
        kind="counter",
        doc="Times that every pool was gone through and held against its seals; absent where nothing is sealed.",
        read=lambda t: t.of_scrub(lambda scrub: scrub.rounds),
    ),
    MetricSpec(
        name="kv_canary_scrub_oldest_seconds",
        kind="gauge",
        doc="Age of the byte that was looked at longest ago; absent before the first round is over.",
        read=lambda t: t.of_scrub(lambda scrub: scrub.oldest),
    ),
    MetricSpec(
        name="kv_canary_watching",
        kind="gauge",
        doc="1 for how the canary is watching: off, complete, partial or stale; 0 for the others. No finding counts.",
        labels=("watching",),
        read=_watching,
    ),
    MetricSpec(
        name="kv_canary_coverage",
        kind="gauge",
        doc="Share of the positions relied on that were verified, since the beginning; absent until there are any.",
        read=lambda t: _one(t.verified / t.relied_on) if t.relied_on else [],
    ),
    MetricSpec(
        name="kv_canary_stride",
        kind="gauge",
        doc="How many steps a cached position waits for its turn at most.",
        read=lambda t: t.of_step(lambda facts: facts.stride),
    ),
    MetricSpec(
        name="kv_canary_step_seconds",
        kind="gauge",
        doc="From one step to the next: the median of the last ones.",
        read=lambda t: t.of_cost(lambda cost: cost.step_us / 1e6),
    ),
    MetricSpec(
        name="kv_canary_host_seconds",
        kind="gauge",
        doc="The host's time of a step that the canary and its adapter take: the median of the last ones.",
        read=lambda t: t.of_cost(lambda cost: cost.host_us / 1e6),
    ),
    MetricSpec(
        name="kv_canary_device_seconds",
        kind="gauge",
        doc="The device's time of a step that the canary takes: the median of those timed last; absent on a CPU.",
        read=lambda t: t.of_cost(lambda cost: None if cost.device_us is None else cost.device_us / 1e6),
    ),
    MetricSpec(
        name="kv_canary_device_waits",
        kind="gauge",
        doc="1 where the device waits for the host at nearly every step, so that the host's time is what steps take.",
        read=lambda t: t.of_cost(lambda cost: float(cost.device_waits)),
    ),
    MetricSpec(
        name="kv_canary_last_step",
        kind="gauge",
        doc="Number of the last drained step.",
        read=lambda t: t.of_step(lambda facts: facts.step),
    ),
    MetricSpec(
        name="kv_canary_last_step_timestamp_seconds",
        kind="gauge",
        doc="When the last step was drained, in seconds since 1970.",
        read=lambda t: t.of_step(lambda _: t.seen_at),
    ),
)

_OWN_LABELS = {label for metric in METRICS for label in metric.labels}


class PrometheusMetrics(Observer):
    """The metrics of one canary in a registry.

    Args:
        registry: where they are collected; None: prometheus_client's own, which an engine may serve already.
        labels: more labels, such as the model or the rank. Without a `canary` among them, it gets a number.
        port: also serve the registry by HTTP on this port; 0: not. Canaries of one process may share a port, and then
            a registry and an address.
        address: IP address of this host that the port belongs to; 0.0.0.0 or :: for all of its addresses.

    A process that is forked off serves nothing of its parent's; closed there, this changes nothing in the parent.

    Raises:
        ModuleNotFoundError: prometheus-client is not installed.
        ValueError: a label cannot be used, or these labels are another canary's; or the port is taken, or cannot be
            had at the address.
    """

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        *,
        labels: Mapping[str, str] | None = None,
        port: int = 0,
        address: str = ADDRESS,
    ) -> None:
        _check_installed()
        for label in labels or {}:
            if label in _OWN_LABELS or not re.fullmatch(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", label):
                expected = f"names such as model or rank, and none of {', '.join(sorted(_OWN_LABELS))}"
                raise ValueError(must_be("PrometheusMetrics", "labels", expected, repr(label)))
        self._totals = _Totals()
        self._lock = threading.Lock()
        # Before anything is registered: this may be refused.
        self._server = MetricsServer.on(port, registry, address=address) if port else None
        self._board = _Board.of(registry if self._server is None else self._server.registry)
        try:
            self._labels = self._board.add(self, dict(labels or {}))
        except BaseException:
            self._close_server()
            raise

    @staticmethod
    def server(port: int, *, address: str = ADDRESS) -> MetricsServer:
        """Return a server that holds a port for canaries that are to come, for whoever releases it.

        Raises:
            ModuleNotFoundError, ValueError: as of the metrics themselves.
        """
        _check_installed()
        return MetricsServer.on(port, address=address)

    def on_forward(self, forward: WatchedForward, batch: ForwardBatch) -> None:
        with self._lock:
            # From 0 on: a counter that appears with its first count has no increase to see.
            self._totals.incomplete.update(
                {(g.name, bit.name or str(bit)): 0 for g in forward.groups for bit in Status}
            )

    def on_report(self, report: ViolationReport) -> None:
        with self._lock:
            self._totals.reports += 1
            self._totals.reported.update((report.group, reason) for reason in report.reasons)

    def on_request(self, verdict: RequestVerdict) -> None:
        with self._lock:
            self._totals.verdicts[verdict.verdict] += 1

    def on_ranks(self, report: RankReport) -> None:
        with self._lock:
            self._totals.rank_differences += 1

    def on_step(self, facts: StepFacts) -> None:
        with self._lock:
            totals = self._totals
            totals.facts, totals.seen_at = facts, time.time()
            totals.steps += 1
            totals.relied_on += facts.relied_on
            totals.verified += facts.verified
            totals.incomplete.update((group, bit) for group, bits in facts.statuses for bit in names_of(bits))
            totals.missing.update(facts.missing)
            # The step's own totals have these in.
            totals.reported.clear()
            totals.reports = 0

    def close(self) -> None:
        self._board.remove(self)
        self._close_server()

    def read(self, metric: MetricSpec) -> list[_Sample]:
        """Return the samples that a metric has now; from any thread."""
        with self._lock:
            return list(metric.read(self._totals))

    def _close_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.release()


class _Board:
    """The collector of a registry: the metrics of its canaries."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._canaries: dict[PrometheusMetrics, dict[str, str]] = {}

    @classmethod
    def of(cls, registry: CollectorRegistry | None) -> _Board:
        """Return the board of a registry; the same one every time."""
        import prometheus_client

        registry = prometheus_client.REGISTRY if registry is None else registry
        with _making:
            if registry not in _boards:
                board = cls()
                registry.register(board)
                _boards[registry] = board
            return _boards[registry]

    def add(self, canary: PrometheusMetrics, labels: dict[str, str]) -> dict[str, str]:
        """Show a canary's metrics from now on, and return its labels."""
        with self._lock:
            # One cache after another is one series, whose counters begin anew.
            used = {there["canary"] for there in self._canaries.values()}
            number = next(n for n in map(str, itertools.count()) if n not in used)
            labels = {"canary": number, **{name: str(value) for name, value in labels.items()}}
            if labels in self._canaries.values():
                raise ValueError(must_be("PrometheusMetrics", "labels", "different for every canary", str(labels)))
            self._canaries[canary] = labels
            return labels

    def renew_locks(self) -> None:
        """Replace the locks, the canaries' too, whoever holds them."""
        self._lock = threading.Lock()
        for canary in self._canaries:
            canary._lock = threading.Lock()

    def remove(self, canary: PrometheusMetrics) -> None:
        """Show a canary's metrics no more."""
        with self._lock:
            self._canaries.pop(canary, None)

    def describe(self) -> list[Metric]:
        """Return the metrics without samples, which the registry asks for their names."""
        return [_family(metric, ()) for metric in METRICS]

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all canaries, as they are now."""
        with self._lock:
            canaries = dict(self._canaries)
        names = tuple(dict.fromkeys(name for labels in canaries.values() for name in labels))
        for metric in METRICS:
            family = _family(metric, names)
            for canary, labels in canaries.items():
                for values, number in canary.read(metric):
                    # An empty label is as good as none.
                    family.add_metric([labels.get(name, "") for name in names] + list(values), number)
            yield family


_making = threading.Lock()
_boards: weakref.WeakKeyDictionary[CollectorRegistry, _Board] = weakref.WeakKeyDictionary()


def _in_child() -> None:
    """Wait for no lock that another thread held when this process was forked off."""
    global _making
    _making = threading.Lock()
    for board in _boards.values():
        board.renew_locks()


os.register_at_fork(after_in_child=_in_child)


def _check_installed() -> None:
    try:
        import prometheus_client  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            must_be("metrics", "prometheus-client", f"installed: {install_command('metrics')}", "none")
        ) from error


def _family(metric: MetricSpec, labels: tuple[str, ...]) -> Any:
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return kind(metric.name, metric.doc, labels=[*labels, *metric.labels])
