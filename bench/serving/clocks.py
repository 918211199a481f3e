"""What a canary takes of the host's and the device's time, in an engine that serves."""

from __future__ import annotations

import functools
import gc
import importlib
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

# What an engine calls of a canary's; none of these calls another one.
_HOST = (
    "kv_canary.engines.vllm.session:Session._begin_step",
    "kv_canary.engines.vllm.session:Session.before",
    "kv_canary.engines.vllm.session:Session.after",
    "kv_canary.engines.vllm.session:Session._take_output",
    "kv_canary.engines.sglang.session:Session.note",
    "kv_canary.engines.sglang.session:Session._before",
    "kv_canary.engines.sglang.session:Session._after",
    "kv_canary.engines.sglang.completion:Ended._note",
    "kv_canary.engines.sglang.lifetime:Lifetime._note_slots",
    "kv_canary.engines.transformers_session:Session._before",
    "kv_canary.engines.transformers_session:Session._after",
    "sglang.srt.kv_canary.runner.canary_manager:CanaryManager._pre_ops_outside_graph",
    "sglang.srt.kv_canary.runner.canary_manager:CanaryManager._post_ops_outside_graph",
)
# Those of them that launch, so that events around them say what the stream was taken up with.
_STREAM = ("Session._before", "Session._after")


class Clock:
    """Times the canary's calls from its making to `stop`.

    Args:
        events: whether CUDA events are recorded around what launches, which takes time of its own.

    Attributes:
        ns, calls: nanoseconds in them so far, and how many there were.
    """

    def __init__(self, *, events: bool) -> None:
        self._undo: list[Callable[[], None]] = []
        self.ns = self.calls = 0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        for place in _HOST:
            module, _, path = place.partition(":")
            try:
                owner: Any = importlib.import_module(module)
                *outer, name = path.split(".")
                owner = functools.reduce(getattr, outer, owner)
                original = getattr(owner, name)
            except (ImportError, AttributeError):
                # That canary is not here.
                continue
            setattr(owner, name, self._timed(original, events=events and path in _STREAM))
            self._undo.append(functools.partial(setattr, owner, name, original))

    def stop(self, steps: int) -> dict[str, float]:
        """Take the clock away, and return microseconds a step: `host_us`, and `stream_us` where there were events."""
        for undo in self._undo:
            undo()
        found = {"host_us": self.ns / 1000 / max(steps, 1)}
        if self._events:
            torch.cuda.synchronize()
            found["stream_us"] = sum(a.elapsed_time(b) for a, b in self._events) * 1000 / max(steps, 1)
        return found

    def _timed(self, original: Callable[..., Any], *, events: bool) -> Callable[..., Any]:
        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if events:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
            began = time.perf_counter_ns()
            try:
                return original(*args, **kwargs)
            finally:
                self.ns += time.perf_counter_ns() - began
                self.calls += 1
                if events:
                    end.record()
                    self._events.append((start, end))

        return timed


class Collections:
    """The passes of Python's garbage collector, as they happen."""

    def __init__(self) -> None:
        # (generation, when it began, how long it took), in nanoseconds.
        self.seen: list[tuple[int, int, int]] = []
        self._began = 0
        gc.callbacks.append(self._see)

    def within(self, first: int, last: int) -> dict[str, float]:
        """Return the longest pass and all together, in milliseconds, of those that began in [first, last]."""
        took = [ns / 1e6 for _, at, ns in self.seen if first <= at <= last]
        self.seen.clear()
        return {"gc_longest_ms": max(took, default=0.0), "gc_ms": sum(took)}

    def _see(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter_ns()
        else:
            self.seen.append((info["generation"], self._began, time.perf_counter_ns() - self._began))


class DeviceOperations:
    """Every kernel, copy and fill that the device runs, by name, from its making to `stop`."""

    def __init__(self) -> None:
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._profiler.__enter__()

    def stop(self, steps: int) -> dict[str, dict[str, float]]:
        """Return of each how many there are a step, and their microseconds a step."""
        torch.cuda.synchronize()
        self._profiler.__exit__(None, None, None)
        count: Counter[str] = Counter()
        took: Counter[str] = Counter()
        for event in self._profiler.events():
            if event.device_type.name == "CUDA":
                count[event.name] += 1
                took[event.name] += event.device_time
        return {
            name: {"count": count[name] / max(steps, 1), "us": took[name] / max(steps, 1)} for name in sorted(count)
        }
