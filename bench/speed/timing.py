"""Timing: CUDA-graph replays or launches one by one, several things by turns, medians and their spread."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kv_canary.backends import interpreting

Launch = Callable[[], object]

# One thing's share of a round is at most this long, and it is launched at least so often in it.
ROUND_MS = 200.0
FEWEST = 3
# Read before a round: the host then queues its launches while the device is busy, and before each cold launch.
QUEUE_AHEAD_BYTES = 1 << 30
_KERNEL, _MEMCPY, _MEMSET = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class Time:
    """Milliseconds: the median of the rounds' medians, and the 10th and 90th of 100 parts of all samples."""

    ms: float
    p10_ms: float
    p90_ms: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Launchable:
    """Something to time.

    Args:
        launch: does it once.
        launches: kernels, copies and fills that the device is given for it; None where nobody can tell.
    """

    launch: Launch
    launches: int | None


class Clock:
    """Times things on one device.

    Args:
        device: where they run.
        rounds: how often each has its turn.
        replays: launches of each in a round, at most.
    """

    def __init__(self, device: torch.device, *, rounds: int, replays: int) -> None:
        self.device, self.rounds, self.replays = device, rounds, replays
        self._on_gpu = device.type == "cuda"
        size = QUEUE_AHEAD_BYTES if self._on_gpu else 8
        self._ahead = torch.ones(size // 4, dtype=torch.float32, device=device)

    def by_turns(self, things: Mapping[str, Launch], *, cold: bool = False) -> dict[str, Time]:
        """Time several things, one after the other in every round.

        Args:
            things: by name. On a GPU the device's time of each launch is taken, from the events around it, with the
                host ahead of the device; on a CPU the host's.
            cold: whether to read much more than the L2 cache holds before each launch.
        """
        samples: dict[str, list[list[float]]] = {name: [] for name in things}
        replays = {name: self._affordable(launch) for name, launch in things.items()}
        for _ in range(self.rounds):
            for name, launch in things.items():
                samples[name].append(self._round(launch, replays[name], cold=cold))
        return {name: _summary(rounds) for name, rounds in samples.items()}

    def from_host(self, launch: Launch) -> tuple[float, float]:
        """Return the milliseconds of launching something over and over, until it is done and until the host is free."""
        count = self._affordable(launch)
        self._wait()
        start = time.perf_counter()
        for _ in range(count):
            launch()
        launched = time.perf_counter()
        self._wait()
        return (time.perf_counter() - start) * 1e3 / count, (launched - start) * 1e3 / count

    def warm_up(self, seconds: float) -> None:
        """Keep the device busy, so that its clocks are up."""
        until = time.monotonic() + seconds
        while self._on_gpu and time.monotonic() < until:
            for _ in range(20):
                self._ahead.sum()
            self._wait()

    def _affordable(self, launch: Launch) -> int:
        launch()
        self._wait()
        start = time.perf_counter()
        launch()
        self._wait()
        once = (time.perf_counter() - start) * 1e3
        return max(min(FEWEST, self.replays), min(self.replays, int(ROUND_MS / max(once, 1e-6))))

    def _round(self, launch: Launch, count: int, *, cold: bool) -> list[float]:
        if not self._on_gpu:
            times = []
            for _ in range(count):
                began = time.perf_counter()
                launch()
                times.append((time.perf_counter() - began) * 1e3)
            return times
        events = []
        self._ahead.sum()
        launch()
        for _ in range(count):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            if cold:
                self._ahead.sum()
            start.record()
            launch()
            end.record()
            events.append((start, end))
        self._wait()
        return [start.elapsed_time(end) for start, end in events]

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self.device)


def launchable(launch: Launch, *, device: torch.device, graph: bool) -> Launchable:
    """Return a thing to time: a CUDA graph that replays `launch`, or `launch` itself.

    It is launched once or twice here, so that every kernel is compiled.
    """
    launch()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        captured, nodes = _capture(launch)
        # Without a graph the count is that of the same launches.
        return Launchable(launch=captured.replay if graph else launch, launches=nodes)
    if not interpreting():
        return Launchable(launch=launch, launches=None)
    with _interpreted_launches() as seen:
        launch()
    return Launchable(launch=launch, launches=len(seen))


def _capture(launch: Launch) -> tuple[torch.cuda.CUDAGraph, int | None]:
    """Return a graph of `launch`, and how many kernels, copies and fills it has."""
    try:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
    except TypeError:
        # Before torch 2.8 a graph's nodes cannot be asked for.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        return graph, None
    with torch.cuda.graph(graph):
        launch()
    nodes = _count_nodes(graph.raw_cuda_graph())
    graph.instantiate()
    return graph, nodes


def _count_nodes(graph: int) -> int:
    driver = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_size_t(0)
    _succeed(driver.cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count)))
    nodes = (ctypes.c_void_p * count.value)()
    _succeed(driver.cuGraphGetNodes(ctypes.c_void_p(graph), nodes, ctypes.byref(count)))
    kind = ctypes.c_int(0)
    working = 0
    for node in nodes:
        _succeed(driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
        working += kind.value in (_KERNEL, _MEMCPY, _MEMSET)
    return working


def _succeed(status: int) -> None:
    if status:
        raise RuntimeError(f"kv-canary: bench: the CUDA driver refused to list a graph's nodes: error {status}")


@contextmanager
def _interpreted_launches() -> Iterator[list[str]]:
    """Note the name of every kernel that Triton's interpreter runs inside the block."""
    from triton.runtime import interpreter

    seen: list[str] = []
    call = interpreter.GridExecutor.__call__

    def counted(self: Any, *arguments: Any, **keywords: Any) -> Any:
        seen.append(self.fn.__name__)
        return call(self, *arguments, **keywords)

    interpreter.GridExecutor.__call__ = counted
    try:
        yield seen
    finally:
        interpreter.GridExecutor.__call__ = call


def _summary(rounds: list[list[float]]) -> Time:
    samples = [x for times in rounds for x in times]
    tenths = statistics.quantiles(samples, n=10, method="inclusive") if len(samples) > 1 else samples * 9
    return Time(ms=statistics.median(statistics.median(times) for times in rounds), p10_ms=tenths[0], p90_ms=tenths[8])
