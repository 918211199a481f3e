"""How large every buffer must be: from the engine's own limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from kv_canary.errors import must_be


@dataclass(frozen=True, kw_only=True)
class CanaryLimits:
    """The engine's own limits, which size every buffer.

    Args:
        max_rows: rows of the engine's tables, row 0 (padding) included.
        max_requests: requests in one forward.
        max_tokens: new tokens in one forward.
        max_len: tokens of one request.
    """

    max_rows: int
    max_requests: int
    max_tokens: int
    max_len: int

    def __post_init__(self) -> None:
        for name, low in (("max_rows", 2), ("max_requests", 1), ("max_tokens", 1), ("max_len", 1)):
            if getattr(self, name) < low:
                raise ValueError(must_be("CanaryLimits", name, f"at least {low}", str(getattr(self, name))))


@dataclass(frozen=True, kw_only=True)
class CanaryLaunchCapacities:
    """The sizes that the launches of one forward are made for, in one group.

    Args:
        requests: requests in a write plan.
        tokens: new tokens.
        entries: positions that one verify takes. Requests that share a prefix each rely on all of it, so this may be
            far more than the pool has slots.
    """

    requests: int
    tokens: int
    entries: int

    @classmethod
    def from_args(cls, *, limits: CanaryLimits, window: int = 0, verify_capacity: int | None = None) -> Self:
        """Return the capacities that hold whatever the engine may ask of a group.

        Args:
            limits: the engine's.
            window: of the group, 0 for full attention.
            verify_capacity: entries at most; a forward that relies on more is verified in part, and says so. None: no
                forward is cut short.
        """
        longest = min(limits.max_len, window) if window else limits.max_len
        # Kernels are compiled apart for numbers that are no multiples of 16.
        entries = -(-limits.max_requests * longest // 16) * 16
        if verify_capacity is not None:
            entries = min(entries, verify_capacity)
        return cls(requests=limits.max_requests, tokens=limits.max_tokens, entries=max(entries, 1))
