"""Agreement between ranks: digests that are compared, and reactions that are agreed on; see docs/ranks.md."""

from __future__ import annotations

from kv_canary.ranks.compare import RankDifference, RankReport, RankStand
from kv_canary.ranks.group import RankGroup
from kv_canary.ranks.verdict import RankVerdict, RankViolationError
from kv_canary.ranks.watch import RankWatch

__all__ = [
    "RankDifference",
    "RankGroup",
    "RankReport",
    "RankStand",
    "RankVerdict",
    "RankViolationError",
    "RankWatch",
]
