"""The console output of campaigns and replays: a live line, tables, and a difference laid out byte by byte."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kv_canary.cases.casefile import CaseFile
from kv_canary.cases.packing import INTEGERS
from kv_canary.commands.progress import progress_bar
from kv_canary.difftest.campaign import Campaign, CampaignResult
from kv_canary.difftest.compiling import Kernel, Refusal
from kv_canary.difftest.coverage import feasible_pairs
from kv_canary.difftest.replaying import Replay
from kv_canary.errors import printable
from kv_canary.specs import get_spec

# Columns of a terminal that hold 16 bytes of either side next to each other, and tables with lines.
_WIDE = 112
# A picture asks for no font from elsewhere: columns are as wide as those of most monospaced fonts, so that the lines of
# tables meet in any of them.
_FONT_ASPECT = 0.6
_PICTURE = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px/{line_height}px "DejaVu Sans Mono", Menlo, Consolas, monospace; }}
.{unique_id}-title {{ font: bold 17px "DejaVu Sans", Verdana, Arial, sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


@contextmanager
def live_progress(console: Console, campaign: Campaign) -> Iterator[Callable[[CampaignResult], None]]:
    """Show a campaign as it runs: cases a second, pairs of features covered, findings."""
    total = campaign.minutes * 60 if campaign.minutes is not None else 0.0
    if campaign.examples is not None:
        total = float(campaign.examples * len(campaign.all_targets()))
    with progress_bar(console, "spinner bar elapsed what") as progress:
        task = progress.add_task("starting", total=total)

        def on_change(result: CampaignResult) -> None:
            done = result.seconds if campaign.minutes is not None else float(result.cases)
            found = len(result.findings)
            rate = result.cases / max(result.seconds, 1e-9)
            colour = "red" if found else "green"
            progress.update(
                task,
                completed=min(done, total),
                description=f"{result.cases} cases, {rate:.1f}/s, {covered(result, 'pairs, ')}"
                f"[{colour}]{found} finding{'' if found == 1 else 's'}[/]",
            )

        yield on_change


@contextmanager
def step_progress(console: Console, *, total: int) -> Iterator[Callable[[str], None]]:
    """Show how many of `total` steps are done, and what the one that begins is."""
    with progress_bar(console, "spinner bar elapsed what") as progress:
        task, begun = progress.add_task("starting", total=total), 0

        def on_step(what: str) -> None:
            nonlocal begun
            progress.update(task, completed=begun, description=what)
            begun += 1

        yield on_step


def show_compiled(console: Console, found: Sequence[Kernel | Refusal]) -> None:
    """Print a line for each kernel, and what the compiler said where it refused one."""
    table = Table("op", "kernel")
    for name in ("variants", "registers", "bytes spilled", "shared bytes", "seconds"):
        table.add_column(name, justify="right")
    kernels = [x for x in found if isinstance(x, Kernel)]
    for op, name in dict.fromkeys((x.op, x.name) for x in kernels):
        its = [x for x in kernels if (x.op, x.name) == (op, name)]
        most = (str(max(getattr(x, what) for x in its)) for what in ("registers", "spilled", "shared"))
        table.add_row(op, name, str(len(its)), *most, f"{sum(x.seconds for x in its):.1f}")
    console.print(table)
    for refusal in found:
        if isinstance(refusal, Refusal):
            console.print(f"[red]{refusal.op}: {refusal.name} does not compile[/]")
            console.print(Text(refusal.says))


def covered(result: CampaignResult, more: str) -> str:
    """The number of pairs of features that have met, of those that can meet; "" where the ops' calls have none."""
    if not result.coverage.features:
        return ""
    feasible = feasible_pairs()
    return f"{len(feasible & set(result.coverage.pairs))}/{len(feasible)} {more}"


def show_campaign(
    console: Console, campaign: Campaign, result: CampaignResult, lines: Mapping[str, str], *, all_pairs: bool
) -> None:
    """Print what a campaign ran and found."""
    table = Table("target", "cases", "per job second", "findings", title=f"difftest on {campaign.device}")
    for target, stats in result.stats.items():
        found = sum(f.op == target for f in result.findings.values())
        rate = f"{stats.cases / stats.seconds:.1f}" if stats.seconds else "-"
        table.add_row(target, str(stats.cases), rate, Text(str(found), style="bold red" if found else "green"))
    console.print(table)
    overall = result.cases / max(result.seconds, 1e-9)
    console.print(
        f"{result.cases} cases in {result.seconds:.0f} s: {overall:.1f} a second; "
        f"{covered(result, 'feasible pairs of features covered; ')}"
        f"{result.restarts} worker restarts{'; interrupted' if result.interrupted else ''}"
    )
    if all_pairs:
        console.print(result.coverage.table())
    if result.untried:
        console.print(
            f"[bold yellow]inconclusive[/]: no case was run of {escape(', '.join(result.untried))}; give it more time"
        )
    for finding in result.findings.values():
        console.print(
            f"\n[bold red]found[/] after {finding.found_after_s:.1f} s: {escape(finding.says)}", highlight=False
        )
        console.print(f"replay it with: {lines[str(finding.file)]}", soft_wrap=True, highlight=False)
    for error in result.errors:
        console.print(f"\n[bold red]error[/] in the harness:\n{escape(error)}", markup=True, highlight=False)


