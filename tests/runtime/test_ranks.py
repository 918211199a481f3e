"""Ranks that differ, are damaged, fail or die, in real processes over a real group: each told right, and none hangs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kv_canary.difftest.stress import ranks
from kv_canary.difftest.stress.rank_scenarios import SCENARIOS, judge

Results = dict[str, list[dict[str, Any]]]
# What a benchmark alone is for.
NAMES = [name for name in SCENARIOS if name != "costs"]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Results:
    """Return what each rank said in each scenario that a test asks for; `launch` raises if any of them hangs."""
    mine = [item for item in request.session.items if item.path == request.path]
    asked = {item.callspec.params.get("name") if hasattr(item, "callspec") else None for item in mine}
    return ranks.launch(NAMES if None in asked else [name for name in NAMES if name in asked])


@pytest.mark.every_day("healthy", "damage, raised")
@pytest.mark.parametrize("name", NAMES)
def test_the_ranks_say_what_they_have_to(results: Results, name: str) -> None:
    assert judge(name, results[name]), json.dumps(results[name], indent=1)


@pytest.mark.long
def test_a_healthy_run_is_compared_all_along(results: Results) -> None:
    for facts in results["healthy"]:
        assert (facts["steps"], facts["compared"], facts["watching"]) == (200, 40, "complete")
        assert facts["differences"] == []


@pytest.mark.long
def test_a_rank_that_loaded_nothing_is_named_with_its_slot(results: Results) -> None:
    for facts in results["not loaded"]:
        sentence = facts["sentences"][0]
        assert "step 2: rank 1 of 2 differs on request c in full and window: NOT_LOADED" in sentence
        assert "Rank 1 (NOT_LOADED) has 32 tokens cached" in sentence
        assert "its slot 96 holds nothing" in sentence


@pytest.mark.long
def test_both_lengths_of_a_prefix_hit_are_told(results: Results) -> None:
    for facts in results["prefix length"]:
        assert "Rank 0 (PREFIX_LEN) has 32 tokens cached" in facts["sentences"][0]
        assert "Rank 1 (PREFIX_LEN) has 16 tokens cached" in facts["sentences"][0]


@pytest.mark.long
def test_of_three_ranks_the_majority_is_right(results: Results) -> None:
    for facts in results["prefix length of three"]:
        assert "rank 1 of 3 differs" in facts["sentences"][0]
        assert "Rank 2 has 32 tokens cached" in facts["sentences"][0]


@pytest.mark.long
def test_a_flip_on_one_rank_is_raised_by_both_before_the_same_step(results: Results) -> None:
    first, second = results["damage, raised"]
    # It is read in step 7, drained before step 8, and known to both before step 9.
    assert first["raised_before"] == second["raised_before"] == [9]
    assert "all ranks stop before step 9: rank 1 found 1, first step 7 HEAD_FULL: request a" in first["raised"][0]
    assert first["raised"] == second["raised"]
    assert (first["reasons"], second["reasons"]) == ([], ["K"])


@pytest.mark.long
def test_a_forward_that_fails_on_one_rank_leaves_the_others_comparing(results: Results) -> None:
    for name in ("given up", "given up, raise mode"):
        # 18 digests were due, and the last two had no step to be exchanged before.
        assert [facts["compared"] for facts in results[name]] == [16, 16]


@pytest.mark.long
def test_a_rank_that_lost_another_goes_on_and_says_so(results: Results) -> None:
    for name in ("silent", "silent, raise mode", "killed", "killed, raise mode"):
        survivor = results[name][0]
        assert survivor["watching"] == "partial"
        # It went on verifying, alone, and raised nothing.
        assert survivor["reasons"] == ["K"]
        assert survivor["raised"] == []


@pytest.mark.long
def test_a_killed_rank_has_nothing_to_say(results: Results) -> None:
    assert results["killed"][1] == results["killed, raise mode"][1] == {}


def test_damage_may_be_found_by_its_seal_too_and_by_nothing_else() -> None:
    def found(*reasons: str) -> bool:
        rank = {"watching": "partial", "reasons": list(reasons), "raised": []}
        return judge("silent", [rank, {"watching": "partial", "reasons": [], "raised": []}])

    assert found("K")
    assert found("K", "SEAL_K")
    assert not any(found(*reasons) for reasons in ((), ("SEAL_K",), ("K", "TOKEN")))
