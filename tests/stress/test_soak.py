"""The campaigns are silent on healthy engines and find faults; and both can fail."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from kv_canary.config import CanaryConfig
from kv_canary.constants import Reason
from kv_canary.difftest.simulator import Action, EngineConfig, GroupConfig
from kv_canary.difftest.simulator.actions import opening, random_action
from kv_canary.difftest.stress import batching, detection, processes, random_engine, soak
from kv_canary.difftest.stress.expected_findings import FaultyEngine, place_of, unexplained, unreported
from kv_canary.perturb import MODES, PerturbConfig, bytes_of
from kv_canary.perturb import perturber as perturber_module

HEALTHY = {
    "watching": "complete",
    "violations": 0,
    "discarded": 0,
    "positions_relied_on": 100,
    "positions_verified": 100,
    "audits": {"admitted": 9, "completed": 2, "verified": 20, "unsealed": 0},
    "scrub": {"verified": 50, "unsealed": 0, "rounds": 3, "oldest": 0.1},
}


@pytest.fixture(autouse=True)
def short_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LIVES", "ACTIONS"):
        monkeypatch.setattr(soak, name, {"LIVES": 2, "ACTIONS": 30}[name])
    monkeypatch.setitem(detection.LIVES, "cpu", 3)


def run_soak(number: int, model: str = "") -> soak.Tally:
    return soak.run(soak.Task(number=number, model=model, device="cpu", backend="reference"))


def test_healthy_model_engines_are_silent_and_verified_wholly(monkeypatch: pytest.MonkeyPatch) -> None:
    # Long enough that prefixes come back.
    monkeypatch.setattr(soak, "ACTIONS", 80)
    total = soak.Tally()
    for number in range(2):
        total.add(run_soak(number))
    assert (total.false_alarms, total.wrong) == (0, [])
    assert total.lives == 4
    assert total.steps > 60
    assert total.verified == total.relied_on > 500
    sealed = ("slots of prefix hits held against their seals", "requests that ended and whose bytes were")
    for what in ("slots freed", "prefix hits", "finished", "tokens", *sealed):
        assert total.happened[what] > 0


@pytest.mark.parametrize("model", ["llama", "gptoss"])
def test_healthy_transformers_are_silent(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "FORWARDS", 10)
    tally = run_soak(0, model)
    assert (tally.false_alarms, tally.wrong) == (0, [])
    assert tally.steps >= 10
    assert tally.happened["requests"] > 0
    assert tally.happened["prefixes at a page's end"] > 0


def test_damage_in_a_soak_is_a_false_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_CANARY_PERTURB_MODE", "req_to_token")
    monkeypatch.setenv("KV_CANARY_PERTURB_WARM_UP", "2")
    tally = soak.Tally()
    for number in range(3):
        tally.add(run_soak(number))
    assert tally.false_alarms > 0
    assert any("POSITION" in text for text in tally.wrong)
    assert not soak.Soak(steps=tally).clean


def test_what_a_life_raises_is_told_with_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*args: Any, **options: Any) -> None:
        raise ZeroDivisionError("so it goes")

    monkeypatch.setattr(soak, "draw_configs", raises)
    tally = run_soak(17)
    assert tally.wrong == ["seed 17, model engines: raised ZeroDivisionError: so it goes"]
    assert not soak.Soak(steps=tally).clean


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"watching": "stale"}, "the canary says that it is stale"),
        ({"positions_verified": 99}, "99 of 100 cached positions were verified"),
        ({"positions_verified": 101}, "101 of 100 cached positions were verified"),
        ({"positions_relied_on": 98}, "100 cached positions were relied on, the canary counted 98"),
    ],
)
def test_a_canary_that_sees_too_little_is_wrong(change: dict[str, Any], complaint: str) -> None:
    tally = soak.Tally()
    tally.judge("one", HEALTHY, [], relied_on=100, every=True)
    assert tally.wrong == []
    tally.judge("two", {**HEALTHY, **change}, [], relied_on=100, every=True)
    assert tally.wrong == [f"two: {complaint}"]


def test_slots_without_a_seal_are_wrong_unless_a_forward_has_failed() -> None:
    for name in ("audits", "scrub"):
        life = {**HEALTHY, name: {**HEALTHY[name], "unsealed": 3}}  # type: ignore[dict-item]
        for fails in (False, True):
            tally = soak.Tally()
            tally.judge("one", life, [], relied_on=100, every=True, fails=fails)
            assert tally.wrong == ([] if fails else ["one: 3 slots have a record and no seal"])
    tally = soak.Tally()
    tally.judge("one", {**HEALTHY, "audits": None, "scrub": None}, [], relied_on=100, every=True)
    assert tally.wrong == []


def test_with_a_stride_some_are_verified_but_not_none() -> None:
    tally = soak.Tally()
    tally.judge("one", {**HEALTHY, "positions_verified": 40}, [], relied_on=100, every=False)
    assert tally.wrong == []
    tally.judge("two", {**HEALTHY, "positions_verified": 0}, [], relied_on=100, every=False)
    assert tally.wrong == ["two: 0 of 100 cached positions were verified"]
    assert (tally.relied_on, tally.verified) == (0, 0)


def test_a_life_that_has_read_nothing_is_not_wrong_and_none_verifies_more_than_it_reads() -> None:
    for every in (True, False):
        total = soak.Tally()
        nothing = {**HEALTHY, "positions_relied_on": 0, "positions_verified": 0}
        total.judge("life", nothing, [], relied_on=0, every=every)
        assert total.wrong == []
        total.judge("life", {**HEALTHY, "positions_verified": 101}, [], relied_on=100, every=every)
        assert total.wrong == ["life: 101 of 100 cached positions were verified"]


def test_the_same_seed_draws_the_same_engines() -> None:
    def texts(number: int) -> list[str]:
        return [str(dataclasses.replace(c, groups=())) for c in random_engine.draw_configs(number, 4)]

    assert texts(3) == texts(3)
    assert len(texts(3)) == 4
    assert texts(3) != texts(4)
    assert all(c.serial_owners for c in random_engine.draw_configs(5, 4))


def test_a_soak_does_everything_that_can_happen_to_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_engine, "FAILURE_SHARE", 0.05)
    happened: Counter[str] = Counter()
    for number in range(4):
        for config in random_engine.draw_configs(number, 2):
            rng = np.random.default_rng(number)
            engine = random_engine.CountingEngine(config, canary=CanaryConfig(backend="reference"), chance=rng)
            for action in opening(rng, longest=config.max_len):
                engine.act(action)
            for kind in ("fork", "compact", "speculate", "retract", "evict", "flush", "arrive", "idle"):
                for _ in range(6):
                    engine.act(random_engine.any_action(rng, longest=config.max_len))
                engine.act(Action(kind=kind, amount=9, more=1))
                engine.check_integrity()
            engine.manager.flush()
            summary = engine.manager.summary()
            assert summary.violations == 0
            assert summary.positions_relied_on == engine.relied_on
            happened += engine.happened
    wanted = {
        "steps",
        "empty steps",
        "tokens",
        "failed forwards",
        "flushes",
        "prefix hits",
        "slots freed",
        "slots copied",
        "finished",
        "retracted",
        "drafts rejected",
        "forks",
        "compactions",
        "pages evicted",
    }
    assert {name for name, count in happened.items() if count} == wanted


def test_a_flush_leaves_the_lut_where_the_canary_knows_it() -> None:
    drawn = (config for number in range(20) for config in random_engine.draw_configs(number, 4))
    config = next(config for config in drawn if any(group.kind == "lut" for group in config.groups))
    engine = random_engine.CountingEngine(config, canary=CanaryConfig(backend="reference"))
    [known] = [g.lut for g in engine.manager.groups if g.name == "lut"]
    rng = np.random.default_rng(0)
    for _ in range(3):
        for action in (*opening(rng, longest=config.max_len), Action(kind="decode"), Action(kind="flush")):
            engine.act(action)
        [group] = engine.luts
        assert group.lut is group.lookup is known
        assert not known.any()
    engine.manager.flush()
    assert engine.manager.summary().violations == 0


def test_tasks_are_taken_in_order_until_there_are_enough() -> None:
    taken: list[float] = []

    def take(result: float) -> bool:
        taken.append(result)
        return len(taken) == 5

    with processes.processes(2) as pool:
        stopped = processes.run_tasks(math.sqrt, (n * n for n in range(1000)), pool=pool, ahead=3, take=take)
        assert (stopped, taken) == (False, [0, 1, 2, 3, 4])

        def interrupt(result: float) -> bool:
            raise KeyboardInterrupt

        assert processes.run_tasks(math.sqrt, [1, 4], pool=pool, ahead=3, take=interrupt) is True

        def end(result: float) -> bool:
            os.kill(os.getpid(), signal.SIGTERM)
            return False

        assert processes.run_tasks(math.sqrt, [1, 4], pool=pool, ahead=3, take=end) is True
        assert processes.run_tasks(math.sqrt, [1, 4], pool=pool, ahead=3, take=lambda result: False) is False


def invoke(command: Any, *arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments))


@pytest.mark.long
def test_the_commands_run_and_write_their_facts(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    result = invoke(soak.main, "--engine-steps", "40", "--forwards", "0", "--json", str(path), "--commit", "abc")
    assert result.exit_code == 0, result.output
    data = json.loads(path.read_text())
    assert data["engine_steps"] >= 40
    assert (data["forwards"], data["false_alarms"], data["interrupted"]) == (0, 0, False)
    assert {"versions", "device", "seconds", "lives", "seed", "backend"} <= set(data)
    assert data["commit"] == "abc"
    assert data["model_engines"]["happened"]["steps"] == data["engine_steps"]

    path = tmp_path / "detection.json"
    result = invoke(detection.main, "--runs", "2", "--mode", "req_to_token", "--group", "FULL", "--json", str(path))
    assert result.exit_code == 0, result.output
    [row] = json.loads(path.read_text())
    assert (row["mode"], row["group"], row["runs"], row["found"], row["blamed_wrongly"]) == (
        "req_to_token",
        "FULL",
        2,
        2,
        0,
    )
    assert row["median_steps_late"] == 0


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let campaigns run their tasks in this process."""

    def run_tasks(function: Any, tasks: Any, *, pool: Any, ahead: int, take: Any) -> bool:
        try:
            any(take(function(task)) for task in tasks)
        except KeyboardInterrupt:
            return True
        return False

    for module in (soak, detection):
        monkeypatch.setattr(module, "processes", lambda jobs: contextlib.nullcontext())
        monkeypatch.setattr(module, "run_tasks", run_tasks)


