"""Kernels as others write them: tuned ones, outputs of NaN and of no dimension, arguments in capitals."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from kv_canary.cases.comparison import Mismatch, Outcome, place_in_span
from kv_canary.difftest.campaign import _file_name
from kv_canary.difftest.console import show_campaign

OWN = """
import torch
import triton
import triton.language as tl
from hypothesis import strategies as st

from kv_canary import register
from kv_canary.difftest.strategies import register_cases
from kv_canary.specs.interface import KernelSpec, TensorSpec


def declare(name, x, out):
    return KernelSpec(name=name, doc="Of an author's.", arguments={
        "x": TensorSpec(dtype=x[0], shape=x[1], doc="in"),
        "out": TensorSpec(dtype=out[0], shape=out[1], role="out", doc="out"),
    })


TUNED = declare("tuned", (torch.int32, ("n",)), (torch.int32, ("n",)))
NANS = declare("nans", (torch.float32, ("n",)), (torch.float32, ("n",)))
TOTAL = declare("total", (torch.int32, ("n",)), (torch.int32, ()))


@register(TUNED, backend="reference")
@register(NANS, backend="reference")
@register(NANS, backend="triton")
def copied(*, x, out):
    out.copy_(x)


@triton.autotune(configs=[triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})], key=["n"])
@triton.jit
def _copy(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < n, other=0), mask=i < n)


@register(TUNED, backend="triton")
def tuned(*, x, out):
    _copy[lambda m: (triton.cdiv(len(x), m["BLOCK"]),)](x, out, len(x))


@register(TOTAL, backend="reference")
def total(*, x, out):
    out.fill_(int(x.sum()))


@register(TOTAL, backend="triton")
def one_more(*, x, out):
    out.fill_(int(x.sum()) + 1)


for name, dtype, shape, fill in (
    ("tuned", torch.int32, None, 0), ("nans", torch.float32, None, float("nan")), ("total", torch.int32, (), 0)
):
    @register_cases(name)
    @st.composite
    def cases(draw, dtype=dtype, shape=shape, fill=fill):
        n = draw(st.integers(1, 70))
        own = (n,) if shape is None else shape
        return {"x": torch.arange(n).to(dtype), "out": torch.full(own, fill, dtype=dtype)}
"""


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "kv_canary", "difftest", *arguments]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)


def test_tuned_kernels_and_nans_pass_and_an_output_of_no_dimension_is_explained(tmp_path: Path) -> None:
    own, found, told = tmp_path / "own.py", tmp_path / "found", tmp_path / "told.json"
    own.write_text(OWN)
    options = ("--import", str(own), "--op", "tuned", "--op", "nans", "--op", "total", "--examples", "12")
    done = _run("run", *options, "--findings", str(found), "--json", str(told))
    assert done.returncode == 1, done.stdout + done.stderr
    findings = json.loads(told.read_text())["findings"]
    assert [finding["op"] for finding in findings] == ["total"], findings
    [case] = found.glob("*.kvcase")
    again = _run("replay", str(case), "--import", str(own), "--no-trace")
    assert again.returncode == 1
    assert "Traceback" not in again.stderr
    assert "It fails" in again.stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--device", "cuda"), "device must be one that is here"),
        (("--plant", "no_such"), "plant must be one of"),
    ],
)
@pytest.mark.parametrize("command", ["replay", "minimize"])
def test_what_cannot_run_here_is_misuse_and_no_finding(
    command: str, options: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device here")
    corpus = Path(__file__).parents[2] / "difftest" / "corpus"
    case = min(corpus.glob("*.kvcase"))
    where = () if command == "replay" else ("--output", str(tmp_path / "smaller.kvcase"))
    done = _run(command, str(case), *options, *where)
    assert (done.returncode, list(tmp_path.iterdir())) == (2, []), done.stdout + done.stderr
    assert says in " ".join(done.stderr.split())


def test_findings_whose_names_differ_in_capitals_are_files_of_their_own() -> None:
    paths = ("K", "V", "k", "v", "a.b", "a-b", "a b")
    names = [
        _file_name(Mismatch(Outcome.BYTES_DIFFER, op="store", backend="triton", path=path, detail="")).lower()
        for path in paths
    ]
    assert len(set(names)) == len(paths)


def test_brackets_in_what_a_harness_raises_are_text() -> None:
    result: Any = SimpleNamespace(
        stats={},
        cases=0,
        seconds=1.0,
        restarts=0,
        interrupted=False,
        coverage=SimpleNamespace(features=()),
        untried=[],
        findings={},
        errors=["ValueError: must be any of [/models/a, /models/b]"],
    )
    campaign: Any = SimpleNamespace(device="cpu")
    console = Console(record=True, width=120, file=io.StringIO())
    show_campaign(console, campaign, result, {}, all_pairs=False)
    assert "[/models/a, /models/b]" in console.export_text()


def test_places_in_rows_that_lie_apart_are_those_of_the_tensor() -> None:
    whole = torch.arange(4 * 2 * 3 * 5).view(4, 2, 3, 5)
    like = whole[:, 0]
    first = like.storage_offset()
    for place in np.ndindex(*like.shape):
        assert place_in_span(like, int(like[place]) - first) == str(list(place))
    assert place_in_span(like, 3 * 5).startswith("in a gap")
