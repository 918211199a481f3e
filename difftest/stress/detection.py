"""Does the canary find every fault, at once, and blame nothing else?"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import click
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kv_canary.commands.facts import facts
from kv_canary.commands.progress import progress_bar
from kv_canary.config import CanaryConfig, Seals
from kv_canary.constants import Reason
from kv_canary.difftest.options import (
    backend_option,
    commit_option,
    device_option,
    jobs_option,
    json_option,
    number_option,
)
from kv_canary.difftest.simulator import EngineConfig
from kv_canary.difftest.simulator.actions import opening, random_action
from kv_canary.difftest.stress.expected_findings import (
    SEALED,
    SEALED_AS,
    FaultyEngine,
    first_steps,
    unexplained,
    unreported,
)
from kv_canary.difftest.stress.processes import prepare_backend, processes, run_tasks
from kv_canary.difftest.stress.random_engine import draw_canary, draw_configs
from kv_canary.perturb import MODES, PerturbConfig
from kv_canary.perturb_settings import BYTE_MODES

GROUPS = ("FULL", "SWA")
# Engines of one task, from which come up to so many runs. On a GPU each compiles the kernels of its own geometry first.
LIVES = {"cpu": 6, "cuda": 1}
# Actions after which a life ends in which no moment for the fault came; and those that follow the fault.
PATIENCE, AFTERMATH = 60, 20
# Of the actions that follow the fault, how many lie between two scrubs of all there is.
SCRUB_EVERY = 5
# Engines per run that is wanted, at most.
MOST_LIVES = 120


@dataclass(frozen=True, kw_only=True)
class Task:
    """A few lives with one fault each.

    Args:
        mode: the fault.
        group: "FULL" or "SWA": the kind of group that it is injected into.
        number: the seed of everything.
        stride: the canary's.
        device: "cpu" or "cuda".
        backend: the canary's.
        seals: the canary's.
        covered_only: flip bits of sampled bytes only, else of any.
    """

    mode: str
    group: str
    number: int
    stride: int
    device: str
    backend: str
    seals: str = "layer"
    covered_only: bool = False


@dataclass(frozen=True, kw_only=True)
class Run:
    """The outcome of one life.

    Args:
        whose: names the life.
        injected: whether a moment for the fault came.
        relied_on: whether some forward, sweep or scrub relied on it afterwards.
        sampled: whether records can show it; else only a seal can.
        out_of_sight: whether its bytes were read, and nothing could see the change: they are not sampled, and were
            freed or written anew before a scrub came, or have no seal.
        found: whether there is a report of the right launch site, slot and reasons.
        found_by_seal: whether it is a scrub's.
        steps_late: steps from the first in which that launch site could see it to that report.
        steps_after: steps from the injection to that report.
        reports: how many there are.
        blamed_wrongly: reports that nothing explains, in words.
        silent: places that lack a report, or a reason of it, in words; of a canary that verifies everything.
        error: what was raised.
    """

    whose: str
    injected: bool = False
    relied_on: bool = False
    sampled: bool = True
    out_of_sight: bool = False
    found: bool = False
    found_by_seal: bool = False
    steps_late: int = 0
    steps_after: int = 0
    reports: int = 0
    blamed_wrongly: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    error: str = ""


def run(task: Task) -> list[Run]:
    """Live the lives of a task; those that have no group of the kind, or no bytes in it, are left out."""
    runs = []
    for index, drawn in enumerate(draw_configs(task.number, LIVES[task.device])):
        rng = np.random.default_rng([task.number, index, MODES.index(task.mode), GROUPS.index(task.group)])
        config = _suited(drawn, task, rng)
        if config is None:
            continue
        whose = f"{task.mode} in {task.group}, seed {task.number}, life {index}"
        try:
            runs.append(_live(config, task, rng, whose))
        except Exception as error:
            runs.append(Run(whose=whose, error=f"{type(error).__name__}: {error}"))
    return runs


def _suited(config: EngineConfig, task: Task, rng: np.random.Generator) -> EngineConfig | None:
    """Return an engine in which the fault can be, or None."""
    groups = [g for g in config.groups if (g.kind == "full") == (task.group == "FULL")]
    if task.mode in BYTE_MODES:
        groups = [g for g in groups if g.k_source is not None or g.v_source is not None]
    if not groups or (task.mode == "real_kv_unused_cache" and config.has_ring):
        return None
    cached = task.mode == "real_kv_unused_cache" or config.prefix_cache
    return dataclasses.replace(config, prefix_cache=cached, token_oracle=bool(rng.random() < 0.7))


def _live(config: EngineConfig, task: Task, rng: np.random.Generator, whose: str) -> Run:
    canary = _canary(task, rng)
    names = [g.kind for g in config.groups if (g.kind == "full") == (task.group == "FULL")]
    if task.mode in BYTE_MODES:
        names = [g.kind for g in config.groups if g.kind in names and (g.k_source or g.v_source)]
    perturb = PerturbConfig(
        mode=task.mode,  # type: ignore[arg-type]
        group=str(rng.choice(names)),
        warm_up=int(rng.integers(1, 16)),
        seed=int(rng.integers(1 << 31)),
        covered_only=task.covered_only,
    )
    engine = FaultyEngine(config, canary=canary, perturb=perturb, device=task.device)
    for action in opening(rng, longest=config.max_len):
        engine.run(action)
    for _ in range(PATIENCE):
        if engine.injection is not None:
            break
        engine.run(random_action(rng, longest=config.max_len))
    for done in range(1, AFTERMATH + 1):
        engine.run(random_action(rng, longest=config.max_len))
        if done % SCRUB_EVERY == 0:
            engine.scrub()
    return _judge(engine, task, whose)


def _canary(task: Task, rng: np.random.Generator) -> CanaryConfig:
    """Return a configuration of the canary that reports everything it finds."""
    sweeps = [1, 3, 7] if task.mode == "real_kv_unused_cache" else [0, 0, 3]
    return dataclasses.replace(
        draw_canary(rng, task.backend),
        stride=task.stride,
        seals=task.seals,  # type: ignore[arg-type]
        # Scrubs alone hold against them, so that it is known when: `stress seals` has the other moments.
        admission=False,
        completion=False,
        sweep_every=int(rng.choice(sweeps)),
        quarantine=False,
        track_lifetime=True,
        ring_capacity=1 << 14,
        max_reports_per_step=1 << 14,
    )


def _judge(engine: FaultyEngine, task: Task, whose: str) -> Run:
    """Hold what was reported against what the fault makes of it."""
    wrong = tuple(f"{r.sentence}" for r in unexplained(engine))
    counted = engine.manager.summary().violations
    if counted != len(engine.reports):
        wrong += (f"{counted} violations were counted, {len(engine.reports)} reported",)
    injection = engine.injection
    if injection is None:
        return Run(whose=whose, reports=len(engine.reports), blamed_wrongly=wrong)
    first = first_steps(engine.required, injection.slots)
    tag = "" if injection.tag is None else injection.tag.name
    if first and tag not in first:
        # Only another launch site relied on it: a sweep, where no request came back to it, or the other way round.
        tag = min(first, key=lambda t: first[t])
    wanted = [injection.reasons] if injection.reasons else []
    if injection.sampled and injection.reasons in SEALED_AS:
        wanted.append(SEALED_AS[injection.reasons])
    right = [
        r
        for r in engine.reports
        if r.tag == tag and r.slot in injection.slots and any(w & ~_reasons(r.reasons) == 0 for w in wanted)
    ]
    silent = unreported(engine) if task.stride == 1 else []
    return Run(
        whose=f"{whose}: {injection.where}",
        injected=True,
        relied_on=bool(first) or engine.was_read,
        sampled=injection.sampled,
        out_of_sight=not first and engine.was_read,
        found=bool(first and right),
        found_by_seal=bool(first and right and _reasons(right[0].reasons) & SEALED),
        steps_late=right[0].step - first[tag] if first and right else 0,
        steps_after=right[0].step - injection.step if right else 0,
        reports=len(engine.reports),
        blamed_wrongly=wrong,
        silent=tuple(f"{place} must name {engine.required[place]!r}" for place in silent),
    )


def _reasons(names: tuple[str, ...]) -> Reason:
    result = Reason(0)
    for name in names:
        result |= Reason[name]
    return result


@dataclass(kw_only=True)
class Cell:
    """The runs of one mode in one kind of group."""

    mode: str
    group: str
    stride: int
    wanted: int
    runs: list[Run] = field(default_factory=list)
    unused: int = 0
    no_moment: int = 0
    blamed_wrongly: int = 0
    errors: list[str] = field(default_factory=list)

    def add(self, one: Run) -> None:
        """Count a life in; those beyond what is wanted are left out."""
        if self.complete:
            return
        if one.error:
            self.errors.append(f"{one.whose}: {one.error}")
            return
        self.blamed_wrongly += bool(one.blamed_wrongly)
        if one.relied_on:
            self.runs.append(one)
        elif one.injected:
            self.unused += 1
        else:
            self.no_moment += 1

    @property
    def begun(self) -> bool:
        """Whether a life was counted in."""
        return bool(self.runs or self.unused or self.no_moment or self.errors)

    @property
    def complete(self) -> bool:
        """Whether there are as many runs as are wanted."""
        return len(self.runs) == self.wanted

    @property
    def found(self) -> int:
        """The number of faults that were found, of those that were relied on."""
        return sum(r.found for r in self.runs)

    @property
    def out_of_sight(self) -> int:
        """The number of faults that nothing could see, though they were relied on."""
        return sum(r.out_of_sight for r in self.runs)

    @property
    def passed(self) -> bool:
        """Whether all runs were had and, with every position verified in every step, all was found that could be."""
        sound = self.complete and not self.blamed_wrongly and not self.errors
        all_found = self.found + self.out_of_sight == len(self.runs) and not any(r.silent for r in self.runs)
        return sound and (all_found or self.stride > 1)

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready values."""
        late = [r.steps_late for r in self.runs if r.found]
        after = [r.steps_after for r in self.runs if r.found]
        by_seal = [r.steps_after for r in self.runs if r.found_by_seal]
        return {
            "mode": self.mode,
            "group": self.group,
            "stride": self.stride,
            "runs": len(self.runs),
            "sampled": sum(r.sampled for r in self.runs),
            "found": self.found,
            "found_by_seals": len(by_seal),
            "out_of_sight": self.out_of_sight,
            "blamed_wrongly": self.blamed_wrongly,
            "median_steps_late": statistics.median(late) if late else None,
            "most_steps_late": max(late, default=None),
            "median_steps_after_injection": statistics.median(after) if after else None,
            "most_steps_after_injection": max(after, default=None),
            "median_steps_to_seals": statistics.median(by_seal) if by_seal else None,
            "most_steps_to_seals": max(by_seal, default=None),
            "reports": sum(r.reports for r in self.runs),
            "runs_with_a_consequence_unreported": sum(bool(r.silent) for r in self.runs),
            "unused": self.unused,
            "no_moment": self.no_moment,
            "errors": self.errors,
        }


