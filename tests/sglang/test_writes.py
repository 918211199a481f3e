"""What SGLang's model hands over is what must lie in its pools: bugs of the write itself, in the running engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from kv_canary.engines.sglang import batches, compose, graphs, session, writes

from . import engine
from .clean import Tokens

# Whether a write is to go wrong, and what it then does with the original's arguments.
Bug = Callable[[Any, Callable[..., Any], int, torch.Tensor, torch.Tensor, torch.Tensor], None]


def swaps_halves(pool: Any, write: Callable[..., Any], layer: int, loc: Any, k: Any, v: Any) -> None:
    k, v = k.clone(), v.clone()
    k[-1], v[-1] = v[-1].clone(), k[-1].clone()
    write(loc, k, v)


def writes_another_layer_too(pool: Any, write: Callable[..., Any], layer: int, loc: Any, k: Any, v: Any) -> None:
    write(loc, k, v)
    if layer == 1:
        pool.k_buffer[0][loc[-1]] = k[-1]


def drops_a_token(pool: Any, write: Callable[..., Any], layer: int, loc: Any, k: Any, v: Any) -> None:
    write(loc[:-1], k[:-1], v[:-1])


def pads_over_the_last_token(pool: Any, write: Callable[..., Any], layer: int, loc: Any, k: Any, v: Any) -> None:
    write(torch.cat([loc, loc[-1:]]), torch.cat([k, torch.ones_like(k[:1])]), torch.cat([v, torch.ones_like(v[:1])]))


BUGS = (swaps_halves, writes_another_layer_too, drops_a_token, pads_over_the_last_token)


def served(
    model: str, monkeypatch: pytest.MonkeyPatch, bug: Bug | None, **variables: str
) -> tuple[list[list[int]], Any, list[int]]:
    """Return the texts, the canary's manager, and the steps in which the bug acted: the third decode of one request."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    original = MHATokenToKVPool.set_kv_buffer
    acted: list[int] = []

    def buggy(self: Any, layer: Any, loc: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        manager = session.current().manager
        number = args[2] if len(args) > 2 else kwargs.get("layer_id_override")
        number = (layer.layer_id if number is None else number) - self.start_layer

        def write(slots: Any, k: Any, v: Any) -> Any:
            where = slots if isinstance(loc, torch.Tensor) else dataclasses.replace(loc, loc=slots)
            return original(self, layer, where, k, v, *args, **kwargs)

        if bug is None or manager.step != 4:
            return original(self, layer, loc, k, v, *args, **kwargs)
        acted.append(manager.step)
        return bug(self, write, number, loc if isinstance(loc, torch.Tensor) else loc.loc, k, v)

    monkeypatch.setattr(MHATokenToKVPool, "set_kv_buffer", buggy)
    environ = {"KV_CANARY_MODE": "log", "KV_CANARY_SEALS": "layer", "KV_CANARY_SCRUB_SHARE": "0", **variables}
    with engine.overriding(**environ):
        scheduler = engine.build_scheduler(model)
    tokens = Tokens(3)
    reqs = [engine.submit(scheduler, tokens(n), 10) for n in (20, 33)]
    engine.run_all(scheduler)
    manager = session.current().manager
    manager.flush()
    return engine.outputs(reqs), manager, acted


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_write_that_goes_wrong_is_found_in_its_forward(llama: str, monkeypatch: pytest.MonkeyPatch, bug: Bug) -> None:
    right, _, _ = served(llama, monkeypatch, None)
    monkeypatch.undo()
    wrong, manager, acted = served(llama, monkeypatch, bug, KV_CANARY_CHECK_WRITES="1")
    assert set(acted) == {4}
    assert wrong != right
    first = [r for r in manager.reports if r.step == 4]
    assert first
    assert {r.tag for r in first} == {"TAIL_FULL"}
    assert {reason for r in first for reason in r.reasons} <= {"SEAL_K", "SEAL_V"}
    # One slot, that of the forward's last token; seals of it are held against what lies there again later.
    assert len({r.slot for r in manager.reports}) == 1
    assert "as the model handed them over" in first[0].sentence


def test_without_it_the_text_is_wrong_in_silence(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, _, _ = served(llama, monkeypatch, None)
    monkeypatch.undo()
    wrong, manager, acted = served(llama, monkeypatch, swaps_halves)
    assert acted
    assert wrong != right
    assert list(manager.reports) == []


def test_a_pool_that_keeps_other_bytes_is_named(
    llama: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kv_canary.engines.sglang.writes._parts", lambda pool: iter(()))
    _, manager, _ = served(llama, monkeypatch, None, KV_CANARY_CHECK_WRITES="1")
    assert "check_writes does not cover group full" in caplog.text
    writes = manager.summary().writes
    assert (writes.slots, writes.differ) == (0, 0)
    assert writes.unknown > 0


@pytest.mark.parametrize("fails", [False, True])
def test_graphs_are_captured_again_or_the_server_does_not_start(fails: bool) -> None:
    """Those of before read buffers that the attention backend has given up by then."""
    runner = SimpleNamespace(decode_cuda_graph_runner="before", eager_runner="eager")

    def recapture() -> None:
        runner.decode_cuda_graph_runner = None
        if fails:
            raise MemoryError("full")
        runner.decode_cuda_graph_runner = "again"

    runner.recapture_decode_cuda_graph = recapture
    expected = pytest.raises(ValueError, match=r"check_writes must be off where .*, got MemoryError: full")
    with expected if fails else nullcontext():
        writes.capture_again(runner, keeps="memory")
    assert runner.decode_cuda_graph_runner == (None if fails else "again")
    assert runner.kv_canary_keeps == "memory"
    # Nothing is captured where nothing was.
    for none in (None, "eager"):
        runner.decode_cuda_graph_runner = none
        writes.capture_again(runner, keeps="memory")
        assert runner.decode_cuda_graph_runner == none


@pytest.mark.parametrize("by_graph", [False, True])
def test_a_batch_of_a_graph_with_a_request_that_nobody_can_describe_goes_by(
    llama: str, monkeypatch: pytest.MonkeyPatch, by_graph: bool
) -> None:
    """What its model hands over is of all requests, in their order: held against some of them it would be wrong."""
    environ = {"KV_CANARY_MODE": "log", "KV_CANARY_SEALS": "layer", "KV_CANARY_CHECK_WRITES": "1"}
    with engine.overriding(**environ):
        scheduler = engine.build_scheduler(llama)
    first, second = (engine.submit(scheduler, Tokens(n)(20 + n), 12) for n in (1, 2))
    while len(second.output_ids) < 3:
        engine.step(scheduler)
    noted = batches.noted
    with monkeypatch.context() as patched:
        patched.setattr(compose.Composer, "requests", lambda *_, **__: None)
        patched.setattr(
            batches,
            "noted",
            lambda batch: tuple(
                dataclasses.replace(who, row=None) if who.req is first else who for who in noted(batch)
            ),
        )
        if by_graph:
            patched.setattr(graphs.Graphs, "tokens_of", lambda self, runner: 8)
        engine.step(scheduler)
    engine.run_all(scheduler)
    manager = session.current().manager
    manager.flush()
    assert [r.sentence for r in manager.reports] == []
    assert manager.skipped == by_graph
    assert session.current().status()["left_out"] == ({} if by_graph else {"a request without a row": 1})
