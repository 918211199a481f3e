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
from kv_canary.reports.neighbourhood import SlotReader
from kv_canary.runtime import manager as manager_module
from kv_canary.runtime.batch import ForwardBatch, ModelInputs
from kv_canary.runtime.composition import BatchRequests, Composition, Int64s
from kv_canary.runtime.context import CanaryContext
from kv_canary.runtime.replays import Replays

ROWS, REQUESTS, TOKENS, LENGTH = 301, 300, 4096, 3000
SLOTS = 12000
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
    """Warm up, and soak.

    Args:
        kind: "given" (as with SGLang's graphs), "plain", "sealed", "writes" (held against what is handed over), "both"
            (two records of a slot), "rows" (tables have rows of their own), "pending" (some of a prefix comes in the
            forward), "window" or "ring" (a group of either beside another one).
    """
    random.seed(3)
    manager_module.CanaryContext = Context
    k, v = (kv_source(SLOTS, 64, layers=3, read_bytes=16) for _ in range(2))
    pool = kc.KvPool(name="pool", num_slots=SLOTS, k_source=k, v_source=v, device="cpu")
    groups = [kc.BufferGroup(name="full", pool=pool)]
    if kind in ("window", "ring"):
        k, v = (kv_source(SLOTS, 64, layers=3, read_bytes=16) for _ in range(2))
        other = kc.KvPool(name="window", num_slots=SLOTS, k_source=k, v_source=v, device="cpu")
        groups.append(kc.BufferGroup(name="swa", pool=other, window=200, ring=kind == "ring"))
    tables = {g.name: torch.zeros(ROWS, LENGTH + 8, dtype=torch.int32) for g in groups}
    with compiling.compiler((9, 0)) as found:
        canary = kc.CanaryManager(
            groups,
            limits=kc.CanaryLimits(max_rows=ROWS, max_requests=REQUESTS, max_tokens=TOKENS, max_len=LENGTH),
            config=kc.CanaryConfig(
                backend="triton",
                stride=1 if kind == "plain" else 4,
                seals="layer" if kind in ("sealed", "writes") else "off",
                check_writes=kind == "writes",
                records="head_and_tail" if kind == "both" else "one",
            ),
        )
        canary.forward()
        is_given = kind == "given"
        canary.warm_up(
            tables, is_given=is_given, has_table_rows=kind == "rows", graph_tokens=GRAPH if is_given else None
        )
        warm_up = [x.name for x in found]
        found.clear()
        forwards = sum(1 for _ in soak(canary, tables, kind))
        between(canary, groups)
        look_around(canary, groups, tables)
        after = [x.as_dict() for x in found]
    print(json.dumps({"warm_up": warm_up, "after": after, "forwards": forwards, "failures": canary.guard.failures}))


def between(canary: kc.CanaryManager, groups: Sequence[kc.BufferGroup]) -> None:
    """Do what comes between forwards, with lists of all sizes, wherever they begin."""
    for count in (1, 15, 16, 90, 199, 4096, 4097, 4112, 4500):
        for first in (1, 2):
            slots = torch.arange(6000)[first : first + count]
            other = torch.arange(12000)[6000 + first : 6000 + first + count]
            for group in groups:
                pool = group.pool
                canary.retire(pool, slots)
                canary.retire(pool, slots, owner=3)
                canary.move(pool, slots, other, owner=3)
                canary.complete("r1", {group.name: slots})
                canary.adopt(group.name, slots, [7] * count, owner=3)
                canary.arrived(pool, slots, None)
    canary.scrub()
    canary.sweep()


def look_around(canary: kc.CanaryManager, groups: Sequence[kc.BufferGroup], tables: dict[str, torch.Tensor]) -> None:
    """Look around what may be found, as a report does."""
    reader = SlotReader(
        backend="triton", track_lifetime=True, name_of_owner=lambda owner: None, handed_out=lambda step, owner: False
    )
    for group in groups:
        group.pool.records[1:40] = 1
        for identity in (0, 5):
            for length in (1, 16, 33):
                request = kc.ForwardRequest(
                    request_id="r1",
                    row=1,
                    owner=1,
                    prefix_len=length,
                    extend_len=1,
                    tokens=lambda start, end: [7] * (end - start),
                    identity=identity,
                )
                table = tables[group.name]
                reader.positions(group, group.head_tag, table, request, within=range(length), written=length)
                reader.slots(group, group.sweep_tag, within=range(1, length + 1))


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
                requests = BatchRequests(
                    composition,
                    prefix=prefix,
                    extend=extend,
                    newest=newest,
                    pending=np.minimum(prefix, 7) if kind == "pending" else None,
                    table_rows=np.arange(count) if kind == "rows" else None,
                )
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
