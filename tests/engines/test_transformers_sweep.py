"""Sweeps verify what the engine's prefix cache holds, also what nobody uses now."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kv_canary
from kv_canary.hashing import mix

from .clean import Run, run_clean
from .scenarios import PAGE, Prompts, drop_pinning, make_model, padding_config, serve


def slot_of(canary: Any, prompt: list[int], position: int) -> int:
    """Return the slot that an idle prompt's position is cached in, found by the chain of its tokens."""
    chain = kv_canary.ANCHOR
    for i, token in enumerate(prompt[: position + 1]):
        chain = (chain * kv_canary.CHAIN_MULTIPLIER + mix(i << 32 | token)) % 2**64
    signed = chain - 2**64 if chain >= 2**63 else chain
    (slot,) = (canary.manager.pools[0].records[:, 1] == signed).nonzero().view(-1).tolist()
    return int(slot)


def flip(source: kv_canary.KvSource, slot: int, position: int) -> None:
    """Flip a covered bit of the token in `slot`."""
    layer, start, _ = source.coverage(position)
    row, offset = divmod(slot - source.slot_bias, source.page_size)
    row_bytes = source.layers[layer][row].view(torch.uint8).view(-1)
    row_bytes[offset * source.bytes_per_token + start] ^= 1


@pytest.mark.parametrize("position", [0, PAGE - 1, PAGE, 2 * PAGE + 3])
def test_a_flipped_bit_in_an_idle_cached_block_is_found_by_the_sweep(position: int) -> None:
    model, prompts = make_model("llama"), Prompts()
    canary = kv_canary.install(model, backend="reference", sweep_every=1)
    cached = prompts.random(4 * PAGE)
    with serve(model) as server:
        server.run([cached], new_tokens=2)
        canary.flush()
        assert canary.reports == []
        source, slot = canary.manager.pools[0].k_source, slot_of(canary, cached, position)
        flip(source, slot, position)
        server.run(prompts.of_lengths(5), new_tokens=2)
        canary.flush()
        found = canary.reports
        # Once in each step, until it is mended.
        assert len(found) == len({r.step for r in found}) == 2
        for report in found:
            assert (report.tag, report.reasons) == ("SWEEP_FULL", ("K",))
            assert (report.slot, report.position) == (slot, position)
        flip(source, slot, position)
        server.run(prompts.of_lengths(5), new_tokens=2)
        canary.flush()
        assert canary.reports == found


@pytest.mark.parametrize("word", ["position", "chain"])
def test_a_sweep_holds_records_against_where_the_block_stood(word: str) -> None:
    model, prompts = make_model("llama"), Prompts()
    canary = kv_canary.install(model, backend="reference", sweep_every=1, read_bytes=1 << 20)
    cached = prompts.random(4 * PAGE)
    with serve(model) as server:
        server.run([cached], new_tokens=2)
        records = canary.manager.pools[0].records
        # The first token of a block: what it follows lies in another block.
        slot = slot_of(canary, cached, PAGE)
        if word == "position":
            records[slot, 0] += 1 << 32
        else:
            records[slot, 1] += 1
        server.run(prompts.of_lengths(5), new_tokens=1)
        canary.flush()
        reasons = {r.position: r.reasons for r in canary.reports}
    assert "CHAIN" in reasons[PAGE]
    assert ("POSITION" in reasons[PAGE]) == (word == "position")


def test_what_the_sweep_is_given_is_what_the_cache_holds() -> None:
    model, prompts = make_model("llama"), Prompts()
    canary = kv_canary.install(model, backend="reference")
    with serve(model, num_blocks=24) as server:
        shared = prompts.random(2 * PAGE)
        for _ in range(3):
            # Far more than 24 blocks hold, so that some blocks outlive the ones before them, or go and come back.
            server.run([shared + prompts.random(n) for n in (PAGE, 2 * PAGE, 3)] + prompts.of_lengths(50, 33, 40))
            (cached,) = canary.layout.cached(anchored=False)
            (anchored,) = canary.layout.cached(anchored=True)
            records = canary.manager.pools[0].records
            stored = records[cached.slots]
            assert len(set(cached.slots.tolist())) == len(cached.slots) > 0
            assert len(cached.slots) == PAGE * len(canary.layout.cached_blocks(0))
            assert (stored[:, 0] >> 32).equal(cached.positions)
            assert stored[:, 3].gt(0).all()
            linked = cached.previous >= 0
            assert (records[cached.previous[linked], 0] >> 32).equal(cached.positions[linked] - 1)
            assert linked.sum() > len(linked) // 2
            first = cached.positions == 0
            assert first.any()
            assert cached.previous[first].eq(kv_canary.HEAD_OF_CHAIN).all()
            assert anchored.previous[first].eq(kv_canary.UNCHECKED).all()


