"""The thread that says and saves for the canary: an engine's thread never waits for a log or a disk.

`logger` is used like one of `logging`'s and hands its lines to that thread; `post` hands over any other work. What
waits is bounded: beyond that, work is dropped, counted, and said once there is room again. Nothing that goes wrong with
it comes back to who posted it.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable

Work = Callable[[], object]

# Pieces of work that wait at most.
CAPACITY = 4096
# Seconds that the thread stays without work.
_LINGER = 1.0
# Seconds that the end of the process waits for what is still to be said.
_LAST_WORDS = 5.0

_logger = logging.getLogger("kv_canary")


class Output:
    """A bounded queue and the thread that works through it, which runs only while there is work.

    Args:
        capacity: pieces of work that wait at most.
        linger: seconds that the thread stays without work.
    """

    def __init__(self, *, capacity: int = CAPACITY, linger: float = _LINGER) -> None:
        self._capacity, self._linger = capacity, linger
        # Pieces that were dropped, and that raised, so far.
        self.dropped = self.failed = 0
        self._reset()

    def _reset(self) -> None:
        """Begin anew; in a forked child, where the thread is not and the lock may have been held."""
        # A signal handler may log while the thread that it interrupts is in here.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[Work] = deque()
        self._working = False
        self._thread: threading.Thread | None = None
        self._untold = 0

    def post(self, work: Work) -> bool:
        """Have `work` done, without waiting for anything; return whether there was room for it."""
        with self._lock:
            if len(self._waiting) >= self._capacity or not self._is_running():
                self.dropped += 1
                self._untold += 1
                return False
            self._waiting.append(work)
            self._changed.notify_all()
        return True

    def drain(self, seconds: float) -> bool:
        """Wait, so many seconds at most, until all that was posted is done; return whether it is."""
        deadline = time.monotonic() + seconds
        if threading.current_thread() is self._thread:
            return False
        with self._lock:
            while self._waiting or self._working:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def _is_running(self) -> bool:
        """Start the thread if there is none; return whether there is one. With the lock."""
        if self._thread is None:
            # There before it starts: whoever comes meanwhile, by a signal, starts no second one.
            self._thread = threading.Thread(target=self._run, name="kv-canary-output", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:
                # The process has no room for a thread, or is about to end.
                self._thread = None
                return False
        return True

    def _run(self) -> None:
        while (work := self._next()) is not None:
            try:
                work()
            except BaseException:
                # A handler that raises, say, or that exits on errors: there is nobody to tell, but whoever asks.
                self.failed += 1

    def _next(self) -> Work | None:
        """Return the next piece of work, or None where the thread should end."""
        with self._lock:
            self._working = False
            self._changed.notify_all()
            if not self._waiting and not self._untold:
                self._changed.wait(self._linger)
            if self._waiting:
                self._working = True
                return self._waiting.popleft()
            if self._untold:
                untold, self._untold, self._working = self._untold, 0, True
                return lambda: _logger.warning(
                    "kv-canary: %d log lines, events or bundles were dropped: whatever takes them is too slow", untold
                )
            self._thread = None
            return None


class BackgroundLogger:
    """A logger whose lines are written by an `Output`'s thread; with the methods of `logging.Logger` that are used."""

    def __init__(self, logger: logging.Logger, output: Output) -> None:
        self._logger, self._output = logger, output

    def debug(self, text: str, *args: object) -> None:
        """Log at level DEBUG."""
        self.log(logging.DEBUG, text, *args)

    def info(self, text: str, *args: object) -> None:
        """Log at level INFO."""
        self.log(logging.INFO, text, *args)

    def warning(self, text: str, *args: object) -> None:
        """Log at level WARNING."""
        self.log(logging.WARNING, text, *args)

    def error(self, text: str, *args: object) -> None:
        """Log at level ERROR."""
        self.log(logging.ERROR, text, *args)

    def failure(self, text: str, *args: object, error: BaseException, redacts: bool) -> None:
        """Log at level ERROR that something has failed, and where.

        Args:
            error: what was raised.
            redacts: whether texts of exceptions, which may name requests, are left out: kind and places are said.
        """
        self.log(logging.ERROR, text, *args, error=error, redacts=redacts)

    def log(
        self, level: int, text: str, *args: object, error: BaseException | None = None, redacts: bool = False
    ) -> None:
        """Log at a level, with an exception if one is given; see `failure`."""
        if self._logger.isEnabledFor(level):
            # Put together now: what the arguments stand for may change.
            line = text % args if args else text
            trace = None if error is None or redacts else (type(error), error, error.__traceback__)
            # Of the thread, the place and the time of the call.
            path, number, function, _ = self._logger.findCaller(stacklevel=3)
            record = self._logger.makeRecord(self._logger.name, level, path, number, line, (), trace, function)
            if error is not None and redacts:
                record.exc_text = _places(error)
            self._output.post(lambda: self._logger.handle(record))


def _places(error: BaseException) -> str:
    """Return an exception's kind and its trace, without its text and without lines of source."""
    frames = [
        (f.f_code.co_filename, number, f.f_code.co_name, "") for f, number in traceback.walk_tb(error.__traceback__)
    ]
    lines = traceback.StackSummary.from_list(frames).format()
    return "".join(["Traceback (most recent call last):\n", *lines, type(error).__name__])


OUTPUT = Output()
logger = BackgroundLogger(_logger, OUTPUT)


def post(work: Work) -> bool:
    """Have `work` done by the process's output thread; return whether there was room for it."""
    return OUTPUT.post(work)


def drain(seconds: float = _LAST_WORDS) -> bool:
    """Wait, so many seconds at most, until all that was posted is done; return whether it is."""
    return OUTPUT.drain(seconds)


os.register_at_fork(after_in_child=OUTPUT._reset)
atexit.register(drain)
