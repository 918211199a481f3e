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
    """Whether no row comes twice, no stored token is of two requests, and none behind the offsets shares a slot."""
    plan, num_rows, num_tokens = arguments["write_plan"], len(arguments["tails"]), len(arguments["input_ids"])
    count = min(max(int(plan.num_requests), 0), len(plan.rows))
    if not are_distinct(plan.rows[:count], num_rows):
        return False
    offsets, written = plan.offsets.clamp(0, num_tokens).tolist(), torch.zeros(num_tokens, dtype=torch.int64)
    for r, row in enumerate(plan.rows[:count].tolist()):
        if 0 < row < num_rows:
            written[offsets[r] : offsets[r + 1]] += 1
    slots = arguments["out_slots"]
    written[(slots <= 0) | (slots >= len(arguments["endpoint"].records))] = 0
    behind = slots[offsets[count] :][written[offsets[count] :] > 0].tolist()
    stored = slots[written > 0].tolist()
    return bool((written < 2).all()) and all(stored.count(slot) == 1 for slot in behind)


SPEC = KernelSpec(
    name="write",
    doc="""Record the new tokens in the slots that the forward wrote them to.

    Each request's chain starts from its tail and advances over all its tokens. Behaves as if every seed were read
    before anything is stored; a seed whose chain is not the tail is a PREFIX violation. A token for slot 0 is not
    stored, one for a slot outside the pool is a SLOT_RANGE violation; WRITE_POSITION, WRITE_TOKEN and OVERWRITE of an
    old record are reported and stored all the same. Where several flat inputs before the plan's last offset have one
    slot, only the last of them is stored, if it is a request's; another one is OVERWRITE unless that one is the same
    token behind the same prefix, or of the same owner and, but for a ring, of the same identity. A request whose row or
    length is not the one that was given is BATCH. `counters[tag]` grows by (1, records stored).
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
        "given_rows": TensorSpec(
            dtype=torch.int64,
            shape=("num_given",),
            optional=True,
            with_="given_lens",
            doc="row of each request as the model is given it; None, or fewer: not checked",
        ),
        "given_lens": TensorSpec(
            dtype=torch.int64,
            shape=("num_given",),
            optional=True,
            with_="given_rows",
            doc="its length as the model is given it, new tokens included",
        ),
        "track_lifetime": ScalarSpec(
            type=bool, default=False, doc="report OVERWRITE: of another owner's record, and of two tokens in one slot"
        ),
        "ring": ScalarSpec(
            type=bool, default=False, doc="a request's tokens may take the slots of its own earlier ones"
        ),
        **FINDINGS,
        "tile_sums": TensorSpec(
            dtype=torch.int64, shape=("write_cap", max_tiles), role="scratch", doc="what a tile adds to the chain"
        ),
        "slot_marks": TensorSpec(
            dtype=torch.int64, shape=("num_slots",), role="scratch", doc="the last of the tokens that have a slot"
        ),
    },
    has_one_outcome=_has_one_outcome,
)
