"""Launches that come again and again, replayed from CUDA graphs: one call of the driver instead of one a kernel."""

from __future__ import annotations

import functools
import gc
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress

import torch

Launch = Callable[[], None]

# How often launches come before they are captured: once they have run, all of their kernels are compiled and loaded.
RUNS_BEFORE_CAPTURE = 2
# Graphs that are kept, and launches whose runs are counted, at most.
MAX_GRAPHS = 256
_MAX_COUNTED = 1024
# How often what has no graph comes before it takes the place of what was longest not replayed, where all are taken: a
# capture costs as much as some runs without.
RUNS_BEFORE_EXCHANGE = 64
# Runs without a graph, or steps, behind a capture that has failed before the next one is tried, which may then succeed:
# memory was short, say. And captures that may fail one behind the other before none is tried any more.
RUNS_BEFORE_RETRY, MOST_FAILURES = 1024, 8


@functools.lru_cache(maxsize=4096)
def round_up(count: int, most: int) -> int:
    """Return `count` or more: a power of two from 16 on, or the most that there is. Few graphs then serve all."""
    return min(max(16, 1 << max(count - 1, 0).bit_length()), most)


def rounded(most: int) -> list[int]:
    """Return every number that `round_up` gives, smallest first."""
    sizes = [round_up(1, most)]
    while sizes[-1] < most:
        sizes.append(round_up(sizes[-1] + 1, most))
    return sizes


