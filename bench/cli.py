"""`kv-canary bench`: how fast the ops are, beside what memory can do and beside a peer; and what an engine pays."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kv_canary.commands.group import LazyGroup
from kv_canary.commands.paths import OUT_FILE
from kv_canary.commands.progress import progress_bar
from kv_canary.extras import install_command

if TYPE_CHECKING:
    from kv_canary.bench.speed.cases import Case
    from kv_canary.bench.speed.run import Settings

TRACES = "KV_CANARY_TRACES"
FOLDER = click.Path(file_okay=False, path_type=Path)


_ELSEWHERE = {
    "engine": "kv_canary.bench.serving.cli:engine",
    "vllm": "kv_canary.bench.vllm.cli:vllm",
    "adapters": "kv_canary.bench.adapters:adapters",
}


class _Bench(LazyGroup):
    """A group whose first command is meant where none is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in {*self.list_commands(ctx), *ctx.help_option_names}:
            args = ["ops", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Bench, elsewhere=_ELSEWHERE)
def bench() -> None:
    """Time the ops, or what the canary costs an engine that serves.

    Without a command: `ops`, whose options and cases may follow at once.

    \b
    Examples:
      kv-canary bench --quick
      kv-canary bench --peer sglang --json h200_peer.json
      kv-canary bench ops --help
      kv-canary bench engine --models 1b --modes none,ours,sgl
      kv-canary bench vllm --models 1b
      kv-canary bench adapters --engine vllm
      kv-canary bench seals --json h200_seals.json
    """