@pytest.mark.usefixtures("one_process")
def test_a_campaign_that_finds_something_wrong_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perturber_module, "bytes_of", lambda *where: bytes_of(*where).clone())
    result = invoke(detection.main, "--runs", "1", "--mode", "real_kv_used", "--group", "SWA", "--sampled")
    assert (result.exit_code, "FAIL" in result.output, "not found" in result.output) == (1, True, True)
    monkeypatch.setenv("KV_CANARY_PERTURB_MODE", "req_to_token")
    result = invoke(soak.main, "--engine-steps", "100", "--forwards", "0")
    assert (result.exit_code, "FAIL" in result.output, "POSITION" in result.output) == (1, True, True)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("command", [soak.main, detection.main])
def test_an_interrupted_campaign_prints_and_writes_what_it_has(
    command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = soak if command is soak.main else detection
    original, calls = module.run, []

    def run(task: Any) -> Any:
        calls.append(task)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(task)

    monkeypatch.setattr(module, "run", run)
    path = tmp_path / "facts.json"
    result = invoke(command, "--seed", "3", "--json", str(path))
    assert (result.exit_code, len(calls)) == (1, 2)
    facts = json.loads(path.read_text())
    if command is soak.main:
        assert facts["interrupted"]
        assert facts["engine_steps"] > 0
        assert "INTERRUPTED" in result.output
    else:
        # Only what was begun has a row.
        assert [(row["mode"], row["group"]) for row in facts] == [(MODES[0], "FULL")]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_faults_take_turns_and_one_that_finds_no_engine_is_tried_as_often(
    device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tasks: list[detection.Task] = []

    def run(task: detection.Task) -> list[detection.Run]:
        tasks.append(task)
        if (task.mode, task.group) == (MODES[0], "SWA"):
            return []
        return [detection.Run(whose="it", injected=True, relied_on=True, found=True)]

    monkeypatch.setattr(detection, "run", run)
    monkeypatch.setattr(detection, "MOST_LIVES", 12)
    monkeypatch.setattr(detection, "prepare_backend", lambda device, backend: None)
    monkeypatch.setattr(detection, "facts", lambda device, **options: {})
    path = tmp_path / "facts.json"
    arguments = ("--device", device, "--runs", "2", "--mode", MODES[0], "--mode", MODES[1], "--json", str(path))
    result = invoke(detection.main, *arguments)
    assert (result.exit_code, "FAIL" in result.output) == (1, True)
    cells = [(mode, group) for mode in MODES[:2] for group in detection.GROUPS]
    assert [(task.mode, task.group) for task in tasks[:8]] == 2 * cells
    # As many lives on either device.
    left = 2 * 12 // detection.LIVES[device] - 2
    assert [(task.mode, task.group) for task in tasks[8:]] == [(MODES[0], "SWA")] * left
    assert len({(task.mode, task.group, task.number) for task in tasks}) == len(tasks)
    rows = json.loads(path.read_text())
    assert [(row["mode"], row["group"], row["runs"]) for row in rows] == [
        (*c, 0 if c == cells[1] else 2) for c in cells
    ]


def lived(path: Path, *arguments: str) -> dict[str, Any]:
    result = invoke(soak.main, *arguments, "--json", str(path), "--seed", "3")
    assert result.exit_code == 0, result.output
    facts: dict[str, Any] = json.loads(path.read_text())
    return facts


@pytest.mark.usefixtures("one_process")
def test_a_soak_goes_on_from_where_one_was_interrupted(tmp_path: Path) -> None:
    whole, begun, path = (tmp_path / name for name in ("whole.json", "begun.json", "continued.json"))
    first = lived(begun, "--engine-steps", "30", "--forwards", "0")
    alone = lived(whole, "--engine-steps", "90", "--forwards", "1")
    continued = lived(path, "--engine-steps", "90", "--forwards", "1", "--continue", str(begun))
    for part in ("model_engines", "transformers"):
        happened = [facts[part]["happened"] for facts in (continued, alone)]
        # A piece of a scrub is as long as the machine is fast just then.
        scrubbed = [its.pop("slots held against their seals by scrubs", 0) for its in happened]
        assert happened[0] == happened[1]
        assert (scrubbed[0] > 0) == (scrubbed[1] > 0)
        assert continued[part]["lives"] == alone[part]["lives"] > 0
    assert continued["engine_steps"] == alone["engine_steps"] > first["engine_steps"]
    assert [run["engine_steps"] for run in continued["before"]] == [first["engine_steps"]]
    assert continued["seconds"] > first["seconds"]
    # Nothing is lived twice where that was enough.
    again = lived(path, "--engine-steps", "90", "--forwards", "1", "--continue", str(path))
    assert (again["lives"], len(again["before"])) == (alone["lives"], 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 4}, "of the same seed, 3, got 4"),
        ({"sources": {}}, "of the same sources"),
        ({"false_alarms": 1}, "of a soak in which nothing was wrong"),
        ({"engine_steps": None}, "what an interrupted soak wrote"),
        (None, "what an interrupted soak wrote"),
    ],
)
def test_what_is_not_to_be_gone_on_from_is_misuse(change: dict[str, Any] | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    kept = lived(path, "--engine-steps", "0", "--forwards", "0")
    if change is not None and (gone := [name for name, value in change.items() if value is None]):
        change = {}
        del kept[gone[0]]
    path.write_text("no JSON" if change is None else json.dumps({**kept, **change}))
    result = invoke(soak.main, "--engine-steps", "5", "--continue", str(path), "--seed", "3")
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize("command", [soak.main, detection.main])
@pytest.mark.parametrize("arguments", [["--backend", "magic"], ["--jobs", "0"], ["--seed", "-1"], ["--what"]])
def test_misuse_exits_with_2(command: Any, arguments: list[str]) -> None:
    assert invoke(command, *arguments).exit_code == 2


def test_a_device_that_is_not_there_is_misuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.torch.cuda, "is_available", lambda: False)
    for command in (soak.main, detection.main):
        result = invoke(command, "--device", "cuda")
        assert result.exit_code == 2
        assert "device must be there, got cuda" in result.output


