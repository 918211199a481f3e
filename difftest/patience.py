"""How long a process may work on one case before it counts as hung: by its own clock, not by that of a busy machine."""

from __future__ import annotations

import time

import psutil

# A process that waits, for a lock or a device, uses no core: it may take so many times its seconds of the clock.
OF_THE_CLOCK = 5.0


class Patience:
    """Tells whether a process hangs: since it was last heard of it has had `seconds` of a core, or waited much longer.

    Args:
        pid: the process.
        seconds: of a core that one case may take; of the clock `OF_THE_CLOCK` times as many.
    """

    def __init__(self, pid: int, seconds: float) -> None:
        self.pid, self.seconds = pid, seconds
        self.heard()

    def heard(self) -> None:
        """Count from now on: the process has just been heard of, or was given a case."""
        self._clock, self._used = time.monotonic(), self._cpu_seconds()

    @property
    def over(self) -> bool:
        """Whether the process counts as hung."""
        waited = time.monotonic() - self._clock
        if waited <= self.seconds:
            return False
        return waited > OF_THE_CLOCK * self.seconds or self._cpu_seconds() - self._used > self.seconds

    def _cpu_seconds(self) -> float:
        try:
            used = psutil.Process(self.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return float(used.user + used.system)
