"""`kv-canary difftest mutants` and `planted`: how much the differential tests notice, and how soon."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kv_canary.commands.progress import progress_bar
from kv_canary.difftest.options import commit_option, device_option, jobs_option, json_option, seed_option
from kv_canary.extras import install_command

if TYPE_CHECKING:
    from rich.console import Console

    from kv_canary.difftest.campaign import CampaignResult
    from kv_canary.difftest.mutation.mutants import Mutant
    from kv_canary.difftest.mutation.planted import PlantedBug
    from kv_canary.difftest.mutation.pool import Verdict
    from kv_canary.difftest.mutation.run import MutantResult, MutationReport
    from kv_canary.difftest.mutation.score import Score


@click.command()
@jobs_option("How many at a time.", default=None)
@click.option("--examples", type=click.IntRange(1), default=200, show_default=True, help="Generated calls per op.")
@click.option(
    "--file", "files", multiple=True, metavar="FILE", help="Only this source, as kernels/plan.py; repeatable."
)
@click.option(
    "--part",
    "parts",
    type=click.Choice(["kernels", "reference", "kv_canary"]),
    multiple=True,
    help="Only sources of this folder; repeatable. [default: all three]",
)
@click.option(
    "--survivors",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Only those that survived in this result of --json; those of the runtime with more tests.",
)
@click.option(
    "--same",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Only those that this result of --json tells of: its sample, on the code of today.",
)
@click.option("--sample", type=click.IntRange(1), help="Run only so many mutants, chosen by --seed.")
@seed_option("Of the generated calls and of the sample.")
@device_option("Where Triton runs; cpu: in its interpreter. On a GPU every mutant is compiled anew.")
@json_option("Write every mutant's fate here, beside those that are there of this code, which do not run again.")
@commit_option(default="unknown")
@click.option("--list", "list_only", is_flag=True, help="Print the mutants and run none.")
def mutants(
    jobs: int,
    examples: int,
    files: tuple[str, ...],
    parts: tuple[str, ...],
    survivors: Path | None,
    same: Path | None,
    sample: int | None,
    seed: int,
    device: str,
    json_path: Path | None,
    commit: str,
    list_only: bool,
) -> None:
    """Change sources, one small mistake at a time: do the tests notice?

    A mutant is one source with one expression changed: `<` for `<=`, a mask without one of its conditions, a store
    left out, a scan backwards. One of kernels/ or reference/ runs, in a process of its own, the same generated calls
    as the unchanged code, and is killed when the differential check finds a difference, a crash, an exception or a
    hang. One of kv_canary/ runs the tests that run the changed lines; which these are is measured first, which takes
    some ten minutes, and kept until a source or a test changes. A mutant that survives is a hole in the tests, or it is
    equivalent: nothing can tell it apart; then it belongs into difftest/mutation/equivalent_mutants.toml, with the
    reason.

    Ctrl-C ends the run and loses nothing: what was reached is reported, and written, and the same command goes on.

    Exit codes: 0 all killed or equivalent; 1 a mutant survived, or one listed as equivalent was killed; 2 misuse, an
    interrupted run, or an entry of the list that fits no mutant any more.

    \b
    Examples:
      kv-canary difftest mutants --list --file kernels/retire.py
      kv-canary difftest mutants --file kernels/retire.py --file kernels/move.py
      kv-canary difftest mutants --part kv_canary --sample 100 --seed 7
      kv-canary difftest mutants --jobs 16 --json mutants.json
      kv-canary difftest mutants --survivors mutants.json
      kv-canary difftest mutants --same before.json --json after.json
    """
    if device == "cpu":
        # Triton decides when a kernel is decorated: this comes before any is imported.
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        from rich.console import Console

        from kv_canary.difftest.ending import until_ended
        from kv_canary.difftest.mutation.mutants import make_mutants
        from kv_canary.difftest.mutation.overlay import is_runtime, runtime_files, source_files
        from kv_canary.difftest.mutation.run import run_mutants
    except ModuleNotFoundError as error:
        raise click.UsageError(f"mutants need: {install_command('triton', 'difftest')} ({error})") from error
    console = Console()
    try:
        every = [*source_files(), *runtime_files()]
        chosen = list(files) or [file for file in every if not parts or file.split("/")[0] in parts]
        if list_only:
            for mutant in make_mutants(chosen):
                console.print(f"{mutant.id}  line {mutant.line}  {mutant.kind.value}", markup=False, highlight=False)
                console.print(f"  - {mutant.before}\n  + {mutant.after}", markup=False, highlight=False, soft_wrap=True)
            return
        # Read before anything is written: both may be the file that is made anew.
        ids = None
        if survivors is not None:
            ids = ids_in(survivors, status="survived")
        if same is not None:
            ids = ids_in(same) if ids is None else ids & ids_in(same)
        kinds = {"runtime_mutants" if is_runtime(file) else "mutants" for file in chosen}
        setting = {"sources": _sources(kinds), "examples_per_op": examples, "seed": seed}

        def keep(report: MutationReport) -> None:
            if json_path is not None:
                facts = {**report.as_dict(commit=commit), **setting}
                json_path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

        with until_ended() as is_ended, shown_progress(console, is_ended) as on_progress:
            report = run_mutants(
                jobs=jobs,
                examples=examples,
                files=chosen,
                ids=ids,
                again=survivors is not None,
                sample=sample,
                seed=seed,
                device=device,
                known=verdicts_of(json_path, setting),
                on_progress=on_progress,
                keep=keep,
            )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error
    show_report(console, report)
    keep(report)
    raise SystemExit(2 if report.not_run else 0 if report.passed else 1)


def ids_in(path: Path, *, status: str | None = None) -> frozenset[str]:
    """Return the ids of the mutants of a result, or of those whose fate was `status`.

    Raises:
        ValueError: the file is no result.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))["mutants"]
        return frozenset(mutant["id"] for mutant in told if status in (None, mutant["status"]))
    except (ValueError, KeyError, TypeError) as error:
        from kv_canary.errors import must_be

        raise ValueError(must_be("difftest", "mutants", "a result of --json", f"{path} ({error})")) from error


