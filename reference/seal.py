"""seal: the reference."""

from __future__ import annotations

import torch

from kv_canary.constants import OWNER_BITS, STEP_MASK
from kv_canary.reference.records import load_records
from kv_canary.reference.seals import band_words, chosen_slots
from kv_canary.specs.sealing import seal_words
from kv_canary.specs.structures import Endpoint


def seal(
    *,
    slots: torch.Tensor | None,
    span: torch.Tensor,
    endpoint: Endpoint,
    layers_per_band: int,
    seed: int,
    written_in: torch.Tensor | None,
    seals: torch.Tensor,
) -> None:
    """Keep a hash of all bytes of slots; see specs/seal.py."""
    _, chosen = chosen_slots(slots, span, endpoint)
    record = load_records(endpoint.records, chosen, torch.ones_like(chosen, dtype=torch.bool))
    taken = torch.ones_like(record.written)
    if written_in is not None:
        taken = ((record.writer >> OWNER_BITS) & STEP_MASK) == (written_in & STEP_MASK)
    live = taken & record.written & (record.writer >= 0)
    words = seals[:, : seal_words(endpoint, layers_per_band)]
    words[chosen[taken & ~live]] = 0
    live_slots = chosen[live]
    words[live_slots, 0] = record.writer[live]
    words[live_slots, 1:] = band_words(endpoint, live_slots, layers_per_band=layers_per_band, seed=seed)
