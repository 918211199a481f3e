"""The comparison of two lives on a GPU that need not be scheduled alike."""

from __future__ import annotations

from typing import Any

from kv_canary.difftest.stress.gpu_cases import compared


def _life(
    tokens: dict[str, list[int]],
    prompts: dict[str, list[int]] | None = None,
    schedule: str = "ab",
    given_up: tuple[str, ...] = (),
) -> dict[str, Any]:
    own = {name: [1, 2] for name in tokens} if prompts is None else prompts
    return {"tokens": tokens, "prompts": own, "schedule": schedule, "given_up": list(given_up)}


def test_what_was_given_up_is_compared_as_far_as_it_went() -> None:
    found = compared(_life({"a": [5, 6, 7], "b": [8]}), _life({"a": [5, 6], "b": [8, 9]}))
    assert found == {"requests": 2, "tokens": 3, "differ": [], "cut short": 2, "scheduled alike": True}


def test_another_token_is_named_with_its_request() -> None:
    found = compared(_life({"a": [5, 6, 7], "b": [8]}), _life({"a": [5, 0, 0], "b": [8]}, schedule="cd"))
    assert found["differ"] == [["a", 1]]
    assert not found["scheduled alike"]


def test_lives_that_gave_up_other_requests_were_not_scheduled_alike() -> None:
    found = compared(_life({"a": [5], "b": [8, 9]}, given_up=("a",)), _life({"a": [5, 6], "b": [8]}, given_up=("b",)))
    assert (found["differ"], found["cut short"], found["scheduled alike"]) == ([], 2, False)


def test_other_prompts_and_requests_of_one_life_alone_are_not_compared() -> None:
    mine, other = {"a": [5], "b": [6], "c": []}, {"a": [0], "c": [9]}
    found = compared(_life(mine), _life(other, {"a": [1], "c": [1, 2]}))
    assert found == {"requests": 1, "tokens": 0, "differ": [], "cut short": 1, "scheduled alike": True}


def test_a_life_that_was_not_served_is_compared_with_nothing() -> None:
    assert compared(_life({"a": [5]}), {"served": False})["requests"] == 0
