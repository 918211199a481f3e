"""The canary never hurts the engine or the model: its own failures stay inside, and a watched model is a model."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kv_canary
from kv_canary import ops
from kv_canary.engines import transformers_session
from kv_canary.engines.patches import Patches
from kv_canary.runtime.manager import CanaryManager

from .scenarios import PAGE, Prompts, batching_config, generation_config, make_model

PROMPTS = Prompts().of_lengths(5, PAGE + 3, 2 * PAGE)


def answers(model: Any, prompts: list[list[int]] = PROMPTS, **overrides: Any) -> dict[str, Any]:
    """Return what the engine answers to prompts, by request: its tokens, or its error."""
    outputs = model.generate_batch(
        prompts,
        generation_config=generation_config(new_tokens=12),
        continuous_batching_config=batching_config(**overrides),
        progress_bar=False,
    )
    return {name: output.error or list(output.generated_tokens) for name, output in sorted(outputs.items())}


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("llama")


@pytest.fixture(scope="module")
def wanted(model: Any) -> list[Any]:
    """The answers without a canary."""
    return list(answers(model).values())


def installed(model: Any, **options: Any) -> Any:
    return kv_canary.install(model, **{"mode": "log", "backend": "reference", **options})


def once(error: Exception) -> Callable[..., Any]:
    """Return a function that raises at its first call, and returns None from then on."""
    left = [error]

    def call(*args: Any) -> None:
        if left:
            raise left.pop()

    return call


def raising_once(true: Callable[..., Any], *, at: int, behind: bool) -> Callable[..., Any]:
    """Return `true`, whose call number `at` raises, before or after it has done its work."""
    calls = iter(range(1, 1 << 30))

    def call(*args: Any, **kwargs: Any) -> Any:
        strikes = next(calls) == at
        if strikes and not behind:
            raise torch.OutOfMemoryError("CUDA out of memory (in the canary's own launch)")
        result = true(*args, **kwargs)
        if strikes:
            raise torch.OutOfMemoryError("CUDA out of memory (in the canary's own launch)")
        return result

    return call


@pytest.mark.parametrize(
    "identity",
    [once(KeyError("adapter table lost")), lambda state: 0.5, once(ValueError("again"))],
    ids=["raises once", "returns a float, always", "another error"],
)
def test_an_identity_that_fails_costs_no_request(model: Any, wanted: list[Any], identity: Any) -> None:
    canary = installed(model, identity=identity)
    try:
        assert list(answers(model).values()) == wanted
    finally:
        canary.uninstall()
    summary = canary.summary()
    assert summary.violations == 0
    assert summary.skipped > 0
    assert summary.watching == "partial"
    assert any("describing a forward" in part for part in summary.failures)


@pytest.mark.every_day(
    "chain_tails-2-before",
    "verify_prefixes-1-behind",
    "verify_prefixes-5-before",
    "verify_resolved-2-behind",
    "write-1-before",
    "write-2-behind",
    "retire-1-before",
    "retire-2-behind",
)
@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize(
    ("op", "at"),
    [
        *((op, at) for op in ("chain_tails", "verify_prefixes", "verify_resolved", "write") for at in (1, 2, 5)),
        ("retire", 1),
        ("retire", 2),
    ],
)
def test_a_launch_that_fails_once_costs_no_request(
    model: Any, wanted: list[Any], monkeypatch: pytest.MonkeyPatch, op: str, at: int, behind: bool
) -> None:
    monkeypatch.setattr(ops, op, raising_once(getattr(ops, op), at=at, behind=behind))
    canary = installed(model)
    try:
        assert list(answers(model).values()) == wanted
        # The prompts again: prefixes come from the cache, also where nothing could be recorded.
        assert list(answers(model).values()) == wanted
    finally:
        canary.uninstall()
    summary = canary.summary()
    assert (summary.violations, sum(summary.failures.values())) == (0, 1)
    assert summary.positions_verified > 0


def test_a_launch_that_fails_always_costs_no_request(
    model: Any, wanted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory (in the canary's own launch)")

    monkeypatch.setattr(ops, "write", fail)
    canary = installed(model)
    try:
        assert list(answers(model).values()) == wanted
    finally:
        canary.uninstall()
    assert canary.summary().violations == 0
    assert canary.summary().watching == "partial"


def test_a_hook_that_fails_costs_no_request(model: Any, wanted: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from kv_canary.engines.transformers_base import Layout

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("the books are lost")

    monkeypatch.setattr(Layout, "note_cached", fail)
    canary = installed(model)
    try:
        assert list(answers(model).values()) == wanted
    finally:
        canary.uninstall()
    assert canary.summary().violations == 0
    assert any("following" in part for part in canary.summary().failures)


@pytest.mark.parametrize("part", ["_described", "_retire_freed"])
def test_a_free_that_was_not_followed_in_time_is_not_followed_later(
    model: Any, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """By then the block is somebody else's, whom a forward wrote that was not watched, say."""
    prompts = Prompts().of_lengths(*(5, PAGE + 3, 2 * PAGE, PAGE) * 5)
    wanted = answers(model, prompts, num_blocks=12)
    session = transformers_session.Session
    true, note_freed = getattr(session, part), session._note_freed
    freed, late = [], []

    def fails_after_a_free(self: Any, *args: Any) -> Any:
        late.append(bool(freed) and not (late and late[-1]))
        freed.clear()
        if late[-1]:
            raise RuntimeError("the books are lost")
        return true(self, *args)

    def note(self: Any, *args: Any) -> None:
        freed.append(args)
        note_freed(self, *args)

    monkeypatch.setattr(session, part, fails_after_a_free)
    monkeypatch.setattr(session, "_note_freed", note)
    canary = installed(model)
    try:
        assert list(answers(model, prompts, num_blocks=12).values()) == list(wanted.values())
    finally:
        canary.uninstall()
    assert (canary.summary().violations, sum(canary.summary().failures.values())) == (0, sum(late))
    assert sum(late) > 2