def show_replay(console: Console, case: CaseFile, replay: Replay) -> None:
    """Print how a replayed case fared: the call, the first differing bytes, and every difference decoded."""
    table = call_table(case)
    says = printable(str(replay.mismatch)) if replay.mismatch is not None else ""
    if says == case.says:
        # Once is enough: it fails as it did.
        table.title = Text(f"{case.op}: the saved call")
    console.print(table)
    if replay.mismatch is None:
        console.print("[green]It does not fail here.[/]")
        return
    console.print(f"[bold red]It fails:[/] {escape(says)}", highlight=False)
    if not replay.differences:
        return
    first = replay.differences[0]
    expected, got = replay.mismatch.expected[first.path], replay.mismatch.got[first.path]
    wide = console.width >= _WIDE
    console.print(bytes_table(first.path, expected, got, width=16 if wide else 8))
    traced = any(d.writers is not None for d in replay.differences)
    decoded = Table() if wide else Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for column in ("tensor", "where", "reference", replay.mismatch.backend, *(["written by"] if traced else [])):
        decoded.add_column(column, overflow="fold")
    for difference in replay.differences:
        row = [difference.path, difference.where, difference.expected, difference.got]
        if traced:
            row.append("\n".join(difference.writers or ()) or "no program")
        decoded.add_row(*map(Text, row))
    console.print(decoded)


def save_picture(path: Path, case: CaseFile, replay: Replay, *, width: int, title: str) -> None:
    """Save what `show_replay` prints on a terminal of `width` columns as SVG, on a ground of its own."""
    console = Console(record=True, width=width, file=io.StringIO())
    show_replay(console, case, replay)
    # What reaches below the last line is cut off.
    console.print()
    console.save_svg(str(path), title=title, code_format=_PICTURE, font_aspect_ratio=_FONT_ASPECT)


def call_table(case: CaseFile) -> Table:
    """The arguments of a call; small tensors with their contents."""
    says = case.says if case.says.startswith(f"{case.op} ") else f"{case.op}: {case.says}"
    table = Table(title=Text(says), title_justify="left")
    for column in ("argument", "role", "what", "values"):
        table.add_column(column, overflow="fold")
    spec = get_spec(case.op)
    for leaf in spec.leaves(case.arguments):
        if leaf.role == "scratch":
            continue
        tensor = leaf.tensor
        kind = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        if tensor.dim() > 1 and len(tensor) > 1 and tensor.stride(0) > tensor[0].numel():
            kind += f", a row every {tensor.stride(0)}"
        cells = (leaf.path, leaf.role, kind, _values(tensor) if leaf.role != "out" else "")
        table.add_row(*map(Text, cells))
    for name, value in case.arguments.items():
        if value is None or isinstance(value, int):
            cells = (name, "in", type(value).__name__ if value is not None else "", str(value))
            table.add_row(*map(Text, cells))
        for field in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
            inner = getattr(value, field.name)
            if dataclasses.is_dataclass(inner):
                numbers = {f.name: getattr(inner, f.name) for f in dataclasses.fields(inner) if f.init}
                shown = ", ".join(f"{k}={v}" for k, v in numbers.items() if isinstance(v, int))
                table.add_row(f"{name}.{field.name}", "in", type(inner).__name__, shown)
    return table


def bytes_table(path: str, expected: torch.Tensor, got: torch.Tensor, *, lines: int = 4, width: int = 16) -> Table:
    """The first differing bytes of an output, a line of `width` bytes before and some after; what differs is marked."""
    apart = expected != got
    first = int(apart.nonzero()[0]) // width * width
    table = Table("byte", "reference", "got", title=f"{path}, first differing bytes", title_justify="left")
    for at in range(max(first - width, 0), min(first + lines * width, len(expected)), width):
        table.add_row(f"{at:#x}", *(_hex(t[at : at + width], apart[at : at + width]) for t in (expected, got)))
    return table


def _hex(data: torch.Tensor, apart: torch.Tensor) -> Text:
    text = Text()
    for byte, differs in zip(data.tolist(), apart.tolist(), strict=True):
        text.append(f"{byte:02x}", style="bold red" if differs else "dim")
        text.append(" ")
    return text


def _values(tensor: torch.Tensor, *, most: int = 12) -> str:
    if tensor.numel() == 0:
        return "[]"
    if tensor.numel() <= most:
        return str(tensor.tolist())
    flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor[0].reshape(-1)
    nonzero = int(tensor.view(INTEGERS.get(tensor.element_size(), tensor.dtype)).count_nonzero())
    return f"{flat[:most].tolist()[:-1]}"[:-1] + f", ...] ({nonzero} not zero)"
