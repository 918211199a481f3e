"""Do seals find every change of a byte, whichever it is, and name the place?"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from kv_canary.commands.facts import facts
from kv_canary.commands.progress import progress_bar
from kv_canary.config import CanaryConfig
from kv_canary.constants import WRITER_WORD
from kv_canary.difftest.options import (
    backend_option,
    commit_option,
    device_option,
    jobs_option,
    json_option,
    number_option,
)
from kv_canary.difftest.simulator import Action, EngineConfig, GroupConfig
from kv_canary.difftest.simulator.canary_engine import CanaryEngine
from kv_canary.difftest.simulator.kv_bytes import flip_bit
from kv_canary.difftest.stress.processes import prepare_backend, processes, run_tasks
from kv_canary.reports import ViolationReport
from kv_canary.specs.structures import KvSource

# Slots of a page, pages, bytes of a token in a layer of K, and of V.
PAGE, PAGES, BYTES = 16, 20, 512
# Positions of a request whose text is damaged in a drafter's layer.
STRETCH = 30
# What happens to an engine, and how often: copies apart, which carry damage along.
KINDS = {"arrive": 4, "prefill": 5, "decode": 8, "mixed": 2, "finish": 3, "retract": 1}
# Faults of one task; actions before a fault, at most, and behind it, before all is gone through.
FAULTS, BEFORE, BEHIND = 10, 16, 24
# Words of a place that a report names.
_LAYERS = re.compile(r"^([KV]) (?:of|somewhere from) layer (\d+)(?: to layer (\d+))?")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kind of damage.

    Args:
        name: what is damaged, in words.
        layers: of the model whose KV it is.
        runs: how many faults are wanted.
    """

    name: str
    layers: int
    runs: int


@dataclass(frozen=True, kw_only=True)
class Task:
    """A few faults, one after the other.

    Args:
        case: their kind.
        number: the seed of everything.
        backend: the canary's.
        device: "cpu" or "cuda".
    """

    case: Case
    number: int
    backend: str
    device: str


