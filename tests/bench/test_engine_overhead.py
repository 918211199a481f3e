"""What the canary costs an engine: the benchmark, at the size of a CPU, checks what it times."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from kv_canary.bench import engine_overhead
from kv_canary.bench.engine_overhead import MODES
from kv_canary.bench.engine_served import Engine, Shape, make_model
from kv_canary.bench.engine_times import PHASES, ForwardTimes, Watch
from kv_canary.runtime.forward import SingleForwardManager

SHAPE = Shape(batch=3, context=32, new_tokens=5, page=16, chunk=64)
TINY = ["--tiny", "--shapes", "3x32", "--repeats", "2", "--new-tokens", "5", "--chunk", "64", "--commit", "none"]


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(torch.device("cuda" if torch.cuda.is_available() else "cpu"), tiny=True)


@contextmanager
def serving(model: Any, settings: dict[str, Any] | None) -> Iterator[Engine]:
    engine = Engine(model, SHAPE, settings=settings)
    try:
        yield engine
    finally:
        engine.close()


def test_the_program_says_what_it_saw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "overhead.json"
    assert engine_overhead.main([*TINY, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["ok"]
    assert result["check"]["flipped"]
    (row,) = result["rows"]
    assert (row["shape"], row["repeats"], row["failed"]) == ("3x32", 2, [])
    assert row["floor"]["kv_bytes"] == 3 * 32 * 2 * 2 * 2 * 16 * 2
    without, full = row["modes"]["without"], row["modes"]["full"]
    assert "canary_ms" not in without
    assert full["summary"]["positions_verified"] == full["summary"]["positions_relied_on"] > 0
    assert full["canary_ms"] > full["parts_ms"]["head"] > 0
    assert full["share_of_step"] == pytest.approx(full["canary_ms"] / row["step_ms"])
    assert full["share_of_floor"] == pytest.approx(full["canary_ms"] / row["floor"]["ms"])
    # 2 layers of 2 KV heads of 16, K and V, in bfloat16; and a record.
    assert (full["memory"]["kv_bytes_per_slot"], full["memory"]["record_bytes_per_slot"]) == (256, 32)
    assert "3x32" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--shapes", "3"], ["--shapes", "0x32"], ["--shapes", "3x30"], ["--repeats", "0"]]
)
def test_misuse_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        engine_overhead.main(["--tiny", *arguments])
    assert exit_.value.code == 2


def test_runs_are_nothing_but_decode_steps_with_everything_cached(model: Any) -> None:
    prompts = SHAPE.prompts(512)
    with serving(model, MODES["full"]) as engine:
        engine.prefill(prompts)
        engine.canary.flush()
        before = engine.canary.summary()
        with Watch(engine, events=True) as watch:
            runs = [engine.decode(prompts) for _ in range(2)]
        engine.canary.flush()
        after = engine.canary.summary()
    assert [f.decode for f in watch.forwards] == [True] * (2 * SHAPE.new_tokens)
    assert [len(run.starts) for run in runs] == [SHAPE.new_tokens] * 2
    assert runs[0].tokens == runs[1].tokens
    assert [len(tokens) for tokens in runs[0].tokens] == [SHAPE.new_tokens] * SHAPE.batch
    of_a_run = SHAPE.batch * sum(SHAPE.context + i for i in range(SHAPE.new_tokens))
    assert after.positions_relied_on - before.positions_relied_on == 2 * of_a_run


def test_times_cover_the_canary_and_nothing_stays_wrapped(model: Any) -> None:
    prompts = SHAPE.prompts(512)
    with serving(model, MODES["full"]) as engine:
        engine.prefill(prompts)
        with Watch(engine, events=True) as watch:
            engine.decode(prompts)
        assert not set(PHASES) & set(vars(engine.canary.manager.forward()))
    for forward in watch.forwards:
        parts = forward.parts()
        assert parts["canary"] == pytest.approx(sum(parts[name] for name in (*PHASES, "adapter")))
        assert forward.between("start", "stop") == pytest.approx(parts["canary"] + parts["forward"])
        assert min(parts.values()) > 0
    assert set(PHASES) <= set(vars(SingleForwardManager))
    with serving(model, None) as engine:
        engine.prefill(prompts)
        with Watch(engine, events=True) as watch:
            engine.decode(prompts)
    assert [set(f.parts()) for f in watch.forwards] == [{"forward"}] * SHAPE.new_tokens


def test_times_are_the_devices_where_there_are_events() -> None:
    class Event:
        def __init__(self, at: float) -> None:
            self.at = at

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    host = {"start": 0, "stop": 4_000_000}
    events: Any = {"start": Event(1.0), "stop": Event(3.5)}
    assert ForwardTimes(decode=True, host=host).between("start", "stop") == 4.0
    assert ForwardTimes(decode=True, host=host, events=events).between("start", "stop") == 2.5


def test_a_canary_that_sees_less_fails_the_check(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_overhead.check(model, page=16, chunk=64)["failed"] == []
    monkeypatch.setitem(MODES, "full", {"stride": 64})
    failed = engine_overhead.check(model, page=16, chunk=64)["failed"]
    assert {"every position is verified", "it was found at once"} <= set(failed)


def test_other_tokens_and_lost_steps_are_noticed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = Engine.decode

    def other(self: Engine, prompts: list[list[int]]) -> Any:
        run = decode(self, prompts)
        if self.canary is not None:
            run.tokens[0][0] += 1
            run.starts.pop()
        return run

    monkeypatch.setattr(Engine, "decode", other)
    assert engine_overhead.main(TINY) == 1