def measure(
    cells: Sequence[Cell],
    *,
    number: int,
    device: str,
    backend: str,
    pool: ProcessPoolExecutor,
    ahead: int,
    progress: Progress,
    seals: str = "layer",
    covered_only: bool = False,
) -> bool:
    """Live until all cells have as many runs as are wanted, in turns; return whether Ctrl-C or SIGTERM stopped it."""
    bars = {id(cell): progress.add_task(f"{cell.mode} {cell.group}", total=cell.wanted) for cell in cells}
    under_way: deque[Cell] = deque()

    def tasks() -> Iterator[Task]:
        most = MOST_LIVES // LIVES[device] * max(cell.wanted for cell in cells)
        for n in range(number, number + most):
            for cell in cells:
                if cell.complete:
                    continue
                under_way.append(cell)
                yield Task(
                    mode=cell.mode,
                    group=cell.group,
                    number=n,
                    stride=cell.stride,
                    device=device,
                    backend=backend,
                    seals=seals,
                    covered_only=covered_only,
                )

    def take(runs: list[Run]) -> bool:
        cell = under_way.popleft()
        for one in runs:
            cell.add(one)
            for text in _wrong(one, cell.stride):
                progress.console.print(f"[bold red]wrong[/] {one.whose}: {text}", highlight=False)
        progress.update(bars[id(cell)], completed=len(cell.runs))
        return all(cell.complete for cell in cells)

    return run_tasks(run, tasks(), pool=pool, ahead=ahead, take=take)


