"""plan: turn a batch's rows and lengths into the entries to verify and the segments to write."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from kv_canary.errors import must_be
from kv_canary.specs.interface import ROW, SLOT, KernelSpec, ScalarSpec, Sizes, StructSpec, TensorSpec
from kv_canary.specs.structures import VerifyPlan, WritePlan


def check_write_capacity(op: str, arguments: Mapping[str, Any], sizes: Sizes) -> None:
    """Raise ValueError, in the name of `op`, unless every request of the batch has a place in the write plan."""
    if sizes["bs"] > sizes["write_cap"]:
        expected = f"at least as long as rows ({sizes['bs']} requests)"
        raise ValueError(must_be(op, "write_plan", expected, f"a capacity of {sizes['write_cap']}"))


SPEC = KernelSpec(
    name="plan",
    doc="""Turn a batch's rows and lengths into the entries to verify and the segments to write.

    Verify entries, in request order and then position order, are the cached positions [start, prefix) of every
    request that is not padding: start is 0, or what the window leaves. Entries past the capacity are dropped, never
    silently: `status` gets OVERFLOW and `num_requested` keeps the truth. A request whose row or lengths are out of
    range is treated as padding and sets ROW_RANGE or LENGTH_RANGE. Slots that the tables cannot give become BAD_SLOT.
    """,
    arguments={
        "rows": TensorSpec(dtype=torch.int64, shape=("bs",), index_of=ROW, doc="row of each request; 0 is padding"),
        "owners": TensorSpec(dtype=torch.int64, shape=("bs",), optional=True, doc="serial numbers; None: the rows"),
        "prefix_lens": TensorSpec(dtype=torch.int64, shape=("bs",), doc="tokens cached before this forward"),
        "extend_lens": TensorSpec(dtype=torch.int64, shape=("bs",), doc="tokens written by this forward"),
        "req_to_token": TensorSpec(
            dtype=torch.int32,
            shape=("num_rows", "max_len"),
            row_strided=True,
            index_of={"lut_len": None, "num_slots": None},
            doc="slot of each position of a row",
        ),
        "window": ScalarSpec(
            type=int, default=0, minimum=0, doc="cached positions the first new query may read; 0: all of them"
        ),
        "after_write": ScalarSpec(
            type=bool, default=False, doc="plan what is still resident after this step in a ring of window + 1 slots"
        ),
        "lut": TensorSpec(
            dtype=torch.int64, shape=("lut_len",), optional=True, index_of=SLOT, doc="full slot -> SWA slot"
        ),
        "expected_tokens": TensorSpec(
            dtype=torch.int32,
            shape=("token_rows", "token_len"),
            optional=True,
            with_="expected_lens",
            row_strided=True,
            doc="token of each position of a row",
        ),
        "expected_lens": TensorSpec(
            dtype=torch.int64, shape=("bs",), optional=True, with_="expected_tokens", doc="tokens known of each request"
        ),
        "token_offset": ScalarSpec(
            type=int, default=0, doc="added to a position to look its token up; 1: EAGLE drafts"
        ),
        "strides": TensorSpec(
            dtype=torch.int64,
            shape=("bs",),
            optional=True,
            with_="step",
            doc="n > 1: keep the last position and every n-th block of 16, rotating with step",
        ),
        "step": TensorSpec(dtype=torch.int64, shape=(1,), optional=True, with_="strides", doc="step number"),
        "verify_plan": StructSpec(type=VerifyPlan, role="out", doc="entries to verify"),
        "write_plan": StructSpec(type=WritePlan, role="out", doc="segments to write"),
        "status": TensorSpec(dtype=torch.int32, shape=(1,), role="out", doc="Status bits"),
        "entry_offsets": TensorSpec(
            dtype=torch.int64, shape=("bs+1",), role="scratch", doc="first entry of each request"
        ),
    },
    checks=(partial(check_write_capacity, "plan"),),
)
