"""The checker is checked: what is wrong with a made-up op is found, and named as what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kv_canary as kc
from kv_canary.cases.comparison import Mismatch, Outcome
from kv_canary.difftest.runner import check_case
from kv_canary.specs.interface import KernelSpec, StructSpec, TensorSpec

DOUBLE = KernelSpec(
    name="double_for_runner_tests",
    doc="Double every value.",
    arguments={
        "values": TensorSpec(dtype=torch.int64, shape=("n",)),
        "totals": TensorSpec(dtype=torch.int64, shape=("n",), role="inout"),
        "doubled": TensorSpec(dtype=torch.int64, shape=("n",), role="out"),
        "spare": TensorSpec(dtype=torch.int64, shape=("n",), role="scratch"),
    },
)

REPORT = KernelSpec(
    name="report_for_runner_tests",
    doc="Report every value that is not zero.",
    arguments={
        "values": TensorSpec(dtype=torch.int64, shape=("n",)),
        "violations": StructSpec(type=kc.ViolationLog, role="inout", compare="violations"),
    },
)


def register(spec: KernelSpec, reference: Callable[..., None], triton: Callable[..., None]) -> None:
    """Register both implementations of an op, until the test is over."""
    kc.register(spec, backend="reference")(reference)
    kc.register(spec, backend="triton")(triton)


def double(*, values: torch.Tensor, totals: torch.Tensor, doubled: torch.Tensor, spare: torch.Tensor) -> None:
    spare.copy_(values)
    doubled.copy_(spare * 2)
    totals.add_(values)


@pytest.fixture
def device() -> torch.device:
    """The implementations here are plain PyTorch with host code in them: the CPU's, whatever `--device` says."""
    return torch.device("cpu")


def then(fault: Callable[[dict[str, torch.Tensor]], None]) -> Callable[..., None]:
    """An implementation that is right, but for what `fault` does afterwards."""

    def faulty(**arguments: torch.Tensor) -> None:
        double(**arguments)
        fault(arguments)

    return faulty


