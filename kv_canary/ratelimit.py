"""One line per key and interval: what would fill a log is held back, and counted."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from kv_canary.errors import must_be

# Keys that are remembered; beyond that, the one whose line was let through longest ago is forgotten.
MOST_KEYS = 4096


@dataclass
class _Key:
    admitted: float
    held: int = 0


class RateLimit:
    """Lets one line per key through every so many seconds.

    Nothing runs by a timer: what was held back is told with the next line of its key.

    Args:
        interval: seconds between two lines of one key; 0 lets everything through.
        clock: seconds that only grow; for tests.

    Raises:
        ValueError: the interval is negative.
    """

    def __init__(self, interval: float = 10.0, *, clock: Callable[[], float] = time.monotonic) -> None:
        if not interval >= 0:
            raise ValueError(must_be("RateLimit", "interval", "at least 0 seconds", str(interval)))
        self.interval = interval
        self._clock = clock
        self._keys: OrderedDict[Hashable, _Key] = OrderedDict()

    def admit(self, key: Hashable) -> int | None:
        """Return how many lines of `key` were held back since its last one, or None where this one is to be held."""
        now = self._clock()
        known = self._keys.get(key)
        if known is not None and now - known.admitted < self.interval:
            known.held += 1
            return None
        self._keys[key] = _Key(admitted=now)
        self._keys.move_to_end(key)
        if len(self._keys) > MOST_KEYS:
            self._keys.popitem(last=False)
        return 0 if known is None else known.held

    def line(self, key: Hashable, text: str) -> str | None:
        """Return `text`, with the count of what was held back before it, or None where it is to be held back."""
        held = self.admit(key)
        if held is None:
            return None
        return f"{text} ({held} more like it were held back)" if held else text
