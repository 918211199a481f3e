"""A limit of one line per key and interval, and so many a minute: what would fill a log is held back, and counted."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from kv_canary.errors import must_be

# Keys that are remembered; beyond that, the one whose line was let through longest ago is forgotten.
MOST_KEYS = 4096
# Lines of all keys together that are let through in a minute.
PER_MINUTE = 60


@dataclass
class _Key:
    admitted: float
    held: int = 0


class RateLimit:
    """Lets one line per key through every so many seconds, and only so many a minute over all keys.

    Nothing runs by a timer: what was held back is told with the next line of its key, or with the next line at all.

    Args:
        interval: seconds between two lines of one key; 0 lets every line through, as far as `per_minute` does.
        per_minute: lines of all keys together in a minute, that many at once at first; None: no limit.
        clock: seconds that only grow; for tests.

    Raises:
        ValueError: the interval is negative, or `per_minute` is below 1.
    """

    def __init__(
        self,
        interval: float = 10.0,
        *,
        per_minute: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not interval >= 0:
            raise ValueError(must_be("RateLimit", "interval", "at least 0 seconds", str(interval)))
        if per_minute is not None and per_minute < 1:
            raise ValueError(must_be("RateLimit", "per_minute", "at least 1 line", str(per_minute)))
        self.interval = interval
        self._clock = clock
        self._keys: OrderedDict[Hashable, _Key] = OrderedDict()
        self._most = per_minute
        # What is left of the minute's lines as of a time, and how many were held back since one went through.
        self._left, self._as_of, self._crowded_out = float(per_minute or 0), clock(), 0

    def admit(self, key: Hashable) -> int | None:
        """Return how many lines were held back that this one stands for, or None where this one is to be held."""
        now = self._clock()
        known = self._keys.get(key)
        if known is not None and now - known.admitted < self.interval:
            known.held += 1
            return None
        if not self._has_room(now):
            self._crowded_out += 1
            return None
        crowded_out, self._crowded_out = self._crowded_out, 0
        self._keys[key] = _Key(admitted=now)
        self._keys.move_to_end(key)
        if len(self._keys) > MOST_KEYS:
            self._keys.popitem(last=False)
        return crowded_out + (0 if known is None else known.held)

    def _has_room(self, now: float) -> bool:
        """Take one of the minute's lines; return whether there was one."""
        if self._most is None:
            return True
        self._left = min(float(self._most), self._left + max(0.0, now - self._as_of) * self._most / 60)
        self._as_of = now
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def line(self, key: Hashable, text: str) -> str | None:
        """Return `text`, with the count of what was held back before it, or None where it is to be held back."""
        held = self.admit(key)
        if held is None:
            return None
        return f"{text} ({held} more like it were held back)" if held else text
