"""`kv-canary run`: what it says of programs, and by which exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kv_canary.cli import main
from kv_canary.commands.run import verdict_of

# An engine with a pool of its own, which takes its settings from the environment; it may be damaged, or killed.
PROGRAM = """
import os, signal, sys
import torch
import kv_canary as kc

what = sys.argv[1]
k, v = torch.zeros(2, 2, 64, 8)
sources = [kc.KvSource(layers=tuple(x), page_size=1, bytes_per_token=32) for x in (k, v)]
pool = kc.KvPool(name="kv", num_slots=64, k_source=sources[0], v_source=sources[1], device="cpu")
limits = kc.CanaryLimits(max_rows=4, max_requests=4, max_tokens=32, max_len=64)
config = kc.CanaryConfig.from_env(backend="reference")
canary = kc.CanaryManager([kc.BufferGroup(name="full", pool=pool)], limits=limits, config=config)
table, text = torch.zeros(4, 64, dtype=torch.int32), list(range(40))
for start, end in ((0, 20), (20, 21), (21, 22)):
    if what != "clean":
        k[:, 1:8] += 1
    table[1, start:end] = slots = torch.arange(start + 1, end + 1)
    request = kc.ForwardRequest(
        request_id="a", row=1, owner=1, prefix_len=start, extend_len=end - start, tokens=lambda i, j: text[i:j]
    )
    batch = kc.ForwardBatch(
        requests=[request], out_slots={"full": slots}, tables={"full": table},
        input_ids=torch.tensor(text[start:end]), positions=torch.arange(start, end),
    )
    with canary.forward().around(batch):
        k[:, slots], v[:, slots] = torch.randn(2, 2, end - start, 8)
canary.flush()
if what == "killed":
    from kv_canary.output import OUTPUT
    OUTPUT.drain(5)
    os.kill(os.getpid(), signal.SIGKILL)
canary.close()
sys.exit(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("program") / "serve.py"
    path.write_text(PROGRAM)
    return str(path)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `kv-canary run` in a process of its own, in an environment without settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KV_CANARY_")}
    command = [sys.executable, "-P", "-m", "kv_canary", "run", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env={**kept, **environment}, timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        (
            ["clean"],
            0,
            "verdict: clean; watching complete, 41 of 41 cached positions verified in 3 steps, bytes by sample\n",
        ),
        (["damaged"], 1, "verdict: CORRUPTION: 1 incident, "),
        (["clean", "7"], 7, "kv-canary: the program itself ended with exit code 7\n"),
        (["killed"], 1, "kv-canary: 1 of 1 canaries did not come to an end"),
    ],
    ids=["clean", "damaged", "clean but failed", "killed"],
)
def test_a_program_ends_with_a_verdict(program: str, tmp_path: Path, what: list[str], code: int, said: str) -> None:
    path = tmp_path / "verdict.json"
    found = run("--json", str(path), "--", sys.executable, "-P", program, *what)
    assert found.returncode == code, found.stderr
    assert said in found.stderr
    assert found.stdout == ""
    told = json.loads(path.read_text())
    assert (told["code"], told["canaries"]) == (code, 1)
    assert told["summary"]["requests"] == ([] if "clean" in what else ["a"])
    if code == 1:
        assert "incident 1: step 2 HEAD_FULL: request a reads positions 0 to 6 in slots 1 to 7 of full" in found.stderr
        assert len(told["incidents"]) == told["summary"]["incidents"] == 1
        assert told["summary"]["violations"] >= 7


def test_where_no_canary_was_at_work_it_is_not_said_to_be_clean() -> None:
    found = run("--", sys.executable, "-c", "pass")
    assert found.returncode == 2
    assert "verdict: no verdict; watched nothing" in found.stderr
    assert "no canary was at work. SGLang and vLLM find kv-canary where it is installed" in found.stderr


