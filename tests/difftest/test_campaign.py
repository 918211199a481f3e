"""Campaigns on the command line: what they run, what they find, how it is saved, replayed and made smaller."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import multiprocessing
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from kv_canary.cases.comparison import Mismatch, Outcome
from kv_canary.cli import main
from kv_canary.commands import progress
from kv_canary.difftest import campaign as campaigns
from kv_canary.difftest import cli, corpus, ending
from kv_canary.difftest.campaign import Campaign, CampaignResult, TargetStats, _Hunt, _Job, _Over
from kv_canary.difftest.coverage import Coverage
from kv_canary.difftest.ending import until_ended
from kv_canary.difftest.mutation.planted import PLANTED_BUGS
from kv_canary.difftest.search import draw_cases
from kv_canary.difftest.worker import Executor, import_all
from kv_canary.specs import get_spec
from kv_canary.specs.interface import KernelSpec

PROGRAM = str(Path(sys.executable).with_name("kv-canary"))
EXAMPLE = Path(__file__).resolve().parents[2] / "examples/your_own_kernel.py"
# Cases of the corpus that are called after an op and a bug that can be planted, with the bug.
OF_A_BUG = [
    (path, bug.name) for path in corpus.entries() for bug in PLANTED_BUGS if path.stem.partition("-")[2] == bug.name
]


def as_from_a_shell() -> dict[str, str]:
    """The environment without what the tests set for their own process."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def difftest(
    *arguments: str, folder: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `kv-canary difftest ...` in `folder`, on the CPU."""
    return subprocess.run(
        [PROGRAM, "difftest", *arguments],
        cwd=folder,
        env={**as_from_a_shell(), "COLUMNS": "160", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def replay_line(output: str) -> list[str]:
    """The arguments of the line that a campaign printed."""
    found = re.search(r"^replay it with: kv-canary difftest (replay .*)$", output, re.MULTILINE)
    assert found is not None, output
    return shlex.split(found[1])


@pytest.mark.every_day("retire")
@pytest.mark.parametrize("target", ["retire", "engine"])
def test_a_clean_run(tmp_path: Path, target: str) -> None:
    facts = tmp_path / "facts.json"
    options = ("--op", target, "--examples", "4", "--jobs", "1")
    done = difftest("run", *options, "--json", str(facts), "--coverage", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(facts.read_text())
    assert told["targets"][target]["cases"] >= (4 if target == "retire" else 1)
    assert told["findings"] == told["errors"] == []
    assert 0 < told["coverage"]["covered_pairs"] < told["coverage"]["feasible_pairs"]
    assert "padding:rows" in done.stdout
    assert not (tmp_path / "findings").exists()


def test_the_corpus_has_cases_of_most_planted_bugs() -> None:
    assert len({bug for _, bug in OF_A_BUG}) >= 9


@pytest.mark.every_day("chain_tails-tail-anchor", "move-retired-moves", "write-word-tail")
@pytest.mark.parametrize(("path", "bug"), OF_A_BUG, ids=[path.stem for path, _ in OF_A_BUG])
def test_a_case_of_the_corpus_fails_where_its_bug_is_planted(path: Path, bug: str, tmp_path: Path) -> None:
    done = difftest("replay", str(path), "--plant", bug, folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr


@pytest.mark.long
def test_what_is_found_is_saved_shrunk_replayed_and_minimized(tmp_path: Path) -> None:
    facts = tmp_path / "facts.json"
    plant = ("--plant", "exclusive-scan")
    options = ("--op", "write", "--minutes", "4", "--jobs", "1", "--max-findings", "1", "--shrink", "20", *plant)
    options += ("--database", "db")
    done = difftest("fuzz", *options, "--json", str(facts), folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    (finding,) = json.loads(facts.read_text())["findings"]
    assert finding["op"] == "write"
    assert finding["found_after_s"] > 0
    assert shlex.split(finding["replay"])[2:] == replay_line(done.stdout)

    line = replay_line(done.stdout)
    assert line[-2:] == list(plant)
    again = difftest(*line, folder=tmp_path)
    assert again.returncode == 1, again.stdout + again.stderr
    # Which record, which field, and which program wrote it.
    assert re.search(r"record of slot \d+, CHAIN", again.stdout), again.stdout
    assert re.search(r"_(store|write_at_once)\[", again.stdout), again.stdout
    as_json = difftest(*line, "--json", folder=tmp_path)
    told = json.loads(as_json.stdout)
    assert told["fails"]
    assert told["differences"][0]["expected"] != told["differences"][0]["got"]
    # The kernels as they are do not fail.
    right = difftest(*line[:-2], folder=tmp_path)
    assert right.returncode == 0, right.stdout
    # A person can read the case: a token, or a few, or a few more where the machine is busy.
    assert re.search(r"input_ids\W+in\W+int64\[\d\d?\]", again.stdout), again.stdout

    # Another campaign begins with what this one found.
    difftest(
        "fuzz", *options, "--database", "ro:db", "--seed", "1", "--shrink", "1", "--json", str(facts), folder=tmp_path
    )
    (finding,) = json.loads(facts.read_text())["findings"]
    assert finding["cases_before"] == 1

    smaller = difftest("minimize", line[1], "-o", "small.kvcase", "--max-tries", "60", *plant, folder=tmp_path)
    assert smaller.returncode == 1, smaller.stdout + smaller.stderr
    assert difftest("replay", "small.kvcase", *plant, folder=tmp_path).returncode == 1
    assert difftest("minimize", line[1], folder=tmp_path).returncode == 0


BAD_KERNEL = """
import os, time
import torch
from hypothesis import strategies as st
from kv_canary import register
from kv_canary.difftest.strategies import register_cases
from kv_canary.specs.interface import KernelSpec, TensorSpec

