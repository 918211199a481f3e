"""The decisions of every launch: how many programs, and in which interpreter."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from kv_canary.backends import compute_capability

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    # A Triton before 3.4.
    gdc_launch_dependents = gdc_wait = None

# Programs per multiprocessor of a persistent grid, and the grid of the interpreter, where a program costs about 1 ms.
PROGRAMS_PER_SM = 64
INTERPRETER_PROGRAMS = 3
# Lanes of a program that takes on all of the work where that saves a launch: few sizes, as each is a kernel to compile.
# Fewer lanes in the interpreter, so that batches of a size that it can take go both ways.
ONE_PROGRAM_LANES = (128, 256, 512)
INTERPRETER_LANES = (32, 64)
# Tiles of a request whose sums are read at once, where a tile goes on from those before it: powers of two.
TILES_AT_ONCE = 128
INTERPRETER_TILES = 4
# Others that each token of a tile is compared with at a time: as many as fit into a program's registers.
OTHERS = 16
INTERPRETER_OTHERS = 32
# Entries that are few; see `few_entries`.
FEW_ENTRIES = 1 << 16
INTERPRETER_ENTRIES = 48


@triton.jit
def begin(OVERLAPS: tl.constexpr):
    """Wait until what was launched before the kernel is over, and let what comes next be prepared.

    With programmatic dependent launch, a kernel is brought to the device while the one before it still runs.
    """
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()


def overlapping(device: torch.device) -> dict[str, Any]:
    """Return the options of a launch whose kernel calls `begin`."""
    capability = compute_capability(device)
    if gdc_wait is not None and capability is not None and capability >= (9, 0):
        return {"OVERLAPS": True, "launch_pdl": True}
    return {"OVERLAPS": False}


@functools.cache
def max_programs(device: torch.device, per_sm: int = PROGRAMS_PER_SM) -> int:
    """Return how many programs a persistent grid has at most on `device`, with so many per multiprocessor."""
    if device.type != "cuda":
        return INTERPRETER_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count * per_sm


def persistent_grid(num_tiles: int, device: torch.device, per_sm: int = PROGRAMS_PER_SM) -> tuple[int]:
    """Return the grid of a kernel that loops over up to `num_tiles` tiles."""
    return (max(1, min(num_tiles, max_programs(device, per_sm))),)


def few_entries(device: torch.device) -> int:
    """Return how many entries are so few that saving a launch matters more than saving work."""
    return INTERPRETER_ENTRIES if compute_capability(device) is None else FEW_ENTRIES


def tiles_at_once(device: torch.device) -> int:
    """Return of how many tiles of a request the sums are read at once."""
    return INTERPRETER_TILES if compute_capability(device) is None else TILES_AT_ONCE


def others_at_once(device: torch.device) -> int:
    """Return with how many others each token of a tile is compared at a time."""
    return INTERPRETER_OTHERS if compute_capability(device) is None else OTHERS


def one_program_lanes(count: int, device: torch.device) -> int:
    """Return the lanes of a program that takes on `count` elements alone; 0 where they are too many for one."""
    sizes = INTERPRETER_LANES if compute_capability(device) is None else ONE_PROGRAM_LANES
    return next((lanes for lanes in sizes if count <= lanes), 0)


@triton.jit
def divide(x, divisor, bits, POWERS: tl.constexpr):
    """x // divisor and x % divisor of uint32 x, without a division where divisors are powers of two, 1 << bits."""
    if POWERS:
        quotient, rest = x >> tl.cast(bits, tl.uint32), x & (tl.cast(divisor, tl.uint32) - 1)
    else:
        quotient, rest = x // tl.cast(divisor, tl.uint32), x % tl.cast(divisor, tl.uint32)
    return quotient, rest