@pytest.mark.every_day("req_to_token-SWA", "real_kv_used-FULL")
@pytest.mark.parametrize("group", detection.GROUPS)
@pytest.mark.parametrize("mode", MODES)
def test_faults_are_found_and_nothing_else_is_blamed(mode: str, group: str) -> None:
    runs: list[detection.Run] = []
    for number in range(20):
        runs += detection.run(
            detection.Task(mode=mode, group=group, number=number, stride=1, device="cpu", backend="reference")
        )
        if sum(r.relied_on for r in runs) >= 2:
            break
    relied_on = [r for r in runs if r.relied_on]
    assert len(relied_on) >= 2
    # A byte that is not sampled may be gone before a scrub comes; all else is found at once.
    assert all(r.found != r.out_of_sight and r.steps_late == 0 for r in relied_on)
    assert not any(r.out_of_sight and r.sampled for r in relied_on)
    assert [(r.blamed_wrongly, r.silent, r.error) for r in runs] == [((), (), "")] * len(runs)
    assert not any(r.reports for r in runs if not r.relied_on)


def test_what_is_not_sampled_is_found_by_seals_and_without_them_missed() -> None:
    """The same lives with and without seals: what changes is who finds the bytes that are not sampled."""
    lives: dict[str, list[detection.Run]] = {"layer": [], "off": []}
    for number in range(20):
        for seals, runs in lives.items():
            task = detection.Task(
                mode="real_kv_used",
                group="SWA",
                number=number,
                stride=1,
                device="cpu",
                backend="reference",
                seals=seals,
            )
            runs += detection.run(task)
        if sum(r.found_by_seal for r in lives["layer"]) >= 3:
            break
    sealed, bare = lives["layer"], lives["off"]
    assert [r.whose for r in sealed] == [r.whose for r in bare]
    assert [(r.blamed_wrongly, r.silent, r.error) for r in (*sealed, *bare)] == [((), (), "")] * 2 * len(sealed)
    assert sum(r.found_by_seal for r in sealed) >= 3
    assert not any(r.found_by_seal for r in bare)
    for with_seals, without in zip(sealed, bare, strict=True):
        if not with_seals.sampled:
            assert with_seals.found == with_seals.found_by_seal
            assert not without.found
            assert without.reports == 0
    for one in sealed:
        if one.found_by_seal:
            assert 0 <= one.steps_after <= detection.AFTERMATH


