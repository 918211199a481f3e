"""A process whose kernels are compiled and never launched: what is compiled by the warm-up, and what after it.

Prints JSON: {"warm_up": [kernels], "after": [kernels], "forwards": how many came after it, "failures": {}}.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import kv_canary as kc
from kv_canary.difftest import compiling
from kv_canary.difftest.simulator.scripted_engine import kv_source
from kv_canary.runtime import manager as manager_module
from kv_canary.runtime.batch import ForwardBatch, ModelInputs
from kv_canary.runtime.composition import BatchRequests, Composition, Int64s
from kv_canary.runtime.context import CanaryContext
from kv_canary.runtime.replays import Replays

ROWS, REQUESTS, TOKENS, LENGTH = 301, 300, 4096, 3000
SLOTS = 5000
# Of the engine's largest graph: sizes are rounded past it.
GRAPH = 200


class Texts:
    """Requests whose every token is 7."""

    def name(self, member: Any) -> str:
        return str(member)

    def tokens(self, member: Any, start: int, end: int) -> Sequence[int]:
        return [7] * (end - start)

    def newest(self, members: Sequence[Any], ends: Int64s) -> Int64s | None:
        return np.full(len(members), 7, np.int64)

    def discarded(self, member: Any, length: int) -> bool:
        return False


class Context(CanaryContext):
    """One whose launches are for rounded sizes, as on a GPU."""

    def new_replays(self) -> Replays:
        return Replays(lambda launch: launch)


def main(kind: str) -> None:
    """Warm up, and soak; `kind`: "given" (as with SGLang's graphs), "plain", "window" or "sealed"."""
    random.seed(3)
    manager_module.CanaryContext = Context
    k, v = (kv_source(SLOTS, 64, layers=3, read_bytes=16) for _ in range(2))
    pool = kc.KvPool(name="pool", num_slots=SLOTS, k_source=k, v_source=v, device="cpu")
    groups = [kc.BufferGroup(name="full", pool=pool)]
    if kind == "window":
        k, v = (kv_source(SLOTS, 64, layers=3, read_bytes=16) for _ in range(2))
        other = kc.KvPool(name="window", num_slots=SLOTS, k_source=k, v_source=v, device="cpu")
        groups.append(kc.BufferGroup(name="swa", pool=other, window=200))
    tables = {g.name: torch.zeros(ROWS, LENGTH + 8, dtype=torch.int32) for g in groups}
    with compiling.compiler((9, 0)) as found:
        canary = kc.CanaryManager(
            groups,
            limits=kc.CanaryLimits(max_rows=ROWS, max_requests=REQUESTS, max_tokens=TOKENS, max_len=LENGTH),
            config=kc.CanaryConfig(
                backend="triton", stride=1 if kind == "plain" else 4, seals="layer" if kind == "sealed" else "off"
            ),
        )
        canary.forward()
        canary.warm_up(tables, is_given=kind == "given", graph_tokens=GRAPH if kind == "given" else None)
        warm_up = [x.name for x in found]
        found.clear()
        forwards = sum(1 for _ in soak(canary, tables, kind))
        canary.retire(pool, torch.arange(1, 200))
        canary.move(pool, torch.arange(1, 40), torch.arange(41, 80), owner=3)
        canary.scrub()
        canary.complete("r1", {group.name: torch.arange(1, 90) for group in groups})
        after = [x.as_dict() for x in found]
    print(json.dumps({"warm_up": warm_up, "after": after, "forwards": forwards, "failures": canary.guard.failures}))


def soak(canary: kc.CanaryManager, tables: dict[str, torch.Tensor], kind: str) -> Any:
    """Run forwards of all sizes: chunks, decodes of lists that change, and both together."""
    stays = torch.zeros(GRAPH, dtype=torch.int64)
    graph = ModelInputs(
        input_ids=stays, positions=stays, out_slots=dict.fromkeys(tables, stays), rows=stays, lengths=stays, stays=True
    )
    owner = 0
    for count, most in (
        (1, 1),
        (1, 3000),
        (3, 900),
        (17, 200),
        (40, 1),
        (100, 30),
        (129, 1),
        (190, 1),
        (250, 1),
        (300, 13),
    ):
        for _ in range(2):
            rows = np.array(random.sample(range(1, ROWS), count), np.int64)
            owners = np.arange(owner, owner + count) + 1
            owner += count
            members = [f"r{i}" for i in owners.tolist()]
            composition = Composition(members, rows=rows, owners=owners, source=Texts())
            extend = np.array([random.randint(1, most) for _ in range(count)], np.int64)
            prefix = np.array([random.randint(0, 1500) for _ in range(count)], np.int64)
            for _ in range(3):
                newest = np.full(count, 7, np.int64) if (prefix > 0).all() else None
                requests = BatchRequests(composition, prefix=prefix, extend=extend, newest=newest)
                flat = torch.zeros(requests.num_tokens, dtype=torch.int64)
                of_requests = torch.zeros(count, dtype=torch.int64) if kind == "given" else None
                in_graph = kind == "given" and count <= GRAPH and bool((extend == 1).all())
                batch = ForwardBatch(
                    requests=requests,
                    input_ids=flat,
                    positions=flat,
                    out_slots=dict.fromkeys(tables, flat),
                    tables=tables,
                    rows=of_requests,
                    lengths=of_requests,
                    is_given_at_tail=in_graph,
                )
                forward = canary.forward()
                forward.begin(batch)
                forward.head()
                forward.tail(given=graph if in_graph else None)
                forward.end()
                yield
                prefix, extend = prefix + extend, np.ones(count, np.int64)


if __name__ == "__main__":
    main(sys.argv[1])
