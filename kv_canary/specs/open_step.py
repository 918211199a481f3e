"""open_step: take in the numbers of a step, advance chains, and lay the batch out, in one."""

from __future__ import annotations

import dataclasses

import torch

from kv_canary.specs.arguments import (
    ANCHORS,
    BATCH,
    ROWS,
    SEGMENTS,
    STATUS,
    STEP,
    STRIDES,
    TABLES,
    TAILS,
    TOKEN_TABLE,
    WINDOW,
)
from kv_canary.specs.interface import KernelSpec, TensorSpec, are_distinct

SPEC = KernelSpec(
    name="open_step",
    doc="""Copy the numbers of a step, advance each row's chain over the request's own tokens, and lay the batch out.

    `copy` gets what `words` holds; the second is what `chain_tails` does with rows `advance_rows`. The third finds how
    many cached positions `verify_prefixes` is to check: those of request r are the entries [entry_offsets[r],
    entry_offsets[r + 1]), whatever there is room for; a request out of range has none, nor has padding. All inputs may
    lie in `words`, also in memory of the host's: nothing is read from `copy`.
    """,
    arguments={
        "words": TensorSpec(dtype=torch.int64, shape=("num_words",), doc="numbers of the step"),
        "copy": TensorSpec(dtype=torch.int64, shape=("num_words",), role="out", doc="where they are copied to"),
        "flat": SEGMENTS["flat"],
        "offsets": TensorSpec(
            dtype=torch.int64, shape=("num_advances+1",), doc="segment r is [offsets[r], offsets[r+1])"
        ),
        "advance_rows": dataclasses.replace(ROWS, shape=("num_advances",), doc="row of each segment; 0 is padding"),
        "starts": TensorSpec(dtype=torch.int64, shape=("num_advances",), doc="position of each segment's first token"),
        "anchors": ANCHORS,
        "tails": dataclasses.replace(TAILS, shape=("num_anchors",), role="inout"),
        "pool": dataclasses.replace(
            TOKEN_TABLE,
            shape=("num_anchors", "max_len"),
            optional=True,
            doc="tokens of each row; None: they are not kept",
        ),
        "status": dataclasses.replace(STATUS, doc="Status bits of the advance"),
        "rows": BATCH["rows"],
        "prefix_lens": BATCH["prefix_lens"],
        "extend_lens": BATCH["extend_lens"],
        **TABLES,
        "window": WINDOW,
        "strides": dataclasses.replace(STRIDES, with_="step"),
        "step": dataclasses.replace(STEP, optional=True, with_="strides"),
        "entry_offsets": TensorSpec(
            dtype=torch.int64, shape=("bs+1",), role="out", doc="first entry of each request, and how many there are"
        ),
        "longest_stride": TensorSpec(dtype=torch.int64, shape=(1,), role="out", doc="of the batch; 1 or more"),
    },
    # No row twice.
    has_one_outcome=lambda a: are_distinct(a["advance_rows"], len(a["tails"])),
)
