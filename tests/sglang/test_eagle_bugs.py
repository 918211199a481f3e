"""Documented bugs of SGLang's speculative decoding, put back into the running engine: each is found, and named.

None of them changes an output: the target decides what is accepted. They cost drafts, and nobody sees why.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from kv_canary.constants import to_signed
from kv_canary.difftest.stress.sglang.drafts import save_models
from kv_canary.engines.sglang import session
from kv_canary.reports import CanaryViolationError, ViolationReport

from . import eagle_harness, engine
from .eagle_harness import some_tokens

NEW = 12


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_models(tmp_path_factory.mktemp("eagle"))


# How steps follow each other: one by one; overlapped; overlapped where the device alone knows how long requests are, so
# that HEAD comes behind the forward.
STEPS = ("one by one", "overlapped", "overlapped, lengths on the device")


def build(models: tuple[str, str], steps: str, **settings: Any) -> Any:
    scheduler = eagle_harness.build(
        models, mode="log", disable_overlap_schedule=not steps.startswith("overlapped"), **settings
    )
    if "lengths" in steps:
        scheduler.future_map.needs_cpu_seq_lens = False
    return scheduler


def run(scheduler: Any, *prompts: list[int], new_tokens: int = NEW) -> list[Any]:
    reqs = [engine.submit(scheduler, prompt, new_tokens) for prompt in prompts]
    engine.run_all(scheduler)
    return reqs


def found() -> list[ViolationReport]:
    session.current().manager.flush()
    return list(session.current().manager.reports)


def in_draft(reports: list[ViolationReport]) -> bool:
    """Whether the draft model's pool may be the one that all of these were found in."""
    return all("draft" in report.group for report in reports)