def faulty_engine(
    mode: str, *, count: int = 1, covered_only: bool = True, seed: int = 1, **options: Any
) -> tuple[FaultyEngine, np.random.Generator]:
    """Return an engine of full attention into which the fault has just been injected."""
    config = next(
        c
        for n in range(40)
        for c in random_engine.draw_configs(n, 4)
        if [g.kind for g in c.groups] == ["full"] and c.groups[0].k_source and c.prefix_cache and c.max_rows > 3
    )
    config = dataclasses.replace(config, token_oracle=True)
    canary = CanaryConfig(backend="reference", max_reports_per_step=4096, ring_capacity=4096, **options)
    perturb = PerturbConfig(mode=mode, warm_up=2, count=count, covered_only=covered_only, seed=seed)
    engine = FaultyEngine(config, canary=canary, perturb=perturb)
    rng = np.random.default_rng(1)
    for action in opening(rng, longest=config.max_len):
        engine.run(action)
    for _ in range(60):
        if engine.injection is not None:
            break
        engine.run(Action(kind="mixed", amount=5))
    assert engine.injection is not None
    return engine, rng


def go_on(engine: FaultyEngine, rng: np.random.Generator, times: int = 8) -> None:
    for _ in range(times):
        engine.run(random_action(rng, longest=engine.config.max_len))
    engine.manager.flush()


