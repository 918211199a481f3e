"""Kernels compile for a GPU that is not here, and what does not is told."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kv_canary import kernels
from kv_canary.cli import main
from kv_canary.specs import all_specs

BAD = """
import torch
import triton
import triton.language as tl

from hypothesis import strategies as st

from kv_canary.backends import register
from kv_canary.difftest.strategies import register_cases
from kv_canary.specs.interface import KernelSpec, TensorSpec

SPEC = KernelSpec(
    name="halve",
    doc="Halve numbers.",
    arguments={"x": TensorSpec(dtype=torch.int64, shape=("n",), role="inout", doc="the numbers")},
)


@register(SPEC, backend="reference")
def reference(*, x):
    x //= 2


@triton.jit
def _halve(x_ptr, SIZE: tl.constexpr):
    # The interpreter takes any size; the compiler only powers of two.
    lane = tl.arange(0, SIZE)
    tl.store(x_ptr + lane, tl.load(x_ptr + lane) // 2)


@register(SPEC, backend="triton")
def halve(*, x):
    _halve[(1,)](x, SIZE=x.shape[0])


@register_cases("halve")
def cases():
    return st.sampled_from([3, 5, 6]).map(lambda n: {"x": torch.arange(n)})
"""


def python(*arguments: str, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-P", "-W", "ignore", *arguments],
        env=inherited | {"TRITON_CACHE_DIR": str(tmp_path / "cache")} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def run(*arguments: str, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "kv_canary", "difftest", "compile", *arguments, tmp_path=tmp_path, **environment)


# Of every op as many calls as it takes to launch each of its kernels: a large one, drawn ones, and a move of more slots
# than one program takes.
ONCE_EACH = """
import json, sys
from dataclasses import asdict

import torch

from kv_canary.difftest.compiling import calls_of, compile_calls, prepare
from kv_canary.difftest.search import draw_cases
from kv_canary.specs import all_specs, get_spec

GPU = (9, 0)


def calls(op):
    yield from calls_of(op, examples=0, seed=0, capability=GPU)[:1]
    drawn = draw_cases(op, examples=4, seed=0)
    yield from drawn
    if op == "move":
        slots = torch.zeros(5000, dtype=torch.int64)
        yield {**drawn[0], "src": slots, "dst": slots, "staged": torch.zeros(5000, 4, dtype=torch.int64)}


prepare()
torch.set_num_threads(1)
wanted, found = json.loads(sys.argv[1]), []
for op in all_specs():
    missing = set(wanted[op])
    for call in calls(op):
        kernels = list(compile_calls(get_spec(op), [call], capability=GPU))
        missing.difference_update(kernel.name for kernel in kernels)
        found.extend(kernels)
        if not missing:
            break
json.dump([asdict(kernel) for kernel in found], sys.stdout)
"""


def launched_kernels() -> set[tuple[str, str]]:
    """Return the kernels that are launched, each with its op, as the sources say it."""
    folder = Path(kernels.__file__).parent
    found = {
        (file.stem, name)
        for file in folder.glob("*.py")
        for name in re.findall(r"^ +(\w+)\[.+\]\(", file.read_text(), re.M)
    }
    return {(op, name) for op, name in found if op in all_specs()}


def check_resources(compiled: list[dict[str, Any]]) -> None:
    for kernel in compiled:
        assert 0 < kernel["registers"] <= 255
        # Of a source whose tokens are covered whole, by 584 bytes, more words are in flight than there are registers.
        assert kernel["spilled"] <= MOST_SPILLED, kernel


# Bytes of a thread.
MOST_SPILLED = 640


def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    wanted: dict[str, list[str]] = {}
    for op, name in launched_kernels():
        wanted.setdefault(op, []).append(name)
    done = python("-c", ONCE_EACH, json.dumps(wanted), tmp_path=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    compiled = json.loads(done.stdout)
    assert "says" not in {field for kernel in compiled for field in kernel}, compiled
    assert {(kernel["op"], kernel["name"]) for kernel in compiled} == launched_kernels()
    check_resources(compiled)


@pytest.mark.every_day("retire")
@pytest.mark.parametrize("op", sorted(all_specs()))
def test_every_variant_compiles_for_a_gpu_and_keeps_its_registers(op: str, tmp_path: Path) -> None:
    file = tmp_path / "kernels.json"
    done = run("--op", op, "--examples", "4", "--json", str(file), tmp_path=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    compiled = json.loads(file.read_text())
    assert {kernel["op"] for kernel in compiled} == {op}
    check_resources(compiled)


def test_what_does_not_compile_is_told_with_the_words_of_the_compiler(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    done = run("--import", str(tmp_path / "bad.py"), "--op", "halve", tmp_path=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "halve: _halve does not compile" in done.stdout
    assert "power of 2" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "interpret", "says"),
    [
        (("--op", "nothing"), "0", "nothing"),
        (("--capability", "90"), "0", "must be two numbers"),
        ((), "1", "TRITON_INTERPRET"),
    ],
)
def test_misuse_is_told(arguments: tuple[str, ...], interpret: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    done = CliRunner().invoke(main, ["difftest", "compile", *arguments])
    assert done.exit_code == 2, done.output
    assert says in done.output