def shift_positions(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let drafts be computed for the position behind the one that they are written to (sglang#25015)."""
    worker = scheduler.draft_worker.draft_worker
    draft_forward = worker.draft_forward

    def shifted(forward_batch: Any) -> Any:
        forward_batch.positions = forward_batch.positions + 1
        return draft_forward(forward_batch)

    monkeypatch.setattr(worker, "draft_forward", shifted)


@pytest.mark.parametrize("overlap", [False, True])
def test_draft_positions_off_by_one(models: tuple[str, str], monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    scheduler = eagle_harness.build(models, mode="log", disable_overlap_schedule=not overlap)
    shift_positions(scheduler, monkeypatch)
    reqs = run(scheduler, some_tokens(30, seed=1), some_tokens(70, seed=2))
    reports = found()
    assert in_draft(reports)
    # Where it is written, from the first draft of each request on; and where the next draft reads it.
    assert {(r.tag, r.reasons) for r in reports} >= {
        ("TAIL_FULL", ("WRITE_POSITION",)),
        ("HEAD_FULL", ("POSITION",)),
    }
    written = [r for r in reports if r.reasons == ("WRITE_POSITION",)]
    assert {min(r.position for r in written if r.request_id == req.rid) for req in reqs} == {30, 70}
    assert all(r.position >= 30 for r in reports)
    assert all(engine.is_greedy(models[0], req.origin_input_ids, list(req.output_ids)[:NEW]) for req in reqs)


def test_draft_positions_off_by_one_raise_at_the_next_step(
    models: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = eagle_harness.build(models, mode="raise")
    shift_positions(scheduler, monkeypatch)
    with pytest.raises(CanaryViolationError, match="WRITE_POSITION"):
        run(scheduler, some_tokens(30, seed=1))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # The next chunk reads what the chunk before it has left.
        ({"KV_CANARY_CHECK_TOKENS": "1"}, {("HEAD_FULL", ("TOKEN",)), ("TAIL_FULL", ("PREFIX",))}),
        # Without a table of tokens, where the chain is continued.
        ({"KV_CANARY_CHECK_TOKENS": "0"}, {("TAIL_FULL", ("PREFIX",))}),
        # In the forward itself.
        (
            {"KV_CANARY_CHECK_TOKENS": "0", "KV_CANARY_CHECK_INPUTS": "1"},
            {("TAIL_FULL", ("PREFIX",)), ("TAIL_FULL", ("WRITE_TOKEN",))},
        ),
    ],
)
def test_a_chunk_that_ends_with_the_sampled_token_and_not_with_the_prompt_s_next(
    models: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    overlap: bool,
    settings: dict[str, str],
    expected: set[tuple[str, tuple[str, ...]]],
) -> None:
    """sglang#26800: input ids are rotated by one, and what is behind a chunk was taken from the target's output."""
    from sglang.srt.speculative import eagle_worker_v2

    monkeypatch.setattr(
        eagle_worker_v2, "_eagle_prefill_tail_tokens", lambda batch, sampled: sampled.to(batch.input_ids.dtype)
    )
    scheduler = eagle_harness.build(models, mode="log", settings=settings, disable_overlap_schedule=not overlap)
    [req] = run(scheduler, some_tokens(150, seed=3), new_tokens=1)
    reports = found()
    assert {(r.tag, r.reasons) for r in reports} >= expected
    assert in_draft(reports)
    # Chunks of 64: their last positions, and the ones behind, whose chains do not follow from them.
    assert {r.position for r in reports if "CHAIN" not in r.reasons} == {63, 127}
    assert {r.position for r in reports if "CHAIN" in r.reasons} <= {64, 128}
    assert engine.is_greedy(models[0], req.origin_input_ids, req.output_ids)


def test_draft_kv_that_was_never_written_on_a_prefix_hit(
    models: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """sglang#19897: the target's KV was cached without the draft model's, and a later request relied on both."""
    scheduler = eagle_harness.build(models, mode="log")
    runner = scheduler.draft_worker.draft_worker.draft_runner
    forward = runner.forward

    def nowhere(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        forward_batch.out_cache_loc = torch.zeros_like(forward_batch.out_cache_loc)
        return forward(forward_batch, *args, **kwargs)

    prompt = some_tokens(40, seed=4)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "forward", nowhere)
        run(scheduler, prompt, new_tokens=1)
    assert found() == []
    [req] = run(scheduler, prompt + some_tokens(10, seed=5))
    reports = found()
    assert req.cached_tokens == 39
    never = {r.position for r in reports if r.reasons == ("NEVER_WRITTEN",)}
    assert never
    assert session.current().status()["reasons"]["NEVER_WRITTEN"] >= req.cached_tokens
    assert in_draft(reports)
    assert never <= set(range(39))
    assert engine.is_greedy(models[0], req.origin_input_ids, list(req.output_ids)[:NEW])


@pytest.mark.parametrize("pool", ["full", "draft"])
@pytest.mark.parametrize("steps", STEPS)
def test_a_changed_byte_of_either_model_s_kv_is_found_there(models: tuple[str, str], pool: str, steps: str) -> None:
    scheduler = build(models, steps, settings={"KV_CANARY_READ_BYTES": "128"})
    runners = {"full": scheduler.tp_worker.model_runner, "draft": scheduler.draft_worker.draft_worker.draft_runner}
    req = engine.submit(scheduler, some_tokens(40, seed=6), NEW)

    def flip(iteration: int) -> None:
        if iteration == 4:
            slot = int(scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, 9])
            # Position 9 is fingerprinted in the first layer of three, and of one.
            runners[pool].token_to_kv_pool.v_buffer[0][slot, 1, 3] += 1

    engine.run_all(scheduler, flip)
    reports = found()
    assert {(r.position, r.reasons) for r in reports} == {(9, ("V",))}
    # The record that was read is that pool's.
    chains = {g.name: {int(c) for c in g.pool.records[:, 1]} for g in session.current().manager.groups}
    assert {name for r in reports for name in chains if to_signed(r.record.chain) in chains[name]} == {pool}


@pytest.mark.parametrize("how", STEPS)
@pytest.mark.parametrize("what", ["rows", "length"])
def test_what_the_target_verifies_drafts_with_is_held_against_the_requests(
    models: tuple[str, str], monkeypatch: pytest.MonkeyPatch, what: str, how: str
) -> None:
    scheduler = build(models, how)
    forward, steps = session.Session.forward, list[int]()

    def spoil(self: session.Session, original: Any, runner: Any, forward_batch: Any, **more: Any) -> Any:
        if forward_batch.forward_mode.is_target_verify() and forward_batch.batch_size == 2 and not steps:
            steps.append(self.manager.step)
            if what == "rows":
                forward_batch.req_pool_indices = forward_batch.req_pool_indices.flip(0)
            else:
                forward_batch.seq_lens = forward_batch.seq_lens - torch.tensor([0, 1])
        return forward(self, original, runner, forward_batch, **more)

    monkeypatch.setattr(session.Session, "forward", spoil)
    reqs = run(scheduler, some_tokens(30, seed=1), some_tokens(70, seed=2))
    told = [r for r in found() if "BATCH" in r.reasons]
    assert steps
    assert {r.request_id for r in told} == {req.rid for req in (reqs if what == "rows" else reqs[1:])}
    assert {(r.step, r.group) for r in told} == {(steps[0], "full")}


def test_every_forward_but_drafts_is_held_against_the_requests(
    models: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = eagle_harness.build(models, mode="log")
    real, kinds = session.Session._batch, set()

    def batch(self: session.Session, runner: Any, forward_batch: Any, arrays: Any) -> Any:
        made = real(self, runner, forward_batch, arrays)
        kinds.add((forward_batch.forward_mode.name, made.lengths is not None))
        return made

    monkeypatch.setattr(session.Session, "_batch", batch)
    run(scheduler, some_tokens(30, seed=1), some_tokens(70, seed=2))
    assert found() == []
    assert {kind for kind, is_given in kinds if not is_given} <= {"DECODE"}
    assert {kind for kind, is_given in kinds if is_given} >= {"EXTEND", "TARGET_VERIFY", "DRAFT_EXTEND_V2"}


def compute_next_token(chunked_req: Any, vocab_size: int) -> int | None:
    """Return the token behind a chunk as sglang#28254 does: of all that is prefilled again, output included."""
    if chunked_req is None:
        return None
    tokens, end = chunked_req.full_untruncated_fill_ids, chunked_req.extend_end
    return int(tokens[end]) if end < len(tokens) and tokens[end] < vocab_size else None


@pytest.mark.parametrize("mended", [False, True])
def test_chunks_of_what_a_retracted_request_had_generated(
    models: tuple[str, str], monkeypatch: pytest.MonkeyPatch, mended: bool
) -> None:
    """A bug of stock SGLang 0.5.23 (sglang#28254), and the same life with its mend.

    A request that was retracted is prefilled again, its output included. Behind a chunk that ends in the output the
    draft model is given what is sampled there now, and not the token that was: greedy decoding samples the same again.
    """
    from sglang.srt.managers import schedule_batch
    from sglang.srt.managers import scheduler as managers

    # SGLang's own switch for tests: requests are put off as if there were no room.
    monkeypatch.setattr(managers, "TEST_RETRACT", True)
    monkeypatch.setattr(managers, "TEST_RETRACT_INTERVAL", 9)
    if mended:
        monkeypatch.setattr(schedule_batch, "_compute_chunked_req_next_prompt_token", compute_next_token)
    scheduler = eagle_harness.build(models, mode="log", max_total_tokens=420, chunked_prefill_size=16)
    reqs = [
        engine.submit(scheduler, some_tokens(20, seed=n), 60, temperature=1.0, top_k=50, rid=f"sampled {n}")
        for n in range(5)
    ]
    engine.run_all(scheduler)
    assert all(req.finished() for req in reqs)
    assert sum(req.retraction_count for req in reqs) > 0
    reports = found()
    assert bool(reports) != mended
    assert in_draft(reports)
    assert {r.request_id for r in reports} <= {req.rid for req in reqs if req.retraction_count}
    assert session.current().manager.guard.failures == {}
