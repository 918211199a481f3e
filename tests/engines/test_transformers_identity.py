"""The same tokens under another adapter, salt or version of the weights are another chain."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import kv_canary
from kv_canary import identity_word
from kv_canary.engines.transformers_requests import Requests

from .clean import Run, run_clean
from .scenarios import PAGE, Prompts, make_model, serve, watch_engine


def test_an_identity_word_is_the_same_in_every_process() -> None:
    parts = ("adapter", 7, b"\x00salt")
    code = f"import kv_canary; print(kv_canary.identity_word(*{parts!r}))"
    words = {
        int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
        for _ in range(2)
    }
    assert words == {identity_word(*parts)}
    # Pinned, because two processes that hash differently would report each other's caches.
    assert identity_word("adapter") == 0xF121447165DC74BE


def test_identity_words_differ_by_part_kind_order_and_split() -> None:
    words = [
        identity_word(*parts)
        for parts in [
            (),
            ("",),
            (b"",),
            (0,),
            ("0",),
            ("ab",),
            (b"ab",),
            ("a", "b"),
            ("b", "a"),
            ("", "ab"),
            ("ab", ""),
            (1,),
            (-1,),
            (255,),
            (2**64,),
            (1, 2),
            (2, 1),
            (258,),
        ]
    ]
    assert len(set(words)) == len(words)
    assert words[0] == 0
    assert all(0 <= word < 2**64 for word in words)


@pytest.mark.parametrize("part", [None, 1.0, True, ["a"]])
def test_a_part_of_another_type_is_refused(part: object) -> None:
    with pytest.raises(TypeError, match="identity_word: parts must be ints, strings or bytes"):
        identity_word("a", part)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("identity", "word"), [(None, 0), (0, 0), (5, 5), ("a", identity_word("a")), (b"a", identity_word(b"a"))]
)
def test_a_callback_gives_a_word_or_what_is_hashed_to_one(identity: kv_canary.identity.Identity, word: int) -> None:
    assert kv_canary.identity.word_of(identity) == word


@pytest.mark.parametrize(("identity", "error"), [(-1, ValueError), (2**64, ValueError), (1.5, TypeError)])
def test_a_callback_that_gives_something_else_is_refused(identity: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="identity: word must be"):
        kv_canary.identity.word_of(identity)  # type: ignore[arg-type]


def test_an_identity_that_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match="identity must be a function of a request's state, got str"):
        kv_canary.install(make_model("llama"), identity="adapter")


def test_a_prefix_cache_that_survives_a_weight_update_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    happened = watch_engine(monkeypatch)
    model, version = make_model("llama"), 1
    prompt = Prompts().random(3 * PAGE + 5)
    canary = kv_canary.install(model, backend="reference", identity=lambda state: f"weights {version}")
    with serve(model) as server:
        server.run([prompt], new_tokens=3)
        server.run([prompt], new_tokens=3)
        canary.flush()
        assert canary.reports == []
        hits = happened.prefix_hits
        assert hits > 0
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
        version = 2
        server.run([prompt], new_tokens=3)
        assert happened.prefix_hits == hits + 1
        canary.flush()
    reasons = {reason for report in canary.reports for reason in report.reasons}
    assert reasons == {"CHAIN", "PREFIX"}
    # What follows is chained to the stale record as the request's own tokens say, so each is reported where it stands.
    assert {r.position for r in canary.reports if "CHAIN" in r.reasons} >= {0}


def test_other_adapters_whose_requests_share_blocks_are_found() -> None:
    model, prompt = make_model("llama"), Prompts().random(2 * PAGE + 1)

    def adapter(state: object) -> str | None:
        name: str = state.request_id  # type: ignore[attr-defined]
        return None if name.startswith("w0") else "b"

    canary = kv_canary.install(model, backend="reference", identity=adapter)
    with serve(model) as server:
        server.run([prompt], new_tokens=2)
        canary.flush()
        assert canary.reports == []
        server.run([prompt], new_tokens=2)
    canary.flush()
    assert canary.reports[0].request_id == "w1_0"


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_identities_and_sweeps_without_a_fault_are_clean(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    asked: list[str] = []

    def scenario(run: Run) -> None:
        prompts = Prompts()
        shared = prompts.random(2 * PAGE)
        for _ in range(2):
            run.server.run([shared, shared + prompts.random(3), shared, prompts.random(40)])

    def identity(state: object) -> int:
        asked.append(state.request_id)  # type: ignore[attr-defined]
        return identity_word("tenant", 3)

    config = kv_canary.CanaryConfig(backend="reference", sweep_every=1)
    run_clean(monkeypatch, kind, scenario, config=config, identity=identity)
    # Once a request: a word that changed under a running request would be a false alarm.
    assert len(asked) == len(set(asked)) == 8


def test_own_tokens_reach_to_the_end_of_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = make_model("llama"), Prompts()
    canary = kv_canary.install(model, backend="reference")
    with serve(model) as server:
        processor = server.manager.batch_processor
        run, seen = processor.model_runner.compute_batch, []

        def compare(model: object, batch_data: dict[str, torch.Tensor]) -> object:
            given = batch_data["input_ids"][0].tolist()
            for future in processor.inputs_and_outputs.requests_in_batch:
                end = future.state.position_offset
                mine, given = given[: future.query_length], given[future.query_length :]
                seen.append(Requests().tokens(future.state, end - future.query_length, end) == mine)
            return run(model, batch_data)

        processor.model_runner.compute_batch = compare
        server.run(prompts.of_lengths(3, 16, 90), new_tokens=6)
        processor.model_runner.compute_batch = run
    canary.uninstall()
    assert len(seen) > 18
    assert all(seen)
