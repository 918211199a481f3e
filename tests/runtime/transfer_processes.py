"""Two pairs of processes that do not end by themselves, as a program of its own.

It prints a line for each: what `pair` said, and how many processes it left behind. A program, because a process that
is spawned imports what it runs, and tests cannot be imported by name.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from kv_canary.difftest.stress.transfer import PREFILL, pair


def dies(rank: int, folder: str) -> None:
    """Prefill ends without a word, while decode waits for its message."""
    connect(rank, folder)
    if rank == PREFILL:
        os._exit(3)
    wait()


def hangs(rank: int, folder: str) -> None:
    """Both wait for each other."""
    connect(rank, folder)
    wait()


def connect(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, timeout=timedelta(hours=1)
    )


def wait() -> None:
    dist.recv(torch.zeros(1), 1 - dist.get_rank())


def outcome(target: Callable[[int, str], None], timeout: float) -> str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            pair(target, folder, timeout=timeout)
        except RuntimeError as error:
            return f"{str(error).splitlines()[0]}; left behind: {len(multiprocessing.active_children())}"
    return "both ended well"


if __name__ == "__main__":
    print(outcome(dies, 3600))
    print(outcome(hangs, 5))
