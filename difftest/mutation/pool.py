"""Changed sources run in forked children of one prepared process, each against the same generated calls."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import faulthandler
import multiprocessing
import os
import shutil
import signal
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from kv_canary import backends
from kv_canary.cases.casefile import load as load_case
from kv_canary.cases.comparison import Mismatch, Outcome
from kv_canary.difftest import corpus
from kv_canary.difftest.mutation.overlay import load, reached_ops, read_source
from kv_canary.difftest.patience import Patience
from kv_canary.difftest.runner import check_case
from kv_canary.difftest.search import draw_cases
from kv_canary.difftest.strategies.large import large_cases
from kv_canary.errors import must_be
from kv_canary.specs import get_spec

# Seconds of a core that a call may take: one takes below five, on a slow core too; compiling for a GPU takes longer.
SECONDS_PER_CASE = {"cpu": 30.0, "cuda": 180.0}
# Of all ops together, those first that killed most: what code meets that is known, or argued, to do the same.
FEW_CALLS = 60
Cases = Mapping[str, Sequence[Mapping[str, Any]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict of a child: the outcome that killed the mutant, "" if none did."""

    outcome: str = ""
    op: str = ""
    case: int = -1
    detail: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A source to run instead of a file's.

    Args:
        key: whose verdict it is.
        file: that it replaces, as kernels/plan.py.
        text: of the source.
        ops: whose calls it meets; None: of all that reach the file.
        most: how many of these, those first that killed most; None: all.
    """

    key: Any
    file: str
    text: str
    ops: Sequence[str] | None = None
    most: int | None = None


@dataclasses.dataclass(kw_only=True)
class _Child:
    """A running child, and the call that it is at."""

    key: Any
    process: BaseProcess
    folder: Path
    patience: Patience
    op: str = ""
    case: int = -1


class Pool:
    """Runs changed sources in forked children, up to `jobs` at a time; the calls that killed most come first."""

    def __init__(self, *, cases: Cases, device: str, jobs: int, folder: Path) -> None:
        self.cases, self.device, self.jobs, self.folder = cases, device, jobs, folder
        self.kills: Counter[tuple[str, int]] = Counter()
        self.started = 0

    def check_itself(self, files: Sequence[str]) -> None:
        """Check that the unchanged code survives, and that code whose functions all return at once does not.

        Raises:
            RuntimeError: otherwise.
        """
        unchanged: dict[tuple[str, str], Verdict] = {}
        lethal: dict[str, Verdict] = {}
        # Of every op each call once, and through every file some: all of both is the same code again and again.
        whole = {op: file for file in files for op in reached_ops(file)}
        again = [Source(key=(file, ""), file=file, text=read_source(file), most=FEW_CALLS) for file in files]
        again += [Source(key=(file, op), file=file, text=read_source(file), ops=(op,)) for op, file in whole.items()]
        self.run(again, unchanged.__setitem__)
        emptied = [Source(key=file, file=file, text=without_effect(read_source(file))) for file in files]
        self.run(emptied, lethal.__setitem__)
        self.kills.clear()
        for (file, _), verdict in unchanged.items():
            if verdict.outcome:
                got = f"{verdict.outcome} at call {verdict.case} of {verdict.op}: {verdict.detail}"
                raise RuntimeError(must_be("difftest", file, "right as it is", got))
        for file in files:
            if not lethal[file].outcome:
                raise RuntimeError(must_be("difftest", f"{file} without any effect", "noticed", "no difference"))

    def run(self, sources: Iterable[Source], on_verdict: Callable[[Any, Verdict], None]) -> None:
        """Run every source and tell the verdict on each."""
        pending = deque(sources)
        running: dict[Connection, _Child] = {}
        try:
            while pending or running:
                while pending and len(running) < self.jobs:
                    pipe, child = self._start(pending.popleft())
                    running[pipe] = child
                for pipe in [p for p in wait(list(running), timeout=1.0) if isinstance(p, Connection)]:
                    verdict = self._hear(pipe, running[pipe])
                    if verdict is not None:
                        self._finish(pipe, running.pop(pipe), verdict, on_verdict)
                for pipe, child in list(running.items()):
                    if child.patience.over and not pipe.poll():
                        detail = f"silent for {child.patience.seconds:.0f} s of a core"
                        verdict = Verdict(outcome=Outcome.HUNG.name, op=child.op, case=child.case, detail=detail)
                        self._finish(pipe, running.pop(pipe), verdict, on_verdict)
        finally:
            for pipe, child in running.items():
                self._end(pipe, child)

    def _start(self, source: Source) -> tuple[Connection, _Child]:
        self.started += 1
        ours, theirs = multiprocessing.get_context("fork").Pipe(duplex=False)
        ops = source.ops or reached_ops(source.file)
        order = sorted(
            ((op, i) for op in ops for i in range(len(self.cases[op]))),
            key=lambda call: (-self.kills[call], call[1], call[0]),
        )[: source.most]
        folder = self.folder / str(self.started)
        process = multiprocessing.get_context("fork").Process(
            target=_serve,
            args=(theirs, source.file, source.text, folder, self.cases, order, self.device),
            daemon=True,
        )
        with warnings.catch_warnings():
            # Libraries of this process may own idle threads; its children use none of what these could hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        patience = Patience(process.pid or 0, SECONDS_PER_CASE[self.device])
        return ours, _Child(key=source.key, process=process, folder=folder, patience=patience)

    def _hear(self, pipe: Connection, child: _Child) -> Verdict | None:
        try:
            said = pipe.recv()
        except (EOFError, OSError):
            child.process.join()
            detail = f"exit code {child.process.exitcode}"
            return Verdict(outcome=Outcome.CRASHED.name, op=child.op, case=child.case, detail=detail)
        if isinstance(said, Verdict):
            return said
        child.op, child.case = said
        child.patience.heard()
        return None

    def _finish(
        self, pipe: Connection, child: _Child, verdict: Verdict, on_verdict: Callable[[Any, Verdict], None]
    ) -> None:
        self._end(pipe, child)
        if verdict.outcome and verdict.case >= 0:
            self.kills[verdict.op, verdict.case] += 1
        on_verdict(child.key, verdict)

    @staticmethod
    def _end(pipe: Connection, child: _Child) -> None:
        child.process.kill()
        child.process.join()
        pipe.close()
        shutil.rmtree(child.folder, ignore_errors=True)


def cases_of(op: str, *, examples: int, seed: int, device: str = "cpu") -> list[Mapping[str, Any]]:
    """Return `examples` calls of `op`, the same for the same `seed`, those of the committed corpus, and large ones."""
    files = [load_case(path) for path in corpus.entries()]
    return [
        *draw_cases(op, examples=examples, seed=seed),
        *(file.arguments for file in files if file.op == op),
        *large_cases(op, torch.device(device)),
    ]


def without_effect(text: str) -> str:
    """Return a source whose top-level functions all return at once."""
    lines = text.splitlines()
    for function in reversed([node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]):
        lines[function.body[0].lineno - 1 : function.end_lineno] = ["    return"]
    return "\n".join(lines) + "\n"


def _serve(
    pipe: Connection,
    file: str,
    text: str,
    folder: Path,
    cases: Cases,
    order: Sequence[tuple[str, int]],
    device: str,
) -> None:
    """Load the changed source in a child, then check call after call until one finds it."""
    _be_quiet_and_modest()
    # What ends the run ends it in the parent, which kills this process: here it would look like a crash of the mutant.
    for end in (signal.SIGINT, signal.SIGTERM):
        signal.signal(end, signal.SIG_IGN)
    os.environ["TRITON_CACHE_DIR"] = str(folder / "compiled")
    op, case = "", -1
    try:
        backends._implementations.update(load(file, text, folder / "source"))
        for op, case in order:
            pipe.send((op, case))
            check_case(get_spec(op), cases[op][case], device=device)
    except Mismatch as mismatch:
        pipe.send(Verdict(outcome=mismatch.outcome.name, op=op, case=case, detail=str(mismatch)[:500]))
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        pipe.send(Verdict(outcome=Outcome.RAISED.name, op=op, case=case, detail=told[:500]))
    else:
        pipe.send(Verdict())


def _be_quiet_and_modest() -> None:
    faulthandler.disable()
    warnings.simplefilter("ignore")
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    # A changed size may ask for more memory than there is: then this process dies of it and no other.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
