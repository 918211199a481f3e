"""Speculative decoding with chains of drafts, in a running scheduler: what is healthy stays unreported."""

from __future__ import annotations

import random
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

import kv_canary
from kv_canary.difftest.stress.sglang.drafts import STEPS, accepted, save_models
from kv_canary.engines.sglang import chosen as tokens
from kv_canary.engines.sglang import completion, session, speculative

from . import eagle_harness, engine
from .eagle_harness import some_tokens

NEW = 24


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_models(tmp_path_factory.mktemp("eagle"))


def run(scheduler: Any, prompts: list[list[int]]) -> list[Any]:
    reqs = [engine.submit(scheduler, prompt, NEW) for prompt in prompts]
    engine.run_all(scheduler)
    return reqs


def check(model: str, reqs: list[Any], *, steps: int = STEPS) -> dict[str, Any]:
    """See that outputs are the target's own, that nothing was found, and that all relied on was verified."""
    assert all(engine.is_greedy(model, req.origin_input_ids, list(req.output_ids)[:NEW]) for req in reqs)
    status = clean()
    right, wrong = accepted(reqs, steps=steps)
    assert right > 10
    assert wrong > 10
    return status


def clean() -> dict[str, Any]:
    session.current().manager.flush()
    status = session.current().status()
    assert (status["watching"], status["off"], status["violations"]) == ("complete", "", 0)
    assert status["positions_verified"] == status["positions_relied_on"] > 1_000
    return status


