"""Numbers that every part shares: hash constants, reasons, tags, status bits and slot codes."""

from __future__ import annotations

from enum import IntEnum, IntFlag

MASK64 = (1 << 64) - 1

# Who runs an op: two implementations, one that compares them, and the choice by device. See kv_canary.backends.
SHADOW, AUTO = "shadow", "auto"
BACKENDS = ("reference", "triton", SHADOW, AUTO)

# splitmix64: Steele, Lea & Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
MIX_ADD = 0x9E3779B97F4A7C15
MIX_MUL_1 = 0xBF58476D1CE4E5B9
MIX_MUL_2 = 0x94D049BB133111EB

# The chain over a prefix: chain(-1) = ANCHOR, chain(i) = chain(i-1) * CHAIN_MULTIPLIER + mix(identity(i)), mod 2**64.
ANCHOR = 0x6B765F63616E6172
CHAIN_MULTIPLIER = 0x9E3779B97F4A7C15

RECORD_WORDS = 4
KV_WORD = 2
WRITER_WORD = 3
RESOLVED_WORDS = 2
RUN_WORDS = 2

# The WRITER word of a record: bit 63 retired, then 39 bits of step, then 24 bits of owner.
OWNER_BITS = 24
STEP_BITS = 39
OWNER_MASK = (1 << OWNER_BITS) - 1
STEP_MASK = (1 << STEP_BITS) - 1
RETIRED_BIT = 63

# Slot codes in plans. Slot 0 is padding.
HEAD_OF_CHAIN = -1
UNCHECKED = -2
BAD_SLOT = -3

# Resolved slots begin a run at every so many entries, and wherever else one begins.
RUN_ENTRIES = 64

# A strided plan keeps or skips whole blocks of this many positions.
STRIDE_BLOCK = 16


class Reason(IntFlag):
    """Why a record or a write was reported; several may hold at once."""

    CHAIN = 1
    POSITION = 2
    K = 4
    V = 8
    TOKEN = 16
    WRITE_TOKEN = 32
    WRITE_POSITION = 64
    UNMAPPED = 128
    SLOT_RANGE = 256
    NEVER_WRITTEN = 512
    FREED = 1024
    OVERWRITE = 2048
    PREFIX = 4096
    BATCH = 8192
    SEAL_K = 16384
    SEAL_V = 32768


class Tag(IntEnum):
    """The launch site that found a violation, and the row of `counters` that it counts in."""

    HEAD_FULL = 0
    TAIL_FULL = 1
    SWEEP_FULL = 2
    HEAD_SWA = 3
    TAIL_SWA = 4
    SWEEP_SWA = 5


class Status(IntFlag):
    """Flags for what a launch found wrong with its inputs; each launch assigns the whole word."""

    OVERFLOW = 1
    ROW_RANGE = 2
    LENGTH_RANGE = 4
    LUT_RANGE = 8


def to_signed(value: int) -> int:
    """Return the int64 whose bits are those of `value` mod 2**64."""
    value &= MASK64
    return value - (1 << 64) if value >> 63 else value
