"""Prometheus metrics: their numbers, who shares them, how they are served, and that the docs tell the truth."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
import urllib.error
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import kv_canary as kc
from kv_canary.observers import metrics as metrics_module
from kv_canary.observers.metrics import METRICS, PrometheusMetrics
from kv_canary.runtime.summary import Watching

from .engine import Engine, full_engine
from .observed import free_port, get, live, make_engine, scrape, without_times
from .test_observers import facts, fewer_launches, flip, listened, rank_report

DOCS = Path(__file__).resolve().parents[2] / "docs"


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return what a scrape says, by name and labels; each pair of which must be there once."""
    found = [s for family in text_string_to_metric_families(text) for s in family.samples]
    result = {(s.name, frozenset(s.labels.items())): s.value for s in found}
    assert len(result) == len(found)
    return result


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"kv_canary_{name}", {"canary": "0", **labels})


def watched(**settings: Any) -> tuple[Engine, CollectorRegistry]:
    """Return an engine of one full group, and where its metrics are."""
    registry = CollectorRegistry()
    return listened([PrometheusMetrics(registry)], **settings), registry


def run_with_damage(engine: Engine, *positions: int) -> None:
    """Run two steps, the second of which finds these positions damaged."""
    a = engine.add("a", 40)
    engine.step((a, 12))
    for position in positions:
        flip(engine, "a", position)
    engine.step((a, 1))
    engine.manager.flush()


def test_before_any_step_it_is_disabled_and_counts_from_zero() -> None:
    _, registry = watched()
    assert [value(registry, "watching", watching=s) for s in Watching] == [1, 0, 0, 0]
    for name in ("steps_total", "violations_total", "discarded_total", "positions_verified_total"):
        assert value(registry, name) == 0
    for name in ("coverage", "stride", "last_step", "last_step_timestamp_seconds"):
        assert value(registry, name) is None


def test_the_numbers_are_those_of_the_summary() -> None:
    engine, registry = watched(stride=1, max_reports_per_step=2)
    run_with_damage(engine, 1, 2, 3, 4, 5)
    summary = engine.manager.summary()
    assert value(registry, "steps_total") == value(registry, "last_step") == summary.steps == 2
    assert value(registry, "positions_relied_on_total") == summary.positions_relied_on == 12
    assert value(registry, "positions_verified_total") == summary.positions_verified == 12
    # All five, though two were written out.
    assert value(registry, "violations_total") == summary.violations == 5
    assert value(registry, "violations_by_reason_total", group="full", reason="K") == 5
    assert value(registry, "launches_total", tag="TAIL_FULL") == summary.launches["TAIL_FULL"] == 4
    assert value(registry, "entries_total", tag="HEAD_FULL") == 12
    assert [value(registry, "watching", watching=s) for s in Watching] == [0, 1, 0, 0]
    assert (value(registry, "coverage"), value(registry, "stride")) == (1, 1)


def test_what_can_be_counted_is_there_before_it_happens() -> None:
    engine, registry = watched()
    a = engine.add("a", 8)
    engine.step((a, 4))
    engine.manager.flush()
    for reason in kc.Reason:
        assert value(registry, "violations_by_reason_total", group="full", reason=reason.name) == 0
    for bit in kc.Status:
        assert value(registry, "incomplete_plans_total", group="full", bit=bit.name) == 0
    for tag in ("HEAD_FULL", "TAIL_FULL"):
        assert value(registry, "missing_launches_total", tag=tag) == 0
    assert value(registry, "missing_launches_total", tag="HEAD_SWA") is None


def test_violations_past_the_ring_are_counted_without_a_reason() -> None:
    engine, registry = watched(ring_capacity=3)
    run_with_damage(engine, 1, 2, 3, 4, 5)
    assert value(registry, "violations_total") == 5
    assert value(registry, "violations_by_reason_total", group="full", reason="K") == 3


def test_what_an_idle_sweep_finds_is_there_at_once_and_counted_once() -> None:
    engine = make_engine()
    registry = CollectorRegistry()
    engine.manager.accounts.join(PrometheusMetrics(registry))
    live(engine, steps=2)
    engine.manager.flush()
    cached = engine.cached_slots()[0]
    source = engine.groups[0].config.k_source
    layer, start, _ = source.coverage(int(cached.positions[0]))
    source.layers[layer][int(cached.slots[0]), start] ^= 1
    engine.manager.scrub()
    for _ in range(2):
        assert value(registry, "violations_total") == 1
        assert value(registry, "violations_by_reason_total", group="full", reason="K") == 1
        source.layers[layer][int(cached.slots[0]), start] ^= 1
        # A healthy step tells its totals, which have that one in.
        live(engine, steps=1, prompt=4)
        engine.manager.flush()
        source.layers[layer][int(cached.slots[0]), start] ^= 1
        assert engine.manager.summary().violations == 1