def test_a_block_that_outlives_the_one_before_it_follows_nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = make_model("llama"), Prompts().random(3 * PAGE)
    canary = kv_canary.install(model, backend="reference")
    with serve(model) as server:
        server.run([prompt], new_tokens=2)
        layout = canary.layout
        evicted = (slot_of(canary, prompt, PAGE) - canary.manager.pools[0].k_source.slot_bias) // PAGE
        key, blocks = layout.key, layout.cached_blocks
        monkeypatch.setattr(layout, "key", lambda group, block: None if block == evicted else key(group, block))
        monkeypatch.setattr(layout, "cached_blocks", lambda group: [b for b in blocks(group) if b != evicted])
        (cached,) = layout.cached(anchored=False)
    unknown = cached.positions[cached.previous == kv_canary.UNCHECKED]
    assert sorted(set(cached.positions.tolist())) == [*range(PAGE), *range(2 * PAGE, 3 * PAGE)]
    assert unknown.tolist() == [2 * PAGE]


@pytest.mark.every_day("False-llama", "True-gemma3")
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("tight", [False, True])
def test_healthy_sweeps_and_quarantine_find_nothing(monkeypatch: pytest.MonkeyPatch, kind: str, tight: bool) -> None:
    def scenario(run: Run) -> None:
        prompts = Prompts()
        shared = prompts.random(2 * PAGE)
        for _ in range(2):
            run.server.run([shared, shared, shared + [7, 8, 9], *prompts.of_lengths(16, 40, 5)], new_tokens=18)

    config = kv_canary.CanaryConfig(backend="reference", sweep_every=1, quarantine=True)
    options = {"num_blocks": {"mistral": 8}.get(kind, 12)} if tight else {}
    happened = run_clean(monkeypatch, kind, scenario, config=config, options=options)
    # With blocks for sliding attention only, 5.17 lets requests wait instead.
    assert (happened.soft_resets > 0) == tight or kind == "mistral"


def test_sweeps_with_forks_and_offloading_find_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    drop_pinning(monkeypatch)

    def scenario(run: Run) -> None:
        run.server.run(Prompts().of_lengths(3, 16, 31, 40, 50), new_tokens=18)

    config = kv_canary.CanaryConfig(backend="reference", sweep_every=1, quarantine=True)
    options = {"num_blocks": 14, "cpu_offload_space": 0.01}
    happened = run_clean(monkeypatch, "llama", scenario, config=config, samples=2, options=options)
    assert happened.forks > 0
    assert happened.restores > 0


def test_a_flipped_bit_in_a_freed_block_is_found_by_the_quarantine() -> None:
    model, prompts = make_model("mistral"), Prompts()
    canary = kv_canary.install(model, backend="reference", sweep_every=1, quarantine=True)
    with serve(model) as server:
        server.run(prompts.of_lengths(20), new_tokens=2)
        server.run(prompts.of_lengths(3), new_tokens=1)
        pool = canary.manager.pools[0]
        freed = pool.records[: pool.num_slots, 3].lt(0).nonzero().view(-1).tolist()
        assert freed
        # The one that the engine will hand out last.
        slot = freed[0]
        position = int(pool.records[slot, 0] >> 32)
        flip(pool.v_source, slot, position)
        server.run(prompts.of_lengths(3), new_tokens=1)
        canary.flush()
        (report,) = canary.reports
    assert (report.tag, report.reasons, report.slot) == ("SWEEP_SWA", ("V",), slot)


def test_a_warm_up_over_freed_blocks_is_no_finding() -> None:
    model, prompts = make_model("llama"), Prompts()
    canary = kv_canary.install(model, backend="reference", sweep_every=1, quarantine=True)
    with serve(model, **padding_config()) as server:
        server.run(prompts.of_lengths(20, 33, 7), new_tokens=4)
        server.manager.warmup()
        server.run(prompts.of_lengths(20, 33, 7), new_tokens=4)
    canary.flush()
    assert canary.reports == []
    assert canary.summary().violations == 0
