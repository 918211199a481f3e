"""KV bytes of slots, as a model and an engine's copies change them: random where written, else copied."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kv_canary.specs.structures import KvSource


def fill_slots(source: KvSource, slots: Sequence[int], rng: np.random.Generator) -> None:
    """Put random bytes into the tokens of `slots`; padding and slots outside the source are skipped."""
    rows, columns = _where(source, [s for s in slots if s > 0 and 0 <= _row(source, s) < source.num_rows])
    for layer in source.layers:
        written = torch.from_numpy(rng.integers(0, 256, tuple(columns.shape), dtype=np.uint8))
        layer[rows, columns] = written.to(layer.device)


def copy_slots(source: KvSource, src: Sequence[int], dst: Sequence[int]) -> None:
    """Copy the tokens of slots `src` to slots `dst`, as if all were read first; what is outside the source is left out.

    A damaged table may name slots that are not there.
    """
    inside = [
        pair for pair in zip(src, dst, strict=True) if all(0 <= _row(source, slot) < source.num_rows for slot in pair)
    ]
    from_rows, from_columns = _where(source, [a for a, _ in inside])
    to_rows, to_columns = _where(source, [b for _, b in inside])
    for layer in source.layers:
        layer[to_rows, to_columns] = layer[from_rows, from_columns]


def flip_bit(source: KvSource, slot: int, *, layer: int, byte: int, bit: int) -> None:
    """Flip one bit of a slot's token."""
    rows, columns = _where(source, [slot])
    source.layers[layer][int(rows), int(columns[0, byte])] ^= 1 << bit


def _row(source: KvSource, slot: int) -> int:
    return (slot - source.slot_bias) // source.page_size


def _where(source: KvSource, slots: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows [n, 1] and the columns [n, bytes_per_token] of the tokens of `slots`."""
    element = torch.tensor(list(slots), dtype=torch.int64)[:, None] - source.slot_bias
    first = source.offset_bytes + element % source.page_size * source.token_stride_bytes
    return element // source.page_size, first + torch.arange(source.bytes_per_token)
