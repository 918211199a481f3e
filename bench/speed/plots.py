"""Pictures of a result: SVG, on a light page or a dark one, each with where and of which commit it was measured."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kv_canary.bench.speed.tables import IN_ONE_THREAD, in_one_thread, measured_by, peer_name, times

Result = Mapping[str, Any]
Row = Mapping[str, Any]

# Of the same contrast on white and on near-black; what is drawn differs by its mark too, not by colour alone.
INK, OURS, PEER, FLOOR = "#797979", "#2f86d1", "#d4702c", "#379a53"
# Inches: small enough that its letters can be read in a column of a phone.
WIDTH, HEIGHT = 5.2, 3.7
SMALL = 8.0
FOOTER_COLUMNS = 86
# Ratios that are drawn: on a linear axis, and on a logarithmic one. What lies beyond is told below.
MOST_TIMES, MOST_TIMES_IN_ONE_THREAD = 10.0, 1000.0
CAPTIONS = {
    "time-against-cached-tokens.svg": "Time of a step, by the cached tokens of its batch",
    "time-against-stride.svg": "Time of a step, by stride",
    "time-against-pool-capacity.svg": "Time of the same step in larger pools",
    "ratio-to-sglang.svg": "Time of SGLang's canary over kv-canary's, case by case",
}


def draw(result: Result, folder: Path) -> list[Path]:
    """Draw what the result has the cases for, and return the files.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    made = []
    # The same figures give the same file.
    style: Any = {"svg.hashsalt": "kv-canary", "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK}
    style |= {"xtick.color": INK, "ytick.color": INK, "font.size": 9.0, "svg.fonttype": "none"}
    painters: tuple[Callable[[Any, Result], list[Row]], ...] = (_cached_tokens, _stride, _capacity, _ratio)
    with matplotlib.rc_context(style):
        for (name, caption), painter in zip(CAPTIONS.items(), painters, strict=True):
            figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
            rows = painter(figure, result)
            if not rows:
                continue
            figure.suptitle(caption, fontsize=10)
            told = [*(_beyond(rows) if painter is _ratio else []), _where(result, rows)]
            lines = [textwrap.fill(paragraph, FOOTER_COLUMNS) for paragraph in told]
            figure.supxlabel("\n".join(lines), fontsize=SMALL, x=0.01, ha="left")
            figure.savefig(folder / name, transparent=True, metadata={"Date": None})
            made.append(folder / name)
    return made


def _cached_tokens(figure: Any, result: Result) -> list[Row]:
    """Draw decode batches of plain shape in the order of their cached tokens; return what was drawn."""
    rows = [
        row
        for row in result["cases"]
        if row["case"].startswith("decode") and row["case"].endswith("x4096") and row["stride"] == 1
    ]
    if len(rows) < 2:
        return []
    rows.sort(key=lambda row: row["cached_tokens"])
    x = [row["cached_tokens"] for row in rows]
    axes = _axes(figure)
    beside = [row for row in rows if row.get("peer_ms") is not None]
    if beside:
        peer_x = [row["cached_tokens"] for row in beside]
        axes.plot(peer_x, [row["peer_ms"] for row in beside], "s-", color=PEER, label=f"{peer_name(result)}'s canary")
    axes.plot(x, [row["ours_ms"] for row in rows], "o-", color=OURS, label="kv-canary")
    bytes_per_ms = result["copy_tb_s"] * 1e9
    floor = [row["sector_bytes"] / bytes_per_ms for row in rows]
    axes.plot(x, floor, "--", color=FLOOR, label="reading its records and\nsampled bytes at copy speed")
    axes.set(xscale="log", yscale="log", xlabel="cached tokens in the batch", ylabel="milliseconds")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(frameon=False)
    return rows


def _stride(figure: Any, result: Result) -> list[Row]:
    """Draw a case over strides, the whole case first; return what was drawn."""
    swept = _of_group(result, "stride")
    roots = {row["case"].partition(",")[0] for row in swept}
    rows = sorted([row for row in result["cases"] if row["case"] in roots] + swept, key=lambda row: row["stride"])
    if len(rows) < 2:
        return []
    x = [row["stride"] for row in rows]
    axes = _axes(figure)
    axes.plot(x, [row["ours_ms"] for row in rows], "o-", color=OURS, label=f"kv-canary, {_batch(rows[0])}")
    axes.axhline(result["empty_ms"], color=FLOOR, linestyle="--", label="one launch that does nothing")
    axes.set(xscale="log", xlabel="stride: steps until every cached position was verified", ylabel="milliseconds")
    axes.set_ylim(0, None)
    axes.set_xticks(x, [str(n) for n in x])
    axes.minorticks_off()
    axes.legend(frameon=False)
    return rows


def _capacity(figure: Any, result: Result) -> list[Row]:
    """Draw a case over the sizes of the pool that it lies in; return what was drawn."""
    rows = sorted(_of_group(result, "pool capacity"), key=lambda row: row["pool_slots"])
    if len(rows) < 2:
        return []
    x = [row["pool_slots"] / 1e6 for row in rows]
    axes = _axes(figure)
    if all(row.get("peer_ms") is not None for row in rows):
        axes.plot(x, [row["peer_ms"] for row in rows], "s-", color=PEER, label=f"{peer_name(result)}'s canary")
    axes.plot(x, [row["ours_ms"] for row in rows], "o-", color=OURS, label="kv-canary")
    axes.set(xlabel=f"million slots in the pool; {_batch(rows[0])}", ylabel="milliseconds")
    axes.set_ylim(0, None)
    axes.legend(frameon=False)
    return rows


def _ratio(figure: Any, result: Result) -> list[Row]:
    """Draw a dot for each case that both ran, those apart that SGLang does in one thread; return those cases."""
    rows = [row for row in result["cases"] if row.get("ratio") is not None and row["group"] in ("cases", "traces")]
    panels = [
        ("Steps that decode, and ops of their own", [row for row in rows if not in_one_thread(row)]),
        ("Many new tokens for one request *", [row for row in rows if in_one_thread(row)]),
    ]
    panels = [(title, drawn) for title, of in panels if (drawn := [row for row in of if row["ratio"] < _most(row)])]
    if not panels:
        return []
    heights = [1.3 + len(drawn) for _, drawn in panels]
    figure.set_size_inches(WIDTH, 1.4 + 0.22 * sum(heights))
    every = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, drawn) in zip(every, panels, strict=True):
        _plain(axes)
        axes.grid(visible=False, axis="y")
        axes.set_title(title, fontsize=9, loc="left")
        axes.axvline(1.0, color=PEER)
        ratios = [row["ratio"] for row in drawn]
        # A dot says the same on either axis; a bar would be as long as the axis is far cut off.
        axes.plot(ratios, range(len(drawn)), "o", color=OURS)
        for i, ratio in enumerate(ratios):
            axes.annotate(times(ratio), (ratio, i), (7, 0), textcoords="offset points", va="center", fontsize=SMALL)
        axes.set_yticks(range(len(drawn)), [row["case"] for row in drawn])
        axes.set_ylim(len(drawn) - 0.4, -0.6)
        if in_one_thread(drawn[0]):
            axes.set(xscale="log", xlim=(min(0.8, *ratios), MOST_TIMES_IN_ONE_THREAD * 2.5))
            axes.xaxis.set_major_formatter("{x:,.0f}")
        else:
            axes.set_xlim(0, max(ratios) * 1.2)
    every[-1].set_xlabel(f"{peer_name(result)}'s time over kv-canary's; line: equal")
    return rows


