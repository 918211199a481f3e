"""Pictures of a result: SVG, on a light page or a dark one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

Result = Mapping[str, Any]

# Readable on white and on black.
INK, OURS, PEER, FLOOR = "#808080", "#2f8fdd", "#e07b39", "#3fa45b"
SIZE = (7.2, 3.8)
CAPTIONS = {
    "time-against-cached-tokens.svg": "Time of a whole step against cached tokens",
    "time-against-stride.svg": "Time of a whole step against the stride",
    "time-against-pool-capacity.svg": "The same work in larger pools",
    "ratio-to-the-peer.svg": "How many times faster than the peer, case by case",
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
    painters = (_cached_tokens, _stride, _capacity, _ratio)
    with matplotlib.rc_context(style):
        for (name, caption), painter in zip(CAPTIONS.items(), painters, strict=True):
            figure = Figure(figsize=SIZE, layout="constrained")
            axes = figure.subplots()
            axes.grid(visible=True, color=INK, alpha=0.25, linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
            if not painter(axes, result):
                continue
            axes.set_title(caption, fontsize=10)
            figure.savefig(folder / name, transparent=True, metadata={"Date": None})
            made.append(folder / name)
    return made


def _decodes(result: Result) -> list[Mapping[str, Any]]:
    """Rows of decode batches of plain shape, in the order of their cached tokens."""
    rows = [
        row
        for row in result["cases"]
        if row["case"].startswith("decode") and row["case"].endswith("x4096") and row["stride"] == 1
    ]
    return sorted(rows, key=lambda row: row["cached_tokens"])


def _cached_tokens(axes: Any, result: Result) -> bool:
    rows = _decodes(result)
    if len(rows) < 2:
        return False
    x = [row["cached_tokens"] for row in rows]
    beside = [row for row in rows if row.get("peer_ms") is not None]
    if beside:
        peer_x = [row["cached_tokens"] for row in beside]
        axes.plot(peer_x, [row["peer_ms"] for row in beside], "o-", color=PEER, label="the peer")
    axes.plot(x, [row["ours_ms"] for row in rows], "o-", color=OURS, label="kv-canary")
    bytes_per_ms = result["copy_tb_s"] * 1e9
    floor = [row["sector_bytes"] / bytes_per_ms for row in rows]
    axes.plot(x, floor, "--", color=FLOOR, label="its sectors at copy bandwidth")
    axes.set(xscale="log", yscale="log", xlabel="cached tokens", ylabel="ms")
    axes.legend(frameon=False)
    return True


def _stride(axes: Any, result: Result) -> bool:
    rows = sorted(_of_group(result, "stride"), key=lambda row: row["stride"])
    if len(rows) < 2:
        return False
    x = [row["stride"] for row in rows]
    axes.plot(x, [row["ours_ms"] for row in rows], "o-", color=OURS, label=f"kv-canary, {_root(rows[0]['case'])}")
    axes.axhline(result["empty_ms"], color=FLOOR, linestyle="--", label="a launch of nothing")
    axes.set(xscale="log", xlabel="stride: steps until every position was verified", ylabel="ms", ylim=(0, None))
    axes.set_xticks(x, [str(n) for n in x])
    axes.minorticks_off()
    axes.legend(frameon=False)
    return True


def _capacity(axes: Any, result: Result) -> bool:
    rows = sorted(_of_group(result, "pool capacity"), key=lambda row: row["pool_slots"])
    if len(rows) < 2:
        return False
    x = [row["pool_slots"] / 1e6 for row in rows]
    if all(row.get("peer_ms") is not None for row in rows):
        axes.plot(x, [row["peer_ms"] for row in rows], "o-", color=PEER, label="the peer")
    axes.plot(x, [row["ours_ms"] for row in rows], "o-", color=OURS, label=f"kv-canary, {_root(rows[0]['case'])}")
    axes.set(xlabel="million slots in the pool", ylabel="ms", ylim=(0, None))
    axes.legend(frameon=False)
    return True


def _ratio(axes: Any, result: Result) -> bool:
    rows = [row for row in result["cases"] if row.get("ratio") is not None and row["group"] in ("cases", "traces")]
    if not rows:
        return False
    names = [row["case"] for row in rows][::-1]
    ratios = [row["ratio"] for row in rows][::-1]
    axes.figure.set_size_inches(SIZE[0], 1.0 + 0.24 * len(rows))
    axes.barh(names, ratios, color=OURS, height=0.65)
    for i, ratio in enumerate(ratios):
        axes.text(ratio * 1.06, i, f"{ratio:.1f}" if ratio < 100 else f"{ratio:.0f}", va="center", fontsize=8)
    axes.axvline(1.0, color=PEER, label="the peer")
    axes.set(xscale="log", xlabel="times faster than the peer", xlim=(None, max(ratios) * 2.2))
    axes.grid(visible=False, axis="y")
    return True


def _of_group(result: Result, group: str) -> list[Mapping[str, Any]]:
    """The rows of a sweep; that over strides begins with the case that it is a sweep of."""
    rows = [row for row in result["cases"] if row["group"] == group]
    if group == "stride":
        roots = {_root(row["case"]) for row in rows}
        rows = [row for row in result["cases"] if row["case"] in roots] + rows
    return rows


def _root(case: str) -> str:
    return case.partition(",")[0]