def test_settings_reach_the_program_and_events_stay(program: str, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    run("--event-log", str(path), "--set", "stride=3", "--", sys.executable, "-P", program, "clean")
    first = path.read_text().splitlines()
    assert json.loads(first[0])["config"]["stride"] == 3
    # What another run has left there is not this one's.
    run("--", sys.executable, "-P", program, "damaged", KV_CANARY_EVENT_LOG=str(path))
    found = run("--", sys.executable, "-P", program, "clean", KV_CANARY_EVENT_LOG=str(path), KV_CANARY_MODE="raise")
    assert (found.returncode, "verdict: clean" in found.stderr) == (0, True)
    last = [json.loads(line) for line in path.read_text().splitlines() if json.loads(line)["event"] == "start"]
    assert [start["config"]["mode"] for start in last] == ["log", "log", "raise"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "Missing argument 'PROGRAM...'"),
        (["--set", "stride", "--", "true"], "--set: must be NAME=VALUE, as stride=1, got 'stride'"),
        (["--set", "strid=1", "--", "true"], "did you mean KV_CANARY_STRIDE?"),
        (["--mode", "loud", "--", "true"], "'loud' is not one of 'log', 'raise'"),
        (["--", "/no/such/program"], "/no/such/program cannot be run: No such file or directory"),
    ],
)
def test_misuse_is_refused_by_name(arguments: list[str], complaint: str) -> None:
    found = CliRunner().invoke(main, ["run", *arguments])
    assert (found.exit_code, complaint in " ".join(found.output.split())) == (2, True), found.output


def test_a_signal_reaches_the_program_and_the_verdict_comes_all_the_same(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    sleeper = f"import pathlib, time; pathlib.Path({str(ready)!r}).touch(); time.sleep(60)"
    command = [sys.executable, "-P", "-m", "kv_canary", "run", "--", sys.executable, "-c", sleeper]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "the program itself ended with exit code 143" in said


def event(kind: str, **facts: Any) -> dict[str, Any]:
    return {"event": kind, "time": datetime.now(UTC).isoformat(), "pid": 1, **facts}


def stop(step: int, watching: str) -> dict[str, Any]:
    counts = dict.fromkeys(("skipped", "positions_relied_on", "positions_verified", "violations", "incidents"), 0)
    return event("stop", step=step, watching=watching, requests=[], **counts)


@pytest.mark.parametrize(
    ("told", "code", "said"),
    [
        ([event("start"), stop(0, "off")], 2, "a canary was there, and no step ran before it"),
        ([event("start"), stop(0, "partial")], 2, "verdict: no verdict; watching partial, 0 of 0"),
        # Another one of the program's watched.
        ([event("start"), stop(0, "off"), event("start"), stop(9, "complete")], 0, "verdict: clean; watching complete"),
        # It was killed.
        ([event("start")], 2, "a canary was there, and no step ran before it"),
        (
            [event("start"), event("watching", step=4, watching="complete")],
            0,
            "verdict: clean; watching complete, 0 of",
        ),
    ],
)
def test_a_canary_that_saw_no_step_says_nothing_of_the_program(
    told: list[dict[str, Any]], code: int, said: str
) -> None:
    verdict = verdict_of(told, exit_code=0)
    assert (verdict.code, said in str(verdict)) == (code, True), str(verdict)


def test_canaries_of_several_processes_are_added_up() -> None:
    counts = {"violations": 0, "incidents": 0, "skipped": 1, "positions_relied_on": 10, "positions_verified": 9}
    ended = event("stop", step=5, watching="partial", requests=[], **counts)
    told = [event("start"), event("start"), event("watching", step=1, watching="complete"), ended]
    verdict = verdict_of(told, exit_code=0)
    assert (verdict.canaries, verdict.unfinished, verdict.code) == (2, 1, 0)
    assert (verdict.summary.watching, verdict.summary.positions_verified, verdict.summary.skipped) == ("partial", 9, 1)
    # The other one was killed after it had found something.
    found = event("incident", held_back=2, sentence="incident 1: ...", requests=["b"])
    verdict = verdict_of([*told, found, event("report", held_back=0)], exit_code=137)
    assert (verdict.code, verdict.summary.incidents, verdict.summary.violations) == (1, 3, 1)
    assert verdict.summary.requests == ("b",)
    # So had the first one, whose sum has what it told of.
    first = event("incident", held_back=0, sentence="incident 1: ...", requests=["a"])
    told[-1] = ended | {"violations": 4, "incidents": 1, "requests": ["a"]}
    verdict = verdict_of([first, *told, found | {"pid": 2}, event("report", held_back=0, pid=2)], exit_code=137)
    assert (verdict.summary.incidents, verdict.summary.violations) == (1 + 3, 4 + 1)
