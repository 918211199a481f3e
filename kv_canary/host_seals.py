"""Seals of bytes in host memory: what `reference/seals.py` says, in numpy, a layer of many slots at a time.

For a thread beside an engine: it works in the calling thread alone, and lets others run while it does. A test holds it
to the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kv_canary.constants import MASK64, MIX_ADD, MIX_MUL_1, MIX_MUL_2
from kv_canary.hashing import mix
from kv_canary.specs.structures import KvSource

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkSource(KvSource):
    """The bytes of a pool in host memory whose rows are chunks: several pages of the device's, one behind the other.

    `page_size` is the tokens of all of them. Nothing but `HostSeals` reads such bytes.

    Args:
        pages: of a row.
        page_stride_bytes: bytes from a page of a row to the next.
    """

    pages: int
    page_stride_bytes: int

    def byte_of(self, token: int) -> int:
        """Return where in a row a token of it begins."""
        page, token = divmod(token, self.page_size // self.pages)
        return self.offset_bytes + page * self.page_stride_bytes + token * self.token_stride_bytes


class HostSeals:
    """The hash of all bytes of a slot, by bands of layers.

    Args:
        k_source, v_source: the bytes, on the CPU; not both None.
        layers_per_band, seed: as in `specs/sealing.py`.
    """

    def __init__(
        self, k_source: KvSource | None, v_source: KvSource | None, *, layers_per_band: int, seed: int
    ) -> None:
        self._halves = [None if s is None else _Half(s, layers_per_band, seed) for s in (k_source, v_source)]
        layers = max(len(s.layers) for s in (k_source, v_source) if s is not None)
        self.num_bands = -(-layers // layers_per_band)

    def words(self, slots: npt.NDArray[np.int64]) -> Words:
        """Return uint64 [n, bands]: the words of the seals of slots, K's hash in the low half and V's in the high."""
        words = np.zeros((len(slots), self.num_bands), np.uint64)
        for half, shift in zip(self._halves, (0, 32), strict=True):
            if half is not None:
                words |= half.hashes(slots, self.num_bands) << np.uint64(shift)
        return words


class _Half:
    """K or V."""

    def __init__(self, source: KvSource, layers_per_band: int, seed: int) -> None:
        self._source, self._per_band = source, layers_per_band
        self._rows = [_rows(source, layer) for layer in source.layers]
        count = -(-source.bytes_per_token // 8)
        keys = [mix((j + seed) & MASK64) for j in range(count)]
        # Low and high words of 32 bits, side by side, as the bytes have them.
        self._keys = np.array(keys, np.uint64).view(np.uint32).reshape(count, 2)
        layers = [mix(~(layer + seed) & MASK64) for layer in range(len(source.layers))]
        self._layer_keys = np.array(layers, np.uint64).view(np.uint32).reshape(-1, 2)

    def hashes(self, slots: npt.NDArray[np.int64], num_bands: int) -> Words:
        """Return the 32-bit hash of each slot in each band, never 0."""
        source, count = self._source, len(self._keys)
        page, token = np.divmod(slots - source.slot_bias, self._rows[0].shape[2])
        row, page = np.divmod(page, self._rows[0].shape[1])
        sums = np.zeros((len(slots), num_bands), np.uint64)
        data = np.zeros((len(slots), 8 * count), np.uint8)
        parts = data.view(np.uint32).reshape(len(slots), count, 2)
        for layer, rows in enumerate(self._rows):
            data[:, : source.bytes_per_token] = rows[row, page, token]
            if source.bytes_per_token < 8 * count:
                data[:, source.bytes_per_token :] = 0
            parts += self._keys + self._layer_keys[layer]
            products = np.multiply(parts[..., 0], parts[..., 1], dtype=np.uint64)
            sums[:, layer // self._per_band] += products.sum(axis=1)
        halves = _mixed(sums) >> np.uint64(32)
        halves[halves == 0] = 1
        return halves


def _rows(source: KvSource, layer: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return uint8 [rows, pages of a row, tokens of a page, bytes of a token], a view of a layer."""
    flat = (layer.flatten(1) if layer.dim() > 1 else layer[:, None]).view(torch.uint8).numpy()
    pages, stride = (source.pages, source.page_stride_bytes) if isinstance(source, ChunkSource) else (1, 0)
    shape = (len(flat), pages, source.page_size // pages, source.bytes_per_token)
    strides = (flat.strides[0], stride, source.token_stride_bytes, 1)
    return np.lib.stride_tricks.as_strided(flat[:, source.offset_bytes :], shape, strides, writeable=False)


def _mixed(x: Words) -> Words:
    """Return splitmix64 of each word; see `hashing.mix`."""
    z = x + np.uint64(MIX_ADD)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_MUL_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_MUL_2)
    return z ^ (z >> np.uint64(31))
