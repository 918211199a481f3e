"""What an operator can choose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kv_canary.backends import BACKENDS
from kv_canary.errors import must_be

Mode = Literal["log", "raise"]


@dataclass(frozen=True, kw_only=True)
class CanaryConfig:
    """How the canary behaves.

    Args:
        mode: "log" reports violations and goes on; "raise" also raises `CanaryViolationError`, at the next step.
        backend: "reference" for debugging, "triton" for production; None or "auto" chooses by device.
        read_bytes: bytes of each token's K, and of its V, that are fingerprinted; layer and window rotate with the
            position. A whole token's bytes or more cover one layer wholly.
        verify_bytes_at_tail: fingerprint the cached K/V bytes again after the forward, not only before it.
        track_lifetime: report reads of freed slots (FREED) and writes to another owner's (OVERWRITE). Off where an
            engine's frees cannot be hooked.
        check_tokens: check every cached token against the request's own (TOKEN), by a table of 4 bytes a row and
            position. None: where the table takes at most `token_table_share` of the pool's bytes, or 16 MiB.
        token_table_share: see check_tokens.
        ring_capacity: violations whose details are kept between two drains; all are counted.
        max_reports_per_step: violations written out in full per drain; the rest are counted.
    """

    mode: Mode = "log"
    backend: str | None = None
    read_bytes: int = 16
    verify_bytes_at_tail: bool = False
    track_lifetime: bool = True
    check_tokens: bool | None = None
    token_table_share: float = 0.01
    ring_capacity: int = 1024
    max_reports_per_step: int = 16

    def __post_init__(self) -> None:
        modes = get_args(Mode)
        if self.mode not in modes:
            raise ValueError(must_be("CanaryConfig", "mode", f"one of {', '.join(modes)}", repr(self.mode)))
        if self.backend is not None and self.backend not in BACKENDS:
            raise ValueError(must_be("CanaryConfig", "backend", f"one of {', '.join(BACKENDS)}", repr(self.backend)))
        for name in ("read_bytes", "ring_capacity", "max_reports_per_step"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(must_be("CanaryConfig", name, "an int", repr(value)))
            if value < 1:
                raise ValueError(must_be("CanaryConfig", name, "at least 1", str(value)))
        if not 0 <= self.token_table_share <= 1:
            raise ValueError(must_be("CanaryConfig", "token_table_share", "in [0, 1]", str(self.token_table_share)))