def _axes(figure: Any) -> Any:
    axes = figure.subplots()
    _plain(axes)
    return axes


def _plain(axes: Any) -> None:
    """Take from axes what says nothing."""
    axes.grid(visible=True, color=INK, alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _beyond(rows: Sequence[Row]) -> list[str]:
    """Return what a reader of the ratios must know: what one thread does, and what lies beyond the axes."""
    told = [f"* {IN_ONE_THREAD}"] if any(in_one_thread(row) for row in rows) else []
    far = [row for row in rows if row["ratio"] >= _most(row)]
    values = "; ".join(f"{row['case']}: {times(row['ratio'])}{' *' * in_one_thread(row)}" for row in far)
    return [*told, f"Too far out to be drawn: {values}."] if far else told


def _most(row: Row) -> float:
    """Return from which ratio on a case is told and not drawn."""
    return MOST_TIMES_IN_ONE_THREAD if in_one_thread(row) else MOST_TIMES


def _where(result: Result, rows: Iterable[Row]) -> str:
    """Return where what is drawn was measured."""
    return f"{result['device']}; {measured_by(result, rows)}; {result['mode']}; medians of {result['rounds']}."


def _of_group(result: Result, group: str) -> list[Row]:
    return [row for row in result["cases"] if row["group"] == group]


def _batch(row: Row) -> str:
    return f"{row['requests']} requests of {row['cached_tokens'] // row['requests']:,} tokens"
