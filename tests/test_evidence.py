"""Results say what code they are of, and pages say so of what they quote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kv_canary.cli import main
from kv_canary.commands import evidence, evidence_pages

ROOT = Path(__file__).parents[1]
SOURCE = b'"""Docs."""\n\nX = 1  # one\n\n\ndef f() -> str:\n    """More."""\n    return "# no comment"\n'


def test_comments_docstrings_and_blank_lines_change_no_digest() -> None:
    other = b'"""Other docs."""\nX = 1\ndef f() -> str:\n    """Less,\n\n    in lines."""\n\n'
    other += b'    # Why.\n    return "# no comment"\n'
    assert evidence.code_of(SOURCE) == b'X = 1\ndef f() -> str:\n    return "# no comment"'
    assert evidence.digest({"a.py": SOURCE}) == evidence.digest({"a.py": other})


@pytest.mark.parametrize(
    "change",
    [
        {"a.py": SOURCE.replace(b"X = 1", b"X = 2")},
        {"a.py": SOURCE.replace(b"# no", b"# a")},
        {"b.py": SOURCE},
        {"a.py": SOURCE, "b.toml": b""},
    ],
)
def test_every_change_of_code_changes_the_digest(change: dict[str, bytes]) -> None:
    assert evidence.digest(change) != evidence.digest({"a.py": SOURCE})


def test_every_result_has_a_kind_and_every_source_is_there() -> None:
    known = {name for kind in evidence.KINDS.values() for name in kind.files}
    assert {path.name for path in evidence.RESULTS.glob("*.json")} <= known
    for kind in evidence.KINDS:
        assert all(len(found) == 16 for found in evidence.digests(kind).values())
        assert all(evidence.read(source) for source in evidence.KINDS[kind].sources)


@pytest.mark.parametrize("path", sorted(evidence.RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_kept_results_name_their_device(path: Path) -> None:
    facts = json.loads(path.read_text())
    # A table is a list of rows; the first says it for all, or each does.
    rows = facts if isinstance(facts, list) else [facts]
    devices = [row["device"] for row in rows if "device" in row]
    assert "device" in rows[0]
    for card in ("H100", "H200"):
        assert {card in device for device in devices} == {path.name.startswith(card.lower())}


@pytest.mark.parametrize("path", sorted(evidence.RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_kept_results_are_those_of_runs_that_were_as_they_should_be(path: Path) -> None:
    """A figure of a run whose own checks have failed is not one of what its row says."""
    facts = json.loads(path.read_text())
    rows = facts if isinstance(facts, list) else [facts]
    for row in rows:
        assert not row.get("checks")
        assert row.get("ok", True)
        failed = row.get("failed")
        assert not (any(failed.values()) if isinstance(failed, dict) else failed)


def test_the_runtime_is_without_the_tools_that_no_engine_runs_and_without_adapters() -> None:
    names = set(evidence.read("kv_canary"))
    assert {"kv_canary/runtime/manager.py", "kv_canary/specs/verify.py"} <= names
    apart = tuple(f"kv_canary/{name}" for name in ("commands", "demo", "bench", "engines"))
    assert not [n for n in names if n.startswith(apart)]


@pytest.mark.parametrize("kind", ["sglang_detection", "vllm_detection", "transformers"])
def test_what_is_of_an_engine_rests_on_its_adapter(kind: str) -> None:
    engine = kind.partition("_")[0]
    mine = {name for source in evidence.KINDS[kind].sources for name in evidence.read(source)}
    assert any(name.startswith(f"kv_canary/engines/{engine}") for name in mine)
    others = {"sglang", "vllm", "transformers"} - {engine}
    assert not [name for name in mine if name.startswith(tuple(f"kv_canary/engines/{other}" for other in others))]


def test_the_pages_are_as_the_results_are_and_say_what_is_older() -> None:
    done = CliRunner().invoke(main, ["evidence", "--json"])
    told = json.loads(done.output)
    assert (done.exit_code, told["problems"]) == (0, []), told["problems"]
    assert {r["result"] for r in told["results"]} == {path.name for path in evidence.RESULTS.glob("*.json")}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one result of the code that is here, and a page that quotes it."""
    results = tmp_path / "bench/results"
    results.mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("nothing\n")
    keep(results, {"device": "CPU", "commit": "abc1234", "sources": evidence.digests("host")})
    (tmp_path / "docs/page.md").write_text(
        "As `h200_host.json` says.\n\n"
        "<!-- kv-canary evidence status host: begin -->\n<!-- kv-canary evidence: end -->\n"
    )
    for module in (evidence, evidence_pages):
        monkeypatch.setattr(module, "ROOT", tmp_path)
        monkeypatch.setattr(module, "RESULTS", results)
    return tmp_path


