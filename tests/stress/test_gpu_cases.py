"""The comparison of two lives on a GPU that need not be scheduled alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kv_canary.demo.models import save_tiny_model
from kv_canary.difftest.stress.gpu_cases import ROUNDING, below_the_likeliest, compared


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


def test_another_token_is_as_right_only_where_the_model_finds_it_as_likely(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    save_tiny_model(tmp_path)
    prompts = {"a": [5, 6, 7], "b": [8, 9]}
    with torch.no_grad():
        model = LlamaForCausalLM.from_pretrained(tmp_path).eval()
        # The token that differs is the second of "a", and the first of "b".
        logits = {
            "a": model(torch.tensor([[5, 6, 7, 4]])).logits[0, -1],
            "b": model(torch.tensor([[8, 9]])).logits[0, -1],
        }
    order = {name: row.argsort(descending=True).tolist() for name, row in logits.items()}
    watched = _life({"a": [4, order["a"][1]], "b": [order["b"][0]]}, prompts)
    plain = _life({"a": [4, order["a"][0]], "b": [order["b"][-1]]}, prompts)
    a, b = logits["a"], logits["b"]
    expected = [
        float((row[first] - row[other]) / row.std())
        for row, first, other in ((a, order["a"][0], order["a"][1]), (b, order["b"][0], order["b"][-1]))
    ]
    found = below_the_likeliest(tmp_path, watched, plain)
    assert found == pytest.approx(expected, abs=1e-4)
    assert below_the_likeliest(tmp_path, plain, watched) == found
    assert found[1] > 100 * ROUNDING


def test_lives_that_do_not_differ_need_no_model(tmp_path: Path) -> None:
    assert below_the_likeliest(tmp_path / "none", _life({"a": [5]}), _life({"a": [5, 6]})) == []
