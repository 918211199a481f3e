"""Mutants of the runtime, each judged by the tests that run its changed lines.

The runtime has no reference that says what is right: its tests do. Which test runs which line is measured once
(`line_map`), and kept until a source or a test changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from kv_canary.cases.comparison import Outcome
from kv_canary.difftest.mutation.mutants import Mutant
from kv_canary.difftest.mutation.overlay import ROOT
from kv_canary.difftest.mutation.pool import Verdict
from kv_canary.errors import must_be

# Whose tests judge.
TESTS = (
    "tests/runtime",
    "tests/engines",
    "tests/scenarios",
    "tests/strangers",
    "tests/test_validation.py",
    *(
        f"tests/difftest/test_{name}.py"
        for name in ("casefile", "corpus", "golden", "runner", "shadow", "stranger_cases")
    ),
)
PARTS = ("bench", "difftest", "kernels", "reference")
# How a mutant calls the function that a line of a module is in.
_MODULE = "<module>"
CACHE = ROOT / ".mutation"
# Tests that a mutant meets, and their seconds together, without the mutant; and what one meets that is looked at again.
MOST_TESTS, MOST_SECONDS = 150, 45.0
MOST_SECONDS_AGAIN = 600.0
# How long a mutant's tests may take, beside four times what they took when the lines were measured: importing.
SLACK_S = 60.0


@dataclass(frozen=True, kw_only=True)
class LineMap:
    """A map from lines of sources to the tests that run them.

    Args:
        tests: by number.
        seconds: that each took.
        lines: of each file, the tests of each line.
    """

    tests: Sequence[str]
    seconds: Sequence[float]
    lines: dict[str, dict[int, list[int]]]

    def tests_of(self, mutant: Mutant, *, again: bool = False) -> tuple[list[str], float]:
        """Return the tests that judge a mutant, and their seconds; none where no test runs it.

        First come those of test files that are named after the source, then those of every other file by turns, the
        quickest of each first. A line that only the import runs may be judged by any test.

        Args:
            again: whether a mutant is looked at again, with all of these tests.
        """
        lines = self.lines.get(mutant.file, {})
        changed = range(mutant.line, mutant.line + mutant.num_lines)
        if not any(line in lines for line in changed):
            # Of an expression of constants alone, Python runs the line that its statement begins in.
            begin = max((line for line in lines if line < mutant.line), default=mutant.line)
            changed = range(begin, begin + 1)
        found = {test for line in changed for test in lines.get(line, ())}
        if any(line in lines for line in changed) and (not found or mutant.function == _MODULE):
            # Whichever test happened to import it first.
            found = set(range(len(self.tests)))
        chosen, seconds = list[str](), 0.0
        for test in self._in_order(found, Path(mutant.file).stem):
            is_full = not again and (len(chosen) == MOST_TESTS or seconds + self.seconds[test] > MOST_SECONDS)
            if chosen and (is_full or seconds + self.seconds[test] > MOST_SECONDS_AGAIN):
                break
            chosen.append(self.tests[test])
            seconds += self.seconds[test]
        return chosen, seconds

    def _in_order(self, found: Iterable[int], source: str) -> list[int]:
        files: dict[str, list[int]] = {}
        for number in sorted(found, key=lambda number: self.seconds[number]):
            files.setdefault(Path(self.tests[number].split("::")[0]).stem, []).append(number)
        own = [number for file, numbers in files.items() if source in file for number in numbers]
        others = [numbers for file, numbers in files.items() if source not in file]
        return own + [number for turn in zip_longest(*others) for number in turn if number is not None]


def line_map(*, jobs: int) -> LineMap:
    """Return which tests run which lines, measured anew where a source or a test has changed since."""
    digest = _digest()
    path = CACHE / f"{digest}.json"
    if not path.exists():
        shutil.rmtree(CACHE, ignore_errors=True)
        CACHE.mkdir()
        _measure(path, jobs=jobs)
    told = json.loads(path.read_text(encoding="utf-8"))
    lines = {file: {int(line): tests for line, tests in found.items()} for file, found in told["lines"].items()}
    return LineMap(tests=told["tests"], seconds=told["seconds"], lines=lines)


def _digest() -> str:
    whole = hashlib.sha256()
    for folder in ("kv_canary", "kernels", "reference", "difftest", *(t for t in TESTS)):
        paths = [ROOT / folder] if folder.endswith(".py") else sorted((ROOT / folder).rglob("*.py"))
        for path in paths:
            whole.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()[:16]


def _measure(path: Path, *, jobs: int) -> None:
    program = Path(__file__).with_name("line_map.py")
    options = ["--examples", "20", "-m", "not long and not tf517"]
    with tempfile.TemporaryDirectory(prefix="kv-canary-lines-") as name:
        folder = Path(name)
        root = linked_package(folder / "package")
        waiting = deque((tests, folder / f"{number}.json") for number, tests in enumerate(TESTS))
        outs = [out for _, out in waiting]
        running: dict[str, subprocess.Popen[bytes]] = {}
        while waiting or running:
            while waiting and len(running) < jobs:
                tests, out = waiting.popleft()
                command = [sys.executable, "-P", str(program), str(out), str(root), *options, tests]
                environment = {**os.environ, "TRITON_INTERPRET": "1"}
                running[tests] = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
            time.sleep(0.2)
            for tests, process in [(t, p) for t, p in running.items() if p.poll() is not None]:
                if process.returncode or not outs[TESTS.index(tests)].exists():
                    got = f"exit {process.returncode}"
                    raise RuntimeError(must_be("difftest", f"lines of {tests}", "measured", got))
                del running[tests]
        found = [json.loads(out.read_text(encoding="utf-8")) for out in outs]
    merged: dict[str, Any] = {"tests": [], "seconds": [], "lines": {}}
    for each in found:
        first = len(merged["tests"])
        merged["tests"] += each["tests"]
        merged["seconds"] += each["seconds"]
        for file, lines in each["lines"].items():
            known = merged["lines"].setdefault(file, {})
            for line, tests in lines.items():
                known.setdefault(line, []).extend(first + test for test in tests)
    path.write_text(json.dumps(merged), encoding="utf-8")


def linked_package(root: Path, changed: str | None = None, text: str = "") -> Path:
    """Make a folder with a package of links to the sources, but for one file that is changed; return the folder."""
    package = root / "kv_canary"
    _link(ROOT / "kv_canary", package)
    for part in PARTS:
        (package / part).symlink_to(ROOT / part)
    if changed is not None:
        *parts, name = changed.split("/")[1:]
        folder, source = package, ROOT / "kv_canary"
        for part in parts:
            folder, source = folder / part, source / part
            folder.unlink()
            _link(source, folder)
        (folder / name).unlink()
        (folder / name).write_text(text, encoding="utf-8")
    return root


def _link(source: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.name != "__pycache__":
            (folder / path.name).symlink_to(path)


def run_runtime_mutants(
    mutants: Iterable[Mutant],
    lines: LineMap,
    *,
    jobs: int,
    on_verdict: Callable[[Mutant, Verdict], None],
    again: bool = False,
) -> None:
    """Run each mutant's tests in a process of its own, and tell the verdict on each.

    Args:
        again: see `LineMap.tests_of`.
    """
    waiting = deque(mutants)
    with tempfile.TemporaryDirectory(prefix="kv-canary-mutants-") as name:
        servers = [_Server(Path(name) / str(number)) for number in range(jobs)]
        try:
            while waiting or any(server.mutant for server in servers):
                for server in servers:
                    while server.mutant is None and waiting:
                        mutant = waiting.popleft()
                        tests, seconds = lines.tests_of(mutant, again=again)
                        if tests:
                            server.begin(mutant, tests, limit_s=SLACK_S + 4 * seconds)
                        else:
                            on_verdict(mutant, Verdict())
                busy = {server.answers: server for server in servers if server.mutant is not None}
                # Nobody is busy where no test runs what the last mutants change.
                for answers in wait(list(busy)) if busy else ():
                    on_verdict(*busy[answers].result())
        finally:
            for server in servers:
                server.stop()


class _Server:
    """A `fork_server`, and the mutant that it works on."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0
        self.mutant: Mutant | None = None
        command = [sys.executable, "-P", str(Path(__file__).with_name("fork_server.py"))]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def begin(self, mutant: Mutant, tests: list[str], *, limit_s: float) -> None:
        self.mutant, self._number = mutant, self._number + 1
        root = linked_package(self._folder / str(self._number), mutant.file, mutant.text)
        self._send({"key": mutant.id, "root": str(root), "tests": tests, "limit_s": limit_s})

    @property
    def answers(self) -> Any:
        """The pipe that can be read once the verdict is there."""
        return self._process.stdout

    def result(self) -> tuple[Mutant, Verdict]:
        """Return the mutant and the verdict on it; wait for it."""
        mutant, self.mutant = self.mutant, None
        line = self.answers.readline()
        shutil.rmtree(self._folder / str(self._number), ignore_errors=True)
        if not line or mutant is None:
            raise RuntimeError(must_be("difftest", "fork server", "at work", f"exit {self._process.poll()}"))
        told = json.loads(line)
        return mutant, _verdict(told["code"], told["said"])

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _send(self, request: dict[str, Any]) -> None:
        requests: Any = self._process.stdin
        requests.write(json.dumps(request) + "\n")
        requests.flush()


def _verdict(code: int, said: str) -> Verdict:
    if code == 0:
        return Verdict()
    outcome = Outcome.HUNG if code == -1 else Outcome.CRASHED if code < 0 else Outcome.RAISED
    return Verdict(outcome=outcome.name, op="tests", case=-1, detail=said)
