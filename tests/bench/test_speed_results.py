"""What is made of a result: tables, pictures, a page; and the command that makes it."""

from __future__ import annotations

import html
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from kv_canary.bench.speed import checking, plots, tables
from kv_canary.bench.speed.cases import CASES, MAIN
from kv_canary.cli import main

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="measures on the CPU")


def made_up(*, peer: bool = True) -> dict[str, Any]:
    """A result with a row for each case: ours takes (i + 1) / 8 ms, the peer four times that."""
    rows = []
    for i, case in enumerate(CASES):
        ms = (i + 1) / 8
        moved = {"necessary_bytes": 10**6, "sector_bytes": 2 * 10**6, "share_necessary": 0.25, "share_sectors": 0.5}
        times = {"ms": ms / 2, "p10_ms": 0.4 * ms, "p90_ms": 0.6 * ms, "launches": 2}
        beside = {"peer_ms": 4 * ms, "ratio": 4.0, "peer_launches": 11, "ratio_cold": 3.0}
        row = {
            "case": case.name,
            "group": case.group,
            "does": case.does,
            "requests": len(case.requests),
            "cached_tokens": case.cached,
            "new_tokens": case.new,
            "stride": case.stride,
            "pool_slots": 1000 * case.pool_times,
            "ours_ms": ms,
            "ours_p10_ms": 0.9 * ms,
            "ours_p90_ms": 1.1 * ms,
            **(beside if peer and case in MAIN else {"peer_ms": None, "ratio": None}),
            "launches": 5,
            **moved,
            "in_l2": False,
            "eager_ms": 2 * ms,
            "gather_ms": None,
            "parts": [{"part": name, **times, **moved} for name in ("HEAD", "write", "TAIL")],
        }
        rows.append(row)
    return {
        "device": "CPU (none)",
        "versions": {"kv-canary": "0.1.0", "torch": "2.11.0", "triton": None},
        "commit": "0123456789ab",
        "backend": "triton",
        "mode": "CUDA graph",
        "shapes": "whole",
        "rounds": 7,
        "copy_tb_s": 4.25,
        "empty_ms": 0.008,
        "peer": {"name": "sglang", "version": "0.5.23"} if peer else None,
        "cases": rows,
        "skipped": [],
        "failed": [],
    }


