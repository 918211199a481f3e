"""Class H: kernels that compute an address, or a number, wrongly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kv_canary import Reason
from kv_canary.difftest.simulator import Request
from kv_canary.difftest.simulator.groups import Group

from .harness import NOTHING, Scenario, model_scenario
from .served import ServedEngine, full

# Where the kernels' addresses overflow: beyond, they begin anew.
LIMIT = 48


class OverflowsOnRead(ServedEngine):
    def kernel_reads(self, group: Group, request: Request) -> list[int]:
        slots = super().kernel_reads(group, request)
        beyond = [s for s in slots if s >= LIMIT]
        if beyond and self.in_model:
            self.acted({group.name: beyond}, [request])
        return [s % LIMIT for s in slots]


class OverflowsOnWrite(ServedEngine):
    def kernel_writes(self, group: Group, slots: Sequence[int]) -> list[int]:
        landed = [s % LIMIT for s in slots if s >= LIMIT]
        used = [s for s in landed if self.users_of(s)]
        if landed:
            self.acted({group.name: used}, [r for s in used for r, _ in self.users_of(s)])
        return [s % LIMIT for s in slots]


class ScalesWrongly(ServedEngine):
    def kernel_load(self, data: np.ndarray) -> np.ndarray:
        if not self.life.acts:
            self.acted({})
        return data // 2


def filling(engine: ServedEngine) -> None:
    """Requests fill the pool from both sides of the limit."""
    requests = []
    for fresh in (14, 15, 13, 14):
        requests.append(engine.come(fresh=fresh))
        engine.prefill(requests[-1])
        engine.decode(*requests)
    engine.decode(*requests, steps=2)


def alone(engine: ServedEngine) -> None:
    """One request, half of whose pages lie beyond the limit; nobody uses where its writes land."""
    request = engine.come(fresh=14)
    engine.prefill(request)
    engine.decode(request, steps=3)


PLAIN = "full attention, no prefix cache"

SCENARIOS: tuple[Scenario, ...] = (
    model_scenario(
        name="overflow-on-write",
        fault="H",
        example="aiter#2517's kind, in writes",
        doc="addresses beyond a limit begin anew: KV lands in slots that others use",
        engine=PLAIN,
        expected=Reason.K | Reason.V,
        life=filling,
        config=lambda: full(prefix_cache=False),
        faulty=OverflowsOnWrite,
    ),
    model_scenario(
        name="overflow-into-free-slots",
        fault="H",
        example="aiter#2517's kind, in writes",
        doc="the same, and nobody uses the slots where it lands",
        engine=PLAIN,
        expected=NOTHING,
        life=alone,
        config=lambda: full(prefix_cache=False),
        faulty=OverflowsOnWrite,
    ),
    model_scenario(
        name="overflow-on-read",
        fault="H",
        example="aiter#2517",
        doc="addresses beyond a limit begin anew: other slots are read than the table names",
        engine=PLAIN,
        expected=NOTHING,
        life=filling,
        config=lambda: full(prefix_cache=False),
        faulty=OverflowsOnRead,
    ),
    model_scenario(
        name="wrong-scale",
        fault="H",
        example="sglang#18818",
        doc="what is read is multiplied by a wrong scale",
        engine=PLAIN,
        expected=NOTHING,
        life=alone,
        config=lambda: full(prefix_cache=False),
        faulty=ScalesWrongly,
    ),
)
