"""The canary of a scheduler: what it says of itself, what it refuses, and what becomes of faults, its own included."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

from kv_canary import output
from kv_canary.constants import OWNER_MASK
from kv_canary.engines.sglang import batches, identities, session, support
from kv_canary.reports import CanaryViolationError

from . import engine


def build(model, mode, settings=(), **args):
    with engine.overriding(KV_CANARY_MODE=mode, **dict(settings)):
        return engine.build_scheduler(model, **args)


def tokens(n, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(3, engine.VOCABULARY) for _ in range(n)]


def test_the_servers_internal_state_shows_it(llama):
    scheduler = build(llama, "log")
    req = engine.submit(scheduler, tokens(70), 5)
    engine.run_all(scheduler)
    state = scheduler.get_internal_state(None).internal_state["kv-canary"]
    assert engine.is_greedy(llama, req.origin_input_ids, req.output_ids)
    assert (state["watching"], state["off"], state["mode"], state["groups"]) == ("complete", "", "log", ["full"])
    # Two chunks and four decodes: 64, then 70, 71, 72 and 73.
    assert state["positions_verified"] == state["positions_relied_on"] == 64 + 70 + 71 + 72 + 73
    assert state["hooks"]["sglang.srt.model_executor.model_runner.ModelRunner.forward"] >= 6
    sometimes = ("on_idle", "flush_cache_after_weight_update", "release_memory_occupation")
    assert all(count > 0 for target, count in state["hooks"].items() if not target.endswith(sometimes)), state["hooks"]


def test_turned_off_for_one_scheduler_there_is_none(llama):
    scheduler = build(llama, "off")
    engine.submit(scheduler, tokens(10), 3)
    engine.run_all(scheduler)
    assert "kv-canary" not in scheduler.get_internal_state(None).internal_state
    with pytest.raises(RuntimeError, match="must be installed into"):
        session.current()


def test_a_finding_raises_at_the_next_step_in_raise_mode(llama):
    scheduler = build(llama, "raise", {"KV_CANARY_READ_BYTES": "128"})
    req = engine.submit(scheduler, tokens(40), 8, rid="the victim")
    engine.step(scheduler)
    engine.step(scheduler)
    slot = int(scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, 9])
    # Position 9 is fingerprinted in layer 0 of three.
    scheduler.tp_worker.model_runner.token_to_kv_pool.k_buffer[0][slot, 0, 0] += 1
    engine.step(scheduler)
    with pytest.raises(CanaryViolationError, match="the victim"):
        engine.step(scheduler)
    [report] = [r for r in session.current().manager.reports if r.tag == "HEAD_FULL"]
    assert (report.slot, report.position, list(report.reasons)) == (slot, 9, ["K"])


def test_findings_are_told_when_the_scheduler_is_idle(llama, caplog):
    scheduler = build(llama, "log", {"KV_CANARY_READ_BYTES": "128"})
    req = engine.submit(scheduler, tokens(40), 3, rid="the last")
    engine.step(scheduler)
    engine.step(scheduler)
    slot = int(scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, 9])
    scheduler.tp_worker.model_runner.token_to_kv_pool.v_buffer[0][slot, 0, 0] += 1
    engine.step(scheduler)
    assert not session.current().manager.reports
    engine.step(scheduler)
    assert {tuple(r.reasons) for r in session.current().manager.reports} == {("V",)}
    assert "the last" in caplog.text


def test_after_a_fault_of_its_own_the_engine_goes_on_and_so_does_the_canary_in_log_mode(llama, monkeypatch, caplog):
    scheduler = build(llama, "log")
    monkeypatch.setattr(identities, "identity_word", lambda *parts: 1 // 0)
    req = engine.submit(scheduler, tokens(70), 5)
    engine.run_all(scheduler)
    assert engine.is_greedy(llama, req.origin_input_ids, req.output_ids)
    state = session.current().status()
    assert (state["off"], state["violations"], state["skipped"]) == ("", 0, 6)
    assert state["failures"] == {"noting the requests of a batch: ZeroDivisionError": 6}
    output.drain()
    assert caplog.text.count("noting the requests of a batch failed (ZeroDivisionError)") == 1
    monkeypatch.undo()
    # What was written unseen is taken in from the request's own tokens, and is then verified as everything else.
    again = engine.submit(scheduler, tokens(70), 5)
    engine.run_all(scheduler)
    assert again.output_ids == req.output_ids
    session.current().manager.flush()
    state = session.current().status()
    assert (state["violations"], state["skipped"], state["unverified"]) == (0, 6, len(again.origin_input_ids))
    assert state["positions_verified"] == state["positions_relied_on"] > 4 * 70


def test_a_fault_of_its_own_is_raised_in_raise_mode(llama, monkeypatch):
    scheduler = build(llama, "raise")
    monkeypatch.setattr(identities, "identity_word", lambda *parts: 1 // 0)
    engine.submit(scheduler, tokens(70), 5)
    with pytest.raises(ZeroDivisionError):
        engine.run_all(scheduler)


def test_an_installation_that_fails_leaves_the_engine_as_it_was(llama, monkeypatch):
    scheduler = build(llama, "off")
    closed = []

    def fails(scheduler, manager, *_, **__):
        monkeypatch.setattr(manager, "close", lambda: closed.append(manager))
        raise ValueError("no transfers today")

    monkeypatch.setattr(session.transfer, "watch", fails)
    with engine.overriding(KV_CANARY_MODE="log"), pytest.raises(ValueError, match="no transfers today"):
        session.install(scheduler)
    assert len(closed) == 1
    assert not {"free", "clear"} & set(vars(scheduler.token_to_kv_pool_allocator))


def test_an_allocator_that_cannot_be_followed_is_left_as_it_was(llama, monkeypatch):
    scheduler = build(llama, "off")
    allocator = scheduler.token_to_kv_pool_allocator
    monkeypatch.setattr(allocator, "load_cpu_copy", None)
    before = dict(vars(allocator))
    with engine.overriding(KV_CANARY_MODE="log"), pytest.raises(ValueError, match="load_cpu_copy"):
        session.install(scheduler)
    assert vars(allocator).keys() == before.keys()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_pdmux", True),
        ("enable_hisparse", True),
        ("enable_unified_memory", True),
        ("enable_lmcache", True),
        ("disaggregation_decode_enable_offload_kvcache", True),
        ("dcp_size", 2),
        ("attn_cp_size", 2),
    ],
)
def test_what_is_not_served_is_refused_by_name(name, value):
    scheduler = SimpleNamespace(
        server_args=SimpleNamespace(**{name: value}),
        dllm_config=None,
        model_config=SimpleNamespace(is_encoder_decoder=False),
    )
    with pytest.raises(ValueError, match=f"sglang adapter: {name} must be"):
        support.check(scheduler)
    setattr(scheduler.server_args, name, False)
    support.check(scheduler)
    scheduler.model_config.is_encoder_decoder = True
    with pytest.raises(ValueError, match="an encoder-decoder"):
        support.check(scheduler)


def test_the_names_of_settings_that_are_not_served_are_sglangs(llama):
    args = build(llama, "log").server_args
    assert [name for name in (*support._UNSERVED, "dcp_size", "attn_cp_size") if not hasattr(args, name)] == []


def test_owners_are_by_request_not_by_name():
    class Req:
        rid = "the same name"

    owners, first, second = batches.Owners(), Req(), Req()
    assert owners.owner(first) == owners.owner(first) == 1
    assert owners.owner(second) == 2
    assert (owners.name(1), owners.name(2), owners.name(3)) == ("the same name", "the same name", None)
    # Numbers come round once their 24 bits are used up: those of requests that still live are left out.
    owners._numbers._last = OWNER_MASK
    del first
    assert owners.owner(Req()) & OWNER_MASK == 1
    owners._numbers._last = 2 * OWNER_MASK + 3
    third = Req()
    assert owners.owner(third) & OWNER_MASK == 3
    assert owners.owner(second) == 2


def test_a_result_that_was_thrown_away_is_told_from_one_that_was_taken():
    # A prompt of 10 and 3 outputs; the forward under way has the last of them as its input.
    req = SimpleNamespace(origin_input_ids=[0] * 10, output_ids=[0] * 3, finished=lambda: True)
    discarded = batches._discarded(req, 13)
    assert discarded()
    req.output_ids.append(0)
    assert not discarded()
    req.finished = lambda: False
    assert not discarded()