@bench.command()
@click.argument("cases", nargs=-1)
@click.option("--list", "listing", is_flag=True, help="List the cases and their groups, and measure nothing.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where to run. [default: cuda where there is one]")
@click.option(
    "--backend", type=click.Choice(["reference", "triton", "auto"]), default="auto", help="Whose ops. [default: auto]"
)
@click.option("--peer", type=click.Choice(["sglang"]), help="Run this peer's kernels by turns with ours.")
@click.option(
    "--graph/--eager", default=True, help="Time CUDA-graph replays, or launches one by one. [default: graph on a GPU]"
)
@click.option("--rounds", type=click.IntRange(1), help="Turns of everything that is timed. [default: 7, cut down: 2]")
@click.option("--replays", type=click.IntRange(1), help="Launches in a turn, at most. [default: 15, cut down: 2]")
@click.option(
    "--quick/--whole", default=None, help="Shapes cut down to a CPU's size, or whole. [default: quick on a CPU]"
)
@click.option(
    "--memory", type=click.FloatRange(min=0, min_open=True), default=60.0, help="GB of K and V. [default: 60]"
)
@click.option(
    "--traces", type=FOLDER, envvar=TRACES, help=f"A folder of Mooncake .jsonl and Azure .csv traces. [env: {TRACES}]"
)
@click.option(
    "--from",
    "sources",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Take this JSON and measure nothing; may be repeated: each adds the cases that those before it lack.",
)
@click.option(
    "--json",
    "json_path",
    # In a folder that is made with it.
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    help="Write the result here, after every case; -: to stdout, in place of the tables.",
)
@click.option("--plots", type=FOLDER, help="Draw the result into this folder, as SVG.")
@click.option("--table", is_flag=True, help="Print one table in Markdown, in place of the tables for a terminal.")
@click.option(
    "--page",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Put table and pictures between the marks of this page, a README say; pictures as --plots has them.",
)
@click.option("--commit", help="The commit measured, for the JSON. [default: what git says]")
def ops(
    cases: tuple[str, ...],
    listing: bool,
    device: str | None,
    backend: str,
    peer: str | None,
    graph: bool,
    rounds: int | None,
    replays: int | None,
    quick: bool | None,
    memory: float,
    traces: Path | None,
    sources: tuple[Path, ...],
    json_path: Path | None,
    plots: Path | None,
    table: bool,
    page: Path | None,
    commit: str | None,
) -> None:
    """Time the ops on real shapes; everything is checked against the reference first.

    CASES are names, patterns or groups of `--list`; without any, all are measured. A step is what the runtime
    launches around a forward: HEAD finds every cached position's slot and checks its record and its K and V bytes,
    `write` records the new tokens, TAIL checks the records again. `plan` and `verify` are the same by the explicit way.

    \b
    How to read it:
      ms        median of the rounds' medians; p10-p90: of all launches
      peer      its time; ratio: over ours; cold: the ratio where nothing is in
                the L2 cache
      launches  kernels, copies and fills that the device is given: ours/the
                peer's
      MB        by definition: records, table entries, covered bytes, inputs,
                outputs
      of copy   those bytes over the time, as a share of the copy bandwidth of the
                same run
      sectors   the same for the 32-byte sectors that hold them
      gather    ms of reading HEAD's sectors, and nothing else
      eager     ms when launched one by one, from the host
      L2        yes: what is read fits in the cache, and stays there between
                replays

    The peer (SGLang's canary kernels) works on the same requests, slots and rows, by turns with ours: a plan, then
    verify and write at HEAD K, HEAD V, TAIL K and TAIL V, bytes at TAIL. Ratio is its time over ours. It is taken from
    PYTHONPATH, and compiles itself: that takes CUDA_HOME, and ninja on PATH.

    Exit codes: 0 all is well, 1 a result was wrong, 2 misuse.

    \b
    Examples:
      kv-canary bench --quick
      kv-canary bench "decode*" stride --device cuda
      kv-canary bench --peer sglang --json h200_peer.json --plots plots
      kv-canary bench --from h200_peer.json --table
      kv-canary bench --from some.json --from the_rest.json --json all.json
    """
    from rich.console import Console

    from kv_canary.bench.speed import tables

    if table and str(json_path) == "-":
        raise click.UsageError("--json - and --table both go to stdout: leave one out")
    if sources:
        if cases or listing:
            raise click.UsageError("--from takes a result as it is: leave CASES and --list out")
        result = _together(sources)
    else:
        device = device or _default_device()
        cut_down = device == "cpu" if quick is None else quick
        if device == "cpu" and backend == "triton":
            # Triton decides when a kernel is decorated: this comes before any is imported.
            os.environ["TRITON_INTERPRET"] = "1"
        chosen = _chosen(cases, traces)
        if listing:
            _list(chosen, traces)
            return
        from kv_canary.bench.speed.run import Settings

        settings = Settings(
            device=device,
            backend=None if backend == "auto" else backend,
            peer=peer,
            graph=graph,
            rounds=rounds or (2 if cut_down else 7),
            replays=replays or (2 if cut_down else 15),
            shrink=cut_down,
            memory=int(memory * 1e9),
            commit=commit,
        )
        result = _run(chosen, settings, json_path)
    if json_path is not None:
        _write_json(result, json_path)
    if plots is not None:
        _draw(result, plots)
    if page is not None:
        _fill(result, page, plots)
    if table:
        click.echo(tables.markdown(result), nl=False)
    elif str(json_path) != "-":
        # What is not a terminal has no width of its own.
        console = Console()
        tables.show(result, console if console.is_terminal else Console(width=tables.PAGE_WIDTH))
    raise SystemExit(1 if result["failed"] else 0)


