"""The adapter for Hugging Face transformers' continuous batching.

It wraps methods of single objects: around every model forward it verifies and records, and where the engine frees or
copies KV blocks it keeps the records in step. The objects of a manager get attributes of their own; a model stays as it
is, because models are copied and saved: its class looks the canary up, for as long as one of its models is watched.
Nothing else of transformers is touched, and its outputs are unchanged. CUDA graphs, asynchronous batching, the decode
path through block tables, CPU offloading and prefix sharing are all served; `transformers_session` says how.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Self

import transformers
from transformers.generation.continuous_batching import ContinuousBatchingManager

from kv_canary.config import CanaryConfig
from kv_canary.engines.ending import at_exit
from kv_canary.engines.patches import Patches
from kv_canary.engines.transformers_layouts import Layout, layout_class
from kv_canary.engines.transformers_session import Session
from kv_canary.errors import must_be
from kv_canary.identity import Identity
from kv_canary.observers.events import expect_appendable
from kv_canary.output import logger
from kv_canary.reports import CanaryViolationError, Incident, ViolationReport
from kv_canary.reports.incidents import MOST_REMEMBERED
from kv_canary.runtime.guard import Guard
from kv_canary.runtime.manager import CanaryManager
from kv_canary.runtime.summary import CanarySummary, Watching, say_verdict

if TYPE_CHECKING:
    from kv_canary.observers.metrics_server import MetricsServer

OnReport = Callable[[ViolationReport], None]

# Seconds that the thread of a running manager is waited for: it is between two steps at least ten times a second, but
# for the time that its cache takes.
PATIENCE = 60.0


def install(
    target: Any,
    *,
    config: CanaryConfig,
    on_report: OnReport | None = None,
    identity: Callable[[Any], Identity] | None = None,
) -> TransformersCanary:
    """Install into a model (every manager it makes from now on) or into a `ContinuousBatchingManager`.

    Args:
        target: the model or the manager.
        config: how to behave.
        on_report: called with every report that is written out.
        identity: given a request's `RequestState`, tells what its KV depends on besides its tokens (adapter, cache
            salt, version of the weights): a string or bytes, which are hashed, a 64-bit word of `identity_word`, or
            None for nothing. It is asked when the engine takes the request in.
    """
    layout_class(transformers.__version__)
    if not isinstance(target, ContinuousBatchingManager) and not hasattr(target, "init_continuous_batching"):
        expected = "a model that can generate, or a ContinuousBatchingManager"
        raise TypeError(must_be("install", "target", expected, type(target).__name__))
    _expect_kv(target)
    if identity is not None and not callable(identity):
        raise TypeError(must_be("install", "identity", "a function of a request's state", type(identity).__name__))
    return TransformersCanary(target, config=config, on_report=on_report, identity=identity)


def _expect_kv(target: Any) -> None:
    """See that a model keeps the keys and values of a text, which is what the canary watches.

    Raises:
        TypeError: it does not; or it is one whose text is not all that they depend on.
    """
    config = getattr(target, "config", None)
    if getattr(config, "is_encoder_decoder", False) is True:
        kind = "an encoder-decoder, whose keys and values depend on another text"
    elif getattr(target, "_is_stateful", False) is True:
        kind = "one that keeps a state instead"
    else:
        return
    expected = "a decoder that keeps keys and values"
    raise TypeError(must_be("install", "target", expected, f"{type(target).__name__}, {kind}"))


class TransformersCanary:
    """A canary in transformers: one session per batch processor, that is per cache, for as long as the cache lives."""

    def __init__(
        self,
        target: Any,
        *,
        config: CanaryConfig,
        on_report: OnReport | None,
        identity: Callable[[Any], Identity] | None,
    ) -> None:
        self._config, self._on_report, self._identity = config, on_report, identity
        # Of what happens outside of a session's forwards, in calls of the engine's; see also Session.
        self.guard = Guard(contains=config.mode == "log", redacts=config.redact)
        self._patches = Patches()
        self._sessions: list[Session] = []
        # Weak, so that a manager and its memory go when the caller lets go of it.
        self._watches: weakref.WeakSet[_Watch] = weakref.WeakSet()
        # Numbers of incidents go on from cache to cache.
        self._numbers = itertools.count(1)
        # Whether the verdict has been said, and that there is a way past the canary.
        self._said = self._told = False
        # What is left of caches that are gone.
        self._past = CanarySummary(watching=Watching.OFF)
        # The port of metrics, which is held whether there is a cache or not.
        self._server: MetricsServer | None = None
        self._past_reports: deque[ViolationReport] = deque(maxlen=1024)
        self._past_incidents: deque[Incident] = deque(maxlen=MOST_REMEMBERED)
        self._errors: deque[CanaryViolationError] = deque()
        if config.mode == "off":
            return
        self._hold_outputs()
        # Not kept alive by that: who lets go of it has had its verdict, or wants none.
        at_exit(self.say_verdict)
        try:
            if isinstance(target, ContinuousBatchingManager):
                self._watch(target)
            else:
                self._watch_model(target)
        except BaseException:
            self.uninstall()
            raise

    @property
    def manager(self) -> CanaryManager:
        """The canary of the newest cache; RuntimeError where the engine has none now."""
        return self._newest().manager

    @property
    def layout(self) -> Layout:
        """The layout of the newest cache; RuntimeError where the engine has none now."""
        return self._newest().layout

    @property
    def reports(self) -> list[ViolationReport]:
        """The latest reports, oldest first."""
        return [*self._past_reports, *(r for s in self._sessions for r in s.manager.reports)]

    @property
    def incidents(self) -> list[Incident]:
        """The latest incidents, oldest first, of caches that are gone too."""
        return [*self._past_incidents, *(i for s in self._sessions for i in s.manager.incidents)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()

    def summary(self) -> CanarySummary:
        """Return what the canary has done, over all caches."""
        total = self._past
        for session in self._sessions:
            total = total + session.manager.summary()
        if self.guard.failures:
            total = total + CanarySummary(watching=Watching.PARTIAL, failures=dict(self.guard.failures))
        return total

    def flush(self) -> None:
        """Wait for everything launched, and report it now; in raise mode, raise what a forward found.

        Raises:
            CanaryViolationError: in raise mode, also where the engine swallowed it.
        """
        for session in list(self._sessions):
            try:
                session.flush()
            except CanaryViolationError as error:
                self._errors.append(error)
        if self._errors:
            first = self._errors[0]
            self._errors.clear()
            raise first

    def uninstall(self) -> None:
        """Leave the engine as it was found, at any time, and say the verdict; what was counted can still be read."""
        self._patches.undo_all()
        for watch in list(self._watches):
            watch.patches.undo_all()
        for session in list(self._sessions):
            self.close(session)
        if self._server is not None:
            self._server.release()
            self._server = None
        self.say_verdict()

    def say_verdict(self) -> None:
        """Log the verdict over all caches, once; nothing where the canary was never to run."""
        if not self._said and self._config.mode != "off":
            self._said = True
            say_verdict(self.summary())

    def attach(self, processor: Any) -> Session:
        """Watch a batch processor whose cache is empty; what fails leaves nothing behind."""
        try:
            session = self._session(processor, self._config)
        except Exception as error:
            quiet = dataclasses.replace(self._config, metrics_port=0, event_log=None)
            if not self.guard.contains or quiet == self._config:
                raise
            # What cannot be told to others is said, and the cache is watched all the same.
            self.guard.failed("transformers adapter: beginning the metrics or the event log", error)
            session = self._session(processor, quiet)
        self._sessions.append(session)
        return session

    def _session(self, processor: Any, config: CanaryConfig) -> Session:
        return Session(
            processor,
            layout=layout_class(transformers.__version__),
            config=config,
            on_report=self._on_report,
            identity=self._identity,
            incident_numbers=self._numbers,
        )

    def _hold_outputs(self) -> None:
        """See that events can be written, and hold the port of metrics, before there is a cache to tell of.

        Raises:
            ModuleNotFoundError, ValueError: they cannot be had.
        """
        if self._config.event_log is not None:
            expect_appendable(self._config.event_log)
        if self._config.metrics_port:
            # With what the metrics themselves ask for.
            from kv_canary.observers.metrics import PrometheusMetrics

            self._server = PrometheusMetrics.server(self._config.metrics_port, address=self._config.metrics_address)

    def close(self, session: Session) -> None:
        """Let go of a cache that the engine lets go of, and keep what was counted and reported."""
        if session not in self._sessions:
            return
        session.close()
        self._sessions.remove(session)
        self._past = self._past + session.manager.summary()
        self._past_reports.extend(session.manager.reports)
        self._past_incidents.extend(session.manager.incidents)
        if session.error is not None:
            self._errors.append(session.error)

    def _newest(self) -> Session:
        if not self._sessions:
            raise RuntimeError("kv-canary: transformers adapter: the cache must exist by now, got none")
        return self._sessions[-1]

    def _watch_model(self, model: Any) -> None:
        def make(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            manager = original(*args, **kwargs)
            with self.guard.contain("transformers adapter: watching a new manager"):
                self._watch(manager)
            return manager

        def generate(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            # The engine turns an exception of a forward into failed requests; here it comes out again.
            result = original(*args, **kwargs)
            self.flush()
            return result

        def alone(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            # A paged one is handed on to generate_batch.
            if not self._told and kwargs.get("cache_implementation") != "paged":
                self._told = True
                logger.warning(
                    "kv-canary: transformers adapter: generate() goes by unwatched: the canary is in continuous "
                    "batching, which generate_batch() and init_continuous_batching() use"
                )
            return original(*args, **kwargs)

        # The model itself stays as it is: its copies and pickles are of a model that nobody watches.
        self._patches.wrap_in_class(model, "init_continuous_batching", make)
        self._patches.wrap_in_class(model, "generate_batch", generate)
        if hasattr(model, "generate"):
            self._patches.wrap_in_class(model, "generate", alone)

    def _watch(self, manager: Any) -> None:
        if not any(w.manager is manager for w in self._watches):
            self._watches.add(_Watch(self, manager))


class _Watch:
    """Follows a manager, which makes its cache late and may make several, one after the other."""

    def __init__(self, canary: TransformersCanary, manager: Any) -> None:
        self.manager = manager
        self.patches = Patches()
        self._canary = canary
        self._session: Session | None = None
        # The engine's thread, which may be started at any time, and who installs may both come upon a new cache.
        self._lock = threading.RLock()
        try:
            self.patches.expect_unwatched(manager, "_create_batch_processor")
            self.patches.wrap(manager, "_create_batch_processor", self._create)
            self.patches.wrap(manager, "stop", self._stop)
            with _at_rest(manager), self._lock:
                if self._session is None and manager.batch_processor is not None:
                    self._session = canary.attach(manager.batch_processor)
        except BaseException:
            self.patches.undo_all()
            raise

    def _create(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            # Before the engine measures how much memory is free for the new one.
            self._close_if_gone()
            processor = original(*args, **kwargs)
            if self._session is None:
                with self._canary.guard.contain("transformers adapter: watching a new cache") as part:
                    self._session = self._canary.attach(processor)
                if part.failed:
                    logger.error("kv-canary: transformers adapter: the requests of this cache go by unwatched")
            return processor

    def _stop(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        # A manager that was told to stop, and not waited for, still uses its cache.
        if not self.manager.is_running():
            self._close_if_gone()
        return result

    def _close_if_gone(self) -> None:
        session = self._session
        if session is not None and self.manager.batch_processor is not session.processor:
            self._session = None
            with self._canary.guard.contain("transformers adapter: letting go of a cache"):
                self._canary.close(session)


@contextlib.contextmanager
def _at_rest(manager: Any) -> Iterator[None]:
    """Hold the thread of a running manager between two steps; where none runs, or it is the caller's own, do nothing.

    Nor where the caller has paused it. Not by the engine's own `pause`, which 5.17 has not, and which waits for a step
    however long it takes.

    Raises:
        RuntimeError: the manager serves requests, or its thread does not come to rest.
    """
    if threading.current_thread() is manager._generation_thread or _is_paused(manager):
        yield
        return
    end = time.monotonic() + PATIENCE
    while manager.is_running() and manager.batch_processor is None:
        # Its thread, which is not to be stopped there, makes the cache.
        _expect_before(end)
        time.sleep(0.01)
    processor = manager.batch_processor
    if processor is None or not manager.is_running():
        yield
        return
    rests, goes_on = threading.Event(), threading.Event()

    def hold(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        rests.set()
        goes_on.wait()
        return original(*args, **kwargs)

    patches = Patches()
    patches.wrap(processor, "prepare_next_batch", hold)
    try:
        while manager.is_running() and not rests.wait(0.05):
            if processor.has_pending_requests():
                raise RuntimeError(
                    must_be("transformers adapter", "the cache", "empty when installed", "requests in it")
                )
            _expect_before(end)
        yield
    finally:
        goes_on.set()
        patches.undo_all()


def _is_paused(manager: Any) -> bool:
    """Whether the calling thread has paused the manager, which 5.17 cannot be."""
    asked = getattr(getattr(manager, "background_thread_status", None), "is_pause_requested", None)
    return asked is not None and bool(asked(local=True))


def _expect_before(end: float) -> None:
    """See that the engine's thread is not waited for any longer.

    Raises:
        RuntimeError: `end`, in seconds of `time.monotonic`, is over.
    """
    if time.monotonic() > end:
        expected = f"between two steps within {PATIENCE:g} s"
        raise RuntimeError(must_be("transformers adapter", "the engine's thread", expected, "one that is not"))
