"""What every launch needs to decide: how many programs, and in which interpreter."""

from __future__ import annotations

import functools

import torch

# Programs per multiprocessor of a persistent grid, and the grid of the interpreter, where a program costs about 1 ms.
PROGRAMS_PER_SM = 64
INTERPRETER_PROGRAMS = 3
# Lanes of work that one program takes on where that saves a launch. Fewer in the interpreter, so that batches of a size
# that it can take go both ways.
ONE_PROGRAM_LANES = 1024
INTERPRETER_LANES = 64


@functools.cache
def max_programs(device: torch.device) -> int:
    """Return how many programs a persistent grid has at most on `device`."""
    if device.type != "cuda":
        return INTERPRETER_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count * PROGRAMS_PER_SM


def persistent_grid(num_tiles: int, device: torch.device) -> tuple[int]:
    """Return the grid of a kernel that loops over up to `num_tiles` tiles."""
    return (max(1, min(num_tiles, max_programs(device))),)


def one_program_lanes(device: torch.device) -> int:
    """Return how many lanes of work one program takes on where that saves a launch."""
    return ONE_PROGRAM_LANES if device.type == "cuda" else INTERPRETER_LANES
