"""`kv-canary bench vllm`: what a canary costs vLLM on a GPU, in its own engine loop, beside none, by turns."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import click

from kv_canary.bench.serving.cli import engine as bench_engine

KIND = "vllm_cost"
_MODES = ("none", "ours", "ours_sampled", "ours_writes", "ours_full")
_RUNNERS = ("V1", "V2")


def _modes(_ctx: click.Context, _parameter: click.Parameter, text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    for name in chosen:
        if name not in _MODES:
            raise click.BadParameter(f"must be of {', '.join(_MODES)}, got {name!r}")
    return chosen


def _shared(*names: str) -> list[click.Parameter]:
    """Return these options as `kv-canary bench engine` has them."""
    return [parameter for parameter in bench_engine.params if parameter.name in names]


@click.command()
@click.option(
    "--modes", default="none,ours", show_default=True, callback=_modes, help=f"Canaries: {', '.join(_MODES)}."
)
@click.option("--runner", type=click.Choice(_RUNNERS), default="V1", show_default=True, help="vLLM's model runner.")
def vllm(
    modes: tuple[str, ...],
    runner: str,
    decode: tuple[tuple[int, ...], ...],
    prefill: tuple[tuple[int, ...], ...],
    churn: tuple[tuple[int, ...], ...],
    unfrozen: bool,
    json_path: Path | None,
    out: Path | None,
    commit: str | None,
    **given: Any,
) -> None:
    """Measure what a canary costs vLLM: its own engine loop, prefix cache, asynchronous scheduling and CUDA graphs.

    Each mode is an engine in a process of its own, with made-up weights. They take turns on one GPU, so that each round
    of one stands beside the same round of `none`; that tokens and KV are the same in all modes is checked. vLLM's
    compiled kernels need not be there: attention and the store of K and V are its own in Triton, the rest is PyTorch in
    CUDA graphs, which is slower than what vLLM compiles, so that a canary's share of a step is larger in service.

    How to read it, and exit codes: `kv-canary bench engine --help`. What a stream is taken up with is not measured.

    On a CPU it only checks itself: --device cpu --models tiny --decode 4x32 --prefill 2x96 --new 40 --rounds 1.

    \b
    Examples:
      kv-canary bench vllm --models 1b --modes none,ours,ours_sampled
      kv-canary bench vllm --runner V2 --json h200_vllm_cost.json
    """
    from kv_canary.bench.serving import cores, results, run
    from kv_canary.bench.vllm.engines import Engines
    from kv_canary.commands.facts import facts

    for name, batches, parts in (("--decode", decode, 2), ("--prefill", prefill, 2), ("--churn", churn, 4)):
        if any(len(batch) != parts for batch in batches):
            raise click.UsageError(f"{name}: must be {parts} numbers with x between them")
    if len(churn) > 1 or "none" not in modes:
        raise click.UsageError("--churn must be one, and --modes must have none among them")
    settings = run.Settings(
        modes=modes,
        decode=[(requests, context) for requests, context in decode],
        prefill=[(requests, context) for requests, context in prefill],
        churn=next(((r, c, n, s) for r, c, n, s in churn), None),
        tiers=(),
        frozen=not unfrozen,
        shared=False,
        out=out or run.new_folder(),
        **given,
    )
    file = results.ResultFile(json_path, lambda: {**facts(settings.device, commit=commit, kind=KIND), "runner": runner})
    try:
        rows, failed = run.measure(
            settings,
            say=lambda line: click.echo(line, err=True),
            keep=file.keep,
            make=functools.partial(Engines, runner=runner),
        )
    except cores.NoneLeftError as error:
        raise click.UsageError(str(error)) from None
    results.show(rows)
    file.write(rows, failed)
    if any(failed.values()) or any(row.checks for row in rows):
        click.echo(f"kv-canary: bench: not all is well; logs are in {settings.out}", err=True)
        raise SystemExit(1)


_SHARED = "models decode prefill churn new rounds starts seconds device unfrozen json_path out commit"
vllm.params += _shared(*_SHARED.split())
