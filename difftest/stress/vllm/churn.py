"""Healthy lives of a real vLLM over random settings: how often does kv-canary cry wolf?"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from kv_canary.commands.facts import facts
from kv_canary.commands.progress import progress_bar
from kv_canary.difftest.options import commit_option, json_option
from kv_canary.difftest.stress.vllm.engine import (
    ONE_THREAD,
    RUNNERS,
    Engine,
    Runner,
    Traffic,
    drafts_of,
    prepare,
    save_model,
)
from kv_canary.reports.versions import installed

# Lives of one process: engines come one after the other there, and leave memory behind.
_AT_ONCE = 6


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one life, all of them from its seed.

    Args:
        seed: of all.
        kind: of the model.
        runner: of the model.
        asynchronous: whether a step is prepared before the tokens of the one before are known.
        drafts: "none", "ngram", "model" or "eagle".
        caches: whether there is a prefix cache.
        sampled: whether tokens are sampled at random, with several that stop a request.
        sequences, tokens: of one step, at most.
        blocks: of the pool.
        canary: its settings.
    """

    seed: int
    kind: str
    runner: Runner
    asynchronous: bool
    drafts: str
    caches: bool
    sampled: bool
    sequences: int
    tokens: int
    blocks: int
    canary: tuple[tuple[str, str], ...]

    @classmethod
    def drawn(cls, seed: int, *, runners: tuple[Runner, ...]) -> Settings:
        """Return the settings that a seed stands for."""
        rng = random.Random(seed)
        kind, runner = rng.choice(["llama", "llama", "mistral", "gemma3"]), rng.choice(runners)
        drafts = rng.choice(["none", "none", "model", "ngram", "eagle"]) if kind == "llama" else "none"
        # Runner V2 has no proposer of n-grams on a CPU.
        drafts = "none" if drafts == "ngram" and runner == "V2" else drafts
        canary = {"check_inputs": rng.choice("01"), "seals": rng.choice(["off", "off", "layer", "model"])}
        canary |= {"check_writes": "1"} if canary["seals"] != "off" and kind == "llama" and rng.random() < 0.3 else {}
        return cls(
            seed=seed,
            kind=kind,
            runner=runner,
            # n-grams are looked up on the host, which has to have the tokens.
            asynchronous=drafts != "ngram" and rng.random() < 0.4,
            drafts=drafts,
            caches=rng.random() < 0.85,
            sampled=rng.random() < 0.4,
            sequences=rng.choice([2, 4, 6, 8]),
            tokens=rng.choice([40, 96, 200]),
            blocks=rng.choice([27, 33, 60]) + (30 if kind == "gemma3" else 0),
            canary=tuple(canary.items()),
        )


@dataclass(frozen=True, kw_only=True)
class Lived:
    """The outcome of one life.

    Args:
        steps: of the engine.
        requests: that ended.
        verified, relied_on: cached positions.
        reports: false alarms, in words.
        failures: of the canary's own.
        error: what ended the life.
    """

    steps: int = 0
    requests: int = 0
    verified: int = 0
    relied_on: int = 0
    reports: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    error: str = ""

    @property
    def is_clean(self) -> bool:
        """Whether there is nothing to say against the canary."""
        return not (self.reports or self.failures or self.error) and self.verified == self.relied_on


