"""`kv-canary difftest`: fuzz kernels against their references.

Exit codes: 0 clean; 1 something found; 2 misuse, or a campaign in which some target had no case.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kv_canary.cases.imports import check_imports, replay_line
from kv_canary.commands.group import LazyGroup
from kv_canary.commands.paths import OUT_FILE, write_early
from kv_canary.commands.progress import progress_bar
from kv_canary.difftest.options import (
    FILE,
    commit_option,
    device_option,
    jobs_option,
    json_option,
    seed_option,
)
from kv_canary.errors import must_be
from kv_canary.extras import install_command

if TYPE_CHECKING:
    from kv_canary.cases.casefile import CaseFile
    from kv_canary.difftest.campaign import Campaign, CampaignResult

# Seconds after which what a campaign has done so far is written to its file again.
_KEEP_EVERY_S = 30.0

triton_device_option = device_option("Where Triton runs; cpu: in its interpreter.")
imports_option = click.option(
    "--import", "imports", multiple=True, metavar="FILE|MODULE", help="Import this first: it registers ops of its own."
)


def _check_plant(ctx: click.Context, parameter: click.Parameter, name: str | None) -> str | None:
    if name is not None and importlib.util.find_spec("kv_canary.difftest.mutation") is None:
        raise click.UsageError("--plant needs a checkout of kv-canary: an installed package does not hold the bugs")
    return name


plant_option = click.option(
    "--plant",
    metavar="NAME",
    callback=_check_plant,
    help="Run with a planted bug; see `kv-canary difftest planted`. Needs a checkout.",
)
case_imports_option = click.option(
    "--import",
    "imports",
    multiple=True,
    metavar="FILE|MODULE",
    help="Import this first, which runs its code. A case that names code is refused unless all of it is named here.",
)
max_gib_option = click.option(
    "--max-gib",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="Refuse a case whose tensors take more memory than that, in GiB.",
)


class _Tools(LazyGroup):
    """Commands that need more than an engine does; who asks one of them for help needs no more."""

    def invoke(self, ctx: click.Context) -> Any:
        asks = {"-h", "--help"} & {*ctx.args, *ctx._protected_args}
        if not asks and importlib.util.find_spec("hypothesis") is None:
            raise click.UsageError(f"difftest needs hypothesis: {install_command('difftest')}")
        return super().invoke(ctx)


@click.group(
    cls=_Tools,
    elsewhere={
        "mutants": "kv_canary.difftest.mutation.cli:mutants",
        "planted": "kv_canary.difftest.mutation.cli:planted",
    },
)
def difftest() -> None:
    """Prove that kernels equal their references, byte for byte.

    Every registered op is put through the same checks over generated calls: equal bytes of every output, guard zones
    around every tensor, inputs unchanged, the same result again, CUDA-graph replay equal to eager (on a GPU), misuse
    refused, a saved call equal to itself once loaded. What fails is shrunk and saved as ONE file, and the line that
    replays it is printed.

    \b
    Start with:
      kv-canary difftest run
      kv-canary difftest fuzz --minutes 5
    """


def campaign_options(command: Any) -> Any:
    """The options that `run` and `fuzz` share."""
    for option in reversed(
        [
            click.option("--op", "ops", multiple=True, metavar="NAME", help="Only this op; may be repeated."),
            triton_device_option,
            jobs_option("Parallel jobs.", default=None),
            seed_option("Of everything that is drawn."),
            click.option(
                "--database",
                "databases",
                multiple=True,
                metavar="WHERE",
                help="Hypothesis database to share examples through: a folder, dir:PATH, redis://HOST[:PORT][/DB], "
                "github:OWNER/REPO, each with ro: in front for reading only; may be repeated.",
            ),
            click.option(
                "--findings",
                type=click.Path(file_okay=False, path_type=Path),
                default=Path("findings"),
                show_default=True,
                help="Folder for what is found.",
            ),
            click.option("--max-findings", type=click.IntRange(0), default=0, help="Stop after that many; 0: never."),
            click.option(
                "--shrink",
                "shrink_s",
                type=click.FloatRange(min=0),
                default=60.0,
                show_default=True,
                help="Seconds to make a finding smaller.",
            ),
            imports_option,
            plant_option,
            click.option("--coverage", is_flag=True, help="Print every pair of features with its count of cases."),
            json_option("Write the facts here, for a machine."),
            commit_option(default="unknown"),
        ]
    ):
        command = option(command)
    return command


@difftest.command()
@click.option("--examples", type=click.IntRange(1), default=200, show_default=True, help="Cases of each op.")
@campaign_options
def run(examples: int, **options: Any) -> None:
    """Check every op (or some) over a fixed number of generated calls.

    The same seed draws the same calls. Use it before a commit; use `fuzz` to look further.

    On a CPU Triton is interpreted: the default, over all ops, took seven minutes on two cores that were busy with other
    work as well. Time grows with --examples, and falls with --op; progress is told on the way.

    \b
    Examples:
      kv-canary difftest run
      kv-canary difftest run --op verify --examples 1000
      kv-canary difftest run --device cuda
      kv-canary difftest run --import examples/your_own_kernel.py \\
        --op paged_gather
    """
    _campaign(examples=examples, minutes=None, **options)


@difftest.command()
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=5.0, show_default=True)
@campaign_options
def fuzz(minutes: float, **options: Any) -> None:
    """Look for a difference until the time is up, in parallel jobs.

    Jobs go round all ops, and round histories of a whole engine. Findings are shrunk and saved at once, so Ctrl-C
    loses nothing. A kernel that crashes or hangs its process is a finding as well.

    Exit codes: 0 nothing found, 1 something found, 2 misuse, or inconclusive: some target had no case in that time.

    \b
    Examples:
      kv-canary difftest fuzz --minutes 30 --jobs 8 --seed 7
      kv-canary difftest fuzz --device cuda --minutes 8
      kv-canary difftest fuzz --database .hypothesis/examples \\
        --database ro:redis://fuzz-db:6379/0
    """
    _campaign(examples=None, minutes=minutes, **options)


@difftest.command()
@click.argument("file", type=FILE)
@case_imports_option
@max_gib_option
@triton_device_option
@plant_option
@click.option("--most", type=click.IntRange(1), default=20, show_default=True, help="Differences to show.")
@click.option("--trace/--no-trace", default=True, help="Find which program wrote what differs, in the interpreter.")
@click.option("--svg", type=OUT_FILE, help="Save what is printed as a picture too.")
@click.option("--json", "as_json", is_flag=True, help="Print for a machine.")
def replay(
    file: Path,
    imports: tuple[str, ...],
    max_gib: float,
    device: str,
    plant: str | None,
    most: int,
    trace: bool,
    svg: Path | None,
    as_json: bool,
) -> None:
    """Run a saved case again, and say what differs: which record, which field, both values, which program.

    A case of your own op names the Python code that registers it. That code runs only if you name it too, with
    --import: the file may be a stranger's.

    Exit code 0 where it no longer fails, 1 where it does.

    \b
    Examples:
      kv-canary difftest replay \\
        findings/verify-triton-bytes_differ-counters.kvcase
      kv-canary difftest replay findings/paged_gather-triton-raised.kvcase \\
        --import examples/your_own_kernel.py
    """
    from rich.console import Console

    from kv_canary.difftest.console import save_picture, show_replay
    from kv_canary.difftest.replaying import replay_case

    case = _load(file, imports, max_gib)
    with _usage_errors():
        result = replay_case(case, imports=imports, device=device, plant=plant, most=most, trace=trace)
    if as_json:
        click.echo(json.dumps(result.as_dict(), indent=2))
    else:
        console = Console()
        show_replay(console, case, result)
        if svg is not None:
            save_picture(svg, case, result, width=console.width, title=f"kv-canary difftest replay {file.name}")
    raise SystemExit(1 if result.mismatch is not None else 0)


@difftest.command()
@click.argument("file", type=FILE)
@click.option("--output", "-o", type=OUT_FILE, help="Where the smaller case goes. [default: FILE.min.kvcase]")
@case_imports_option
@max_gib_option
@triton_device_option
@plant_option
@click.option("--max-tries", type=click.IntRange(1), default=5000, show_default=True, help="Stop after that many runs.")
def minimize(
    file: Path,
    output: Path | None,
    imports: tuple[str, ...],
    max_gib: float,
    device: str,
    plant: str | None,
    max_tries: int,
) -> None:
    """Make a saved case smaller while it still fails in the same way.

    Works on any failing call, also on one saved from production by the shadow backend: requests, entries and layers
    are taken away and contents zeroed for as long as the failure stays. Ctrl-C keeps the smallest so far. Code that the
    case names runs only if you name it too, with --import.

    \b
    Examples:
      kv-canary difftest minimize findings/big.kvcase -o small.kvcase
      kv-canary difftest minimize findings/big.kvcase --max-gib 8 --device cuda
    """
    from kv_canary.cases.casefile import SUFFIX, save
    from kv_canary.difftest.replaying import minimize_case

    case = _load(file, imports, max_gib)
    output = output or file.with_name(f"{file.stem}.min{SUFFIX}")
    with progress_bar(None, "spinner what elapsed", transient=False) as progress:
        task = progress.add_task(f"minimize {file.name}", total=None)

        def on_progress(tries: int, size: int) -> None:
            progress.update(task, description=f"minimize {file.name}: {tries} runs, {size} elements left")

        with _usage_errors():
            smaller = minimize_case(
                case, imports=imports, device=device, plant=plant, max_tries=max_tries, on_progress=on_progress
            )
    if smaller is None:
        click.echo(f"{file} does not fail here, so there is nothing to minimize")
        raise SystemExit(0)
    save(smaller, output)
    line = replay_line(output, imports=smaller.imports, device=device, plant=plant, max_gib=max_gib)
    click.echo(f"{smaller.says}\nreplay it with: {line}")
    raise SystemExit(1)


@difftest.group()
def corpus() -> None:
    """The calls that once failed, kept in the repository and replayed by every test run."""


@corpus.command("list")
@case_imports_option
@click.option("--json", "as_json", is_flag=True, help="Print for a machine.")
def list_corpus(imports: tuple[str, ...], as_json: bool) -> None:
    """List the corpus: what each call is of, and how it failed."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    from kv_canary.difftest.corpus import entries

    files = {path: _load(path, imports) for path in entries()}
    if as_json:
        click.echo(json.dumps([{"file": str(p), "op": f.op, "says": f.says} for p, f in files.items()], indent=2))
        return
    console = Console()
    for path, file in files.items():
        # What it says names the op.
        console.print(Text(path.stem, style="bold"))
        console.print(Padding(Text(file.says), (0, 0, 0, 2)))