SPEC = KernelSpec(name="bad", doc="Copy.", arguments={
    "x": TensorSpec(dtype=torch.int64, shape=("n",)),
    "y": TensorSpec(dtype=torch.int64, shape=("n",), role="out"),
})

@register(SPEC, backend="reference")
def reference(*, x, y):
    y.copy_(x)

@register(SPEC, backend="triton")
def triton(*, x, y):
    if len(x) >= 3 and int(x[1]) > 4:
        MISCHIEF
    y.copy_(x)

@register_cases("bad")
def cases():
    return st.lists(st.integers(0, 9), max_size=6).map(
        lambda xs: {"x": torch.tensor(xs, dtype=torch.int64), "y": torch.zeros(len(xs), dtype=torch.int64)})
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("mischief", "says"),
    [("raise KeyError('lost')", "KeyError: 'lost'"), ("os.abort()", "exit code -6")],
    ids=["raises", "crashes"],
)
def test_a_kernel_that_kills_its_process_is_shrunk_too(tmp_path: Path, mischief: str, says: str) -> None:
    (tmp_path / "bad.py").write_text(BAD_KERNEL.replace("MISCHIEF", mischief))
    done = difftest(
        "run", "--import", "bad.py", "--op", "bad", "--examples", "60", "--jobs", "1", "--shrink", "10", folder=tmp_path
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert says in done.stdout
    again = difftest(*replay_line(done.stdout), folder=tmp_path)
    assert again.returncode == 1, again.stdout + again.stderr
    assert "[0, 5, 0]" in again.stdout
    # The line names the code that it runs; without that, none of it runs.
    file, *imported = replay_line(done.stdout)[1:]
    assert imported == ["--import", "bad.py"]
    refused = difftest("replay", file, folder=tmp_path)
    assert refused.returncode == 2
    assert "wants bad.py: pass --import bad.py to run its code" in refused.stderr
    smaller = difftest("minimize", file, *imported, "-o", "s.kvcase", "--max-tries", "5", folder=tmp_path)
    assert replay_line(smaller.stdout)[1:] == ["s.kvcase", "--import", "bad.py"]
    if "abort" in mischief:
        # The line that the process died in.
        assert re.search(r"bad\.py:\d+ \(triton\)", again.stdout), again.stdout


def test_a_kernel_that_hangs_is_found(tmp_path: Path) -> None:
    path = tmp_path / "sleepy.py"
    path.write_text(BAD_KERNEL.replace("MISCHIEF", "time.sleep(600)").replace('"bad"', '"sleepy"'))
    import_all([str(path)])
    right, wrong = torch.tensor([1, 1, 1]), torch.tensor([1, 9, 1])
    with Executor(imports=[str(path)], time_limit_s=20.0) as executor:
        assert executor.check(get_spec("sleepy"), {"x": right, "y": torch.zeros_like(right)}) is None
        executor.time_limit_s = 0.4
        found = executor.check(get_spec("sleepy"), {"x": wrong, "y": torch.zeros_like(wrong)})
        assert found is not None
        assert found.outcome is Outcome.HUNG
        # The process was replaced, and the call had a second one.
        executor.time_limit_s = 20.0
        assert executor.check(get_spec("sleepy"), {"x": right, "y": torch.zeros_like(right)}) is None
        assert executor.restarts == 2
        # Once it is known to hang, it is believed.
        executor.time_limit_s = 0.4
        assert executor.check(get_spec("sleepy"), {"x": wrong, "y": torch.zeros_like(wrong)}) is not None
        executor.time_limit_s = 20.0
        assert executor.check(get_spec("sleepy"), {"x": right, "y": torch.zeros_like(right)}) is None
        assert executor.restarts == 3
        with pytest.raises(ValueError, match="sleepy: y"):
            executor.check(get_spec("sleepy"), {"x": right, "y": torch.zeros(2, dtype=torch.int64)})


def test_a_call_that_hung_once_and_not_again_is_no_finding(tmp_path: Path) -> None:
    path = tmp_path / "tired.py"
    slept = str(tmp_path / "slept")
    mischief = f"time.sleep(0 if os.path.exists({slept!r}) or open({slept!r}, 'w').close() else 600)"
    path.write_text(BAD_KERNEL.replace("MISCHIEF", mischief).replace('"bad"', '"tired"'))
    import_all([str(path)])
    wrong = torch.tensor([1, 9, 1])
    with Executor(imports=[str(path)], time_limit_s=20.0) as executor:
        assert executor.check(get_spec("tired"), {"x": wrong[:2], "y": torch.zeros_like(wrong[:2])}) is None
        executor.time_limit_s = 0.4
        assert executor.check(get_spec("tired"), {"x": wrong, "y": torch.zeros_like(wrong)}) is None
        assert executor.restarts == 1


PLAIN = """
import torch
from hypothesis import strategies as st
from kv_canary import register
from kv_canary.difftest.strategies import register_cases
from kv_canary.specs.interface import KernelSpec, TensorSpec

SPEC = KernelSpec(name="plain", doc="Double.", arguments={
    "x": TensorSpec(dtype=torch.int64, shape=("n",)),
    "y": TensorSpec(dtype=torch.int64, shape=("n",), role="out"),
})
register(SPEC, backend="reference")(lambda *, x, y: y.copy_(x * 2))
register(SPEC, backend="triton")(lambda *, x, y: y.copy_(x + x + (x == 7)))

@register_cases("plain")
def cases():
    return st.lists(st.integers(0, 9), max_size=6).map(
        lambda xs: {"x": torch.tensor(xs, dtype=torch.int64), "y": torch.zeros(len(xs), dtype=torch.int64)})
"""
NO_TRITON = """
import importlib.machinery

find = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = staticmethod(
    lambda name, path=None, target=None: None if name.split(".")[0] == "triton" else find(name, path, target)
)
"""


def test_pytorch_is_held_against_pytorch_where_triton_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    (tmp_path / "without").mkdir()
    (tmp_path / "without/sitecustomize.py").write_text(NO_TRITON)
    environment = {"PYTHONPATH": str(tmp_path / "without")}
    options = ("--import", "plain.py", "--op", "plain", "--examples", "60", "--jobs", "1", "--max-findings", "1")
    done = difftest("run", *options, folder=tmp_path, environment=environment)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "first at [0]: expected 14, got 15" in done.stdout
    again = difftest(*replay_line(done.stdout), folder=tmp_path, environment=environment)
    assert again.returncode == 1, again.stdout + again.stderr
    own = difftest("run", "--op", "retire", "--examples", "1", folder=tmp_path, environment=environment)
    assert own.returncode == 2
    assert "triton must be installed for retire" in own.stderr


def test_what_fails_while_a_campaign_is_being_ended_is_no_finding() -> None:
    job = object.__new__(_Job)
    job.known, job._hunt = set(), _Hunt()
    mismatch = Mismatch(Outcome.RAISED, op="retire", backend="triton", detail="gcc was ended")
    job.is_ended = lambda: True
    with pytest.raises(_Over):
        job.hunted(get_spec("retire"), {}, mismatch)
    assert job._hunt.signature is None


@pytest.mark.parametrize("most", [1, 2, 0])
def test_a_job_ends_with_as_many_findings_as_were_asked_for(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait to be told: until then it could find another."""
    (case,) = draw_cases("retire", examples=1, seed=0)
    monkeypatch.setattr("kv_canary.difftest.campaign.search", lambda spec, fails, **_: fails(case))
    kinds = [Outcome.RAISED, Outcome.BYTES_DIFFER, Outcome.NOT_REPEATABLE]
    campaign = Campaign(targets=("retire",), examples=40, max_findings=most, findings=tmp_path)
    events: queue.Queue[dict[str, Any]] = queue.Queue()
    job = _Job(campaign, 0, 0, time.monotonic(), events, multiprocessing.Event())

    def fails(spec: KernelSpec, arguments: Mapping[str, Any]) -> Mismatch:
        kind = kinds[min(len(job.known), len(kinds) - 1)]
        return Mismatch(kind, op=spec.name, backend="reference", detail="of that kind")

    job.executor.check = fails  # type: ignore[method-assign]
    with pytest.raises(_Over) if most else contextlib.nullcontext():
        job.run()
    told = {event["finding"].signature for event in events.queue if "finding" in event}
    assert len(told) == (most or len(kinds))


def a_result(**more: Any) -> CampaignResult:
    return CampaignResult(stats={"retire": TargetStats(cases=3)}, findings={}, coverage=Coverage(), errors=[], **more)


def test_facts_are_in_their_file_before_a_campaign_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed by somebody who does not wait loses what came since they were written last."""
    facts, campaign = tmp_path / "facts.json", Campaign(targets=("retire",), examples=40)
    kept = cli._Kept(facts, campaign, "a commit")
    kept.now_and_then(a_result())
    assert not facts.exists()
    monkeypatch.setattr(cli, "_KEEP_EVERY_S", 0.0)
    kept = cli._Kept(facts, campaign, "a commit")
    kept.now_and_then(a_result())
    told = json.loads(facts.read_text())
    assert told["interrupted"]
    assert (told["cases"], told["commit"]) == (3, "a commit")
    kept.write(a_result(seconds=1.5))
    assert not json.loads(facts.read_text())["interrupted"]
    assert json.loads(facts.read_text())["seconds"] == 1.5


def test_what_cannot_be_written_early_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe has nobody who reads it yet, and gets its facts once; a disk may be full for a while."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr(cli, "_KEEP_EVERY_S", 0.0)
    for path in (pipe, tmp_path / "no folder" / "facts.json"):
        kept = cli._Kept(path, Campaign(targets=("retire",), examples=40), "")
        kept.now_and_then(a_result())
    with pytest.raises(FileNotFoundError):
        kept.write(a_result())


def test_a_campaign_that_is_ended_waits_for_all_of_its_jobs_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for one after the other: two dozen that compile for a GPU took minutes."""
    killed: list[int] = []

    class Stuck:
        exitcode = None

        def __init__(self, *, args: tuple[Any, ...], **_: Any) -> None:
            self.index = args[1]

        def start(self) -> None:
            pass

        def is_alive(self) -> bool:
            return True

        def join(self, timeout: float) -> None:
            time.sleep(timeout)

        def kill(self) -> None:
            killed.append(self.index)

    context = types.SimpleNamespace(Queue=queue.Queue, Event=threading.Event, Process=Stuck)
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: context)
    monkeypatch.setattr(campaigns, "_LAST_CALLS_S", 0.5)
    told: list[bool] = []

    def on_change(result: CampaignResult) -> None:
        told.append(result.interrupted)
        if len(told) == 1:
            raise KeyboardInterrupt

    began = time.monotonic()
    result = campaigns.run_campaign(Campaign(targets=("retire",), examples=40, jobs=20), on_change=on_change)
    assert time.monotonic() - began < 5
    assert killed == list(range(20))
    assert result.interrupted
    assert told == [False, True]


def test_two_signals_at_once_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` sends one to the process that it started, and the same to the group that it is in."""
    with until_ended() as is_ended:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert is_ended()
        monkeypatch.setattr(ending, "_ONE_S", 0.0)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.long
@pytest.mark.parametrize("jobs", ["1", "3"])
def test_a_run_has_as_many_cases_as_were_asked_for_whatever_the_jobs(jobs: str, tmp_path: Path) -> None:
    options = ("--op", "retire", "--examples", "25", "--jobs", jobs, "--json", "facts.json")
    done = difftest("run", *options, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "facts.json").read_text())["targets"]["retire"]["cases"] == 25


@pytest.mark.long
def test_mutants_run_from_a_shell(tmp_path: Path) -> None:
    options = ("--file", "kernels/retire.py", "--sample", "2", "--examples", "40", "--jobs", "1")
    done = difftest("mutants", *options, "--json", "mutants.json", folder=tmp_path)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert json.loads((tmp_path / "mutants.json").read_text())["total"] == 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("end", "is_timeout", "how", "status"),
    [
        (signal.SIGINT, False, ("fuzz", "--minutes", "5"), 0),
        (signal.SIGINT, True, ("fuzz", "--minutes", "5"), 0),
        (signal.SIGTERM, True, ("fuzz", "--minutes", "5"), 0),
        # Not as many as were asked for.
        (signal.SIGTERM, True, ("run", "--examples", "100000"), 2),
    ],
)
def test_what_is_ended_early_keeps_what_there_is(
    end: signal.Signals, is_timeout: bool, how: tuple[str, ...], status: int, tmp_path: Path
) -> None:
    """By Ctrl-C, which all processes of a group get once, or by `timeout`."""
    facts = tmp_path / "facts.json"
    command = [PROGRAM, "difftest", *how, "--jobs", "1", "--op", "retire", "--json", str(facts)]
    options = {"cwd": tmp_path, "env": as_from_a_shell(), "stdout": subprocess.PIPE, "start_new_session": True}
    # Who runs the tests in the background may ignore the signal, and so would all that is started.
    options["preexec_fn"] = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    running = subprocess.Popen(command, text=True, **options)
    time.sleep(25)
    if is_timeout:
        # It sends its signal to the process that it started first.
        os.kill(running.pid, end)
    # As a terminal does, and `timeout` then: to every process of the group.
    os.killpg(running.pid, end)
    output, _ = running.communicate(timeout=60)
    assert running.returncode == status, output
    assert "interrupted" in output
    told = json.loads(facts.read_text())
    assert told["interrupted"]
    assert told["cases"] > 0