def command(*arguments: str | Path) -> Any:
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A result in a file."""
    path = tmp_path / "kept.json"
    path.write_text(json.dumps(made_up()))
    return path


def test_the_page_shows_the_kept_result() -> None:
    kept = RESULTS / "h200_peer.json"
    result = json.loads(kept.read_text()) if kept.exists() else None
    drawn = {f"../bench/results/{n}": text for n, text in plots.CAPTIONS.items() if (RESULTS / n).exists()}
    page = ROOT / "docs/performance.md"
    told = "run `kv-canary bench --from bench/results/h200_peer.json --plots bench/results --page docs/performance.md`"
    assert page.read_text() == tables.place(page, result, drawn), told


def test_markdown_has_a_row_for_each_case() -> None:
    lines = tables.markdown(made_up()).splitlines()
    assert lines[0] == "| case | ours, ms | p10-p90 | SGLang 0.5.23, ms | ratio | launches | MB needed | of copy |"
    assert "| decode 256x4096 | 0.2500 | 0.2250-0.2750 | 1 | 4.0x | 5/11 | 1 | 25 % |" in lines
    assert "| prefill 1x8192 | 0.8750 | 0.7875-0.9625 | 3.5 | 4.0x \\* | 5/11 | 1 | 25 % |" in lines
    assert len([line for line in lines if line.startswith("| ")]) == 1 + len(MAIN)
    assert {line.count("|") for line in lines if line.startswith("|")} == {9}
    assert "copy 4.25 TB/s" in lines[-1]
    assert lines[-3] == f"\\* {tables.IN_ONE_THREAD}"
    alone = tables.markdown(made_up(peer=False))
    assert "SGLang" not in alone
    assert "\\*" not in alone


def test_the_share_in_pages_of_16_is_told() -> None:
    (line,) = tables.headlines(made_up())
    assert "verify in pages of 16, by necessary bytes: HEAD 25 % (50 % by sectors), TAIL 25 %" in line
    assert tables.headlines(made_up() | {"cases": []}) == []


def test_a_page_is_filled_between_its_marks_again_and_again(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"above\n{tables.BEGIN}\nold\n{tables.END}\nbelow\n")
    filled = tables.place(page, made_up(), {"a.svg": "A picture"})
    assert filled.startswith(f"above\n{tables.BEGIN}\n\n| case |")
    assert filled.endswith(f"![A picture](a.svg)\n{tables.END}\nbelow\n")
    assert "old" not in filled
    page.write_text(filled)
    assert tables.place(page, made_up(), {"a.svg": "A picture"}) == filled
    assert tables.place(page, None, {}) == f"above\n{tables.BEGIN}\n{tables.END}\nbelow\n"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="--page must be"):
        tables.place(page, None, {})


def test_pictures_are_drawn_and_drawn_the_same_again(tmp_path: Path) -> None:
    made = plots.draw(made_up(), tmp_path / "a")
    assert [path.name for path in made] == list(plots.CAPTIONS)
    again = plots.draw(made_up(), tmp_path / "b")
    assert [p.read_bytes() for p in made] == [p.read_bytes() for p in again]
    ratios = (tmp_path / "a" / "ratio-to-sglang.svg").read_text()
    assert all(case.name in ratios for case in MAIN)
    # Nothing is painted behind: the page's own ground shows.
    assert "#ffffff" not in ratios


def test_the_kept_pictures_are_those_of_the_kept_result(tmp_path: Path) -> None:
    result = json.loads((RESULTS / "h200_peer.json").read_text())
    told = "run `kv-canary bench --from bench/results/h200_peer.json --plots bench/results --page docs/performance.md`"
    for name, words in drawn(result, tmp_path).items():
        assert words == words_of(RESULTS / name), told
        assert "NVIDIA H200; commit" in words
    assert sorted(path.name for path in RESULTS.glob("*.svg")) == sorted(plots.CAPTIONS)


def words_of(picture: Path) -> str:
    return " ".join(html.unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)", picture.read_text()))


def drawn(result: dict[str, Any], folder: Path) -> dict[str, str]:
    """The words of each picture that a result is drawn as, by its name."""
    return {path.name: words_of(path) for path in plots.draw(result, folder)}


def test_a_picture_says_what_was_measured_where_and_of_which_commit(tmp_path: Path) -> None:
    for name, words in drawn(made_up(), tmp_path / "undated").items():
        assert plots.CAPTIONS[name] in words
        assert "CPU (none); commit 0123456789ab; CUDA graph; medians of 7." in words
        assert "peer" not in words
        if name in ("time-against-cached-tokens.svg", "ratio-to-sglang.svg"):
            assert "SGLang 0.5.23" in words
    dated = made_up() | {"date": "2026-05-04"}
    dated["cases"][0] |= {"commit": "fedcba987654", "date": "2026-05-06"}
    dated["cases"][1] |= {"commit": "older"}
    words = drawn(dated, tmp_path / "dated")["ratio-to-sglang.svg"]
    newest = f"0123456789ab measured 2026-05-04 ({len(MAIN) - 2} cases)"
    assert f"commit fedcba987654 measured 2026-05-06 (1 case), older (1 case), {newest}" in words


def test_what_is_far_beyond_the_others_is_told_and_not_drawn(tmp_path: Path) -> None:
    result = made_up()
    far = {"write 8192x2KiB, all bytes": 8015.0, "scatter 256x4096": 40.4, "prefill 1x8192": 905.0, "mixed": 43.0}
    for row in result["cases"]:
        row["ratio"] = row["ratio"] and far.get(row["case"], row["ratio"])
    words = drawn(result, tmp_path)["ratio-to-sglang.svg"]
    assert f"* {tables.IN_ONE_THREAD}" in words
    told = "Too far out to be drawn: write 8192x2KiB, all bytes: 8015x *; scatter 256x4096: 40.4x."
    before, found, after = words.partition(told)
    assert found
    # On the axis without them decoding is not squeezed; that with them is logarithmic, and has dots in place of bars.
    assert "scatter" not in before + after
    assert "905x" in before
    assert re.findall(r"\b(?:10|100|1,000)(?= )", before) == ["10", "100", "1,000"]


def test_only_what_the_result_has_is_drawn(tmp_path: Path) -> None:
    made = plots.draw(made_up(peer=False), tmp_path)
    assert "ratio-to-sglang.svg" not in [path.name for path in made]
    assert plots.draw(made_up() | {"cases": []}, tmp_path) == []
    decodes = made_up()
    decodes["cases"] = decodes["cases"][:6]
    words = drawn(decodes, tmp_path / "decodes")["ratio-to-sglang.svg"]
    assert "one thread" not in words


def test_help_teaches_and_the_list_lists() -> None:
    assert "Examples:" in command("--help").output
    text = command("ops", "--help").output
    assert "Examples:" in text
    assert "Exit codes: 0 all is well, 1 a result was wrong, 2 misuse." in text
    lines = command("--list").output.splitlines()
    assert [line[15:] for line in lines[:-1]] == [case.name for case in CASES]
    assert "--traces" in lines[-1]
    assert command("stride", "--list").output.count("stride ") == 10


@on_cpu
def test_a_quick_run_for_machines_and_for_people(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "result.json"
    shown = command("decode 8x512", "move", "--backend", "reference", "--json", path)
    assert shown.exit_code == 0, shown.output
    assert re.search(r"^ decode 8x512 +\d", shown.stdout, re.M)
    result = json.loads(path.read_text())
    assert [row["case"] for row in result["cases"]] == ["decode 8x512", "move"]
    assert result["shapes"] == "cut down"
    machines = command("move", "--backend", "reference", "--json", "-")
    assert json.loads(machines.stdout)["cases"][0]["case"] == "move"


@on_cpu
def test_a_wrong_result_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise checking.CheckFailed("it is broken")

    monkeypatch.setattr(checking, "check", failing)
    done = command("move", "--backend", "reference")
    assert done.exit_code == 1
    assert "failed: move: it is broken" in done.output


def test_a_kept_result_is_shown_drawn_and_put_into_a_page(kept: Path, tmp_path: Path) -> None:
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text(f"{tables.BEGIN}\n{tables.END}\n")
    done = command("--from", kept, "--table", "--plots", tmp_path / "drawn", "--page", page)
    assert done.exit_code == 0, done.output
    assert done.stdout == tables.markdown(made_up())
    assert page.read_text().count("](../drawn/") == len(plots.CAPTIONS)
    shown = command("--from", kept)
    assert "decode 256x4096, stride 32" in shown.stdout
    assert "share of the copy bandwidth" in shown.stdout


def test_further_results_add_the_cases_that_the_first_lacks(kept: Path, tmp_path: Path) -> None:
    whole = made_up() | {"date": "2026-05-04", "sources": {"kernels": "1234"}}
    part, rest, other = tmp_path / "part.json", tmp_path / "rest.json", tmp_path / "other.json"
    newer = [{**row, "ours_ms": 0.5} for row in whole["cases"][:2]]
    part.write_text(json.dumps(whole | {"commit": "newer", "cases": newer}))
    rest.write_text(json.dumps(whole | {"commit": "older", "date": "2026-05-03"}))
    other.write_text(json.dumps(whole | {"device": "another"}))
    done = command("--from", part, "--from", rest, "--json", tmp_path / "all.json")
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "all.json").read_text())
    of = {"commit": "older", "date": "2026-05-03", "sources": whole["sources"]}
    older = [{**of, **row} for row in whole["cases"][2:]]
    assert result == whole | {"commit": "newer", "cases": newer + older}
    assert (
        f"commit newer measured 2026-05-04 (2 cases), older measured 2026-05-03 ({len(older)} cases)"
        in tables.markdown(result)
    )
    refused = command("--from", part, "--from", other)
    assert refused.exit_code == 2
    assert "device" in refused.output


def test_a_kept_result_that_failed_still_says_so(kept: Path) -> None:
    kept.write_text(json.dumps(made_up() | {"failed": [{"case": "x", "why": "broken"}]}))
    assert command("--from", kept).exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["nope"], "nope"),
        (["--peer", "nope"], "--peer"),
        (["--rounds", "0"], "--rounds"),
        (["--from", "no/such/file"], "no/such/file"),
        (["--list", "--traces", "no/such/folder"], "no/such/folder"),
        (["move", "--json", "-", "--table"], "--table"),
    ],
)
def test_misuse_is_exit_code_2(arguments: list[str], word: str) -> None:
    done = command(*arguments)
    assert done.exit_code == 2
    assert word in done.output


def test_a_result_is_not_measured_too(kept: Path) -> None:
    done = command("--from", kept, "move")
    assert done.exit_code == 2
    assert "--from" in done.output


@on_cpu
@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="the peer is here")
def test_a_peer_that_is_not_here_is_misuse() -> None:
    done = command("move", "--peer", "sglang")
    assert done.exit_code == 2
    assert "PYTHONPATH" in done.output


@on_cpu
def test_a_device_that_is_not_here_is_misuse() -> None:
    done = command("move", "--device", "cuda")
    assert done.exit_code == 2
    assert "CUDA GPU" in done.output
