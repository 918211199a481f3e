"""The hashes inside kernels: mix, and the chain over a tile of tokens.

The chain chain(i) = chain(i-1) * M + m(i) is an affine recurrence. M is odd, so it has an inverse mod 2**64, and
chain(i) = M**(i+1) * (chain(-1) + sum over j <= i of m(j) * M**-(j+1)): a prefix SUM computes it in parallel, and the
sums of tiles simply add up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kv_canary.constants import CHAIN_MULTIPLIER, MIX_ADD, MIX_MUL_1, MIX_MUL_2

_MIX_ADD = tl.constexpr(MIX_ADD)
_MIX_MUL_1 = tl.constexpr(MIX_MUL_1)
_MIX_MUL_2 = tl.constexpr(MIX_MUL_2)
_M = tl.constexpr(CHAIN_MULTIPLIER)
_M_INVERSE = tl.constexpr(pow(CHAIN_MULTIPLIER, -1, 1 << 64))


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
def chain_scale(count, BITS: tl.constexpr):
    """M ** count, elementwise, for 0 <= count < 2**BITS."""
    return _power(_M, count, BITS)


@triton.jit
def chain_inverse(count, BITS: tl.constexpr):
    """M ** -count, elementwise, for 0 <= count < 2**BITS."""
    return _power(_M_INVERSE, count, BITS)
