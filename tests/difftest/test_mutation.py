"""The mutants are what they say, each runs as its own source says, and what nobody notices is told."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from kv_canary.backends import implementation, interpreting
from kv_canary.constants import OWNER_MASK
from kv_canary.difftest.ending import until_ended
from kv_canary.difftest.mutation import pool as mutation_pool
from kv_canary.difftest.mutation import run as mutation_run
from kv_canary.difftest.mutation.cli import ids_in, shown_progress
from kv_canary.difftest.mutation.cli import mutants as mutants_command
from kv_canary.difftest.mutation.mutants import make_mutants, mutants_of
from kv_canary.difftest.mutation.overlay import ROOT, overlaid, reached_ops, read_source, source_files
from kv_canary.difftest.mutation.planted import PLANTED_BUGS, find_planted, plant, planted, planted_source
from kv_canary.difftest.mutation.pool import Pool, Source, Verdict, cases_of
from kv_canary.difftest.mutation.run import (
    MutantResult,
    MutantStatus,
    MutationReport,
    equivalent_reasons,
    read_equivalents,
    run_mutants,
)
from kv_canary.difftest.mutation.runtime import LineMap, linked_package, run_runtime_mutants

# Children are forked, which a process that uses a GPU must not do.
pytestmark = pytest.mark.skipif(not interpreting(), reason="forks: on the CPU only")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Pool:
    cases = {op: cases_of(op, examples=8, seed=1) for op in ("retire", "move")}
    return Pool(cases=cases, device="cpu", jobs=1, folder=tmp_path_factory.mktemp("mutants"))


def verdict_of(pool: Pool, file: str, text: str) -> Verdict:
    verdicts: dict[str, Verdict] = {}
    pool.run([Source(key="it", file=file, text=text)], verdicts.__setitem__)
    return verdicts["it"]


def changed(file: str, old: str, new: str) -> str:
    source = read_source(file)
    assert source.count(old) == 1
    return source.replace(old, new)


def test_every_source_has_mutants_and_the_listed_ones_are_among_them() -> None:
    found = make_mutants()
    assert {mutant.file for mutant in found} == set(source_files())
    assert len({mutant.id for mutant in found}) == len(found)
    assert sum(mutant.file.startswith("kernels/") for mutant in found) >= 150
    # In this test too, as making all of them takes seconds.
    entries = read_equivalents()
    listed = make_mutants(sorted({entry["file"] for entry in entries}))
    assert set(equivalent_reasons(entries)) <= {mutant.id for mutant in listed}


def test_a_mutant_differs_from_its_source_in_the_lines_it_names() -> None:
    for mutant in make_mutants(["kernels/retire.py", "reference/plan.py"]):
        assert ast.dump(ast.parse(mutant.text)) != ast.dump(ast.parse(mutant.original))
        removed = [line[1:] for line in mutant.diff.splitlines()[3:] if line.startswith("-")]
        added = [line[1:] for line in mutant.diff.splitlines()[3:] if line.startswith("+")]
        assert " ".join(" ".join(removed).split()) in mutant.before
        assert " ".join(" ".join(added).split()) in mutant.after
        assert mutant.original.splitlines()[mutant.line - 1].strip().split()[0] in mutant.before


def test_ids_stay_when_other_lines_move() -> None:
    file = "kernels/move.py"
    source = read_source(file)
    assert [m.id for m in mutants_of(file, source)] == [m.id for m in mutants_of(file, "# moved\n\n" + source)]


def test_docstrings_annotations_decorators_and_tuning_are_left_alone() -> None:
    source = '"""Doc 1."""\nTILE_TOKENS = 8\nSCALE = 2\n@wrap(3)\ndef f(x: A[4]):\n    """Doc 5."""\n    return x < 6\n'
    assert {m.after for m in mutants_of("kernels/made_up.py", source)} == {"SCALE = 1", "return x <= 6", "return x < 5"}


def test_a_mutant_is_killed_by_a_difference_and_told_where(pool: Pool) -> None:
    for file in ("kernels/retire.py", "reference/retire.py"):
        old, new = ("(slot > 0)", "(slot > 40)") if file.startswith("kernels") else ("(slots > 0)", "(slots > 40)")
        verdict = verdict_of(pool, file, changed(file, old, new))
        assert (verdict.outcome, verdict.op) == ("BYTES_DIFFER", "retire")
        assert verdict.case >= 0
        assert "records" in verdict.detail


def test_a_changed_helper_is_seen_by_every_op_that_imports_it() -> None:
    checking = {"verify", "verify_prefixes", "verify_resolved"}
    assert set(reached_ops("kernels/checking.py")) == checking
    sealing = {"seal", "verify_seals"}
    chaining = {"chain_tails", "open_step"}
    assert set(reached_ops("kernels/hashing.py")) == {"move", "retire", "write"} | chaining | checking | sealing
    assert (owner_after("retire"), owner_after("move")) == (5, 5)
    with overlaid("kernels/hashing.py", changed("kernels/hashing.py", "as_u64(owner) & 0xFFFFFF", "as_u64(owner) & 6")):
        assert (owner_after("retire"), owner_after("move")) == (4, 4)
    assert (owner_after("retire"), owner_after("move")) == (5, 5)


def owner_after(op: str) -> int:
    """The owner that the Triton implementation stamps on slot 1, called with owner 5."""
    records, slots = torch.ones(2, 4, dtype=torch.int64), torch.tensor([1])
    staged = torch.zeros(1, 4, dtype=torch.int64)
    inputs: dict[str, Any] = {"slots": slots, "owner": torch.tensor([5])}
    if op == "move":
        inputs = {"src": slots, "dst": slots, "staged": staged, "owner": 5}
    implementation(op, "triton")(**inputs, step=torch.tensor([2]), records=(records,))
    return int(records[1, 3]) & OWNER_MASK


@pytest.mark.parametrize(
    ("statement", "outcome"),
    [
        ("raise KeyError(7)", "RAISED"),
        ("__import__('os').kill(__import__('os').getpid(), 11)", "CRASHED"),
        ("__import__('time').sleep(600)", "HUNG"),
        ("while True: pass", "HUNG"),
        ("pass", ""),
    ],
)
def test_an_exception_a_crash_and_a_hang_kill(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, statement: str, outcome: str
) -> None:
    monkeypatch.setitem(mutation_pool.SECONDS_PER_CASE, "cpu", 1.0)
    text = changed(
        "reference/retire.py", "    for buffer in records:\n", f"    {statement}\n    for buffer in records:\n"
    )
    assert verdict_of(pool, "reference/retire.py", text).outcome == outcome


def test_a_source_that_cannot_be_imported_is_killed(pool: Pool) -> None:
    verdict = verdict_of(pool, "kernels/retire.py", "raise OSError('broken')\n")
    assert (verdict.outcome, verdict.case) == ("RAISED", -1)


def test_the_run_checks_itself(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.check_itself(["kernels/retire.py"])
    monkeypatch.setattr(mutation_pool, "without_effect", lambda text: text)
    with pytest.raises(RuntimeError, match="must be noticed"):
        pool.check_itself(["kernels/retire.py"])
    monkeypatch.setattr(mutation_pool, "read_source", lambda file: changed(file, "(slot > 0)", "(slot > 40)"))
    with pytest.raises(RuntimeError, match="must be right as it is"):
        pool.check_itself(["kernels/retire.py"])


def test_a_source_meets_the_calls_that_it_is_given(pool: Pool) -> None:
    text = mutation_pool.without_effect(read_source("kernels/retire.py"))
    seen: dict[Any, Verdict] = {}
    kinds = ((0, None), (60, None), (None, ("move",)))
    sources = [Source(key=kind, file="kernels/retire.py", text=text, most=kind[0], ops=kind[1]) for kind in kinds]
    pool.run(sources, seen.__setitem__)
    assert [bool(seen[kind].outcome) for kind in kinds] == [False, True, False]


def retired(backend: str) -> list[int]:
    """The slots, of 1 to 5, that an implementation retires."""
    records = torch.ones(6, 4, dtype=torch.int64)
    function = implementation("retire", backend)
    function(slots=torch.arange(1, 6), owner=torch.tensor([1]), step=torch.tensor([2]), records=(records,))
    return (records[:, 3] < 0).nonzero().view(-1).tolist()


@pytest.mark.parametrize(("file", "backend"), [("kernels/retire.py", "triton"), ("reference/retire.py", "reference")])
def test_each_change_of_one_function_behaves_as_itself(file: str, backend: str) -> None:
    """Nothing stale (bytecode, source lines, rewritten kernels) stands in for the changed source."""
    check = "(slot > 0)" if backend == "triton" else "(slots > 0)"
    for least in (2, 4, 3, 2):
        with overlaid(file, changed(file, check, check.replace("0", str(least)))):
            assert retired(backend) == list(range(least + 1, 6))
        assert retired(backend) == [1, 2, 3, 4, 5]


def gone() -> dict[str, str]:
    mutant = make_mutants(["reference/retire.py"])[0]
    entry = {name: getattr(mutant, name) for name in ("file", "function", "before", "after")} | {"reason": "a test"}
    assert list(equivalent_reasons([entry])) == [mutant.id]
    return {**entry, "before": "slots = nowhere[slots > 0]"}


def test_an_entry_that_no_longer_applies_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no longer applies.*nowhere"):
        equivalent_reasons([gone()])
    path = tmp_path / "equivalent.toml"
    path.write_text("[[equivalent]]\n" + "".join(f"{name} = {json.dumps(text)}\n" for name, text in gone().items()))
    entries = read_equivalents(path)
    assert entries == [gone()]
    monkeypatch.setattr(mutation_run, "read_equivalents", lambda: entries)
    done = CliRunner().invoke(mutants_command, ["--file", "reference/retire.py", "--examples", "1"])
    assert done.exit_code == 2
    assert "no longer applies" in done.output


def test_an_entry_without_a_reason_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "equivalent.toml"
    path.write_text('[[equivalent]]\nfile = "kernels/move.py"\n')
    with pytest.raises(ValueError, match="must be of after, before, file, function, reason"):
        read_equivalents(path)


def test_a_run_tells_what_became_of_every_mutant() -> None:
    seen: list[tuple[int, int]] = []
    report = run_mutants(
        jobs=1,
        examples=6,
        files=["reference/retire.py"],
        sample=3,
        seed=4,
        on_progress=lambda result, done, total: seen.append((done, total)),
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]
    facts = report.as_dict(commit="abc")
    assert facts["total"] == facts["killed"] + facts["equivalent"] + facts["survived"] == len(facts["mutants"]) == 3
    assert facts["killed"] >= 1
    assert facts["commit"] == "abc"
    for told in facts["mutants"]:
        assert (told["killed_by"] is not None) == (told["status"] == "killed")


def test_a_run_goes_on_where_one_of_the_same_code_ended(tmp_path: Path) -> None:
    path = tmp_path / "mutants.json"
    options = ["--file", "reference/retire.py", "--examples", "6", "--jobs", "1", "--json", str(path)]
    CliRunner().invoke(mutants_command, [*options, "--sample", "2"])
    first = json.loads(path.read_text())
    assert first["total"] == 2
    # What is there does not run again: a wrong verdict stays.
    first["mutants"][0]["killed_by"] = {"outcome": "HUNG", "op": "retire", "case": 7, "detail": "told"}
    path.write_text(json.dumps(first))
    CliRunner().invoke(mutants_command, [*options, "--sample", "3"])
    second = json.loads(path.read_text())
    assert second["total"] >= 3
    assert {"outcome": "HUNG", "op": "retire", "case": 7, "detail": "told"} in [
        m["killed_by"] for m in second["mutants"]
    ]
    # Of other code nothing stays.
    second["sources"]["kernels"] = "0" * 16
    path.write_text(json.dumps(second))
    CliRunner().invoke(mutants_command, [*options, "--sample", "1"])
    assert json.loads(path.read_text())["total"] == 1


def test_an_interrupted_run_reports_what_it_reached() -> None:
    def interrupt(result: MutantResult, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    report = run_mutants(jobs=1, examples=2, files=["reference/retire.py"], sample=4, seed=4, on_progress=interrupt)
    assert (len(report.results), report.not_run) == (2, 2)
    assert report.as_dict()["not_run"] == 2
    assert not multiprocessing.active_children()


def made_report(status: MutantStatus, **fields: Any) -> MutationReport:
    mutant = make_mutants(["kernels/retire.py"])[0]
    report = MutationReport(
        results=(MutantResult(mutant=mutant, status=status),),
        refuted=(),
        examples=1,
        seed=0,
        device="none",
        seconds=1.0,
        versions={},
    )
    return dataclasses.replace(report, **fields)


@pytest.mark.parametrize(
    ("status", "not_run", "code"),
    [
        (MutantStatus.KILLED, 0, 0),
        (MutantStatus.EQUIVALENT, 0, 0),
        (MutantStatus.SURVIVED, 0, 1),
        (MutantStatus.KILLED, 3, 2),
    ],
)
def test_exit_code_and_survivors(
    status: MutantStatus, not_run: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = made_report(status, not_run=not_run)
    monkeypatch.setattr(mutation_run, "run_mutants", lambda **options: report)
    path = tmp_path / "report.json"
    done = CliRunner().invoke(mutants_command, ["--json", str(path)])
    assert done.exit_code == code, done.output
    assert (report.results[0].mutant.diff in done.output) == (status == MutantStatus.SURVIVED)
    assert json.loads(path.read_text())[status.value] == 1


def test_a_killed_mutant_that_is_listed_as_equivalent_fails_the_run() -> None:
    report = made_report(MutantStatus.KILLED)
    assert report.passed
    assert not dataclasses.replace(report, refuted=report.results).passed


@pytest.mark.parametrize("arguments", [["--file", "kernels/nothing.py"], ["--jobs", "0"], ["--list", "--file", "x"]])
def test_misuse_exits_with_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(mutants_command, arguments).exit_code == 2


def test_mutants_can_be_listed() -> None:
    done = CliRunner().invoke(mutants_command, ["--list", "--file", "kernels/retire.py"])
    assert done.exit_code == 0
    assert all(mutant.id in done.output for mutant in make_mutants(["kernels/retire.py"]))


def test_every_planted_bug_applies() -> None:
    assert len({bug.name for bug in PLANTED_BUGS}) == len(PLANTED_BUGS) >= 8
    for bug in PLANTED_BUGS:
        assert ast.dump(ast.parse(planted_source(bug, read_source(bug.file)))) != ast.dump(
            ast.parse(read_source(bug.file))
        )


def test_a_planted_bug_is_there_in_its_block_only() -> None:
    def moved() -> list[int]:
        records = torch.tensor([[0] * 4, [1, 2, 3, -4], [0] * 4])
        implementation("move", "triton")(
            src=torch.tensor([1]),
            dst=torch.tensor([2]),
            owner=1,
            step=torch.tensor([2]),
            records=(records,),
            staged=torch.zeros(1, 4, dtype=torch.int64),
        )
        return records[2].tolist()

    assert moved() == [0, 0, 0, 0]
    with planted("retired-moves"):
        assert moved()[:3] == [1, 2, 3]
    assert moved() == [0, 0, 0, 0]


def test_a_planted_text_that_is_gone_or_there_twice_is_refused() -> None:
    bug = find_planted("ring-row-lost")
    (old, _), source = bug.changes[0], read_source(bug.file)
    for text in (source.replace(old, "(index < room)"), source + f"# {old}\n"):
        with pytest.raises(ValueError, match=r"must be found once in kernels/reporting\.py, got"):
            planted_source(bug, text)
    with pytest.raises(ValueError, match="plant must be one of tile-edge"):
        plant("no-such-bug")


@pytest.mark.long
def test_a_line_map_says_which_tests_run_which_lines(tmp_path: Path) -> None:
    root, out = linked_package(tmp_path / "package"), tmp_path / "lines.json"
    program = Path(inspect.getfile(mutation_run)).with_name("line_map.py")
    command = [sys.executable, "-P", str(program), str(out), str(root), "-p", "no:xdist", "tests/runtime/test_rows.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=280)
    told = json.loads(out.read_text())
    source = read_source("kv_canary/runtime/rows.py").splitlines()
    [line] = [number for number, text in enumerate(source, 1) if text.strip().startswith("def release_all(")]
    assert told["failed"] == []
    # What stands in a function is run by tests, and its head by the import alone.
    assert told["lines"]["kv_canary/runtime/rows.py"][str(line)] == []
    assert any(tests for number, tests in told["lines"]["kv_canary/runtime/rows.py"].items() if int(number) > line)
    assert not any(file.startswith("kv_canary/kernels") for file in told["lines"])


@pytest.mark.long
def test_mutants_of_the_runtime_are_judged_by_the_tests_of_their_lines() -> None:
    file = "kv_canary/runtime/rows.py"
    mutants = make_mutants([file])
    killed = next(mutant for mutant in mutants if mutant.function == "RowTable.release_all")
    # One that changes nothing, and one whose lines no test runs.
    harmless = dataclasses.replace(killed, ordinal=8, text=read_source(file))
    unknown = dataclasses.replace(killed, ordinal=9, line=1)
    lines = LineMap(tests=["tests/runtime/test_rows.py"], seconds=[1.0], lines={file: {killed.line: [0]}})
    verdicts: dict[str, Verdict] = {}
    judged = (killed, harmless, unknown)
    run_runtime_mutants(judged, lines, jobs=1, on_verdict=lambda m, verdict: verdicts.update({m.id: verdict}))
    assert verdicts[killed.id].outcome == "RAISED"
    assert "test_rows.py" in verdicts[killed.id].detail
    assert verdicts[harmless.id] == verdicts[unknown.id] == Verdict()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_a_hook_swallowed_ends_the_run_all_the_same(number: signal.Signals) -> None:
    [mutant] = make_mutants(["reference/retire.py"])[:1]
    result = MutantResult(mutant=mutant, status=MutantStatus.KILLED)
    # What is started in the background ignores it, as `nohup make test &` does.
    before = signal.getsignal(signal.SIGINT)
    with until_ended() as is_ended, shown_progress(Console(quiet=True), is_ended) as on_progress:
        on_progress(result, 1, 9)
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        # `timeout` sends it a second time, to the group.
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            on_progress(result, 2, 9)
    assert signal.getsignal(signal.SIGINT) is before


def test_survivors_are_run_again_with_every_test_of_their_lines(tmp_path: Path) -> None:
    [mutant] = make_mutants(["kv_canary/runtime/rows.py"])[-1:]
    files = ["tests/a/test_a.py::one", "tests/a/test_a.py::two", "tests/a/test_rows.py::three", "tests/b.py::four"]
    seconds = [20.0, 30.0, 25.0, 900.0]
    lines = LineMap(tests=files, seconds=seconds, lines={mutant.file: {mutant.line: [0, 1, 2, 3]}})
    # First those that are named after the source; the quickest of the others.
    assert lines.tests_of(mutant) == ([files[2], files[0]], 45.0)
    assert lines.tests_of(mutant, again=True) == ([files[2], files[0]], 45.0)
    lines = dataclasses.replace(lines, seconds=[20.0, 30.0, 25.0, 40.0])
    assert lines.tests_of(mutant, again=True) == ([files[2], files[0], files[3], files[1]], 115.0)
    # A line that the import alone runs.
    lines = dataclasses.replace(lines, lines={mutant.file: {mutant.line: []}})
    assert lines.tests_of(mutant, again=True)[1] == 115.0
    # A line of constants, which is run as one with that before it.
    lines = dataclasses.replace(lines, lines={mutant.file: {mutant.line - 2: [2], mutant.line + 1: [0]}})
    assert lines.tests_of(mutant, again=True) == ([files[2]], 25.0)
    # One that a test happened to be the first to import.
    constant = next(m for m in make_mutants(["kv_canary/constants.py"]) if m.function == "<module>")
    lines = dataclasses.replace(lines, lines={constant.file: {constant.line: [1]}})
    assert lines.tests_of(constant, again=True)[1] == 115.0

    path = tmp_path / "result.json"
    path.write_text(json.dumps({"mutants": [{"id": mutant.id, "status": "survived"}, {"id": "x", "status": "killed"}]}))
    assert ids_in(path, status="survived") == {mutant.id}
    assert ids_in(path) == {mutant.id, "x"}
    path.write_text("[]")
    done = CliRunner().invoke(mutants_command, ["--survivors", str(path)])
    assert done.exit_code == 2
    assert "mutants must be a result of --json" in done.output


def test_the_sample_of_a_result_runs_again_on_the_code_of_today(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    options = ["--file", "reference/retire.py", "--examples", "6", "--jobs", "1", "--json", str(path)]
    CliRunner().invoke(mutants_command, [*options, "--sample", "2", "--seed", "5"])
    first = json.loads(path.read_text())
    # Another code made it, and knew a mutant that is gone.
    first["sources"]["kernels"] = "0" * 16
    first["mutants"].append({**first["mutants"][0], "id": "reference/retire.py:gone:00000000"})
    path.write_text(json.dumps(first))
    CliRunner().invoke(mutants_command, [*options, "--same", str(path)])
    second = json.loads(path.read_text())
    assert [m["id"] for m in second["mutants"]] == [m["id"] for m in first["mutants"][:2]]
    assert second["sources"]["kernels"] != first["sources"]["kernels"]
