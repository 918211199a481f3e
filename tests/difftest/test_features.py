"""Feature coverage: what a call's features are, how cases are counted, and that the generators reach every pair."""

from __future__ import annotations

import dataclasses
import importlib
import json
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import kv_canary as kc
from kv_canary.difftest.coverage import FEATURES, INFEASIBLE, Coverage, feasible_pairs, why_infeasible
from kv_canary.difftest.features import of_call
from kv_canary.difftest.strategies.engine import engine_rounds
from kv_canary.specs import all_specs, get_spec

# Cases a generator draws before the gaps are looked at again, and how often that may be.
CASES, ROUNDS = 50, 25


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def plan_call(**changes: Any) -> dict[str, Any]:
    """A decode of two requests over a small table."""
    given = {
        "rows": int64(1, 2),
        "prefix_lens": int64(3, 2),
        "extend_lens": int64(1, 1),
        "req_to_token": torch.tensor([[0, 0, 0, 0], [1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.int32),
        "verify_plan": kc.VerifyPlan.allocate(verify_cap=8),
        "write_plan": kc.WritePlan.allocate(write_cap=2),
        "status": torch.zeros(1, dtype=torch.int32),
        **changes,
    }
    return get_spec("plan").bind(given)


@pytest.mark.parametrize(
    ("changes", "gained"),
    [
        ({}, set()),
        ({"rows": int64(1, 0)}, {"padding:rows"}),
        ({"rows": int64(1, 7)}, {"hostile:value"}),
        ({"prefix_lens": int64(3, 5)}, {"hostile:value"}),
        ({"lut": torch.arange(9)}, {"attention:lut"}),
        ({"lut": torch.arange(9) * (torch.arange(9) > 4)}, {"attention:lut", "residency:evicted"}),
        ({"lut": torch.arange(5)}, {"attention:lut", "hostile:value"}),
        ({"window": 1}, {"attention:window"}),
        ({"window": 2, "after_write": True}, {"attention:ring"}),
        ({"verify_plan": kc.VerifyPlan.allocate(verify_cap=4)}, {"capacity:truncated"}),
        # The window leaves four entries, which fit.
        ({"verify_plan": kc.VerifyPlan.allocate(verify_cap=4), "window": 2}, {"attention:window"}),
        ({"token_offset": 1}, {"tokens:shifted"}),
        ({"strides": int64(1, 2), "step": int64(1 << 39)}, {"strides:some", "step:wrapped"}),
        ({"owners": int64(5, 1 << 24)}, {"owner:wrapped"}),
        ({"req_to_token": torch.tensor([[0] * 3, [1, 2, 3], [1, 2, 9]], dtype=torch.int32)}, {"sharing:prefix"}),
        ({"req_to_token": torch.ones(3, 8, dtype=torch.int32)[:, :4]}, {"sharing:prefix", "rows:apart"}),
    ],
)
def test_features_of_a_plan(changes: dict[str, Any], gained: set[str]) -> None:
    plain = {"batch:decode", "requests:several"}
    attention = {name for name in gained if name.startswith("attention")} or {"attention:full"}
    assert of_call("plan", plan_call(**changes)) == plain | attention | gained


@pytest.mark.parametrize(
    ("prefix", "extend", "batch"),
    [
        ((0, 0), (3, 1), "fresh"),
        ((3, 2), (1, 1), "decode"),
        ((3, 2), (4, 2), "continued"),
        ((3, 0), (1, 1), "mixed"),
        ((3, 2), (1, 2), "mixed"),
    ],
)
def test_kinds_of_batches(prefix: tuple[int, int], extend: tuple[int, int], batch: str) -> None:
    features = of_call("plan", plan_call(prefix_lens=int64(*prefix), extend_lens=int64(*extend)))
    assert {f for f in features if f.startswith("batch")} == {f"batch:{batch}"}


def verify_call(*, slots: list[int], rows: list[int] | None = None, **changes: Any) -> dict[str, Any]:
    n = len(slots)
    records = torch.ones(300, 4, dtype=torch.int64)
    given = {
        "verify_plan": kc.VerifyPlan(
            slots=int64(*slots),
            prev_slots=torch.full((n,), -1),
            positions=torch.zeros(n, dtype=torch.int64),
            tokens=torch.full((n,), -1),
            rows=torch.tensor(rows or [1] * n, dtype=torch.int32),
            num_valid=torch.tensor([n], dtype=torch.int32),
            num_requested=int64(n),
        ),
        "endpoint": kc.Endpoint(tag=0, records=records),
        "step": int64(1),
        "violations": kc.ViolationLog.allocate(ring_cap=4),
        "counters": torch.zeros(6, 2, dtype=torch.int64),
        **changes,
    }
    return get_spec("verify").bind(given)


@pytest.mark.parametrize(
    ("entries", "gained"),
    [
        (1, set()),
        (126, set()),
        (127, {"tile:edge"}),
        (128, {"tile:edge"}),
        (129, {"tile:edge", "tile:verify"}),
        (131, {"tile:verify"}),
        (255, {"tile:edge", "tile:verify"}),
    ],
)
def test_tiles_are_crossed_past_their_size(entries: int, gained: set[str]) -> None:
    features = of_call("verify", verify_call(slots=list(range(1, entries + 1))))
    assert features == {"source:none", "ring:room"} | gained


@pytest.mark.parametrize(
    ("changes", "gained"),
    [
        ({"slots": [0]}, {"slot:unmapped"}),
        ({"slots": [-3]}, {"hostile:value"}),
        ({"slots": [300]}, {"hostile:value"}),
        ({"slots": [5, 5], "rows": [1, 2]}, {"sharing:prefix"}),
        ({"slots": [5, 5], "rows": [1, 1]}, set()),
        ({"slots": [1], "anchors": int64(1, 2)}, {"anchors:given"}),
        ({"slots": [1], "track_lifetime": True}, {"lifetime:tracked"}),
        ({"slots": [1], "step": int64(-1)}, {"step:wrapped"}),
    ],
)
def test_features_of_a_verify(changes: dict[str, Any], gained: set[str]) -> None:
    assert of_call("verify", verify_call(**changes)) == {"source:none", "ring:room"} | gained


def prefixes_call(**changes: Any) -> dict[str, Any]:
    """The decode of `plan_call`, as verify_prefixes takes it, over records that were all written."""
    given = {name: value for name, value in plan_call().items() if name not in ("after_write", "verify_plan")}
    given |= {name: value for name, value in verify_call(slots=[]).items() if name != "verify_plan"}
    return get_spec("verify_prefixes").bind({**given, "resolved": kc.ResolvedSlots.allocate(entry_cap=8), **changes})


@pytest.mark.parametrize(
    ("changes", "gained"),
    [
        ({}, set()),
        ({"resolved": kc.ResolvedSlots.allocate(entry_cap=4)}, {"capacity:truncated"}),
        ({"rows": int64(1, 7)}, {"hostile:value"}),
        ({"anchors": int64(4)}, {"anchors:given"}),
        ({"track_lifetime": True, "token_offset": 1}, {"lifetime:tracked", "tokens:shifted"}),
        ({"strides": int64(1, 2)}, {"strides:some"}),
        # The LUT sends the slots from 5 on, which only the second request has, to the padding slot.
        ({"lut": torch.arange(9) * (torch.arange(9) < 5)}, {"residency:evicted", "slot:unmapped"}),
        ({"endpoint": kc.Endpoint(tag=0, records=torch.zeros(9, 4, dtype=torch.int64))}, {"record:zero"}),
    ],
)
def test_features_of_prefixes(changes: dict[str, Any], gained: set[str]) -> None:
    attention = {"attention:lut" if "lut" in changes else "attention:full"}
    plain = {"batch:decode", "requests:several", "source:none", "ring:room"} | attention
    assert of_call("verify_prefixes", prefixes_call(**changes)) == plain | gained


def test_prefixes_cross_the_tiles_of_verify() -> None:
    table = torch.arange(400, dtype=torch.int32).view(2, 200)
    changes = {"rows": int64(1), "prefix_lens": int64(129), "extend_lens": int64(1), "req_to_token": table}
    changes["resolved"] = kc.ResolvedSlots.allocate(entry_cap=200)
    assert {"tile:verify", "tile:edge"} <= of_call("verify_prefixes", prefixes_call(**changes))
    changes["resolved"] = kc.ResolvedSlots.allocate(entry_cap=100)
    assert "tile:verify" not in of_call("verify_prefixes", prefixes_call(**changes))


@pytest.mark.parametrize(
    ("entries", "gained"),
    [
        ([[1, -1, 0, 0]], set()),
        ([[0, -1, 0, 0]], {"slot:unmapped"}),
        ([[-3, -1, 0, 0]], {"hostile:value"}),
        ([[1, -1, 0, 2]], {"hostile:value"}),
        ([[1, -1, 0, -1]], {"hostile:value"}),
        ([[5, -1, 0, 0], [5, -1, 0, 1]], {"sharing:prefix"}),
        ([[5, -1, 0, 0], [5, -1, 0, 0]], set()),
        ([[1, -1, 0, 0]] * 129, {"tile:verify", "tile:edge"}),
    ],
)
def test_features_of_resolved_slots(entries: list[list[int]], gained: set[str]) -> None:
    call = {name: value for name, value in verify_call(slots=[]).items() if name != "verify_plan"}
    call["rows"] = int64(1, 2)
    call["resolved"] = kc.ResolvedSlots(
        entries=torch.tensor([[slot, ~position] for slot, _, position, _ in entries], dtype=torch.int32),
        runs=torch.tensor([[previous, request] for _, previous, _, request in entries], dtype=torch.int32),
        num_valid=torch.tensor([len(entries)], dtype=torch.int32),
        num_requested=int64(len(entries)),
    )
    bound = get_spec("verify_resolved").bind(call)
    assert of_call("verify_resolved", bound) == {"requests:several", "source:none", "ring:room"} | gained


def test_features_of_records_and_sources() -> None:
    arguments = verify_call(slots=[1, 2])
    records = torch.zeros(300, 8, dtype=torch.int64)[:, :4]
    records[1, 3] = -1
    layers = tuple(torch.zeros(101, 90, dtype=torch.uint8)[:, :80] for _ in range(2))
    source = kc.KvSource(layers=layers, page_size=3, bytes_per_token=20, read_bytes=16, offset_bytes=8, slot_bias=1)
    arguments["endpoint"] = kc.Endpoint(tag=0, records=records, v_source=source)
    expected = "source:v ring:room rows:apart record:retired record:zero page:odd layers:many windows:many "
    expected += "windows:ragged alignment:less layout:bias layout:offset layout:gaps"
    assert of_call("verify", arguments) == set(expected.split())
    short = dataclasses.replace(source, layers=tuple(layer[:90] for layer in layers))
    arguments["endpoint"] = kc.Endpoint(tag=0, records=records, v_source=short)
    assert of_call("verify", arguments) == {*expected.split(), "layout:short"}


def test_rows_far_apart_are_giant() -> None:
    table = torch.empty_strided((3, 4), ((1 << 30) + 1, 1), dtype=torch.int32, device="meta")
    near = torch.empty_strided((3, 4), ((1 << 30) - 4, 1), dtype=torch.int32, device="meta")
    from kv_canary.difftest.features import _tables

    assert list(_tables(table)) == ["rows:apart", "rows:giant"]
    assert list(_tables(near)) == ["rows:apart"]


def test_foreign_ops_have_no_features() -> None:
    assert of_call("add", {"x": int64(1)}) == frozenset()


def test_a_case_counts_its_features_and_their_pairs() -> None:
    coverage = Coverage()
    coverage.add({"batch:decode", "padding:rows", "not:known"})
    coverage.add({"batch:empty", "padding:rows"}, {"batch:decode", "anchors:given"})
    assert coverage.features == {"batch:decode": 2, "batch:empty": 1, "padding:rows": 2, "anchors:given": 1}
    assert coverage.pairs[("batch:decode", "padding:rows")] == 2
    # Across the calls of a round, but not between alternatives.
    assert coverage.pairs[("anchors:given", "padding:rows")] == 1
    assert ("batch:decode", "batch:empty") not in coverage.pairs


def test_what_concerns_one_op_meets_only_what_the_same_call_has() -> None:
    coverage = Coverage()
    coverage.add({"tile:verify", "page:one"}, {"page:odd", "tokens:expected"})
    assert set(coverage.pairs) == {
        ("page:one", "tile:verify"),
        ("page:odd", "page:one"),
        ("page:one", "tokens:expected"),
        ("page:odd", "tokens:expected"),
    }


def test_coverage_merges_and_survives_json() -> None:
    first, second = Coverage(), Coverage()
    first.add({"batch:decode", "padding:rows"})
    second.add({"batch:decode", "requests:one"})
    first.merge(second)
    again = Coverage.from_json(json.loads(json.dumps(first.to_json())))
    assert (again.cases, again.features, again.pairs) == (first.cases, first.features, first.pairs)
    assert again.cases == 2
    assert again.features["batch:decode"] == 2


def test_summary_and_gaps_count_feasible_pairs() -> None:
    coverage = Coverage()
    assert set(coverage.gaps()) == feasible_pairs()
    coverage.add({"batch:decode", "padding:rows"})
    assert len(coverage.gaps()) == len(feasible_pairs()) - 1
    total = len(FEATURES) * (len(FEATURES) - 1) // 2
    infeasible = total - len(feasible_pairs())
    assert (
        coverage.summary() == f"1 of {len(feasible_pairs())} feasible pairs covered by 1 cases, {infeasible} infeasible"
    )
    assert coverage.table().row_count == len(FEATURES)


def test_every_infeasible_pair_has_a_reason_and_names_features() -> None:
    for first, second, reason in INFEASIBLE:
        assert {first, second} <= set(FEATURES)
        assert reason
        assert tuple(sorted((first, second))) not in feasible_pairs()
    names = sorted(FEATURES)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            assert why_infeasible(first, second) == why_infeasible(second, first)
            assert bool(why_infeasible(first, second)) == ((first, second) not in feasible_pairs())


@pytest.mark.long
def test_generators_reach_every_feasible_pair() -> None:
    coverage, impossible = Coverage(), Coverage()

    def draw(cases: st.SearchStrategy[Any], number: int, *, healthy: bool) -> None:
        @seed(number)
        @settings(
            max_examples=CASES,
            database=None,
            deadline=None,
            derandomize=False,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(calls=cases)
        def count(calls: list[tuple[str, dict[str, Any]]]) -> None:
            features = [of_call(op, arguments) for op, arguments in calls]
            for (op, _), names in zip(calls, features, strict=True):
                assert all(op in FEATURES[name].ops for name in names)
            coverage.add(*features)
            if healthy:
                impossible.add(*features)

        count()

    # Each generator is asked again only while something is missing that it may have.
    for number in range(ROUNDS):
        gaps = coverage.gaps()
        if not gaps:
            break
        draw(engine_rounds(), number, healthy=False)
        draw(engine_rounds(max_lens=(300, 640), faults=False), number, healthy=True)
        for op in all_specs():
            cases = importlib.import_module(f"kv_canary.difftest.strategies.{op}").cases
            both = [pair for pair in gaps if all(op in FEATURES[name].ops for name in pair)]
            for giant in (False, True):
                if any(giant == ("rows:giant" in pair) for pair in both):
                    isolated = cases(giant=giant)
                    draw(isolated.map(lambda a, op=op: [(op, get_spec(op).bind(a))]), number, healthy=False)
    assert coverage.gaps() == [], coverage.summary()
    assert set(impossible.pairs) <= feasible_pairs()
