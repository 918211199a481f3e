"""The hashes, as the formulas say: mix, the chain over a prefix, and the fingerprint of K/V bytes.

PyTorch has no uint64 arithmetic, so hashes are int64 tensors: addition and multiplication wrap mod 2**64 all the
same, and `shift_right` is the logical shift.
"""

from __future__ import annotations

import torch

from kv_canary.constants import CHAIN_MULTIPLIER, MASK64, MIX_ADD, MIX_MUL_1, MIX_MUL_2, to_signed
from kv_canary.specs.structures import KvSource

LOW_32 = 0xFFFFFFFF


def shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift right of int64 `x` by 0 < `bits` < 64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64 of int64 `x`, elementwise (Steele, Lea & Flood 2014). A bijection."""
    z = x + to_signed(MIX_ADD)
    z = (z ^ shift_right(z, 30)) * to_signed(MIX_MUL_1)
    z = (z ^ shift_right(z, 27)) * to_signed(MIX_MUL_2)
    return z ^ shift_right(z, 31)


def identity(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The IDENTITY word: token in the low 32 bits, position in the high 32."""
    return (tokens & LOW_32) | ((positions & LOW_32) << 32)


def stored_token(identities: torch.Tensor) -> torch.Tensor:
    """The token of an IDENTITY word, unsigned."""
    return identities & LOW_32


def stored_position(identities: torch.Tensor) -> torch.Tensor:
    """The position of an IDENTITY word, unsigned."""
    return shift_right(identities, 32)


def next_chain(previous: torch.Tensor, identities: torch.Tensor) -> torch.Tensor:
    """The chain of records whose predecessors' chains are `previous`."""
    return previous * to_signed(CHAIN_MULTIPLIER) + mix(identities)


def walk_chain(start: int, identities: torch.Tensor) -> list[int]:
    """The chain after each of a request's consecutive `identities`, from `start`; signed 64-bit."""
    chain = start & MASK64
    chains = []
    for mixed in mix(identities).tolist():
        chain = (chain * CHAIN_MULTIPLIER + mixed) & MASK64
        chains.append(to_signed(chain))
    return chains


def writer(step: torch.Tensor, owner: torch.Tensor | int, *, retired: bool = False) -> torch.Tensor:
    """The WRITER word: bit 63 = retired, then (step mod 2**39) << 24 | (owner mod 2**24)."""
    word = ((step & ((1 << 39) - 1)) << 24) | (owner & ((1 << 24) - 1))
    return word | to_signed(1 << 63) if retired else word


def in_source(source: KvSource | None, slots: torch.Tensor) -> torch.Tensor:
    """Whether each slot lies inside the source's rows; everything lies inside no source."""
    if source is None:
        return torch.ones_like(slots, dtype=torch.bool)
    offset = slots - source.slot_bias
    return (offset >= 0) & (offset // source.page_size < source.num_rows)


def fingerprint(source: KvSource | None, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The 32-bit fingerprint of each slot's K or V bytes, as covered at its position; 0 without a source.

    Args:
        slots: int64 [n], all inside the source.
        positions: int64 [n], unsigned 32-bit values.
    """
    result = torch.zeros_like(slots)
    if source is None:
        return result
    offset = slots - source.slot_bias
    rows = offset // source.page_size
    starts = source.offset_bytes + offset % source.page_size * source.bytes_per_token
    layers = positions % len(source.layers)
    windows = positions // len(source.layers) % source.num_windows
    # One layer at a time, so that only the covered bytes are ever gathered.
    for layer in layers.unique().tolist():
        chosen = layers == layer
        result[chosen] = _fingerprint_layer(source, layer, rows[chosen], starts[chosen], windows[chosen])
    return result


def _fingerprint_layer(
    source: KvSource, layer: int, rows: torch.Tensor, starts: torch.Tensor, windows: torch.Tensor
) -> torch.Tensor:
    pool = source.layers[layer]
    row_bytes = pool.reshape(pool.shape[0], -1).view(torch.uint8) if pool.dim() > 1 else pool[:, None].view(torch.uint8)
    num_words = -(-min(source.read_bytes, source.bytes_per_token) // 8)
    # Byte b of the window, zero past the window's end: the last window ends at bytes_per_token.
    b = torch.arange(num_words * 8, device=pool.device)
    in_token = windows[:, None] * source.read_bytes + b
    covered = (b < source.read_bytes) & (in_token < source.bytes_per_token)
    columns = torch.where(covered, starts[:, None] + in_token, 0)
    data = torch.where(covered, row_bytes[rows[:, None], columns], 0)
    words = data.contiguous().view(torch.int64)
    # A word that lies wholly past the window's end does not count.
    present = covered.view(len(rows), num_words, 8).any(dim=2)
    j = torch.arange(num_words, device=pool.device)
    x = torch.where(present, mix(words ^ mix(j)), 0).sum(dim=1)
    return (x ^ shift_right(x, 32)) & LOW_32
