"""Kernels compile for a GPU that is not here, and what does not is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def run(*arguments: str, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-m", "kv_canary", "difftest", "compile", *arguments],
        env=inherited | {"TRITON_CACHE_DIR": str(tmp_path / "cache")} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


@pytest.mark.parametrize("op", sorted(all_specs()))
def test_every_kernel_compiles_for_a_gpu_and_keeps_its_registers(op: str, tmp_path: Path) -> None:
    file = tmp_path / "kernels.json"
    done = run("--op", op, "--examples", "4", "--json", str(file), tmp_path=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = json.loads(file.read_text())
    assert kernels
    for kernel in kernels:
        assert kernel["op"] == op
        assert 0 < kernel["registers"] <= 255
        # Of a source whose tokens are covered whole, by 584 bytes, more words are in flight than there are registers.
        assert kernel["spilled"] <= MOST_SPILLED, kernel


# Bytes of a thread.
MOST_SPILLED = 640


def test_what_does_not_compile_is_told_with_the_words_of_the_compiler(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    done = run("--import", str(tmp_path / "bad.py"), "--op", "halve", tmp_path=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "halve: _halve does not compile" in done.stdout
    assert "power of 2" in done.stdout


def test_misuse_is_told(tmp_path: Path) -> None:
    for arguments, environment, says in (
        (("--op", "nothing"), {}, "nothing"),
        (("--capability", "90"), {}, "must be two numbers"),
        ((), {"TRITON_INTERPRET": "1"}, "TRITON_INTERPRET"),
    ):
        done = run(*arguments, tmp_path=tmp_path, **environment)
        assert done.returncode == 2, done.stdout + done.stderr
        assert says in done.stderr
