"""Class G: what CUDA graphs keep, and what padding touches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from kv_canary import ForwardBatch, Reason
from kv_canary.difftest.simulator import Request
from kv_canary.difftest.simulator.groups import Group

from .harness import NOTHING, Scenario, model_scenario
from .served import ServedEngine, full

# What padding computes.
GARBAGE = 0x7F


class PaddedEngine(ServedEngine):
    """Decodes run as a graph of a fixed size: what the padding computes goes to a slot that nobody uses."""

    padding_slot = 0

    def run_kernels(self, batch: ForwardBatch, extends: Mapping[Request, int]) -> list[int]:
        tokens = super().run_kernels(batch, extends)
        if decodes(extends):
            for group in self.groups:
                for source in group.sources:
                    for layer in source.layers:
                        layer[self.padding_slot] = GARBAGE
        return tokens


class PadsLastSlot(PaddedEngine):
    """Padding has the id -1, which counts from the end."""

    padding_slot = -1

    def run_kernels(self, batch: ForwardBatch, extends: Mapping[Request, int]) -> list[int]:
        tokens = super().run_kernels(batch, extends)
        last = self.groups[0].config.num_slots - 1
        users = [r for r, _ in self.users_of(last)]
        if decodes(extends) and users:
            self.acted({"full": [last]}, users)
        return tokens


class PadsLiveToken(PaddedEngine):
    """The slots of a batch that has grown are those of the smaller one, with padding behind."""

    before = 1 << 30

    def forward_batch(self, extends: Mapping[Request, int]) -> ForwardBatch:
        batch = super().forward_batch(extends)
        slots, known = batch.out_slots["full"].clone(), self.before
        if not decodes(extends):
            return batch
        self.before = len(slots)
        if known < len(slots):
            late = list(extends)[known:]
            self.acted({"full": [-1]}, late)
            self.acted({"full": slots[known:].tolist()}, late, later=True)
            slots[known:] = -1
        return replace(batch, out_slots={"full": slots})


class ReadsPadding(PaddedEngine):
    """What a page has behind the last position is read from the padding slot and not masked."""

    def kernel_reads(self, group: Group, request: Request) -> list[int]:
        slots = super().kernel_reads(group, request)
        behind = -len(slots) % self.config.page_size
        if behind and self.in_model:
            self.acted({"full": [0]}, [request])
        return slots + [0] * behind


class ReadsStaleTable(PaddedEngine):
    """Replays read the table of the replay before."""

    captured: torch.Tensor | None = None

    replaying = False

    def run_kernels(self, batch: ForwardBatch, extends: Mapping[Request, int]) -> list[int]:
        self.replaying = decodes(extends)
        tokens = super().run_kernels(batch, extends)
        if self.replaying:
            self.captured = self.table.clone()
        return tokens

    def kernel_reads(self, group: Group, request: Request) -> list[int]:
        right = super().kernel_reads(group, request)
        if self.captured is None or not self.in_model or not self.replaying:
            return right
        slots = self.captured[request.row, : request.cached].tolist()
        if slots != right:
            self.acted({"full": slots}, [request])
        return slots


class WritesStaleSlots(PaddedEngine):
    """Replays write to the slots of the replay before."""

    captured: Sequence[int] = ()

    def kernel_writes(self, group: Group, slots: Sequence[int]) -> list[int]:
        stale, self.captured = self.captured, list(slots)
        if len(stale) != len(slots):
            return super().kernel_writes(group, slots)
        self.acted({"full": stale})
        return list(stale)


class GivenEngine(ServedEngine):
    """The kernels go by rows and lengths on the device, which the canary is given as they are."""

    # Of the requests of the forward under way.
    rows: dict[Request, int]
    lengths: dict[Request, int]
    extends: Mapping[Request, int]

    def forward_batch(self, extends: Mapping[Request, int]) -> ForwardBatch:
        self.extends = extends
        self.rows = {r: r.row for r in extends}
        self.lengths = {r: r.cached + n for r, n in extends.items()}
        if decodes(extends) and len(extends) > 1:
            self.prepare(list(extends))
        given = (torch.tensor(list(x.values()), dtype=torch.int64) for x in (self.rows, self.lengths))
        return replace(super().forward_batch(extends), **dict(zip(("rows", "lengths"), given, strict=True)))

    def prepare(self, requests: Sequence[Request]) -> None:
        """Change what the kernels of a decode are given."""

    def kernel_reads(self, group: Group, request: Request) -> list[int]:
        slots: list[int] = group.table[self.rows[request], : request.cached].tolist()
        missing = self.extends[request] + request.cached - self.lengths[request]
        return slots[: len(slots) - missing]

    def spoil(self, *requests: Request) -> None:
        """Note that these requests do not read what is theirs."""
        slots = [s for r in requests for s in ServedEngine.kernel_reads(self, self.groups[0], r)]
        self.acted({"full": slots}, requests)


class SwapsRows(GivenEngine):
    """Two requests of a batch have each other's rows on the device; the host has the right ones."""

    def prepare(self, requests: Sequence[Request]) -> None:
        one, other = requests[:2]
        self.rows[one], self.rows[other] = other.row, one.row
        self.spoil(one, other)


