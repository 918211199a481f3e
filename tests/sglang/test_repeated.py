"""Decode steps that the adapter repeats, as where SGLang decodes from a CUDA graph: they find what all others find."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch

from kv_canary.difftest.stress.sglang.replayed import Graphs
from kv_canary.engines.sglang import compose, graphs, session
from kv_canary.runtime.context import CanaryContext
from kv_canary.runtime.forward import SingleForwardManager
from kv_canary.runtime.replays import Replays

from . import engine
from .test_given import build, shorten, spoil, swap_rows, tokens


class Asked(list[bool]):
    """Of each decode whether it was repeated; `prefills` says it of each of those."""

    def __init__(self) -> None:
        super().__init__()
        self.prefills: list[bool] = []


@pytest.fixture(params=[False, True], ids=["as it is", "rounded"])
def repeated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Let decodes be replays of graphs, and take down which forwards were repeated."""
    asked = Asked()
    real = SingleForwardManager.repeat

    def repeat(self: Any, requests: Any, **kwargs: Any) -> bool:
        repeats = real(self, requests, **kwargs)
        (asked if kwargs["given"] is None else asked.prefills).append(repeats)
        return repeats

    monkeypatch.setattr(SingleForwardManager, "repeat", repeat)
    monkeypatch.setattr(graphs, "Graphs", Graphs)
    if request.param:
        monkeypatch.setattr(CanaryContext, "new_replays", lambda _: Replays(lambda launch: launch))
    return asked


def rounds_up(its: session.Session) -> bool:
    return its.manager.context.new_replays().rounds_up


ARGS: list[dict[str, Any]] = [
    {},
    {"disable_overlap_schedule": False},
    {"disable_overlap_schedule": False, "chunked_prefill_size": 16},
    {"disable_overlap_schedule": False, "max_total_tokens": 260},
    {"disable_overlap_schedule": False, "enable_mixed_chunk": True, "chunked_prefill_size": 16},
    {"disable_radix_cache": True},
]


@pytest.mark.parametrize("args", ARGS, ids=str)
def test_requests_that_come_and_go_are_repeated_and_silent(llama: str, repeated: Asked, args: dict[str, Any]) -> None:
    scheduler = build(llama, **args)
    draw = random.Random(4)
    reqs: list[Any] = []

    def arrive(step: int) -> None:
        if step % 3 == 0 and len(reqs) < 24:
            prompt = tokens(20, 1)[: draw.randint(0, 20)] + tokens(draw.randint(1, 30), len(reqs))
            reqs.append(engine.submit(scheduler, prompt, draw.randint(1, 25), rid=f"r{len(reqs)}"))
        if step == 40:
            engine.abort(scheduler, "r9")

    arrive(0)
    engine.run_all(scheduler, arrive)
    manager = session.current().manager
    manager.flush()
    summary = manager.summary()
    assert (summary.violations, summary.failures, summary.skipped, summary.unverified) == (0, {}, 0, 0)
    assert summary.positions_verified == summary.positions_relied_on > 0
    assert len(reqs) == 24
    assert all(engine.is_greedy(llama, r.origin_input_ids, r.output_ids) for r in reqs if r.rid != "r9")
    # Most decodes are, although the list changes all the time.
    assert sum(repeated) > len(repeated) / 2 > 15
    if rounds_up(session.current()) and "enable_mixed_chunk" not in args:
        # Prompts of all lengths, in few sizes once they are rounded.
        assert sum(repeated.prefills) > 3


def test_requests_are_asked_when_they_join_a_list_and_seldom_again(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    take = compose._Rows.take

    def counted(self: Any, row: int, req: Any, **kwargs: Any) -> None:
        asked.append(req.rid)
        take(self, row, req, **kwargs)

    monkeypatch.setattr(compose._Rows, "take", counted)
    # Those of requests that have ended are let go of again and again meanwhile.
    monkeypatch.setattr(compose, "_MOST_TAKEN", 3)
    scheduler = build(llama)

    def arrive(step: int) -> None:
        if step % 2 == 0 and step < 40:
            engine.submit(scheduler, tokens(9, step), 5 + step % 7, rid=f"r{step}")

    arrive(0)
    engine.run_all(scheduler, arrive)
    assert set(asked) == {f"r{step}" for step in range(0, 40, 2)}
    # Those are asked again that have prefilled and not decoded yet when others are let go of.
    assert len(asked) < 1.5 * len(set(asked)), asked
    members = session.current()._composer._rows._members
    assert sum(req is not None for req in members) <= 3


@pytest.mark.parametrize(("change", "who"), [(swap_rows, {"a", "b"}), (shorten, {"b"})], ids=["rows", "length"])
def test_a_batch_on_the_device_that_is_not_the_schedulers_is_found_at_once(
    llama: str, repeated: Asked, monkeypatch: pytest.MonkeyPatch, change: Any, who: set[str]
) -> None:
    scheduler = build(llama, disable_overlap_schedule=False)
    steps = spoil(monkeypatch, change, from_forward=9)
    for n in range(3):
        engine.submit(scheduler, tokens(20 + 7 * n, n), 12, rid="abc"[n])
    engine.run_all(scheduler)
    manager = session.current().manager
    manager.flush()
    assert sum(repeated) > 5
    batch = [r for r in manager.reports if "BATCH" in r.reasons]
    assert {r.request_id for r in batch} == who
    assert min(r.step for r in manager.reports) == min(r.step for r in batch) == steps[0]


def test_a_bit_that_flips_between_repeated_steps_is_found_in_the_next(llama: str, repeated: Asked) -> None:
    scheduler = build(llama, disable_overlap_schedule=False)
    for n in range(3):
        engine.submit(scheduler, tokens(20 + 7 * n, n), 20, rid="abc"[n])
    flipped: list[int] = []

    def flip(step: int) -> None:
        if step == 12:
            pool = scheduler.tp_worker.model_runner.token_to_kv_pool
            [b] = [r for r in scheduler.running_batch.reqs if r.rid == "b"]
            slot = int(scheduler.req_to_token_pool.req_to_token[b.kv.req_pool_idx, 3])
            # The bytes that are verified of position 3.
            for keys in pool.k_buffer:
                keys.view(torch.uint8)[slot] ^= 1
            flipped.append(session.current().manager.step)

    engine.run_all(scheduler, flip)
    manager = session.current().manager
    manager.flush()
    assert sum(repeated) > 10
    assert flipped
    first = manager.reports[0]
    assert (first.request_id, first.position, first.reasons) == ("b", 3, ("K",))
    assert flipped[0] < first.step <= flipped[0] + 2