@pytest.mark.long
def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    options = (
        "run",
        "--import",
        str(EXAMPLE),
        "--op",
        "paged_gather",
        "--examples",
        "60",
        "--jobs",
        "1",
        "--shrink",
        "20",
    )
    right = difftest(*options, folder=tmp_path)
    assert right.returncode == 0, right.stdout + right.stderr
    wrong = difftest(*options, folder=tmp_path, environment={"YOUR_KERNEL": "wrong"})
    assert wrong.returncode == 1, wrong.stdout + wrong.stderr
    line = replay_line(wrong.stdout)
    assert difftest(*line, folder=tmp_path).returncode == 0
    again = difftest(*line, folder=tmp_path, environment={"YOUR_KERNEL": "wrong"})
    assert again.returncode == 1
    # A value, or a few, of a page just past the last one.
    assert re.search(r"out\W+out\W+int32\[\d\]", again.stdout), again.stdout
    assert sum(bool(line.strip()) for line in EXAMPLE.read_text().splitlines()) < 60


def test_a_run_without_a_case_of_some_target_is_inconclusive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    done = CliRunner().invoke(main, ["difftest", "fuzz", "--minutes", "0.0001", "--jobs", "1"])
    assert done.exit_code == 2, done.output
    assert re.search(r"inconclusive: no case was run of .*verify", " ".join(done.stdout.split()))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("run", "--op", "no_such"), "no_such"),
        (("run", "--import", "nowhere.py"), "nowhere.py"),
        (("run", "--plant", "no_such"), "no_such"),
        (("run", "--database", "ftp://x"), "ftp://x"),
        (("fuzz", "--minutes", "0"), "minutes"),
        (("replay", "nothing.kvcase"), "nothing.kvcase"),
        (("planted", "--name", "no_such"), "no_such"),
        (("run", "--device", "cuda"), "cuda"),
    ],
)
def test_misuse(tmp_path: Path, arguments: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["difftest", *arguments])
    assert done.exit_code == 2, done.output
    assert says in done.stderr