class ForgetsToken(GivenEngine):
    """The length on the device of one request lags a token behind."""

    def prepare(self, requests: Sequence[Request]) -> None:
        self.lengths[requests[0]] -= 1
        self.spoil(requests[0])


def decodes(extends: Mapping[Request, int]) -> bool:
    """Whether a forward is one that runs as a graph."""
    return bool(extends) and all(n == 1 for n in extends.values())


def crowded(engine: ServedEngine) -> None:
    """Every slot of the pool is in use; the request that has the last one stays."""
    requests = [engine.come(fresh=12), engine.come(fresh=20)]
    engine.prefill(*requests)
    last = engine.config.num_pages - 1
    engine.leave(next(r for r in requests if last not in r.pages))
    engine.decode(next(r for r in requests if last in r.pages), steps=3)


def grown_batch(engine: ServedEngine) -> None:
    first = engine.come(fresh=7)
    engine.prefill(first)
    engine.decode(first)
    second = engine.come(fresh=9)
    engine.prefill(second)
    engine.decode(first, second, steps=3)


def few_decodes(engine: ServedEngine) -> None:
    requests = [engine.come(fresh=7), engine.come(fresh=9)]
    engine.prefill(*requests)
    engine.decode(*requests, steps=4)


def moved_between(engine: ServedEngine) -> None:
    """Between two replays a request's pages move, and others get the old ones."""
    requests = [engine.come(fresh=7), engine.come(fresh=9)]
    engine.prefill(*requests)
    engine.decode(*requests, steps=2)
    engine.go(engine.compact(requests[0]))
    other = engine.come(fresh=10)
    engine.prefill(other)
    engine.decode(*requests, steps=2)


ALONE = "full attention, padded decodes"

SCENARIOS: tuple[Scenario, ...] = (
    model_scenario(
        name="padding-in-last-slot",
        fault="G",
        example="vllm#43810",
        doc="padding has the slot -1, and its KV goes to the pool's last slot, which is in use",
        engine=f"{ALONE}, eight pages, all in use",
        expected=Reason.K | Reason.V,
        life=crowded,
        config=lambda: full(num_pages=8, prefix_cache=False),
        healthy=PaddedEngine,
        faulty=PadsLastSlot,
    ),
    model_scenario(
        name="padding-for-a-token",
        fault="G",
        example="vllm#43810",
        doc="a token's slot is the padding id: the slots of a smaller batch were kept",
        engine=ALONE,
        expected=Reason.SLOT_RANGE,
        life=grown_batch,
        config=full,
        healthy=PaddedEngine,
        faulty=PadsLiveToken,
    ),
    model_scenario(
        name="stale-write-slots",
        fault="G",
        example="sglang#37975's kind, in writes",
        doc="a graph writes to the slots of its last replay; the canary is told the right ones",
        engine=ALONE,
        expected=Reason.K | Reason.V,
        life=few_decodes,
        config=full,
        healthy=PaddedEngine,
        faulty=WritesStaleSlots,
    ),
    model_scenario(
        name="stale-read-indices",
        fault="G",
        example="sglang#37975",
        doc="a graph reads by the table of its last replay; the canary is told the right one",
        engine=ALONE,
        expected=NOTHING,
        life=moved_between,
        config=lambda: full(prefix_cache=False),
        healthy=PaddedEngine,
        faulty=ReadsStaleTable,
    ),
    model_scenario(
        name="rows-swapped",
        fault="G",
        example="an index buffer filled in another order",
        doc="two requests have each other's rows on the device; the host has the right ones",
        engine="full attention",
        expected=Reason.BATCH,
        beyond=Reason.BATCH,
        life=few_decodes,
        config=full,
        healthy=GivenEngine,
        faulty=SwapsRows,
    ),
    model_scenario(
        name="length-short",
        fault="G",
        example="a length that lags under overlap",
        doc="the length of one request on the device is one short",
        engine="full attention",
        expected=Reason.BATCH,
        beyond=Reason.BATCH,
        life=few_decodes,
        config=full,
        healthy=GivenEngine,
        faulty=ForgetsToken,
    ),
    model_scenario(
        name="padding-slot-read",
        fault="G",
        example="sglang#35351",
        doc="what lies in the padding slot is read and not masked",
        engine=ALONE,
        expected=NOTHING,
        life=few_decodes,
        config=full,
        healthy=PaddedEngine,
        faulty=ReadsPadding,
    ),
)
