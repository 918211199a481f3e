"""The cost of a canary as it was measured: the host's time by the host's clock, the device's by events."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kv_canary.output import logger

# Steps whose times are remembered, steps from one that is timed on the device to the next, and timings remembered.
_MEMORY = 64
TIMED_EVERY = 64
_TIMINGS = 8
# Steps for which medians hold.
_FRESH = 16
# The device is said to wait for the host where it had nothing to do before this share of the steps that are remembered.
_NEARLY_ALL = 0.9


@dataclass(frozen=True, kw_only=True)
class CanaryCost:
    """What a step takes and what the canary takes of it, in microseconds: medians of the last steps.

    Args:
        step_us: from one step to the next.
        host_us: of the host, in the canary and its adapter.
        device_us: of the device, from the first launch of HEAD to the last of TAIL, the model left out; None where
            that was not timed: on a CPU, and before the first timing.
        device_waits: whether the device has nothing to do before nearly every step. Then the host's time is what steps
            take, and the canary's part of it comes off the throughput; else it is hidden behind the device's.
    """

    step_us: float
    host_us: float
    device_us: float | None = None
    device_waits: bool = False

    @property
    def share(self) -> float:
        """Share of a step's time that the canary takes: the device's, and the host's where the device waits for it."""
        taken = (self.device_us or 0.0) + (self.host_us if self.device_waits or self.device_us is None else 0.0)
        return taken / self.step_us if self.step_us else 0.0

    def __or__(self, other: CanaryCost) -> CanaryCost:
        """Return the larger of each number."""
        devices = [us for us in (self.device_us, other.device_us) if us is not None]
        return CanaryCost(
            step_us=max(self.step_us, other.step_us),
            host_us=max(self.host_us, other.host_us),
            device_us=max(devices, default=None),
            device_waits=self.device_waits or other.device_waits,
        )


class DeviceTimer:
    """Times what one step launches on the current stream, without waiting for it.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[torch.Event, torch.Event]] = []
        # Events that time nothing now, for the next step.
        self._spare: list[tuple[torch.Event, torch.Event]] = []

    @contextmanager
    def span(self) -> Iterator[None]:
        """Time what the block launches."""
        events = self._spare.pop() if self._spare else self._new_events()
        first, last = events
        first.record()
        yield
        last.record()
        self._spans.append(events)

    def _new_events(self) -> tuple[torch.Event, torch.Event]:
        first, last = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        return first, last

    def restart(self) -> None:
        """Time another step; what was timed before is dropped."""
        self._spare += self._spans
        self._spans = []

    @property
    def has_spans(self) -> bool:
        """Whether anything was timed; nothing is where all that a step launches is in the engine's own graph."""
        return bool(self._spans)

    def seconds(self) -> float | None:
        """Return how long all spans took together; None: the last is not over, or there is none."""
        if not self._spans or not self._spans[-1][1].query():
            return None
        return sum(first.elapsed_time(last) for first, last in self._spans) / 1000


class Costs:
    """Takes in what steps cost, and says when that is more than it should be.

    Args:
        target: share of a step's time that the canary may take.
        on_gpu: whether there is a device that could wait for the host.
    """

    def __init__(self, target: float, *, on_gpu: bool) -> None:
        self._target, self._on_gpu = target, on_gpu
        self._last: float | None = None
        # What each step took, what of it the host, and whether the device had nothing to do before it.
        self._steps: deque[tuple[float, float, bool]] = deque(maxlen=_MEMORY)
        self._device: deque[float] = deque(maxlen=_TIMINGS)
        self._said = False
        self._cost: CanaryCost | None = None
        # Steps since that was made.
        self._since = _FRESH

    def observe(self, *, now: float, host: float, waited: bool) -> None:
        """Take in a step.

        Args:
            now: when it ended, in seconds of a clock that does not jump.
            host: seconds that the canary has taken of the host since the step before.
            waited: whether the device had nothing to do when it began.
        """
        last, self._last = self._last, now
        if last is None:
            return
        self._steps.append((now - last, host, waited))
        self._since += 1

    def add_timing(self, seconds: float) -> None:
        """Take in how long the device took for what the canary launched in a step."""
        self._device.append(seconds)
        self._since = _FRESH
        self._warn()

    @property
    def cost(self) -> CanaryCost | None:
        """What a step costs, as of some steps ago; None before the second step."""
        if self._since >= _FRESH and self._steps:
            self._since = 0
            steps, hosts, waits = zip(*self._steps, strict=True)
            self._cost = CanaryCost(
                step_us=1e6 * statistics.median(steps),
                host_us=1e6 * statistics.median(hosts),
                device_us=1e6 * statistics.median(self._device) if self._device else None,
                device_waits=self._on_gpu and len(waits) == _MEMORY and sum(waits) >= _NEARLY_ALL * _MEMORY,
            )
        return self._cost

    def _warn(self) -> None:
        """Say, once, that the device waits for the host, and for the canary more than it should."""
        cost = self.cost
        if self._said or cost is None or not cost.device_waits or cost.host_us <= self._target * cost.step_us:
            return
        self._said = True
        logger.warning(
            "kv-canary: the device waits for the host at every step, so that the canary's %.0f us of the host's time "
            "are %.1f %% of a step of %.0f us, more than overhead_target (%g %%); a longer stride does not change that",
            cost.host_us,
            100 * cost.host_us / cost.step_us,
            cost.step_us,
            100 * self._target,
        )
