"""Every op, generated calls: the plain integer implementation and the reference leave the same bytes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import kv_canary as kc
from kv_canary.backends import implementation
from kv_canary.cases.comparison import differing
from kv_canary.difftest.memory import guarded
from kv_canary.difftest.naive.ops import IMPLEMENTATIONS
from kv_canary.difftest.simulator import ENGINE_OPS
from kv_canary.difftest.strategies import cases
from kv_canary.specs import get_spec
from kv_canary.specs.interface import KernelSpec

LOW, HIGH = -(1 << 63), (1 << 63) - 1
ENDS = (LOW, LOW + 1, -3, 0, 4, 9, 10, HIGH - 1, HIGH)


# Of these a call takes a tenth of a second; where few are asked for, half as many are drawn.
SLOW, FEW = ("plan", "verify", "verify_prefixes", "verify_resolved", "verify_seals", "write"), 30


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_plain_agrees_with_the_reference(op: str) -> None:
    spec, asked = get_spec(op), settings.default.max_examples

    @settings(max_examples=asked // 2 if op in SLOW and asked <= FEW else asked)
    @given(case=cases(op))
    def agree(case: dict[str, Any]) -> None:
        check_plain(spec, case)

    agree()


def test_the_ops_of_engines_are_there() -> None:
    assert set(IMPLEMENTATIONS) >= set(ENGINE_OPS)


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_plain_takes_the_arguments_of_the_spec(op: str) -> None:
    parameters = inspect.signature(IMPLEMENTATIONS[op]).parameters
    assert list(parameters) == list(get_spec(op).arguments)
    assert {parameter.kind for parameter in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("begin", ENDS)
def test_segments_that_flat_inputs_hold_in_part(begin: int, end: int) -> None:
    segment = {"flat": torch.arange(9), "offsets": int64(begin, end), "rows": int64(1), "starts": int64(2)}
    status = torch.zeros(1, dtype=torch.int32)
    pool = torch.zeros(2, 8, dtype=torch.int32)
    check_plain(get_spec("scatter_token_ids"), {**segment, "pool": pool, "status": status})
    check_plain(get_spec("chain_tails"), {**segment, "tails": int64(5, 7), "status": status})
    check_plain(get_spec("write"), write_call(offsets=[begin, end]))


@pytest.mark.parametrize("tracked", [False, True])
def test_write_over_records_of_all_kinds(tracked: bool) -> None:
    same_chain = chain_of(4, tail=11)
    # Slot 5 is another owner's, 6 the same token of the same prefix, 7 of another prefix, 8 retired, 9 the owner's own.
    others = {5: (1, 1, 1, 8), 6: (4, same_chain, 1, 8), 7: (4, 1, 1, 8), 8: (1, 1, 1, LOW + 8), 9: (1, 1, 1, 3)}
    check_plain(
        get_spec("write"),
        write_call(
            offsets=[0, 1, 2, 3, 4, 5, 6, 6],
            slots=[5, 6, 7, 8, 9, 99],
            tokens=[4] * 6,
            # A seed that is not the row's counts only with a prefix, and only for a request that has tokens.
            prefixes=[0, 0, 0, 1, 1, 1, 1],
            seeds=[4, -1, -1, 4, 0, 3, 4],
            # Slot 0 is padding, and no seed, even where a record was forced into it.
            records={**others, 4: (0, 3, 0, 0), 0: (1, 2, 3, 4)},
            tracked=tracked,
        ),
    )


def test_verify_asks_nothing_of_padding() -> None:
    """Neither the record of slot 0 nor the anchor of row 0 counts, even if something is there; token 0 does."""
    records = torch.zeros(3, 4, dtype=torch.int64)
    records[:, :2] = torch.tensor([[6, 6], [5, 5], [0, 5]])
    plan = kc.VerifyPlan(
        slots=int64(1, 1, 1, 2, 0),
        prev_slots=int64(0, -1, -1, -2, -2),
        positions=int64(0, 0, 0, 0, 0),
        tokens=int64(-1, -1, -1, 0, -1),
        rows=torch.tensor([1, 0, 1, 1, 1], dtype=torch.int32),
        num_valid=torch.tensor([5], dtype=torch.int32),
        num_requested=int64(5),
    )
    for token in (0, 5):
        records[2, 0] = token
        call = {"verify_plan": plan, "endpoint": kc.Endpoint(tag=0, records=records), "anchors": int64(9, 8)}
        check_plain(get_spec("verify"), {**call, "step": int64(1), **log_and_counters()})


def check_plain(spec: KernelSpec, case: Mapping[str, Any]) -> None:
    """Run a call on both; every output must have the same bytes, up to the order of violations."""
    bound = spec.bind(case)
    expected = outputs(spec, bound, implementation(spec.name, "reference"), fill=1)
    got = outputs(spec, bound, IMPLEMENTATIONS[spec.name], fill=2)
    assert differing(spec, bound, expected, got) is None


def outputs(
    spec: KernelSpec, bound: Mapping[str, Any], function: Callable[..., None], *, fill: int
) -> dict[str, torch.Tensor]:
    """The bytes of every output and in/out tensor after a run on poisoned copies, which leaves all else alone."""
    copies, spans = guarded(spec, bound, device="cpu", fill=fill)
    function(**copies)
    for span in spans:
        assert span.guards_intact(), span.leaf.path
        if span.leaf.role == "in":
            assert torch.equal(span.data, span.data_before), span.leaf.path
    return {span.leaf.path: span.data for span in spans if span.leaf.role in ("out", "inout")}


def write_call(
    *,
    offsets: list[int],
    slots: Sequence[int] = range(1, 10),
    tokens: Sequence[int] = range(9),
    prefixes: Sequence[int] = (3,),
    seeds: Sequence[int] = (1,),
    records: Mapping[int, Sequence[int]] | None = None,
    tracked: bool = False,
) -> dict[str, Any]:
    """A write by rows 1, 2, ..., with tails 10, 11, ... and an owner who is 3 mod 2**24, of tokens at positions 0."""
    count = len(prefixes)
    held = torch.zeros(11, 4, dtype=torch.int64)
    for slot, words in (records or {}).items():
        held[slot] = torch.tensor(words)
    return {
        "write_plan": kc.WritePlan(
            rows=torch.arange(count) + 1,
            owners=torch.full((count,), (1 << 24) + 3),
            offsets=int64(*offsets),
            prefix_lens=int64(*prefixes),
            seed_slots=int64(*seeds),
            num_requests=torch.tensor([count], dtype=torch.int32),
        ),
        "input_ids": int64(*tokens),
        "positions": torch.zeros(len(tokens), dtype=torch.int64),
        "out_slots": int64(*slots),
        "endpoint": kc.Endpoint(tag=1, records=held),
        "tails": torch.arange(count + 1) + 9,
        "step": int64(1),
        "check_positions": torch.ones(1, dtype=torch.int32),
        "expected_input_ids": torch.full((len(tokens),), 4),
        "track_lifetime": tracked,
        **log_and_counters(),
    }


def chain_of(token: int, *, tail: int) -> int:
    """The chain of a token at position 0 behind `tail`."""
    tails, status = int64(0, 0), torch.zeros(1, dtype=torch.int32)
    segment = {"flat": int64(token), "offsets": int64(0, 1), "rows": int64(1), "starts": int64(0)}
    IMPLEMENTATIONS["chain_tails"](**segment, anchors=int64(0, tail), tails=tails, pool=None, status=status)
    return int(tails[1])


def log_and_counters() -> dict[str, Any]:
    return {
        "violations": kc.ViolationLog.allocate(ring_cap=40),
        "counters": torch.zeros(6, 2, dtype=torch.int64),
    }


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)
