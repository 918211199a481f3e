"""The command line: help that teaches, exit codes that mean something, output for machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kv_canary.cli import main
from kv_canary.specs import all_specs
from kv_canary.specs.document import ops_page


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["ops", "--help"]])
def test_help_teaches(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0
    assert "Usage:" in result.output
    assert len(result.output.splitlines()) > 8


def test_ops_lists_every_op_with_its_contract() -> None:
    result = CliRunner().invoke(main, ["ops"])
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.output.splitlines()] == list(all_specs())


def test_ops_for_machines() -> None:
    result = CliRunner().invoke(main, ["ops", "--json"])
    assert json.loads(result.output) == {name: list(spec.arguments) for name, spec in all_specs().items()}


def test_the_page_of_ops_is_up_to_date() -> None:
    page = Path(__file__).parents[1] / "docs" / "ops.md"
    assert page.read_text() == ops_page(), "run `kv-canary ops --markdown > docs/ops.md`"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["ops", "nope"], "nope"),
        (["demo", "--backend", "cuda"], "--backend"),
        (["demo", "--requests", "1"], "--requests"),
        (["demo", "--prompts", "no/such/file"], "no/such/file"),
        (["nope"], "nope"),
    ],
)
def test_misuse_exits_2_and_says_what_was_wrong(arguments: list[str], word: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert word in result.output


def test_a_trace_that_is_none_is_misuse(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("a,b\n1,2\n")
    result = CliRunner().invoke(main, ["demo", "--trace", str(trace)])
    assert result.exit_code == 2
    assert "Azure" in result.output
