"""Observers: they are told of every drained step and of every report, and tell others."""

from __future__ import annotations

from kv_canary.config import CanaryConfig
from kv_canary.observers.base import Observer, RequestVerdict, StepFacts
from kv_canary.observers.health import HealthCheck
from kv_canary.observers.overflow import OverflowWarner

__all__ = ["HealthCheck", "Observer", "OverflowWarner", "RequestVerdict", "StepFacts", "observers_of"]


def observers_of(config: CanaryConfig) -> list[Observer]:
    """Return the observers that the configuration asks for; the first two always.

    Raises:
        ModuleNotFoundError: `metrics_port` is set and prometheus-client is not installed.
        ValueError: the port of `metrics_port` is taken, or there is no such `metrics_address` here, or the file of
            `event_log` cannot be appended to.
    """
    observers: list[Observer] = [HealthCheck(), OverflowWarner()]
    if config.stats_every:
        from kv_canary.observers.stats import StatsLogger

        observers.append(StatsLogger(config.stats_every))
    if config.swa_divergence_every:
        from kv_canary.observers.swa_divergence import SwaDivergenceLogger

        observers.append(SwaDivergenceLogger(config.swa_divergence_every))
    if config.event_log is not None:
        from kv_canary.observers.events import EventLog

        observers.append(EventLog(config.event_log, config=config))
    if config.metrics_port:
        from kv_canary.observers.metrics import PrometheusMetrics

        # The last one: it holds a port, which nothing after it may leave taken.
        observers.append(PrometheusMetrics(port=config.metrics_port, address=config.metrics_address))
    return observers
