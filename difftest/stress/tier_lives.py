"""Lives of engines whose KV goes to another tier and comes back, one fault a life: how they are led and judged.

An engine's own module says which settings and faults there are and how a life goes; see `sglang/tiers.py`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import queue
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import click

from kv_canary.commands.facts import facts
from kv_canary.commands.progress import progress_bar
from kv_canary.difftest.options import commit_option, json_option, seed_option
from kv_canary.difftest.stress import causes

HEALTHY = "healthy"
# Leads the lives of one setting in a process of its own: given the setting, the names of faults, seeds and a queue for
# (setting's name, fault's name, what came of the life) of each, and None behind the last.
Lead = Callable[[Any, Sequence[str], Sequence[int], Any], None]


class Named(Protocol):
    """A setting or a fault."""

    @property
    def name(self) -> str: ...


def look_of(report: Any) -> str:
    """Return which look has made a report: "backup", "host", "load" or "head"."""
    is_seal = any(reason.startswith("SEAL") for reason in report.reasons)
    if report.group.endswith("on the host"):
        return "host" if is_seal else "backup"
    return "load" if is_seal else "head"


def campaign(
    engine: str,
    lead: Lead,
    settings: Sequence[Named],
    names: Callable[[Any], Sequence[str]],
    seeds: Sequence[int],
    *,
    faults: Sequence[causes.Fault],
    tick: Callable[[str], None] = lambda what: None,
) -> list[dict[str, Any]]:
    """Live every fault with every seed in every setting; return a row for each fault and setting, JSON-ready.

    Args:
        engine: its name.
        lead: leads the lives of a setting.
        settings: to be lived in.
        names: returns the faults of a setting, by name.
        seeds: of the lives.
        faults: that there are.
        tick: called behind every life.

    Raises:
        RuntimeError: an engine ended before its lives.
    """
    context = multiprocessing.get_context("spawn")
    lives: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for setting in settings:
        told: Any = context.Queue()
        # No daemon: an engine's ranks may be processes of its own.
        process = context.Process(target=lead, args=(setting, names(setting), seeds, told))
        process.start()
        try:
            while True:
                if not process.is_alive() and told.empty():
                    raise RuntimeError(f"kv-canary: the engine {setting.name} must live, got exit {process.exitcode}")
                with contextlib.suppress(queue.Empty):
                    one = told.get(timeout=1.0)
                    if one is None:
                        break
                    lives.setdefault(one[:2], []).append(one[2])
                    tick(f"{one[0]}: {one[1]}")
            process.join()
        finally:
            process.kill()
    by_name = {fault.name: fault for fault in faults}
    return [_row(f"{engine}, {setting}", fault, by_name.get(fault), found) for (setting, fault), found in lives.items()]


def _row(engine: str, name: str, fault: causes.Fault | None, lives: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    places = [life["where"] for life in lives if life["found"]]
    return {
        "fault": name,
        "engine": engine,
        "runs": len(lives),
        "found": len(places),
        "where": {where: places.count(where) for where in dict.fromkeys(places)},
        "late_steps_max": max(life["late"] for life in lives),
        "blamed_wrongly": sum(life["blamed_wrongly"] for life in lives),
        "wrong_text": sum(life["wrong_text"] for life in lives),
        "came_back": min(life["came_back"] for life in lives),
        "says": sorted({re.sub(r"\d+", "N", life["says"]) for life in lives if life["says"]}),
        "causes": causes.graded(fault, [life["says"] for life in lives]),
    }


def objections(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a row says against kv-canary, or against the life."""
    if row["fault"] == HEALTHY:
        if row["found"]:
            yield f"{row['found']} of {row['runs']} healthy lives were reported"
    elif row["found"] < row["runs"]:
        yield f"found in {row['found']} of {row['runs']} lives"
    if row["blamed_wrongly"]:
        yield f"{row['blamed_wrongly']} lives blame somebody else"
    if row["causes"]["wrong"]:
        yield f"{row['causes']['wrong']} lives are told a wrong cause, of {row['says']}"
    if not row["came_back"]:
        yield "nothing came back from the host"


def options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `run`."""
    for option in (
        commit_option(),
        json_option("Write the rows here too."),
        seed_option("Of the first life; the next ones count up."),
        click.option("--setting", "where", multiple=True, help="Only engines whose names begin so. [default: all]"),
        click.option("--fault", "chosen", multiple=True, help="Only faults whose names begin so. [default: all]"),
        click.option(
            "--lives", type=click.IntRange(1), default=10, show_default=True, help="Of each fault and engine."
        ),
    ):
        command = option(command)
    return command


def run(
    engine: str,
    lead: Lead,
    settings: Sequence[Named],
    faults: Sequence[causes.Fault],
    *,
    belongs: Callable[[Any, Any], bool] = lambda setting, fault: True,
    lives: int,
    chosen: tuple[str, ...],
    where: tuple[str, ...],
    seed: int,
    json_path: Path | None,
    commit: str | None,
    kind: str,
    device: str = "cpu",
) -> None:
    """Run a campaign for a command, and show what came of it; end with exit code 0, or 1 where a row is objected to.

    Args:
        engine: name of its package.
        lead, settings: see `campaign`.
        faults: that there are.
        belongs: says whether a fault is one of a setting's.
        lives, chosen, where, seed, json_path, commit: what `options` has taken.
        kind: of evidence, as `kv-canary evidence` calls it.
        device: where the engines are.
    """
    from rich.console import Console
    from rich.table import Table

    from kv_canary.reports.versions import installed

    if importlib.util.find_spec(engine) is None:
        raise click.UsageError(f"{engine} is not installed here")
    asked = [name for name in (HEALTHY, *(f.name for f in faults)) if not chosen or name.startswith(chosen)]
    settings = [s for s in settings if not where or s.name.startswith(where)]
    if not asked or not settings:
        raise click.BadParameter("names no fault, or no engine", param_hint="--fault or --setting")

    def names(setting: Named) -> list[str]:
        its = {HEALTHY, *(f.name for f in faults if belongs(setting, f))}
        return [name for name in asked if name in its]

    console = Console()
    with progress_bar(console, "bar count elapsed what") as bar:
        task = bar.add_task("", total=sum(len(names(setting)) for setting in settings) * lives)
        rows = campaign(
            engine,
            lead,
            settings,
            names,
            range(seed, seed + lives),
            faults=faults,
            tick=lambda what: bar.update(task, advance=1, description=what),
        )
    table = Table("fault", "engine", "lives", "found", "where", "late", "blamed", "causes", "wrong text")
    for row in rows:
        told = ", ".join(f"{place} {count}" for place, count in row["where"].items())
        shown = (row["fault"], row["engine"], row["runs"], row["found"], told, row["late_steps_max"])
        right = ", ".join(f"{grade} {count}" for grade, count in row["causes"].items() if count)
        table.add_row(*map(str, (*shown, row["blamed_wrongly"], right, row["wrong_text"])))
    console.print(table)
    wrong = [f"{row['fault']}, {row['engine']}: {text}" for row in rows for text in objections(row)]
    for text in wrong:
        console.print(text, style="bold red", highlight=False)
    if json_path is not None:
        shared = facts(device, kind=kind, commit=commit)
        shared["versions"][engine] = installed(engine)
        json_path.write_text(json.dumps([{**row, **shared} for row in rows], indent=1) + "\n", encoding="utf-8")
    raise SystemExit(1 if wrong else 0)
