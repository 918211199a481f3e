"""Overlapped scheduling, for as many steps as you like: is the canary silent, and are captured runs like eager ones?

An engine whose scheduler runs a step ahead of the device (`overlapped_engine`) serves random requests. What the canary
finds in rows whose results the engine threw away is counted as discarded; anything else it finds is a false alarm. Then
the same load runs eagerly and with decode steps captured in CUDA graphs, healthy and with each kind of fault: both must
leave the same records and report the same violations.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kv_canary.commands.facts import facts
from kv_canary.commands.progress import progress_bar
from kv_canary.config import CanaryConfig
from kv_canary.difftest.options import commit_option, device_option, json_option
from kv_canary.difftest.stress.overlapped_engine import OverlapConfig, OverlappedEngine
from kv_canary.perturb import MODES, Mode, PerturbConfig

GRAPHS = (4, 12, 24)
# Steps of the runs that are compared with each other.
COMPARED = 120


def lives(device: str) -> dict[str, OverlapConfig]:
    """Return the engines that run long, by name."""
    if device == "cpu":
        return {
            "prefix cache": OverlapConfig(late=True),
            "sliding window": OverlapConfig(late=True, window=40),
            "as fast as the host": OverlapConfig(),
        }
    return {
        "prefix cache": OverlapConfig(),
        "prefix cache, CUDA graphs": OverlapConfig(graphs=GRAPHS),
        "sliding window": OverlapConfig(window=40),
        "sliding window, CUDA graphs": OverlapConfig(window=40, graphs=GRAPHS),
    }


def run_life(
    name: str, config: OverlapConfig, *, steps: int, device: str, canary: CanaryConfig, progress: Progress
) -> dict[str, Any]:
    """Run one engine and return what happened."""
    # With seals, which `compare` leaves out.
    engine = OverlappedEngine(config, canary=dataclasses.replace(canary, seals="layer"), device=device)
    bar = progress.add_task(name, total=steps)
    start = time.perf_counter()
    with closing(engine):
        engine.run(steps, on_step=lambda: progress.advance(bar))
    seconds = time.perf_counter() - start
    progress.remove_task(bar)
    summary, cost = engine.guarded.summary(), engine.guarded.budget.cost
    return {
        "steps": engine.steps,
        "seconds": round(seconds, 1),
        "finished": engine.finished,
        "retracted": engine.retracted,
        "ran_on": engine.ran_on,
        "prefix_hits": engine.prefix_hits,
        "tokens": engine.tokens_generated,
        "wrong_tokens": engine.wrong_tokens,
        "replays": engine.replays,
        "false_alarms": summary.violations,
        "discarded": summary.discarded,
        "watching": summary.watching,
        "stride": summary.stride,
        "cost": None if cost is None else {"fixed_us": cost.fixed * 1e6, "entry_ns": cost.entry * 1e9},
        "positions_relied_on": summary.positions_relied_on,
        "positions_verified": summary.positions_verified,
        "audits": None if summary.audits is None else dataclasses.asdict(summary.audits),
        "first_alarms": [r.sentence for r in list(engine.guarded.reports)[:3]],
    }


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """The outcome of a run."""

    records: dict[str, torch.Tensor]
    reports: list[str]
    tags: list[tuple[str, ...]]
    violations: int
    injections: list[str]
    replays: int


def outcome(config: OverlapConfig, *, device: str, canary: CanaryConfig, perturb: PerturbConfig | None) -> _Outcome:
    """Run one engine for a while."""
    engine = OverlappedEngine(config, canary=canary, device=device, perturb=perturb)
    with closing(engine):
        engine.run(COMPARED)
    manager = engine.guarded
    return _Outcome(
        records={name: pool.records.cpu() for name, pool in engine.pools.items()},
        reports=sorted(json.dumps(dataclasses.asdict(r), default=str) for r in manager.reports),
        tags=sorted({(r.tag, *r.reasons) for r in manager.reports}),
        violations=manager.summary().violations,
        injections=[] if manager.perturber is None else [str(i) for i in manager.perturber.injections],
        replays=engine.replays,
    )


def compare(window: int, mode: Mode | None, *, device: str, canary: CanaryConfig) -> dict[str, Any]:
    """Run the same load eagerly and with graphs, and return whether records and violations are the same."""
    # All of them are compared, not those that come first in the ring, whose order is free; and no seals, of which each
    # canary has its own.
    canary = dataclasses.replace(canary, max_reports_per_step=canary.ring_capacity, seals="off")
    group = "swa" if window else "full"
    # Bytes that HEAD sees, so that there is something to compare.
    faults: dict[str, Any] = {"group": group, "warm_up": 40, "every": 5, "count": 4, "covered_only": True}
    perturb = None if mode is None else PerturbConfig(mode=mode, **faults)
    eager, captured = (
        outcome(
            OverlapConfig(overlap=False, window=window, graphs=graphs), device=device, canary=canary, perturb=perturb
        )
        for graphs in ((), GRAPHS)
    )
    return {
        "mode": mode or "healthy",
        "group": group,
        "replays": captured.replays,
        "injected": len(eager.injections),
        "violations": eager.violations,
        "found": eager.tags,
        "same_records": all(torch.equal(eager.records[name], captured.records[name]) for name in eager.records),
        "same_violations": eager.reports == captured.reports and eager.violations == captured.violations,
        "same_injections": eager.injections == captured.injections,
    }


def measure(device: str, steps: int, console: Console) -> dict[str, list[dict[str, Any]]]:
    """Run every life, and on a GPU every comparison."""
    backend = "triton" if device == "cuda" else "reference"
    canary = CanaryConfig(backend=backend, stride=1, sweep_every=16, check_tokens=True, check_inputs=True)
    result: dict[str, list[dict[str, Any]]] = {"lives": [], "compared": []}
    with progress_bar(console, "what bar share left", transient=False) as progress:
        for name, config in lives(device).items():
            # What is launched from the host, one kernel after the other, runs for a fifth of the time.
            count = max(steps // 5, 1) if device == "cuda" and not config.graphs else steps
            life = run_life(name, config, steps=count, device=device, canary=canary, progress=progress)
            result["lives"].append({"engine": name, **life})
        if device == "cuda":
            # Left to itself, the canary measures what it costs here, and chooses how much of it a step can bear.
            config, chosen = OverlapConfig(graphs=GRAPHS), dataclasses.replace(canary, stride=None)
            name = "prefix cache, CUDA graphs, stride chosen"
            life = run_life(name, config, steps=max(steps // 5, 1), device=device, canary=chosen, progress=progress)
            result["lives"].append({"engine": name, **life})
            cases: list[tuple[int, Mode | None]] = [(window, mode) for window in (0, 40) for mode in (None, *MODES)]
            for window, mode in progress.track(cases, description="captured against eager"):
                result["compared"].append(compare(window, mode, device=device, canary=canary))
    return result


@click.command()
@device_option()
@click.option("--steps", type=click.IntRange(1), default=500, show_default=True, help="Of every long life.")
@json_option()
@commit_option()
def main(device: str, steps: int, json_path: Path | None, commit: str | None) -> None:
    """Let engines live that overlap their scheduling with the model, healthy and with faults.

    Nothing may be reported of a healthy one, and its tokens must be right; on a GPU, a forward in a CUDA graph must
    leave the records and the violations that the same forward leaves without one.

    Exit codes: 0 as it should be, 1 not so, 2 misuse.

    \b
    Examples:
      kv-canary stress overlap
      kv-canary stress overlap --device cuda --json h200_overlap.json
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("--device cuda must be on a machine with a CUDA GPU, got one without")
    console = Console()
    logger = logging.getLogger("kv_canary")
    level = logger.level
    # What is found is in the tables; it need not be logged too.
    logger.setLevel(logging.CRITICAL)
    try:
        result = {
            **facts(device, commit=commit, kind="overlap"),
            **measure(device, steps, console),
        }
    finally:
        logger.setLevel(level)
    _print(console, result)
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    raise SystemExit(0 if _is_clean(result) else 1)


def _is_clean(result: Mapping[str, Any]) -> bool:
    lives_clean = all(
        not life["false_alarms"] and not life["wrong_tokens"] and life["watching"] == "complete"
        for life in result["lives"]
    )
    return lives_clean and all(c["same_records"] and c["same_violations"] for c in result["compared"])


def _print(console: Console, result: Mapping[str, Any]) -> None:
    columns = ("engine", "steps", "finished", "ran_on", "replays", "wrong_tokens")
    more = ("positions_verified", "stride", "discarded", "false_alarms", "watching")
    for title, rows, names in (
        ("Overlapped scheduling", result["lives"], (*columns, *more)),
        (
            "Captured against eager",
            result["compared"],
            ("mode", "group", "replays", "injected", "violations", "same_records", "same_violations"),
        ),
    ):
        if not rows:
            continue
        table = Table(title=title)
        for name in names:
            table.add_column(name.replace("_", " "))
        for row in rows:
            table.add_row(*(f"{row[n]:,}" if type(row[n]) is int else str(row[n]) for n in names))
        console.print(table)


if __name__ == "__main__":
    main()
