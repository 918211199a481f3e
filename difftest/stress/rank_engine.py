"""One rank: an engine without a model, its own KV bytes, and a canary that the other ranks compare themselves with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import kv_canary as kc

MAX_ROWS, MAX_LEN, SLOTS = 8, 512, 2048
LAYERS, BYTES = 2, 32
WINDOW = 8

# What a rank says.
Facts = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place where a rank runs.

    Args:
        ranks: the group of its canary.
        spare: more of them, for scenarios with several managers.
        model: the group that the model's own collectives go through.
        device: where its pools are.
    """

    ranks: kc.RankGroup
    spare: Sequence[kc.RankGroup] = ()
    model: Any
    device: torch.device

    @property
    def rank(self) -> int:
        """Its number within the scenario."""
        return self.ranks.rank


@dataclass
class Request:
    """A request: its own tokens, and how many of them are cached."""

    name: str
    row: int
    tokens: list[int]
    cached: int = 0


class RankEngine:
    """An engine without a model: it allocates slots, fills tables and writes bytes of its own where K and V would go.

    All ranks of one scenario run the same forwards with the same tables, and wait for each other in every one of them,
    as tensor parallel ranks do.
    """

    def __init__(self, place: Place, **config: Any) -> None:
        self.place, device = place, place.device
        self.random = torch.Generator(device).manual_seed(place.rank)
        self.groups = [self._group("full", 0), self._group("window", WINDOW)]
        self.manager = kc.CanaryManager(
            self.groups,
            limits=kc.CanaryLimits(max_rows=MAX_ROWS, max_requests=4, max_tokens=64, max_len=MAX_LEN),
            config=kc.CanaryConfig(stride=1, **config),
            ranks=place.ranks,
        )
        # The canary's own failures are to be seen here, in log mode too.
        self.manager.guard.contains = False
        self.tables = {g.name: torch.zeros(MAX_ROWS, MAX_LEN, dtype=torch.int32, device=device) for g in self.groups}
        self.requests: dict[str, Request] = {}
        self._next_slot = 1
        # Whether the ranks wait for each other in every forward.
        self.together = True
        self.raised: list[kc.RankViolationError] = []
        # What the canary took of the host in each step, in seconds.
        self.seconds: list[float] = []

    def add(self, name: str, length: int, *, like: Request | None = None) -> Request:
        """Return a new request of so many tokens, which begin as those of `like` do."""
        row = len(self.requests) + 1
        tokens = [1000 * row + i for i in range(length)]
        if like is not None:
            tokens[: len(like.tokens)] = like.tokens[:length]
        self.requests[name] = Request(name, row, tokens)
        return self.requests[name]

    def load(self, request: Request, source: Request, length: int, *, arrives: bool = True) -> None:
        """Give a request new slots for so many positions, and load into them what `source` has there.

        Args:
            arrives: whether the bytes and their records really come.
        """
        for group in self.groups:
            table = self.tables[group.name]
            src = table[source.row, :length].long()
            dst = torch.arange(self._next_slot, self._next_slot + length, device=src.device)
            table[request.row, :length] = dst.int()
            if arrives:
                for layer in _layers(group):
                    layer[dst] = layer[src]
                self.manager.move(group.pool, src, dst, owner=request.row)
        self._next_slot += length
        request.cached = length

    def damage(self, request: Request, position: int) -> None:
        """Flip one covered bit of the K of a cached position; a second time flips it back."""
        group = self.groups[0]
        source = group.pool.k_source
        if source is not None:
            layer, start, _ = source.coverage(position)
            source.layers[layer][self.tables["full"][request.row, position].long(), start] ^= 1

    def step(self, *work: tuple[Request, int], fails: bool = False) -> None:
        """Run one forward that extends each request by so many tokens; one that fails does so before the model."""
        batch = self._batch(work)
        began = time.perf_counter()
        try:
            with self.manager.forward().around(batch):
                model_began = time.perf_counter()
                if fails:
                    raise _ModelError
                for group in self.groups:
                    slots = batch.out_slots[group.name]
                    for layer in _layers(group):
                        layer[slots] = self._bytes(len(slots))
                if self.together:
                    torch.distributed.barrier(self.place.model)
                model_ended = time.perf_counter()
        except _ModelError:
            return
        except kc.RankViolationError as error:
            self.raised.append(error)
            return
        self.seconds.append(time.perf_counter() - model_ended + model_began - began)
        for request, count in work:
            request.cached += count

    def facts(self) -> Facts:
        """Return what this rank's canary has to say."""
        summary, watch = self.manager.summary(), self.manager.ranks
        return {
            "steps": summary.steps,
            "status": summary.status,
            "reasons": sorted(summary.reasons),
            "compared": 0 if watch is None else watch.compared,
            "differences": [
                [r.request_id, list(r.differences), list(r.ranks), list(r.groups)] for r in self.manager.rank_reports
            ],
            "sentences": [r.sentence for r in self.manager.rank_reports],
            "raised_before": [error.step for error in self.raised],
            "verdicts": [[[v.rank, v.total] for v in error.verdicts] for error in self.raised],
            "raised": [str(error) for error in self.raised],
        }

    def _batch(self, work: Sequence[tuple[Request, int]]) -> kc.ForwardBatch:
        device = self.place.device
        ids: list[int] = []
        positions: list[int] = []
        for request, count in work:
            start, end = request.cached, request.cached + count
            slots = torch.arange(self._next_slot, self._next_slot + count, dtype=torch.int32, device=device)
            for table in self.tables.values():
                table[request.row, start:end] = slots
            self._next_slot += count
            ids += request.tokens[start:end]
            positions += range(start, end)
        flat = [self.tables["full"][r.row, r.cached : r.cached + n] for r, n in work]
        return kc.ForwardBatch(
            requests=[
                kc.ForwardRequest(
                    request_id=request.name,
                    row=request.row,
                    owner=request.row,
                    prefix_len=request.cached,
                    extend_len=count,
                    tokens=lambda a, b, request=request: request.tokens[a:b],  # type: ignore[misc]
                )
                for request, count in work
            ],
            input_ids=torch.tensor(ids, device=device),
            positions=torch.tensor(positions, device=device),
            out_slots=dict.fromkeys(self.tables, torch.cat(flat).long()),
            tables=self.tables,
        )

    def _group(self, name: str, window: int) -> kc.BufferGroup:
        k, v = (
            kc.KvSource(layers=tuple(self._bytes(SLOTS) for _ in range(LAYERS)), page_size=1, bytes_per_token=BYTES)
            for _ in range(2)
        )
        pool = kc.KvPool(name=name, num_slots=SLOTS, k_source=k, v_source=v, device=self.place.device)
        return kc.BufferGroup(name=name, pool=pool, window=window)

    def _bytes(self, count: int) -> torch.Tensor:
        shape = (count, BYTES)
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=self.place.device, generator=self.random)


class _ModelError(RuntimeError):
    """The model failed on this rank."""


def _layers(group: kc.BufferGroup) -> list[torch.Tensor]:
    return [layer for s in (group.pool.k_source, group.pool.v_source) if s is not None for layer in s.layers]
