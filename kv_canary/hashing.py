"""The hashes of single words, on the host."""

from __future__ import annotations

from kv_canary.constants import CHAIN_MULTIPLIER, MASK64, MIX_ADD, MIX_MUL_1, MIX_MUL_2


def mix(x: int) -> int:
    """Return splitmix64 of `x` (Steele, Lea & Flood 2014); both in [0, 2**64)."""
    z = (x + MIX_ADD) & MASK64
    z = ((z ^ (z >> 30)) * MIX_MUL_1) & MASK64
    z = ((z ^ (z >> 27)) * MIX_MUL_2) & MASK64
    return z ^ (z >> 31)


def next_chain(previous: int, identity: int) -> int:
    """Return the chain of an identity behind `previous`; all in [0, 2**64)."""
    return (previous * CHAIN_MULTIPLIER + mix(identity)) & MASK64