def keep(results: Path, content: Any) -> None:
    (results / "h200_host.json").write_text(json.dumps(content))


def run(*arguments: str) -> tuple[int, list[str], Any]:
    done = CliRunner().invoke(main, ["evidence", "--json", *arguments])
    told = json.loads(done.output)
    return done.exit_code, told["problems"], told["results"]


def test_a_page_says_by_itself_that_a_result_is_of_an_older_version(checkout: Path) -> None:
    page = checkout / "docs/page.md"
    assert run()[0] == 1
    assert run("--write")[:2] == (0, [])
    assert "of this code (abc1234)" in page.read_text()
    keep(checkout / "bench/results", {"device": "CPU", "commit": "abc1234", "sources": {"kv_canary": "0" * 16}})
    code, problems, (result,) = run()
    assert (code, result["changed"]) == (1, list(evidence.KINDS["host"].sources))
    assert problems == ["docs/page.md is not as the results are: run kv-canary evidence --write"]
    assert run("--write")[:2] == (0, [])
    assert "measured on an older version (abc1234)" in page.read_text()


def test_a_page_that_quotes_a_result_without_a_block_is_a_problem(checkout: Path) -> None:
    run("--write")
    (checkout / "docs/other.md").write_text("120 us, see `bench/results/h200_host.json`.\n")
    code, problems, _ = run()
    assert (code, len(problems)) == (1, 1)
    assert problems[0].startswith("docs/other.md quotes h200_host.json")


def test_a_page_that_quotes_a_result_that_is_not_there_is_a_problem(checkout: Path) -> None:
    run("--write")
    quoting = "As `bench/results/h100_host.json` says; `kv-canary bench seals --json h100_seals.json`.\n"
    (checkout / "docs/other.md").write_text(quoting)
    code, problems, _ = run()
    assert code == 1
    assert "docs/other.md quotes h100_host.json, which is not in bench/results" in problems
    assert not [p for p in problems if "h100_seals.json, which" in p]


def test_rows_of_two_runs_on_one_card_stand_beside_the_steps_of_their_own_run(checkout: Path) -> None:
    common = {"model": "1b", "phase": "decode", "shape": "64x2048", "device": "NVIDIA H200", "commit": "abc1234"}
    common |= {"sources": evidence.digests("engine_cost"), "n": 6, "ratio": 0.9, "low": 0.8, "high": 1.0, "best": 0.9}
    for name, step in (("h200_engine_cost", 2.55), ("h200_engine_cost_more", 6.25)):
        rows = [
            {**common, "mode": mode, "step_ms": step, "host_us": 1.0, "stream_us": None} for mode in ("none", "ours")
        ]
        (checkout / f"bench/results/{name}.json").write_text(json.dumps(rows))
    page = checkout / "docs/page.md"
    page.write_text("<!-- kv-canary evidence engine_cost: begin -->\n<!-- kv-canary evidence: end -->\n")
    assert run("--write")[:2] == (0, [])
    steps = [line.split("|")[3].strip() for line in page.read_text().splitlines() if "kv-canary |" in line]
    assert steps == ["2.55", "6.25"]


