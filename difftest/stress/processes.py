"""The processes of a campaign: tasks run in parallel, and their results taken in order."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

import torch

from kv_canary.constants import BACKENDS

Task = TypeVar("Task")
Result = TypeVar("Result")


@contextmanager
def processes(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Yield `jobs` processes, which are waited for at the end."""
    # Not forked: a forked process cannot use a GPU that its parent has touched.
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_begin_process)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def run_tasks(
    function: Callable[[Task], Result],
    tasks: Iterable[Task],
    *,
    pool: ProcessPoolExecutor,
    ahead: int,
    take: Callable[[Result], bool],
) -> bool:
    """Run tasks, so many at once, and hand their results to `take`, in order, until it returns True.

    So what is taken depends on the tasks alone. Returns whether Ctrl-C stopped it; what is under way is not taken.
    """
    waiting = iter(tasks)
    pending = [pool.submit(function, task) for task in islice(waiting, ahead)]
    try:
        while pending:
            if take(pending.pop(0).result()):
                return False
            pending += [pool.submit(function, task) for task in islice(waiting, 1)]
    except KeyboardInterrupt:
        return True
    finally:
        for future in pending:
            future.cancel()
    return False


def prepare_backend(device: str, backend: str) -> None:
    """Check that there is such a device and backend, and let Triton be interpreted on a CPU; before any kernel import.

    Raises:
        ValueError: there is not.
    """
    if backend not in BACKENDS:
        raise ValueError(f"kv-canary: stress: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("kv-canary: stress: device must be there, got cuda on a machine without a CUDA GPU")
    if device == "cpu" and backend in ("triton", "shadow"):
        os.environ["TRITON_INTERPRET"] = "1"


def _begin_process() -> None:
    # Ctrl-C is the parent's to take.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    # What is found is handed back; it need not be logged too.
    logging.disable(logging.CRITICAL)