@pytest.mark.parametrize("mode", ["req_to_token", "real_kv_used", "next_token_swap"])
def test_the_witness_notices_a_report_that_is_missing_and_one_that_is_not_explained(mode: str) -> None:
    engine, rng = faulty_engine(mode)
    go_on(engine, rng)
    assert engine.reports
    assert unexplained(engine) == []
    assert unreported(engine) == []
    reports = list(engine.reports)
    for i, report in enumerate(reports):
        if place_of(report) in engine.required:
            engine.reports = reports[:i] + reports[i + 1 :]
            assert unreported(engine) == [place_of(report)]
        other_slot = dataclasses.replace(report, slot=report.slot + 1)
        other_reason = dataclasses.replace(report, reasons=(*report.reasons, "NEVER_WRITTEN"))
        for wrong in (other_slot, other_reason):
            engine.reports = [*reports, wrong]
            assert unexplained(engine) == [wrong]


def test_the_witness_knows_what_a_scrub_must_find() -> None:
    for seed in range(10):
        engine, _ = faulty_engine("real_kv_used", covered_only=False, seed=seed, seals="layer", read_bytes=1)
        if not engine.injection.sampled:
            break
    [slot] = engine.injection.slots
    assert engine.required == {}
    assert engine.was_read
    engine.scrub()
    assert (unexplained(engine), unreported(engine)) == ([], [])
    places = [place for place in engine.required if place.slot == slot]
    assert [(p.tag, p.position) for p in places] == [("SWEEP_FULL", engine.injection.position)]
    assert {r.slot for r in engine.reports} == {slot}
    engine.reports.clear()
    assert unreported(engine) == places
    # A slot that is freed has no seal any more: nothing must be found of its bytes, and nothing is.
    engine.required.clear()
    list(engine.retire(engine.groups[0], [slot], owner=1))
    engine.scrub()
    assert engine.required == {}
    assert {r.reasons for r in engine.reports} <= {("FREED",)}


