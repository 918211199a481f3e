"""The pools' memory is given back while a request has just ended: nothing of the canary's reads it behind that."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("sglang")

from kv_canary.engines.sglang import session

from . import engine


class _ReleasedError(Exception):
    """The end of the test: nobody is served behind it."""


class Saver:
    """What takes the memory of a tag away, and notes when."""

    def __init__(self, happened: list[str]) -> None:
        self._happened = happened

    def pause(self, tag: str) -> None:
        self._happened.append(f"pause {tag}")

    def resume(self, tag: str) -> None:
        self._happened.append(f"resume {tag}")


def test_what_ended_requests_rested_on_is_read_before_the_memory_goes(llama: str, monkeypatch: Any) -> None:
    from sglang.srt.managers.io_struct import PauseGenerationReqInput, ReleaseMemoryOccupationReqInput

    with engine.overriding(KV_CANARY_MODE="log", KV_CANARY_SEALS="model"):
        scheduler = engine.build_scheduler(llama, disable_overlap_schedule=False)
    happened: list[str] = []
    scheduler.weight_updater.memory_saver_adapter = Saver(happened)
    manager = session.current().manager
    complete_all = manager.complete_all

    def completed(ended: Any) -> Any:
        happened.extend(f"complete {name}" for name, _ in ended)
        return complete_all(ended)

    monkeypatch.setattr(manager, "complete_all", completed)
    rng = random.Random(3)
    prompts = [[rng.randrange(3, engine.VOCABULARY) for _ in range(60)] for _ in range(3)]
    reqs = [engine.submit(scheduler, p, 6 + 10 * n, rid=f"r{n}") for n, p in enumerate(prompts)]

    def before(_: int) -> bool:
        if happened or scheduler.last_batch is None or len(reqs[0].output_ids) < 5:
            return False
        # Its loop does not come to be idle from here on.
        scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        assert any(req.finished() for req in reqs)
        scheduler.weight_updater.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=["kv_cache"]))
        raise _ReleasedError

    with pytest.raises(_ReleasedError):
        engine.run_all(scheduler, before)
    assert happened[-1] == "pause kv_cache"
    assert "complete r0" in happened