def live(settings: Settings, *, steps: int, models: Path) -> Lived:
    """Live one life of so many steps and what is left of its requests then, in this process."""
    model = save_model(models / settings.kind, settings.kind)
    more: dict[str, Any] = {}
    if settings.drafts == "ngram":
        lookup = {"prompt_lookup_max": 2, "prompt_lookup_min": 1}
        more["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 3, **lookup}
    elif settings.drafts == "model":
        more["speculative_config"] = drafts_of("draft_model", model)
    elif settings.drafts == "eagle":
        more["speculative_config"] = drafts_of("eagle", model)
    with Engine(
        model,
        runner=settings.runner,
        canary=dict(settings.canary),
        asynchronous=settings.asynchronous,
        enable_prefix_caching=settings.caches,
        max_num_seqs=settings.sequences,
        max_num_batched_tokens=settings.tokens,
        num_gpu_blocks_override=settings.blocks,
        **more,
    ) as engine:
        traffic = Traffic(seed=settings.seed, requests=settings.sequences + 2)
        if settings.sampled:
            traffic.sampling = lambda _: {"temperature": 1.0, "stop_token_ids": list(range(100, 120))}
        traffic.serve(engine, steps)
        session = engine.session
        session.manager.scrub()
        summary = session.manager.summary()
        return Lived(
            steps=engine.steps,
            requests=len(engine.outputs),
            verified=summary.positions_verified,
            relied_on=summary.positions_relied_on,
            reports=tuple(r.sentence for r in session.manager.reports)[:3],
            failures=tuple(session.manager.guard.failures),
            error=session.off,
        )


def lives(
    seeds: list[int], *, steps: int, runners: tuple[Runner, ...], models: Path
) -> Iterator[tuple[Settings, Lived]]:
    """Live lives in a process of their own, one after the other; one that ends early ends those behind it."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    drawn = [Settings.drawn(seed, runners=runners) for seed in seeds]
    process = context.Process(target=_serve, args=(drawn, steps, models, theirs))
    process.start()
    theirs.close()
    try:
        for settings in drawn:
            yield settings, mine.recv()
    except EOFError:
        yield settings, Lived(error="the engine's process has ended")
    finally:
        process.kill()
        process.join()


def _serve(drawn: list[Settings], steps: int, models: Path, results: Connection) -> None:
    os.environ.update(ONE_THREAD)
    prepare()
    import torch

    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    for settings in drawn:
        try:
            results.send(live(settings, steps=steps, models=models))
        except Exception as error:
            results.send(Lived(error=f"{type(error).__name__}: {error}"))
    results.close()
    os._exit(0)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--steps", type=click.IntRange(1), default=3000, show_default=True, help="Of engines, at least, in all.")
@click.option("--life", type=click.IntRange(1), default=100, show_default=True, help="Steps in which requests come.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the first life; others count on.")
@click.option(
    "--runner", "runners", multiple=True, type=click.Choice(("V1", "V2")), help="Only this one. [default: both]"
)
@json_option("Write what came of it here too.")
@commit_option()
def main(
    steps: int, life: int, seed: int, runners: tuple[Runner, ...], json_path: Path | None, commit: str | None
) -> None:
    """Let a real vLLM live over random settings, healthy: a report is a false alarm.

    vLLM's own engine on the CPU: both model runners, plain attention, windows, groups that overlay each other,
    asynchronous scheduling, n-grams and draft models, tight pools, aborts, sampling.

    Exit codes: 0 silent, and every position that was relied on was verified; 1 not so; 2 misuse.

    \b
    Examples:
      kv-canary stress vllm-churn --steps 3000 \\
        --json bench/results/vllm_churn.json
    """
    if importlib.util.find_spec("vllm") is None:
        raise click.UsageError("vllm is not installed here")
    console, begin = Console(), time.monotonic()
    chosen: tuple[Runner, ...] = runners or RUNNERS
    done, wrong, kinds = list[Lived](), list[str](), dict[str, int]()
    with tempfile.TemporaryDirectory() as folder, progress_bar(console, "what bar done elapsed") as progress:
        bar = progress.add_task("", total=steps)
        while (served := sum(one.steps for one in done)) < steps and len(wrong) < _AT_ONCE:
            seeds = [seed + len(done) + n for n in range(_AT_ONCE)]
            for settings, one in lives(seeds, steps=life, runners=chosen, models=Path(folder)):
                done.append(one)
                name = f"{settings.kind} {settings.runner}"
                kinds[name] = kinds.get(name, 0) + one.steps
                progress.update(bar, advance=one.steps, description=name)
                if not one.is_clean:
                    wrong.append(f"{settings}: {one}")
                if (served := served + one.steps) >= steps:
                    break
    result = {
        "lives": len(done),
        "steps": sum(one.steps for one in done),
        "requests": sum(one.requests for one in done),
        "positions_verified": sum(one.verified for one in done),
        "positions_relied_on": sum(one.relied_on for one in done),
        "false_alarms": sum(len(one.reports) for one in done),
        "steps_by_kind": kinds,
        "wrong": wrong,
        "seconds": round(time.monotonic() - begin),
        **facts("cpu", commit=commit, kind="vllm_churn"),
    }
    result["versions"]["vllm"] = installed("vllm")
    for text in wrong:
        console.print(f"[bold red]wrong[/] {text}", highlight=False)
    console.print(
        f"{'[bold red]FAIL' if wrong else '[bold green]PASS'}[/]: {result['lives']} lives, {result['steps']:,} steps, "
        f"{result['positions_verified']:,} of {result['positions_relied_on']:,} positions verified, "
        f"{result['false_alarms']} false alarms, in {result['seconds']} s"
    )
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=1) + "\n")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    sys.exit(main())