@corpus.command("add")
@click.argument("file", type=FILE)
@click.option("--name", help="Name in the corpus. [default: the file's]")
@case_imports_option
@max_gib_option
def add_to_corpus(file: Path, name: str | None, imports: tuple[str, ...], max_gib: float) -> None:
    """Put a case into the corpus; minimize it first."""
    from kv_canary.difftest.corpus import add

    _load(file, imports, max_gib)
    with _usage_errors():
        click.echo(f"added {add(file, name=name, most_bytes=_bytes(max_gib))}")


@difftest.command("sanitize")
@click.option(
    "--tool", "tools", type=click.Choice(["memcheck", "initcheck", "racecheck"]), multiple=True, help="[default: all]"
)
@click.option("--examples", type=click.IntRange(1), default=200, show_default=True, help="Calls of each op at most.")
@click.option("--seconds", type=click.FloatRange(min=1), default=150.0, show_default=True, help="Of each tool.")
@plant_option
@seed_option("Of the calls.")
@json_option("Write the facts here, for a machine.")
@commit_option(default="unknown")
def sanitize_launches(
    tools: tuple[str, ...],
    examples: int,
    seconds: float,
    plant: str | None,
    seed: int,
    json_path: Path | None,
    commit: str,
) -> None:
    """Run Triton's launches under NVIDIA's compute-sanitizer, on a GPU.

    The generated calls, hostile ones among them, run natively, each tensor in an allocation of exactly its size.

    \b
    Example:
      kv-canary difftest sanitize --tool memcheck --seconds 300
    """
    from rich.console import Console
    from rich.table import Table

    from kv_canary.cases.casefile import versions
    from kv_canary.difftest.campaign import device_name
    from kv_canary.difftest.sanitize import TOOLS, find_sanitizer, sanitize
    from kv_canary.difftest.search import draw_cases
    from kv_canary.difftest.worker import prepare
    from kv_canary.specs import all_specs

    try:
        prepare("cuda")
        find_sanitizer()
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    drawn = {op: draw_cases(op, examples=examples, seed=seed) for op in all_specs()}
    console, table = Console(), Table("tool", "calls", "kernel launches", "errors", "seconds")
    from kv_canary.commands.evidence import digests

    facts = {"device": device_name("cuda"), "versions": versions(), "commit": commit, "seed": seed, "plant": plant}
    facts["sources"] = digests("sanitize")
    results = []
    for tool in tools or TOOLS:
        with console.status(f"{tool}: {seconds:.0f} s"):
            result = sanitize(tool, drawn, seconds=seconds, plant=plant)
        results.append(result)
        counts = str(sum(result.calls.values())), str(sum(result.launches.values()))
        table.add_row(tool, *counts, str(result.errors), f"{result.seconds:.0f}")
        if result.errors:
            console.print(result.output, highlight=False)
        if result.ended:
            console.print(f"{tool}: the launches ended early, {result.ended}", highlight=False)
        if result.too_large:
            console.print(f"{tool}: {result.too_large} calls left out, which span more memory than is free")
        if json_path is not None:
            # Tool by tool: what ends the command loses those that have ended.
            told = {**facts, "tools": [result.as_dict() for result in results]}
            json_path.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    console.print(table)
    raise SystemExit(0 if all(result.clean for result in results) else 1)