def test_every_difference_between_ranks_counts() -> None:
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry)
    assert value(registry, "rank_differences_total") == 0
    for _ in range(2):
        metrics.on_ranks(rank_report())
    metrics.on_step(facts())
    assert value(registry, "rank_differences_total") == 2
    assert value(registry, "violations_total") == 0


def test_incomplete_plans_degrade(caplog: pytest.LogCaptureFixture) -> None:
    engine, registry = watched(verify_capacity=3)
    run_with_damage(engine)
    assert value(registry, "incomplete_plans_total", group="full", bit="OVERFLOW") == 1
    assert value(registry, "coverage") == 0.25
    assert [value(registry, "watching", watching=s) for s in Watching] == [0, 0, 1, 0]


def test_missing_launches_make_it_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, registry = watched()
    fewer_launches(monkeypatch, engine)
    run_with_damage(engine)
    assert value(registry, "missing_launches_total", tag="TAIL_FULL") == 2
    assert [value(registry, "watching", watching=s) for s in Watching] == [0, 0, 0, 1]


def test_canaries_of_one_registry_are_told_apart() -> None:
    registry = CollectorRegistry()
    first, second = PrometheusMetrics(registry), PrometheusMetrics(registry, labels={"model": "m", "rank": "1"})
    first.on_step(facts(step=5))
    second.on_step(facts(step=7))
    found = samples(generate_latest(registry).decode())
    assert found["kv_canary_last_step", frozenset({("canary", "0"), ("model", ""), ("rank", "")})] == 5
    assert found["kv_canary_last_step", frozenset({("canary", "1"), ("model", "m"), ("rank", "1")})] == 7
    second.close()
    second.close()
    # A new one goes on in its place: what scrapes sees its counters begin anew, and no series more for every cache.
    PrometheusMetrics(registry)
    text = generate_latest(registry).decode()
    assert {dict(labels)["canary"] for _, labels in samples(text)} == {"0", "1"}
    assert 'rank="1"' not in text


@pytest.mark.parametrize("label", ["group", "reason", "watching", "tag", "bit", "a b", "1a", "__name", ""])
def test_labels_that_cannot_be_used_are_refused(label: str) -> None:
    with pytest.raises(ValueError, match="kv-canary: PrometheusMetrics: labels must be names such as model or rank"):
        PrometheusMetrics(CollectorRegistry(), labels={label: "x"})


def test_two_canaries_cannot_have_the_same_name() -> None:
    registry = CollectorRegistry()
    PrometheusMetrics(registry, labels={"canary": "draft"})
    with pytest.raises(ValueError, match=r"labels must be different for every canary, got \{'canary': 'draft'\}"):
        PrometheusMetrics(registry, labels={"canary": "draft"})
    port = free_port()
    with pytest.raises(ValueError, match="labels must be different for every canary"):
        PrometheusMetrics(registry, labels={"canary": "draft"}, port=port)
    # The refused one left no server behind.
    with pytest.raises(urllib.error.URLError):
        get(port)


def test_the_default_registry_is_that_of_the_process() -> None:
    metrics = PrometheusMetrics(labels={"canary": "of this test"})
    try:
        assert REGISTRY.get_sample_value("kv_canary_steps_total", {"canary": "of this test"}) == 0
    finally:
        metrics.close()
    assert REGISTRY.get_sample_value("kv_canary_steps_total", {"canary": "of this test"}) is None


@pytest.fixture
def port() -> int:
    return free_port()


def test_a_port_is_served_until_its_last_canary_is_closed(port: int) -> None:
    first, second = (full_engine(metrics_port=port) for _ in range(2))
    run_with_damage(second)
    assert {dict(labels)["canary"] for _, labels in samples(get(port))} == {"0", "1"}
    first.manager.close()
    first.manager.close()
    assert {dict(labels)["canary"] for _, labels in samples(get(port))} == {"1"}
    second.manager.close()
    with pytest.raises(urllib.error.URLError):
        get(port)
    # The port is free again, for a new engine in the same process.
    third = full_engine(metrics_port=port)
    assert samples(get(port))["kv_canary_steps_total", frozenset({("canary", "0")})] == 0
    third.manager.close()


def test_a_port_serves_the_canaries_metrics_and_nothing_of_the_engines(port: int) -> None:
    engine = full_engine(metrics_port=port)
    try:
        assert {name.startswith("kv_canary_") for name, _ in samples(get(port))} == {True}
    finally:
        engine.manager.close()


