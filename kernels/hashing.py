"""The hashes inside kernels: mix, the chain over a tile of tokens, and the fingerprint of K/V bytes.

The chain chain(i) = chain(i-1) * M + m(i) is an affine recurrence. M is odd, so it has an inverse mod 2**64, and
chain(i) = M**(i+1) * (chain(-1) + sum over j <= i of m(j) * M**-(j+1)): a prefix SUM computes it in parallel, and the
sums of tiles simply add up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kv_canary.constants import CHAIN_MULTIPLIER, MIX_ADD, MIX_MUL_1, MIX_MUL_2
from kv_canary.specs.structures import KvSource

_MIX_ADD = tl.constexpr(MIX_ADD)
_MIX_MUL_1 = tl.constexpr(MIX_MUL_1)
_MIX_MUL_2 = tl.constexpr(MIX_MUL_2)
_M = tl.constexpr(CHAIN_MULTIPLIER)
_M_INVERSE = tl.constexpr(pow(CHAIN_MULTIPLIER, -1, 1 << 64))

# Widest tile of words that one step of a fingerprint takes.
MAX_BLOCK_WORDS = 32


@triton.jit
def as_u64(x):
    """The bits of int64 `x`."""
    return x.to(tl.uint64, bitcast=True)


@triton.jit
def as_i64(x):
    """The int64 of the same bits."""
    return x.to(tl.int64, bitcast=True)


@triton.jit
def mix(x):
    """splitmix64 of uint64 `x` (Steele, Lea & Flood 2014)."""
    z = x + _MIX_ADD
    z = (z ^ (z >> 30)) * _MIX_MUL_1
    z = (z ^ (z >> 27)) * _MIX_MUL_2
    return z ^ (z >> 31)


@triton.jit
def identity(token, position):
    """The IDENTITY word, uint64, of int64 token and position."""
    return (as_u64(token) & 0xFFFFFFFF) | (as_u64(position) << 32)


@triton.jit
def next_chain(previous, ident):
    """The chain, uint64, of records whose predecessors' chains are `previous`."""
    return previous * _M + mix(ident)


@triton.jit
def writer_word(step, owner):
    """The WRITER word, uint64, of int64 step and owner; not retired."""
    return ((as_u64(step) & 0x7FFFFFFFFF) << 24) | (as_u64(owner) & 0xFFFFFF)


@triton.jit
def _power(base: tl.constexpr, exponent, BITS: tl.constexpr):
    """base ** exponent mod 2**64 for 0 <= exponent < 2**BITS, elementwise, by squaring."""
    result = tl.full(exponent.shape, 1, tl.uint64)
    square = tl.full([1], base, tl.uint64)
    for bit in tl.static_range(BITS):
        result = tl.where(((exponent >> bit) & 1) != 0, result * square, result)
        square = square * square
    return result


@triton.jit
def chain_terms(ident, lane, valid, BITS: tl.constexpr):
    """What each token of a tile adds to the tile's chain sum: m(j) * M**-(j+1), 0 for lanes that are not valid.

    BITS: enough for lane + 1.
    """
    return tl.where(valid, mix(ident) * _power(_M_INVERSE, lane + 1, BITS), 0)


@triton.jit
def chain_scale(count, BITS: tl.constexpr):
    """M ** count: chain = chain_scale(n) * (chain before the tile + sum of its first n terms)."""
    return _power(_M, count, BITS)


