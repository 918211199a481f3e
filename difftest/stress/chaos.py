"""Does an engine notice when the canary itself fails? Its launches, copies, files, threads and callbacks, at random."""

from __future__ import annotations

import dataclasses
import json
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from transformers import GenerationConfig

from kv_canary import output
from kv_canary.commands.facts import facts
from kv_canary.commands.progress import progress_bar
from kv_canary.config import CanaryConfig
from kv_canary.demo.serving import batching_config
from kv_canary.difftest.options import device_option, jobs_option, json_option, seed_option
from kv_canary.difftest.simulator.actions import opening
from kv_canary.difftest.stress import batching
from kv_canary.difftest.stress.canary_faults import Faults, InjectedError, SourHandler, SourObserver
from kv_canary.difftest.stress.processes import processes, run_tasks
from kv_canary.difftest.stress.random_engine import CountingEngine, any_action, draw_canary, draw_configs
from kv_canary.engines.transformers import install

# How often each call below fails; a life has one of them.
RATES = (0.001, 0.006, 0.03)
# Engines of one task, and actions in a life.
LIVES = 2
ACTIONS = 80
# Actions without faults at the end of a life: by then all is as before, and a planted fault is found.
QUIET = 30
# Seconds that a life may take before it counts as hung.
HANGS_AFTER = 600.0


@dataclass(frozen=True, kw_only=True)
class Task:
    """A few lives: of model engines, or of transformers with the model that is named.

    Args:
        number: the seed of everything in it.
        model: one of `batching.MODELS`; "" for model engines.
        folder: where event logs and bundles go.
        device: "cpu" or "cuda".
    """

    number: int
    model: str
    folder: str
    device: str = "cpu"


@dataclass(kw_only=True)
class Tally:
    """What lives came to.

    Args:
        lives, steps: how many; steps are forwards that served a request.
        seconds: of all processes together.
        injected: faults, by place.
        lost: forwards or requests that the canary's failures ended, in words.
        false_alarms: violations reported, though there were none.
        found, missed: lives in which the fault planted at the end was found, and in which it was not.
        skipped, unverified: forwards that went by unwatched, and positions taken in anew, as the canary says.
        wrong: what else was not as it should be, in words.
    """

    lives: int = 0
    steps: int = 0
    seconds: float = 0.0
    injected: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    false_alarms: int = 0
    found: int = 0
    missed: int = 0
    skipped: int = 0
    unverified: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Count `other` in."""
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def failed(self) -> bool:
        """Whether anything was not as it should be."""
        return bool(self.lost or self.false_alarms or self.missed or self.wrong)


def run(task: Task) -> Tally:
    """Live the lives of a task; what they raise is told as what was lost."""
    began, tally = time.monotonic(), Tally()
    handler_faults = Faults(np.random.default_rng([task.number, 77]), rate=0.1)
    handler = SourHandler(handler_faults)
    logger = logging.getLogger("kv_canary")
    logging.disable(logging.NOTSET)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        (_serve if task.model else _step)(task, tally)
    except Exception as error:
        tally.lost.append(f"{_name(task)}: raised {type(error).__name__}: {error}")
    finally:
        output.drain()
        logger.removeHandler(handler)
    tally.injected += handler_faults.injected
    tally.seconds = time.monotonic() - began
    if tally.seconds > HANGS_AFTER:
        tally.wrong.append(f"{_name(task)}: took {tally.seconds:.0f} s")
    return tally


def _canary(rng: np.random.Generator, task: Task, life: int) -> CanaryConfig:
    return dataclasses.replace(
        draw_canary(rng, "reference" if task.device == "cpu" else "triton"),
        event_log=Path(task.folder) / f"{task.number}-{life}.jsonl",
        bundles=Path(task.folder) / f"bundles-{task.number}-{life}",
        stats_every=int(rng.choice([0, 5])),
        check_inputs=bool(rng.integers(2)),
        ring_capacity=int(rng.choice([8, 1024])),
    )


def _step(task: Task, tally: Tally) -> None:
    """Let model engines live."""
    for index, config in enumerate(draw_configs(task.number, LIVES)):
        whose = f"{_name(task)}, life {index} ({', '.join(g.kind for g in config.groups)})"
        rng = np.random.default_rng([task.number, index])
        faults = Faults(np.random.default_rng([task.number, index, 1]), rate=float(rng.choice(RATES)))
        engine = CountingEngine(
            config,
            canary=_canary(rng, task, index),
            observers=[SourObserver(faults)],
            chance=rng,
            device=task.device,
        )
        # What reaches the engine is what is looked for.
        engine.manager.guard.contains = True
        # Tokens and `discarded` are the engine's, which may fail as well.
        true = engine.forward_batch
        engine.forward_batch = partial(_sour_batch, true, faults)  # type: ignore[method-assign]
        for action in opening(rng, longest=config.max_len):
            engine.act(action)
        try:
            with faults.installed():
                for _ in range(ACTIONS):
                    engine.act(any_action(rng, longest=config.max_len))
                    engine.check_integrity()
                    if rng.random() < 0.05:
                        engine.manager.flush()
                    engine.manager.summary()
        except Exception as error:
            tally.lost.append(f"{whose}: {type(error).__name__}: {error}")
            continue
        finally:
            faults.rate = 0.0
            tally.injected += faults.injected
        for _ in range(QUIET):
            engine.act(any_action(rng, longest=config.max_len))
        engine.manager.flush()
        summary = engine.manager.summary()
        tally.lives += 1
        tally.steps += engine.happened["steps"]
        tally.skipped += summary.skipped
        tally.unverified += summary.unverified
        tally.wrong += _strange(whose, summary.failures)
        if summary.violations:
            tally.false_alarms += summary.violations
            tally.wrong += [f"{whose}: {r.sentence}" for r in list(engine.manager.reports)[:2]]
        found = _finds_a_fault(engine, rng) if engine.manager.config.stride == 1 else None
        tally.found += found is True
        if found is False:
            tally.missed += 1
            tally.wrong.append(f"{whose}: a planted fault was not found")
        engine.manager.close()


def _sour_batch(true: Callable[..., Any], faults: Faults, extends: Any) -> Any:
    batch = true(extends)
    requests = [
        dataclasses.replace(
            r,
            tokens=faults.failing("tokens", r.tokens),
            discarded=faults.failing("discarded", lambda: False),
        )
        for r in batch.requests
    ]
    return dataclasses.replace(batch, requests=requests)


def _strange(whose: str, failures: Mapping[str, int]) -> list[str]:
    """Return the failures of the canary's that nobody has injected: faults of its own, which it contained."""
    known = (InjectedError.__name__, OSError.__name__)
    return [f"{whose}: not injected: {kind}" for kind in failures if not kind.endswith(known) and kind != "others"]


