"""The same faults in the same running SGLang, before kv-canary and before SGLang's own canary: who sees what, when?"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from kv_canary.commands.evidence_pages import fill
from kv_canary.commands.facts import facts
from kv_canary.commands.paths import OUT_FILE
from kv_canary.commands.progress import progress_bar
from kv_canary.difftest.options import commit_option, json_option
from kv_canary.difftest.stress import causes
from kv_canary.difftest.stress.sglang.engine import BYTES_PER_TOKEN, LAYERS
from kv_canary.difftest.stress.sglang.faults import FAULTS, HEALTHY, Fault
from kv_canary.difftest.stress.sglang.lives import COLUMNS, NONE, Column, Seen, Task, run
from kv_canary.difftest.stress.sglang.page import cells, page
from kv_canary.reports.versions import installed
from kv_canary.specs.structures import KvSource

KNOWN = (*HEALTHY.values(), *FAULTS)


def campaign(
    faults: Sequence[Fault],
    seeds: Sequence[int],
    *,
    columns: Sequence[Column] = COLUMNS,
    tick: Callable[[str], None] = lambda column: None,
) -> list[dict[str, Any]]:
    """Live every fault with every seed, without a canary and before each; return a row for each, JSON-ready.

    Args:
        faults: of `KNOWN`.
        seeds: of the lives.
        columns: the canaries.
        tick: called with the column's name after every life.

    Raises:
        RuntimeError: an engine could not be built.
    """
    seen: dict[tuple[str, str, int], Seen] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        from kv_canary.demo.models import save_tiny_model

        save_tiny_model(model)
        for page_size, column, tasks in tasks_of(faults, seeds, columns=columns):
            for task, one in run(column, page_size, tasks, model=model):
                seen[column.name, task.fault, task.seed] = one
                tick(column.name)
    return [
        _row(
            fault,
            seed,
            clean=seen[NONE.name, _clean(fault).name, seed],
            faulty=seen[NONE.name, fault.name, seed],
            columns=columns,
            watched={c.name: seen[c.name, fault.name, seed] for c in columns},
        )
        for fault in faults
        for seed in seeds
    ]


def tasks_of(
    faults: Sequence[Fault], seeds: Sequence[int], *, columns: Sequence[Column] = COLUMNS
) -> list[tuple[int, Column, list[Task]]]:
    """Return the lives of a campaign, those together that one engine lives: its page size, and its canary.

    Without a canary every fault's traffic lives without the fault, too.

    Args:
        faults, seeds, columns: see `campaign`.
    """
    tasks: list[tuple[int, Column, list[Task]]] = []
    for page_size in sorted({f.page_size for f in faults}):
        chosen = dict.fromkeys(f.name for f in faults if f.page_size == page_size)
        clean = dict.fromkeys(_clean(f).name for f in faults if f.page_size == page_size)
        for column in (NONE, *columns):
            names = {**clean, **chosen} if column is NONE else chosen
            tasks.append((page_size, column, [Task(fault=name, seed=seed) for name in names for seed in seeds]))
    return tasks


def objections(row: dict[str, Any]) -> Iterator[str]:
    """Yield what a row says against kv-canary, in words: what it left unfound, a false alarm, a failure of its own."""
    for name in (c.name for c in COLUMNS if c.read_bytes is not None and c.name in row):
        if row[f"{name}_error"] and not row["engine_error"]:
            yield f"{name}: {row[f'{name}_error']}"
        if row[name] and not row[f"{name}_covered"]:
            yield f"{name}: false alarm: {row[f'{name}_report']}"
        if row[f"{name}_covered"] and not row[name]:
            yield f"{name}: not found"
        # Rows that were kept before causes were judged have none.
        if row.get(f"{name}_cause_is") == "wrong":
            yield f"{name}: told a wrong cause: {row[f'{name}_cause']}"
        if row["place"] == "healthy" and row[f"{name}_output_changed"]:
            yield f"{name}: the canary changed what was generated"


def _clean(fault: Fault) -> Fault:
    """Return the same traffic without the fault."""
    return HEALTHY[fault.script, fault.page_size]


def _row(
    fault: Fault, seed: int, *, clean: Seen, faulty: Seen, columns: Sequence[Column], watched: dict[str, Seen]
) -> dict[str, Any]:
    """Return what became of one fault with one seed: without it, with it, and with it before each canary."""
    row: dict[str, Any] = {
        "fault": fault.name,
        "doc": fault.doc,
        "place": fault.script if fault.act else "healthy",
        "layer": fault.layer,
        "half": fault.half,
        "page_size": fault.page_size,
        "one_byte": fault.one_byte,
        "seed": seed,
        "where": faulty.where,
        "output_wrong": faulty.outputs != clean.outputs or bool(faulty.error),
        "engine_error": faulty.error,
    }
    for column in columns:
        name, one = column.name, watched[column.name]
        row[name] = bool(one.report)
        row[f"{name}_steps_late"] = one.steps_late
        row[f"{name}_reasons"] = one.reasons
        row[f"{name}_report"] = one.report
        row[f"{name}_error"] = one.error
        if column.read_bytes is not None:
            row[f"{name}_covered"] = _covered(fault, faulty, column)
            row[f"{name}_cause"] = one.cause
            row[f"{name}_cause_is"] = causes.grade(fault.right, fault.half_right, one.cause)
            row[f"{name}_output_changed"] = one.outputs != faulty.outputs
    return row


def _covered(fault: Fault, faulty: Seen, column: Column) -> bool:
    """Return whether the fault leaves a mark that kv-canary's records or seals have to show."""
    if fault.act is None:
        return False
    if faulty.position is None or faulty.byte is None or column.sealed:
        return True
    layer, read_bytes = torch.empty(1, BYTES_PER_TOKEN, dtype=torch.uint8), column.read_bytes or 1
    source = KvSource(layers=(layer,) * LAYERS, page_size=1, bytes_per_token=BYTES_PER_TOKEN, read_bytes=read_bytes)
    at, start, end = source.coverage(faulty.position)
    return at == faulty.layer and start <= faulty.byte < end