def test_swapped_entries_are_followed_into_another_group_where_they_have_no_slot() -> None:
    reasons: Counter[tuple[str, str]] = Counter()
    for number in range(16):
        config = EngineConfig(
            groups=(GroupConfig(kind="full", num_slots=82), GroupConfig(kind="lut", num_slots=62, window=5)),
            page_size=2,
            num_pages=40,
            first_slot=2,
            max_rows=3,
            max_len=40,
            prefix_cache=False,
        )
        canary = CanaryConfig(backend="reference", max_reports_per_step=4096)
        perturb = PerturbConfig(mode="req_to_token", group="full", warm_up=2, seed=number)
        engine = FaultyEngine(config, canary=canary, perturb=perturb)
        for kind, amount in (("arrive", 24), ("prefill", 20), *[("decode", 1)] * 6):
            engine.run(Action(kind=kind, amount=amount, pick=1))
        engine.manager.flush()
        assert (unexplained(engine), unreported(engine)) == ([], [])
        reasons.update((r.tag, name) for r in engine.reports for name in r.reasons)
    assert reasons["HEAD_SWA", "UNMAPPED"]
    assert reasons["HEAD_FULL", "POSITION"] == 32


def test_damage_that_was_not_injected_is_blamed_wrongly() -> None:
    engine, rng = faulty_engine("real_kv_used")
    [injected] = engine.injection.slots
    request = max(engine.running, key=lambda r: r.cached)
    position, slot = next(
        (p, s) for p, s in enumerate(engine.table[request.row, : request.cached].tolist()) if s != injected
    )
    source = engine.groups[0].config.k_source
    layer, start, _ = source.coverage(position)
    bytes_of(source, slot, layer)[start] ^= 1
    engine.run(Action(kind="mixed", amount=1))
    go_on(engine, rng, 0)
    assert {r.slot for r in unexplained(engine)} == {slot}