def _capability(_ctx: click.Context, _parameter: click.Parameter, text: str) -> tuple[int, int]:
    major, point, minor = text.partition(".")
    if not (point and major.isdigit() and minor.isdigit()):
        raise click.BadParameter(f"must be two numbers as in 9.0, got {text!r}")
    return int(major), int(minor)


@difftest.command("compile")
@click.option("--op", "ops", multiple=True, metavar="NAME", help="Only this op; may be repeated.")
@click.option("--capability", default="9.0", show_default=True, callback=_capability, help="Of the GPU.")
@click.option("--examples", type=click.IntRange(0), default=40, show_default=True, help="Calls of each op at most.")
@seed_option("Of the calls.")
@imports_option
@json_option("Write the kernels here, for a machine.")
def compile_kernels(
    ops: tuple[str, ...],
    capability: tuple[int, int],
    examples: int,
    seed: int,
    imports: tuple[str, ...],
    json_path: Path | None,
) -> None:
    """Compile what generated calls would launch on a GPU, which need not be there; nothing is launched.

    Triton's interpreter runs what its compiler refuses. The table has a line for each kernel: in how many ways it was
    compiled, what the widest of them takes, and how long all of them took.

    Exit codes: 0 all compiled, 1 the compiler refused one, 2 misuse.

    \b
    Examples:
      kv-canary difftest compile
      kv-canary difftest compile --op write --examples 200 --json kernels.json
      kv-canary difftest compile --import examples/your_own_kernel.py \\
        --op paged_gather
    """
    from rich.console import Console

    from kv_canary.difftest import compiling
    from kv_canary.difftest import console as shown
    from kv_canary.difftest.worker import import_all
    from kv_canary.specs import all_specs, get_spec

    console = Console()
    found: list[compiling.Kernel | compiling.Refusal] = []
    try:
        compiling.prepare()
        import_all(imports)
        specs = [get_spec(op) for op in ops or all_specs()]
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    with shown.step_progress(console, total=len(specs)) as at:
        for spec in specs:
            at(f"{spec.name}: {len(found)} compiled before")
            calls = compiling.calls_of(spec.name, examples=examples, seed=seed, capability=capability)
            found.extend(compiling.compile_calls(spec, calls, capability=capability))
    shown.show_compiled(console, found)
    if json_path is not None:
        json_path.write_text(json.dumps([x.as_dict() for x in found], indent=2) + "\n", encoding="utf-8")
    raise SystemExit(1 if any(isinstance(x, compiling.Refusal) for x in found) else 0)


