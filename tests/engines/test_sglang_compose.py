"""Compositions of SGLang's batches: kept while list and rows stay, made anew where either changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from kv_canary.engines.sglang.batches import Owners
from kv_canary.engines.sglang.compose import Composer
from kv_canary.engines.sglang.identities import Identities


class Req:
    """What a composition asks of SGLang's request."""

    def __init__(self, name: str, row: int) -> None:
        self.rid, self.kv = name, SimpleNamespace(req_pool_idx=row)
        self.origin_input_ids, self.output_ids = [1, 2, 3], [4]
        self.lora_id = self.extra_key = None


def batch(reqs: list[Req], mirror: torch.Tensor | None) -> Any:
    mode = SimpleNamespace(is_decode=lambda: True)
    return SimpleNamespace(reqs=list(reqs), req_pool_indices_cpu=mirror, forward_mode=mode)


def composer() -> Composer:
    return Composer(Owners(), Identities(counts_weights=True))


def test_a_list_whose_rows_stay_keeps_its_composition() -> None:
    mine, reqs = composer(), [Req("a", 3), Req("b", 5)]
    rows = torch.tensor([3, 5])
    first = mine.compose(batch(reqs, rows))
    assert first is not None
    assert first.rows.tolist() == [3, 5]
    assert mine.compose(batch(reqs, rows)) is first
    # Another tensor of the same rows, as the scheduler makes one where it filters a batch.
    assert mine.compose(batch(reqs, rows.clone())) is first


def test_a_request_that_comes_again_in_another_row_is_composed_anew() -> None:
    mine, reqs = composer(), [Req("a", 3), Req("b", 5)]
    first = mine.compose(batch(reqs, torch.tensor([3, 5])))
    for _ in range(2):
        assert mine.compose(batch(reqs, torch.tensor([3, 5]))) is first
    reqs[1].kv.req_pool_idx = 7
    second = mine.compose(batch(reqs, torch.tensor([3, 7])))
    assert second is not None
    assert second is not first
    assert first is not None
    assert second.rows.tolist() == [3, 7]
    assert second.owners.tolist() == first.owners.tolist()
    assert mine.compose(batch(reqs, torch.tensor([3, 7]))) is second


def test_without_a_mirror_rows_are_read_each_time() -> None:
    mine, reqs = composer(), [Req("a", 3)]
    first = mine.compose(batch(reqs, None))
    reqs[0].kv.req_pool_idx = 4
    second = mine.compose(batch(reqs, None))
    assert first is not None
    assert second is not None
    assert (first.rows.tolist(), second.rows.tolist()) == ([3], [4])
