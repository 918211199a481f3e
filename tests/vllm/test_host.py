"""What the adapter does in a step: it costs the engine's thread, and must not grow with the requests that go on."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kv_canary.difftest.stress.vllm.engine import Engine, Runner

# What vLLM calls of the canary's in a step.
CALLED = ("_begin_step", "before", "after", "_take_output")
# Python functions of the adapter's own in a decode like the one before it, and in a step in which a request has ended
# and another one has come; what they call of the runtime's is not in these.
MOST_OF_A_DECODE, MOST_OF_A_CHANGE = 24, 100


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, calls: Counter[str]) -> Iterator[None]:
    """Count the calls of the adapter's functions inside the block, by name, and launches that retire slots."""
    from kv_canary.engines.vllm import session
    from kv_canary.runtime.manager import CanaryManager

    here = str(Path(session.__file__).parent)

    def see(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(here):
            calls[frame.f_code.co_name] += 1

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            before = sys.getprofile()
            sys.setprofile(see)
            try:
                return original(*args, **kwargs)
            finally:
                sys.setprofile(before)

        return called

    def retire(*args: Any, original: Callable[..., None] = CanaryManager.retire, **kwargs: Any) -> None:
        calls["retired"] += 1
        original(*args, **kwargs)

    with monkeypatch.context() as patched:
        for name in CALLED:
            patched.setattr(session.Session, name, watched(getattr(session.Session, name)))
        patched.setattr(CanaryManager, "retire", retire)
        yield


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_a_step_costs_what_has_changed(
    model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, runner: Runner
) -> None:
    most = dict[int, tuple[int, int]]()
    with Engine(model("llama"), runner=runner, canary={}) as engine:
        for count in (2, 6):
            for n in range(count):
                engine.submit(f"{count}r{n}", [7 + n, *range(20, 29)], new_tokens=12 if n == 1 else 20)
            engine.step()
            decodes, changes, retired = list[int](), list[int](), 0
            for number in range(16):
                if number == 12:
                    # Beside those that go on, and in the place of the one that has ended.
                    engine.submit(f"{count}late", [50, *range(20, 29)], new_tokens=20)
                calls = Counter[str]()
                with counted(monkeypatch, calls):
                    engine.step()
                retired += calls.pop("retired", 0)
                is_decode = 1 < number < 10
                (decodes if is_decode else changes).append(calls.total())
            most[count] = max(decodes), max(changes)
            engine.run()
            # Of each request what it has left; nothing of what is handed out for the first time.
            assert retired <= count + 1
    assert most[2][0] == most[6][0] <= MOST_OF_A_DECODE
    assert max(changed for _, changed in most.values()) <= MOST_OF_A_CHANGE
