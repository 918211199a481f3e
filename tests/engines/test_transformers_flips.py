"""One flipped bit in the KV cache of a running engine: found at the next HEAD where it is covered, and nowhere else.

The bits are flipped and the slots named through the engine's own tensors and indices, not through the canary's views.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import kv_canary

from .scenarios import Prompts, allow_async_batching, make_model, serve

FLIPS = 200


@dataclass
class Flip:
    """One flipped bit, and what the canary reported in the forward after it."""

    group: kv_canary.BufferGroup
    request_id: str
    position: int
    slot: int
    half: str
    layer: int
    byte: int
    step: int
    reports: Sequence[kv_canary.ViolationReport]

    @property
    def covered(self) -> bool:
        pool = self.group.pool
        layer, start, end = (pool.k_source if self.half == "K" else pool.v_source).coverage(self.position)
        return layer == self.layer and start <= self.byte < end


def engine_views(cache: Any, group: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the engine's (K, V) of each layer of a group, as it indexes them."""
    if hasattr(cache, "cache_allocators"):
        allocator = list(cache.cache_allocators.values())[group]
        return [allocator._kv_token_views[layer] for layer in allocator.layer_indices]
    return list(zip(cache.key_cache, cache.value_cache, strict=True))


def record_slot(cache: Any, group: int, index: int) -> int:
    """Return the record slot of an engine's slot index."""
    if hasattr(cache, "cache_allocators"):
        allocator = list(cache.cache_allocators.values())[group]
        block, offset = divmod(index, allocator.block_physical_stride)
        return block * allocator.tokens_per_page + offset
    return index + 1


class Flipper:
    """Flips one bit before each forward that reads something, and takes it back after it."""

    def __init__(self, canary: Any, processor: Any, choose: Callable[[random.Random, int], bool]) -> None:
        self.canary, self.processor, self.choose = canary, processor, choose
        self.random = random.Random(0)
        self.flips: list[Flip] = []
        self._run = processor.model_runner.compute_batch
        processor.model_runner.compute_batch = self.forward

    def forward(self, model: Any, batch_data: dict[str, Any]) -> Any:
        requests = self.processor.inputs_and_outputs.requests_in_batch
        targets = self._targets(requests)
        # A longer chunk may overwrite the slots of a ring that it has read.
        if len(self.flips) == FLIPS or not targets or any(f.query_length != 1 for f in requests):
            return self._run(model, batch_data)
        group, request, offset, position = self.random.choice(targets)
        index = int(batch_data["read_index"][group][offset])
        flip, view = self._place(group, index, request, position)
        bit = 1 << self.random.randrange(8)
        view[flip.byte] ^= bit
        known = len(self.canary.reports)
        result = self._run(model, batch_data)
        self.canary.flush()
        view[flip.byte] ^= bit
        flip.reports = self.canary.reports[known:]
        flip.step = self.canary.manager.step
        self.flips.append(flip)
        return result

    def _targets(self, requests: Sequence[Any]) -> list[tuple[int, str, int, int]]:
        """Return (group, request, offset in the read index, position) of every cached position."""
        targets = []
        for g, group in enumerate(self.canary.manager.groups):
            offset = 0
            for future in requests:
                past = future.state.position_offset - future.query_length
                cached = min(past, group.window) if group.window else past
                name = future.state.request_id
                targets += [(g, name, offset + k, past - cached + k) for k in range(cached)]
                offset += cached + future.query_length
        return targets

    def _place(self, group: int, index: int, request: str, position: int) -> tuple[Flip, torch.Tensor]:
        """Choose half, layer and byte: every other flip among the covered bytes, the others anywhere."""
        views = engine_views(self.processor.cache, group)
        pool = self.canary.manager.groups[group].pool
        half = self.random.randrange(2)
        width = views[0][half][index].numel() * views[0][half].element_size()
        layer, byte = self.random.randrange(len(views)), self.random.randrange(width)
        if self.choose(self.random, len(self.flips)):
            layer, start, end = (pool.k_source, pool.v_source)[half].coverage(position)
            byte = self.random.randrange(start, end)
        view = views[layer][half][index].view(torch.uint8).view(-1)
        slot = record_slot(self.processor.cache, group, index)
        flip = Flip(
            group=self.canary.manager.groups[group],
            request_id=request,
            position=position,
            slot=slot,
            half="KV"[half],
            layer=layer,
            byte=byte,
            step=0,
            reports=(),
        )
        return flip, view


