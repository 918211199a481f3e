"""The times of a forward's parts, by CUDA events and by the host's clock, from outside of engine and canary."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch

from kv_canary.bench.engine_served import Engine
from kv_canary.engines.patches import Patches

PHASES = ("begin", "head", "tail", "end")
# Longer than the host takes to launch what comes before the model.
HOLD_MS = 5.0
# No GPU's clock is faster.
_CYCLES_PER_MS = 2_000_000


@dataclass(kw_only=True)
class ForwardTimes:
    """One forward: when what began and ended, by name, first by the host's clock in ns, and by event on the device.

    Names are "start" and "stop" for the engine's call, and for each phase of the canary "<phase> begins" and "ends". A
    forward that is repeated is begun in the call that runs HEAD: all of that counts as HEAD.

    Args:
        decode: whether it had one new token a request.
        held: whether the host had launched all that comes before the model while the device still waited.
    """

    decode: bool
    held: bool = True
    host: dict[str, int] = field(default_factory=dict)
    events: dict[str, torch.cuda.Event] = field(default_factory=dict)

    @property
    def guarded(self) -> bool:
        """Whether a canary ran around it."""
        return "tail ends" in self.host

    def between(self, first: str, last: str) -> float:
        """Return the time from one to the other in milliseconds: the device's where events were recorded."""
        if self.events:
            return float(self.events[first].elapsed_time(self.events[last]))
        return (self.host[last] - self.host[first]) / 1e6

    def parts(self) -> dict[str, float]:
        """Return milliseconds by part: the forward's own, the canary's, and within that its phases and the adapter."""
        if not self.guarded:
            return {"forward": self.between("start", "stop")}
        phases = {name: self.between(f"{name} begins", f"{name} ends") for name in PHASES}
        # The adapter works before `begin`, and a little between the phases.
        canary = self.between("start", "head ends") + self.between("tail begins", "stop")
        return {
            "forward": self.between("head ends", "tail begins"),
            "canary": canary,
            **phases,
            "adapter": canary - sum(phases.values()),
        }


class Watch:
    """Takes the times of an engine's forwards inside a `with` block; `forwards` holds them.

    With `events`, the device is made to wait before each forward, so that the host is ahead of it and what lies between
    two events is the device's work, without the gaps in which it waits for a launch. Without, only the host's clock is
    read. On a CPU both are the host's clock.
    """

    def __init__(self, engine: Engine, *, events: bool) -> None:
        self.forwards: list[ForwardTimes] = []
        self._engine = engine
        stream = engine.processor.inputs_and_outputs.compute_stream
        self._stream: torch.cuda.Stream | None = stream if events else None
        self._now: ForwardTimes | None = None
        self._exit = ExitStack()

    def __enter__(self) -> Self:
        patches = Patches()
        self._exit.callback(patches.undo_all)
        patches.wrap(self._engine.processor.model_runner, "compute_batch", self._compute)
        if self._engine.canary is not None:
            forward = self._engine.canary.manager.forward()
            for name in PHASES:
                patches.wrap(forward, name, self._phase(name))
            patches.wrap(forward, "repeat", self._repeat)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exit.close()
        if self._stream is not None:
            self._stream.synchronize()

    def _compute(self, original: Callable[..., Any], *args: Any) -> Any:
        requests = self._engine.processor.inputs_and_outputs.requests_in_batch
        self._now = now = ForwardTimes(decode=all(f.query_length == 1 for f in requests))
        if self._stream is not None:
            # The engine prepares a forward on another stream.
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with torch.cuda.stream(self._stream):
                torch.cuda._sleep(int(HOLD_MS * _CYCLES_PER_MS))
        self._mark("start")
        result = original(*args)
        self._mark("stop")
        self._now = None
        self.forwards.append(now)
        return result

    def _phase(self, name: str) -> Callable[..., Any]:
        def timed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._mark(f"{name} begins")
            result = original(*args, **kwargs)
            self._mark(f"{name} ends")
            if name == "head":
                self._see_whether_held()
            return result

        return timed

    def _repeat(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for name in ("begin begins", "begin ends", "head begins"):
            self._mark(name)
        result = original(*args, **kwargs)
        # Where it is not repeated, `begin` and `head` come now, with marks of their own.
        if result:
            self._mark("head ends")
            self._see_whether_held()
        return result

    def _see_whether_held(self) -> None:
        if self._now is not None and self._stream is not None:
            self._now.held = not self._now.events["start"].query()

    def _mark(self, name: str) -> None:
        if self._now is None:
            return
        if self._stream is not None:
            event = torch.cuda.Event(enable_timing=True)
            event.record(self._stream)
            self._now.events[name] = event
        self._now.host[name] = time.perf_counter_ns()
