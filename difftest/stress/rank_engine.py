"""One rank: an engine without a model, its own KV bytes, and a canary that the other ranks compare themselves with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import kv_canary as kc
from kv_canary.difftest.simulator.requests import Request
from kv_canary.difftest.simulator.scripted_engine import ScriptedEngine, kv_source

MAX_ROWS, MAX_LEN, SLOTS = 8, 512, 2048
BYTES = 32
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


class RankEngine(ScriptedEngine):
    """A scripted engine all of whose ranks run the same forwards with the same tables, and wait for each other in each.

    K and V are a rank's own, as those of tensor parallel ranks are.
    """

    def __init__(self, place: Place, **config: Any) -> None:
        self.place = place
        random = torch.Generator(place.device).manual_seed(place.rank)
        groups = [
            kc.BufferGroup(
                name=name,
                window=window,
                pool=kc.KvPool(
                    name=name,
                    num_slots=SLOTS,
                    k_source=kv_source(SLOTS, BYTES, device=place.device, random=random),
                    v_source=kv_source(SLOTS, BYTES, device=place.device, random=random),
                    device=place.device,
                ),
            )
            for name, window in (("full", 0), ("window", WINDOW))
        ]
        super().__init__(
            groups,
            kc.CanaryConfig(stride=1, **config),
            limits=kc.CanaryLimits(max_rows=MAX_ROWS, max_requests=4, max_tokens=64, max_len=MAX_LEN),
            random=random,
            ranks=place.ranks,
        )
        # Whether the ranks wait for each other in every forward.
        self.together = True
        self.raised: list[kc.RankViolationError] = []
        # What the canary took of the host in each step, in seconds.
        self.seconds: list[float] = []

    def load(self, request: Request, source: Request, length: int, *, arrives: bool = True) -> None:
        """Give a request new slots for so many positions, and load into them what `source` has there.

        Args:
            request: which has none yet.
            source: another one.
            length: of the prefix.
            arrives: whether the bytes and their records really come.
        """
        self.map(request, 0, length)
        for group in self.groups:
            table = self.tables[group.name]
            src, dst = table[source.row, :length].long(), table[request.row, :length].long()
            if arrives:
                for half in (group.pool.k_source, group.pool.v_source):
                    for layer in () if half is None else half.layers:
                        layer[dst] = layer[src]
                self.manager.move(group.pool, src, dst, owner=request.owner)
        request.cached = length

    def damage(self, request: Request, position: int) -> None:
        """Flip one covered bit of the K of a cached position; a second time flips it back."""
        group = self.groups[0]
        self.flip(group, "K", self.slot_of(group, request, position), position)

    def extend(self, *work: tuple[Request, int], fails: bool = False) -> None:
        """Run one forward that extends each request by so many tokens; one that fails does so before the model."""
        batch = self.batch(*work)
        began = time.perf_counter()
        try:
            with self.forward.around(batch):
                model_began = time.perf_counter()
                if fails:
                    raise _ModelError
                self.write_bytes(batch)
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
            "watching": summary.watching,
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


class _ModelError(RuntimeError):
    """The model failed on this rank."""
