"""write: record the new tokens in the slots that the forward wrote them to."""

from __future__ import annotations

import torch

from kv_canary.constants import Tag
from kv_canary.specs.interface import SLOT, KernelSpec, ScalarSpec, Sizes, StructSpec, TensorSpec
from kv_canary.specs.structures import Endpoint, ViolationLog, WritePlan

# Tokens of the smallest tile; the chain across tiles goes through `tile_sums`.
TILE_TOKENS = 32


def max_tiles(sizes: Sizes) -> int:
    """Return how many tiles one request's segment can have."""
    return -(-sizes["num_tokens"] // TILE_TOKENS)


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
        "endpoint": StructSpec(type=Endpoint, role="inout", doc="records and KV bytes"),
        "tails": TensorSpec(dtype=torch.int64, shape=("num_rows",), doc="chain of each row's prefix"),
        "step": TensorSpec(dtype=torch.int64, shape=(1,), doc="step number, for the writer word"),
        "check_positions": TensorSpec(dtype=torch.int32, shape=(1,), doc="0 switches WRITE_POSITION off"),
        "expected_input_ids": TensorSpec(
            dtype=torch.int64, shape=("num_tokens",), optional=True, doc="what input_ids should be"
        ),
        "track_lifetime": ScalarSpec(type=bool, default=False, doc="report OVERWRITE of another owner's record"),
        "violations": StructSpec(type=ViolationLog, role="inout", compare="violations", doc="where violations go"),
        "counters": TensorSpec(dtype=torch.int64, shape=(len(Tag), 2), role="inout", doc="launches, records; by tag"),
        "tile_sums": TensorSpec(
            dtype=torch.int64, shape=("write_cap", max_tiles), role="scratch", doc="what a tile adds to the chain"
        ),
    },
)
