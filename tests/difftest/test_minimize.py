"""Failing calls shrink to what a person can read: still failing, bindable and defined, the same ones every time."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, settings

import kv_canary as kc
from kv_canary.backends import implementation
from kv_canary.cases.packing import is_giant, sparse_storage
from kv_canary.constants import Reason, Status
from kv_canary.difftest.call_tools import digest, weigh
from kv_canary.difftest.minimize import minimize
from kv_canary.specs import get_spec
from kv_canary.specs.interface import KernelSpec, ScalarSpec, TensorSpec, TensorsSpec

Call = Mapping[str, Any]
Fails = Callable[[Call], bool]


def on_reference(op: str, call: Call) -> dict[str, Any]:
    """The call as the reference leaves it."""
    spec = get_spec(op)
    done = spec.map_tensors(call, lambda leaf: leaf.tensor.clone())
    implementation(op, "reference")(**done)
    return done


def reports(op: str, reason: Reason) -> Fails:
    """Whether the reference reports `reason`, in a row that it still has room for."""

    def fails(call: Call) -> bool:
        log = on_reference(op, call)["violations"]
        first = max(int(call["violations"].count), 0)
        return bool((log.ring[first : max(int(log.count), 0), 1] & int(reason)).any())

    return fails


def states(op: str, status: Status) -> Fails:
    return lambda call: bool(int(on_reference(op, call)["status"]) & int(status))


def changes_records(op: str) -> Fails:
    def fails(call: Call) -> bool:
        pairs = zip(call["records"], on_reference(op, call)["records"], strict=True)
        return any(not torch.equal(before, after) for before, after in pairs)

    return fails


def changes_row(op: str, name: str) -> Fails:
    return lambda call: not torch.equal(call[name], on_reference(op, call)[name])


def reports_scales(call: Call) -> bool:
    """Whether K differs in a pool whose K has scales apart."""
    return call["endpoint"].k_scales is not None and reports("verify_seals", Reason.SEAL_K)(call)


# Hypothesis shows what it found, however long.
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")

# What fails, and how much is left of it: sizes that a minimal call has at most, by leaf.
FAILURES: dict[str, tuple[str, Fails, dict[str, tuple[int, ...]]]] = {
    "verify, a position": (
        "verify",
        reports("verify", Reason.POSITION),
        {"verify_plan.slots": (1,), "endpoint.records": (2, 4), "violations.ring": (1, 16)},
    ),
    "verify, K bytes": ("verify", reports("verify", Reason.K), {"verify_plan.slots": (1,), "endpoint.records": (2, 4)}),
    "write, a prefix": (
        "write",
        reports("write", Reason.PREFIX),
        {"write_plan.rows": (1,), "input_ids": (1,), "endpoint.records": (2, 4), "tails": (2,)},
    ),
    "plan, a slot that the LUT lacks": (
        "plan",
        states("plan", Status.LUT_RANGE),
        {"rows": (1,), "req_to_token": (2, 1), "verify_plan.slots": (1,), "write_plan.rows": (1,)},
    ),
    "verify_prefixes, a slot that the LUT lacks": (
        "verify_prefixes",
        states("verify_prefixes", Status.LUT_RANGE),
        {"rows": (1,), "req_to_token": (2, 1), "resolved.entries": (1, 2), "write_plan.rows": (1,)},
    ),
    "verify_prefixes, a slot that was never written": (
        "verify_prefixes",
        reports("verify_prefixes", Reason.NEVER_WRITTEN),
        # Of a page of two slots the first may be slot 0, of which nothing is reported.
        {"rows": (1,), "req_to_token": (2, 1), "resolved.entries": (2, 2), "endpoint.records": (2, 4)},
    ),
    "verify_resolved, a chain": (
        "verify_resolved",
        reports("verify_resolved", Reason.CHAIN),
        # An entry may follow another one.
        {"rows": (0,), "resolved.entries": (2, 2), "endpoint.records": (3, 4), "violations.ring": (1, 16)},
    ),
    "verify_resolved, a token": (
        "verify_resolved",
        reports("verify_resolved", Reason.TOKEN),
        {"rows": (1,), "resolved.entries": (1, 2), "endpoint.records": (2, 4), "expected_tokens": (2, 1)},
    ),
    "move": ("move", changes_records("move"), {"src": (1,), "dst": (1,), "records[0]": (3, 4)}),
    "retire": ("retire", changes_records("retire"), {"slots": (1,), "records[0]": (2, 4)}),
    "scatter": (
        "scatter_token_ids",
        changes_row("scatter_token_ids", "pool"),
        {"flat": (1,), "offsets": (2,), "rows": (1,), "pool": (2, 1)},
    ),
    "seal": ("seal", changes_row("seal", "seals"), {"endpoint.records": (2, 4), "seals": (2, 3)}),
    "verify_seals, scales": (
        "verify_seals",
        reports_scales,
        {
            "endpoint.records": (2, 4),
            "endpoint.k_scales.layers[0]": (2, 1),
            "seals": (2, 2),
            "violations.ring": (1, 16),
        },
    ),
    "chain": ("chain_tails", changes_row("chain_tails", "tails"), {"rows": (1,), "offsets": (2,), "tails": (2,)}),
}


def drawn(op: str, fails: Fails, *, large: int = 0) -> dict[str, Any]:
    """A call of `op` that fails, as drawn, of a size above `large`."""
    spec = get_spec(op)
    return find(
        importlib.import_module(f"kv_canary.difftest.strategies.{op}").cases(),
        lambda case: weigh(spec, spec.bind(case))[0] > large and fails(spec.bind(case)),
        settings=settings(
            max_examples=2000, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
        ),
        random=Random(0),
    )


@pytest.mark.every_day("verify, K bytes", "verify_resolved, a chain", "move", "chain")
@pytest.mark.parametrize("name", FAILURES)
def test_a_failing_call_shrinks_to_one_entry(name: str) -> None:
    op, fails, expected = FAILURES[name]
    spec = get_spec(op)
    call = drawn(op, fails, large=300)
    was = digest(spec, spec.bind(call))

    def checked(candidate: Call) -> bool:
        # Whatever is asked about is complete, and could be launched.
        assert list(spec.bind(candidate)) == list(spec.arguments) == list(candidate)
        assert spec.has_one_outcome(candidate)
        return fails(candidate)

    smallest = minimize(spec, call, checked)
    assert fails(smallest)
    shapes = {leaf.path: leaf.tensor.shape for leaf in spec.leaves(smallest)}
    for path, most in expected.items():
        assert all(n <= m for n, m in zip(shapes[path], most, strict=True)), (path, shapes[path])
    assert digest(spec, spec.bind(call)) == was


def test_the_same_call_gives_the_same_result() -> None:
    op, fails, _ = FAILURES["move"]
    spec, call = get_spec(op), drawn(op, fails)
    runs: list[tuple[bytes, list[tuple[int, int]]]] = []
    for _ in range(2):
        progress: list[tuple[int, int]] = []
        smallest = minimize(spec, call, fails, on_progress=lambda *told, p=progress: p.append(told))
        runs.append((digest(spec, smallest), progress))
    assert runs[0] == runs[1]


SUM = KernelSpec(
    name="sum_for_minimize_tests",
    doc="Sum segments.",
    arguments={
        "flat": TensorSpec(dtype=torch.int64, shape=("total",)),
        "offsets": TensorSpec(dtype=torch.int64, shape=("bs+1",)),
        "names": TensorSpec(dtype=torch.int32, shape=("bs",)),
        "table": TensorSpec(dtype=torch.int32, shape=("n", "m"), role="inout", row_strided=True),
        "weights": TensorSpec(dtype=torch.float32, shape=("total",), optional=True, with_="biases"),
        "biases": TensorSpec(dtype=torch.float32, shape=("bs",), optional=True, with_="weights"),
        "buffers": TensorsSpec(each=TensorSpec(dtype=torch.uint8, shape=("size",))),
        "factor": ScalarSpec(type=int, minimum=3),
        "depth": ScalarSpec(type=int, default=7),
        "careful": ScalarSpec(type=bool, default=False),
        "strict": ScalarSpec(type=bool),
        "sums": TensorSpec(dtype=torch.int64, shape=("bs",), role="out"),
        "spare": TensorSpec(dtype=torch.int64, shape=("bs", lambda sizes: sizes["total"] // 4), role="scratch"),
    },
)


def sum_call() -> dict[str, Any]:
    wide = torch.arange(60, dtype=torch.int32).view(6, 10)
    return {
        "flat": torch.arange(100, 150),
        "offsets": torch.tensor([0, 10, 20, 50]),
        "names": torch.tensor([4, 5, 6], dtype=torch.int32),
        "table": wide[:, :8],
        "weights": torch.ones(50),
        "biases": torch.ones(3),
        "buffers": tuple(torch.full((9,), i, dtype=torch.uint8) for i in range(1, 5)),
        "factor": 1000,
        "depth": 900,
        "careful": True,
        "strict": True,
        "sums": torch.full((3,), 5),
    }


def shrunk(fails: Fails, **changes: Any) -> dict[str, Any]:
    return minimize(SUM, {**sum_call(), **changes}, fails)


def test_what_does_not_matter_goes() -> None:
    smallest = shrunk(lambda call: True)
    assert {leaf.path: leaf.tensor.numel() for leaf in SUM.leaves(smallest)} == {
        "flat": 0,
        "offsets": 1,
        "names": 0,
        "table": 0,
        "buffers[0]": 0,
        "sums": 0,
        "spare": 0,
    }
    assert smallest["offsets"].tolist() == [0]
    scalars = {name: smallest[name] for name in ("weights", "biases", "factor", "depth", "careful", "strict")}
    assert scalars == {"weights": None, "biases": None, "factor": 3, "depth": 7, "careful": False, "strict": False}


def test_one_element_among_many_stays() -> None:
    smallest = shrunk(lambda call: 133 in call["flat"].tolist() and 44 in call["table"].flatten().tolist())
    assert smallest["flat"].tolist() == [133]
    assert smallest["table"].tolist() == [[44]]


def test_sizes_that_are_shared_shrink_together() -> None:
    smallest = shrunk(lambda call: 5 in call["names"].tolist() and call["biases"] is not None)
    shapes = {name: tuple(smallest[name].shape) for name in ("names", "sums", "biases", "offsets", "weights", "flat")}
    assert shapes == {"names": (1,), "sums": (1,), "biases": (1,), "offsets": (2,), "weights": (0,), "flat": (0,)}


@pytest.mark.parametrize("fence", [(0, 10), (10, 20), (20, 50)])
def test_either_fence_post_of_a_segment_may_stay(fence: tuple[int, int]) -> None:
    def fails(call: Call) -> bool:
        offsets = call["offsets"].tolist()
        return fence in itertools.pairwise(offsets)

    assert shrunk(fails)["offsets"].tolist() == list(fence)


@pytest.mark.parametrize(("least", "found"), [(3, 3), (4, 4), (517, 517), (999, 999)])
def test_numbers_become_as_small_as_can_be(least: int, found: int) -> None:
    assert shrunk(lambda call: call["factor"] >= least)["factor"] == found
    assert shrunk(lambda call: call["depth"] != 7 and call["depth"] >= least - 3, depth=2000)["depth"] == found - 3
    negative = shrunk(lambda call: call["depth"] <= -least, depth=-2000)
    assert negative["depth"] == -found


def test_elements_become_as_small_as_can_be() -> None:
    smallest = shrunk(lambda call: len(call["flat"]) > 1 and min(call["flat"].tolist()[:2]) > 6)
    # Not 7 and 7: equal values could make a call undefined that was not.
    assert sorted(smallest["flat"].tolist()) == [7, 8]


def test_elements_of_either_sign_stay_of_it() -> None:
    smallest = shrunk(lambda call: any(v < -40 for v in call["flat"].tolist()), flat=torch.arange(-149, -99))
    assert smallest["flat"].tolist() == [-41]


def test_a_member_of_a_tuple_stays() -> None:
    smallest = shrunk(lambda call: any(3 in each.tolist() for each in call["buffers"]))
    assert [each.tolist() for each in smallest["buffers"]] == [[3]]


def test_a_flag_that_matters_stays() -> None:
    assert shrunk(lambda call: call["careful"])["careful"] is True


def test_rows_are_brought_together_unless_their_distance_matters() -> None:
    assert shrunk(lambda call: call["table"].shape == (6, 8))["table"].stride(0) == 8
    kept = shrunk(lambda call: call["table"].stride(0) == 10 and len(call["table"]) > 1)["table"]
    assert (kept.shape[0], kept.stride(0)) == (2, 10)


def test_giant_rows_stay_giant_where_it_matters() -> None:
    far = 1 << 32
    table = sparse_storage(40 * far).view(torch.int32).as_strided((10, 8), (far, 1))
    table.copy_(torch.arange(80).view(10, 8))
    kept = shrunk(lambda call: is_giant(call["table"]) and 77 in call["table"].flatten().tolist(), table=table)["table"]
    assert (kept.shape, kept.stride(0), kept.sum()) == ((2, 1), far, 77)
    together = shrunk(lambda call: 77 in call["table"].flatten().tolist(), table=table)["table"]
    assert (together.tolist(), together.is_contiguous()) == ([[77]], True)


def test_scratch_is_allocated_anew_unless_what_it_holds_matters() -> None:
    held = torch.full((3, 20), 9)
    assert shrunk(lambda call: len(call["names"]) > 0, spare=held)["spare"].tolist() == [[]]
    kept = shrunk(lambda call: call["spare"].numel() > 0 and bool((call["spare"] == 9).all()), spare=held)
    assert (kept["spare"].tolist(), kept["flat"].numel()) == (held.tolist(), 0)


def endpoint_call(**source: Any) -> dict[str, Any]:
    """A call of verify whose K source has 3 layers of 40 rows."""
    rows = torch.arange(3 * 40 * 30).view(3, 40, 30).to(torch.uint8)
    wide = torch.zeros(3, 40, 37, dtype=torch.uint8)
    wide[:, :, :30] = rows
    sources = {
        f"{half}_source": kc.KvSource(
            layers=tuple(wide[:, :, :30]), page_size=3, bytes_per_token=8, read_bytes=5, offset_bytes=2, slot_bias=1
        )
        for half in "kv"
    }
    return {
        "verify_plan": kc.VerifyPlan.allocate(verify_cap=4),
        "endpoint": kc.Endpoint(tag=3, records=torch.ones(120, 4, dtype=torch.int64), **sources),
        "step": torch.ones(1, dtype=torch.int64),
        "violations": kc.ViolationLog.allocate(ring_cap=2),
        "counters": torch.zeros(6, 2, dtype=torch.int64),
    }


def test_sources_shrink_to_the_byte_that_matters() -> None:
    def fails(call: Call) -> bool:
        source = call["endpoint"].v_source
        return source is not None and any(200 in layer.flatten().tolist() for layer in source.layers)

    endpoint = minimize(get_spec("verify"), endpoint_call(), fails)["endpoint"]
    source = endpoint.v_source
    assert endpoint.k_source is None
    assert endpoint.tag == 0
    assert [layer.tolist() for layer in source.layers] == [[[200]]]
    numbers = (source.page_size, source.bytes_per_token, source.read_bytes, source.offset_bytes, source.slot_bias)
    assert numbers == (1, 1, 1, 0, 0)


def test_a_slot_keeps_its_bytes_when_others_go() -> None:
    call = endpoint_call()
    layer = torch.zeros(40, 8, dtype=torch.uint8)
    layer[30] = 7
    source = kc.KvSource(layers=(layer,), page_size=1, bytes_per_token=8, slot_bias=1)
    call["endpoint"] = kc.Endpoint(tag=0, records=torch.zeros(50, 4, dtype=torch.int64), k_source=source)
    call["endpoint"].records[31] = 5
    call["verify_plan"].slots[2] = 31

    def fails(call: Call) -> bool:
        source, records = call["endpoint"].k_source, call["endpoint"].records
        return source is not None and any(
            0 < slot < len(records) and 5 in records[slot].tolist() and 7 in source.layers[0][slot - source.slot_bias]
            for slot in call["verify_plan"].slots.tolist()
            if 0 <= slot - source.slot_bias < source.num_rows
        )

    smallest = minimize(get_spec("verify"), call, fails)
    assert smallest["verify_plan"].slots.tolist() == [1]
    assert smallest["endpoint"].records.shape == (2, 4)
    assert smallest["endpoint"].k_source.num_rows <= 2


def write_of_two_segments() -> dict[str, Any]:
    return {
        "write_plan": kc.WritePlan(
            rows=torch.tensor([1, 2, 3]),
            owners=torch.tensor([3, 4, 5]),
            offsets=torch.tensor([0, 2, 4, 6]),
            prefix_lens=torch.zeros(3, dtype=torch.int64),
            seed_slots=torch.full((3,), -1),
            num_requests=torch.tensor([3], dtype=torch.int32),
        ),
        "input_ids": torch.tensor([9, 8, 9, 8, 7, 6]),
        "positions": torch.tensor([0, 1, 0, 1, 0, 1]),
        # The first two requests write the same prefix into the same slots, as sharing engines do.
        "out_slots": torch.tensor([5, 6, 5, 6, 1, 2]),
        "endpoint": kc.Endpoint(tag=0, records=torch.zeros(8, 4, dtype=torch.int64)),
        "tails": torch.full((4,), 77),
        "step": torch.ones(1, dtype=torch.int64),
        "check_positions": torch.zeros(1, dtype=torch.int32),
        "violations": kc.ViolationLog.allocate(ring_cap=2),
        "counters": torch.zeros(6, 2, dtype=torch.int64),
    }


def test_a_defined_write_never_becomes_an_undefined_one() -> None:
    spec, call = get_spec("write"), write_of_two_segments()
    call["write_plan"].owners[1] = 3
    asked: list[bool] = []

    def fails(candidate: Call) -> bool:
        asked.append(spec.has_one_outcome(candidate))
        return candidate["out_slots"].tolist().count(5) > 1 and 9 in candidate["input_ids"].tolist()

    smallest = minimize(spec, call, fails)
    assert len(asked) > 20
    assert all(asked)
    assert smallest["input_ids"].tolist().count(9) == 1


@pytest.mark.parametrize(
    ("field", "index", "value"),
    [
        ("input_ids", 2, 0),
        ("positions", 0, 3),
        ("out_slots", 4, 5),
        ("owners", 1, 4),
        ("rows", 1, 1),
        ("offsets", 2, 0),
    ],
)
def test_writes_with_two_outcomes_are_told(field: str, index: int, value: int) -> None:
    """Two tokens for one slot have one, whatever they are; two requests of one row or one token have not."""
    spec, call = get_spec("write"), write_of_two_segments()
    call["write_plan"].owners[1] = 3
    assert spec.has_one_outcome(spec.bind(call))
    tensor = call[field] if field in call else getattr(call["write_plan"], field)
    tensor[index] = value
    assert spec.has_one_outcome(spec.bind(call)) == (field not in ("rows", "offsets"))


@pytest.mark.parametrize(
    ("dst", "defined"), [([1, 2, 3], True), ([1, 1, 3], False), ([0, 0, 9], True), ([9, 9, -1], True)]
)
def test_moves_with_two_outcomes_are_told(dst: list[int], defined: bool) -> None:
    call = {
        "src": torch.tensor([1, 2, 3]),
        "dst": torch.tensor(dst),
        "owner": 1,
        "step": torch.ones(1, dtype=torch.int64),
        "records": (torch.zeros(5, 4, dtype=torch.int64),),
    }
    assert get_spec("move").has_one_outcome(get_spec("move").bind(call)) is defined


def test_an_interrupt_leaves_the_best_call_so_far() -> None:
    sizes: list[int] = []

    def fails(call: Call) -> bool:
        if len(sizes) == 3:
            raise KeyboardInterrupt
        return 133 in call["flat"].tolist()

    smallest = minimize(SUM, sum_call(), fails, on_progress=lambda tries, size: sizes.append(size))
    assert weigh(SUM, smallest)[0] == sizes[-1]
    assert 133 in smallest["flat"].tolist()
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("most", [1, 2, 10, 30])
def test_no_more_tries_than_allowed(most: int) -> None:
    asked: list[int] = []

    def fails(call: Call) -> bool:
        asked.append(1)
        return 133 in call["flat"].tolist()

    smallest = minimize(SUM, sum_call(), fails, max_tries=most)
    assert len(asked) == most
    assert 133 in smallest["flat"].tolist()


def test_no_call_is_tried_twice() -> None:
    asked: list[bytes] = []

    def fails(call: Call) -> bool:
        asked.append(digest(SUM, call))
        return 133 in call["flat"].tolist() and 5 in call["names"].tolist()

    minimize(SUM, sum_call(), fails)
    # The first two differ in scratch, which a call is not told by.
    assert len(set(asked[1:])) == len(asked[1:])


def test_other_exceptions_come_out() -> None:
    def fails(call: Call) -> bool:
        raise RuntimeError("the machine is gone")

    with pytest.raises(RuntimeError, match="the machine is gone"):
        minimize(SUM, sum_call(), fails)


def test_a_call_that_does_not_fail_is_refused() -> None:
    with pytest.raises(ValueError, match="minimize: arguments must be a call that fails, got one that does not"):
        minimize(SUM, sum_call(), lambda call: False)


def test_a_call_that_cannot_be_bound_is_refused() -> None:
    with pytest.raises(TypeError, match="missing argument flat"):
        minimize(SUM, {n: v for n, v in sum_call().items() if n != "flat"}, lambda call: True)
