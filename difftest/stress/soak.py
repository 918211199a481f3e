"""Does the canary stay silent on engines that are healthy?"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from kv_canary.commands.facts import facts
from kv_canary.commands.progress import progress_bar
from kv_canary.difftest.options import (
    backend_option,
    commit_option,
    device_option,
    jobs_option,
    json_option,
    number_option,
)
from kv_canary.difftest.simulator.actions import opening
from kv_canary.difftest.stress import batching
from kv_canary.difftest.stress.processes import prepare_backend, processes, run_tasks
from kv_canary.difftest.stress.random_engine import CountingEngine, any_action, draw_configs, draw_sealing_canary
from kv_canary.errors import must_be

# Engines of one task; they are drawn together, which is cheaper.
LIVES = 4
# Actions in a life; most of them are steps.
ACTIONS = 100
# Forwards in a life of transformers, at least.
FORWARDS = 40


@dataclass(frozen=True, kw_only=True)
class Task:
    """A few lives: of model engines, or of transformers with the model that is named.

    Args:
        number: the seed of everything in it.
        model: one of `batching.MODELS`; "" for model engines.
        device: "cpu" or "cuda".
        backend: the canary's.
    """

    number: int
    model: str
    device: str
    backend: str


@dataclass(kw_only=True)
class Tally:
    """What lives came to.

    Args:
        lives: how many.
        steps: forwards that served a request.
        seconds: of all processes together.
        relied_on, verified: cached positions, of the lives in which every one is to be verified in every step.
        false_alarms: violations that were found, though there were none.
        wrong: what else was not as it should be, in words; what was found, too.
        happened: how often what happened.
    """

    lives: int = 0
    steps: int = 0
    seconds: float = 0.0
    relied_on: int = 0
    verified: int = 0
    false_alarms: int = 0
    wrong: list[str] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        """Count `other` in."""
        for name in ("lives", "steps", "seconds", "relied_on", "verified", "false_alarms"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.wrong += other.wrong
        self.happened += other.happened

    def judge(
        self,
        whose: str,
        summary: dict[str, Any],
        reports: list[str],
        *,
        relied_on: int,
        every: bool,
        fails: bool = False,
    ) -> None:
        """Count a life in by what the canary says of it.

        Args:
            whose: names the life.
            summary: `CanarySummary.as_dict`.
            reports: sentences.
            relied_on: cached positions that the life's forwards were to read, counted beside the canary.
            every: whether each of them is to be verified in every step.
            fails: whether a forward of the life has failed.
        """
        self.lives += 1
        self.false_alarms += summary["violations"] + summary["discarded"]
        self.wrong += [f"{whose}: {sentence}" for sentence in reports[:3]]
        if summary["watching"] != "complete":
            self.wrong.append(f"{whose}: the canary says that it is {summary['watching']}")
        if summary["positions_relied_on"] != relied_on:
            got = summary["positions_relied_on"]
            self.wrong.append(f"{whose}: {relied_on} cached positions were relied on, the canary counted {got}")
        verified = summary["positions_verified"]
        if every:
            self.relied_on += relied_on
            self.verified += verified
        audits, scrub = summary["audits"], summary["scrub"]
        if audits is not None:
            self.happened["slots of prefix hits held against their seals"] += audits["admitted"]
            self.happened["requests that ended and whose bytes were"] += audits["completed"]
            self.happened["slots held against their seals by scrubs"] += scrub["verified"]
            unsealed = audits["unsealed"] + scrub["unsealed"]
            # What a forward that failed may have overwritten has none.
            if unsealed and not fails:
                self.wrong.append(f"{whose}: {unsealed} slots have a record and no seal")
        # With strides, some of them; where nothing was to be read, there is nothing.
        if not (relied_on if every else min(relied_on, 1)) <= verified <= relied_on:
            self.wrong.append(f"{whose}: {verified} of {relied_on} cached positions were verified")


def run(task: Task) -> Tally:
    """Live the lives of a task; what they raise is told as what went wrong."""
    begin = time.monotonic()
    tally = Tally()
    try:
        (_serve if task.model else _step)(task, tally)
    except Exception as error:
        tally.wrong.append(f"{_name(task)}: raised {type(error).__name__}: {error}")
    tally.seconds = time.monotonic() - begin
    return tally


def _step(task: Task, tally: Tally) -> None:
    """Let model engines live."""
    for index, config in enumerate(draw_configs(task.number, LIVES)):
        rng = np.random.default_rng([task.number, index])
        canary = draw_sealing_canary(rng, task.backend)
        engine = CountingEngine(config, canary=canary, device=task.device, chance=rng)
        for action in opening(rng, longest=config.max_len):
            engine.act(action)
        for _ in range(ACTIONS):
            engine.act(any_action(rng, longest=config.max_len))
            engine.check_integrity()
        engine.manager.scrub()
        whose = f"{_name(task)}, life {index} ({', '.join(g.kind for g in config.groups)})"
        tally.judge(
            whose,
            engine.manager.summary().as_dict(),
            [r.sentence for r in engine.manager.reports],
            relied_on=engine.relied_on,
            every=canary.stride == 1,
            fails=engine.happened["failed forwards"] > 0,
        )
        tally.steps += engine.happened["steps"]
        tally.happened += engine.happened
        for feature in (*(f"{g.kind} groups" for g in config.groups), *_features(config, canary)):
            tally.happened[f"lives with {feature}"] += 1


def _serve(task: Task, tally: Tally) -> None:
    """Let transformers live."""
    result = batching.live(
        batching.BatchingLife(
            model=task.model, number=task.number, forwards=FORWARDS, device=task.device, backend=task.backend
        )
    )
    every = result.canary.stride == 1
    tally.judge(_name(task), result.summary, result.reports, relied_on=result.relied_on, every=every)
    tally.steps += result.forwards
    tally.happened += result.happened
    tally.happened[f"forwards of {task.model}"] += result.forwards
    for feature in _features(None, result.canary):
        tally.happened[f"lives with {feature}"] += 1


def _features(config: Any, canary: Any) -> Iterator[str]:
    """Yield what a life has that not every one has."""
    chosen = {
        "records apart": canary.records == "head_and_tail",
        "strides": canary.stride > 1,
        "tokens": canary.check_tokens,
        "bytes at TAIL": canary.verify_bytes_at_tail,
        "sweeps": canary.sweep_every > 0,
        "quarantine": canary.quarantine,
        f"seals by {canary.seals}": canary.seals not in (None, "off"),
        "no lifetimes": not canary.track_lifetime,
    }
    if config is not None:
        chosen |= {
            "pages": config.page_size > 1,
            "identities": config.anchors,
            "a token offset of 1": config.token_offset == 1,
            "a prefix cache": config.prefix_cache and not config.has_ring,
            "last tokens rewritten": config.rewrite_matched,
        }
    yield from (name for name, has in chosen.items() if has)


def _name(task: Task) -> str:
    return f"seed {task.number}, {task.model or 'model engines'}"


@dataclass(kw_only=True)
class Soak:
    """A campaign, under way or over."""

    steps: Tally = field(default_factory=Tally)
    forwards: Tally = field(default_factory=Tally)
    seconds: float = 0.0
    interrupted: bool = False
    # What each of the runs says of itself that this one goes on from.
    before: list[dict[str, Any]] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Whether the canary was silent, watched everything that it was to watch, and nothing raised."""
        return not any(t.false_alarms or t.wrong for t in (self.steps, self.forwards))

    @property
    def passed(self) -> bool:
        """Whether it was clean to the end."""
        return self.clean and not self.interrupted

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready values."""
        return {
            "interrupted": self.interrupted,
            "seconds": round(self.seconds, 1),
            "engine_steps": self.steps.steps,
            "forwards": self.forwards.steps,
            "false_alarms": self.steps.false_alarms + self.forwards.false_alarms,
            "lives": self.steps.lives + self.forwards.lives,
            "model_engines": _as_dict(self.steps),
            "transformers": _as_dict(self.forwards),
            "before": self.before,
        }


def _as_dict(tally: Tally) -> dict[str, Any]:
    return {
        "lives": tally.lives,
        "job_seconds": round(tally.seconds, 1),
        "relied_on_at_stride_1": tally.relied_on,
        "verified_at_stride_1": tally.verified,
        "wrong": tally.wrong,
        "happened": dict(sorted(tally.happened.items())),
    }


def _from_dict(kept: dict[str, Any], steps: int) -> Tally:
    return Tally(
        lives=kept["lives"],
        steps=steps,
        seconds=kept["job_seconds"],
        relied_on=kept["relied_on_at_stride_1"],
        verified=kept["verified_at_stride_1"],
        happened=Counter(kept["happened"]),
    )


def interrupted_soak(path: Path, *, given: dict[str, Any]) -> Soak:
    """Return the campaign that was interrupted, to go on from.

    Args:
        path: what it wrote.
        given: the device, sources, backend and seed of the one that goes on.

    Raises:
        ValueError: the file is no campaign's, of other code or of other lives, or something was wrong in it.
    """
    try:
        kept = json.loads(path.read_text())
        parts = [(kept["model_engines"], kept["engine_steps"]), (kept["transformers"], kept["forwards"])]
        steps, forwards = (_from_dict(*part) for part in parts)
        wrong = kept["false_alarms"] or any(part["wrong"] for part, _ in parts)
        there = {name: kept[name] for name in given}
        it = {
            name: kept[name] for name in ("versions", "commit", "date", "jobs", "seconds", "engine_steps", "forwards")
        }
        before = [*kept.get("before", []), it]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            must_be("soak", "--continue", "what an interrupted soak wrote", f"{path}: {error!r}")
        ) from error
    for name, value in given.items():
        if there[name] != value:
            raise ValueError(must_be("soak", "--continue", f"of the same {name}, {value}", there[name]))
    if wrong:
        raise ValueError(must_be("soak", "--continue", "of a soak in which nothing was wrong", str(path)))
    return Soak(steps=steps, forwards=forwards, seconds=kept["seconds"], before=before)


def soak(
    *,
    engine_steps: int,
    forwards: int,
    device: str,
    backend: str,
    jobs: int,
    number: int,
    console: Console,
    begun: Soak | None = None,
) -> Soak:
    """Let engines live until they have taken so many steps and forwards, and show how far they are.

    Args:
        engine_steps: of model engines.
        forwards: of transformers.
        device: "cpu" or "cuda".
        backend: the canary's.
        jobs: processes.
        number: seed of the first task; those behind it count on.
        console: where to show it.
        begun: what has been lived by the same seed already; counts on, and is what is returned.
    """
    result = Soak() if begun is None else begun
    begin = time.monotonic() - result.seconds
    parts = (
        ("engine steps", result.steps, engine_steps, ("",), LIVES),
        ("forwards of transformers", result.forwards, forwards, batching.MODELS, len(batching.MODELS)),
    )
    with progress_bar(console) as progress, processes(jobs) as pool:
        for what, tally, wanted, models, lives in parts:
            bar = progress.add_task(what, total=wanted)
            # A seed of which some lives have been lived is not lived again.
            first = number - (-tally.lives // lives)
            tasks = (
                Task(number=n, model=model, device=device, backend=backend) for n in count(first) for model in models
            )
            if tally.steps < wanted and not result.interrupted:
                result.interrupted = run_tasks(
                    run, tasks, pool=pool, ahead=jobs + 1, take=partial(_take, tally, wanted, progress, bar)
                )
    result.seconds = time.monotonic() - begin
    return result


def _take(tally: Tally, wanted: int, progress: Progress, bar: TaskID, one: Tally) -> bool:
    """Count a task in; return whether that is enough."""
    tally.add(one)
    progress.update(bar, completed=min(tally.steps, wanted))
    for text in one.wrong:
        progress.console.print(f"[bold red]wrong[/] {text}", highlight=False)
    return tally.steps >= wanted


def show(result: Soak, console: Console) -> None:
    """Print what was lived and what the canary said of it."""
    table = Table(
        "", "lives", "steps", "per job second", "verified at stride 1", "false alarms", title="Healthy engines"
    )
    for what, tally in (("model engines", result.steps), ("transformers", result.forwards)):
        coverage = f"{tally.verified:,} of {tally.relied_on:,}"
        rate = f"{tally.steps / tally.seconds:.0f}" if tally.seconds else "-"
        table.add_row(what, str(tally.lives), f"{tally.steps:,}", rate, coverage, str(tally.false_alarms))
    console.print(table)
    for what, tally in (("model engines", result.steps), ("transformers", result.forwards)):
        happened = ", ".join(f"{name} {n:,}" for name, n in sorted(tally.happened.items()))
        console.print(f"{what}: {happened or 'nothing'}", highlight=False)
    verdict = "[bold green]PASS[/]" if result.passed else "[bold red]FAIL[/]"
    if result.clean and result.interrupted:
        verdict = "[bold yellow]INTERRUPTED[/], clean so far,"
    console.print(f"{verdict} in {result.seconds:.0f} s")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--engine-steps", type=click.IntRange(0), default=20000, show_default=True, help="Of model engines.")
@click.option("--forwards", type=click.IntRange(0), default=5000, show_default=True, help="Of transformers.")
@device_option()
@backend_option
@jobs_option()
@number_option()
@click.option(
    "--continue",
    "begun_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What an interrupted soak of the same code and seed wrote: count on from there.",
)
@json_option()
@commit_option()
def main(
    engine_steps: int,
    forwards: int,
    device: str,
    backend: str,
    jobs: int,
    number: int,
    begun_path: Path | None,
    json_path: Path | None,
    commit: str | None,
) -> None:
    """Let healthy engines live and see that the canary says nothing.

    First model engines: pools, tables, prefix caches and allocators without a model, of geometries that are drawn
    (full, windowed, LUT and ring groups; pages; identities), which prefill, decode, speculate, fork, compact, retract,
    evict, flush and fail. Then transformers' continuous batching with four tiny models in little room: prompts that
    come again, lengths at which pages and windows are just full, forks, cancellations. The canary's own settings are
    drawn too. Any report is a false alarm; the canary must also say that it is healthy, and have verified every
    cached position where its stride is 1.

    The same seed lives the same lives, whatever --jobs says. What went wrong names its seed: give it with
    `--engine-steps 1 --forwards 0`, or the other way round, to see it again.

    Exit codes: 0 silent, 1 something was wrong or it was interrupted, 2 misuse. Ctrl-C or SIGTERM prints (and writes)
    what was lived so far; `--continue` goes on from there, hours or machines later. What each run was is written too.

    \b
    Examples:
      kv-canary stress soak --jobs 2 --json soak.json
      kv-canary stress soak --engine-steps 500 --forwards 0 --seed 17
      kv-canary stress soak --jobs 2 --continue soak.json --json soak.json
      kv-canary stress soak --device cuda --backend triton
    """
    try:
        prepare_backend(device, backend)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    its_facts = facts(device, commit=commit, kind="soak")
    given = {"backend": backend, "seed": number}
    begun = None
    if begun_path is not None:
        try:
            of = {name: its_facts[name] for name in ("device", "sources")}
            begun = interrupted_soak(begun_path, given={**of, **given})
        except ValueError as error:
            raise click.UsageError(str(error)) from error
    console = Console()
    result = soak(
        engine_steps=engine_steps,
        forwards=forwards,
        device=device,
        backend=backend,
        jobs=jobs,
        number=number,
        console=console,
        begun=begun,
    )
    show(result, console)
    if json_path is not None:
        json_path.write_text(json.dumps({**its_facts, **given, "jobs": jobs, **result.as_dict()}, indent=2) + "\n")
    raise SystemExit(0 if result.passed else 1)


if __name__ == "__main__":
    main()