def test_a_fault_that_was_not_really_injected_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perturber_module, "bytes_of", lambda *where: bytes_of(*where).clone())
    runs = detection.run(
        detection.Task(
            mode="real_kv_used",
            group="FULL",
            number=1,
            stride=1,
            device="cpu",
            backend="reference",
            covered_only=True,
        )
    )
    relied_on = [r for r in runs if r.relied_on]
    assert relied_on
    assert not any(r.found for r in relied_on)
    assert all(r.silent for r in relied_on)
    cell = detection.Cell(mode="real_kv_used", group="FULL", stride=1, wanted=len(relied_on))
    for one in runs:
        cell.add(one)
    assert (cell.found, cell.passed) == (0, False)
    assert cell.as_dict()["median_steps_late"] is None


def test_damage_follows_copies_and_ends_where_a_slot_is_written_or_the_cache_is_emptied() -> None:
    engine, _ = faulty_engine("real_kv_used")
    group, name = engine.groups[0], engine.groups[0].name
    [slot] = engine.injection.slots
    free = [s for s in range(1, group.config.num_slots) if s not in engine.bytes[name]][:3]
    engine.bytes[name], engine.records[name] = {slot: Reason.K}, {slot}
    list(engine.move(group, [slot, free[0]], [free[1], free[2]], owner=1))
    assert engine.bytes[name] == {slot: Reason.K, free[1]: Reason.K}
    assert engine.records[name] == {slot, free[1]}
    # Two slots that change places.
    list(engine.move(group, [slot, free[0]], [free[0], slot], owner=1))
    assert engine.bytes[name] == {free[0]: Reason.K, free[1]: Reason.K}
    engine._heal(name, [free[0]])
    assert (engine.bytes[name], engine.records[name]) == ({free[1]: Reason.K}, {free[1]})
    engine.flush()
    assert (engine.bytes[name], engine.records[name]) == ({}, set())


def test_reports_end_when_the_damaged_slot_is_written_again() -> None:
    engine, _ = faulty_engine("real_kv_used")
    name = engine.groups[0].name
    for _ in range(60):
        # All of them, for several may share the slot; then as many again, whichever slots are handed out first.
        for _ in range(engine.config.max_rows):
            engine.run(Action(kind="retract"))
        engine.run(Action(kind="evict", amount=1000))
        for _ in range(engine.config.max_rows):
            engine.run(Action(kind="arrive", amount=engine.config.max_len - 2, pick=1))
            engine.run(Action(kind="prefill", amount=engine.config.max_len))
        if not engine.bytes[name]:
            break
    assert engine.bytes[name] == {}
    engine.manager.flush()
    count = len(engine.reports)
    assert count > 0
    for _ in range(5):
        engine.run(Action(kind="mixed", amount=1))
    engine.manager.flush()
    assert len(engine.reports) == count


def test_runs_of_no_use_are_told_apart() -> None:
    cell = detection.Cell(mode="real_kv_used", group="FULL", stride=1, wanted=2)
    for one in (
        detection.Run(whose="no moment"),
        detection.Run(whose="unused", injected=True),
        detection.Run(whose="a", injected=True, relied_on=True, found=True, steps_after=3),
        detection.Run(whose="b", injected=True, relied_on=True, found=True, steps_late=1, steps_after=1),
        detection.Run(whose="beyond", injected=True, relied_on=True, blamed_wrongly=("no",)),
    ):
        cell.add(one)
    row = cell.as_dict()
    assert {k: row[k] for k in ("runs", "found", "blamed_wrongly", "unused", "no_moment")} == {
        "runs": 2,
        "found": 2,
        "blamed_wrongly": 0,
        "unused": 1,
        "no_moment": 1,
    }
    assert (row["median_steps_late"], row["most_steps_late"]) == (0.5, 1)
    assert (row["median_steps_after_injection"], row["most_steps_after_injection"]) == (2, 3)
    assert cell.passed


