"""What a CUDA graph is to the canary, without a GPU: launches taken down with the very tensors and numbers they had."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kv_canary.backends import implementation
from kv_canary.runtime import device_state as state_module
from kv_canary.runtime import forward as forward_module
from kv_canary.runtime import launches as launches_module

# What HEAD and TAIL call beside the canary's ops.
_TORCH = ("lt", "where")


class Launches:
    """Launches as they were taken down: name and arguments."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, dict[str, Any]]] = []
        # Whether launches are taken down now, instead of made.
        self.taking = False

    @contextmanager
    def tape(self) -> Iterator[None]:
        """See every launch inside the block."""
        real = forward_module.ops

        class Ops:
            def __getattr__(_, name: str) -> Callable[..., None]:  # noqa: N805
                return lambda **arguments: self._launch(getattr(real, name), name, arguments)

        with pytest.MonkeyPatch.context() as patch:
            for module in (forward_module, launches_module, state_module):
                patch.setattr(module, "ops", Ops())
            # What is no op must be as fit for a graph, and is taken down too.
            for name in _TORCH:
                patch.setattr(torch, name, self._taped(name, getattr(torch, name)))
            yield

    def play(self, first: int = 0, end: int | None = None) -> None:
        """Do what a replay of the launches [first, end) does."""
        for name, given in self.taken[first:end]:
            arguments = dict(given)
            if name in _TORCH:
                getattr(torch, name)(*arguments.pop("arguments"), **arguments)
            else:
                implementation(name, arguments.pop("backend"))(**arguments)

    def _taped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def taped(*arguments: Any, **options: Any) -> Any:
            if self.taking and "out" in options:
                self.taken.append((name, {"arguments": arguments, **options}))
                return options["out"]
            return function(*arguments, **options)

        return taped

    def _launch(self, op: Any, name: str, arguments: dict[str, Any]) -> None:
        if self.taking:
            # A capture launches nothing.
            arguments = dict(arguments)
            backend = arguments.pop("backend")
            self.taken.append((name, {**op.spec.bind(arguments), "backend": backend}))
        else:
            op(**arguments)


class Recorder:
    """Captures launches for `Replays`, and counts."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        launches = Launches()
        with launches.tape():
            launches.taking = True
            launch()
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            launches.play()

        return replay
