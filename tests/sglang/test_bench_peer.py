"""`kv-canary bench --peer sglang`: the peer works on our cases. On the CPU, where its own reference does the work."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kv_canary.bench.speed import run
from kv_canary.bench.speed.cases import CASES, choose, quick
from kv_canary.bench.speed.checking import CheckFailed
from kv_canary.bench.speed.peer import DIGESTS, Peer
from kv_canary.bench.speed.state import State, build, pool_bytes, random_bytes

CPU = torch.device("cpu")
BY_NAME = {case.name: case for case in CASES}
SERVED = ["decode 8x512", "decode 256x4096, pages of 16", "prefill 4x2048", "chunk 4096 after 16384", "mixed"]
SERVED += ["SWA 128", "decode 256x4096, whole rows", "write 8192x2KiB, all bytes", "sweep 1M slots"]


def made(name: str) -> State:
    case = quick(BY_NAME[name])
    return build(case, random_bytes(pool_bytes(case, case.most_layers), CPU), backend="reference")


@pytest.mark.parametrize("name", SERVED)
def test_the_peer_serves_a_case(name: str) -> None:
    work = Peer(CPU).work(made(name))
    assert work is not None
    work.launch()
    assert int(work.violations) == 0
    assert "the peer's" in work.compared


@pytest.mark.parametrize(
    "name", ["chain_tails 256x4096", "retire", "move", "decode 256x4096, stride 4", "scatter 256x4096"]
)
def test_what_the_peer_does_not_do_is_not_compared(name: str) -> None:
    assert Peer(CPU).work(made(name)) is None


def test_a_peer_that_reports_a_healthy_pool_is_refused() -> None:
    state = made("decode 8x512")
    # Its history says another token than its records will: position 3 is read where position 2 lies.
    table = state.table.clone()
    table[1, 3] = table[1, 2]
    with pytest.raises(CheckFailed, match="the peer reports"):
        Peer(CPU).work(dataclasses.replace(state, table=table))


def test_the_peer_is_named_by_its_version_and_its_sources() -> None:
    facts = Peer(CPU).facts()
    assert DIGESTS[facts["sources"]] == facts["version"]


def test_a_run_beside_the_peer_has_its_time_and_the_ratio() -> None:
    settings = run.Settings(device="cpu", backend="reference", peer="sglang", rounds=1, replays=1, shrink=True)
    result = run.run(choose(["decode 8x512", "move"], CASES), run.prepare(settings))
    step, move = result["cases"]
    assert step["ratio"] == pytest.approx(step["peer_ms"] / step["ours_ms"], rel=1e-2)
    assert (move["peer_ms"], move["ratio"]) == (None, None)