def _campaign(
    *,
    ops: tuple[str, ...],
    coverage: bool,
    json_path: Path | None,
    commit: str,
    **options: Any,
) -> None:
    from rich.console import Console

    from kv_canary.difftest import console as shown
    from kv_canary.difftest.campaign import Campaign, run_campaign
    from kv_canary.difftest.ending import until_ended
    from kv_canary.difftest.worker import import_all, prepare

    try:
        prepare(options["device"])
        import_all(options["imports"])
        campaign = Campaign(targets=ops, **options)
        _refuse_without_triton(campaign.all_targets())
        console = Console()
        kept = None if json_path is None else _Kept(json_path, campaign, commit)
        with until_ended():
            with shown.live_progress(console, campaign) as show:

                def on_change(result: CampaignResult) -> None:
                    show(result)
                    if kept is not None:
                        kept.now_and_then(result)

                result = run_campaign(campaign, on_change=on_change)
            shown.show_campaign(console, campaign, result, _replay_lines(campaign, result), all_pairs=coverage)
            if kept is not None:
                kept.write(result)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    # So many cases were asked for, or every target.
    inconclusive = result.untried or (result.interrupted and campaign.minutes is None)
    raise SystemExit(1 if result.findings or result.errors else 2 if inconclusive else 0)


class _Kept:
    """The facts of a campaign in a file, which are there as they come: a run that is killed loses little of them.

    Args:
        path: of the file.
        campaign, commit: whose facts.
    """

    def __init__(self, path: Path, campaign: Campaign, commit: str) -> None:
        from kv_canary.commands.evidence import digests

        self._path, self._campaign, self._commit = path, campaign, commit
        # Of the sources that the jobs are about to read, whoever edits them meanwhile.
        self._sources = digests("fuzz")
        self._next = time.monotonic() + _KEEP_EVERY_S

    def now_and_then(self, result: CampaignResult) -> None:
        """Write what there is by now, as of a run that was interrupted, if it has not been written for a while."""
        if time.monotonic() >= self._next:
            write_early(self._path, self._text(dataclasses.replace(result, interrupted=True)))
            self._next = time.monotonic() + _KEEP_EVERY_S

    def write(self, result: CampaignResult) -> None:
        """Write all of it."""
        self._path.write_text(self._text(result), encoding="utf-8")

    def _text(self, result: CampaignResult) -> str:
        lines = _replay_lines(self._campaign, result)
        facts = _facts(self._campaign, result, lines, commit=self._commit, sources=self._sources)
        return json.dumps(facts, indent=2) + "\n"