@pytest.mark.parametrize("name", ["__init__", "forward"])
def test_a_canary_that_cannot_be_had_for_a_new_cache_costs_no_request(
    model: Any, wanted: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: Any, name: str
) -> None:
    """The engine makes its cache when it is asked to generate: whatever fails there is no affair of the requests."""
    true = getattr(CanaryManager, name)
    monkeypatch.setattr(CanaryManager, name, raising_once(true, at=1, behind=name == "forward"))
    canary = installed(model)
    try:
        assert list(answers(model).values()) == wanted
        told = "the requests of this cache go by unwatched"
        assert caplog.text.count(told) == 1
        summary = canary.summary()
        assert (summary.watching, summary.violations) == ("partial", 0)
        assert summary.failures == {"transformers adapter: watching a new cache: OutOfMemoryError": 1}
        # The next cache is watched.
        assert list(answers(model).values()) == wanted
        assert canary.summary().positions_verified > summary.positions_verified
        assert caplog.text.count(told) == 1
    finally:
        canary.uninstall()


def test_in_raise_mode_the_canarys_own_failure_is_raised_and_the_engine_is_usable(
    model: Any, wanted: list[Any]
) -> None:
    canary = installed(model, mode="raise", identity=once(KeyError("adapter table lost")))
    try:
        first = answers(model)
        assert any("adapter table lost" in str(answer) for answer in first.values())
        assert list(answers(model).values()) == wanted
    finally:
        canary.uninstall()


# A watched model is a model.