def _finds_a_fault(engine: CountingEngine, rng: np.random.Generator) -> bool | None:
    """Plant a fault in what the next forward reads: whether it is found. None where nothing is read any more."""
    struck: list[bool] = []

    def strike(batch: Any) -> None:
        if struck:
            return
        for group in engine.groups:
            for request in batch.requests:
                if group.config.kind != "full":
                    continue
                buffers, table = engine.pools[group.name].buffers, batch.tables[group.name][request.row]
                # A slot without a record is one that is about to be taken in anew, as it is.
                slots = [
                    int(s) for s in table[: request.prefix_len] if all(bool(records[s].any()) for records in buffers)
                ]
                if slots:
                    # Both, where HEAD and TAIL have records of their own: the forward may fail before its TAIL.
                    for records in buffers:
                        records[slots[-1], 0] ^= 1
                    struck.append(True)
                    return

    engine.before_forward = strike
    before = engine.manager.summary().violations
    for _ in range(40):
        engine.act(any_action(rng, longest=engine.config.max_len))
        if struck:
            break
    engine.manager.flush()
    return engine.manager.summary().violations > before if struck else None


def _serve(task: Task, tally: Tally) -> None:
    """Let transformers live: the answers must be those without a canary."""
    model = batching.model_of(task.model, task.device)
    rng = np.random.default_rng([task.number, 5])
    waves = batching.waves(rng, count=3)
    wanted = [_answers(model, wave, task) for wave in waves]
    faults = Faults(np.random.default_rng([task.number, 6]), rate=float(rng.choice(RATES)))
    canary = install(model, config=_canary(rng, task, 0), identity=faults.failing("identity", lambda state: None))
    try:
        for number, wave in enumerate(waves):
            with faults.installed():
                answers = _answers(model, wave, task)
            if answers != wanted[number]:
                count = sum(a != b for a, b in zip(answers, wanted[number], strict=True))
                tally.lost.append(f"{_name(task)}: other answers to {count} of {len(wave)} requests")
            tally.steps += canary.summary().steps
    finally:
        canary.uninstall()
    canary.flush()
    summary = canary.summary()
    tally.injected += faults.injected
    tally.lives += 1
    tally.skipped += summary.skipped
    tally.unverified += summary.unverified
    tally.false_alarms += summary.violations
    tally.wrong += _strange(_name(task), summary.failures)
    tally.wrong += [f"{_name(task)}: {r.sentence}" for r in canary.reports[:2]]


