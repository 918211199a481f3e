"""The pytest plugin in suites of others: where it finds an op, what it says of a difference, and that it harms none."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/your_own_kernel.py"
# Variables of those who run these tests. Where CI or BUILD_NUMBER is set, pytest repeats a failure in its summary.
OURS = ("TRITON_INTERPRET", "PYTHONPATH", "YOUR_KERNEL", "CI", "BUILD_NUMBER")


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a folder as a stranger does: nothing is set, and the plugin is found by its entry point."""
    kept = {k: v for k, v in os.environ.items() if k not in OURS}
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    whole = {**kept, **environment}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=whole, timeout=300, check=False)


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A package with a kernel, and a test of it."""
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(EXAMPLE, package / "gather.py")
    (tmp_path / "conftest.py").write_text("import sys\nsys.path.insert(0, '.')\n")
    (tmp_path / "test_gather.py").write_text(
        "import mine.gather\n\n\ndef test_gather(kv_canary_difftest):\n"
        "    kv_canary_difftest('paged_gather', examples=30)\n"
    )
    return tmp_path


def test_a_kernel_that_is_right_passes(suite: Path) -> None:
    found = run(suite)
    assert (found.returncode, "1 passed" in found.stdout) == (0, True), found.stdout + found.stderr


@pytest.mark.every_day("in CI")
@pytest.mark.parametrize("where", [{}, {"CI": "1"}], ids=["on a desk", "in CI"])
def test_one_that_is_wrong_fails_with_the_difference_and_a_line_that_replays_it(
    suite: Path, where: dict[str, str]
) -> None:
    found = run(suite, "--kv-canary-examples=200", "--kv-canary-seed=3", YOUR_KERNEL="wrong", **where)
    assert found.returncode == 1, found.stdout
    assert "kv-canary: paged_gather, seed 3:" in found.stdout
    # In CI pytest says it again in its summary.
    (line,) = set(re.findall(r"replay it: (.*)", found.stdout))
    environment = {**os.environ, "YOUR_KERNEL": "wrong", "PYTHONPATH": str(suite)}
    command = line.replace("kv-canary", f"{sys.executable} -P -m kv_canary", 1)
    again = subprocess.run(command, shell=True, cwd=suite, capture_output=True, text=True, env=environment, check=False)
    assert (again.returncode, "paged_gather" in again.stdout) == (1, True), again.stdout + again.stderr


def test_an_op_by_its_file_and_one_of_kv_canarys_own(suite: Path) -> None:
    (suite / "test_gather.py").write_text(
        "def test_by_file(kv_canary_difftest):\n"
        "    kv_canary_difftest('paged_gather', module='mine/gather.py', examples=10)\n\n\n"
        "def test_own(kv_canary_difftest):\n    kv_canary_difftest('retire', examples=10)\n\n\n"
        "def test_none(kv_canary_difftest):\n    kv_canary_difftest('no_such_op', module='mine/gather.py')\n"
    )
    found = run(suite)
    assert "2 passed" in found.stdout, found.stdout
    assert "1 failed" in found.stdout
    assert "kv-canary: no_such_op could not be tested:" in found.stdout


def test_a_suite_that_does_not_ask_for_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text(
        "import os, sys\n\n\ndef test_nothing():\n"
        "    assert 'torch' not in sys.modules and 'hypothesis' not in sys.modules\n"
        "    assert not any(name.startswith(('KV_CANARY', 'TRITON')) for name in os.environ)\n"
    )
    found = run(tmp_path, "-p", "no:hypothesispytest")
    assert "1 passed" in found.stdout, found.stdout
    assert "--kv-canary-examples" in run(tmp_path, "--help").stdout
