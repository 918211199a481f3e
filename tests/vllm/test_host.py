"""What the adapter does in a step: it costs the engine's thread, and must not grow with the requests that go on."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kv_canary.difftest.stress.vllm.engine import Engine, Runner, drafts_of, save_model

# What vLLM calls of the canary's in a step.
CALLED = ("_begin_step", "before", "after", "_take_output", "_follow_draft")
# Python functions of the adapter's own in a decode like the one before it, and in a step in which a request has ended
# and another one has come; what they call of the runtime's is not in these.
MOST_OF_A_DECODE, MOST_OF_A_CHANGE = 24, 100


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, calls: Counter[str], *, runtime: bool = False) -> Iterator[None]:
    """Count the calls of the adapter's functions inside the block, by name, and launches that retire slots.

    Args:
        monkeypatch: wraps what is called.
        calls: where they are counted.
        runtime: whether the runtime's functions are counted too.
    """
    from kv_canary.engines.vllm import session
    from kv_canary.runtime import manager
    from kv_canary.runtime.manager import CanaryManager

    folders = tuple(str(Path(module.__file__).parent) for module in (session, *([manager] if runtime else [])))

    def see(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(folders):
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


def test_a_step_of_drafts_costs_no_python_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of one layer, as its draft model, whose drafts are all right then.
    model = save_model(tmp_path / "small", num_hidden_layers=1)
    drafts, found = drafts_of("draft_model", model), list[dict[str, int]]()
    for count in (12, 24):
        room = {"max_num_seqs": count, "max_num_batched_tokens": 512, "num_gpu_blocks_override": 12 * count}
        with Engine(model, canary={}, speculative_config=drafts, **room) as engine:
            for n in range(count):
                engine.submit(f"r{n}", [7 + n, *range(20, 29)], new_tokens=100)
            steps = list[Counter[str]]()
            while len(steps) < 3:
                calls, lengths = Counter[str](), {name: len(text) for name, text in engine.outputs.items()}
                with counted(monkeypatch, calls, runtime=True):
                    engine.step()
                assert engine.unfinished == count
                grown = {len(text) - lengths.get(name, 0) for name, text in engine.outputs.items()}
                # Numbers of other sizes than before have to be laid out first.
                if len(lengths) == count and max(grown) > 1 and not calls["_cut"]:
                    steps.append(calls)
        # Now and then a step reads what was found as well.
        found.append(dict(min(steps, key=Counter.total)))
    assert found[0] == found[1]


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_a_step_that_is_put_off_is_taken_in_where_nobody_calls_before_the_model(
    model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, runner: Runner
) -> None:
    with Engine(model("llama"), runner=runner, canary={}) as engine:
        engine.submit("r", [7, *range(20, 40)], new_tokens=40)
        engine.step()
        session, put_off = engine.session, 0
        (running,) = engine.scheduler.running
        member = session.requests.find(running.request_id)
        assert member is not None
        with monkeypatch.context() as patched:
            patched.setattr(session, "before", lambda _: None)
            begin = session._begin_step

            def counted(scheduled: Any) -> None:
                nonlocal put_off
                begin(scheduled)
                put_off += session._is_put_off

            patched.setattr(session, "_begin_step", counted)
            for _ in range(20):
                engine.step()
                (blocks,) = engine.scheduler.kv_cache_manager.get_block_ids(running.request_id)
                assert not session._is_put_off
                assert session._blocks._tables[0][member.row, : len(blocks)].tolist() == blocks
                assert session._blocks._counts[0][member.row] == len(blocks)
        # Blocks were handed out meanwhile.
        assert put_off == 20
        assert len(blocks) > 1
        assert session.manager.guard.failures == {}


def test_a_step_that_says_less_than_others_is_not_put_off(model: Callable[[str], str]) -> None:
    with Engine(model("llama"), runner="V1", canary={}) as engine:
        session = engine.session
        session.manager.guard.contains = True
        for said in (SimpleNamespace(), SimpleNamespace(total_num_scheduled_tokens=0)):
            assert not session._may_put_off(said)
        session._begin_step(SimpleNamespace(total_num_scheduled_tokens=1, finished_req_ids=set()))
        assert not session._is_put_off
        assert "following the scheduler's step: AttributeError" in session.manager.guard.failures
