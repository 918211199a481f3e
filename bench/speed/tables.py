"""Tables of a result: for a terminal, and in Markdown for a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kv_canary.errors import must_be

if TYPE_CHECKING:
    from rich.console import Console

Result = Mapping[str, Any]

BEGIN, END = "<!-- kv-canary bench: begin -->", "<!-- kv-canary bench: end -->"
# Characters across that show everything, and those of what is not a terminal.
WIDE = 120
PAGE_WIDTH = 150
IN_PAGES = "decode 256x4096, pages of 16"
PEERS = {"sglang": "SGLang"}
IN_ONE_THREAD = (
    "SGLang takes a request's new tokens one after another, in one thread: its time grows with the most new tokens of "
    "one request."
)


def show(result: Result, console: Console) -> None:
    """Print a result: where it was measured, each case, its parts, and what failed or was left out."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    beside = result["peer"] is not None
    console.print(Text(_where(result), style="dim"))
    for group in dict.fromkeys(row["group"] for row in result["cases"]):
        columns = _columns(beside=beside, wide=console.width >= WIDE)
        table = Table(title=group, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("case", overflow="fold")
        for name in columns:
            table.add_column(name, justify="right", no_wrap=True)
        for row in (r for r in result["cases"] if r["group"] == group):
            cells = _cells(row)
            table.add_row(row["case"], *(cells.get(name, "") for name in columns), style="bold")
            for part in row["parts"]:
                cells = _cells(part)
                table.add_row(f"  {part['part']}", *(cells.get(name, "") for name in columns))
        console.print(table)
    for line in headlines(result):
        console.print(Text(line, style="bold green"))
    for row in result["cases"]:
        if row.get("peer_failed"):
            console.print(Text(f"the peer failed: {row['case']}: {row['peer_failed']}", style="yellow"))
    for what, style in (("skipped", "yellow"), ("failed", "bold red")):
        for row in result[what]:
            console.print(Text(f"{what}: {row['case']}: {row['why']}", style=style))


def _columns(*, beside: bool, wide: bool) -> list[str]:
    names = ["ms"]
    if wide:
        names.append("p10-p90")
    if beside:
        names += ["peer", "ratio", "cold"]
    names += ["launches", "MB", "of copy", "sectors"]
    if wide:
        names += ["gather", "eager", "L2"]
    return names


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the cells of a case's row, or of a part's."""
    prefix = "ours_" if "case" in row else ""
    launches = _number(row["launches"])
    if row.get("peer_launches") is not None:
        launches += f"/{row['peer_launches']}"
    return {
        "ms": _ms(row[f"{prefix}ms"]),
        "p10-p90": f"{_ms(row[f'{prefix}p10_ms'])}-{_ms(row[f'{prefix}p90_ms'])}",
        "peer": _ms(row.get("peer_ms")),
        "ratio": times(row.get("ratio")),
        "cold": times(row.get("ratio_cold")),
        "launches": launches,
        "MB": f"{row['necessary_bytes'] / 1e6:.3g}",
        "of copy": _percent(row["share_necessary"]),
        "sectors": _percent(row["share_sectors"]),
        "gather": _ms(row.get("gather_ms")),
        "eager": _ms(row.get("eager_ms")),
        "L2": "yes" if row.get("in_l2") else "",
    }


def headlines(result: Result) -> list[str]:
    """Return the sentences that a result is looked up for."""
    lines = []
    for row in result["cases"]:
        if row["case"] == IN_PAGES:
            shares = [
                f"{p['part']} {_percent(p['share_necessary'])} ({_percent(p['share_sectors'])} by sectors)"
                for p in row["parts"]
                if p["part"] in ("HEAD", "TAIL", "verify")
            ]
            lines.append("share of the copy bandwidth, verify in pages of 16, by necessary bytes: " + ", ".join(shares))
    return lines


def markdown(result: Result) -> str:
    """Return the cases as a Markdown table, with where they were measured below it."""
    beside = result["peer"] is not None
    columns = {"ms": "ours, ms", "p10-p90": "p10-p90", "peer": f"{peer_name(result)}, ms", "ratio": "ratio"}
    columns |= {"launches": "launches", "MB": "MB needed", "of copy": "of copy"}
    if not beside:
        del columns["peer"], columns["ratio"]
    lines = ["| case | " + " | ".join(columns.values()) + " |", "|---" * (1 + len(columns)) + "|"]
    rows = [row for row in result["cases"] if row["group"] in ("cases", "traces")]
    marked = [row["case"] for row in rows if row.get("ratio") is not None and in_one_thread(row)]
    for row in rows:
        cells = _cells(row)
        if row["case"] in marked:
            cells["ratio"] += r" \*"
        lines.append("| " + " | ".join([row["case"], *(cells[name] for name in columns)]) + " |")
    notes = ["", rf"\* {IN_ONE_THREAD}"] if marked else []
    return "\n".join([*lines, *notes, "", _where(result) + "."]) + "\n"


def peer_name(result: Result) -> str:
    """Return the peer of a result as people call it, with its version; "" where it has none."""
    peer = result["peer"]
    if peer is None:
        return ""
    return f"{PEERS.get(peer['name'], peer['name'])} {peer['version']}".removesuffix(" unknown")


def in_one_thread(row: Mapping[str, Any]) -> bool:
    """Return whether a case gives some request more than one new token to chain, which one thread of the peer does."""
    return row["does"] in ("step", "write") and row["new_tokens"] > row["requests"]


def measured_by(result: Result, rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the commits that rows of a result are of, with the days where they are known."""
    # A row that has a commit of its own was measured on another day, which it need not know.
    of = [row if "commit" in row else result for row in rows]
    told = Counter((which["commit"], which.get("date")) for which in of)
    words = [f"{commit}{f' measured {date}' if date else ''}" for commit, date in told]
    if len(told) > 1:
        words = [
            f"{word} ({count} case{'' if count == 1 else 's'})"
            for word, count in zip(words, told.values(), strict=True)
        ]
    return f"commit {', '.join(words)}"


def place(page: Path, result: Result | None, plots: Mapping[str, str]) -> str:
    """Return a page's text with the place between its two marks filled from a result.

    Args:
        result: None leaves the place empty.
        plots: caption by the address of a picture, as the page would link it.

    Raises:
        ValueError: the page has not the two marks.
    """
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(must_be("bench", "--page", f"a page with {BEGIN} and {END}", str(page)))
    filled = ""
    if result is not None:
        pictures = "\n".join(f"![{caption}]({address})" for address, caption in plots.items())
        filled = f"\n{markdown(result)}\n{pictures}\n"
    return f"{before}{BEGIN}\n{filled}{END}{after}"


def _where(result: Result) -> str:
    versions = ", ".join(f"{n} {v}" for n, v in result["versions"].items() if v is not None and n != "kv-canary")
    words = [
        f"{result['device']}, {versions}, {measured_by(result, result['cases'])}",
        f"backend {result['backend']}, {result['mode']}, shapes {result['shapes']}",
        f"medians of {result['rounds']} rounds",
        f"copy {result['copy_tb_s']:.3g} TB/s, an undisturbed empty launch {_ms(result['empty_ms'])} ms",
    ]
    if result["peer"] is not None:
        words.append(peer_name(result))
    return "; ".join(words)


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}" if value < 1 else f"{value:.3g}"


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}x" if value < 100 else f"{value:.0f}x"


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %" if value >= 0.1 else f"{100 * value:.1f} %"


def _number(value: int | None) -> str:
    return "" if value is None else str(value)