def _replay_lines(campaign: Campaign, result: CampaignResult) -> dict[str, str]:
    """Return what replays each finding, by its file."""
    return {
        str(f.file): replay_line(f.file, imports=campaign.imports, device=campaign.device, plant=campaign.plant)
        for f in result.findings.values()
    }


def _refuse_without_triton(targets: Iterable[str]) -> None:
    """Refuse kv-canary's own ops where Triton is not installed; an op both of whose sides are PyTorch needs none.

    Raises:
        ValueError: naming them.
    """
    from kv_canary.backends import is_registered
    from kv_canary.difftest.worker import has_triton

    needing = [target for target in targets if not is_registered(target, "triton")]
    if needing and not has_triton():
        how = f"{install_command('triton')}; name your own ops by --op"
        expected = f"installed for {', '.join(needing)} ({how})"
        raise ValueError(must_be("difftest", "triton", expected, "none"))


def _facts(
    campaign: Campaign, result: CampaignResult, lines: Mapping[str, str], *, commit: str, sources: Mapping[str, str]
) -> dict[str, Any]:
    from kv_canary.cases.casefile import versions
    from kv_canary.difftest.campaign import device_name
    from kv_canary.difftest.coverage import feasible_pairs

    feasible = feasible_pairs()
    return {
        "device": device_name(campaign.device),
        "versions": versions(),
        "commit": commit,
        "sources": sources,
        "seed": campaign.seed,
        "jobs": campaign.jobs,
        "seconds": round(result.seconds, 1),
        "interrupted": result.interrupted,
        "cases": result.cases,
        "cases_per_s": round(result.cases / max(result.seconds, 1e-9), 2),
        "targets": {
            target: {"cases": s.cases, "job_seconds": round(s.seconds, 1)} for target, s in result.stats.items()
        },
        "executor_restarts": result.restarts,
        "coverage": {
            "feasible_pairs": len(feasible),
            "covered_pairs": len(feasible & set(result.coverage.pairs)),
            "never_met": [" ".join(pair) for pair in result.coverage.gaps()],
            "cases_of_feature": dict(sorted(result.coverage.features.items())),
        },
        "findings": [
            {
                "op": f.op,
                "says": f.says,
                "file": str(f.file),
                "replay": lines[str(f.file)],
                "found_after_s": round(f.found_after_s, 2),
                "cases_before": f.cases_before,
            }
            for f in result.findings.values()
        ],
        "errors": result.errors,
    }


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Say what is wrong with what was given, as misuse."""
    try:
        yield
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _load(path: Path, imports: tuple[str, ...], max_gib: float = 1.0) -> CaseFile:
    """Load a case file, with what registers its op, if the user named that too; a bad file is misuse."""
    from kv_canary.cases.casefile import imports_of, load
    from kv_canary.difftest.worker import import_all, prepare

    with _usage_errors():
        prepare("cpu")
        check_imports(imports_of(path), imports, case=str(path))
        # What the user named, and nothing in the file's words.
        import_all(imports)
        return load(path, most_bytes=_bytes(max_gib))


def _bytes(gib: float) -> int:
    return int(gib * (1 << 30))
