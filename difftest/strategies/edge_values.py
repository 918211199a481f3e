"""Values that no table should hold."""

from __future__ import annotations

INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1

# Slot codes, the edges of 32 and 64 bits, and one far beyond any pool.
HOSTILE = (-1, -2, -3, 1 << 31, (1 << 31) - 1, 1 << 32, (1 << 40) + 7, INT64_MAX, INT64_MIN)
# For tables of 32 bits.
HOSTILE_32 = (-1, -2, -(1 << 31), (1 << 31) - 1, 1 << 24)
