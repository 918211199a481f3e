"""docs/my-text-is-wrong.md: what it shows is what its example does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE, EXAMPLE = ROOT / "docs/my-text-is-wrong.md", ROOT / "examples/wrong_text.py"


def run(*arguments: str, watched: tuple[str, ...] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the example, where `watched` says so by `kv-canary run` with these options."""
    program = [sys.executable, "-P", str(EXAMPLE), *arguments]
    before = [] if watched is None else [sys.executable, "-P", "-m", "kv_canary", "run", *watched, "--"]
    return subprocess.run([*before, *program], capture_output=True, text=True, timeout=120, check=False)


def shown(sign: str) -> str:
    """Return the block of the page that begins with this command."""
    (block,) = re.findall(rf"```\n\$ {re.escape(sign)}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return block


def test_the_bug_is_silent_without_the_canary() -> None:
    found = run()
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout == shown(".venv/bin/python -P examples/wrong_text.py")


def test_the_canary_finds_it_and_says_what_the_page_says() -> None:
    found = run(watched=())
    assert found.returncode == 1
    assert shown(".venv/bin/kv-canary run -- .venv/bin/python -P examples/wrong_text.py") in found.stderr
    (incident,) = re.findall(r"```\n(incident 1: .*)\n```", PAGE.read_text())
    assert f"kv-canary:   {incident}\n" in found.stderr


def test_the_step_that_found_it_ends_and_leaves_a_bundle(tmp_path: Path) -> None:
    found = run(watched=("--mode", "raise", "--set", f"bundles={tmp_path}"))
    assert found.returncode == 1
    assert "CanaryViolationError" in found.stderr
    (bundle,) = tmp_path.glob("incident-*.json")
    told = subprocess.run(
        [sys.executable, "-P", "-m", "kv_canary", "report", str(bundle)], capture_output=True, text=True, check=False
    )
    assert (told.returncode, told.stdout.count("(freed)")) == (1, 3)


def test_the_fix_is_clean() -> None:
    found = run("--fixed", watched=())
    wanted = shown(".venv/bin/kv-canary run -- .venv/bin/python -P examples/wrong_text.py --fixed")
    assert found.returncode == 0
    assert [line.strip() for line in (found.stdout + found.stderr).splitlines()] == [
        "alone:         ejjjnnnw",
        "beside others: ejjjnnnw",
        *(line for line in found.stderr.splitlines() if "verdict" in line),
    ]
    assert wanted.splitlines()[-1] in found.stderr


@pytest.mark.parametrize("line", ["in_use = {page for", "key = next(key for key, page"])
def test_the_lines_that_the_page_shows_are_the_examples(line: str) -> None:
    (quoted,) = [text.strip() for text in PAGE.read_text().splitlines() if text.strip().startswith(line)]
    assert quoted in EXAMPLE.read_text()
