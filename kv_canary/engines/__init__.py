"""Adapters: one module per engine. `install` finds the right one for what it is given."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any, Protocol

from kv_canary.accounts import CanarySummary
from kv_canary.backends import active_backend
from kv_canary.config import CanaryConfig
from kv_canary.errors import must_be
from kv_canary.reports import ViolationReport

# The top-level package that an engine's objects come from, and the adapter for them.
_ADAPTERS = {"transformers": "kv_canary.engines.transformers"}


class Installation(Protocol):
    """A canary in an engine, as `install` returns it."""

    @property
    def reports(self) -> list[ViolationReport]:
        """The latest reports, oldest first."""

    def summary(self) -> CanarySummary:
        """Return what the canary has done so far."""

    def flush(self) -> None:
        """Wait for everything launched, and report it now."""

    def uninstall(self) -> None:
        """Leave the engine as it was found."""


def install(target: Any, *, config: CanaryConfig | None = None, **options: Any) -> Installation:
    """Put a canary into an engine: into what `target` is, and into what it will make.

    Args:
        target: a transformers model, or its `ContinuousBatchingManager`.
        config: how to behave; None: the defaults.
        options: fields of `CanaryConfig` instead of a config; and `on_report`, called with every written-out report.

    Raises:
        TypeError: nothing is known about objects like `target`.
        ValueError: the engine's version or configuration is not one that the adapter knows.
        RuntimeError: the engine's cache is in use, so that its slots have no records.
    """
    on_report = options.pop("on_report", None)
    if options:
        if config is not None:
            raise TypeError(must_be("install", "options", "left out where a config is given", ", ".join(options)))
        config = CanaryConfig(**options)
    config = config or CanaryConfig()
    # Engines run their forwards in threads of their own, which do not see a `use_backend` block around this call.
    config = dataclasses.replace(config, backend=config.backend or active_backend())
    for cls in type(target).__mro__:
        adapter = _ADAPTERS.get(cls.__module__.partition(".")[0])
        if adapter is not None:
            installation: Installation = importlib.import_module(adapter).install(
                target, config=config, on_report=on_report
            )
            return installation
    expected = f"an object of {' or '.join(_ADAPTERS)}"
    raise TypeError(must_be("install", "target", expected, f"{type(target).__module__}.{type(target).__name__}"))
