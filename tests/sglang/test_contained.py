"""What the canary does not know, and its own failures, harm nobody: the engine goes on, guarded, and hears no alarm."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.model_executor.forward_batch_info import ForwardMode

from kv_canary import ops
from kv_canary.difftest.stress.sglang.drafts import save_models
from kv_canary.engines.sglang import batches, compose, identities, lifetime, radix, session, speculative
from kv_canary.reports import CanaryViolationError
from kv_canary.runtime.forward import SingleForwardManager

from . import eagle_harness, engine


def tokens(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, engine.VOCABULARY) for _ in range(n)]


def build(model: str, mode: str, settings: dict[str, str] | None = None, **args: Any) -> Any:
    with engine.overriding(KV_CANARY_MODE=mode, **(settings or {})):
        return engine.build_scheduler(model, **args)


def state() -> dict[str, Any]:
    """Return the canary's status, as of now."""
    session.current().manager.flush()
    return session.current().status()


def serve(scheduler: Any, *, seed: int = 0) -> list[Any]:
    """Serve requests with common prefixes, in two rounds; return them."""
    stem, reqs = tokens(48, seed), []
    for number in range(2):
        for n in (1, 20, 70):
            reqs.append(engine.submit(scheduler, stem + tokens(n, seed + n), 6))
        reqs.append(engine.submit(scheduler, tokens(30, seed + 99 + number), 9))
        engine.run_all(scheduler)
    return reqs


def check_greedy(model: str, reqs: list[Any]) -> None:
    assert reqs
    for req in reqs:
        assert len(req.output_ids) >= 6
        assert engine.is_greedy(model, req.origin_input_ids, req.output_ids)


def plant(scheduler: Any, reqs: list[Any]) -> None:
    """Change a byte of K under a request that decodes, and see that this is found."""
    before = state()["violations"]
    victim = engine.submit(scheduler, tokens(40, 77), 12, rid="the victim")
    while len(victim.output_ids) < 3:
        engine.step(scheduler)
    slot = int(scheduler.req_to_token_pool.req_to_token[victim.kv.req_pool_idx, 9])
    scheduler.tp_worker.model_runner.token_to_kv_pool.k_buffer[0][slot] += 1
    raises = session.current().manager.config.mode == "raise"
    with pytest.raises(CanaryViolationError, match="the victim") if raises else contextlib.nullcontext():
        engine.run_all(scheduler)
    assert state()["violations"] > before
    assert {r.slot for r in session.current().manager.reports} == {slot}


# --- kinds of forwards and requests that the adapter does not know -----------------------------------------------