def flip_bits(model: Any, *, read_bytes: int, choose: Callable[[random.Random, int], bool]) -> tuple[list[Flip], Any]:
    """Serve requests until `FLIPS` bits were flipped; return the flips and the canary."""
    canary = kv_canary.install(model, backend="reference", read_bytes=read_bytes)
    prompts = Prompts()
    with serve(model) as server:
        flipper = Flipper(canary, server.manager.batch_processor, choose)
        while len(flipper.flips) < FLIPS:
            server.run(prompts.of_lengths(5, 17, 33, 48), new_tokens=110)
    canary.flush()
    canary.uninstall()
    return flipper.flips, canary


def assert_found(flip: Flip) -> None:
    assert len(flip.reports) == 1, flip
    report = flip.reports[0]
    assert report.reasons == (flip.half,)
    assert (report.tag, report.step) == (flip.group.head_tag.name, flip.step)
    assert (report.slot, report.position, report.request_id) == (flip.slot, flip.position, flip.request_id)
    pool = flip.group.pool
    _, start, end = (pool.k_source if flip.half == "K" else pool.v_source).coverage(flip.position)
    assert report.places == (f"{flip.half} of {pool.layer_names[flip.layer]}, bytes {start} to {end}",)
    assert start <= flip.byte < end
    assert "the K/V bytes changed after they were written" in report.cause


def test_with_whole_rows_of_one_layer_covered_every_flip_is_found() -> None:
    model = make_model("llama", num_hidden_layers=1)
    flips, canary = flip_bits(model, read_bytes=1 << 20, choose=lambda *_: False)
    assert len(flips) == FLIPS
    for flip in flips:
        assert_found(flip)
    assert {f.half for f in flips} == {"K", "V"}
    assert canary.summary().violations == FLIPS
    assert set(canary.summary().reasons) == {"K", "V"}


@pytest.mark.every_day("gemma3")
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_with_sampled_bytes_exactly_the_covered_flips_are_found(kind: str) -> None:
    wide = {"hidden_size": 256, "head_dim": 64, "num_hidden_layers": 4} if kind == "llama" else {}
    model = make_model(kind, **wide)
    flips, canary = flip_bits(model, read_bytes=16, choose=lambda _, i: i % 2 == 0)
    assert len(flips) == FLIPS
    for flip in flips:
        if flip.covered:
            assert_found(flip)
        else:
            assert not flip.reports, flip
    found = sum(bool(f.reports) for f in flips)
    assert canary.summary().violations == found
    # Every second flip was aimed; of the others, a share as small as computed hits a covered byte by chance.
    by_chance = [f for i, f in enumerate(flips) if i % 2]
    hits = sum(bool(f.reports) for f in by_chance)
    shares = [1 / (len(f.group.pool.k_source.layers) * f.group.pool.k_source.num_windows) for f in by_chance]
    assert found == FLIPS // 2 + hits
    expected = sum(shares)
    # Poisson-like: 5 standard deviations and one flip of slack.
    assert abs(hits - expected) <= 5 * expected**0.5 + 1, (hits, expected)
    print(f"{kind}: of {len(by_chance)} flips anywhere, {hits} were found, {expected:.2f} computed")


def test_every_byte_of_every_layer_comes_round_once() -> None:
    layers, width = 4, 512
    source = kv_canary.KvSource(
        layers=tuple(torch.zeros(8, width, dtype=torch.uint8) for _ in range(layers)),
        page_size=1,
        bytes_per_token=width,
    )
    covered = torch.zeros(layers, width, dtype=torch.int64)
    for position in range(layers * source.num_windows):
        layer, start, end = source.coverage(position)
        covered[layer, start:end] += 1
    assert covered.eq(1).all()
    assert layers * source.num_windows == 128


def test_a_token_that_the_device_carries_over_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_async_batching(monkeypatch)
    model, calls, spoiled = make_model("llama"), 0, 9
    canary = kv_canary.install(model, backend="reference", check_tokens=True, max_reports_per_step=1024)
    with serve(model, use_async_batching=True) as server:
        io = server.manager.batch_processor.inputs_and_outputs
        carry = io.carry_over_tokens

        def wrong(input_ids: torch.Tensor, *args: torch.Tensor) -> None:
            nonlocal calls
            carry(input_ids, *args)
            # The canary asks beforehand, on a copy; only what the model is given is wrong.
            inside = any(input_ids.data_ptr() == p.device_io.input_ids.data_ptr() for p in io.io_pairs)
            calls += inside
            if inside and calls == spoiled:
                input_ids[0, 0] += 1

        io.carry_over_tokens = wrong
        server.run(Prompts().of_lengths(20), new_tokens=16)
    canary.flush()
    first = min(r.step for r in canary.reports)
    found = [r for r in canary.reports if r.step == first]
    # Held against the request's own tokens by the next forward.
    assert first == spoiled + 1
    assert any("TOKEN" in r.reasons for r in found)
    assert {r.position for r in found} == {20 + spoiled - 2}