@bench.command()
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where to run. [default: cuda where there is one]")
@click.option(
    "--share", type=click.FloatRange(0, 1), default=0.005, show_default=True, help="As scrub_share may be set."
)
@click.option("--json", "json_path", type=OUT_FILE, help="Write the result here.")
@click.option("--commit", help="The commit measured, for the JSON. [default: what git says]")
def seals(device: str | None, share: float, json_path: Path | None, commit: str | None) -> None:
    """Time the two ops of seals over every byte of K and V, beside a copy, and what a scrub and a verdict take.

    \b
    How to read it:
      us        of a launch from a CUDA graph, with nothing of it in the L2 cache
      of copy   bytes of K and V over the time, as a share of what a copy moves,
                which reads and writes
      range     the whole pool in order, as a scrub goes; random: a list of slots

    On a CPU it only checks itself.

    Exit codes: 0 all is well, 1 a changed byte was not found, 2 misuse.
    """
    import torch

    from kv_canary.bench import seals as benchmark
    from kv_canary.commands.facts import facts

    where = torch.device(device or _default_device())
    try:
        rows, found = benchmark.measure(
            device=where, backend=None, share=share, say=lambda line: click.echo(line, err=True)
        )
    except RuntimeError as error:
        click.echo(str(error), err=True)
        raise SystemExit(1) from error
    benchmark.show(rows, found)
    if json_path is not None:
        told = benchmark.result(rows, found, facts(where, commit=commit, kind="seal_cost"))
        json_path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _together(sources: tuple[Path, ...]) -> dict[str, Any]:
    result, *others = (json.loads(source.read_text(encoding="utf-8")) for source in sources)
    for source, other in zip(sources[1:], others, strict=True):
        for name in ("device", "versions", "peer", "mode", "shapes"):
            if other[name] != result[name]:
                raise click.UsageError(f"--from takes results of one {name}: {source} has {other[name]}")
        known = {row["case"] for row in result["cases"]}
        of = {name: other[name] for name in ("commit", "date", "sources") if name in other}
        result["cases"] += [{**of, **row} for row in other["cases"] if row["case"] not in known]
        result["failed"] += other["failed"]
    return dict(result)


def _chosen(patterns: tuple[str, ...], traces: Path | None) -> list[Case]:
    from kv_canary.bench.speed.cases import CASES, choose
    from kv_canary.bench.speed.traces import trace_cases

    try:
        recorded = [] if traces is None else trace_cases(traces)
        return choose(patterns, [*CASES, *recorded])
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _list(cases: list[Case], traces: Path | None) -> None:
    for case in cases:
        click.echo(f"{case.group:14} {case.name}")
    if traces is None:
        click.echo(f"{'traces':14} (left out: --traces FOLDER, or {TRACES})")


def _run(cases: list[Case], settings: Settings, json_path: Path | None) -> dict[str, Any]:
    from rich.console import Console

    try:
        from kv_canary.bench.speed.run import prepare, run
    except ModuleNotFoundError as error:
        raise click.UsageError(f"bench needs triton: {install_command('triton')} ({error})") from error
    try:
        ready = prepare(settings)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    with progress_bar(Console(stderr=True), "what bar count elapsed", transient=False) as progress:
        task = progress.add_task("checking and timing", total=len(cases))

        def after_case(name: str, result: dict[str, Any]) -> None:
            progress.update(task, advance=1, description=name)
            if json_path is not None and str(json_path) != "-":
                _write_json(result, json_path)

        return run(cases, ready, after_case=after_case)


def _write_json(result: dict[str, Any], path: Path) -> None:
    text = json.dumps(result, indent=1) + "\n"
    if str(path) == "-":
        click.echo(text, nl=False)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _draw(result: dict[str, Any], folder: Path) -> None:
    from kv_canary.bench.speed.plots import draw

    try:
        made = draw(result, folder)
    except ModuleNotFoundError as error:
        raise click.UsageError(f"--plots needs matplotlib: {install_command('bench')} ({error})") from error
    for path in made:
        click.echo(f"wrote {path}", err=True)


def _fill(result: dict[str, Any], page: Path, plots: Path | None) -> None:
    from kv_canary.bench.speed.plots import CAPTIONS
    from kv_canary.bench.speed.tables import place

    drawn = {} if plots is None else {name: text for name, text in CAPTIONS.items() if (plots / name).is_file()}
    addresses = {os.path.relpath(plots / name, page.parent): text for name, text in drawn.items()} if plots else {}
    try:
        page.write_text(place(page, result, addresses), encoding="utf-8")
    except ValueError as error:
        raise click.UsageError(str(error)) from error
