"""`kv-canary bench engine`: what a canary costs an engine that is fast, beside SGLang's own and beside none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from kv_canary.commands.paths import OUT_FILE

_MODELS, _MODES = (
    ("8b", "1b", "tiny"),
    ("none", "ours", "ours_sampled", "ours_writes", "ours_full", "sgl", "sgl_partial", "sgl_all"),
)


def _batches(_ctx: click.Context, _parameter: click.Parameter, text: str) -> tuple[tuple[int, ...], ...]:
    try:
        return tuple(tuple(map(int, part.split("x"))) for part in text.split(",") if part)
    except ValueError:
        raise click.BadParameter(f"must be numbers as in 256x1024,64x2048, got {text!r}") from None


def _names(known: tuple[str, ...]) -> Callable[[click.Context, click.Parameter, str], tuple[str, ...]]:
    def names(_ctx: click.Context, _parameter: click.Parameter, text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        for name in chosen:
            if name not in known:
                raise click.BadParameter(f"must be of {', '.join(known)}, got {name!r}")
        return chosen

    return names


@click.command()
@click.option("--models", default="1b,8b", show_default=True, callback=_names(_MODELS), help="Sizes of a Llama.")
@click.option(
    "--modes",
    default="none,ours,sgl",
    show_default=True,
    callback=_names(_MODES),
    help="Canaries: none, ours, ours_sampled, ours_writes, ours_full, sgl (SGLang's own), sgl_partial, sgl_all.",
)
@click.option(
    "--decode", default="256x1024,64x2048", show_default=True, callback=_batches, help="Requests x context, by commas."
)
@click.option("--prefill", default="16x4096", show_default=True, callback=_batches, help="Likewise.")
@click.option(
    "--churn",
    default="",
    callback=_batches,
    help="Requests x context x tokens of each x decode steps, as 256x1024x500x400: one ends and another comes all the "
    "time.",
)
@click.option(
    "--tiers",
    default="",
    callback=_batches,
    help="Requests at a time x documents x context, as 16x64x4096, by commas, and nothing else: a service whose "
    "documents are twice what its pool holds, the others in host memory. Answers are of 16 tokens, so that requests "
    "come and end together; with x128 behind it, of 16 to 128, and each request ends when it does.",
)
@click.option("--new", type=click.IntRange(32), default=176, show_default=True, help="Tokens that a request generates.")
@click.option("--rounds", type=click.IntRange(1), default=6, show_default=True, help="Turns of everything timed.")
@click.option(
    "--starts",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Times that all schedulers are started, for so many rounds each: see ratio.",
)
@click.option(
    "--seconds",
    type=float,
    default=400.0,
    show_default=True,
    help="No round of a model begins after that; batches share it evenly.",
)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True, help="Where.")
@click.option("--unfrozen", is_flag=True, help="Leave Python's garbage collector as SGLang's offline engine has it.")
@click.option("--private", is_flag=True, help="Weights and KV for each scheduler, instead of one copy for all.")
@click.option("--json", "json_path", type=OUT_FILE, help="Write the result here.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Logs. [default: a temporary folder]")
@click.option("--commit", help="The commit measured, for the JSON. [default: what git says]")
def engine(
    models: tuple[str, ...],
    modes: tuple[str, ...],
    decode: tuple[tuple[int, int], ...],
    prefill: tuple[tuple[int, int], ...],
    churn: tuple[tuple[int, int, int, int], ...],
    tiers: tuple[tuple[int, ...], ...],
    new: int,
    rounds: int,
    starts: int,
    seconds: float,
    device: str,
    unfrozen: bool,
    private: bool,
    json_path: Path | None,
    out: Path | None,
    commit: str | None,
) -> None:
    """Measure what a canary costs a fast engine: SGLang's own scheduler, loop, radix cache and CUDA graphs.

    Each mode is a scheduler in a process of its own. They take turns on one GPU, so that each round of one stands
    beside the same round of `none`. Weights are made up; prompts, slots and tokens are the same in all modes, and it is
    checked that they are. SGLang's compiled kernels need not be there: norms, rope and the store of K and V are those
    that it compiles while it runs, with nvcc, and attention is Triton's. All schedulers run on the same four cores, and
    no other measurement does.

    \b
    How to read it:
      ratio       tokens per second against none of the same round: the median,
                  and the range. Where a process's memory lies changes what the
                  engine's own kernels take by a percent: less is told apart by
                  several --starts alone
      best        the fastest round against the fastest of none: where the host is
                  the bound, and its cores are shared with others, that says more
                  than the median
      host us     what the canary takes of the scheduler's thread: of a decode
                  step of requests that go on, of a prefill's forward; in a churn
                  of a step with what comes and ends at it
      stream us   what its launches take up of the forwards' stream, a decode step
      device ops  kernels, copies and fills that a step has more than without; the
                  JSON names them
      longest gc  the longest pause of Python's garbage collector in any round

    On a CPU it only checks itself: --device cpu --models tiny --decode 4x32 --prefill 2x96 --new 40 --rounds 1.

    Exit codes: 0 all is well, 1 a mode failed, or its tokens, slots or KV were not those of none; 2 misuse.
    """
    from kv_canary.bench.serving import cores, results, run
    from kv_canary.bench.serving.modes import LEAST_ANSWER
    from kv_canary.commands.facts import facts

    if tiers:
        decode, prefill, churn = (), (), ()
    for name, given, parts in (
        ("--decode", decode, (2,)),
        ("--prefill", prefill, (2,)),
        ("--churn", churn, (4,)),
        ("--tiers", tiers, (3, 4)),
    ):
        if any(len(batch) not in parts for batch in given):
            expected = " or ".join(map(str, parts))
            raise click.UsageError(f"{name}: must be {expected} numbers with x between them")
    if len(churn) > 1:
        raise click.UsageError("--churn: must be one")
    if len({documents * context for _, documents, context, *_ in tiers}) > 1:
        raise click.UsageError("--tiers: documents must be of as many tokens in all of them: they share a pool")
    if (least := min((batch[3] for batch in tiers if len(batch) == 4), default=LEAST_ANSWER)) < LEAST_ANSWER:
        raise click.UsageError(f"--tiers: answers must be of up to {LEAST_ANSWER} tokens or more, got {least}")
    if "none" not in modes:
        raise click.UsageError("--modes: must have none among them, which the others are held against")
    settings = run.Settings(
        models=models,
        modes=modes,
        decode=decode,
        prefill=prefill,
        churn=churn[0] if churn else None,
        tiers=tiers,
        new=new,
        rounds=rounds,
        starts=starts,
        seconds=seconds,
        device=device,
        frozen=not unfrozen,
        shared=not private,
        out=out or run.new_folder(),
    )
    kind = "tiers_cost" if tiers else "engine_cost"
    file = results.ResultFile(json_path, lambda: facts(device, commit=commit, kind=kind))
    try:
        rows, failed = run.measure(settings, say=lambda line: click.echo(line, err=True), keep=file.keep)
    except cores.NoneLeftError as error:
        raise click.UsageError(str(error)) from None
    results.show(rows)
    file.write(rows, failed)
    if any(failed.values()) or any(row.checks for row in rows):
        click.echo(f"kv-canary: bench: not all is well; logs are in {settings.out}", err=True)
        raise SystemExit(1)