def test_a_port_that_another_process_has_is_refused_by_name(port: int) -> None:
    with socket.socket() as other:
        other.bind(("", port))
        other.listen()
        with pytest.raises(ValueError, match="kv-canary: CanaryConfig: metrics_port must be a port that is free") as it:
            full_engine(metrics_port=port)
    assert f"got {port} at 127.0.0.1: Address already in use" in str(it.value)
    assert "KV_CANARY_METRICS_PORT" in str(it.value)


def test_a_port_has_one_registry(port: int) -> None:
    registry = CollectorRegistry()
    first = PrometheusMetrics(registry, port=port)
    second = PrometheusMetrics(registry, port=port)
    with pytest.raises(ValueError, match=f"registry must be the one that port {port} serves already, got another"):
        PrometheusMetrics(CollectorRegistry(), port=port)
    assert 'canary="1"' in get(port)
    first.close()
    second.close()
    with pytest.raises(urllib.error.URLError):
        get(port)


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"prometheus-client must be installed: pip install 'prometheus-client>="
    ):
        full_engine(metrics_port=9400)
    full_engine().manager.close()


def test_importing_the_package_imports_no_prometheus() -> None:
    code = "import sys, kv_canary, kv_canary.observers.metrics; print('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


def test_the_example_is_what_a_run_gives() -> None:
    example = (DOCS / "example-scrape.txt").read_text()
    assert without_times(example) == without_times(scrape())
    assert {family.name for family in text_string_to_metric_families(example)} == {
        metric.name.removesuffix("_total") for metric in METRICS
    }


def test_the_page_has_every_metric_with_its_labels() -> None:
    page = (DOCS / "metrics.md").read_text()
    rows = dict(re.findall(r"(?m)^\| `(kv_canary_\w+)` \| ([^|]*) \|", page))
    assert set(rows) == {metric.name for metric in METRICS}
    for metric in METRICS:
        labels = "".join(f", `{label}`" for label in metric.labels)
        assert rows[metric.name] == metric.kind + labels


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"kv_canary_\w+", expression))


def expressions() -> list[str]:
    """Return every expression of the dashboard and of the alerts in the page."""
    found: list[str] = []

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            found.extend(node[key] for key in ("expr", "definition") if isinstance(node.get(key), str))
            node = list(node.values())
        if isinstance(node, list):
            for part in node:
                walk(part)

    walk(json.loads((DOCS / "dashboard.json").read_text()))
    assert len(found) >= 7
    alerts = re.findall(r"(?m)^ *expr: (.*)$", (DOCS / "metrics.md").read_text())
    assert len(alerts) >= 4
    return found + alerts


def test_dashboard_and_alerts_name_metrics_and_labels_that_exist() -> None:
    example = samples((DOCS / "example-scrape.txt").read_text())
    labels: dict[str, set[str]] = {}
    for name, pairs in example:
        labels.setdefault(name, {"job", "instance"}).update(dict(pairs))
    # What a GPU alone has is not in the example.
    labels |= {m.name: {"job", "instance", "canary", *m.labels} for m in METRICS if m.name not in labels}
    for expression in expressions():
        # An engine's own metric stands in one alert, as an example.
        assert names_in(expression), expression
        assert names_in(expression) <= set(labels), expression
        for name, matchers in re.findall(r"(kv_canary_\w+)\{([^}]*)\}", expression):
            assert set(re.findall(r"(\w+) *(?:=~|!~|!=|=)", matchers)) <= labels[name], expression
        used = set().union(*(labels[name] for name in names_in(expression)))
        for by in re.findall(r"\bby *\(([^)]*)\)", expression):
            assert set(re.findall(r"\w+", by)) <= used, expression


def test_the_dashboard_shows_what_matters() -> None:
    dashboard = json.loads((DOCS / "dashboard.json").read_text())
    shown = set().union(*(names_in(t["expr"]) for p in dashboard["panels"] for t in p["targets"]))
    # All that there is, but for the parts of what is shown, and the number of the last step.
    left_out = {"launches_total", "last_step", "scrub_rounds_total", "device_waits"}
    assert {metric.name for metric in METRICS} - shown == {f"kv_canary_{name}" for name in left_out}
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_a_forked_child_counts_on_though_another_thread_held_a_lock_of_its_metrics() -> None:
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry)
    with metrics._lock, metrics._board._lock:
        # As in a child: whoever held the locks is not there any more.
        metrics_module._in_child()
        counting = threading.Thread(target=metrics.on_step, args=(facts(),), daemon=True)
        counting.start()
        counting.join(10)
        assert not counting.is_alive()
        assert value(registry, "steps_total") == 1
