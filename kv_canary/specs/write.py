"""write: record the new tokens in the slots that the forward wrote them to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from kv_canary.specs.arguments import ENDPOINT, FINDINGS, STEP, TAILS
from kv_canary.specs.interface import SLOT, KernelSpec, ScalarSpec, Sizes, StructSpec, TensorSpec, are_distinct
from kv_canary.specs.structures import WritePlan

# Tokens of the smallest tile; the chain across tiles goes through `tile_sums`.
TILE_TOKENS = 32


def max_tiles(sizes: Sizes) -> int:
    """Return how many tiles one request's segment can have."""
    return -(-sizes["num_tokens"] // TILE_TOKENS)


def _has_one_outcome(arguments: Mapping[str, Any]) -> bool:
    """Whether no row comes twice, and no slot but for the same record by the same owner.

    Two records are the same where both chains begin alike and went over the same tokens at the same positions.
    """
    plan, tails = arguments["write_plan"], arguments["tails"]
    count = min(max(int(plan.num_requests), 0), len(plan.rows))
    if not are_distinct(plan.rows[:count], len(tails)):
        return False
    num_slots, offsets, chains = len(arguments["endpoint"].records), plan.offsets.tolist(), tails.tolist()
    tokens = list(zip(*(arguments[name].tolist() for name in ("out_slots", "input_ids", "positions")), strict=True))
    # The chains as a trie: a number for each node, by the node before it, token and position.
    nodes: dict[tuple[Any, ...], int] = {}
    stored: dict[int, tuple[int, int]] = {}
    for r, row in enumerate(plan.rows[:count].tolist()):
        if not 0 < row < len(chains):
            continue
        node = nodes.setdefault((chains[row],), len(nodes))
        for slot, token, position in tokens[max(offsets[r], 0) : max(offsets[r + 1], 0)]:
            node = nodes.setdefault((node, token, position), len(nodes))
            record = (node, int(plan.owners[r]))
            if 0 < slot < num_slots and stored.setdefault(slot, record) != record:
                return False
    return True


SPEC = KernelSpec(
    name="write",
    doc="""Record the new tokens in the slots that the forward wrote them to.

    Each request's chain starts from its tail and advances over all its tokens. Behaves as if every seed were read
    before anything is stored; a seed whose chain is not the tail is a PREFIX violation. A token for slot 0 is not
    stored, one for a slot outside the pool is a SLOT_RANGE violation; WRITE_POSITION, WRITE_TOKEN and OVERWRITE are
    reported and stored all the same. `counters[tag]` grows by (1, records stored).
    """,
    arguments={
        "write_plan": StructSpec(type=WritePlan, doc="segments, seeds and owners"),
        "input_ids": TensorSpec(dtype=torch.int64, shape=("num_tokens",), doc="tokens of the forward"),
        "positions": TensorSpec(dtype=torch.int64, shape=("num_tokens",), doc="their positions"),
        "out_slots": TensorSpec(
            dtype=torch.int64, shape=("num_tokens",), index_of=SLOT, doc="the slots they were written to"
        ),
        "endpoint": dataclasses.replace(ENDPOINT, role="inout"),
        "tails": TAILS,
        "step": STEP,
        "check_positions": TensorSpec(dtype=torch.int32, shape=(1,), doc="0 switches WRITE_POSITION off"),
        "expected_input_ids": TensorSpec(
            dtype=torch.int64, shape=("num_tokens",), optional=True, doc="what input_ids should be"
        ),
        "track_lifetime": ScalarSpec(type=bool, default=False, doc="report OVERWRITE of another owner's record"),
        **FINDINGS,
        "tile_sums": TensorSpec(
            dtype=torch.int64, shape=("write_cap", max_tiles), role="scratch", doc="what a tile adds to the chain"
        ),
    },
    has_one_outcome=_has_one_outcome,
)
