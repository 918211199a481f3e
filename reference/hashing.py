"""The hashes, as the formulas say: mix, the chain over a prefix, and the fingerprint of K/V bytes.

PyTorch has no uint64 arithmetic, so hashes are int64 tensors: addition and multiplication wrap mod 2**64 all the
same, and `shift_right` is the logical shift.
"""

from __future__ import annotations

import torch

from kv_canary.constants import CHAIN_MULTIPLIER, MIX_ADD, MIX_MUL_1, MIX_MUL_2, to_signed
from kv_canary.specs.structures import KvSource

LOW_32 = 0xFFFFFFFF

_INVERSE = pow(CHAIN_MULTIPLIER, -1, 1 << 64)


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


def walk_chains(before: torch.Tensor, lengths: torch.Tensor, identities: torch.Tensor) -> torch.Tensor:
    """Return the chain after each of the requests' identities.

    chain[j] = chain[j-1] * M + m[j], with m[j] = mix(identities[j]). M is odd, so it has an inverse mod 2**64, and
    chain[j] / M**(j+1) = chain[j-1] / M**j + m[j] / M**(j+1): running sums give every chain at once.

    Args:
        before: int64 [requests], the chain before the request's first identity.
        lengths: int64 [requests], how many consecutive `identities` are the request's.
        identities: int64 [n], request by request.
    """
    n, first = len(identities), lengths.cumsum(0) - lengths
    scale, inverse = _powers(CHAIN_MULTIPLIER, n, identities.device), _powers(_INVERSE, n, identities.device)
    sums = torch.zeros_like(scale)
    sums[1:] = (mix(identities) * inverse[1:]).cumsum(0)
    # What the sums lack of a request's: its start, less the requests before it.
    start = before * inverse[first] - sums[first]
    return scale[1:] * (sums[1:] + start.repeat_interleave(lengths))


def _powers(base: int, n: int, device: torch.device) -> torch.Tensor:
    """Return base**0 ... base**n mod 2**64."""
    powers = torch.full((n + 1,), to_signed(base), dtype=torch.int64, device=device)
    powers[0] = 1
    return powers.cumprod(0)


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
    if source is None:
        return torch.zeros_like(slots)
    offset, num_layers = slots - source.slot_bias, len(source.layers)
    row, token = offset // source.page_size, offset % source.page_size
    window = positions // num_layers % source.num_windows
    first = row * source.row_stride_bytes + source.offset_bytes
    first += token * source.token_stride_bytes + window * source.read_bytes
    # A token's last window may be shorter than the others.
    last = source.num_windows - 1
    widths = (min(source.read_bytes, source.bytes_per_token), source.bytes_per_token - last * source.read_bytes)
    word_counts = [-(-width // 8) for width in widths]

    # Entries by layer and width, so that a layer's bytes are gathered at once; zero past the window's end.
    kinds = positions % num_layers * 2 + (window == last)
    order, counts = kinds.argsort(stable=True), torch.bincount(kinds).tolist()
    data = torch.zeros(len(slots), word_counts[0] * 8, dtype=torch.uint8, device=slots.device)
    for kind, (part, begins) in enumerate(zip(data.split(counts), first.take(order).split(counts), strict=True)):
        if len(part):
            width = widths[kind % 2]
            part[:, :width] = runs(source.layers[kind // 2], width).index_select(0, begins)

    j = torch.arange(word_counts[0], device=slots.device)
    terms = mix(data.view(torch.int64) ^ mix(j))
    # A word that lies wholly past the window's end does not count.
    terms[:, word_counts[1] :].masked_fill_((window == last).take(order)[:, None], 0)
    x = terms.sum(dim=1)
    return torch.empty_like(slots).index_copy_(0, order, (x ^ shift_right(x, 32)) & LOW_32)


def runs(layer: torch.Tensor, width: int) -> torch.Tensor:
    """Every run of `width` bytes of a layer, by its first byte: a view, whose rows overlap."""
    rows = layer.reshape(len(layer), -1).view(torch.uint8)
    num_runs = (len(rows) - 1) * rows.stride(0) + rows.shape[1] - width + 1
    return rows.as_strided((num_runs, width), (1, 1))