def prompts_with_hits() -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts of one chunk and of several, some as long as whole chunks; then some that begin like them."""
    shared = some_tokens(100, seed=0)
    first = [shared + some_tokens(7, seed=1), *(some_tokens(n, seed=n) for n in (150, 9, 64, 128))]
    return first, [
        shared + some_tokens(5, seed=6),
        first[1] + some_tokens(3, seed=7),
        some_tokens(200, seed=8),
        first[0],
    ]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("check_inputs", ["0", "1"])
def test_chunks_and_prefix_hits_are_clean(models: tuple[str, str], overlap: bool, page: int, check_inputs: str) -> None:
    scheduler = eagle_harness.build(
        models,
        settings={"KV_CANARY_CHECK_INPUTS": check_inputs, "KV_CANARY_SWEEP_EVERY": "3"},
        disable_overlap_schedule=not overlap,
        page_size=page,
    )
    assert scheduler.enable_overlap is overlap
    first, then = prompts_with_hits()
    reqs = run(scheduler, first)
    hits = run(scheduler, then)
    # A cached position of the draft model goes with the token behind it.
    assert [req.cached_tokens for req in hits] == ([99, 149, 0, 105] if page == 1 else [96, 144, 0, 96])
    assert check(models[0], reqs + hits)["groups"] == ["full", "draft"]


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("check_inputs", [False, True])
def test_lengths_that_are_on_the_device_only_are_waited_for_behind_the_launch(
    models: tuple[str, str], monkeypatch: pytest.MonkeyPatch, steps: int, check_inputs: bool
) -> None:
    chain = {"speculative_num_steps": steps, "speculative_num_draft_tokens": steps + 1}
    settings = {"KV_CANARY_CHECK_INPUTS": str(int(check_inputs))}
    scheduler = eagle_harness.build(models, settings=settings, disable_overlap_schedule=False, **chain)
    # As attention backends have it that read lengths on the device.
    scheduler.future_map.needs_cpu_seq_lens = False
    # Of each forward whose lengths the host has not got: what happens in it, in order.
    seen: list[tuple[str, list[str]]] = []
    arrived: list[Any] = []
    forward, wait, settle = session.Session.forward, tokens.Chosen.wait, speculative.Speculation.settle

    def watched(self: Any, original: Any, runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((batch.forward_mode.name if batch.seq_lens_cpu is None else "", []))

        def launched(*args: Any, **kwargs: Any) -> Any:
            seen[-1][1].append("launch")
            return original(*args, **kwargs)

        return forward(self, launched, runner, batch, *args, **kwargs)

    def settled(self: Any) -> None:
        # Nothing is to be launched: whoever waits keeps nobody.
        seen.append(("", []))
        settle(self)

    def waited(self: Any) -> None:
        # What was read before has arrived.
        if seen and self not in arrived:
            seen[-1][1].append("wait")
            arrived.append(self)
        wait(self)

    monkeypatch.setattr(session.Session, "forward", watched)
    monkeypatch.setattr(tokens.Chosen, "wait", waited)
    monkeypatch.setattr(speculative.Speculation, "settle", settled)
    first, then = prompts_with_hits()
    check(models[0], run(scheduler, first) + run(scheduler, then), steps=steps)
    modes = {"TARGET_VERIFY", "DRAFT_EXTEND_V2"} | ({"DECODE"} if steps > 1 else set())
    assert modes == {mode for mode, _ in seen if mode}
    waits = {(mode, order.index("wait") < order.index("launch")) for mode, order in seen if mode and "wait" in order}
    if check_inputs:
        # Before the draft model writes what has just been chosen.
        assert ("DRAFT_EXTEND_V2", True) in waits
    else:
        assert ("DECODE" if steps > 1 else "TARGET_VERIFY", False) in waits
        assert waits <= {("DECODE", False), ("TARGET_VERIFY", False)}


def test_what_has_just_been_chosen_is_not_waited_for(models: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model's last forward of a step goes by what the step began with."""
    scheduler = eagle_harness.build(models, disable_overlap_schedule=False)
    read: dict[Any, str] = {}
    where = [""]
    forward, wait, settle = session.Session.forward, tokens.Chosen.wait, speculative.Speculation.settle

    def watched(self: Any, original: Any, runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        where.append(batch.forward_mode.name)
        return forward(self, original, runner, batch, *args, **kwargs)

    def settled(self: Any) -> None:
        where.append("idle")
        settle(self)

    def waited(self: Any) -> None:
        read.setdefault(self, where[-1])
        wait(self)

    monkeypatch.setattr(session.Session, "forward", watched)
    monkeypatch.setattr(tokens.Chosen, "wait", waited)
    monkeypatch.setattr(speculative.Speculation, "settle", settled)
    check(models[0], run(scheduler, prompts_with_hits()[0]))
    assert "DRAFT_EXTEND_V2" in where
    assert len(read) > 5
    assert "DRAFT_EXTEND_V2" not in read.values()


def test_a_step_costs_no_python_a_request(models: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    forward = session.Session.forward
    folders = tuple(str(Path(kv_canary.__file__).parent / name) for name in ("engines", "runtime"))
    calls = Counter[str]()

    def see(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(folders):
            calls[frame.f_code.co_name] += 1

    def watched(self: Any, original: Any, runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        # As a graph makes them: nobody is called.
        run = original if speculative.is_draft(batch) else partial(forward, self, original)
        return run(runner, batch, *args, **kwargs)

    monkeypatch.setattr(session.Session, "forward", watched)
    found = list[dict[str, int]]()
    for count in (20, 40):
        scheduler = eagle_harness.build(models, max_running_requests=count, max_total_tokens=20_000)
        reqs = [engine.submit(scheduler, some_tokens(12, seed=n), 400) for n in range(count)]
        # Steps behind one in which some have grown by one token and others by several.
        steps, grown = list[Counter[str]](), set[int]()
        while len(steps) < 4:
            lengths = [len(req.output_ids) for req in reqs]
            calls.clear()
            sys.setprofile(see)
            try:
                engine.step(scheduler)
            finally:
                sys.setprofile(None)
            # Numbers of other sizes than before have to be laid out first.
            if len(grown) > 1 and not calls["_cut"]:
                assert len(scheduler.running_batch.reqs) == count
                steps.append(Counter(calls))
            grown = {len(req.output_ids) - n for req, n in zip(reqs, lengths, strict=True)} - {0}
        # Now and then a step reads what was found as well.
        found.append(dict(min(steps, key=Counter.total)))
        engine.abort(scheduler)
        engine.run_all(scheduler)
        clean()
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("mixed", "overlap"),
    [
        (False, False),
        pytest.param(False, True, marks=pytest.mark.long),
        pytest.param(True, False, marks=pytest.mark.long),
        (True, True),
    ],
)
def test_a_tight_pool_with_retractions_aborts_and_flushes_is_clean(
    models: tuple[str, str], monkeypatch: pytest.MonkeyPatch, overlap: bool, mixed: bool
) -> None:
    from sglang.srt.managers import scheduler as managers

    # SGLang's own switch for tests: requests are put off as if there were no room.
    monkeypatch.setattr(managers, "TEST_RETRACT", True)
    monkeypatch.setattr(managers, "TEST_RETRACT_INTERVAL", 9)
    scheduler = eagle_harness.build(
        models,
        settings={"KV_CANARY_SWEEP_EVERY": "4"},
        disable_overlap_schedule=not overlap,
        max_total_tokens=420,
        max_running_requests=6,
        enable_mixed_chunk=mixed,
    )
    rng = random.Random(11)
    stems = [some_tokens(n, seed=n) for n in (40, 90)]
    reqs: list[Any] = []
    aborted: set[str] = set()

    def before_step(iteration: int) -> bool:
        if len(reqs) < 24 and len(scheduler.waiting_queue) < 3 and rng.random() < 0.4:
            stem = rng.choice(stems)[: rng.choice((16, 40, 64, 90))]
            reqs.append(engine.submit(scheduler, stem + some_tokens(rng.randrange(1, 30), seed=iteration), 2 * NEW))
        if reqs and rng.random() < 0.04:
            rid = reqs[-1].rid
            aborted.add(rid)
            engine.abort(scheduler, rid)
        return len(reqs) < 24

    modes = engine.run_all(scheduler, before_step)
    assert bool(modes["MIXED"]) is mixed
    assert sum(req.retraction_count for req in reqs) > 0
    assert aborted
    done = [req for req in reqs if req.rid not in aborted]
    assert all(len(req.output_ids) >= 2 * NEW for req in done)
    check(models[0], done)
    assert scheduler.flush_cache()
    check(models[0], run(scheduler, [stems[1]] * 3))


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_behind_drafts_are_not_described_request_by_request(
    models: tuple[str, str], monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    scheduler = eagle_harness.build(models, disable_overlap_schedule=not overlap)
    seen: list[tuple[str, bool]] = []
    asked = speculative.Speculation.requests

    def requests(self: Any, batch: Any, *, lookahead: int) -> Any:
        found = asked(self, batch, lookahead=lookahead)
        seen.append((batch.forward_mode.name, found is not None))
        return found

    monkeypatch.setattr(speculative.Speculation, "requests", requests)
    # Some of nine end before others, so that the list changes.
    reqs = [engine.submit(scheduler, some_tokens(5 + n, seed=n), NEW + n) for n in range(12)]
    engine.run_all(scheduler)
    check(models[0], reqs)
    for mode in ("TARGET_VERIFY", "DRAFT_EXTEND_V2"):
        assert {is_composed for name, is_composed in seen if name == mode} == {True}


@pytest.mark.parametrize("overlap", [False, True])
def test_a_token_that_the_scheduler_has_taken_in_wrongly_is_seen(models: tuple[str, str], overlap: bool) -> None:
    scheduler = eagle_harness.build(
        models, mode="log", settings={"KV_CANARY_CHECK_TOKENS": "1"}, disable_overlap_schedule=not overlap
    )
    reqs = [engine.submit(scheduler, some_tokens(9, seed=n), NEW) for n in range(12)]
    wrong: list[int] = []

    def before_step(_: int) -> bool:
        output = reqs[3].output_ids
        if not wrong and len(output) > 8:
            # What it has generated is no longer what its KV was computed from.
            output[-1] ^= 1
            wrong.append(len(reqs[3].origin_input_ids) + len(output) - 1)
        return False

    engine.run_all(scheduler, before_step)
    manager = session.current().manager
    manager.flush()
    assert wrong
    assert {r.request_id for r in manager.reports} == {reqs[3].rid}
    assert min(r.position for r in manager.reports) in (wrong[0] - 1, wrong[0])


def test_drafts_of_a_graph_go_to_slots_of_one_that_has_just_ended(
    models: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it rested on is looked at before: nobody watches the graph, which is the first that a step launches."""
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    def last_freed_first(self: Any, count: int) -> Any:
        if count > len(self.free_pages):
            return None
        first = len(self.free_pages) - count
        self.free_pages, taken = self.free_pages[:first], self.free_pages[first:]
        return taken

    forward, take = session.Session.forward, completion.Ended.take
    ended: dict[int, int] = {}
    at_once = 0

    def unwatched_drafts(self: Any, original: Any, runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal at_once
        if not speculative.is_draft(batch):
            return forward(self, original, runner, batch, *args, **kwargs)
        at_once += sum(ended.pop(slot, 0) == self.manager.step for slot in batch.out_cache_loc.tolist())
        return original(runner, batch, *args, **kwargs)

    def taken(self: Any) -> Any:
        result = take(self)
        step = session.current().manager.step
        ended.update({slot: step for _, slots in result for slot in slots["draft"].tolist()})
        return result

    monkeypatch.setattr(TokenToKVPoolAllocator, "alloc", last_freed_first)
    monkeypatch.setattr(session.Session, "forward", unwatched_drafts)
    monkeypatch.setattr(completion.Ended, "take", taken)
    scheduler = eagle_harness.build(
        models, settings={"KV_CANARY_SEALS": "layer"}, disable_overlap_schedule=False, max_running_requests=8
    )
    reqs = []
    for wave in range(5):
        reqs += [engine.submit(scheduler, some_tokens(5, seed=8 * wave + n), NEW + 9 * n) for n in range(8)]
        # Nobody waits for what those that end give back.
        engine.run_all(scheduler)
    check(models[0], reqs)
    assert at_once > 0


def test_standalone_drafts_are_watched_where_no_prefix_is_shared(models: tuple[str, str]) -> None:
    args = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": models[0]}
    first, then = prompts_with_hits()
    for disable_radix_cache, groups in ((False, ["full"]), (True, ["full", "draft"])):
        scheduler = eagle_harness.build(models, disable_radix_cache=disable_radix_cache, **args)
        reqs = run(scheduler, first) + run(scheduler, then)
        assert all(engine.is_greedy(models[0], req.origin_input_ids, list(req.output_ids)[:NEW]) for req in reqs)
        assert clean()["groups"] == groups


def test_standalone_drafts_read_another_request_s_token_behind_a_prefix(
    models: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why they are not watched with a prefix cache: SGLang's own drafts, without any fault put in."""
    monkeypatch.setattr(
        speculative, "draft_runners", lambda scheduler: [scheduler.draft_worker.draft_worker.draft_runner]
    )
    scheduler = eagle_harness.build(
        models, mode="log", speculative_algorithm="STANDALONE", speculative_draft_model_path=models[0]
    )
    shared = some_tokens(100, seed=0)
    run(scheduler, [[*shared, 5, 6, 7]])
    [req] = run(scheduler, [[*shared, 8, 9, 10]])
    manager = session.current().manager
    manager.flush()
    found = {(r.group, r.position, r.reasons) for r in manager.reports if r.tag == "HEAD_FULL"}
    assert {(position, reasons) for group, position, reasons in found if "draft" in group} == {
        (99, ("TOKEN",)),
        # It does not follow from the one before.
        (100, ("CHAIN",)),
    }
    assert engine.is_greedy(models[0], req.origin_input_ids, list(req.output_ids)[:NEW])


@pytest.mark.parametrize("fails_at", [2, 5, 6, 7, 8, 9])
def test_its_own_fault_in_the_middle_of_a_step_costs_no_more_than_that_step(
    models: tuple[str, str], monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    """Whichever forward of a step it is: the target's, a draft, or the one that writes the drafts again."""
    scheduler = eagle_harness.build(models, mode="log")
    seen: list[str] = []
    describe_forward = speculative.describe_forward

    def fails(batch: Any, **given: Any) -> Any:
        seen.append(batch.forward_mode.name)
        if len(seen) == fails_at:
            raise ValueError("of its own")
        return describe_forward(batch, **given)

    monkeypatch.setattr(speculative, "describe_forward", fails)
    reqs = run(scheduler, [some_tokens(70, seed=1), some_tokens(20, seed=2)])
    assert len(seen) > 30
    assert all(engine.is_greedy(models[0], req.origin_input_ids, list(req.output_ids)[:NEW]) for req in reqs)
    session.current().manager.flush()
    state = session.current().status()
    assert (state["off"], state["violations"]) == ("", 0)
    assert state["failures"] == {"describing a forward: ValueError": 1}
    # The drafts behind one that was not described, at most.
    assert 1 <= state["skipped"] <= 3
    assert state["positions_verified"] == state["positions_relied_on"] > 1000