@pytest.mark.parametrize("missing", ["hypothesis", "triton"])
def test_says_what_to_install(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    done = CliRunner().invoke(main, ["difftest", "run"])
    assert done.exit_code == 2
    assert f"pip install '{missing}>=" in done.stderr


def test_commands_teach() -> None:
    for command in ("run", "fuzz", "replay", "minimize", "planted", "sanitize", "mutants"):
        done = CliRunner().invoke(main, ["difftest", command, "--help"])
        assert done.exit_code == 0
        assert f"kv-canary difftest {command}" in done.output
        # Who starts what takes minutes should know.
        assert ("took seven minutes on two cores" in " ".join(done.output.split())) == (command == "run")
    assert "lut-twice" in CliRunner().invoke(main, ["difftest", "planted", "--list"]).output
    entries = json.loads(CliRunner().invoke(main, ["difftest", "corpus", "list", "--json"]).output)
    assert all({"file", "op", "says"} == set(entry) for entry in entries)


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    with progress.progress_bar(Console(file=io.StringIO()), "what bar done") as shown:
        task = shown.add_task("starting", total=40)
        shown.update(task, completed=7, description="[red]seven[/] cases")
        shown.advance(task)
        monkeypatch.setattr(progress, "EVERY_S", 1e9)
        shown.advance(task)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.rpartition(",")[0] for line in err.splitlines()] == [
        "kv-canary: seven cases, 7 of 40",
        "kv-canary: seven cases, 8 of 40",
    ]
