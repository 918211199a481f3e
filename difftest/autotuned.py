"""Kernels that Triton tunes: where there is no device to time their configurations on, the first one is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def never_time() -> Callable[[], None]:
    """Let `triton.autotune` find all configurations equally fast, unlaunched; return what ends that."""
    from triton.runtime.autotuner import Autotuner

    autotuner: Any = Autotuner
    bench = autotuner._bench
    autotuner._bench = _alike

    def end() -> None:
        autotuner._bench = bench

    return end


@contextmanager
def untimed() -> Iterator[None]:
    """See `never_time`; inside the block."""
    end = never_time()
    try:
        yield
    finally:
        end()


def _alike(_autotuner: Any, *_: Any, **__: Any) -> list[float]:
    return [0.0, 0.0, 0.0]