@triton.jit
def source_row(slot, slot_bias, page_size):
    """Row of a source that `slot` lies in; negative below the source's first row."""
    entry = slot - slot_bias
    return tl.where(entry < 0, -1, entry // page_size)


@triton.jit
def fingerprint(
    slot,
    position,
    valid,
    table_ptr,
    num_layers,
    row_stride,
    page_size,
    bytes_per_token,
    read_bytes,
    num_windows,
    offset_bytes,
    slot_bias,
    LOAD_BYTES: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    """The 32-bit fingerprint, uint64, of each valid lane's K or V bytes, as covered at its position.

    slot must lie inside the source where `valid`; position is in [0, 2**32). LOAD_BYTES is the source's alignment.
    """
    # Lanes that are not valid compute addresses from anything; every load below is masked by `valid`.
    entry = slot - slot_bias
    layer = position % num_layers
    window_start = (position // num_layers) % num_windows * read_bytes
    window_bytes = tl.minimum(read_bytes, bytes_per_token - window_start)
    # num_layers > layer: the table holds one address per layer.
    address = tl.load(table_ptr + layer, mask=valid, other=0)
    address += (entry // page_size) * row_stride + offset_bytes + (entry % page_size) * bytes_per_token + window_start
    total = tl.zeros(slot.shape, dtype=tl.uint64)
    num_words = (tl.minimum(read_bytes, bytes_per_token) + 7) // 8
    for first in range(0, num_words, BLOCK_WORDS):
        j = first + tl.arange(0, BLOCK_WORDS).to(tl.int64)
        in_window = j[None, :] * 8
        word = tl.zeros([slot.shape[0], BLOCK_WORDS], dtype=tl.uint64)
        for part in tl.static_range(8 // LOAD_BYTES):
            at = in_window + part * LOAD_BYTES
            # The window's end keeps the load inside the token; LOAD_BYTES divides it.
            keep = valid[:, None] & (at < window_bytes[:, None])
            pointer = address[:, None] + at
            if LOAD_BYTES == 8:
                piece = tl.load(pointer.to(tl.pointer_type(tl.uint64)), mask=keep, other=0)
            elif LOAD_BYTES == 4:
                piece = tl.load(pointer.to(tl.pointer_type(tl.uint32)), mask=keep, other=0).to(tl.uint64)
            elif LOAD_BYTES == 2:
                piece = tl.load(pointer.to(tl.pointer_type(tl.uint16)), mask=keep, other=0).to(tl.uint64)
            else:
                piece = tl.load(pointer.to(tl.pointer_type(tl.uint8)), mask=keep, other=0).to(tl.uint64)
            word = word | (piece << (8 * LOAD_BYTES * part))
        term = mix(word ^ mix(as_u64(j))[None, :])
        total += tl.sum(tl.where(in_window < window_bytes[:, None], term, 0), axis=1)
    return tl.where(valid, (total ^ (total >> 32)) & 0xFFFFFFFF, 0)


def source_arguments(source: KvSource | None, prefix: str) -> dict[str, object]:
    """Return the kernel arguments that describe a source, named `<prefix>_*`; harmless ones where there is none."""
    if source is None:
        numbers = {"num_layers": 1, "num_rows": 0, "row_stride": 0, "page_size": 1, "bytes_per_token": 8}
        numbers |= {"read_bytes": 8, "num_windows": 1, "offset_bytes": 0, "slot_bias": 0}
        constants = {"LOAD_BYTES": 8, "BLOCK_WORDS": 1}
        table = None
    else:
        numbers = {
            "num_layers": len(source.layers),
            "num_rows": source.num_rows,
            "row_stride": source.row_stride_bytes,
            "page_size": source.page_size,
            "bytes_per_token": source.bytes_per_token,
            "read_bytes": source.read_bytes,
            "num_windows": source.num_windows,
            "offset_bytes": source.offset_bytes,
            "slot_bias": source.slot_bias,
        }
        num_words = -(-min(source.read_bytes, source.bytes_per_token) // 8)
        block_words = min(MAX_BLOCK_WORDS, triton.next_power_of_2(num_words))
        constants = {"LOAD_BYTES": source.alignment, "BLOCK_WORDS": block_words}
        table = source.table
    upper = {f"{prefix.upper()}_{name}": value for name, value in constants.items()}
    return {f"{prefix}_table_ptr": table, **{f"{prefix}_{name}": value for name, value in numbers.items()}, **upper}