def test_a_planted_bug_that_a_campaign_did_not_find_is_told_where_the_others_are(checkout: Path) -> None:
    planted = [
        {"kind": "off by one", "found_after_s": [3.14, None, 59.9], "median_s": 59.9},
        {"kind": "a window shifted", "found_after_s": [None, None, None], "median_s": None},
    ]
    result = {"device": "CPU", "commit": "abc1234", "sources": evidence.digests("planted"), "planted": planted}
    (checkout / "bench/results/planted.json").write_text(json.dumps(result))
    page = checkout / "docs/page.md"
    page.write_text("<!-- kv-canary evidence planted: begin -->\n<!-- kv-canary evidence: end -->\n")
    assert run("--write")[:2] == (0, [])
    lines = page.read_text().splitlines()
    assert "| off by one | 3.1, not found, 59.9 | 59.9 |" in lines
    assert "| a window shifted | not found, not found, not found |  |" in lines


def test_a_result_without_digests_is_of_an_older_version(checkout: Path) -> None:
    keep(checkout / "bench/results", {"device": "CPU"})
    (result,) = run("--write")[2]
    assert result["changed"] == list(evidence.KINDS["host"].sources)
    assert "measured on an older version (unknown commit)" in (checkout / "docs/page.md").read_text()


def test_a_result_of_several_runs_is_as_old_as_the_oldest(checkout: Path) -> None:
    new = {"device": "CPU", "commit": "abc1234", "sources": evidence.digests("host")}
    keep(checkout / "bench/results", [new, {"figure": 1}])
    assert run("--write")[2][0]["changed"] == []
    for older in ({}, {**new["sources"], "kernels": "0" * 16}):
        keep(checkout / "bench/results", [new, {"figure": 1}, {"commit": "def5678", "sources": older}])
        (result,) = run("--write")[2]
        assert "kernels" in result["changed"]
        assert "in part measured on an older version (def5678)" in (checkout / "docs/page.md").read_text()
    keep(checkout / "bench/results", [{**new, "sources": older}, {"commit": "def5678", "sources": older}])
    assert run("--write")[0] == 0
    assert "CPU, measured on an older version (abc1234, def5678)" in (checkout / "docs/page.md").read_text()


def test_a_case_that_another_run_has_measured_is_as_old_as_that(checkout: Path) -> None:
    new = {"device": "CPU", "commit": "abc1234", "sources": evidence.digests("host")}
    older = {"commit": "def5678", "sources": {**new["sources"], "kernels": "0" * 16}}
    keep(checkout / "bench/results", {**new, "cases": [{"case": "a"}]})
    assert run("--write")[2][0]["changed"] == []
    keep(checkout / "bench/results", {**new, "cases": [{"case": "a"}, {"case": "b", **older}]})
    assert run("--write")[2][0]["changed"] == ["kernels"]
    assert "in part measured on an older version (def5678)" in (checkout / "docs/page.md").read_text()


def test_without_a_checkout_it_is_misuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence_pages, "RESULTS", tmp_path / "none")
    done = CliRunner().invoke(main, ["evidence"])
    assert done.exit_code == 2
    assert "must run in a checkout" in done.output


@pytest.mark.parametrize(("more", "on"), [({}, "H200"), ({"unfinished": True}, "H200, cut short")])
def test_rows_of_a_run_that_was_cut_short_say_so(
    more: dict[str, bool], on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"mode": "none", **more}, {"mode": "ours"}]
    monkeypatch.setattr(evidence_pages, "load", lambda name: rows)
    name = "h200_engine_cost.json"
    served, names = evidence_pages._served({name: object()}, "engine_cost")  # type: ignore[dict-item]
    assert [(row["mode"], row["run"], row["file"]) for row in served] == [("none", on, name), ("ours", on, name)]
    assert names == [name]