def layout_of(table: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    """Return where a tensor lies, and how."""
    return table.data_ptr(), table.shape, table.stride()


class Attempts:
    """Whether a capture may be tried: not for a while behind one that failed, and never behind several in a row.

    Attributes:
        given_up: whether none is tried any more.
    """

    def __init__(self) -> None:
        self.given_up = False
        self._failures = self._next = 0

    def may_try(self, now: int) -> bool:
        """Return whether one may be tried at `now`, a count of runs, or of steps, that never falls."""
        return not self.given_up and now >= self._next

    def failed(self, now: int) -> None:
        """Take in that one has failed at `now`."""
        self._failures += 1
        self._next, self.given_up = now + RUNS_BEFORE_RETRY, self._failures >= MOST_FAILURES

    def succeeded(self) -> None:
        """Take in that one has not failed."""
        self._failures = 0


class Replays:
    """Runs launches: the first times as they are, then by a graph.

    Args:
        capture: returns what replays a launch without calling it; see `capture_graph`. None: launches run as they are.
        failed: told what a capture raises, whose launches then go on as they are; None: nobody is.

    Attributes:
        rounds_up: whether launches should be made for rounded sizes, because they may be replayed; also where captures
            fail, since kernels were compiled for these.
    """

    def __init__(
        self, capture: Callable[[Launch], Launch] | None, *, failed: Callable[[Exception], None] | None = None
    ) -> None:
        self._capture, self._failed = capture, failed
        self.rounds_up = capture is not None
        # What was replayed last comes last.
        self._graphs: OrderedDict[Hashable, Launch] = OrderedDict()
        self._runs: OrderedDict[Hashable, int] = OrderedDict()
        # Runs without a graph.
        self._attempts, self._plain = Attempts(), 0

    def forget(self) -> None:
        """Destroy every graph; launches run as they are until they have come again."""
        self._graphs.clear()
        self._runs.clear()

    def run(self, key: Hashable, launch: Launch) -> None:
        """Launch what `launch` does.

        Args:
            key: two launches with the same key must do the same, with the same memory and the same numbers.
            launch: launches on the current stream; it must neither wait for the device nor allocate on it.
        """
        if self._capture is None or _capturing():
            launch()
        elif (replay := self._graphs.get(key)) is not None:
            self._graphs.move_to_end(key)
            replay()
        else:
            launch()
            self._count(key, launch)

    def is_settled(self, key: Hashable) -> bool:
        """Whether launches of this key have come so often that they are not captured any more."""
        return self._capture is None or self._attempts.given_up or key in self._graphs

    def settle(self, launch: Launch) -> Launch:
        """Return what launches the same from now on; all of its kernels must have run before.

        Raises:
            Exception: whatever a capture raises.
        """
        return launch if self._capture is None or self._attempts.given_up else self._capture(launch)

    def _count(self, key: Hashable, launch: Launch) -> None:
        self._plain += 1
        runs, is_full = self._runs.pop(key, 0) + 1, len(self._graphs) >= MAX_GRAPHS
        enough = runs >= (RUNS_BEFORE_EXCHANGE if is_full else RUNS_BEFORE_CAPTURE)
        if enough and self._capture is not None and self._attempts.may_try(self._plain):
            try:
                # What is made on the way, and kept, can then be changed in whatever mode the engine is.
                with torch.inference_mode(False):
                    graph = self._capture(launch)
            except Exception as error:
                self._attempts.failed(self._plain)
                if self._failed is not None:
                    self._failed(error)
            else:
                self._attempts.succeeded()
                if is_full:
                    self._graphs.popitem(last=False)
                self._graphs[key] = graph
                return
        self._runs[key] = runs
        if len(self._runs) > _MAX_COUNTED:
            self._runs.popitem(last=False)


class CanaryGraph(torch.cuda.CUDAGraph):
    """A CUDA graph of the canary's: who counts an engine's replays can tell these apart."""


class _Streams(threading.local):
    """The streams that a thread captures on and branches to, by device: two threads never capture on one.

    PyTorch hands out a few dozen of them over and over, those of the engine among them: one that is asked for anew at
    every capture would be somebody's before long, and what is launched there meanwhile would go into the graph.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, str], torch.cuda.Stream] = {}
        self._bytes: dict[int, torch.Tensor] = {}

    def of(self, purpose: str) -> torch.cuda.Stream:
        """Return the stream of the current device for `purpose`."""
        key = (torch.cuda.current_device(), purpose)
        if key not in self._made:
            self._made[key] = torch.cuda.Stream()
        return self._made[key]

    def byte(self) -> torch.Tensor:
        """Return a byte on the current device that nobody reads."""
        device = torch.cuda.current_device()
        if device not in self._bytes:
            self._bytes[device] = torch.zeros(1, dtype=torch.uint8, device=f"cuda:{device}")
        return self._bytes[device]


_streams = _Streams()


def capture_graph(launch: Launch) -> Launch:
    """Return what replays `launch` from a CUDA graph, on the stream that is current then.

    Nothing runs now, and other threads may go on using the device. `launch` must have run before.

    Raises:
        Exception: whatever the capture raises; nothing of it is left then.
    """
    unread = _streams.byte()
    current, stream = torch.cuda.current_stream(), _streams.of("capture")
    # Before 2.13, PyTorch resets at every capture what an engine's graph that samples reads its random numbers' offset
    # from: not before a graph that runs now has read it, and before the next replay sets it.
    stream.wait_stream(current)
    # What the collector would destroy now may be a graph of somebody's, which a capture does not survive.
    collects = gc.isenabled()
    gc.disable()
    try:
        # A capture needs a stream of its own, which nothing is launched on.
        with torch.cuda.stream(stream):
            try:
                graph = _captured(launch)
            except Exception:
                _settle_generator(unread)
                raise
    finally:
        if collects:
            gc.enable()
    current.wait_stream(stream)
    return graph.replay


def _captured(launch: Launch) -> CanaryGraph:
    """Return a graph of `launch`, captured on the current stream."""
    graph, memory = CanaryGraph(), torch.cuda.graph_pool_handle()
    try:
        graph.capture_begin(memory, capture_error_mode="thread_local")
        try:
            launch()
        finally:
            graph.capture_end()
    except Exception:
        # Where the device gave the capture up, PyTorch's allocator still takes it to be under way, and would free
        # nothing any more of what streams share. Where it does not, this is an error.
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), memory)
        raise
    return graph


def _settle_generator(unread: torch.Tensor) -> None:
    """Take back that PyTorch's generator is in a capture: where the device gave one up, it is until one succeeds.

    Before 2.13, who samples outside a graph would get an error from it meanwhile.
    """

    def write() -> None:
        unread.zero_()

    with suppress(Exception):
        _captured(write)


class Branch:
    """Launches that a graph may run beside those behind them on the stream; where none is captured, they run before."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Launch inside the block what needs all that was launched before it, and what nothing needs before `join`."""
        if not _capturing():
            yield
            return
        stream = _streams.of("branch")
        stream.wait_stream(torch.cuda.current_stream())
        self._stream = stream
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """Let what is launched from here on come behind what was launched beside."""
        stream, self._stream = self._stream, None
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)


class Beside:
    """A stream of the canary's own: what is launched there runs beside what comes on the forwards' until `join`.

    To launch there takes some 50 us more of the host's time than to launch in order.

    Args:
        device: whose forwards they are, a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        # Not torch.cuda.Event, whose calls take several times as long.
        self._begun, self._done = torch.Event(device), torch.Event(device)
        self._is_open = False

    def run(self, launch: Launch) -> None:
        """Launch behind what is on the current stream already, and beside what comes next on it."""
        current, stream = torch.cuda.current_stream(), _streams.of("beside")
        self._begun.record()
        self._begun.wait(stream)
        # Cheaper than the context.
        torch.cuda.set_stream(stream)
        try:
            launch()
        finally:
            self._done.record()
            torch.cuda.set_stream(current)
            self._is_open = True

    def join(self) -> bool:
        """Let what comes on the current stream wait for what was launched beside; False: it does already."""
        if not self._is_open:
            return False
        self._done.wait()
        self._is_open = False
        return True


def _capturing() -> bool:
    """Whether the current stream is being captured: then all of it belongs to that graph."""
    return _has_gpu() and torch.cuda.is_current_stream_capturing()


@functools.cache
def _has_gpu() -> bool:
    return torch.cuda.is_available()
