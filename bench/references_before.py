"""What did faster references gain? The fuzzer, and an engine in debug mode, on older checkouts and on this one.

Every checkout has its turn, in processes of its own. The fuzzer puts as many cases of the same ops through its checks.
The engine is transformers' continuous batching of a tiny model on the CPU with backend=reference: tokens a second
without a canary and with it. All in CPU time.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

HERE = Path(__file__).resolve().parents[1]
PARTS = ("bench", "difftest", "kernels", "reference")
TARGETS = ("plan", "verify", "write", "chain_tails", "engine")


def compare_checkouts(
    older: Sequence[Path], *, fuzz_cases: int, fuzz_rounds: int, engine_rounds: int, quick: bool
) -> dict[str, Any]:
    """Return cases a second by target, and tokens a second by workload, of each checkout.

    Args:
        older: checkouts of older commits; this one comes last.
        fuzz_cases: of each target, in each run of the fuzzer.
        fuzz_rounds, engine_rounds: how often each checkout has its turn.
        quick: whether the engine serves tiny batches.
    """
    with tempfile.TemporaryDirectory() as folder:
        packages = {
            commit_of(checkout): arrange(Path(folder, str(i)), checkout) for i, checkout in enumerate([*older, HERE])
        }
        fuzzed: dict[str, list[dict[str, float]]] = {commit: [] for commit in packages}
        for seed in range(fuzz_rounds):
            for commit, package in packages.items():
                fuzzed[commit].append(fuzz(package, cases=fuzz_cases, seed=seed))
                print(f"fuzzer at {commit}: {fuzzed[commit][-1]}", flush=True)
        served: dict[str, list[dict[str, dict[str, float]]]] = {commit: [] for commit in packages}
        for _ in range(engine_rounds):
            for commit, package in packages.items():
                served[commit].append(serve(package, quick=quick))
                print(f"engine at {commit}: {served[commit][-1]}", flush=True)
    return {
        "fuzz_cases": fuzz_cases,
        "fuzz": [{"commit": commit, **_spread(runs)} for commit, runs in fuzzed.items() if runs],
        "engine": [
            {"commit": commit, "workload": workload, **_spread([run[workload] for run in runs])}
            for commit, runs in served.items()
            for workload in (runs[0] if runs else ())
        ],
    }


def commit_of(checkout: Path) -> str:
    """Return what git says of a checkout."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def arrange(folder: Path, checkout: Path) -> Path:
    """Make `folder` one that a checkout's `kv_canary` can be imported from, in the shape of the installed package."""
    package = folder / "kv_canary"
    package.mkdir(parents=True)
    for path in (checkout.resolve() / "kv_canary").iterdir():
        if path.name != "__pycache__":
            (package / path.name).symlink_to(path)
    for part in PARTS:
        (package / part).symlink_to(checkout.resolve() / part)
    return folder


def fuzz(package: Path, *, cases: int, seed: int) -> dict[str, float]:
    """Put as many drawn cases of every target through the fuzzer's checks; return cases a CPU second, by target.

    What starting up takes, and the first case, which is put through more, is left out.
    """
    rates = {}
    for target in TARGETS:
        command = ["-c", "from kv_canary.cli import main; main()", "difftest", "run", "--jobs", "1"]
        command += ["--op", target, "--seed", str(seed), "--findings", str(package), "--examples"]
        first, all_ = (_python(package, *command, str(n), TRITON_INTERPRET="1").cpu_seconds for n in (1, cases + 1))
        rates[target] = round(cases / (all_ - first), 3)
    return rates


def serve(package: Path, *, quick: bool) -> dict[str, dict[str, float]]:
    """Serve every workload without a canary and with it, and return tokens a second of both, by workload."""
    script = Path(__file__).with_name("references_served.py")
    done = _python(package, str(script), *(["--quick"] if quick else []))
    rates: dict[str, dict[str, float]] = json.loads(done.printed.splitlines()[-1])
    return rates


@dataclass(frozen=True, kw_only=True)
class _Done:
    """What a process printed, and the CPU time that it and its own processes took."""

    printed: str
    cpu_seconds: float


def _python(package: Path, *arguments: str, **environ: str) -> _Done:
    """Run Python where `kv_canary` is that of `package`, on one thread."""
    environment = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1", **environ}
    command, before = [sys.executable, "-P", *arguments], _children_seconds()
    done = subprocess.run(command, env=environment, cwd=package, capture_output=True, text=True)
    if done.returncode:
        what = " ".join(arguments)
        raise RuntimeError(f"kv-canary: bench: {what} ended with {done.returncode}: {done.stderr[-2000:]}")
    return _Done(printed=done.stdout, cpu_seconds=_children_seconds() - before)


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _spread(runs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return each number's median over the runs, with the least and the most."""
    found: dict[str, Any] = {}
    for name in runs[0]:
        values = sorted(run[name] for run in runs)
        found[name] = round(statistics.median(values), 3)
        found[f"{name}_from_to"] = [values[0], values[-1]]
    return found


def tables(result: Mapping[str, Any]) -> list[Table]:
    """Return what was measured as tables."""
    made = []
    for part, title in (
        ("fuzz", "the fuzzer, cases a CPU second"),
        ("engine", "an engine in debug mode, tokens a CPU second"),
    ):
        rows = result[part]
        if not rows:
            continue
        names = [name for name in rows[0] if not name.endswith("_from_to")]
        table = Table(*names, title=title)
        for row in rows:
            cells = []
            for name in names:
                low_high = row.get(f"{name}_from_to")
                cells.append(f"{row[name]} ({low_high[0]} to {low_high[1]})" if low_high else str(row[name]))
            table.add_row(*cells)
        made.append(table)
    return made
