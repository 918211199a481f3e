"""The processes of a campaign: tasks run in parallel, and their results taken in order."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

import torch

from kv_canary.constants import BACKENDS
from kv_canary.difftest.ending import until_ended

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

    So what is taken depends on the tasks alone. Returns whether Ctrl-C or SIGTERM stopped it; what is under way is not
    taken.
    """
    waiting = iter(tasks)
    pending = [pool.submit(function, task) for task in islice(waiting, ahead)]
    try:
        with until_ended():
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


def in_fork(work: Callable[[], dict[str, Any]], *, patience: float) -> dict[str, Any]:
    """Return what `work` returns in a copy of this process, which is as fresh for the next; it goes by JSON.

    Where it raises, hangs or ends there, that is all that is returned, in words, under "error".

    Args:
        work: what is done.
        patience: seconds that it may take.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # Nothing may leave this block: the caller goes on in the parent.
        try:
            os.close(reading)
            try:
                done = work()
            except Exception:
                done = {"error": traceback.format_exc()}
            with os.fdopen(writing, "w") as pipe:
                json.dump(done, pipe)
        finally:
            os._exit(0)
    os.close(writing)
    parts, deadline = [], time.monotonic() + patience
    try:
        while True:
            ready, _, _ = select.select([reading], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                os.kill(child, signal.SIGKILL)
                return {"error": f"the engine hung for {patience:g} s"}
            part = os.read(reading, 1 << 16)
            if not part:
                break
            parts.append(part)
    finally:
        os.close(reading)
        os.waitpid(child, 0)
    text = b"".join(parts)
    found: dict[str, Any] = json.loads(text) if text else {"error": "the engine's process ended"}
    return found


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
