"""The event log: one JSON object a line, appended to a file that several processes may share."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kv_canary.config import CanaryConfig
from kv_canary.errors import must_be
from kv_canary.observers.base import Observer, RequestVerdict, StepFacts
from kv_canary.observers.overflow import names_of
from kv_canary.output import logger, post
from kv_canary.ratelimit import RateLimit
from kv_canary.runtime.summary import CanarySummary, Watching

if TYPE_CHECKING:
    from kv_canary.ranks import RankReport
    from kv_canary.reports import Incident, ViolationReport

# Where the file would grow beyond this, it is renamed to `<name>.1`, over an older one of that name.
MOST_BYTES = 64 << 20
# How long a line waits for other processes' lines at most, and for how long nothing is tried after that: one that hangs
# costs one wait, not one a line.
_PATIENCE = 0.1
_PAUSE = 10.0
# Violations that are written in a minute; an event says how many were held back before it.
REPORTS_PER_MINUTE = 600
# Likewise requests that have ended, those that were intact and the others each.
VERDICTS_PER_MINUTE = 6000
# Incidents likewise; and what of a summary a verdict tells.
INCIDENTS_PER_MINUTE = 60
VERDICT = (
    "watching",
    "verdict",
    "violations",
    "incidents",
    "requests",
    "skipped",
    "positions_relied_on",
    "positions_verified",
    "bytes_held",
)


# What of an incident is told.
_INCIDENT = ("number", "sentence", "cause", "reasons", "requests", "group", "positions", "slots")


def expect_appendable(path: Path) -> None:
    """See that a file can be appended to, and make it where it is not there.

    Raises:
        ValueError: it cannot.
    """
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> ValueError:
    got = f"{path}: {error.strerror}"
    return ValueError(must_be("CanaryConfig", "event_log", "a file that can be appended to", got))


class EventLog(Observer):
    """Appends what happens to a file: `start`, `watching`, `incident`, `report`, `request_verified`, `ranks`,
    `overflow`, `missing`, `lost`, `stop`, which has the verdict.

    Every object has `time` (ISO 8601, UTC), `pid` and `event`; docs/metrics.md has the rest. Nothing is held open, so
    that the file can be moved away at any time. Only its owner can read it, and a group where a file that is there
    already lets one in: it names requests and holds their tokens. A line that cannot be written whole is not written at
    all; how many were lost is said in the log, and in the file once it can be written again. Lines are written by the
    canary's output thread.

    Args:
        path: of the file.
        config: of the canary, for `start`.
        most_bytes: of the file; what was before is kept in one older file of at most this size.
        limit: of `overflow` and `missing` by kind, and of complaints in the log.
        now: the time.
        clock: seconds that only grow.

    Raises:
        ValueError: the file cannot be appended to.
    """

    def __init__(
        self,
        path: Path,
        *,
        config: CanaryConfig,
        most_bytes: int = MOST_BYTES,
        limit: RateLimit | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from kv_canary import __version__

        self._path, self._most_bytes = path.absolute(), most_bytes
        self._limit = limit or RateLimit()
        self._reports = RateLimit(0, per_minute=REPORTS_PER_MINUTE, clock=clock)
        self._incidents = RateLimit(0, per_minute=INCIDENTS_PER_MINUTE, clock=clock)
        # Those that were intact apart: they hold back no other.
        self._verdicts = {intact: RateLimit(0, per_minute=VERDICTS_PER_MINUTE, clock=clock) for intact in (True, False)}
        self._now, self._clock = now, clock
        # Used by the output thread alone: lines lost, and until when nothing is tried.
        self._lost, self._pauses_until = 0, 0.0
        # Whether everyone can read the file, which could not be helped.
        self._stays_open = False
        # A process that is forked off has a copy of the canary, which it may close: nothing stops by that.
        self._process = os.getpid()
        self._watching = Watching.OFF
        self._steps = self._violations = 0
        # What the last event tells of all.
        self._verdict: dict[str, Any] = {}
        settings = config.shown()
        try:
            self._append(self._line("start", {"version": __version__, "config": settings}))
        except OSError as error:
            raise _unwritable(path, error) from error

    def on_incident(self, incident: Incident) -> None:
        held_back = self._incidents.admit("incident")
        if held_back is not None:
            told = {name: getattr(incident, name) for name in _INCIDENT}
            self._write("incident", step=incident.first_step, held_back=held_back, **told)

    def on_report(self, report: ViolationReport) -> None:
        held_back = self._reports.admit("report")
        if held_back is not None:
            self._write("report", step=report.step, report=report.as_dict(), held_back=held_back)

    def on_request(self, verdict: RequestVerdict) -> None:
        held_back = self._verdicts[verdict.verdict == "intact"].admit("request_verified")
        if held_back is not None:
            self._write("request_verified", held_back=held_back, **verdict.as_dict())

    def on_ranks(self, report: RankReport) -> None:
        self._write("ranks", step=report.step, report=report.as_dict())

    def on_step(self, facts: StepFacts) -> None:
        self._steps, self._violations = facts.step, facts.violations
        if facts.watching != self._watching:
            before, self._watching = self._watching, facts.watching
            self._write("watching", step=facts.step, before=before, watching=facts.watching)
        for group, bits in facts.statuses:
            held_back = self._limit.admit(("overflow", group, bits))
            if held_back is not None:
                counts = {"relied_on": facts.relied_on, "verified": facts.verified}
                names = names_of(bits)
                self._write("overflow", step=facts.step, group=group, bits=names, held_back=held_back, **counts)
        if facts.missing:
            held_back = self._limit.admit(("missing", *sorted(facts.missing)))
            if held_back is not None:
                self._write("missing", step=facts.step, launches=dict(facts.missing), held_back=held_back)

    def on_end(self, summary: CanarySummary) -> None:
        self._verdict = {"sentence": str(summary), **{name: summary.as_dict()[name] for name in VERDICT}}

    def close(self) -> None:
        if os.getpid() != self._process:
            return
        line = self._line("stop", {"step": self._steps, "violations": self._violations, **self._verdict})
        post(lambda: self._append_or_count(line, at_last=True))

    def _write(self, event: str, **facts: Any) -> None:
        """Have an event appended, as of now."""
        line = self._line(event, facts)
        post(lambda: self._append_or_count(line))

    def _append_or_count(self, line: bytes, *, at_last: bool = False) -> None:
        """Append a line; where that fails, count it and go on. The last one is tried in any case."""
        if self._clock() < self._pauses_until and not at_last:
            self._lost += 1
            return
        try:
            if self._lost:
                self._append(self._line("lost", {"events": self._lost}))
                self._lost = 0
            self._append(line)
        except OSError as error:
            self._lost += 1
            if isinstance(error, BlockingIOError):
                self._pauses_until = self._clock() + _PAUSE
            text = self._limit.line(
                "failed",
                f"kv-canary: the event log {self._path} could not be written: {error.strerror}; "
                f"events lost so far: {self._lost}",
            )
            if text is not None:
                logger.error("%s", text)

    def _line(self, event: str, facts: dict[str, Any]) -> bytes:
        stamp = self._now().astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return json.dumps({"time": stamp, "pid": os.getpid(), "event": event, **facts}, default=str).encode() + b"\n"

    def _append(self, line: bytes) -> None:
        """Append a line whole, or leave the file as it was.

        Raises:
            OSError: it could not be written.
        """
        with _locked(self._path) as descriptor:
            self._hide(descriptor)
            size = os.fstat(descriptor).st_size
            if not size or size + len(line) <= self._most_bytes:
                _append_whole(descriptor, line, size)
                return
            os.replace(self._path, f"{self._path}.1")
            with _locked(self._path) as fresh:
                self._hide(fresh)
                _append_whole(fresh, line, os.fstat(fresh).st_size)

    def _hide(self, descriptor: int) -> None:
        """Take a file that everyone can read or write from all but its owner; where that fails, say so once."""
        if self._stays_open or not _is_open_to_all(descriptor):
            return
        with suppress(OSError):
            os.fchmod(descriptor, 0o600)
        self._stays_open = _is_open_to_all(descriptor)
        if self._stays_open:
            logger.warning(
                "kv-canary: the event log %s can be read by everyone, and that could not be changed: it names requests "
                "and holds their tokens, unless redact is on",
                self._path,
            )


def _is_open_to_all(descriptor: int) -> bool:
    mode = os.fstat(descriptor).st_mode
    return stat.S_ISREG(mode) and bool(mode & stat.S_IRWXO)


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Open the file to append to, and keep other processes from doing so inside the block.

    Raises:
        OSError: it cannot be opened, or another process has kept it for too long.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            _lock(descriptor)
            # While this one waited, another may have renamed the file.
            if _is_at(descriptor, path):
                yield descriptor
                return
        finally:
            os.close(descriptor)


def _lock(descriptor: int) -> None:
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.001)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _append_whole(descriptor: int, line: bytes, size: int) -> None:
    # A process that was killed in the middle of a line leaves half of one: the next begins a line of its own.
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        line = b"\n" + line
    try:
        # Where a part of it fits, the second call says why the rest does not.
        while line:
            line = line[os.write(descriptor, line) :]
    except BaseException:
        os.ftruncate(descriptor, size)
        raise
