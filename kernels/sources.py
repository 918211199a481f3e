"""K and V sources inside kernels: where a slot's bytes are, and their fingerprint."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kv_canary.kernels.hashing import as_u64, mix
from kv_canary.kernels.launching import divide
from kv_canary.specs.structures import KvSource

# Fingerprints of at most so many bytes of each token are narrow: there is a thread for each.
NARROW_BYTES = 256
# Words that one step of a fingerprint takes, unless a kernel has room for more.
MAX_BLOCK_WORDS = 32


class Source(NamedTuple):
    """A `KvSource`, as a kernel is given it.

    Fields: the table of layer addresses, and the geometry as `KvSource` names it, `num_tokens` being those of a layer.
    Where layers, windows and tokens of a page are POWERS of two, `layer_bits` and `page_bits` are their logarithms.
    Constants: that, the alignment of covered words, words of a step, whether all windows are whole steps, exactly one.
    """

    table: Any
    num_layers: Any
    num_tokens: Any
    row_stride: Any
    page_size: Any
    bytes_per_token: Any
    token_stride: Any
    read_bytes: Any
    num_windows: Any
    offset_bytes: Any
    slot_bias: Any
    layer_bits: Any
    page_bits: Any
    POWERS: Any
    ALIGNMENT: Any
    BLOCK_WORDS: Any
    WHOLE_STEPS: Any
    ONE_STEP: Any


def source_of(source: KvSource | None, *, max_words: int = MAX_BLOCK_WORDS, whole: bool = False) -> Source | None:
    """Return what a kernel is told of `source`, of which it takes at most `max_words` a step, a power of two.

    whole: it reads whole tokens, not windows of them.
    """
    if source is None:
        return None
    bytes_read = source.bytes_per_token if whole else covered_bytes(source)
    block_words = min(max_words, triton.next_power_of_2(-(-bytes_read // 8)))
    divisors = len(source.layers), source.num_windows, source.page_size
    whole_steps = bytes_read % (8 * block_words) == 0 and source.bytes_per_token % bytes_read == 0
    return Source(
        table=source.table,
        num_layers=len(source.layers),
        num_tokens=source.num_rows * source.page_size,
        row_stride=source.row_stride_bytes,
        page_size=source.page_size,
        bytes_per_token=source.bytes_per_token,
        token_stride=source.token_stride_bytes,
        read_bytes=source.read_bytes,
        num_windows=source.num_windows,
        offset_bytes=source.offset_bytes,
        slot_bias=source.slot_bias,
        layer_bits=len(source.layers).bit_length() - 1,
        page_bits=source.page_size.bit_length() - 1,
        POWERS=tl.constexpr(all(n & (n - 1) == 0 for n in divisors)),
        ALIGNMENT=tl.constexpr(source.alignment),
        BLOCK_WORDS=tl.constexpr(block_words),
        WHOLE_STEPS=tl.constexpr(whole_steps),
        ONE_STEP=tl.constexpr(whole_steps and bytes_read == 8 * block_words),
    )


def covered_bytes(source: KvSource | None) -> int:
    """Return how many bytes of a token are fingerprinted."""
    return 0 if source is None else min(source.read_bytes, source.bytes_per_token)


@triton.jit
def in_source(source, slot):
    """Whether each slot lies inside the source; everything lies inside none."""
    inside = slot == slot
    if source is not None:
        token = slot - source.slot_bias
        inside = (token >= 0) & (token < source.num_tokens)
    return inside


@triton.jit
def fingerprint(source, slot, position, valid):
    """The 32-bit fingerprint, uint64, of each valid lane's K or V bytes as covered at its position; 0 without a source.

    slot must lie inside the source where `valid`; position is in [0, 2**32).
    """
    return end_fingerprint(source, begin_fingerprint(source, slot, position, valid), valid)


@triton.jit
def begin_fingerprint(source, slot, position, valid):
    """Send for the bytes that fingerprints are of, as far as one step takes them, without waiting for any."""
    words, address, window_bytes = valid, slot, slot
    if source is not None:
        # Lanes that are not valid compute addresses from anything; every load of bytes is masked by `valid`. Positions
        # and a pool's tokens fit 32 bits, in which a division takes a fraction of the time.
        where, token = position.to(tl.uint32), (slot - source.slot_bias).to(tl.uint32)
        round_, layer = divide(where, source.num_layers, source.layer_bits, source.POWERS)
        _round, window = divide(round_, source.num_windows, 0, source.POWERS)
        row, in_row = divide(token, source.page_size, source.page_bits, source.POWERS)
        window_start = window.to(tl.int64) * source.read_bytes
        window_bytes = tl.minimum(source.read_bytes, source.bytes_per_token - window_start)
        # layer < num_layers whatever the lane: the table holds one address per layer. There is no mask, because Triton
        # 3.6 gives mask and address different layouts where one source is read whole and the other in odd pieces.
        address = tl.load(source.table + layer.to(tl.int64))
        address += row.to(tl.int64) * source.row_stride + source.offset_bytes
        address += in_row.to(tl.int64) * source.token_stride + window_start
        if source.ONE_STEP:
            words = load_words(source, address, window_bytes, 0, valid)
    return words, address, window_bytes


@triton.jit
def end_fingerprint(source, begun, valid):
    """The fingerprints that `begin_fingerprint` has sent for, of those lanes that are valid."""
    first_words, address, window_bytes = begun
    total = tl.zeros(valid.shape, dtype=tl.uint64)
    if source is not None:
        if source.ONE_STEP:
            total = _fold(source, first_words, window_bytes, 0, valid)
        else:
            num_words = (tl.minimum(source.read_bytes, source.bytes_per_token) + 7) // 8
            for first in range(0, num_words, source.BLOCK_WORDS):
                words = load_words(source, address, window_bytes, first, valid)
                total += _fold(source, words, window_bytes, first, valid)
    return tl.where(valid, (total ^ (total >> 32)) & 0xFFFFFFFF, 0)


@triton.jit
def covered(source, window_bytes, first, valid):
    """The mask of words [first, first + BLOCK_WORDS) of each lane's window that there are."""
    j = first + tl.arange(0, source.BLOCK_WORDS).to(tl.int64)
    inside = valid[:, None] & (j[None, :] >= 0)
    if source.WHOLE_STEPS == 0:
        # The window's end keeps loads inside the token; the alignment divides it.
        inside = inside & (j[None, :] * 8 < window_bytes[:, None])
    return inside


