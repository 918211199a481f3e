"""Observers: they are told of every drained step and of every report, and tell others."""

from __future__ import annotations

from kv_canary.config import CanaryConfig
from kv_canary.observers.base import Observer, StepFacts

__all__ = ["Observer", "StepFacts", "observers_of"]


def observers_of(config: CanaryConfig) -> list[Observer]:
    """Return the observers that the configuration asks for."""
    return []
