"""Runs the demo and shows what came of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from rich import box
from rich.console import Console
from rich.progress import TaskID
from rich.table import Table
from rich.text import Text

from kv_canary.backends import select_backend
from kv_canary.commands.progress import progress_bar
from kv_canary.config import CanaryConfig
from kv_canary.demo.faults import FAULTS, Fault, Planter
from kv_canary.demo.models import MODELS, tiny_model
from kv_canary.demo.random_bits import RandomBits, flip_bits
from kv_canary.demo.serving import SHAPES, Served, serve
from kv_canary.demo.traffic import Conversation

# Layers of the models in which bits flip at random: the small one's, and a deep one's.
DEPTHS = (4, 32)


@dataclass(frozen=True, kw_only=True)
class FaultResult:
    """The outcome of one planted fault."""

    name: str
    model: str
    found: bool
    reasons: list[str]
    tag: str | None
    steps_late: int | None
    planted_step: int | None
    where: str | None
    slot: int | None
    report: str | None


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """The whole demo: its clean runs, its planted faults, and the lives in which bits flip at random."""

    engine: str
    backend: str
    device: str
    clean: dict[str, Any]
    faults: list[FaultResult]
    random_bits: list[RandomBits]

    @property
    def passed(self) -> bool:
        """Whether the clean runs were silent and every fault was found, random bits by who can see them."""
        silent = self.clean["violations"] == 0 and self.clean["positions_verified"] > 0
        return silent and all(f.found for f in self.faults) and all(b.passed for b in self.random_bits)

    def as_dict(self) -> dict[str, Any]:
        """Return the result as JSON-ready values."""
        return asdict(self)


def run_demo(
    conversations: Sequence[Conversation],
    *,
    config: CanaryConfig,
    device: str,
    seed: int,
    console: Console,
    models: Sequence[str] = MODELS,
    faults: Sequence[Fault] = FAULTS,
    depths: Sequence[int] = DEPTHS,
) -> DemoResult:
    """Serve `conversations` on every model, healthy, once per fault and with random bits, and show what came of it.

    Args:
        conversations: the traffic of every run.
        config: the canary's; its mode should be "log", since every run is to be seen to its end.
        device: "cpu" or "cuda".
        seed: of the models and of the choice of what to damage.
        console: where to show it.
        models: names of tiny models.
        faults: the faults to plant.
        depths: layers of the models in which bits flip at random.
    """
    # Violations are what the demo is about: it shows them itself.
    logger = logging.getLogger("kv_canary")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    turns = sum(len(c.turns) for c in conversations)
    clean: dict[str, Served] = {}
    results: list[FaultResult] = []
    flipped: list[RandomBits] = []
    try:
        with progress_bar(console, "what bar count elapsed", transient=False) as progress:
            for name in models:
                model = tiny_model(name, device=device, seed=seed, **SHAPES[name])
                task = progress.add_task(f"{name}, healthy (answers)", total=turns)

                def finished(n: int, task: TaskID = task) -> None:
                    progress.update(task, completed=n)

                clean[name] = serve(model, conversations, config=config, on_finished=finished)
                task = progress.add_task(f"{name}, planted faults", total=len(faults))
                for fault in faults:
                    results.append(_plant(fault, name, model, conversations, config=config, seed=seed))
                    progress.advance(task)
            task = progress.add_task("random bits (models)", total=len(depths))
            for layers in depths:
                shape = {**SHAPES["llama"], "num_hidden_layers": layers}
                model = tiny_model("llama", device=device, seed=seed, **shape)
                flipped.append(flip_bits(model, "llama", conversations, config=config, seed=seed))
                progress.advance(task)
    finally:
        logger.setLevel(level)
    totals = {
        key: sum(getattr(s, key) for s in clean.values())
        for key in ("requests", "forwards", "positions_verified", "violations")
    }
    result = DemoResult(
        engine=f"transformers {transformers.__version__}",
        backend=select_backend(config.backend, torch.device(device)),
        device=torch.cuda.get_device_name() if device == "cuda" else device,
        clean=totals,
        faults=results,
        random_bits=flipped,
    )
    _show(result, clean, console)
    return result


def _plant(
    fault: Fault, name: str, model: Any, conversations: Sequence[Conversation], *, config: CanaryConfig, seed: int
) -> FaultResult:
    planter = Planter(fault=fault, seed=seed)
    served = serve(model, conversations, config=config, hooks=planter.hooks())
    findings = planter.findings(served.reports)
    planted = planter.planted
    if planted is None or not findings:
        return FaultResult(
            name=fault.name,
            model=name,
            found=False,
            reasons=sorted({r for report in served.reports for r in report.reasons}),
            tag=None,
            steps_late=None,
            planted_step=planted.step if planted else None,
            where=planted.where if planted else None,
            slot=None,
            report=None,
        )
    first = findings[0]
    return FaultResult(
        name=fault.name,
        model=name,
        found=True,
        reasons=list(first.reasons),
        tag=first.tag,
        steps_late=first.step - planted.step,
        planted_step=planted.step,
        where=planted.where,
        slot=first.slot,
        report=first.sentence,
    )


def _narrow_table(title: str) -> Table:
    """Return an empty table that spends no room on lines, so that 80 columns hold it."""
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)


def _faults_table(model: str, faults: Sequence[FaultResult]) -> Table:
    """Return what became of the faults that were planted under a model: what each did stands below its name."""
    table = _narrow_table(f"Planted faults: {model}")
    table.add_column("fault,\nand what it did")
    for column in ("at\nstep", "steps\nlate", "slot"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("found as,\nby", no_wrap=True)
    for f in faults:
        fault = Text.assemble((f.name, "bold"), "\n", f.where or ("never: no right moment came", "bold red"))
        numbers = ("" if n is None else str(n) for n in (f.planted_step, f.steps_late, f.slot))
        found = Text(f"{' + '.join(f.reasons)}\n{f.tag}") if f.found else Text("NOT FOUND", style="bold red")
        table.add_row(fault, *numbers, found)
    return table


def _show(result: DemoResult, clean: dict[str, Served], console: Console) -> None:
    table = Table(title=f"Healthy: {result.engine}, backend {result.backend} on {result.device}")
    for column in ("model", "answers", "forwards", "positions verified", "violations"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, served in clean.items():
        row = (served.requests, served.forwards, served.positions_verified, served.violations)
        table.add_row(name, *(f"{n:,}" for n in row))
    console.print(table)

    for name in clean:
        console.print()
        console.print(_faults_table(name, [f for f in result.faults if f.model == name]))
    console.print()
    example = next((f.report for f in result.faults if f.report), None)
    if example:
        console.print(f"A report in full: {example}", highlight=False)

    if result.random_bits:
        console.print()
        table = _narrow_table("Bits flipped in any byte of any layer; a scrub of the seals follows each forward")
        found = ("found by\nsample", "found by\nseals", "gone\nfirst", "steps to\nseals")
        for column in ("model", "layers", "flipped", "sampled", *found):
            table.add_column(column, justify="left" if column == "model" else "right", no_wrap=True)
        for b in result.random_bits:
            counts = (b.layers, b.flipped, b.sampled, b.found_by_sample, b.found_by_seals, b.gone)
            steps = (
                "-" if b.most_steps_to_seals is None else f"{b.median_steps_to_seals:g} (to {b.most_steps_to_seals})"
            )
            table.add_row(b.model, *map(str, counts), steps)
        console.print(table)
        console.print()
        for b in (b for b in result.random_bits if not b.passed):
            console.print(f"[bold red]wrong[/] {b.layers} layers: {b}", highlight=False)

    num_found = sum(f.found for f in result.faults)
    silent = "silent" if not result.clean["violations"] else f"{result.clean['violations']} FALSE ALARMS"
    verdict = "[bold green]PASS" if result.passed else "[bold red]FAIL"
    console.print(
        f"{verdict}[/]: healthy runs {silent} over {result.clean['forwards']:,} forwards and "
        f"{result.clean['positions_verified']:,} verified positions; {num_found} of {len(result.faults)} faults found."
    )
    bits = sum(b.flipped for b in result.random_bits)
    if bits:
        sampled = sum(b.found_by_sample for b in result.random_bits)
        sealed = sum(b.found_by_seals for b in result.random_bits)
        console.print(f"Of {bits} random bits sampling found {sampled}, seals (seals='layer') {sealed}.")