def _wrong(one: Run, stride: int) -> Iterator[str]:
    if one.error:
        yield one.error
    yield from islice(one.blamed_wrongly, 3)
    yield from islice(one.silent, 3)
    if one.relied_on and not one.found and not one.out_of_sight and stride == 1:
        yield "not found"


def show(cells: list[Cell], console: Console, *, seconds: float) -> None:
    """Print the table of what was found, how late, and what was blamed wrongly."""
    table = Table(title="Faults of which every one was relied on by some forward, sweep or scrub")
    columns = (
        "mode", "group", "runs", "found", "by seals", "out of sight", "blamed wrongly", "steps late", "after injection",
        "reports", "unused",
    )  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column in ("mode", "group") else "right")
    for cell in cells:
        row = cell.as_dict()
        steps = [f"{_number(row[f'median_{w}'])} (to {_number(row[f'most_{w}'])})" for w in _DELAYS]
        found = f"{row['found']}" if cell.passed else f"[bold red]{row['found']}"
        table.add_row(
            cell.mode, cell.group, str(row["runs"]), found, str(row["found_by_seals"]), str(row["out_of_sight"]),
            str(row["blamed_wrongly"]), *steps, str(row["reports"]), str(row["unused"]),
        )  # fmt: skip
    console.print(table)
    verdict = "[bold green]PASS[/]" if all(c.passed for c in cells) else "[bold red]FAIL[/]"
    console.print(f"{verdict}: {sum(c.found for c in cells)} of {sum(len(c.runs) for c in cells)} in {seconds:.0f} s")


