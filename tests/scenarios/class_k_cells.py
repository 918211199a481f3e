"""Class K: cells that are moved, and the books with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from kv_canary import Reason
from kv_canary.difftest.simulator import Call, Request
from kv_canary.difftest.simulator.groups import Group
from kv_canary.difftest.simulator.kv_bytes import copy_slots

from .harness import Scenario, model_scenario
from .served import CANARY, ServedEngine, full


class MovesFromNext(ServedEngine):
    """Every cell gets what the one behind it held."""

    def compact(self, request: Request) -> Iterator[Call]:
        yield from super().compact(request)
        self.acted({"full": self.pages.slots(request.pages)[:-1]}, [request])

    def move(self, group: Group, src: Sequence[int], dst: Sequence[int], *, owner: int) -> Iterator[Call]:
        yield from super().move(group, [*src[1:], src[-1]], dst, owner=owner)


class OverwritesBeforeReading(ServedEngine):
    """Cells are copied one after the other, down by one page, from the first on: the last page spreads over all."""

    def move(self, group: Group, src: Sequence[int], dst: Sequence[int], *, owner: int) -> Iterator[Call]:
        right = list(zip(src, dst, strict=True))
        for source in group.sources:
            wrong = right[-self.config.page_size :] * (len(right) // self.config.page_size)
            copy_slots(source, [s for s, _ in wrong], list(dst))
        self.manager.move(self.pools[group.name], torch.tensor(list(src)), torch.tensor(list(dst)), owner=owner)
        self.acted({group.name: dst[: -self.config.page_size]})
        yield from ()


def compacted(engine: ServedEngine) -> None:
    both = [engine.come(fresh=11), engine.come(fresh=7)]
    engine.prefill(*both)
    engine.decode(*both)
    engine.go(engine.compact(both[0]))
    engine.decode(*both, steps=3)


ALONE = "full attention, no prefix cache"

SCENARIOS: tuple[Scenario, ...] = (
    model_scenario(
        name="moved-from-next",
        fault="K",
        example="llama.cpp#12253",
        doc="defragmentation moves every cell of a request from the one behind it",
        engine=ALONE,
        expected=Reason.CHAIN,
        life=compacted,
        config=lambda: full(prefix_cache=False),
        faulty=MovesFromNext,
    ),
    model_scenario(
        name="moved-without-tokens",
        fault="K",
        example="llama.cpp#12253",
        doc="the same where no token table is kept",
        engine=f"{ALONE}, no token table",
        expected=Reason.CHAIN,
        life=compacted,
        config=lambda: full(prefix_cache=False),
        canary=replace(CANARY, check_tokens=False),
        faulty=MovesFromNext,
    ),
    model_scenario(
        name="moved-over-itself",
        fault="K",
        example="llama.cpp#12253",
        doc="cells are overwritten before they are moved; the books are right",
        engine=ALONE,
        expected=Reason.K | Reason.V,
        life=compacted,
        config=lambda: full(prefix_cache=False),
        faulty=OverwritesBeforeReading,
    ),
)