@triton.jit
def load_words(source, address, window_bytes, first, valid):
    """Words [first, first + BLOCK_WORDS) of each lane's window, the last one padded with zeros."""
    j = first + tl.arange(0, source.BLOCK_WORDS).to(tl.int64)
    keep = covered(source, window_bytes, first, valid)
    if source.ALIGNMENT >= 8:
        pointer = address.to(tl.pointer_type(tl.uint64))[:, None] + j[None, :]
        if source.ALIGNMENT == 16:
            pointer = tl.multiple_of(address.to(tl.pointer_type(tl.uint64)), 16)[:, None] + j[None, :]
        # Not needed again before the model reads it: what else is in the caches may stay there.
        word = tl.load(pointer, mask=keep, other=0, eviction_policy="evict_first")
    else:
        word = tl.zeros(keep.shape, dtype=tl.uint64)
        for part in tl.static_range(8 // source.ALIGNMENT):
            at = j[None, :] * 8 + part * source.ALIGNMENT
            inside = keep & (at < window_bytes[:, None])
            pointer = address[:, None] + at
            if source.ALIGNMENT == 4:
                piece = tl.load(pointer.to(tl.pointer_type(tl.uint32)), mask=inside, other=0).to(tl.uint64)
            elif source.ALIGNMENT == 2:
                piece = tl.load(pointer.to(tl.pointer_type(tl.uint16)), mask=inside, other=0).to(tl.uint64)
            else:
                piece = tl.load(pointer.to(tl.pointer_type(tl.uint8)), mask=inside, other=0).to(tl.uint64)
            word = word | (piece << (8 * source.ALIGNMENT * part))
    return word


@triton.jit
def _fold(source, words, window_bytes, first, valid):
    """The sum over words [first, first + BLOCK_WORDS) of each lane's window."""
    j = first + tl.arange(0, source.BLOCK_WORDS).to(tl.int64)
    mixed = mix(words ^ mix(as_u64(j))[None, :])
    return tl.sum(tl.where(covered(source, window_bytes, first, valid), mixed, 0), axis=1)