_DELAYS = ("steps_late", "steps_after_injection")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--runs", type=click.IntRange(1), default=200, show_default=True, help="Faults per mode and group.")
@click.option(
    "--mode",
    "modes",
    type=click.Choice(MODES),
    metavar="MODE",
    multiple=True,
    help=f"Only these: {', '.join(MODES)}. [default: all]",
)
@click.option("--group", "groups", type=click.Choice(GROUPS), multiple=True, help="Only these. [default: both]")
@click.option("--stride", type=click.IntRange(1), default=1, show_default=True, help="The canary's.")
@device_option()
@backend_option
@click.option(
    "--seals",
    type=click.Choice(get_args(Seals)),
    default="layer",
    show_default=True,
    help="The canary's: off shows what sampling finds alone.",
)
@click.option("--sampled", is_flag=True, help="Flip bits of sampled bytes only. [default: of any byte]")
@jobs_option()
@number_option()
@json_option("Write the rows here too.")
@commit_option()
def main(
    runs: int,
    modes: tuple[str, ...],
    groups: tuple[str, ...],
    stride: int,
    device: str,
    backend: str,
    seals: str,
    sampled: bool,
    jobs: int,
    number: int,
    json_path: Path | None,
    commit: str | None,
) -> None:
    """Inject one fault into each of many engines, and see that the canary finds it and blames nothing else.

    The engines are those of `kv-canary stress soak`; the faults those of `KV_CANARY_PERTURB_MODE`, each injected into
    a group of full attention (FULL) and into one with a window, a LUT or a ring (SWA). Beside the canary an engine's
    own books say which later reads the fault makes wrong: reads of the same slot, also by requests that share it or
    got a copy, until it is written again.

    \b
    found           a report of the launch site, slot and reasons that the
                    injection names. A fault that only another launch site relies
                    on (a sweep, say) must be reported by that one
    by seals        found by a scrub: a byte that is not sampled, or that nothing
                    else came to. All slots are scrubbed after every fifth action
                    that follows the fault
    out of sight    missed, because nothing could see it: bytes that are not
                    sampled, and whose slot was freed or written anew before a
                    scrub came, or has no seal
    blamed wrongly  runs with a report that no consequence of the fault explains
    steps late      from the first step in which that launch site could see it to
                    that report
    unused          faults in slots that nobody relied on again before they were
                    written anew: told apart, and replaced by further runs

    Bits flip in any byte of any layer. Every consequence must be reported too: a flipped byte that is sampled in every
    step that reads it, any in every scrub. With --stride above 1 a fault
    may be gone before its turn comes; then what is found is a rate, and a low one is no failure.

    Exit codes: 0 all found, nothing else blamed; 1 something was wrong; 2 misuse. Ctrl-C or SIGTERM prints (and
    writes) what was measured so far.

    \b
    Examples:
      kv-canary stress detection --jobs 2 --json detection.json
      kv-canary stress detection --runs 10 --mode real_kv_used --group SWA
      kv-canary stress detection --seals off
      kv-canary stress detection --device cuda --backend triton
    """
    try:
        prepare_backend(device, backend)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    console = Console()
    cells = [
        Cell(mode=mode, group=group, stride=stride, wanted=runs)
        for mode in modes or MODES
        for group in groups or GROUPS
    ]
    begin = time.monotonic()
    with progress_bar(console) as progress, processes(jobs) as pool:
        interrupted = measure(
            cells,
            number=number,
            device=device,
            backend=backend,
            pool=pool,
            ahead=jobs + 1,
            progress=progress,
            seals=seals,
            covered_only=sampled,
        )
    measured = [cell for cell in cells if cell.begun or not interrupted]
    show(measured, console, seconds=time.monotonic() - begin)
    if json_path is not None:
        given = {
            "backend": backend,
            "seals": seals,
            "covered_only": sampled,
            "seed": number,
            "jobs": jobs,
            "seconds": round(time.monotonic() - begin, 1),
        }
        rows = [{**cell.as_dict(), **facts(device, commit=commit, kind="detection"), **given} for cell in measured]
        json_path.write_text(json.dumps(rows, indent=2) + "\n")
    raise SystemExit(0 if all(cell.passed for cell in cells) else 1)


if __name__ == "__main__":
    main()