def show(rows: Sequence[dict[str, Any]], console: Console, *, seconds: float) -> None:
    """Print the table, and what the rows say against kv-canary."""
    table = Table(title="Lives in which the fault was reported, and how many steps late")
    for column in ("fault", "text wrong", *(c.name.replace("_", " ") for c in COLUMNS)):
        table.add_column(column, justify="left" if column == "fault" else "right")
    for name, _, *rest in cells(rows):
        table.add_row(name, *rest)
    console.print(table)
    wrong = [f"{row['fault']}, seed {row['seed']}: {text}" for row in rows for text in objections(row)]
    for text in wrong:
        console.print(f"[bold red]wrong[/] {text}", highlight=False)
    console.print(f"{'[bold red]FAIL' if wrong else '[bold green]PASS'}[/]: {len(rows)} lives in {seconds:.0f} s")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--seeds", type=click.IntRange(1), default=5, show_default=True, help="Lives per fault.")
@click.option("--fault", "names", multiple=True, help="Only faults whose names begin so. [default: all]")
@json_option("Write the rows here too.")
@click.option("--page", "written", type=OUT_FILE, help="Write the page here too.")
@commit_option()
def main(seeds: int, names: tuple[str, ...], json_path: Path | None, written: Path | None, commit: str | None) -> None:
    """Bring the same faults into the same running SGLang, before kv-canary and before SGLang's own canary.

    A real scheduler of SGLang on the CPU, with a tiny model, serves seeded traffic: as it is, with the fault, and with
    the fault before each of five canaries: kv-canary as it comes, with whole rows fingerprinted, and with seals;
    SGLang's own as an operator turns it on, and with everything on that it has. All sweep the prefix cache
    equally often.

    \b
    text wrong          lives in which some request generated other tokens than
                        without the fault
    2 of 5 (1 step)     reported in two lives of five, one step after the first
                        that ran with the fault
    one byte            a byte at random, which kv-canary's fingerprints cover or
                        not: found if and only if they do, and always by a scrub
                        of its seals

    Exit codes: 0 kv-canary found all that it covers, and was silent in healthy lives; 1 it did not; 2 misuse.

    \b
    Examples:
      kv-canary stress sglang --json sglang_detection.json
      kv-canary stress sglang --seeds 2 --fault freed --fault healthy
    """
    if importlib.util.find_spec("sglang") is None:
        raise click.UsageError("sglang is not installed here")
    chosen = [f for f in KNOWN if not names or f.name.startswith(names)]
    if not chosen:
        raise click.BadParameter(f"must begin a name of {'; '.join(f.name for f in KNOWN)}", param_hint="--fault")
    console = Console()
    begin = time.monotonic()
    with progress_bar(console, "what bar lives elapsed") as progress:
        bar = progress.add_task("", total=sum(len(tasks) for *_, tasks in tasks_of(chosen, range(seeds))))
        try:
            rows = campaign(chosen, range(seeds), tick=lambda name: progress.update(bar, advance=1, description=name))
        except RuntimeError as error:
            raise click.ClickException(str(error)) from error
    show(rows, console, seconds=time.monotonic() - begin)
    shared = facts("cpu", commit=commit, kind="sglang_detection")
    shared["versions"]["sglang"] = installed("sglang")
    rows = [{**row, **shared} for row in rows]
    if json_path is not None:
        json_path.write_text(json.dumps(rows, indent=1) + "\n")
    if written is not None:
        written.write_text(fill(page(rows)), encoding="utf-8")
    raise SystemExit(1 if any(True for row in rows for _ in objections(row)) else 0)


if __name__ == "__main__":
    sys.exit(main())
