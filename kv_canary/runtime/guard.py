"""The guard between the canary's own failures and the engine: these are counted, said once and shown."""

from __future__ import annotations

from collections import Counter
from time import perf_counter
from types import TracebackType

import torch

from kv_canary.output import logger
from kv_canary.reports.error import CanaryViolationError

# Kinds of failures that are told apart; what comes beyond is counted together.
MOST_KINDS = 64


class Guard:
    """Contains what goes wrong inside the canary.

    In log mode nothing leaves it but what ends a thread or a process (KeyboardInterrupt, SystemExit). In raise mode,
    where a run is to fail rather than go on unwatched, failures leave it as they are, and findings at the places that
    raise them.

    Args:
        redacts: whether texts of exceptions are left out of the log: they may name requests.
        contains: whether failures are contained; not so in raise mode. Tests and campaigns, which are to see them, set
            the attribute of this name.

    All that the canary does while an engine serves is in such parts, and the guard's clock says how long it took.
    """

    def __init__(self, *, contains: bool, redacts: bool = False) -> None:
        self.contains, self._redacts = contains, redacts
        # By part and kind of exception.
        self.failures: Counter[str] = Counter()
        # Whether the canary itself has failed since `take_touched`.
        self.touched = False
        # How many parts the host is inside of, since when, and seconds that it was inside of any.
        self.depth, self.since, self.spent = 0, 0.0, 0.0

    def contain(self, part: str, *, allocates: bool = True) -> Contained:
        """Return a context for a part of the canary: its failures go no further, in log mode.

        Whatever mode the engine is in, inference mode is off inside: what is allocated there can be changed anywhere.

        Args:
            part: what is being done, for the log and the summary: "HEAD of forward target".
            allocates: whether tensors may be made there; if not, the engine's mode is left as it is.
        """
        return Contained(self, part, allocates=allocates)

    def failed(self, part: str, error: Exception, *, own: bool = True) -> None:
        """Take in that a part of the canary has failed: count it, and say so once for each part and kind.

        Args:
            part: what was being done.
            error: what it raised.
            own: whether it may have left something unverified: not what a callback raises, or a capture.
        """
        self.touched |= own
        kind = f"{part}: {type(error).__name__}"
        if kind not in self.failures and len(self.failures) >= MOST_KINDS:
            kind = "others"
        self.failures[kind] += 1
        if self.failures[kind] == 1:
            meaning = "; the engine goes on, and what was not recorded counts as unverified" if own else ""
            logger.failure(
                "kv-canary: %s failed (%s)%s. Further failures of this kind are counted, see summary().failures",
                part,
                type(error).__name__,
                meaning,
                error=error,
                redacts=self._redacts,
            )

    def take(self, part: str, error: Exception) -> None:
        """Take in what a part of the canary, that is inside another one, has raised.

        Raises:
            Exception: the same, where it is not contained.
        """
        if isinstance(error, CanaryViolationError) or not self.contains:
            raise error
        self.failed(part, error)

    def take_touched(self) -> bool:
        """Return whether something has failed since the last call."""
        touched, self.touched = self.touched, False
        return touched


class Contained:
    """The context of one part; `failed` says afterwards whether it was cut short.

    One that does not allocate may be entered again and again, though not inside itself.
    """

    __slots__ = ("_guard", "_mode", "_part", "failed")

    def __init__(self, guard: Guard, part: str, *, allocates: bool) -> None:
        self._guard, self._part = guard, part
        # Entering the mode costs more than asking for it, and most parts are inside others.
        self._mode = torch.inference_mode(False) if allocates and torch.is_inference_mode_enabled() else None
        self.failed = False

    def __enter__(self) -> Contained:
        guard = self._guard
        if not guard.depth:
            guard.since = perf_counter()
        guard.depth += 1
        self.failed = False
        if self._mode is not None:
            self._mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._mode is not None:
            self._mode.__exit__(kind, error, trace)
        guard = self._guard
        guard.depth -= 1
        if not guard.depth:
            guard.spent += perf_counter() - guard.since
        if error is None:
            return False
        self.failed = True
        if not isinstance(error, Exception) or isinstance(error, CanaryViolationError) or not guard.contains:
            return False
        guard.failed(self._part, error)
        return True