def with_other_weights(model: Any) -> Any:
    """Change a model's weights, and return it."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.5)
    return model


def test_a_copy_of_a_watched_model_is_a_model_of_its_own() -> None:
    model = make_model("llama")
    canary = installed(model)
    clone = with_other_weights(copy.deepcopy(model))
    mine, theirs = answers(model), answers(clone)
    steps = canary.summary().steps
    canary.uninstall()
    plain = with_other_weights(make_model("llama"))
    assert list(theirs.values()) == list(answers(plain).values())
    assert list(mine.values()) == list(answers(model).values()) != list(theirs.values())
    # Nobody watches the copy.
    assert steps > 0
    assert canary.summary().steps == steps
    assert set(vars(clone)) == set(vars(plain))


def test_a_watched_model_is_copied_pickled_and_saved_as_if_nobody_watched() -> None:
    model = make_model("llama")
    before = sorted(vars(model)), pickle.dumps(model)
    canary = installed(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = [pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False), copy.copy(model)]
    during = sorted(vars(model)), pickle.dumps(model)
    canary.uninstall()
    assert during == before == (sorted(vars(model)), pickle.dumps(model))
    # Whoever loads it need not have kv-canary.
    assert b"kv_canary" not in before[1]
    assert all(list(answers(m).values()) == list(answers(model).values()) for m in loaded)


def test_the_class_is_as_it_was_once_nothing_of_it_is_watched() -> None:
    one, other = make_model("llama"), make_model("llama")
    # A class of their own: models of other tests may be watched still.
    one.__class__ = other.__class__ = type("Llama", (type(one),), {})
    names = ("init_continuous_batching", "generate_batch")
    assert not set(names) & set(vars(type(one)))
    first, second = installed(one), installed(other)
    assert set(names) <= set(vars(type(one)))
    first.uninstall()
    assert set(names) <= set(vars(type(one)))
    second.uninstall()
    assert not set(names) & set(vars(type(one)))
    # One that is not uninstalled, and whose model is gone, leaves nothing either.
    third = installed(one)
    del one, third
    gc.collect()
    assert not set(names) & set(vars(type(other)))


def test_two_models_are_watched_apart() -> None:
    one, other = make_model("llama"), with_other_weights(make_model("llama"))
    first, second = installed(one), installed(other)
    try:
        answers(one)
        assert (first.summary().steps > 0, second.summary().steps) == (True, 0)
        found: list[dict[str, Any]] = []
        threads = [threading.Thread(target=lambda m=m: found.append(answers(m))) for m in (one, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 2
        assert first.summary().violations == second.summary().violations == 0
        assert second.summary().steps > 0
    finally:
        first.uninstall()
        second.uninstall()


def test_a_second_install_on_one_target_is_an_error_that_says_so() -> None:
    model = make_model("llama")
    canary = installed(model)
    with pytest.raises(RuntimeError, match="must be an object that no canary watches, got one that is watched already"):
        installed(model)
    assert list(answers(model).values())
    steps = canary.summary().steps
    assert steps > 0
    canary.uninstall()
    again = installed(model)
    answers(model)
    assert again.summary().steps > 0
    assert canary.summary().steps == steps
    again.uninstall()


def test_a_manager_that_its_model_watches_is_watched_already() -> None:
    model = make_model("llama")
    canary = installed(model)
    manager = model.init_continuous_batching(
        generation_config=generation_config(), continuous_batching_config=batching_config()
    )
    try:
        with pytest.raises(RuntimeError, match="uninstall that canary first"):
            installed(manager)
    finally:
        canary.uninstall()
    assert "_create_batch_processor" not in vars(manager)


def test_uninstalling_in_any_order_leaves_nothing_behind() -> None:
    model = make_model("llama")
    manager = model.init_continuous_batching(
        generation_config=generation_config(), continuous_batching_config=batching_config()
    )
    before = sorted(vars(manager))
    canary = installed(manager)
    # Somebody else wraps the same method, and is gone first, or last.
    for order in ((0, 1), (1, 0)):
        others = Patches()
        others.wrap(manager, "stop", lambda original, *args, **kwargs: original(*args, **kwargs))
        ends = [canary.uninstall, others.undo_all]
        for index in order:
            ends[index]()
        assert sorted(vars(manager)) == before
        canary = installed(manager)
    canary.uninstall()
    assert sorted(vars(manager)) == before


def test_the_environment_turns_it_off(model: Any, wanted: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("off", "OFF", "none", "0", ""):
        monkeypatch.setenv("KV_CANARY_MODE", text)
        before = sorted(vars(model)), sorted(vars(type(model)))
        canary = kv_canary.install(model)
        assert (sorted(vars(model)), sorted(vars(type(model)))) == before
        if text == "off":
            assert list(answers(model).values()) == wanted
        assert (canary.summary().watching, canary.summary().steps) == ("off", 0)
        canary.flush()
        canary.uninstall()


def test_forward_hooks_stay_and_are_called(model: Any, wanted: list[Any]) -> None:
    calls: list[int] = []
    handle = model.register_forward_hook(lambda *args: calls.append(1))
    canary = installed(model)
    try:
        assert list(answers(model).values()) == wanted
    finally:
        canary.uninstall()
        handle.remove()
    assert len(calls) >= canary.summary().steps > 0


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_forked_child_generates_with_a_watched_model(model: Any, wanted: list[Any]) -> None:
    canary = installed(model)
    try:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            import signal

            signal.alarm(120)
            os.write(write, b"1" if list(answers(model).values()) == wanted and canary.summary().steps else b"0")
            os._exit(0)
        os.close(write)
        said = os.read(read, 1)
        os.close(read)
        os.waitpid(child, 0)
        assert said == b"1"
        assert canary.summary().steps == 0
        assert list(answers(model).values()) == wanted
    finally:
        canary.uninstall()