def test_what_nothing_could_see_is_missed_and_no_failure() -> None:
    cell = detection.Cell(mode="real_kv_used", group="FULL", stride=1, wanted=3)
    unsampled = {"injected": True, "relied_on": True, "sampled": False}
    cell.add(detection.Run(whose="gone", out_of_sight=True, **unsampled))
    cell.add(detection.Run(whose="scrubbed", found=True, found_by_seal=True, steps_after=7, **unsampled))
    cell.add(detection.Run(whose="sampled", injected=True, relied_on=True, found=True, steps_after=1))
    row = cell.as_dict()
    assert {k: row[k] for k in ("runs", "sampled", "found", "found_by_seals", "out_of_sight")} == {
        "runs": 3,
        "sampled": 1,
        "found": 2,
        "found_by_seals": 1,
        "out_of_sight": 1,
    }
    assert (row["median_steps_to_seals"], row["most_steps_to_seals"]) == (7, 7)
    assert (row["median_steps_after_injection"], row["most_steps_after_injection"]) == (4, 7)
    assert cell.passed


@pytest.mark.parametrize(
    "one",
    [
        detection.Run(whose="missed", injected=True, relied_on=True),
        detection.Run(whose="silent", injected=True, relied_on=True, found=True, silent=("there",)),
        detection.Run(whose="blamed", injected=True, relied_on=True, found=True, blamed_wrongly=("that",)),
        detection.Run(whose="raised", error="that"),
        detection.Run(whose="too few", injected=True),
    ],
    ids=lambda one: one.whose,
)
def test_what_fails_a_cell(one: detection.Run) -> None:
    cell = detection.Cell(mode="real_kv_used", group="FULL", stride=1, wanted=1)
    cell.add(one)
    assert not cell.passed


def test_with_a_stride_a_fault_may_be_gone_before_its_turn() -> None:
    cell = detection.Cell(mode="real_kv_used", group="FULL", stride=4, wanted=1)
    cell.add(detection.Run(whose="missed", injected=True, relied_on=True))
    assert (cell.found, cell.passed) == (0, True)


def test_suited_engines_have_what_the_fault_needs() -> None:
    rng = np.random.default_rng(0)
    seen: Counter[tuple[str, str, bool]] = Counter()
    for number in range(12):
        for config in random_engine.draw_configs(number, 4):
            for mode in MODES:
                for group in detection.GROUPS:
                    task = detection.Task(mode=mode, group=group, number=0, stride=1, device="cpu", backend="reference")
                    suited = detection._suited(config, task, rng)
                    seen[mode, group, suited is not None] += 1
                    if suited is not None:
                        check_suited(suited, mode, group)
    assert len(seen) == 2 * len(MODES) * len(detection.GROUPS)


def check_suited(config: EngineConfig, mode: str, group: str) -> None:
    groups = [g for g in config.groups if (g.kind == "full") == (group == "FULL")]
    assert groups
    if mode.startswith("real_kv"):
        assert any(g.k_source is not None or g.v_source is not None for g in groups)
    if mode == "real_kv_unused_cache":
        assert config.prefix_cache
        assert not config.has_ring


def test_batching_serves_every_model_that_there_is() -> None:
    assert batching.MODELS == ("llama", "mistral", "gemma3", "gptoss")
    assert {n % 16 for n in batching.LENGTHS} >= {0, 1, 15}
    assert {n % 24 for n in batching.LENGTHS} >= {0, 1, 23}
