"""The demo: silent when healthy, every planted fault found, and honest when one is not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from kv_canary.cli import main
from kv_canary.commands.evidence import digests
from kv_canary.config import CanaryConfig
from kv_canary.demo.faults import FAULTS, Fault
from kv_canary.demo.models import MODELS, tiny_model
from kv_canary.demo.random_bits import BITS, RandomBits, flip_bits
from kv_canary.demo.run import DEPTHS, run_demo
from kv_canary.demo.serving import SHAPES
from kv_canary.demo.traffic import conversations, python_text, trace_conversations


@pytest.mark.every_day("llama", "gemma3")
@pytest.mark.parametrize(
    ("models", "faults", "depths"),
    [
        pytest.param(MODELS, FAULTS, DEPTHS, id="all"),
        # Each fault in one of the models.
        pytest.param(MODELS[:1], FAULTS[::2], DEPTHS, id="llama"),
        pytest.param(MODELS[1:], FAULTS[1::2], (), id="gemma3"),
    ],
)
def test_the_demo_passes_and_writes_its_facts(
    models: tuple[str, ...],
    faults: tuple[Fault, ...],
    depths: tuple[int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What is left out when nobody says otherwise: with "all" it is what the program does.
    monkeypatch.setitem(run_demo.__kwdefaults__, "models", models)
    monkeypatch.setitem(run_demo.__kwdefaults__, "faults", faults)
    monkeypatch.setattr("kv_canary.demo.run.DEPTHS", depths)
    # A pipe is told how far it is, too.
    monkeypatch.setattr("kv_canary.commands.progress.EVERY_S", 0.0)
    facts = tmp_path / "facts.json"
    result = CliRunner().invoke(main, ["demo", "--requests", "8", "--turns", "1", "--json", str(facts)])
    assert result.exit_code == 0, result.output
    for name in models:
        assert f"kv-canary: {name}, planted faults, {len(faults)} of {len(faults)}, " in result.stderr
    data = json.loads(facts.read_text())
    assert {"engine", "backend", "clean", "faults", "commit", "versions"} <= set(data)
    assert data["sources"] == digests("demo")
    assert data["clean"]["violations"] == 0
    assert data["clean"]["requests"] == 8 * len(models)
    assert data["clean"]["positions_verified"] > 5_000 * len(models)
    assert [(f["name"], f["model"]) for f in data["faults"]] == [(f.name, m) for m in models for f in faults]
    assert all(f["found"] and f["steps_late"] == 0 and f["reasons"] and f["tag"] for f in data["faults"])
    assert [b["layers"] for b in data["random_bits"]] == list(depths)
    for bits in data["random_bits"]:
        assert 10 < bits["flipped"] <= BITS
        assert bits["found_by_seals"] + bits["gone"] == bits["flipped"]
        assert bits["found_by_seals"] > bits["flipped"] / 2
        assert bits["found_by_sample"] == bits["sampled"]
        # 16 of 128 bytes, of one layer: one in 32, and one in 256.
        assert bits["sampled"] < bits["flipped"] / 4
        assert bits["most_steps_to_seals"] <= 1
        assert bits["false_alarms"] == 0


def test_the_demo_is_of_both_models_every_fault_and_both_depths() -> None:
    defaults = run_demo.__kwdefaults__
    assert (defaults["models"], defaults["faults"], defaults["depths"]) == (("llama", "gemma3"), FAULTS, (4, 32))
    assert len({fault.name for fault in FAULTS}) == 9


def test_random_bits_that_are_missed_or_reported_elsewhere_fail_the_demo() -> None:
    good = RandomBits(
        model="llama",
        layers=4,
        flipped=10,
        sampled=2,
        found_by_sample=2,
        found_by_seals=9,
        gone=1,
        median_steps_to_seals=0,
        most_steps_to_seals=1,
        false_alarms=0,
    )
    assert good.passed
    for change in ({"found_by_seals": 8}, {"found_by_sample": 1}, {"false_alarms": 1}, {"flipped": 0, "gone": -9}):
        assert not dataclasses.replace(good, **change).passed


def test_seals_that_are_not_verified_find_no_random_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_canary.runtime.seals.Scrub.all", lambda self: None)
    talks = conversations(python_text(), count=8, turns=1, new_tokens=24, longest=96)
    config = CanaryConfig(scrub_share=0, admission=False, completion=False)
    model = tiny_model("llama", **{**SHAPES["llama"], "num_hidden_layers": 2})
    bits = flip_bits(model, "llama", talks, config=config, seed=0)
    assert bits.found_by_seals < bits.flipped / 2
    assert not bits.passed


def test_bits_that_happen_to_be_sampled_are_found_by_both() -> None:
    talks = conversations(python_text(), count=8, turns=1, new_tokens=24, longest=96)
    model = tiny_model("llama", **{**SHAPES["llama"], "num_hidden_layers": 2})
    # 64 of 128 bytes, of one layer of two.
    bits = flip_bits(model, "llama", talks, config=CanaryConfig(read_bytes=64), seed=0)
    assert bits.passed
    assert 2 <= bits.sampled == bits.found_by_sample < bits.flipped / 2


def test_a_fault_that_does_nothing_is_not_found_and_fails_the_demo() -> None:
    harmless = dataclasses.replace(FAULTS[0], plant=lambda scene, batch: ({17}, "nothing at all", None))
    result = run_demo(
        conversations(python_text(), count=4, turns=1, new_tokens=12, longest=40),
        config=CanaryConfig(),
        device="cpu",
        seed=0,
        console=Console(quiet=True),
        models=["llama"],
        faults=[harmless],
        depths=(),
    )
    assert result.clean["violations"] == 0
    assert [f.found for f in result.faults] == [False]
    assert not result.passed


def test_conversations_share_a_prefix_and_go_on() -> None:
    talks = conversations("abc" * 100, count=3, turns=2, new_tokens=5, longest=30)
    assert len({t.turns[0][:48] for t in talks}) == 1
    assert all(len(t.turns) == 2 and t.new_tokens == (5, 5) for t in talks)
    assert all(0 <= token < 256 for t in talks for turn in t.turns for token in turn)


def test_a_mooncake_trace_keeps_lengths_and_shared_blocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 2048, "output_length": 640, "hash_ids": [7, 8, 9, 10]},
        {"timestamp": 1, "input_length": 1500, "output_length": 64, "hash_ids": [7, 8, 11]},
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    first, second = trace_conversations(path, python_text(), count=5, scale=64, longest=400)
    assert (len(first.turns[0]), first.new_tokens) == (32, (10,))
    assert (len(second.turns[0]), second.new_tokens) == (23, (1,))
    # Two blocks of 512 / 64 tokens are shared, the third is not.
    assert first.turns[0][:16] == second.turns[0][:16]
    assert first.turns[0][16:23] != second.turns[0][16:23]


@pytest.mark.parametrize("name", ["mooncake_conversation_trace.jsonl", "azure_AzureLLMInferenceTrace_conv.csv"])
def test_recorded_traces_can_be_read_where_they_are_present(name: str) -> None:
    path = Path(__file__).parents[3] / "shared" / "data" / name
    if not path.exists():
        pytest.skip("the recorded traces are not here")
    talks = trace_conversations(path, python_text(), count=50, scale=64, longest=400)
    assert len(talks) == 50
    assert len({len(t.turns[0]) for t in talks}) > 3
