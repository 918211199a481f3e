"""Tolerances: what agrees, what does not, and what is said of how far it lies off."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kv_canary as kc
from kv_canary.cases.casefile import case_file
from kv_canary.cases.comparison import Mismatch, Outcome
from kv_canary.difftest.decode import differences
from kv_canary.difftest.runner import check_case
from kv_canary.specs.document import op_section
from kv_canary.specs.interface import KernelSpec, TensorSpec
from kv_canary.specs.tolerance import Tolerance, distance

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/fp16_attention.py"
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
NAN, INF = math.nan, math.inf


def agree(tolerance: Tolerance, expected: list[Any], got: list[Any], dtype: torch.dtype = torch.float32) -> list[bool]:
    told: list[bool] = tolerance.agree(torch.tensor(expected).to(dtype), torch.tensor(got).to(dtype)).tolist()
    return told


def test_within_atol_and_rtol_of_what_is_expected() -> None:
    assert agree(Tolerance(atol=0.5), [1.0, 1.0, -8.0], [1.5, 1.5625, -8.5]) == [True, False, True]
    assert agree(Tolerance(rtol=0.25), [4.0, -4.0, 0.0, 5.5], [5.0, -5.0, 1e-9, 4.0]) == [True, True, False, False]
    assert agree(Tolerance(atol=1.0, rtol=0.5), [4.0, 4.0], [7.0, 7.25]) == [True, False]
    assert agree(Tolerance(), [0.0, 1.0], [-0.0, 1.0 + 2**-23]) == [True, False]


def test_nan_agrees_with_nan_and_infinities_with_their_like() -> None:
    close = Tolerance(atol=1e30, ulp=1 << 40)
    assert agree(close, [NAN, NAN, 1.0, INF, INF, 3e38], [NAN, 1.0, NAN, INF, -INF, INF]) == [
        True,
        False,
        False,
        True,
        False,
        False,
    ]
    assert agree(Tolerance(atol=1.0, equal_nan=False), [NAN], [NAN]) == [False]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_an_ulp_is_the_next_value_that_the_dtype_has(dtype: torch.dtype) -> None:
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    one = torch.ones(1).to(dtype)
    ahead = [(one.view(bits) + steps).view(dtype) for steps in (0, 1, 2, 5)]
    assert [int(distance(one, x)) for x in ahead] == [0, 1, 2, 5]
    assert [int(distance(x, one)) for x in ahead] == [0, 1, 2, 5]
    assert [int(distance(negative(one), negative(x))) for x in ahead] == [0, 1, 2, 5]
    assert [bool(Tolerance(ulp=2).agree(one, x)) for x in ahead] == [True, True, True, False]
    smallest = torch.ones(1, dtype=bits).view(dtype)
    # Through 0, which is one value.
    assert int(distance(negative(smallest), smallest)) == 2
    assert int(distance(negative(torch.zeros(1).to(dtype)), smallest)) == 1


def negative(values: torch.Tensor) -> torch.Tensor:
    return (-values.double()).to(values.dtype)


def test_far_apart_is_far_whatever_overflows() -> None:
    most = torch.tensor([1e300, 2.0, INF], dtype=torch.float64)
    assert (distance(most, -most) > 1 << 62).all()
    assert not Tolerance(ulp=1 << 62).agree(most, -most).any()
    ends = torch.tensor([torch.iinfo(torch.int64).max]), torch.tensor([torch.iinfo(torch.int64).min])
    assert not Tolerance(ulp=1).agree(*ends).any()


def test_integers_are_compared_as_integers() -> None:
    assert agree(Tolerance(ulp=1), [0, 127, -128], [1, 125, -127], torch.int8) == [True, False, True]
    huge = torch.tensor([1 << 60]), torch.tensor([(1 << 60) + 3])
    assert not Tolerance(atol=2).agree(*huge).any()
    assert Tolerance(atol=3).agree(*huge).all()
    assert Tolerance(rtol=0.1).agree(*huge).all()
    with pytest.raises(TypeError, match=r"ulp must be of real numbers, got torch\.complex64"):
        Tolerance(ulp=1).agree(torch.ones(1, dtype=torch.complex64), torch.zeros(1, dtype=torch.complex64))
    assert Tolerance(atol=1).agree(torch.tensor([1 + 1j]), torch.tensor([1 + 2j])).all()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"atol": -1.0}, r"atol must be a number, at least 0, got -1\.0"),
        ({"rtol": NAN}, "rtol must be a number, at least 0, got nan"),
        ({"ulp": -1}, "ulp must be a number, at least 0, got -1"),
        ({"atol": 1.0, "comparator": torch.eq}, "comparator must be given without atol, rtol and ulp, got both"),
    ],
)
def test_what_is_no_tolerance_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Tolerance(**wrong)


def test_only_outputs_have_one() -> None:
    with pytest.raises(ValueError, match="tolerance must be of an out or inout tensor, got one of role in"):
        TensorSpec(dtype=torch.float32, shape=("n",), tolerance=Tolerance(atol=1.0))


NUMBERS = itertools.count()


def op(tolerance: Tolerance | None, triton: Callable[..., None], *, strided: bool = False) -> KernelSpec:
    """Register an op that doubles a matrix, until the test is over."""
    shape = ("n", "m")
    spec = KernelSpec(
        name=f"double_{next(NUMBERS)}_for_tolerance_tests",
        doc="Double every value.",
        arguments={
            "values": TensorSpec(dtype=torch.float32, shape=shape),
            "out": TensorSpec(
                dtype=torch.float32, shape=shape, role="out", tolerance=tolerance, row_strided=strided, doc="doubled"
            ),
        },
    )
    kc.register(spec, backend="reference")(lambda *, values, out: out.copy_(values * 2))
    kc.register(spec, backend="triton")(triton)
    return spec


def case(*, gap: int = 0) -> dict[str, torch.Tensor]:
    whole = torch.zeros(4, 3 + gap)
    return {"values": torch.arange(12, dtype=torch.float32).view(4, 3), "out": whole[:, :3]}


def off_by(amount: float) -> Callable[..., None]:
    def triton(*, values: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(values * 2)
        out[2, 1] += amount
        out[1, 1:] += amount / 2

    return triton


@pytest.fixture
def device() -> torch.device:
    """The implementations here are plain PyTorch: the CPU's, whatever `--device` says."""
    return torch.device("cpu")