def verdicts_of(path: Path | None, setting: Mapping[str, Any]) -> dict[str, Verdict]:
    """Return the verdicts in a result, by the mutant's id; none where it is not there, or of another setting.

    Args:
        setting: the digests of the code, and what the calls were drawn by.
    """
    from kv_canary.difftest.mutation.pool import Verdict

    if path is None or not path.exists():
        return {}
    told = json.loads(path.read_text(encoding="utf-8"))
    if any(told.get(name) != value for name, value in setting.items()):
        return {}
    return {mutant["id"]: Verdict(**(mutant["killed_by"] or {})) for mutant in told["mutants"]}


def _sources(kinds: Iterable[str]) -> dict[str, str]:
    """Return the digests of what these kinds of mutants rest on."""
    from kv_canary.commands.evidence import digests

    return {source: told for kind in sorted(kinds) for source, told in digests(kind).items()}


@contextmanager
def shown_progress(
    console: Console, is_ended: Callable[[], bool]
) -> Iterator[Callable[[MutantResult, int, int], None]]:
    """Show how far a run is, until it is ended."""
    # Without its own thread: the run forks, and a lock that a thread holds then stays held in the child.
    with progress_bar(console, "bar count elapsed what", auto_refresh=False) as progress:
        task = progress.add_task("drawing calls", total=None)
        survived = 0

        def on_progress(result: MutantResult, done: int, total: int) -> None:
            nonlocal survived
            survived += result.status == "survived"
            if not console.is_terminal and (result.status == "survived" or done % 50 == 0 or done == total):
                told = f"survived: {result.mutant.id}" if result.status == "survived" else ""
                console.print(f"{done} of {total}, {survived} survived {told}", markup=False, highlight=False)
            progress.update(task, total=total, completed=done, description=f"{survived} survived", refresh=True)
            if is_ended():
                raise KeyboardInterrupt

        progress.refresh()
        yield on_progress


def show_report(console: Console, report: MutationReport) -> None:
    """Print the survivors with their diffs, and the counts by file and by kind."""
    from rich.table import Table

    from kv_canary.difftest.mutation.run import MutantStatus

    for result in report.of(MutantStatus.SURVIVED):
        console.print(f"\nsurvived: {result.mutant.id}, {result.mutant.kind.value}", style="bold red", highlight=False)
        console.print(result.mutant.diff, markup=False, highlight=False, soft_wrap=True)
    for result in report.refuted:
        console.print(f"\nlisted as equivalent, yet killed: {result.mutant.id}: {result.detail}", style="bold red")
        console.print(result.mutant.diff, markup=False, highlight=False, soft_wrap=True)
    groupings: dict[str, Callable[[Mutant], str]] = {"file": lambda m: m.file, "kind": lambda m: m.kind.value}
    for title, name_of in groupings.items():
        counts: dict[str, Counter[str]] = {}
        for result in report.results:
            counts.setdefault(name_of(result.mutant), Counter())[result.status] += 1
        table = Table(title, "total", "killed", "equivalent", "survived")
        for name, count in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
            table.add_row(name, str(count.total()), *(str(count[status]) for status in MutantStatus))
        console.print(table)
    outcomes = Counter(r.outcome for r in report.of(MutantStatus.KILLED))
    told = ", ".join(f"{name} {count}" for name, count in outcomes.most_common())
    console.print(f"killed by: {told or 'nothing'}; {report.seconds:.0f} s on {report.device}")
    if report.not_run:
        console.print(f"interrupted: {report.not_run} mutants were not run", style="bold red")


