"""Faults in the canary itself: its launches, copies, allocations, files, threads and callbacks fail at random."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np

from kv_canary import ops
from kv_canary.observers import Observer, events
from kv_canary.observers.base import StepFacts
from kv_canary.reports import ViolationReport, bundle, reporter
from kv_canary.runtime import device_state, drain, host, launches, pools, unverified
from kv_canary.specs.structures import ResolvedSlots, WritePlan

OPS = (
    "verify_prefixes",
    "verify_resolved",
    "write",
    "plan",
    "verify",
    "chain_tails",
    "open_step",
    "scatter_token_ids",
    "retire",
    "move",
)
# Where else the canary may fail: the object, and the name of what it calls there.
PLACES: tuple[tuple[Any, str], ...] = (
    (host.Mailbox, "post"),
    (host, "send"),
    (device_state, "send"),
    (unverified, "send"),
    (device_state.CanaryDeviceState, "branch"),
    (drain.Drain, "push"),
    (drain.Drain, "poll"),
    (drain.Drain, "_fetch"),
    (launches.GroupLaunches, "prepare"),
    (ResolvedSlots, "allocate"),
    (WritePlan, "allocate"),
    (unverified.Unverified, "_take_in"),
    (unverified.Unverified, "written"),
    (pools.KvPool, "inside"),
    (reporter.IncidentReporter, "_take"),
    (reporter.IncidentReporter, "_surroundings"),
    (bundle.BundleFolder, "save"),
    (events, "_lock"),
    (events, "_append_whole"),
    (threading.Thread, "start"),
)


class InjectedError(RuntimeError):
    """A failure that the campaign has put into the canary."""


class Faults:
    """Makes calls of the canary's fail at random, before they have done anything or after they have done all.

    Args:
        rng: decides which.
        rate: how often each fails.
    """

    def __init__(self, rng: np.random.Generator, *, rate: float) -> None:
        self.rate = rate
        self.injected: Counter[str] = Counter()
        self._rng = rng
        self._lock = threading.Lock()

    def strike(self, name: str) -> bool:
        """Return whether a call of this name is to fail now."""
        with self._lock:
            if self._rng.random() >= self.rate:
                return False
            self.injected[name] += 1
            return True

    def failing(self, name: str, function: Callable[..., Any], error: type[Exception] = InjectedError) -> Any:
        """Return `function` as it is with the faults."""

        # What is refused when a canary is made is refused; files fail while it runs.
        only = "kv-canary-output" if error is OSError else ""

        def spared(args: tuple[Any, ...]) -> bool:
            # Threads of the engine's start as ever.
            engines = bool(args) and isinstance(args[0], threading.Thread) and "kv-canary" not in args[0].name
            return engines or only not in threading.current_thread().name

        def call(*args: Any, **kwargs: Any) -> Any:
            if spared(args) or not self.strike(name):
                return function(*args, **kwargs)
            with self._lock:
                behind = bool(self._rng.integers(2))
            if behind:
                function(*args, **kwargs)
            raise error(f"injected into {name}")

        return call

    @contextmanager
    def installed(self, places: Sequence[tuple[Any, str]] = PLACES) -> Iterator[Faults]:
        """Inject the faults inside the block, in this process."""
        with ExitStack() as stack:
            for op in OPS:
                stack.enter_context(mock.patch.object(ops, op, self.failing(f"launch of {op}", getattr(ops, op))))
            for holder, name in places:
                whole = f"{getattr(holder, '__name__', holder)}.{name}"
                true = inspect.getattr_static(holder, name)
                error = OSError if holder in (events, bundle.BundleFolder) else InjectedError
                if isinstance(true, classmethod):
                    # Bound to the class when it is called.
                    failing: Any = classmethod(self.failing(whole, true.__func__, error))
                else:
                    failing = self.failing(whole, true, error)
                    if isinstance(holder, type):
                        failing = _method(failing)
                stack.enter_context(mock.patch.object(holder, name, failing))
            yield self


def _method(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return what binds like a method."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(self, *args, **kwargs)

    return method


class SourObserver(Observer):
    """An observer, a callback and a handler of the log that raise now and then."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def on_step(self, facts: StepFacts) -> None:
        self._raise("on_step")

    def on_report(self, report: ViolationReport) -> None:
        self._raise("on_report")

    def on_forward(self, forward: Any, batch: Any) -> None:
        self._raise("on_forward")

    def _raise(self, name: str) -> None:
        if self._faults.strike(f"observer.{name}"):
            raise InjectedError(f"injected into {name}")


class SourHandler(logging.Handler):
    """A handler of the canary's log that raises, or takes its time, now and then."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self._faults = faults

    def emit(self, record: logging.LogRecord) -> None:
        if self._faults.strike("log handler: slow"):
            time.sleep(0.05)
        if self._faults.strike("log handler: raises"):
            raise InjectedError("injected into a handler")
