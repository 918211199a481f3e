"""What may be passed and what is refused: arguments, backends, structures, and the package as it is installed."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kv_canary as kc
from kv_canary import backends, ops
from kv_canary.cases.comparison import Mismatch, Outcome
from kv_canary.difftest import strategies
from kv_canary.difftest.runner import check_case
from kv_canary.difftest.simulator import ENGINE_OPS
from kv_canary.specs import all_specs, get_spec
from kv_canary.specs.document import ops_page
from kv_canary.specs.interface import KernelSpec, ScalarSpec, StructSpec, TensorSpec

REPO = Path(__file__).resolve().parents[1]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def records(num_slots: int = 6) -> torch.Tensor:
    return torch.zeros(num_slots, 4, dtype=torch.int64)


def source(**changes: Any) -> kc.KvSource:
    given = {"layers": (torch.zeros(6, 16, dtype=torch.uint8),), "page_size": 1, "bytes_per_token": 16}
    return kc.KvSource(**{**given, **changes})


def call_of(op: str) -> dict[str, Any]:
    """A right call of `op` with every argument given, even those that may be left out."""
    one, status = ints(1), torch.zeros(1, dtype=torch.int32)
    flat = {"flat": ints(5, 6, 7), "offsets": ints(0, 1, 3), "rows": ints(1, 2), "starts": ints(0, 0)}
    launch = {
        "endpoint": kc.Endpoint(tag=kc.Tag.HEAD_FULL, records=records(), k_source=source(), v_source=source()),
        "step": one,
        "violations": kc.ViolationLog.allocate(ring_cap=4),
        "counters": torch.zeros(6, 2, dtype=torch.int64),
        "track_lifetime": True,
    }
    tokens = {
        "expected_tokens": torch.ones(3, 5, dtype=torch.int32),
        "expected_lens": ints(2, 3),
        "token_offset": 1,
    }
    prefixes = {
        "rows": ints(1, 2),
        "owners": ints(7, 8),
        "prefix_lens": ints(2, 3),
        "extend_lens": ints(1, 1),
        "req_to_token": torch.ones(3, 4, dtype=torch.int32),
        "table_rows": ints(2, 1),
        "page_size": 1,
        "window": 2,
        "lut": ints(0, 1),
        "strides": ints(1, 2),
        "write_plan": kc.WritePlan.allocate(write_cap=3),
        "status": status,
        "entry_offsets": ints(0, 0, 0),
        **tokens,
    }
    resolved = kc.ResolvedSlots.allocate(entry_cap=8)
    calls: dict[str, dict[str, Any]] = {
        "plan": {**prefixes, "after_write": True, "step": one, "verify_plan": kc.VerifyPlan.allocate(verify_cap=8)},
        "verify": {"verify_plan": kc.VerifyPlan.allocate(verify_cap=2), "anchors": ints(0, 1, 2), **launch},
        "verify_prefixes": {
            **prefixes,
            "longest_stride": ints(0),
            "laid_out": ints(0, 2, 3),
            "laid_out_stride": ints(2),
            "resolved": resolved,
            "anchors": ints(0, 1, 2),
            **launch,
        },
        "verify_resolved": {
            **tokens,
            "rows": ints(1, 2),
            "resolved": resolved,
            "anchors": ints(0, 1, 2),
            **launch,
        },
        "write": {
            "write_plan": kc.WritePlan.allocate(write_cap=2),
            "input_ids": ints(1, 2, 3),
            "positions": ints(0, 1, 2),
            "out_slots": ints(1, 2, 3),
            "tails": ints(0, 1, 2),
            "check_positions": status,
            "expected_input_ids": ints(1, 2, 3),
            "given_rows": ints(1, 2),
            "given_lens": ints(1, 2),
            "ring": False,
            "tile_sums": torch.zeros(2, 1, dtype=torch.int64),
            "slot_marks": torch.zeros(6, dtype=torch.int64),
            **launch,
        },
        "move": {
            "src": ints(1, 2),
            "dst": ints(3, 4),
            "owner": 5,
            "step": one,
            "records": (records(), records()),
            "staged": torch.zeros(2, 4, dtype=torch.int64),
        },
        "retire": {"slots": ints(1, 2), "owner": ints(5), "step": one, "records": (records(), records())},
        "scatter_token_ids": {**flat, "pool": torch.zeros(3, 4, dtype=torch.int32), "status": status},
        "chain_tails": {
            **flat,
            "anchors": ints(0, 1, 2),
            "tails": ints(0, 1, 2),
            "pool": torch.zeros(3, 4, dtype=torch.int32),
            "status": status,
        },
    }
    return calls[op]


def replaced(op: str, path: str, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """A right call of `op`, but for `change` made to the tensor at `path`."""
    return get_spec(op).map_tensors(call_of(op), lambda leaf: change(leaf.tensor) if leaf.path == path else leaf.tensor)


def paths(*, layers: bool = False) -> list[tuple[str, str]]:
    """Every op with the path of every tensor that it takes, KV bytes only with `layers`."""
    return [
        (op, leaf.path)
        for op in ENGINE_OPS
        for leaf in get_spec(op).leaves(call_of(op))
        if layers or ".layers[" not in leaf.path
    ]


def refused(error: type[Exception], op: str, argument: str, call: dict[str, Any]) -> str:
    """Check that `call` is refused with a complaint about `argument`, and that it changed nothing; return it."""
    before = [(tensor, tensor.clone()) for tensor in tensors_in(call) if tensor.device.type != "meta"]
    complaint = rf"^kv-canary: {op}: (missing argument |unknown argument )?{re.escape(argument)}(?![\w.\[])"
    with pytest.raises(error, match=complaint) as caught:
        getattr(kc.ops, op)(**call, backend="reference")
    assert all(torch.equal(tensor, copy) for tensor, copy in before)
    return str(caught.value)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | tuple | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(inner)
    elif dataclasses.is_dataclass(value):
        yield from tensors_in(vars(value))


@pytest.mark.parametrize("op", ENGINE_OPS)
def test_the_right_call_passes(op: str) -> None:
    getattr(kc.ops, op)(**call_of(op), backend="reference")


def test_ops_of_engines_are_built_in() -> None:
    assert set(all_specs()) >= set(ENGINE_OPS)
    assert set(dir(ops)) >= set(all_specs())


def test_an_unknown_op_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"^kv-canary: ops: op must be one of .*, got 'plann'$"):
        kc.ops.plann  # noqa: B018
    with pytest.raises(ValueError, match=r"^kv-canary: specs: op must be one of .*, got 'plann'$"):
        get_spec("plann")
    with pytest.raises(ValueError, match=r"^kv-canary: difftest: op must be one with a strategy, got 'plann'$"):
        strategies.cases("plann")


@pytest.mark.parametrize(("op", "path"), paths())
def test_a_wrong_dtype_is_a_type_error(op: str, path: str) -> None:
    message = refused(TypeError, op, path, replaced(op, path, lambda t: t.to(torch.float32)))
    assert message.endswith("got torch.float32")


@pytest.mark.parametrize(("op", "path"), paths())
def test_int32_is_not_int64(op: str, path: str) -> None:
    other = {torch.int32: torch.int64, torch.int64: torch.int32}
    refused(TypeError, op, path, replaced(op, path, lambda t: t.to(other[t.dtype])))


@pytest.mark.parametrize(("op", "path"), paths())
def test_a_wrong_rank_is_refused(op: str, path: str) -> None:
    for message in (
        refused(ValueError, op, path, replaced(op, path, lambda t: t[None])),
        refused(ValueError, op, path, replaced(op, path, lambda t: t[0])),
    ):
        assert f"{path} must be of shape [" in message


# The first tensor to name a symbol sets it, and later ones must agree.
LENGTHS = [
    ("plan", "owners", "bs"),
    ("plan", "prefix_lens", "bs"),
    ("plan", "extend_lens", "bs"),
    ("plan", "expected_lens", "bs"),
    ("plan", "strides", "bs"),
    ("plan", "step", "1"),
    ("plan", "verify_plan.prev_slots", "verify_cap"),
    ("plan", "verify_plan.positions", "verify_cap"),
    ("plan", "verify_plan.tokens", "verify_cap"),
    ("plan", "verify_plan.rows", "verify_cap"),
    ("plan", "verify_plan.num_valid", "1"),
    ("plan", "verify_plan.num_requested", "1"),
    ("plan", "write_plan.owners", "write_cap"),
    ("plan", "write_plan.offsets", "write_cap+1"),
    ("plan", "write_plan.prefix_lens", "write_cap"),
    ("plan", "write_plan.seed_slots", "write_cap"),
    ("plan", "write_plan.num_requests", "1"),
    ("plan", "status", "1"),
    ("verify", "step", "1"),
    ("verify", "violations.count", "1"),
    ("verify", "counters", "6"),
    ("verify_prefixes", "owners", "bs"),
    ("verify_prefixes", "prefix_lens", "bs"),
    ("verify_prefixes", "extend_lens", "bs"),
    ("verify_prefixes", "expected_lens", "bs"),
    ("verify_prefixes", "strides", "bs"),
    ("verify_prefixes", "step", "1"),
    ("verify_prefixes", "laid_out", "bs+1"),
    ("verify_prefixes", "laid_out_stride", "1"),
    ("verify_prefixes", "resolved.num_valid", "1"),
    ("verify_prefixes", "resolved.num_requested", "1"),
    ("verify_prefixes", "write_plan.owners", "write_cap"),
    ("verify_prefixes", "write_plan.offsets", "write_cap+1"),
    ("verify_prefixes", "write_plan.prefix_lens", "write_cap"),
    ("verify_prefixes", "write_plan.seed_slots", "write_cap"),
    ("verify_prefixes", "write_plan.num_requests", "1"),
    ("verify_prefixes", "status", "1"),
    ("verify_prefixes", "violations.count", "1"),
    ("verify_prefixes", "counters", "6"),
    ("verify_resolved", "expected_lens", "bs"),
    ("verify_resolved", "resolved.num_valid", "1"),
    ("verify_resolved", "resolved.num_requested", "1"),
    ("verify_resolved", "step", "1"),
    ("verify_resolved", "violations.count", "1"),
    ("verify_resolved", "counters", "6"),
    ("write", "positions", "num_tokens"),
    ("write", "out_slots", "num_tokens"),
    ("write", "expected_input_ids", "num_tokens"),
    ("write", "check_positions", "1"),
    ("write", "counters", "6"),
    ("write", "given_lens", "num_given"),
    ("move", "dst", "n"),
    ("move", "records[1]", "num_slots"),
    ("retire", "records[1]", "num_slots"),
    ("scatter_token_ids", "rows", "bs"),
    ("scatter_token_ids", "starts", "bs"),
    ("chain_tails", "rows", "bs"),
    ("chain_tails", "starts", "bs"),
    ("chain_tails", "tails", "num_rows"),
    ("chain_tails", "status", "1"),
]


@pytest.mark.parametrize(("op", "path", "size"), LENGTHS)
@pytest.mark.parametrize("change", ["longer", "shorter"])
def test_a_length_that_disagrees_is_refused(op: str, path: str, size: str, change: str) -> None:
    longer = change == "longer"
    call = replaced(op, path, lambda t: torch.cat([t, t[:1]]) if longer else t[:-1].contiguous())
    message = refused(ValueError, op, path, call)
    assert f"{path} must be of shape [{size}" in message


@pytest.mark.parametrize(
    ("op", "path"),
    [
        ("verify", "violations.ring"),
        ("verify", "endpoint.records"),
        ("verify", "counters"),
        ("verify_prefixes", "resolved.entries"),
        ("verify_prefixes", "endpoint.records"),
        ("verify_resolved", "resolved.entries"),
        ("verify_resolved", "violations.ring"),
    ],
)
def test_a_wrong_width_is_refused(op: str, path: str) -> None:
    refused(ValueError, op, path, replaced(op, path, lambda t: t[:, :-1].contiguous()))


@pytest.mark.parametrize(
    ("op", "path"),
    [
        ("plan", "entry_offsets"),
        ("verify_prefixes", "entry_offsets"),
        ("verify_prefixes", "longest_stride"),
        ("move", "staged"),
        ("write", "tile_sums"),
        ("write", "slot_marks"),
    ],
)
def test_scratch_that_is_too_small_is_refused(op: str, path: str) -> None:
    refused(ValueError, op, path, replaced(op, path, lambda t: t[:-1]))


@pytest.mark.parametrize(("op", "path"), paths())
def test_a_tensor_that_is_not_contiguous_is_refused(op: str, path: str) -> None:
    # Every other element of a wider tensor; what has one element alone is always contiguous.
    call = replaced(op, path, lambda t: t.repeat_interleave(2, dim=-1)[..., ::2])
    tensor = next(leaf.tensor for leaf in get_spec(op).leaves(call) if leaf.path == path)
    if tensor.is_contiguous():
        getattr(kc.ops, op)(**call, backend="reference")
        return
    assert "contiguous" in refused(ValueError, op, path, call)


@pytest.mark.parametrize(
    ("op", "path"),
    [
        ("plan", "req_to_token"),
        ("plan", "expected_tokens"),
        ("verify_prefixes", "req_to_token"),
        ("verify_prefixes", "expected_tokens"),
        ("verify_resolved", "expected_tokens"),
        ("scatter_token_ids", "pool"),
        ("chain_tails", "pool"),
        ("move", "records[0]"),
    ],
)
def test_rows_may_lie_apart_but_not_over_each_other(op: str, path: str) -> None:
    apart = replaced(op, path, lambda t: torch.cat([t, t], dim=1)[:, : t.shape[1]])
    getattr(kc.ops, op)(**apart, backend="reference")
    over = replaced(op, path, lambda t: t[0].expand(len(t), -1))
    assert "row stride at least 4" in refused(ValueError, op, path, over) or path == "expected_tokens"


@pytest.mark.parametrize(
    ("op", "path"),
    [
        ("verify", "endpoint.records"),
        ("verify_prefixes", "endpoint.records"),
        ("verify_resolved", "endpoint.records"),
        ("write", "endpoint.records"),
        ("move", "records[1]"),
        ("retire", "records[0]"),
    ],
)
@pytest.mark.parametrize(("stride", "fits"), [(4, True), (5, False), (6, False), (8, True), (12, True), (10, False)])
def test_records_lie_a_multiple_of_four_words_apart(op: str, path: str, stride: int, fits: bool) -> None:
    call = replaced(op, path, lambda t: torch.zeros(len(t), stride, dtype=torch.int64)[:, :4])
    if fits:
        getattr(kc.ops, op)(**call, backend="reference")
    else:
        assert f"a multiple of 4, got {stride}" in refused(ValueError, op, path, call)


@pytest.mark.parametrize(("op", "path"), paths(layers=True))
def test_a_tensor_on_another_device_is_refused(op: str, path: str) -> None:
    call = replaced(op, path, lambda t: t.to("meta"))
    first = next(leaf.path for leaf in get_spec(op).leaves(call))
    # The first tensor says which device it is, so another than the first is blamed for the first one's.
    blamed = path.split(".layers")[0] if path != first else next(p for o, p in paths() if o == op and p != first)
    message = refused(ValueError, op, blamed, call)
    assert f"like {first}" in message


@pytest.mark.parametrize(
    ("op", "argument"), [(op, argument) for op in ENGINE_OPS for argument in get_spec(op).arguments]
)
def test_what_has_no_default_must_be_given(op: str, argument: str) -> None:
    call = call_of(op)
    del call[argument]
    spec = get_spec(op).arguments[argument]
    partner = getattr(spec, "with_", None)
    if partner is not None:
        message = refused(ValueError, op, argument, call)
        assert message.endswith(f"must be given together with {partner}, got None")
    elif (
        getattr(spec, "optional", False)
        or getattr(spec, "role", None) == "scratch"
        or (isinstance(spec, ScalarSpec) and argument != "owner")
    ):
        getattr(kc.ops, op)(**call, backend="reference")
    else:
        assert "missing argument" in refused(TypeError, op, argument, call)


DEFAULTS = {
    "plan": {"owners", "window", "after_write", "lut", "token_offset", "entry_offsets"}
    | {"expected_tokens", "expected_lens", "strides", "step", "table_rows", "page_size"},
    "verify": {"anchors", "track_lifetime"},
    "verify_prefixes": {"owners", "window", "lut", "expected_tokens", "expected_lens", "token_offset", "strides"}
    | {"anchors", "track_lifetime", "entry_offsets", "longest_stride", "table_rows", "page_size"}
    | {"laid_out", "laid_out_stride"},
    "verify_resolved": {"expected_tokens", "expected_lens", "token_offset", "anchors", "track_lifetime"},
    "write": {"expected_input_ids", "given_rows", "given_lens", "track_lifetime", "ring", "tile_sums", "slot_marks"},
    "move": {"staged"},
    "retire": set(),
    "scatter_token_ids": {"starts"},
    "chain_tails": {"anchors", "pool"},
}


@pytest.mark.parametrize("op", ENGINE_OPS)
def test_all_defaults_may_be_left_out_together(op: str) -> None:
    call = {name: value for name, value in call_of(op).items() if name not in DEFAULTS[op]}
    getattr(kc.ops, op)(**call, backend="reference")
    parameters = kc.ops.__getattr__(op).__signature__.parameters
    without = {name for name, p in parameters.items() if p.default is not p.empty}
    assert without == DEFAULTS[op] | {"backend"}


def test_a_plan_is_of_what_the_forward_reads_unless_it_is_said_otherwise() -> None:
    call = {**call_of("plan"), "prefix_lens": ints(4, 4), "extend_lens": ints(2, 2), "strides": None, "step": None}

    def planned(**given: Any) -> list[int]:
        plan = kc.VerifyPlan.allocate(verify_cap=8)
        kc.ops.plan(**{**call, "verify_plan": plan, **given}, backend="reference")
        return plan.positions[: int(plan.num_valid)].tolist()

    # A window of two positions in a ring of three slots: where position 2 lies comes the last of the new tokens.
    assert planned(after_write=True) == [3, 3]
    del call["after_write"]
    assert planned() == planned(after_write=False) == [2, 3, 2, 3]


def test_scratch_is_allocated_where_the_other_tensors_are() -> None:
    spec = get_spec("move")
    for device in ("cpu", "meta"):
        call = spec.map_tensors(call_of("move"), lambda leaf, device=device: leaf.tensor.to(device))
        del call["staged"]
        assert spec.bind(call)["staged"].device.type == device


def test_a_table_of_no_rows_has_no_strides_that_could_be_wrong() -> None:
    nothing = torch.ones(5, 3, dtype=torch.int32).t()[:0]
    assert nothing.stride() == (1, 3)
    call = {**call_of("plan"), "expected_tokens": nothing}
    kc.ops.plan(**call, backend="reference")
    plan = call["verify_plan"]
    assert plan.tokens[: int(plan.num_valid)].tolist() == [-1, -1, -1]


def test_a_call_that_names_the_padding_twice_has_one_outcome() -> None:
    has_one_outcome = get_spec("move").has_one_outcome
    for dst, expected in (((3, 4), True), ((0, 0, 3), True), ((6, 6, -1, -1), True), ((3, 0, 3), False)):
        assert has_one_outcome({**call_of("move"), "dst": ints(*dst)}) == expected


@dataclasses.dataclass(frozen=True)
class Geometry:
    """What a structure may hold beside tensors."""

    heads: int


@dataclasses.dataclass(frozen=True)
class Scales:
    """A structure of an op from outside."""

    values: torch.Tensor = dataclasses.field(
        metadata={"spec": TensorSpec(dtype=torch.int64, shape=("n",), doc="one of each head")}
    )
    geometry: Geometry = Geometry(heads=2)


def test_a_structure_may_hold_what_is_no_tensor() -> None:
    spec = KernelSpec(name="scale", doc="Scale.", arguments={"scales": StructSpec(type=Scales)})
    given = {"scales": Scales(ints(3, 4))}
    assert spec.bind(given) == given
    assert [leaf.path for leaf in spec.leaves(given)] == ["scales.values"]
    mapped = spec.map_tensors(given, lambda leaf: leaf.tensor + 1)["scales"]
    assert (mapped.values.tolist(), mapped.geometry) == ([4, 5], Geometry(heads=2))


@pytest.mark.parametrize("op", ENGINE_OPS)
def test_an_unknown_argument_is_refused(op: str) -> None:
    assert "unknown argument" in refused(TypeError, op, "colour", {**call_of(op), "colour": 1})


@pytest.mark.parametrize(("op", "path"), [(op, path) for op, path in paths() if "." not in path and "[" not in path])
@pytest.mark.parametrize("value", [[1, 2], 3, "rows"], ids=repr)
def test_what_is_no_tensor_is_a_type_error(op: str, path: str, value: Any) -> None:
    message = refused(TypeError, op, path, {**call_of(op), path: value})
    assert message.endswith(f"must be a tensor, got {type(value).__name__}")


@pytest.mark.parametrize(
    ("op", "argument"),
    [
        *(("plan", argument) for argument in ("rows", "prefix_lens", "req_to_token", "status")),
        *(("verify_prefixes", argument) for argument in ("rows", "step", "req_to_token", "status")),
        *(("verify_resolved", argument) for argument in ("rows", "step", "counters")),
    ],
)
def test_none_is_no_tensor(op: str, argument: str) -> None:
    refused(TypeError, op, argument, {**call_of(op), argument: None})


@pytest.mark.parametrize(
    ("op", "argument", "name"),
    [
        ("plan", "verify_plan", "VerifyPlan"),
        ("plan", "write_plan", "WritePlan"),
        ("verify", "verify_plan", "VerifyPlan"),
        ("verify", "endpoint", "Endpoint"),
        ("verify", "violations", "ViolationLog"),
        ("verify_prefixes", "resolved", "ResolvedSlots"),
        ("verify_prefixes", "write_plan", "WritePlan"),
        ("verify_prefixes", "endpoint", "Endpoint"),
        ("verify_prefixes", "violations", "ViolationLog"),
        ("verify_resolved", "resolved", "ResolvedSlots"),
        ("verify_resolved", "endpoint", "Endpoint"),
        ("verify_resolved", "violations", "ViolationLog"),
        ("write", "write_plan", "WritePlan"),
    ],
)
def test_another_structure_is_a_type_error(op: str, argument: str, name: str) -> None:
    for value in (None, 3, ints(1), source()):
        message = refused(TypeError, op, argument, {**call_of(op), argument: value})
        assert message.endswith(f"must be a {name}, got {type(value).__name__}")


@pytest.mark.parametrize(
    ("op", "argument", "value"),
    [
        ("plan", "window", True),
        ("plan", "window", 2.0),
        ("plan", "window", None),
        ("plan", "window", "2"),
        ("plan", "token_offset", False),
        ("plan", "token_offset", 0.5),
        ("plan", "after_write", 1),
        ("plan", "after_write", 0.0),
        ("plan", "after_write", None),
        ("verify", "track_lifetime", 1),
        ("verify_prefixes", "window", True),
        ("verify_prefixes", "window", 2.0),
        ("verify_prefixes", "token_offset", None),
        ("verify_prefixes", "track_lifetime", 0),
        ("verify_resolved", "token_offset", False),
        ("verify_resolved", "track_lifetime", None),
        ("write", "track_lifetime", "yes"),
        ("move", "owner", True),
        ("move", "owner", 1.0),
        ("move", "owner", None),
        ("move", "owner", ints(1)),
    ],
)
def test_a_scalar_of_a_wrong_type_is_a_type_error(op: str, argument: str, value: Any) -> None:
    message = refused(TypeError, op, argument, {**call_of(op), argument: value})
    right = "True or False" if argument in ("after_write", "track_lifetime") else "an int"
    assert f"{argument} must be {right}, got {value!r}" in message


@pytest.mark.parametrize(
    ("op", "argument", "value"),
    [
        ("plan", "window", -1),
        ("plan", "window", 1 << 63),
        ("plan", "token_offset", -(1 << 63) - 1),
        ("verify_prefixes", "window", -1),
        ("verify_prefixes", "token_offset", 1 << 63),
        ("verify_resolved", "token_offset", -(1 << 63) - 1),
        ("move", "owner", 1 << 63),
        ("move", "owner", -(1 << 63) - 1),
    ],
)
def test_a_scalar_out_of_range_is_refused(op: str, argument: str, value: int) -> None:
    assert refused(ValueError, op, argument, {**call_of(op), argument: value}).endswith(f"got {value}")


@pytest.mark.parametrize("op", ["plan", "verify_prefixes"])
def test_a_batch_larger_than_the_write_plan_is_refused(op: str) -> None:
    call = {**call_of(op), "write_plan": kc.WritePlan.allocate(write_cap=1)}
    message = refused(ValueError, op, "write_plan", call)
    assert message.endswith("must be at least as long as rows (2 requests), got a capacity of 1")


@pytest.mark.parametrize("op", ["move", "retire"])
def test_records_are_a_tuple_of_at_least_one_tensor(op: str) -> None:
    refused(ValueError, op, "records", {**call_of(op), "records": ()})
    refused(TypeError, op, "records", {**call_of(op), "records": records()})
    refused(TypeError, op, "records[1]", {**call_of(op), "records": (records(), None)})


@pytest.mark.parametrize("op", ENGINE_OPS)
def test_a_refused_call_leaves_poisoned_outputs_alone(op: str) -> None:
    def poison(leaf: Any) -> torch.Tensor:
        return torch.full_like(leaf.tensor, 77) if leaf.role in ("out", "inout", "scratch") else leaf.tensor

    spec = get_spec(op)
    call = spec.map_tensors(call_of(op), poison)
    # The last argument is the bad one, so all others have been looked at by then.
    last = list(spec.arguments)[-1]
    value = call[last]
    call[last] = (*value[:-1], value[-1].int()) if isinstance(value, tuple) else value.to(torch.float64)
    with pytest.raises(TypeError, match=rf"^kv-canary: {op}: {last}"):
        getattr(kc.ops, op)(**call, backend="reference")
    for leaf in spec.leaves(call):
        assert leaf.role == "in" or (leaf.tensor == 77).all()


def refused_structure(error: type[Exception], part: str, argument: str, make: Callable[[], Any]) -> str:
    with pytest.raises(error, match=rf"^kv-canary: {part}: {re.escape(argument)} must be ") as caught:
        make()
    return str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("page_size", 0, ValueError),
        ("page_size", -1, ValueError),
        ("page_size", True, TypeError),
        ("page_size", 1.0, TypeError),
        ("bytes_per_token", 0, ValueError),
        ("bytes_per_token", False, TypeError),
        ("read_bytes", 0, ValueError),
        ("read_bytes", "16", TypeError),
        ("offset_bytes", -1, ValueError),
        ("offset_bytes", None, TypeError),
        ("slot_bias", -1, ValueError),
        ("slot_bias", True, TypeError),
        ("layers", (), ValueError),
        ("layers", torch.zeros(6, 16, dtype=torch.uint8), TypeError),
        ("layers", (None,), TypeError),
        ("layers", None, TypeError),
    ],
)
def test_a_source_says_which_field_is_wrong(field: str, value: Any, error: type[Exception]) -> None:
    refused_structure(error, "KvSource", field, lambda: source(**{field: value}))


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(7, 16, dtype=torch.uint8),
        torch.zeros(6, 17, dtype=torch.uint8),
        torch.zeros(6, 32, dtype=torch.uint8)[:, :16],
        torch.zeros(6, 16, dtype=torch.int8),
        torch.zeros(6, 16, dtype=torch.uint8, device="meta"),
    ],
    ids=["rows", "row bytes", "row stride", "dtype", "device"],
)
def test_layers_are_of_one_geometry(other: torch.Tensor) -> None:
    layers = (torch.zeros(6, 16, dtype=torch.uint8), torch.zeros(6, 16, dtype=torch.uint8), other)
    refused_structure(ValueError, "KvSource", "layers[2]", lambda: source(layers=layers))


def test_a_layer_is_contiguous_inside_a_row_of_enough_bytes() -> None:
    gaps = torch.zeros(6, 32, dtype=torch.uint8)[:, ::2]
    assert "contiguous inside a row" in refused_structure(
        ValueError, "KvSource", "layers[0]", lambda: source(layers=(gaps,))
    )
    heads = torch.zeros(6, 4, 2, 2, dtype=torch.float16)
    source(layers=(heads,), page_size=2)
    refused_structure(ValueError, "KvSource", "layers[0]", lambda: source(layers=(heads.transpose(1, 2),), page_size=2))
    scalar = torch.zeros((), dtype=torch.uint8)
    refused_structure(ValueError, "KvSource", "layers[0]", lambda: source(layers=(scalar,)))
    for changes in ({"page_size": 2}, {"bytes_per_token": 17}, {"offset_bytes": 1}):
        message = refused_structure(ValueError, "KvSource", "layers[0]", lambda changes=changes: source(**changes))
        assert re.search("at least (32|17) bytes a row .*, got 16$", message)


def test_rows_of_a_layer_may_lie_apart() -> None:
    apart = source(layers=(torch.zeros(6, 40, dtype=torch.uint8)[:, 3:19],))
    assert (apart.num_rows, apart.row_bytes, apart.row_stride_bytes) == (6, 16, 40)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("tag", 6, ValueError),
        ("tag", -1, ValueError),
        ("tag", True, TypeError),
        ("tag", 1.0, TypeError),
        ("tag", "HEAD_FULL", TypeError),
        ("k_source", torch.zeros(6, 16), TypeError),
        ("v_source", (), TypeError),
        ("v_source", 0, TypeError),
    ],
)
def test_an_endpoint_says_which_field_is_wrong(field: str, value: Any, error: type[Exception]) -> None:
    given: dict[str, Any] = {"tag": kc.Tag.TAIL_FULL, "records": records(), field: value}
    refused_structure(error, "Endpoint", field, lambda: kc.Endpoint(**given))


def retire(backend: Any = None) -> torch.Tensor:
    """Retire a slot and return its record."""
    buffer = records()
    buffer[2] = 5
    kc.ops.retire(slots=ints(2), owner=ints(1), step=ints(0), records=(buffer,), backend=backend)
    return buffer[2]


def test_an_unknown_backend_is_refused_wherever_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = "one of reference, triton.*, got 'cuda'$"
    with pytest.raises(ValueError, match=rf"^kv-canary: backend switch: backend must be {choice}"):
        retire("cuda")
    with pytest.raises(TypeError, match=r"^kv-canary: backend switch: backend must be one of .*, got int$"):
        retire(3)
    with pytest.raises(ValueError, match=rf"^kv-canary: use_backend: backend must be {choice}"), kc.use_backend("cuda"):
        pass
    with pytest.raises(TypeError, match=r"^kv-canary: use_backend: backend must be one of"), kc.use_backend(None):  # type: ignore[arg-type]
        pass
    with pytest.raises(
        ValueError, match=r"^kv-canary: register: backend must be one of reference, triton, got 'auto'$"
    ):
        kc.register(get_spec("retire"), backend="auto")
    monkeypatch.setenv("KV_CANARY_BACKEND", "cuda")
    with pytest.raises(ValueError, match=rf"^kv-canary: backend switch: KV_CANARY_BACKEND must be {choice}"):
        retire()
    # The argument and use_backend come before the environment.
    assert int(retire("reference")[3]) < 0
    with kc.use_backend("reference"):
        assert int(retire()[3]) < 0


def test_the_argument_goes_before_use_backend_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    cpu = torch.device("cpu")
    monkeypatch.delenv("KV_CANARY_BACKEND", raising=False)
    assert backends.select_backend(None, cpu) == "reference"
    assert backends.select_backend(None, torch.device("cuda")) == "triton"
    monkeypatch.setenv("KV_CANARY_BACKEND", "triton")
    assert backends.select_backend(None, cpu) == "triton"
    with kc.use_backend("reference"):
        assert backends.select_backend(None, cpu) == "reference"
        assert backends.select_backend("triton", cpu) == "triton"
        with kc.use_backend("triton"):
            assert backends.select_backend(None, cpu) == "triton"
        assert backends.select_backend(None, cpu) == "reference"
    assert backends.select_backend(None, cpu) == "triton"
    assert backends.select_backend("auto", cpu) == "reference"


@pytest.mark.parametrize("value", [None, "0", ""])
def test_triton_on_the_cpu_needs_its_interpreter(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    else:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    with pytest.raises(
        ValueError, match=r"^kv-canary: backend switch: tensors must be .*TRITON_INTERPRET=1.*, got cpu$"
    ):
        retire("triton")
    with kc.use_backend("triton"), pytest.raises(ValueError, match="TRITON_INTERPRET"):
        retire()
    assert int(retire()[3]) < 0


ADD = KernelSpec(
    name="add_for_validation_tests",
    doc="Add a number to every value.",
    arguments={
        "values": TensorSpec(dtype=torch.int64, shape=("n",), doc="what to add to"),
        "number": ScalarSpec(type=int, default=1, minimum=0, doc="what to add"),
        "sums": TensorSpec(dtype=torch.int64, shape=("n",), role="out", doc="the sums"),
    },
)


def add(*, values: torch.Tensor, number: int, sums: torch.Tensor) -> None:
    sums.copy_(values + number)


def add_but_not_last(*, values: torch.Tensor, number: int, sums: torch.Tensor) -> None:
    sums.copy_(values + number)
    sums[-1:] = values[-1:]


@st.composite
def add_cases(draw: Any) -> dict[str, Any]:
    values = draw(st.lists(st.integers(-9, 9), min_size=1, max_size=5))
    return {
        "values": ints(*values),
        "number": draw(st.integers(1, 5)),
        "sums": torch.zeros(len(values), dtype=torch.int64),
    }


@settings(max_examples=5)
@given(case=add_cases())
def test_an_op_from_outside_gets_the_checks(device: torch.device, case: dict[str, Any]) -> None:
    kc.register(ADD, backend="reference")(add)
    strategies.register_cases(ADD.name)(add_cases)
    assert isinstance(strategies.cases(ADD.name), st.SearchStrategy)
    kc.register(ADD, backend="triton")(add)
    check_case(ADD, case, device=device)
    kc.register(ADD, backend="triton")(add_but_not_last)
    with pytest.raises(Mismatch, match=r"^add_for_validation_tests on triton: sums: ") as caught:
        check_case(ADD, case, device=device)
    assert (caught.value.outcome, caught.value.backend) == (Outcome.BYTES_DIFFER, "triton")
    assert caught.value.detail.startswith(f"first at [{len(case['values']) - 1}]: ")


def test_an_op_from_outside_gets_the_front_door() -> None:
    assert kc.register(ADD, backend="reference")(add) is add
    with pytest.raises(ValueError, match=r"^kv-canary: add_for_validation_tests: backend must be .*, got 'triton'$"):
        kc.ops.add_for_validation_tests(values=ints(1), sums=ints(0), backend="triton")
    kc.register(ADD, backend="triton")(add)
    assert ADD.name in all_specs()
    assert ADD.name in dir(ops)
    for backend in ("reference", "triton"):
        sums = ints(0, 0)
        kc.ops.add_for_validation_tests(values=ints(3, 4), sums=sums, backend=backend)
        assert sums.tolist() == [4, 5]
    with pytest.raises(ValueError, match=r"^kv-canary: add_for_validation_tests: sums must be of shape"):
        kc.ops.add_for_validation_tests(values=ints(3, 4), sums=ints(0))
    with pytest.raises(ValueError, match=r"^kv-canary: add_for_validation_tests: number must be at least 0, got -1$"):
        kc.ops.add_for_validation_tests(values=ints(3), number=-1, sums=ints(0))


def test_another_spec_may_not_take_a_known_name() -> None:
    kc.register(ADD, backend="reference")(add)
    kc.register(ADD, backend="reference")(add)
    for taken in (ADD, get_spec("move")):
        with pytest.raises(ValueError, match=rf"^kv-canary: specs: name must be new, got '{taken.name}'"):
            kc.register(dataclasses.replace(taken, doc="Another."), backend="reference")
    assert get_spec(ADD.name) is ADD


def test_the_registry_is_clean_again() -> None:
    assert ADD.name not in all_specs()
    with pytest.raises(AttributeError):
        kc.ops.add_for_validation_tests  # noqa: B018


def test_the_page_of_ops_says_every_field_of_every_structure_once() -> None:
    page = ops_page()
    for structure in (kc.Endpoint, kc.VerifyPlan, kc.WritePlan, kc.ViolationLog):
        section = page.split(f"### {structure.__name__}\n")[1].split("\n### ")[0]
        assert "| field | what | meaning |" in section
        told = [line.split(" | ")[0].removeprefix("| ") for line in section.splitlines() if line.startswith("| ")]
        assert told[0] == "field"
        assert told[1:] == [field.name for field in dataclasses.fields(structure) if field.init]


def run_outside(code: str, tmp_path: Path) -> str:
    """Run `code` in a fresh Python outside the repository, and return what it prints."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_imports_neither_triton_nor_an_engine(tmp_path: Path) -> None:
    code = """
import sys, torch
before = set(sys.modules)
import kv_canary
kv_canary.ops.retire, kv_canary.Endpoint, dir(kv_canary.ops)
buffer = torch.zeros(3, 4, dtype=torch.int64)
one = torch.ones(1, dtype=torch.int64)
kv_canary.ops.retire(slots=one, owner=one, step=one, records=(buffer,))
heavy = ("triton", "transformers", "sglang", "vllm", "hypothesis", "pytest", "kv_canary.kernels", "kv_canary.difftest")
print(sorted(m for m in set(sys.modules) - before if m in heavy or m.startswith(tuple(h + "." for h in heavy))))
"""
    assert run_outside(code, tmp_path) == "[]"