@contextlib.contextmanager
def disguised(batch: Any, **attributes: Any) -> Iterator[None]:
    before = {name: getattr(batch, name, None) for name in attributes}
    for name, value in attributes.items():
        setattr(batch, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(batch, name, value)


class Bare:
    """A request that has but some of what the adapter needs."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def one_other(batch: Any, change: Callable[[batches.Noted], batches.Noted]) -> dict[str, Any]:
    noted = batches.noted(batch)
    return noted_as(change(noted[0]), *noted[1:])


def noted_as(*noted: batches.Noted) -> dict[str, Any]:
    return {batches._NOTED: noted, batches._COMPOSED: None}


def has_nothing(batch: Any) -> dict[str, Any]:
    return one_other(batch, lambda w: batches.Noted(req=Bare(rid=w.req.rid), row=w.row))


def has_no_row(batch: Any) -> dict[str, Any]:
    return one_other(batch, lambda w: batches.Noted(req=w.req, row=None))


def has_no_tokens(batch: Any) -> dict[str, Any]:
    return one_other(
        batch,
        lambda w: batches.Noted(
            req=Bare(rid=w.req.rid, origin_input_ids=[5], output_ids=[], finished=lambda: False), row=w.row
        ),
    )


# What the adapter is shown of every third forward, and what it says. The engine runs the forward that it made.
FORWARDS = {
    "mode": (lambda batch: {"forward_mode": ForwardMode.SPLIT_PREFILL}, "SPLIT_PREFILL"),
    "lengths": (lambda batch: {"seq_lens_cpu": None, "extend_prefix_lens_cpu": None}, "not on the host"),
    "rows": (lambda batch: noted_as(*batches.noted(batch)[1:]), "more or fewer rows"),
    "nobody": (lambda batch: noted_as(), "more or fewer rows"),
    "nowhere": (
        lambda batch: {"forward_mode": ForwardMode.DLLM_EXTEND, "out_cache_loc": None},
        "DLLM_EXTEND",
    ),
}
REQUESTS = {
    "attributes": (has_nothing, "a request without origin_input_ids"),
    "row": (has_no_row, "a request without a row"),
    "tokens": (has_no_tokens, "a request whose own tokens the host does not have"),
}


def show_every_third(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], dict[str, Any]]) -> list[int]:
    """Show the adapter another batch than the engine's at every third forward; return whom it was done to."""
    real, seen, shown = session.Session.forward, [0], []

    def forward(self: Any, original: Callable[..., Any], runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        seen[0] += 1
        if seen[0] % 3 or not batch.batch_size:
            return real(self, original, runner, batch, *args, **kwargs)
        shown.append(batch.batch_size)
        with contextlib.ExitStack() as stack:
            stack.enter_context(disguised(batch, **change(batch)))

            def undisguised(*given: Any, **more: Any) -> Any:
                stack.close()
                return original(*given, **more)

            return real(self, undisguised, runner, batch, *args, **kwargs)

    monkeypatch.setattr(session.Session, "forward", forward)
    return shown


@pytest.mark.parametrize("mode", ["log", "raise"])
@pytest.mark.parametrize("kind", list(FORWARDS))
def test_a_forward_that_nobody_can_describe_goes_by_and_the_next_is_guarded(llama, monkeypatch, caplog, kind, mode):
    scheduler = build(llama, mode, {"KV_CANARY_SWEEP_EVERY": "4", "KV_CANARY_QUARANTINE": "1"})
    change, said = FORWARDS[kind]
    shown = show_every_third(monkeypatch, change)
    check_greedy(llama, serve(scheduler))
    found = state()
    assert (found["off"], found["violations"], found["failures"], found["left_out"]) == ("", 0, {}, {})
    assert found["skipped"] == len(shown) > 5
    assert found["positions_verified"] == found["positions_relied_on"] > 500
    # What such a forward wrote was taken in by the next one that read it.
    assert found["unverified"] >= len(shown)
    lines = [r.getMessage() for r in caplog.records if "goes by unwatched" in r.getMessage()]
    assert len(lines) == len(set(lines)) <= 2
    assert all(said in line for line in lines)
    monkeypatch.undo()
    plant(scheduler, [])


@pytest.mark.parametrize("mode", ["log", "raise"])
@pytest.mark.parametrize("kind", list(REQUESTS))
def test_a_request_that_nobody_can_describe_goes_by_and_no_other(llama, monkeypatch, caplog, kind, mode):
    scheduler = build(llama, mode, {"KV_CANARY_SWEEP_EVERY": "4", "KV_CANARY_QUARANTINE": "1"})
    change, said = REQUESTS[kind]
    shown = show_every_third(monkeypatch, change)
    check_greedy(llama, serve(scheduler))
    found = state()
    assert (found["off"], found["violations"], found["failures"]) == ("", 0, {})
    alone = sum(size == 1 for size in shown)
    # A request that has its first token only is known whole.
    assert found["left_out"].keys() == {said}
    assert found["skipped"] <= alone
    assert 3 < found["left_out"][said] <= len(shown) - found["skipped"]
    assert found["positions_verified"] == found["positions_relied_on"] > 500
    assert found["unverified"] > 0
    assert sum("left out of the forwards" in r.getMessage() for r in caplog.records) == 1
    monkeypatch.undo()
    plant(scheduler, [])


def test_others_are_verified_in_a_forward_that_leaves_one_out(llama, monkeypatch):
    """A fault under one request is found in the very forward in which another cannot be described."""
    scheduler = build(llama, "log", {"KV_CANARY_READ_BYTES": "128"})
    first = engine.submit(scheduler, tokens(30, 1), 20)
    victim = engine.submit(scheduler, tokens(40, 2), 20, rid="the victim")
    while len(victim.output_ids) < 3:
        engine.step(scheduler)
    slot = int(scheduler.req_to_token_pool.req_to_token[victim.kv.req_pool_idx, 9])
    scheduler.tp_worker.model_runner.token_to_kv_pool.k_buffer[0][slot] += 1
    real, noted = session.Session.forward, batches.noted
    monkeypatch.setattr(compose.Composer, "requests", lambda *_, **__: None)
    monkeypatch.setattr(batches, "noted", lambda batch: tuple(without(w, first) for w in noted(batch)))
    step = session.current().manager.step
    engine.step(scheduler)
    monkeypatch.undo()
    assert session.Session.forward is real
    assert state()["left_out"] == {"a request without a row": 1}
    [report] = [r for r in session.current().manager.reports if r.tag == "HEAD_FULL"]
    assert (report.request_id, report.slot, report.step) == ("the victim", slot, step + 1)
    engine.run_all(scheduler)
    assert {r.request_id for r in session.current().manager.reports} == {"the victim"}


def without(w: batches.Noted, req: Any) -> batches.Noted:
    return batches.Noted(req=w.req, row=None) if w.req is req else w


# --- failures of the canary's own ---------------------------------------------------------------------------------

OPS = (
    *("plan", "verify", "verify_prefixes", "verify_resolved", "write"),
    *("chain_tails", "open_step", "scatter_token_ids", "retire"),
)


class OwnFailureError(RuntimeError):
    """The canary's own trouble."""


def fail_at_random(monkeypatch: pytest.MonkeyPatch, rng: random.Random, share: float) -> dict[str, int]:
    """Let everything of the canary's fail now and then, before or after it has done its work; return how often."""
    places = [(ops, name) for name in OPS if hasattr(ops, name)]
    places += [
        (batches, "note"),
        (identities.Identities, "of"),
        (batches.Describer, "describe"),
        (compose.Composer, "compose"),
        (compose.Composer, "requests"),
        (lifetime.Lifetime, "take"),
        (lifetime.Lifetime, "_note"),
        (lifetime.Lifetime, "_keep"),
        (lifetime.Lifetime, "_bring_back"),
        (radix, "cached"),
        (session.Session, "status"),
        (session.Session, "_out_slots"),
        (session.Session, "_may_look_later"),
        (speculative.Speculation, "reads_chosen"),
    ]
    failed: dict[str, int] = {}

    def failing(real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            fate = rng.random()
            if fate < share / 2:
                failed[name] = failed.get(name, 0) + 1
                raise OwnFailureError(name)
            result = real(*args, **kwargs)
            if fate < share:
                failed[name] = failed.get(name, 0) + 1
                raise OwnFailureError(name)
            return result

        return call

    for where, name in places:
        monkeypatch.setattr(where, name, failing(getattr(where, name), name))
    return failed


SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"disable_overlap_schedule": False},
    "tight": {"max_total_tokens": 300, "page_size": 16},
}


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("seed", [0, 1])
def test_failures_at_random_change_no_output_and_give_no_alarm(llama, monkeypatch, shape, seed):
    settings = {"KV_CANARY_SWEEP_EVERY": "3", "KV_CANARY_QUARANTINE": "1", "KV_CANARY_CHECK_INPUTS": "1"}
    scheduler = build(llama, "log", settings, **SHAPES[shape])
    check_greedy(llama, serve(scheduler))
    failed = fail_at_random(monkeypatch, random.Random(seed), 0.08)
    for number in range(4):
        check_greedy(llama, serve(scheduler, seed=5 + number))
    for _ in range(100):
        scheduler.get_internal_state(None)
    monkeypatch.undo()
    assert len(failed) > 8
    assert {"write", "compose", "requests", "status"} <= set(failed)
    found = state()
    assert (found["off"], found["violations"]) == ("", 0)
    assert found["skipped"] > 5
    assert sum(found["failures"].values()) > 15
    assert all("OwnFailureError" in kind for kind in found["failures"])
    before = found["positions_verified"]
    check_greedy(llama, serve(scheduler, seed=17))
    after = state()
    assert (after["violations"], after["failures"]) == (0, found["failures"])
    assert after["positions_verified"] > before + 500
    if shape == "plain":
        plant(scheduler, [])


@pytest.mark.parametrize("watched", [True, False])
def test_a_free_that_was_not_followed_in_time_is_not_followed_later(llama, monkeypatch, watched):
    """By then the slot is somebody else's, whom a forward wrote that was watched, or one that was not."""
    scheduler = build(llama, "log", **SHAPES["tight"])
    check_greedy(llama, serve(scheduler))
    real, late = lifetime.Lifetime.take, []

    def take(self: Any) -> Any:
        late.append(bool(self._freed) and not (late and late[-1]))
        if late[-1]:
            raise OwnFailureError("take")
        return real(self)

    real_tail = SingleForwardManager._launch_tail

    def tail(self: Any) -> None:
        if late[-1]:
            raise OwnFailureError("tail")
        real_tail(self)

    monkeypatch.setattr(lifetime.Lifetime, "take", take)
    if not watched:
        monkeypatch.setattr(SingleForwardManager, "_launch_tail", tail)
    for number in range(4):
        check_greedy(llama, serve(scheduler, seed=5 + number))
    found = state()
    assert sum(late) > 5
    assert (found["off"], found["violations"]) == ("", 0)
    monkeypatch.undo()
    plant(scheduler, [])


def test_failures_at_random_in_drafting_change_no_output_and_give_no_alarm(tmp_path, monkeypatch):
    models = save_models(tmp_path)
    scheduler = eagle_harness.build(models, mode="log", settings={"KV_CANARY_SWEEP_EVERY": "3"})
    failed = fail_at_random(monkeypatch, random.Random(3), 0.05)
    reqs = serve(scheduler) + serve(scheduler, seed=5)
    monkeypatch.undo()
    assert len(failed) > 6
    for req in reqs:
        assert engine.is_greedy(models[0], req.origin_input_ids, req.output_ids)
    found = state()
    assert (found["off"], found["violations"]) == ("", 0)
    verified = found["positions_verified"]
    serve(scheduler, seed=9)
    after = state()
    assert (after["violations"], after["failures"]) == (0, found["failures"])
    assert after["positions_verified"] > verified + 500


# --- what the engine's own methods return and raise ---------------------------------------------------------------


class EnginesOwnError(Exception):
    """Raised by the engine."""


@pytest.mark.parametrize("mode", ["log", "raise"])
def test_what_the_engines_forward_raises_comes_out_as_it_is(llama, monkeypatch, mode):
    scheduler = build(llama, mode)
    calls = []
    raised = EnginesOwnError("out of memory")

    def fails(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        raise raised

    engine.submit(scheduler, tokens(20), 4)
    monkeypatch.setattr(scheduler.tp_worker.model_runner, "_forward_raw", fails)
    # And the canary cannot even give it up.
    monkeypatch.setattr(session.current().manager._steps, "abort_forward", lambda forward: 1 // 0)
    with pytest.raises(EnginesOwnError) as caught:
        engine.run_all(scheduler)
    assert caught.value is raised
    assert len(calls) == 1


def test_the_engines_methods_are_called_once_whatever_the_canary_does(llama, monkeypatch):
    scheduler = build(llama, "log")
    allocator = scheduler.token_to_kv_pool_allocator
    monkeypatch.setattr(session.current()._lifetime, "_note", None)
    monkeypatch.setattr(session.current()._lifetime, "_keep", None)
    slots = allocator.alloc(7)
    left = allocator.available_size()
    allocator.free(slots)
    assert allocator.available_size() == left + 7
    assert allocator.get_cpu_copy(slots) is not None
    batch = SimpleNamespace()
    session.note_requests(batch, None, SimpleNamespace(reqs=None))
    assert batches.noted(batch) == ()
    kinds = {kind.split(":")[0] for kind in state()["failures"]}
    assert kinds == {
        "following what is freed",
        "following what is copied to the host",
        "noting the requests of a batch",
    }
    req = engine.submit(scheduler, tokens(20), 4)
    engine.run_all(scheduler)
    assert engine.is_greedy(llama, req.origin_input_ids, req.output_ids)
    assert state()["violations"] == 0
