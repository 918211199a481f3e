"""Running mutants: of kernels and references against the same generated calls, of the runtime against its tests.

A mutant is killed when the differential check finds it, or when it crashes, raises or hangs. One that survives every
call must stand in `equivalent_mutants.toml`, with the reason why no call can tell it from the original.
"""

from __future__ import annotations

import dataclasses
import random
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from kv_canary import backends
from kv_canary.cases.casefile import versions
from kv_canary.difftest.interpreter import quicken
from kv_canary.difftest.mutation.mutants import Mutant, make_mutants
from kv_canary.difftest.mutation.overlay import is_runtime, reached_ops, runtime_files, source_files
from kv_canary.difftest.mutation.pool import FEW_CALLS, Pool, Source, Verdict, cases_of
from kv_canary.difftest.mutation.runtime import line_map, run_runtime_mutants
from kv_canary.errors import must_be

EQUIVALENT_MUTANTS = Path(__file__).with_name("equivalent_mutants.toml")


class MutantStatus(StrEnum):
    """The fates that a mutant can have."""

    KILLED = "killed"
    EQUIVALENT = "equivalent"
    SURVIVED = "survived"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MutantResult:
    """The fate of one mutant.

    Args:
        outcome: name of the `Outcome` that killed it.
        op, case: the call that killed it: the `case`-th drawn one of `op`; -1 where its import did.
        detail: what was seen.
        reason: why it is equivalent.
    """

    mutant: Mutant
    status: MutantStatus
    outcome: str = ""
    op: str = ""
    case: int = -1
    detail: str = ""
    reason: str = ""

    @property
    def verdict(self) -> Verdict:
        """The verdict of the process that ran it."""
        return Verdict(outcome=self.outcome, op=self.op, case=self.case, detail=self.detail)

    def as_dict(self) -> dict[str, Any]:
        killed_by = dataclasses.asdict(self.verdict)
        return {
            **{name: getattr(self.mutant, name) for name in ("id", "file", "function", "line", "before", "after")},
            "kind": self.mutant.kind.value,
            "status": self.status.value,
            "killed_by": killed_by if self.status == MutantStatus.KILLED else None,
            "reason": self.reason,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class MutationReport:
    """The outcome of a run, mutant by mutant, in the order of the sources.

    Args:
        refuted: mutants that stand as equivalent, yet were killed.
        not_run: how many were not reached, because the run was interrupted.
    """

    results: tuple[MutantResult, ...]
    refuted: tuple[MutantResult, ...]
    examples: int
    seed: int
    device: str
    seconds: float
    versions: Mapping[str, str]
    not_run: int = 0

    def of(self, status: MutantStatus) -> list[MutantResult]:
        return [result for result in self.results if result.status == status]

    @property
    def passed(self) -> bool:
        """Whether every mutant was killed or is known to be equivalent."""
        return not self.of(MutantStatus.SURVIVED) and not self.refuted

    def as_dict(self, *, commit: str = "unknown") -> dict[str, Any]:
        return {
            "total": len(self.results),
            "not_run": self.not_run,
            **{status.value: len(self.of(status)) for status in MutantStatus},
            "killed_by": dict(Counter(r.outcome for r in self.of(MutantStatus.KILLED))),
            "refuted": [result.mutant.id for result in self.refuted],
            "versions": dict(self.versions),
            "device": self.device,
            "commit": commit,
            "examples_per_op": self.examples,
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "mutants": [result.as_dict() for result in self.results],
        }


Progress = Callable[[MutantResult, int, int], None]
# Results from one call of `keep` to the next.
KEPT_EVERY = 25


def run_mutants(
    *,
    jobs: int,
    examples: int,
    files: Sequence[str] | None = None,
    ids: Collection[str] | None = None,
    again: bool = False,
    sample: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    known: Mapping[str, Verdict] | None = None,
    on_progress: Progress | None = None,
    keep: Callable[[MutationReport], None] | None = None,
) -> MutationReport:
    """Run mutants of `files`, or of every kernel, reference and source of the runtime, and report each one's fate.

    Ctrl-C ends the run; the report is then of the mutants that were reached.

    Args:
        jobs: how many run at a time, each in a process of its own.
        examples: calls drawn per op; the committed corpus is run as well.
        ids: run only these mutants, as far as they are there.
        again: whether they are looked at again: those of the runtime with many more tests.
        sample: run only so many, chosen by `seed`.
        seed: of the drawn calls and of the sample.
        device: where Triton runs, "cpu" (its interpreter) or "cuda".
        known: verdicts that an earlier run of this code reached, by the mutant's id: these mutants do not run again,
            and are in the report, chosen or not; those of `ids` do where they are looked at again.
        on_progress: called with each result, how many there are now and how many there will be.
        keep: called every now and then with what there is.

    Raises:
        ValueError: a file is unknown, an entry of `equivalent_mutants.toml` fits no mutant, or Triton cannot run.
        RuntimeError: the unchanged code fails the check, or code without any effect passes it.
    """
    if device == "cpu" and not backends.interpreting():
        raise ValueError(
            must_be("difftest", "TRITON_INTERPRET", "1 for device cpu, set before kernels are imported", "0")
        )
    if device == "cpu":
        quicken()
    began = time.monotonic()
    reasons = equivalent_reasons(read_equivalents())
    every = [*source_files(), *runtime_files()]
    chosen = [mutant for mutant in make_mutants(files or every) if ids is None or mutant.id in ids]
    if sample is not None and sample < len(chosen):
        chosen = random.Random(seed).sample(chosen, sample)
    known = {id: verdict for id, verdict in (known or {}).items() if not (again and id in (ids or ()))}
    told = {*(mutant.id for mutant in chosen), *known}
    in_files = [file for file in every if any(id.startswith(f"{file}:") for id in told)]
    mutants = [mutant for mutant in make_mutants(in_files) if mutant.id in told]
    results = {m.id: _result(m, known[m.id], reasons) for m in mutants if m.id in known}
    waiting = [mutant for mutant in mutants if mutant.id not in results]
    run_files = list(dict.fromkeys(mutant.file for mutant in waiting if not is_runtime(mutant.file)))
    runtime = [mutant for mutant in waiting if is_runtime(mutant.file)]

    def report() -> MutationReport:
        ordered = tuple(results[mutant.id] for mutant in mutants if mutant.id in results)
        return MutationReport(
            results=ordered,
            refuted=tuple(r for r in ordered if r.status == MutantStatus.KILLED and r.mutant.id in reasons),
            examples=examples,
            seed=seed,
            device="cpu, Triton interpreter" if device == "cpu" else torch.cuda.get_device_name(),
            seconds=time.monotonic() - began,
            versions=versions(),
            not_run=len(mutants) - len(ordered),
        )

    def receive(mutant: Mutant, verdict: Verdict) -> None:
        results[mutant.id] = _result(mutant, verdict, reasons)
        if keep is not None and len(results) % KEPT_EVERY == 0:
            keep(report())
        if on_progress is not None:
            on_progress(results[mutant.id], len(results), len(mutants))

    with suppress(KeyboardInterrupt), _one_thread(), tempfile.TemporaryDirectory(prefix="kv-canary-mutants-") as folder:
        drawn = {op: cases_of(op, examples=examples, seed=seed, device=device) for op in _all_reached(run_files)}
        for op in drawn:
            backends.implementation(op, "reference")
            backends.implementation(op, "triton")
        pool = Pool(cases=drawn, device=device, jobs=jobs, folder=Path(folder))
        pool.check_itself(run_files)
        sources = (
            Source(key=m, file=m.file, text=m.text, most=FEW_CALLS if m.id in reasons else None)
            for m in waiting
            if not is_runtime(m.file)
        )
        pool.run(sources, receive)
        if runtime:
            run_runtime_mutants(runtime, line_map(jobs=jobs), jobs=jobs, on_verdict=receive, again=again)
    return report()


def read_equivalents(path: Path = EQUIVALENT_MUTANTS) -> list[dict[str, str]]:
    """Return the entries of `equivalent_mutants.toml`: file, function, before, after and reason.

    Raises:
        ValueError: an entry is not made of these.
    """
    wanted = {"file", "function", "before", "after", "reason"}
    entries: list[dict[str, str]] = tomllib.loads(path.read_text(encoding="utf-8")).get("equivalent", [])
    for entry in entries:
        if set(entry) != wanted or not all(isinstance(value, str) and value for value in entry.values()):
            raise ValueError(must_be(path.name, "entry", f"of {', '.join(sorted(wanted))}", repr(entry)))
    return entries


def equivalent_reasons(entries: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the reason why each listed mutant is equivalent, by its id.

    Raises:
        ValueError: an entry no longer applies: the lines that it names are not there, or not mutated like that.
    """
    known: dict[tuple[str, ...], list[Mutant]] = {}
    entries = list(entries)
    for mutant in make_mutants([*source_files(), *sorted({e["file"] for e in entries if is_runtime(e["file"])})]):
        known.setdefault((mutant.file, mutant.function, mutant.before, mutant.after), []).append(mutant)
    reasons = {}
    for entry in entries:
        key = tuple(entry[name] for name in ("file", "function", "before", "after"))
        if key not in known:
            told = f"{entry['file']}: {entry['function']}: {entry['before']!r} -> {entry['after']!r}"
            raise ValueError(f"kv-canary: {EQUIVALENT_MUTANTS.name}: entry no longer applies, no such mutant: {told}")
        reasons.update({mutant.id: entry["reason"] for mutant in known[key]})
    return reasons


@contextmanager
def _one_thread() -> Iterator[None]:
    """PyTorch works in one thread: others would not be there in the children that this process forks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _all_reached(files: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(op for file in files for op in reached_ops(file)))


def _result(mutant: Mutant, verdict: Verdict, reasons: Mapping[str, str]) -> MutantResult:
    if verdict.outcome:
        return MutantResult(mutant=mutant, status=MutantStatus.KILLED, **dataclasses.asdict(verdict))
    reason = reasons.get(mutant.id, "")
    status = MutantStatus.EQUIVALENT if reason else MutantStatus.SURVIVED
    return MutantResult(mutant=mutant, status=status, reason=reason)
