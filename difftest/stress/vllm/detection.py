"""Faults in a running vLLM before kv-canary: which does it find, and when?"""

from __future__ import annotations

import functools
import importlib.util
import json
import multiprocessing
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from kv_canary.commands.evidence_pages import fill
from kv_canary.commands.facts import facts
from kv_canary.commands.paths import OUT_FILE
from kv_canary.commands.progress import progress_bar
from kv_canary.difftest.options import commit_option, json_option
from kv_canary.difftest.stress import causes
from kv_canary.difftest.stress.processes import in_fork
from kv_canary.difftest.stress.vllm.engine import ONE_THREAD, RUNNERS, Engine, Runner, drafts_of, prepare, save_model
from kv_canary.difftest.stress.vllm.faults import KNOWN, Fault, Setting, healthy, live
from kv_canary.difftest.stress.vllm.page import page
from kv_canary.reports.versions import installed


@dataclass(frozen=True, kw_only=True)
class EngineSetting:
    """An engine, and its canary.

    Args:
        canary: the canary's settings.
        layers: of the model.
        has_drafts: whether there is a draft model.
        asynchronous: see `Engine`.
    """

    canary: dict[str, str] = field(default_factory=lambda: {"seals": "layer"})
    layers: int = 3
    has_drafts: bool = False
    asynchronous: bool = False

    def save(self, models: Path) -> tuple[str, dict[str, Any]]:
        """Save its models, unless they are there; return the model's folder, and vLLM's arguments for the other one."""
        model = save_model(models / f"of {self.layers} layers", num_hidden_layers=self.layers)
        return model, {"speculative_config": drafts_of("draft_model", model)} if self.has_drafts else {}

    def engine(self, models: Path, *, runner: Runner, canary: dict[str, str] | None) -> Engine:
        """Build it, with a canary or without."""
        model, more = self.save(models)
        # Where many layers are to fit.
        more |= {"kv_cache_memory_bytes": self.layers << 22}
        return Engine(model, runner=runner, canary=canary, asynchronous=self.asynchronous, **more)


SETTINGS: dict[Setting, EngineSetting] = {
    "plain": EngineSetting(),
    "writes": EngineSetting(canary={"seals": "layer", "check_writes": "1"}),
    "drafts": EngineSetting(has_drafts=True),
    "ahead": EngineSetting(has_drafts=True, asynchronous=True),
    "32 layers": EngineSetting(layers=32),
    "80 layers": EngineSetting(layers=80),
}
# Seconds that a life may take.
PATIENCE = 300


@dataclass(frozen=True, kw_only=True)
class Lives:
    """Lives to be lived in forks of one engine.

    Args:
        runner: of the model.
        setting: of the engine.
        canary: the canary's settings; None: no canary.
        names: of the faults.
        seeds: of the lives of each.
    """

    runner: Runner
    setting: Setting
    canary: dict[str, str] | None
    names: tuple[str, ...]
    seeds: tuple[int, ...]


