"""Compositions of SGLang's batches: kept while list and rows stay, made anew where either changes."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kv_canary.engines.sglang import batches
from kv_canary.engines.sglang.batches import Owners
from kv_canary.engines.sglang.compose import Composer
from kv_canary.engines.sglang.identities import Identities
from kv_canary.runtime.composition import BatchRequests


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


def decodes(mine: Composer, reqs: list[Req], lengths: list[int], rows: list[int]) -> BatchRequests | None:
    """Ask for the requests of a decode step, whose lengths count the new token."""
    composition = mine.compose(batch(reqs, torch.tensor(rows)))
    forward = SimpleNamespace(
        forward_mode=SimpleNamespace(is_decode=lambda: True),
        seq_lens_cpu=torch.tensor(lengths),
        seq_lens_sum=sum(lengths),
    )
    assert composition is not None
    batches.note_composed(forward, composition)
    return mine.requests(forward, lookahead=0)


def grown(reqs: list[Req], tokens: int) -> None:
    for number, req in enumerate(reqs):
        req.output_ids.append(100 * number + tokens)


def test_a_decode_step_follows_the_one_before() -> None:
    mine, reqs = composer(), [Req("a", 3), Req("b", 5)]
    reqs[1].output_ids += [7, 8]
    found = []
    for step in range(5):
        requests = decodes(mine, reqs, [5 + step, 7 + step], [3, 5])
        assert requests is not None
        assert requests.newest_of_all is not None
        assert requests.prefix.tolist() == [4 + step, 6 + step]
        assert requests.newest_of_all.tolist() == [req.output_ids[-1] for req in reqs]
        found.append(requests.previous is not None)
        grown(reqs, step)
    assert found == [False, True, True, True, True]


def test_a_request_that_starts_again_in_its_row_is_asked_for_its_new_text() -> None:
    mine, reqs = composer(), [Req("a", 3), Req("b", 5)]
    reqs[0].output_ids += [50, 51]
    assert decodes(mine, reqs, [7, 5], [3, 5]) is not None
    # Put off, with all that it had generated given up, and back in the same row.
    mine.row_ended(3)
    reqs[0].output_ids = [60]
    requests = decodes(mine, reqs, [5, 5], [3, 5])
    assert requests is not None
    assert requests.newest_of_all is not None
    assert requests.newest_of_all.tolist() == [60, 4]
    # Another list of the same, without a word: that is seen where it is too short for what is asked.
    reqs[0].output_ids = [70, 71]
    found = decodes(mine, reqs, [6, 5], [3, 5])
    assert found is not None
    assert found.newest_of_all is not None
    assert found.newest_of_all.tolist() == [71, 4]


def test_the_newest_token_of_a_prompt_is_not_taken_from_what_was_generated() -> None:
    mine, reqs = composer(), [Req("a", 3), Req("b", 5)]
    reqs[0].output_ids += [50, 51]
    composition = mine.compose(batch(reqs, torch.tensor([3, 5])))
    assert composition is not None
    newest = composition.source.newest
    # Within the first one's prompt, and the other's only token.
    found = newest(composition.members, np.array([2, 4]))
    assert found is not None
    assert found.tolist() == [2, 4]
    # The other's next one is not there yet, then in another list.
    assert newest(composition.members, np.array([2, 5])) is None
    reqs[1].output_ids = [7, 8]
    found = newest(composition.members, np.array([2, 5]))
    assert found is not None
    assert found.tolist() == [2, 8]


def test_a_step_after_one_that_was_left_out_is_looked_at_anew() -> None:
    mine, reqs = composer(), [Req("a", 3), Req("b", 5)]
    assert decodes(mine, reqs, [5, 5], [3, 5]) is not None
    grown(reqs, 0)
    grown(reqs, 1)
    skipped = decodes(mine, reqs, [7, 7], [3, 5])
    assert skipped is not None
    assert skipped.previous is None
    assert skipped.prefix.tolist() == [6, 6]


def test_texts_that_are_replaced_are_read_anew() -> None:
    mine, reqs = composer(), [Req("a", 3), Req("b", 5)]
    for step in range(3):
        assert decodes(mine, reqs, [5 + step, 5 + step], [3, 5]) is not None
        grown(reqs, step)
    # The list that was read before grows no more.
    reqs[0].output_ids = [*reqs[0].output_ids[:-1], 77]
    requests = decodes(mine, reqs, [8, 8], [3, 5])
    assert requests is not None
    assert requests.newest_of_all is not None
    grown(reqs, 5)
    requests = decodes(mine, reqs, [9, 9], [3, 5])
    assert requests is not None
    assert requests.newest_of_all is not None
    assert requests.newest_of_all.tolist() == [5, 105]


def test_rows_that_the_mirror_has_wrong_are_read_off_the_requests() -> None:
    mine, reqs = composer(), [Req("a", 3), Req("b", 5)]
    for mirror in ([5, 3], [3, 3], [3, -1], [3]):
        composition = mine.compose(batch(reqs, torch.tensor(mirror)))
        assert composition is not None
        assert composition.rows.tolist() == [3, 5]
    reqs[1].kv.req_pool_idx = None
    assert mine.compose(batch(reqs, torch.tensor([3, 6]))) is None


def test_requests_that_have_ended_are_not_kept() -> None:
    mine = composer()
    first = Req("first", 1)
    gone = weakref.ref(first)
    assert mine.compose(batch([first], torch.tensor([1]))) is not None
    del first
    for number in range(2, 700):
        assert mine.compose(batch([Req(str(number), number % 40 + 2)], torch.tensor([number % 40 + 2]))) is not None
    gc.collect()
    assert gone() is None


def test_a_row_that_changes_hands_is_its_new_requests() -> None:
    mine, first, second = composer(), Req("a", 3), Req("b", 3)
    second.lora_id = "adapter"
    second.origin_input_ids = [1] * 9
    one, other = (mine.compose(batch([req], torch.tensor([3]))) for req in (first, second))
    assert one is not None
    assert other is not None
    assert one.owners.tolist() != other.owners.tolist()
    assert one.identities.tolist() != other.identities.tolist()
    again = mine.compose(batch([first], torch.tensor([3])))
    assert again is not None
    assert again.owners.tolist() == one.owners.tolist()
    assert again.identities.tolist() == one.identities.tolist()
