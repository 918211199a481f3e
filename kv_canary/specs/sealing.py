"""Arguments that the ops about seals share, and what they must fulfil together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kv_canary.errors import must_be
from kv_canary.specs.arguments import ENDPOINT
from kv_canary.specs.interface import SLOT, ArgumentSpec, ScalarSpec, Sizes, TensorSpec
from kv_canary.specs.structures import Endpoint

# Words of a slot's seal before those of its bands: the WRITER word of the record that it was made for.
SEAL_HEADER_WORDS = 1

SEALS = TensorSpec(
    dtype=torch.int64,
    shape=("num_slots", "seal_words"),
    row_strided=True,
    doc="of each slot: WRITER of the record that the seal is of, then a word for each band; what is beyond is not used",
)

# Which slots, whose bytes, and how they are hashed.
SEALED: Mapping[str, ArgumentSpec] = {
    "slots": TensorSpec(
        dtype=torch.int64, shape=("n",), optional=True, index_of=SLOT, doc="slots; None: those of the pool, in order"
    ),
    "span": TensorSpec(
        dtype=torch.int64, shape=(2,), doc="first of the slots to take, and how many, as far as they go"
    ),
    "endpoint": ENDPOINT,
    "layers_per_band": ScalarSpec(type=int, default=1, minimum=1, doc="layers that one word of a seal is of"),
    "seed": ScalarSpec(type=int, doc="what the keys of the hash are made from"),
}


def num_bands(endpoint: Endpoint, layers_per_band: int) -> int:
    """Return how many bands the layers of a pool make; the last one may have fewer layers."""
    layers = max(len(source.layers) for source in (endpoint.k_source, endpoint.v_source) if source is not None)
    return -(-layers // layers_per_band)


def seal_words(endpoint: Endpoint, layers_per_band: int) -> int:
    """Return of how many words the seal of a slot is."""
    return SEAL_HEADER_WORDS + num_bands(endpoint, layers_per_band)


def check_seals(op: str) -> Any:
    """Return the check of the arguments of `op`: there are bytes to seal, and room for a word for each band."""

    def check(arguments: Mapping[str, Any], sizes: Sizes) -> None:
        endpoint = arguments["endpoint"]
        if endpoint.k_source is None and endpoint.v_source is None:
            raise ValueError(must_be(op, "endpoint", "of K or V bytes, or both", "neither"))
        expected = seal_words(endpoint, arguments["layers_per_band"])
        if sizes["seal_words"] < expected:
            per_band = arguments["layers_per_band"]
            text = f"of at least {expected} words a slot (one, and one for each band of {per_band} layers)"
            raise ValueError(must_be(op, "seals", text, str(sizes["seal_words"])))

    return check