@dataclass(frozen=True, kw_only=True)
class Damage:
    """Bytes that were changed.

    Args:
        slots: in which slots.
        halves: "K", "V" or both.
        layer: in which layer.
        writers: WRITER of their records then.
    """

    slots: tuple[int, ...]
    halves: str
    layer: int
    writers: tuple[int, ...]

    def explains(self, report: ViolationReport) -> bool:
        """Whether a report is of nothing else, and names the place: the half, and layers among which it is."""
        if report.slot not in self.slots or not set(report.reasons) <= {"K", "V", "SEAL_K", "SEAL_V"}:
            return False
        for place in report.places:
            named = _LAYERS.match(place)
            if named is None or named[1] not in self.halves:
                return False
            first = int(named[2])
            if not first <= self.layer <= int(named[3] or first):
                return False
        return bool(report.places)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a fault.

    Args:
        by: what found it: "HEAD", "admission", "completion" or "scrub"; "gone": its slots were freed or written anew
            before anybody relied on them; "" for nothing.
        late: steps until then.
        blamed_wrongly: reports that it does not explain, in words.
    """

    by: str
    late: int = 0
    blamed_wrongly: tuple[str, ...] = ()


def make_engine(case: Case, rng: np.random.Generator, *, backend: str, device: str) -> CanaryEngine:
    """Return an engine whose every byte is sealed, which nothing goes round by itself."""
    slots = PAGE * (PAGES + 1)

    def source() -> KvSource:
        layers = tuple(torch.from_numpy(rng.integers(0, 256, (slots, BYTES), np.uint8)) for _ in range(case.layers))
        return KvSource(layers=layers, page_size=1, bytes_per_token=BYTES)

    config = EngineConfig(
        groups=(GroupConfig(kind="full", num_slots=slots, k_source=source(), v_source=source()),),
        page_size=PAGE,
        num_pages=PAGES,
        first_slot=PAGE,
        max_rows=5,
        max_len=6 * PAGE,
        token_offset=int(case.layers == 1),
        seed=int(rng.integers(1 << 30)),
    )
    canary = CanaryConfig(backend=backend, seals="layer", scrub_share=0.0, stride=1)
    return CanaryEngine(config, canary=canary, device=device)


def run(task: Task) -> list[Outcome]:
    """Return what became of the faults of a task."""
    rng = np.random.default_rng([task.number, task.case.layers, len(task.case.name)])
    engine = make_engine(task.case, rng, backend=task.backend, device=task.device)
    return [_one(engine, task.case, rng) for _ in range(FAULTS)]


def _one(engine: CanaryEngine, case: Case, rng: np.random.Generator) -> Outcome:
    engine.run(Action(kind="flush"))
    engine.manager.flush()
    engine.manager.reports.clear()
    for _ in range(int(rng.integers(4, BEFORE))):
        engine.run(_action(rng))
    while (damage := _damage(engine, case, rng)) is None:
        engine.run(_action(rng))
    engine.manager.flush()
    healthy = [f"before any fault: {report.sentence}" for report in engine.manager.reports]
    first = engine.step_number
    for _ in range(BEHIND):
        action = _action(rng)
        # A request that ends is looked at, and so are its slots by who comes after.
        ended = engine.manager.summary().audits
        engine.run(action)
        engine.manager.flush()
        if reports := list(engine.manager.reports):
            now = engine.manager.summary().audits
            completed = ended is not None and now is not None and now.completed > ended.completed
            by = "completion" if completed else "admission"
            if any(report.tag.startswith("HEAD") for report in reports):
                by = "HEAD"
            return _found(by, damage, reports, late=engine.step_number - first, healthy=healthy)
        if not _is_there(engine, damage):
            return Outcome(by="gone", blamed_wrongly=tuple(healthy))
    engine.manager.scrub()
    reports = list(engine.manager.reports)
    by = "scrub" if reports else ""
    return _found(by, damage, reports, late=engine.step_number - first, healthy=healthy)


def _found(by: str, damage: Damage, reports: Sequence[ViolationReport], *, late: int, healthy: list[str]) -> Outcome:
    wrong = [report.sentence for report in reports if not damage.explains(report)]
    return Outcome(by=by, late=late, blamed_wrongly=(*healthy, *wrong))


def _action(rng: np.random.Generator) -> Action:
    weights = np.array(list(KINDS.values()), float)
    kind = str(rng.choice(list(KINDS), p=weights / weights.sum()))
    amount = int(rng.integers(1, 4 * PAGE if kind == "arrive" else 2 * PAGE))
    return Action(kind=kind, pick=int(rng.integers(1 << 16)), amount=amount, more=int(rng.integers(4 * PAGE)))


def _damage(engine: CanaryEngine, case: Case, rng: np.random.Generator) -> Damage | None:
    """Change bytes that are cached, where there are any."""
    (group,) = engine.groups
    pool = engine.pools[group.name]
    writers = pool.records[:, WRITER_WORD].tolist()
    live = [slot for slot, writer in enumerate(writers) if slot and writer > 0]
    if case.name == DRAFTER:
        request = max(engine.running, key=lambda request: request.cached, default=None)
        live = [] if request is None else engine.slots_held(group, request)[:STRETCH]
    if not live:
        return None
    sources = {"K": group.config.k_source, "V": group.config.v_source}
    half, layer, slot = str(rng.choice(["K", "V"])), int(rng.integers(case.layers)), int(rng.choice(live))
    if case.name == BIT:
        source, slots = sources[half], [slot]
        if source is not None:
            flip_bit(source, slot, layer=layer, byte=int(rng.integers(BYTES)), bit=int(rng.integers(8)))
    else:
        half = "KV" if case.name == DRAFTER else half
        slots = live if case.name == DRAFTER else [s for s in live if s // PAGE == slot // PAGE]
        for name in half:
            source = sources[name]
            if source is not None:
                source.layers[layer][slots] = torch.from_numpy(rng.integers(0, 256, (len(slots), BYTES), np.uint8)).to(
                    source.layers[layer].device
                )
    return Damage(slots=tuple(slots), halves=half, layer=layer, writers=tuple(writers[slot] for slot in slots))


def _is_there(engine: CanaryEngine, damage: Damage) -> bool:
    """Whether any of the slots is still that which was damaged."""
    (pool,) = engine.pools.values()
    now = pool.records[list(damage.slots), WRITER_WORD].tolist()
    return any(a == b for a, b in zip(now, damage.writers, strict=True))


BIT = "one bit, anywhere"
ONE_PAGE = "a page of 16, in one layer of K or V"
DRAFTER = "positions 0 to 29 of a request, in a drafter's one layer"


@dataclass(kw_only=True)
class Cell:
    """What became of all faults of a case."""

    case: Case
    by: Counter[str] = field(default_factory=Counter)
    late: list[int] = field(default_factory=list)
    blamed_wrongly: list[str] = field(default_factory=list)

    def take(self, outcomes: Sequence[Outcome]) -> bool:
        """Count faults in; return whether there are as many as are wanted, those apart that are gone."""
        for outcome in outcomes:
            if self.runs == self.case.runs:
                break
            self.by[outcome.by] += 1
            self.blamed_wrongly += outcome.blamed_wrongly
            if outcome.by not in ("", "gone"):
                self.late.append(outcome.late)
        return self.runs == self.case.runs

    @property
    def runs(self) -> int:
        """Faults in bytes that somebody has relied on since, or that are still there."""
        return self.by.total() - self.by["gone"]

    @property
    def passed(self) -> bool:
        """Whether all were found, and nothing else."""
        return len(self.late) == self.runs == self.case.runs and not self.blamed_wrongly

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "case": self.case.name,
            "layers": self.case.layers,
            "runs": self.runs,
            "found": len(self.late),
            "late_steps_median": statistics.median(self.late) if self.late else None,
            "late_steps_max": max(self.late, default=None),
            "blamed_wrongly": len(self.blamed_wrongly),
            "by": {name: n for name, n in sorted(self.by.items()) if name not in ("", "gone")},
            "gone": self.by["gone"],
        }


def cases(*, runs: int, layers: Sequence[int]) -> list[Case]:
    """Return the cases, the first of which are run as often as is asked for, and the others a fifth as often."""
    few = max(1, runs // 5)
    found = [Case(name=BIT, layers=n, runs=runs) for n in layers]
    found += [Case(name=ONE_PAGE, layers=n, runs=few) for n in layers]
    return [*found, Case(name=DRAFTER, layers=1, runs=few)]


def show(cells: Sequence[Cell], console: Console, *, seconds: float) -> None:
    """Print what was found, how late and by what."""
    table = Table(title="Bytes that were changed once they were sealed")
    for column in ("case", "layers", "found", "blamed wrongly", "steps late", "by", "gone unread"):
        table.add_column(column, justify="left" if column in ("case", "by") else "right")
    for cell in cells:
        row = cell.as_dict()
        found = f"{row['found']} of {row['runs']}"
        late = "-" if not cell.late else f"{row['late_steps_median']:g} (to {row['late_steps_max']})"
        by = ", ".join(f"{name} {n}" for name, n in row["by"].items())
        shown = found if cell.passed else f"[bold red]{found}"
        table.add_row(row["case"], str(row["layers"]), shown, str(row["blamed_wrongly"]), late, by, str(row["gone"]))
    console.print(table)
    verdict = "[bold green]PASS[/]" if all(cell.passed for cell in cells) else "[bold red]FAIL[/]"
    console.print(f"{verdict} in {seconds:.0f} s")
    for sentence in [sentence for cell in cells for sentence in cell.blamed_wrongly][:10]:
        console.print(sentence, markup=False)


def _tasks(case: Case, *, number: int, backend: str, device: str) -> Iterator[Task]:
    return (Task(case=case, number=n, backend=backend, device=device) for n in count(number))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--runs", type=click.IntRange(1), default=200, show_default=True, help="Bits; a fifth of it of the others."
)
@click.option("--layers", default="32,80", show_default=True, help="Layers of the models, with commas.")
@device_option()
@backend_option
@jobs_option("Processes.")
@number_option("Of the first faults.")
@json_option("Write the rows here too.")
@commit_option()
def main(
    runs: int,
    layers: str,
    device: str,
    backend: str,
    jobs: int,
    number: int,
    json_path: Path | None,
    commit: str | None,
) -> None:
    """Change bytes of cached K and V, one fault at a time, and see that it is found in time, and nothing else.

    A model engine serves requests that share prefixes, end and are put off. Seals are on; nothing goes round the pool
    by itself. A fault is found by HEAD, whose sample may lie there, by the admission of a request that hits the damaged
    prefix, by the completion of one that rested on it, or else, after 24 more actions, by going through the pool once.

    \b
    found           by any of these, before the bytes are freed or written anew
    gone unread     the bytes were, before anybody relied on them: told apart, and
                    replaced by further runs
    blamed wrongly  reports of another slot, half or layer
    steps late      forwards between the fault and the report

    Exit codes: 0 all found, nothing else blamed; 1 something was wrong; 2 misuse. Ctrl-C or SIGTERM prints (and
    writes) what was measured so far.

    \b
    Examples:
      kv-canary stress seals --runs 20
      kv-canary stress seals --runs 1000 --jobs 2 \\
        --json bench/results/seals_detection.json
    """
    try:
        prepare_backend(device, backend)
        sizes = [int(text) for text in layers.split(",")]
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if min(sizes) < 1:
        raise click.UsageError(f"kv-canary: stress: layers must be at least 1, got {layers}")
    console, begin, cells = Console(), time.monotonic(), list[Cell]()
    wanted = cases(runs=runs, layers=sizes)
    with progress_bar(console) as progress, processes(jobs) as pool:
        for case in wanted:
            cells.append(Cell(case=case))
            bar = progress.add_task(f"{case.name}, {case.layers} layers", total=case.runs)

            def take(outcomes: list[Outcome], cell: Cell = cells[-1], bar: Any = bar) -> bool:
                is_over = cell.take(outcomes)
                progress.update(bar, completed=cell.runs)
                return is_over

            tasks = _tasks(case, number=number, backend=backend, device=device)
            if run_tasks(run, tasks, pool=pool, ahead=jobs + 1, take=take):
                break
    show(cells, console, seconds=time.monotonic() - begin)
    if json_path is not None:
        rows = [cell.as_dict() for cell in cells]
        rows[0] |= facts(device, commit=commit, kind="seals")
        rows[0] |= {"seed": number, "backend": backend, "seconds": round(time.monotonic() - begin, 1)}
        json_path.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    raise SystemExit(0 if len(cells) == len(wanted) and all(cell.passed for cell in cells) else 1)


if __name__ == "__main__":
    main()