def test_the_folders_are_no_top_level_packages(tmp_path: Path) -> None:
    code = """
import importlib.util
for name in ("kernels", "reference", "bench", "difftest"):
    top, inside = importlib.util.find_spec(name), importlib.util.find_spec("kv_canary." + name)
    print(top and [top.origin, *(top.submodule_search_locations or [])])
    print(inside.origin)
"""
    lines = run_outside(code, tmp_path).splitlines()
    for top, inside in zip(lines[::2], lines[1::2], strict=True):
        # A package of somebody else may have the name; ours may not.
        assert str(REPO) not in top.replace(sys.prefix, "")
        assert Path(inside).name == "__init__.py"


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("op", ENGINE_OPS)
def test_one_allocation_of_scratch_serves_smaller_batches(op: str, backend: str, device: torch.device) -> None:
    """Scratch is allocated once, so it may be larger than a batch needs."""
    spec = get_spec(op)

    def larger(leaf: Any) -> torch.Tensor:
        if leaf.role != "scratch":
            return leaf.tensor.to(device)
        return leaf.tensor.new_zeros([leaf.tensor.shape[0] + 3, *leaf.tensor.shape[1:]]).to(device)

    getattr(kc.ops, op)(**spec.map_tensors(call_of(op), larger), backend=backend)