def memory_around(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The bytes of the storage that holds `tensor`, and where in them it begins."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return whole, tensor.data_ptr() - whole.data_ptr()


def flip(tensor: torch.Tensor, byte: int) -> None:
    """Flip a bit of the byte that lies `byte` bytes after the tensor's first."""
    whole, start = memory_around(tensor)
    whole[start + byte] ^= 1


def double_case() -> dict[str, Any]:
    values = torch.tensor([3, -5, 1 << 40])
    return {"values": values, "totals": torch.arange(3), "doubled": torch.zeros(3, dtype=torch.int64)}


def outcome_of(spec: KernelSpec, case: dict[str, Any], device: torch.device) -> Mismatch:
    with pytest.raises(Mismatch) as caught:
        check_case(spec, case, device=device)
    assert caught.value.op == spec.name
    return caught.value


def test_two_right_implementations_agree(device: torch.device) -> None:
    register(DOUBLE, double, double)
    case = double_case()
    check_case(DOUBLE, case, device=device)
    # The case itself is left as it was.
    assert case["totals"].tolist() == [0, 1, 2]
    assert case["doubled"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("byte", [24, 24 + 200, -1, -200])
@pytest.mark.parametrize("argument", ["doubled", "totals", "values", "spare"])
def test_a_byte_written_beside_a_tensor_is_found(device: torch.device, argument: str, byte: int) -> None:
    register(DOUBLE, double, then(lambda arguments: flip(arguments[argument], byte)))
    found = outcome_of(DOUBLE, double_case(), device)
    assert (found.outcome, found.backend, found.path) == (Outcome.GUARD_TOUCHED, "triton", argument)


def test_a_byte_written_between_the_rows_of_an_output_is_found(device: torch.device) -> None:
    spec = KernelSpec(
        name="clear_for_runner_tests",
        doc="Zero a table.",
        arguments={
            "table": TensorSpec(dtype=torch.int64, shape=("n", "m"), role="out", row_strided=True),
        },
    )

    def clear(*, table: torch.Tensor) -> None:
        table.zero_()

    def clear_gap(*, table: torch.Tensor) -> None:
        clear(table=table)
        flip(table, 16)

    register(spec, clear, clear_gap)
    # Rows of 2, 3 apart: bytes 16 to 23 are the gap after the first row.
    case = {"table": torch.ones(4, 3, dtype=torch.int64)[:, :2]}
    found = outcome_of(spec, case, device)
    assert (found.outcome, found.path) == (Outcome.BYTES_DIFFER, "table")


def test_a_changed_input_is_found(device: torch.device) -> None:
    register(DOUBLE, double, then(lambda arguments: flip(arguments["values"], 8)))
    found = outcome_of(DOUBLE, double_case(), device)
    assert (found.outcome, found.backend, found.path) == (Outcome.INPUT_CHANGED, "triton", "values")
    assert found.detail == "first at [1]: expected -5, got -6"


def test_the_reference_is_held_to_the_same(device: torch.device) -> None:
    register(DOUBLE, then(lambda arguments: flip(arguments["values"], 8)), double)
    found = outcome_of(DOUBLE, double_case(), device)
    assert (found.outcome, found.backend) == (Outcome.INPUT_CHANGED, "reference")


@pytest.mark.parametrize("byte", [0, 7, 8, 23])
@pytest.mark.parametrize("argument", ["doubled", "totals"])
def test_one_different_byte_is_found(device: torch.device, argument: str, byte: int) -> None:
    register(DOUBLE, double, then(lambda arguments: flip(arguments[argument], byte)))
    found = outcome_of(DOUBLE, double_case(), device)
    assert (found.outcome, found.backend, found.path) == (Outcome.BYTES_DIFFER, "triton", argument)
    assert found.detail.startswith(f"first at [{byte // 8}]: ")


def test_bytes_left_unwritten_are_found(device: torch.device) -> None:
    def lazy(*, values: torch.Tensor, totals: torch.Tensor, doubled: torch.Tensor, spare: torch.Tensor) -> None:
        doubled[:-1] = values[:-1] * 2
        totals.add_(values)

    register(DOUBLE, double, lazy)
    case = {**double_case(), "values": torch.zeros(3, dtype=torch.int64)}
    # The fresh output is poisoned, so even a zero must be written.
    found = outcome_of(DOUBLE, case, device)
    assert (found.outcome, found.path) == (Outcome.BYTES_DIFFER, "doubled")


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_another_result_the_second_time_is_found(device: torch.device, backend: str) -> None:
    launches = []

    def tired(arguments: dict[str, torch.Tensor]) -> None:
        launches.append(1)
        arguments["doubled"].add_(len(launches) - 1)

    pair = {"reference": double, "triton": double, backend: then(tired)}
    register(DOUBLE, pair["reference"], pair["triton"])
    found = outcome_of(DOUBLE, double_case(), device)
    assert (found.outcome, found.backend, found.path) == (Outcome.NOT_REPEATABLE, backend, "doubled")


@pytest.mark.parametrize("byte", [-1, 24])
@pytest.mark.parametrize("argument", ["values", "doubled"])
def test_a_guard_byte_that_gets_into_a_result_is_found(device: torch.device, argument: str, byte: int) -> None:
    def leak(arguments: dict[str, torch.Tensor]) -> None:
        whole, start = memory_around(arguments[argument])
        arguments["totals"][0] += whole[start + byte]

    # Even where both backends make the same mistake, for what lies there differs from launch to launch.
    for reference in (double, then(leak)):
        register(DOUBLE, reference, then(leak))
        found = outcome_of(DOUBLE, double_case(), device)
        assert (found.outcome, found.path) == (Outcome.BYTES_DIFFER, "totals")


def test_a_guard_bit_that_gets_into_a_result_is_not_repeatable(device: torch.device) -> None:
    outcomes = set()
    for bit in range(64):

        def leak(arguments: dict[str, torch.Tensor], bit: int = bit) -> None:
            whole, start = memory_around(arguments["values"])
            arguments["totals"][0] += (whole[start + 24 + bit // 8] >> bit % 8) & 1

        register(DOUBLE, double, then(leak))
        try:
            check_case(DOUBLE, double_case(), device=device)
        except Mismatch as mismatch:
            outcomes.add(mismatch.outcome)
    # A bit that happens to be 0 at first is right then, and wrong in the second launch.
    assert outcomes == {Outcome.BYTES_DIFFER, Outcome.NOT_REPEATABLE}


def test_scratch_that_is_read_before_it_is_written_is_found(device: torch.device) -> None:
    def stale(*, values: torch.Tensor, totals: torch.Tensor, doubled: torch.Tensor, spare: torch.Tensor) -> None:
        doubled.copy_(values * 2)
        totals.add_(values + spare)

    register(DOUBLE, stale, stale)
    assert outcome_of(DOUBLE, double_case(), device).path == "totals"


def rows_of(values: torch.Tensor) -> torch.Tensor:
    """A violation row for each value that is not zero, full of that value."""
    found = values[values != 0]
    return found[:, None].expand(-1, 16)


def reporter(order: Callable[[torch.Tensor], torch.Tensor], *, counted: int = 0, at: int = 0) -> Callable[..., None]:
    """An implementation that reports `order` of the rows, counts `counted` too many, and starts `at` rows too late."""

    def report(*, values: torch.Tensor, violations: kc.ViolationLog) -> None:
        rows = rows_of(values)
        first = int(violations.count)
        violations.count.add_(len(rows) + counted)
        for i, row in enumerate(order(rows), first + at):
            if 0 <= i < len(violations.ring):
                violations.ring[i] = row

    return report


def report_case(*, capacity: int, count: int = 0) -> dict[str, Any]:
    log = kc.ViolationLog.allocate(ring_cap=capacity)
    log.count[0] = count
    return {"values": torch.tensor([0, 11, 0, 12, 12, 13, 14]), "violations": log}


@pytest.mark.parametrize(
    ("capacity", "count"), [(0, 0), (2, 0), (5, 0), (8, 0), (8, 3), (8, 5), (8, 8), (8, 11), (8, -2), (2, -2)]
)
def test_violations_may_come_in_any_order(device: torch.device, capacity: int, count: int) -> None:
    register(REPORT, reporter(lambda rows: rows), reporter(lambda rows: rows.flip(0)))
    check_case(REPORT, report_case(capacity=capacity, count=count), device=device)


ROOMY, OVERFLOWED = 8, 3
WRONG_ROWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one of no value": lambda rows: rows + 100 * (torch.arange(len(rows), device=rows.device) == 1)[:, None],
    "one word wrong": lambda rows: rows + torch.eye(len(rows), 16, dtype=torch.int64, device=rows.device),
    # As sets, 11 11 12 and the like hold nothing that the reference does not report.
    "one twice, for another": lambda rows: rows[torch.tensor([0, 0, *range(2, len(rows))], device=rows.device)],
}


@pytest.mark.parametrize("capacity", [ROOMY, OVERFLOWED])
@pytest.mark.parametrize("wrong", WRONG_ROWS)
def test_wrong_violations_are_found(device: torch.device, wrong: str, capacity: int) -> None:
    register(REPORT, reporter(lambda rows: rows), reporter(WRONG_ROWS[wrong]))
    found = outcome_of(REPORT, report_case(capacity=capacity), device)
    assert (found.outcome, found.path) == (Outcome.BYTES_DIFFER, "violations.ring")


def test_a_row_as_often_as_the_reference_has_it_is_right(device: torch.device) -> None:
    twice = torch.tensor([1, 2])
    register(REPORT, reporter(lambda rows: rows), reporter(lambda rows: rows[twice.to(rows.device)]))
    # 12 is reported twice, and the ring holds two rows of five.
    check_case(REPORT, report_case(capacity=2), device=device)


@pytest.mark.parametrize("capacity", [0, ROOMY, OVERFLOWED])
@pytest.mark.parametrize("counted", [-1, 1])
def test_a_wrong_count_is_found(device: torch.device, counted: int, capacity: int) -> None:
    register(REPORT, reporter(lambda rows: rows), reporter(lambda rows: rows, counted=counted))
    found = outcome_of(REPORT, report_case(capacity=capacity), device)
    assert (found.outcome, found.path) == (Outcome.BYTES_DIFFER, "violations.count")


@pytest.mark.parametrize(("capacity", "count", "at"), [(8, 2, -1), (8, 2, 1), (6, 3, -1), (8, 8, -5)])
def test_a_row_outside_the_counted_ones_is_found(device: torch.device, capacity: int, count: int, at: int) -> None:
    register(REPORT, reporter(lambda rows: rows), reporter(lambda rows: rows, at=at))
    found = outcome_of(REPORT, report_case(capacity=capacity, count=count), device)
    assert (found.outcome, found.path) == (Outcome.BYTES_DIFFER, "violations.ring")
    assert found.detail == "rows outside [count before, count after) were touched"


def test_a_row_past_the_ring_is_found(device: torch.device) -> None:
    def spill(*, values: torch.Tensor, violations: kc.ViolationLog) -> None:
        reporter(lambda rows: rows)(values=values, violations=violations)
        flip(violations.ring, violations.ring.numel() * 8)

    register(REPORT, reporter(lambda rows: rows), spill)
    found = outcome_of(REPORT, report_case(capacity=OVERFLOWED), device)
    assert (found.outcome, found.path) == (Outcome.GUARD_TOUCHED, "violations.ring")