def _answers(model: Any, prompts: list[list[int]], task: Task) -> list[Any]:
    """Return what the engine answers to prompts, greedily: the tokens, or the error."""
    rng = np.random.default_rng([task.number, 8])
    options = batching.options(task.model, rng, Counter())
    # What compiles may end the process in some versions of PyTorch, canary or not.
    options.pop("varlen_compile_config", None)
    outputs = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=16),
        continuous_batching_config=batching_config(**options),
        progress_bar=False,
    )
    # By name: request ids count on from one call to the next.
    return [(list(o.generated_tokens), o.error) for _, o in sorted(outputs.items(), key=lambda item: _number(item[0]))]


def _number(request_id: str) -> int:
    return int(request_id.rpartition("_")[2])


def _name(task: Task) -> str:
    return f"{task.model or 'model engines'} {task.number}"


@click.command()
@click.option("--minutes", type=click.FloatRange(min=0.05), default=10.0, show_default=True, help="How long to go on.")
@seed_option("The first task's number; others count on.", default=1)
@jobs_option("Parallel processes.", default=2)
@click.option(
    "--transformers",
    "share",
    type=click.FloatRange(0, 1),
    default=0.3,
    show_default=True,
    help="Share of the tasks that let transformers live, the others model engines.",
)
@device_option("Where.")
@json_option("Write what came of it here.")
def main(minutes: float, seed: int, jobs: int, share: float, device: str, json_path: Path | None) -> None:
    """Let the canary itself fail at random, and see that the engine never notices.

    Launches, copies, allocations, files, threads and callbacks of the canary's raise, before or after they have done
    their work, in model engines and in transformers' continuous batching, log mode. No request may be lost, nothing
    may hang, answers must be those without a canary, nothing may be reported; and a fault planted in the KV
    afterwards must be found.

    Exit codes: 0 the engines noticed nothing, 1 they did, 2 misuse.
    """
    console, tally, began = Console(), Tally(), time.monotonic()
    # Of the code that runs, whatever the checkout is at the end.
    measured = facts(device, kind="chaos")
    end = began + 60 * minutes
    shown = {"transient": False, "disable": not console.is_terminal}
    with (
        tempfile.TemporaryDirectory(prefix="kv-canary-chaos-") as folder,
        processes(jobs) as pool,
        progress_bar(console, "what bar elapsed left", **shown) as progress,
    ):
        bar = progress.add_task("chaos", total=60 * minutes)

        def tasks() -> Iterator[Task]:
            for number in count(seed):
                if time.monotonic() > end:
                    return
                model = ""
                if np.random.default_rng([number, 9]).random() < share:
                    model = batching.MODELS[number % len(batching.MODELS)]
                yield Task(number=number, model=model, folder=folder, device=device)

        def take(result: Tally) -> bool:
            tally.add(result)
            progress.update(bar, completed=min(time.monotonic() - began, 60 * minutes))
            # What is under way then is not waited for longer than it takes.
            return time.monotonic() > end

        run_tasks(run, tasks(), pool=pool, ahead=jobs + 1, take=take)
    report = {
        "what": "faults injected into the canary itself, in log mode",
        "minutes": round((time.monotonic() - began) / 60, 1),
        "seed": seed,
        **{k: v for k, v in asdict(tally).items() if k != "injected"},
        "injected": sum(tally.injected.values()),
        "injected_by_place": dict(sorted(tally.injected.items())),
    }
    if json_path is not None:
        json_path.write_text(json.dumps({**measured, **report}, indent=1) + "\n")
    console.print_json(json.dumps(report))
    raise SystemExit(1 if tally.failed else 0)


if __name__ == "__main__":
    main()
