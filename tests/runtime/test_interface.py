"""What an op's spec takes of tensors, by itself: `tests/test_validation.py` holds every op to it."""

from __future__ import annotations

import pytest
import torch

from kv_canary.specs.interface import KernelSpec, TensorSpec

SPEC = KernelSpec(
    name="copy",
    doc="Copies rows.",
    arguments={
        "here": TensorSpec(dtype=torch.int64, shape=("n", "m"), role="in", row_strided=True),
        "there": TensorSpec(dtype=torch.int64, shape=("n", "m"), role="out"),
    },
)


def test_all_tensors_are_on_one_device() -> None:
    here, there = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)
    assert SPEC.bind({"here": here, "there": there})["there"] is there
    with pytest.raises(ValueError, match="there must be on cpu, like here, got meta"):
        SPEC.bind({"here": here, "there": there.to("meta")})


@pytest.mark.parametrize(("shape", "strides"), [((0, 5), (5, 2)), ((4, 0), (0, 3))])
def test_rows_in_which_nothing_lies_lie_anyhow(shape: tuple[int, int], strides: tuple[int, int]) -> None:
    here = torch.zeros(0, dtype=torch.int64).as_strided(shape, strides)
    SPEC.bind({"here": here, "there": torch.zeros(shape, dtype=torch.int64)})


def test_rows_in_which_something_lies_are_contiguous_and_apart() -> None:
    there = torch.zeros(2, 5, dtype=torch.int64)
    for strides, says in (((10, 2), "contiguous inside a row"), ((4, 1), "a row stride at least 5, got 4")):
        here = torch.zeros(20, dtype=torch.int64).as_strided((2, 5), strides)
        with pytest.raises(ValueError, match=says):
            SPEC.bind({"here": here, "there": there})
