"""Adapters: one module per engine. `install` finds the right one for what it is given."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any, Protocol, Self

from kv_canary.backends import active_backend
from kv_canary.config import CanaryConfig, Mode, check_names
from kv_canary.errors import must_be
from kv_canary.reports import Incident, ViolationReport
from kv_canary.runtime.summary import CanarySummary

# The top-level package that an engine's objects come from, and the adapter for them.
_ADAPTERS = {"transformers": "kv_canary.engines.transformers"}
# The same, and what to do instead, of engines whose processes install the canary themselves.
_PLUGINS = {
    name: f"set KV_CANARY_MODE=log or raise before the engine starts: see docs/{name}.md" for name in ("sglang", "vllm")
}
# What `install` takes besides settings.
_CALLBACKS = ("on_report", "identity")


class Installation(Protocol):
    """A canary in an engine, as `install` returns it."""

    @property
    def reports(self) -> list[ViolationReport]:
        """The latest reports, oldest first."""

    @property
    def incidents(self) -> list[Incident]:
        """The latest incidents, oldest first: violations by their likely cause."""

    def summary(self) -> CanarySummary:
        """Return what the canary has done and found so far; `print` shows the verdict."""

    def flush(self) -> None:
        """Wait for everything launched, and report it now."""

    def uninstall(self) -> None:
        """Leave the engine as it was found, and log the verdict."""

    def __enter__(self) -> Self:
        """Return the installation, which the end of the `with` block uninstalls."""

    def __exit__(self, *_: object) -> None: ...


def install(
    target: Any, mode: Mode | None = None, *, config: CanaryConfig | None = None, **options: Any
) -> Installation:
    """Put a canary into an engine: into what `target` is, and into what it will make.

    Args:
        target: a transformers model, or its `ContinuousBatchingManager`.
        mode: "log", "raise" or "off", see `CanaryConfig`; None: as `config` or the environment says.
        config: how to behave; None: what the environment says, see `CanaryConfig.from_env`.
        options: instead of a config, fields of `CanaryConfig`, which come before the environment's; and in any case
            `on_report`, called with every written-out report, and `identity`, which tells what a request's KV depends
            on besides its tokens (adapter, cache salt, version of the weights; see the adapter's `install`).

    Raises:
        TypeError: nothing is known about objects like `target`, or it is a class; or an option is no setting.
        ValueError: the engine's version or configuration is not one that the adapter knows.
        RuntimeError: the engine's cache is in use, so that its slots have no records.
    """
    callbacks = {name: options.pop(name) for name in _CALLBACKS if name in options}
    if isinstance(mode, CanaryConfig):
        raise TypeError(must_be("install", "mode", "log, raise or off", "a CanaryConfig: give it as config=..."))
    if mode is not None:
        options["mode"] = mode
    check_names("install", "options", options, also=_CALLBACKS)
    if options and config is not None:
        raise TypeError(must_be("install", "options", "left out where a config is given", ", ".join(options)))
    if config is None:
        config = CanaryConfig.from_env(**options)
    # Engines run their forwards in threads of their own, which do not see a `use_backend` block around this call.
    config = dataclasses.replace(config, backend=config.backend or active_backend())
    expected = f"an object of {' or '.join(_ADAPTERS)}"
    if isinstance(target, type):
        got = f"the class {target.__qualname__}, not one of its objects"
        raise TypeError(must_be("install", "target", expected, got))
    for cls in type(target).__mro__:
        adapter = _ADAPTERS.get(cls.__module__.partition(".")[0])
        if adapter is not None:
            installation: Installation = importlib.import_module(adapter).install(target, config=config, **callbacks)
            return installation
        if advice := _PLUGINS.get(cls.__module__.partition(".")[0]):
            raise TypeError(f"kv-canary: install: {cls.__qualname__} is guarded by a plugin: {advice}")
    kind = type(target)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    raise TypeError(must_be("install", "target", expected, "None" if target is None else name))