@pytest.mark.parametrize("gap", [0, 2])
def test_what_lies_within_the_tolerance_passes_and_what_does_not_is_told(gap: int, device: torch.device) -> None:
    check_case(op(Tolerance(atol=0.5), off_by(0.5), strided=True), case(gap=gap), device=device)
    with pytest.raises(Mismatch, match=r"an output differs .*first at \[1, 1\]: expected 8.0, got 8.25"):
        check_case(op(None, off_by(0.5), strided=True), case(gap=gap), device=device)
    spec = op(Tolerance(atol=0.25), off_by(0.5), strided=True)
    with pytest.raises(Mismatch) as found:
        check_case(spec, case(gap=gap), device=device)
    assert found.value.outcome is Outcome.BYTES_DIFFER
    assert found.value.detail == (
        "1 of 12 elements lie beyond atol 0.25; the first at [2, 1]: expected 14.0, got 14.5; "
        "the farthest at [2, 1]: expected 14.0, got 14.5, 0.5 apart (524288 ulp)"
    )
    # Those that lie within it are not shown as differences.
    file = case_file(spec, case(gap=gap), found.value, facts={}, imports=())
    assert [(d.where, d.expected, d.got) for d in differences(spec, file, trace=False)] == [("n 2, 1", "14.0", "14.5")]


def test_a_gap_between_rows_has_no_tolerance(device: torch.device) -> None:
    def triton(*, values: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(values * 2)
        out.as_strided((4, 5), (5, 1))[1, 4].view(torch.int32).bitwise_xor_(1)

    with pytest.raises(Mismatch, match=r"1 of 12 elements lie beyond atol 1e\+06; the first at \[1, 4\]"):
        check_case(op(Tolerance(atol=1e6), triton, strided=True), case(gap=2), device=device)


def test_a_nan_lies_farthest(device: torch.device) -> None:
    def triton(*, values: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(values * 2 + 100)
        out[3, 0] = NAN

    with pytest.raises(Mismatch, match=r"12 of 12 elements .* the farthest at \[3, 0\]: expected 18.0, got nan$"):
        check_case(op(Tolerance(rtol=0.1), triton), case(), device=device)


def test_a_comparator_of_ones_own(device: torch.device) -> None:
    def same_signs(expected: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
        assert expected.shape == got.shape == (4, 3)
        return expected.sign() == got.sign()

    def negated(*, values: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(-values)

    check_case(op(Tolerance(comparator=same_signs), off_by(0.5), strided=True), case(gap=2), device=device)
    with pytest.raises(Mismatch, match="11 of 12 elements lie beyond same_signs; the first at"):
        check_case(op(Tolerance(comparator=same_signs), negated), case(), device=device)
    with pytest.raises(ValueError, match=r"what comparator returns must be a bool for each of \[4, 3\] elements, got"):
        check_case(op(Tolerance(comparator=torch.allclose), negated), case(), device=device)


@pytest.mark.parametrize("repeatable", [True, False])
def test_a_launch_repeats_itself_to_the_bit_unless_it_need_not(repeatable: bool, device: torch.device) -> None:
    launches = itertools.count()

    def triton(*, values: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(values * 2 + next(launches) * 1e-3)

    spec = op(Tolerance(atol=0.1, repeatable=repeatable), triton)
    if not repeatable:
        check_case(spec, case(), device=device)
        return
    with pytest.raises(Mismatch) as found:
        check_case(spec, case(), device=device)
    assert found.value.outcome is Outcome.NOT_REPEATABLE


def test_the_page_of_an_op_says_it() -> None:
    spec = op(Tolerance(atol=1e-3, rtol=0.01, ulp=2), off_by(0.0))
    assert "| out | float32[n, m], within atol 0.001, rtol 0.01, ulp 2 | out |" in op_section(spec)


@pytest.mark.parametrize(("kernel", "code"), [("right", 0), ("wrong", 1)])
def test_the_example_in_fp16(kernel: str, code: int, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "kv_canary", "difftest", "run", "--import", str(EXAMPLE)]
    command += ["--op", "paged_attention", "--examples", "30", "--seed", "1", "--max-findings", "1", "--shrink", "4"]
    environment = {**os.environ, "YOUR_KERNEL": kernel, "COLUMNS": "200"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert ("elements lie beyond atol 0.001, rtol 0.002" in done.stdout.replace("\n", " ")) == bool(code)
