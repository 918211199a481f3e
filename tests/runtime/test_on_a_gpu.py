"""What only a GPU shows: the canary's captures and measurements beside an engine that samples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import kv_canary as kc
from kv_canary.difftest.simulator.scripted_engine import kv_source
from kv_canary.runtime.replays import Launch, capture_graph


@pytest.fixture(autouse=True)
def _gpu(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        pytest.skip("needs --device cuda")
    with torch.cuda.device(device):
        yield


def test_an_engines_graph_samples_the_same_while_graphs_are_captured_behind_its_replays() -> None:
    weights, long = torch.ones(1, 1000, device="cuda"), torch.randn(4096, 4096, device="cuda")
    token, mine = torch.zeros(1, 1, dtype=torch.int64, device="cuda"), torch.zeros(4, device="cuda")

    def step() -> None:
        # Long enough that a capture comes while it runs.
        for _ in range(20):
            torch.mm(long, long)
        token.copy_(torch.multinomial(weights, 1))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        mine.zero_()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()

    def serve(*, captures: bool) -> list[int]:
        kept: list[Launch] = []
        torch.manual_seed(1)
        tokens = []
        with torch.cuda.stream(stream):
            for _ in range(8):
                graph.replay()
                if captures:
                    kept.append(capture_graph(mine.zero_))
                stream.synchronize()
                tokens.append(int(token))
        return tokens

    expected = serve(captures=False)
    assert len(set(expected)) > 1
    assert serve(captures=True) == expected


def test_a_capture_that_the_device_gives_up_leaves_the_engine_its_generator_and_its_memory() -> None:
    mine, other = torch.zeros(4, device="cuda"), torch.cuda.Stream()
    torch.randn(4, device="cuda")

    def waits() -> None:
        mine.zero_()
        torch.cuda.current_stream().synchronize()

    for _ in range(3):
        with pytest.raises(RuntimeError, match="captur"):
            capture_graph(waits)
    torch.cuda.synchronize()
    # Who samples outside a graph goes on.
    assert len(set(torch.randn(4, device="cuda").tolist())) == 4
    # What streams share is freed.
    before = torch.cuda.memory_allocated()
    shared = torch.empty(1 << 22, device="cuda")
    with torch.cuda.stream(other):
        shared.zero_()
    shared.record_stream(other)
    del shared
    torch.cuda.synchronize()
    torch.zeros(1, device="cuda")
    assert torch.cuda.memory_allocated() <= before + 4096
    # And so do captures.
    mine.fill_(1)
    capture_graph(mine.zero_)()
    assert mine.tolist() == [0.0] * 4


def test_a_manager_that_measures_its_cost_draws_nothing_from_the_device_s_generator() -> None:
    k, v = (kv_source(256, 64, device="cuda") for _ in range(2))
    pool = kc.KvPool(name="pool", num_slots=256, k_source=k, v_source=v, device="cuda")
    limits = kc.CanaryLimits(max_rows=8, max_requests=4, max_tokens=16, max_len=128)
    torch.manual_seed(3)
    expected = torch.rand(4, device="cuda")
    torch.manual_seed(3)
    manager = kc.CanaryManager([kc.BufferGroup(name="full", pool=pool)], limits=limits)
    assert manager.budget.cost is not None
    assert torch.equal(torch.rand(4, device="cuda"), expected)
    manager.close()