def campaign(
    faults: Sequence[Fault],
    seeds: Sequence[int],
    *,
    runners: Sequence[Runner] = RUNNERS,
    tick: Callable[[str], None] = lambda name: None,
    keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """Live every fault with every seed, without a canary and before it; return a row for each runner and fault.

    Args:
        faults: of `KNOWN`.
        seeds: of the lives.
        runners: model runners.
        tick: called with the fault's name after every life.
        keep: called with the rows of a setting once they are there, in any thread, one call at a time.

    Raises:
        RuntimeError: an engine could not be built.
    """
    lock = threading.Lock()

    def keep_alone(rows: list[dict[str, Any]]) -> None:
        with lock:
            keep(rows)

    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        # Before there are processes that would make it at once.
        for fault in faults:
            SETTINGS[fault.setting].save(models)
        live_all = functools.partial(_live_all, faults, seeds, models=models, tick=tick, keep=keep_alone)
        # Each waits for processes of its own.
        with ThreadPoolExecutor(len(runners)) as threads:
            return [row for rows in threads.map(live_all, runners) for row in rows]


def _live_all(
    faults: Sequence[Fault],
    seeds: Sequence[int],
    runner: Runner,
    *,
    models: Path,
    tick: Callable[[str], None],
    keep: Callable[[list[dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    """Return the rows of one model runner."""
    found: dict[str, dict[str, Any]] = {}
    for setting, made in SETTINGS.items():
        seen: dict[tuple[bool, str, int], dict[str, Any]] = {}
        mine = [f for f in faults if f.setting == setting]
        if not mine:
            continue
        names = [f.name for f in mine]
        plain = dict.fromkeys([*(healthy(f).name for f in mine), *names])
        for settings, chosen in ((None, plain), (made.canary, names)):
            lives = Lives(runner=runner, setting=setting, canary=settings, names=tuple(chosen), seeds=tuple(seeds))
            for name, seed, one in run(lives, models=models):
                seen[settings is not None, name, seed] = one
                tick(name)
        found |= {f.name: _row(f, runner, seeds, seen) for f in mine}
        keep([found[name] for name in names])
    return [found[f.name] for f in faults]


def run(lives: Lives, *, models: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Live lives, each in a fork of one process that has built an engine; yield the fault's name, the seed, what came.

    Raises:
        RuntimeError: the engine could not be built, or its process ended.
    """
    if not lives.names:
        return
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        process = context.Process(target=_serve, args=(lives, models, Path(log.name), theirs))
        process.start()
        theirs.close()
        try:
            for name in lives.names:
                for seed in lives.seeds:
                    yield name, seed, mine.recv()
        except EOFError as error:
            tail = Path(log.name).read_text(errors="replace")[-3000:]
            raise RuntimeError(f"{lives.runner}: the engine's process has ended; it said:\n{tail}") from error
        finally:
            process.kill()
            process.join()


def _serve(lives: Lives, models: Path, log: Path, results: Connection) -> None:
    """Build the engine and live the lives, in a process of its own."""
    os.environ.update(ONE_THREAD)
    prepare()
    import torch

    torch.set_num_threads(1)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faults = {f.name: f for f in KNOWN}
    engine = SETTINGS[lives.setting].engine(models, runner=lives.runner, canary=lives.canary)
    for name in lives.names:
        for seed in lives.seeds:
            results.send(in_fork(functools.partial(_live, engine, faults[name], seed), patience=PATIENCE))
    results.close()
    # The engine's threads wait for nobody.
    os._exit(0)


def _live(engine: Engine, fault: Fault, seed: int) -> dict[str, Any]:
    """Live one life, and look after every step whether kv-canary has reported something."""
    manager = engine.session.manager if engine.has_canary else None
    reported_at: list[int] = []

    def see() -> None:
        if manager is not None:
            manager.flush()
            if manager.reports and not reported_at:
                reported_at.append(engine.steps)

    life = live(fault, engine, seed=seed, see=see)
    if manager is not None:
        # What nobody has read is found by the scrub, which an engine that runs on comes to by itself.
        manager.scrub()
    see()
    seen: dict[str, Any] = {
        # vLLM puts something of its own behind the names that it is given.
        "outputs": {name.rpartition("-")[0] or name: tokens for name, tokens in life.outputs.items()},
        "error": life.ended,
        "where": life.act.where if life.act else "",
    }
    if manager is not None:
        slots = life.act.slots if life.act else frozenset()
        seen |= {
            "late": reported_at[0] - life.acted_at if reported_at else None,
            "first": manager.incidents[0].sentence if manager.incidents else "",
            "says": causes.first_cause(manager),
            "wrong": [i.sentence for i in manager.incidents if i.first.slot not in slots],
            "failures": dict(manager.guard.failures),
            "watched": manager.summary().as_dict()["positions_relied_on"],
        }
    return seen


def _row(
    fault: Fault, runner: str, seeds: Sequence[int], seen: dict[tuple[bool, str, int], dict[str, Any]]
) -> dict[str, Any]:
    """Return what became of one fault: without it, with it, and with it before the canary."""
    ours = [seen[True, fault.name, seed] for seed in seeds]
    clean = [seen[False, healthy(fault).name, seed] for seed in seeds]
    faulty = [seen[False, fault.name, seed] for seed in seeds]
    late = [one["late"] for one in ours if one.get("late") is not None]
    return {
        "fault": fault.name,
        "doc": fault.doc,
        "runner": runner,
        "script": fault.script,
        "is_healthy": fault.act is None,
        "setting": fault.setting,
        "runs": len(seeds),
        "found": len(late),
        "late_steps_median": sorted(late)[len(late) // 2] if late else None,
        "late_steps_max": max(late, default=None),
        "blamed_wrongly": sum(bool(one.get("wrong")) for one in ours),
        "wrong_text": sum(f["outputs"] != h["outputs"] for f, h in zip(faulty, clean, strict=True)),
        "engine_ended": sum(bool(one["error"]) for one in faulty),
        "canary_changed_text": sum(
            one["outputs"] != f["outputs"] for one, f in zip(ours, faulty, strict=True) if not f["error"]
        ),
        "failures": [text for one in ours for text in one.get("failures", {})],
        "errors": [one["error"] for one, f in zip(ours, faulty, strict=True) if one["error"] and not f["error"]],
        "wrong": [text for one in ours for text in one.get("wrong", ())][:3],
        "example": ours[0].get("first", ""),
        "says": sorted({re.sub(r"\d+", "N", one["says"]) for one in ours if one.get("says")}),
        "causes": causes.graded(None if fault.act is None else fault, [one.get("says", "") for one in ours]),
        "where": faulty[0].get("where", "") or ours[0].get("where", ""),
    }


def objections(row: dict[str, Any]) -> Iterator[str]:
    """Yield what a row says against kv-canary, in words."""
    expected = 0 if row["is_healthy"] else row["runs"]
    if row["found"] != expected:
        yield f"{row['found']} found, {expected} wanted"
    if row["blamed_wrongly"]:
        yield f"{row['blamed_wrongly']} lives in which something else is blamed: {row['wrong'][0]}"
    for text in (*row["failures"], *row["errors"]):
        yield f"a failure: {text}"
    # Rows that were kept before causes were judged have none.
    if row.get("causes", {}).get("wrong"):
        yield f"{row['causes']['wrong']} lives are told a wrong cause, of {row['says']}"
    if row["canary_changed_text"]:
        yield "the canary changed what was generated"
    if row["is_healthy"] and row["wrong_text"]:
        yield "healthy lives differ"


def show(rows: Sequence[dict[str, Any]], console: Console, *, seconds: float) -> None:
    """Print the table, and what the rows say against kv-canary."""
    table = Table(title="Lives in which the fault was reported, and how many steps late")
    for column in ("fault", "runner", "text wrong", "found", "late", "blamed wrongly"):
        table.add_column(column, justify="left" if column == "fault" else "right")
    for row in rows:
        late = "" if row["late_steps_max"] is None else f"{row['late_steps_median']} (at most {row['late_steps_max']})"
        counts = [f"{row[name]} of {row['runs']}" for name in ("wrong_text", "found")]
        table.add_row(row["fault"], row["runner"], *counts, late, str(row["blamed_wrongly"]))
    console.print(table)
    wrong = [f"{row['fault']}, {row['runner']}: {text}" for row in rows for text in objections(row)]
    for text in wrong:
        console.print(f"[bold red]wrong[/] {text}", highlight=False)
    console.print(f"{'[bold red]FAIL' if wrong else '[bold green]PASS'}[/]: {len(rows)} rows in {seconds:.0f} s")


def _kept(path: Path | None, sources: Mapping[str, str]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows of a file that are of this code, by runner and fault."""
    if path is None or not path.exists():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))
    return {(row["runner"], row["fault"]): row for row in rows if row.get("sources") == sources}


def _ordered(kept: Mapping[tuple[str, str], dict[str, Any]]) -> list[dict[str, Any]]:
    return [kept[runner, f.name] for runner in RUNNERS for f in KNOWN if (runner, f.name) in kept]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--seeds", type=click.IntRange(1), default=10, show_default=True, help="Lives per fault and runner.")
@click.option("--fault", "names", multiple=True, help="Only faults whose names begin so. [default: all]")
@click.option("--runner", "runners", multiple=True, type=click.Choice(RUNNERS), help="Only this one. [default: both]")
@json_option("Write the rows here as they come, beside those of this code that it has already.")
@click.option("--page", "written", type=OUT_FILE, help="Write the page here too.")
@commit_option()
def main(
    seeds: int,
    names: tuple[str, ...],
    runners: tuple[Runner, ...],
    json_path: Path | None,
    written: Path | None,
    commit: str | None,
) -> None:
    """Bring faults into a running vLLM: which does kv-canary find, and when?

    vLLM's own engine on the CPU, with a tiny model and either model runner, serves seeded traffic: as it is, with the
    fault, and with the fault before kv-canary with seals. Each life is a fork of one engine.

    \b
    text wrong       lives in which some request generated other tokens than
                     without the fault
    late             steps from the fault to the report, the median and the most
    blamed wrongly   lives with an incident that is not of what was damaged

    Exit codes: 0 kv-canary found everything, and was silent in healthy lives; 1 it did not; 2 misuse.

    \b
    Examples:
      kv-canary stress vllm --json bench/results/vllm_detection.json \\
        --page docs/vllm-detection.md
      kv-canary stress vllm --seeds 2 --fault freed --fault healthy --runner V2
      kv-canary stress vllm --seeds 1 --fault "80 layers" \\
        --json bench/results/vllm_detection.json
    """
    if importlib.util.find_spec("vllm") is None:
        raise click.UsageError("vllm is not installed here")
    chosen = [f for f in KNOWN if not names or f.name.startswith(names)]
    if not chosen:
        raise click.BadParameter(f"must begin a name of {'; '.join(f.name for f in KNOWN)}", param_hint="--fault")
    console, begin = Console(), time.monotonic()
    shared = facts("cpu", commit=commit, kind="vllm_detection")
    shared["versions"]["vllm"] = installed("vllm")
    kept = _kept(json_path, shared["sources"])

    def keep(rows: list[dict[str, Any]]) -> None:
        kept.update({(row["runner"], row["fault"]): {**row, **shared} for row in rows})
        if json_path is not None:
            json_path.write_text(json.dumps(_ordered(kept), indent=1) + "\n", encoding="utf-8")

    more = {healthy(f).name for f in chosen} - {f.name for f in chosen}
    with progress_bar(console, "what bar lives elapsed") as progress:
        total = (2 * len(chosen) + len(more)) * seeds * len(runners or RUNNERS)
        bar = progress.add_task("", total=total)
        try:
            rows = campaign(
                chosen,
                range(seeds),
                runners=runners or RUNNERS,
                tick=lambda name: progress.update(bar, advance=1, description=name),
                keep=keep,
            )
        except RuntimeError as error:
            raise click.ClickException(str(error)) from error
    show(rows, console, seconds=time.monotonic() - begin)
    if written is not None:
        written.write_text(fill(page(_ordered(kept))), encoding="utf-8")
    raise SystemExit(1 if any(True for row in rows for _ in objections(row)) else 0)


if __name__ == "__main__":
    sys.exit(main())