@click.command()
@click.option("--name", "names", multiple=True, metavar="NAME", help="Only this bug; may be repeated.")
@click.option("--list", "only_list", is_flag=True, help="List the bugs, and stop.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Campaigns for each bug.")
@click.option("--limit", type=click.FloatRange(min=1), default=60.0, show_default=True, help="Seconds to find it in.")
@device_option("Where Triton runs.")
@jobs_option("Parallel jobs.", default=None)
@seed_option("Of the first campaign; the next ones count up.")
@click.option(
    "--findings",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("findings"),
    show_default=True,
    help="Folder for what is found.",
)
@json_option("Write the facts here, for a machine.")
@commit_option(default="unknown")
def planted(names: tuple[str, ...], only_list: bool, json_path: Path | None, commit: str, **options: Any) -> None:
    """Score the fuzzer: plant a known bug, fuzz every op, and time what is found first.

    Exit code 0 where every campaign found its bug, 1 where one did not.

    \b
    Examples:
      kv-canary difftest planted --list
      kv-canary difftest planted --name lut-twice --repeats 5
    """
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    from kv_canary.cases.imports import replay_line
    from kv_canary.difftest.mutation.planted import PLANTED_BUGS
    from kv_canary.difftest.worker import prepare

    console = Console()
    if only_list:
        for bug in PLANTED_BUGS:
            console.print(Text.assemble((bug.name, "bold"), f"  {bug.file}: {bug.kind}"))
            console.print(Padding(Text(bug.shows), (0, 0, 0, 2)))
        return
    from kv_canary.difftest.mutation.score import score

    try:
        prepare(options["device"])
        limit_s = options.pop("limit")
        with progress_bar(None, "spinner elapsed what") as bar:
            task = bar.add_task("starting")

            def on_change(bug: PlantedBug, repeat: int, result: CampaignResult) -> None:
                told = f"{bug.name}, campaign {repeat + 1}: {result.cases} cases, {len(result.findings)} findings"
                bar.update(task, description=told)

            scores = score(names, limit_s=limit_s, on_change=on_change, **options)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    lines = {
        str(s.finding.file): replay_line(s.finding.file, device=options["device"], plant=s.bug.name)
        for s in scores
        if s.finding is not None
    }
    _show_scores(console, scores, lines, limit_s=limit_s)
    if json_path is not None:
        from kv_canary.cases.casefile import versions
        from kv_canary.commands.evidence import digests
        from kv_canary.difftest.campaign import device_name

        facts = {
            "device": device_name(options["device"]),
            "versions": versions(),
            "commit": commit,
            "sources": digests("planted"),
            "jobs": options["jobs"],
            "limit_s": limit_s,
            "planted": [s.as_dict() for s in scores],
        }
        json_path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    raise SystemExit(0 if all(s.found for s in scores) else 1)


def _show_scores(console: Console, scores: Sequence[Score], lines: Mapping[str, str], *, limit_s: float) -> None:
    """Print how long each planted bug took to find, and the lines that replay what was found."""
    from rich.table import Column, Table
    from rich.text import Text

    table = Table(Column("planted", no_wrap=True), "found after, s", "median", "shrunk to")
    for one in scores:
        times = ", ".join("-" if t is None else f"{t:.1f}" for t in one.found_after_s)
        median = Text("not always found", style="bold red")
        if one.median_s is not None:
            median = Text(f"{one.median_s:.1f}", style="green" if one.median_s <= limit_s else "red")
        table.add_row(one.bug.name, times, median, one.finding.says if one.finding else "")
    console.print(table)
    for line in lines.values():
        console.print(line, soft_wrap=True, highlight=False)
