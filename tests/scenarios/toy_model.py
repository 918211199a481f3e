"""A model small enough to follow whose text depends on every byte of K and V that it reads.

Each layer writes K and V of the new tokens, reads those of the tokens before through the slots that it is given, and
adds both to what goes on to the next layer. As in attention, what is read is summed: order does not matter, content
does. K depends on the position, as rotary embeddings make it; all of it depends on the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kv_canary.specs.structures import KvSource

Words = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Span:
    """One request's share of a forward.

    Args:
        start, end: its new tokens in the flat inputs.
        read: per group, the slots of the cached positions that its first new token attends to, as the kernel reads
            them.
        windows: per group, how many positions before it a token attends to; None for all.
    """

    start: int
    end: int
    read: Sequence[Sequence[int]]
    windows: Sequence[int | None]


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The layers of one group.

    Args:
        k, v: their pools.
        write: where the kernel puts each new token's K and V; 0 for nowhere.
        overwrites: whether they write over what they are about to read, as rings do: they then read first.
        load: what the kernel makes of the bytes that it reads, uint8 [tokens, bytes].
    """

    k: KvSource
    v: KvSource
    write: Sequence[int]
    overwrites: bool = False
    load: Callable[[np.ndarray], np.ndarray] = lambda data: data


def run_model(
    *, ids: torch.Tensor, positions: torch.Tensor, seeds: Words, spans: Sequence[Span], groups: Sequence[Layers]
) -> list[int]:
    """Run one forward; return the token that the model would generate behind each of the inputs.

    Args:
        ids, positions: [tokens] the inputs.
        seeds: uint64 [tokens], what else the outcome depends on: weights, an adapter, an image.
        spans: the requests.
        groups: their layers, in the model's order.
    """
    x = mix(ids.numpy().astype(np.uint64) ^ mix(seeds))
    at = mix(positions.numpy().astype(np.uint64))
    with np.errstate(over="ignore"):
        for g, group in enumerate(groups):
            for layer in range(len(group.k.layers)):
                k = _spread(x + at + np.uint64(4 * layer + 1), group.k.bytes_per_token)
                v = _spread(x + np.uint64(4 * layer + 2), group.v.bytes_per_token)
                if not group.overwrites:
                    _store(group, layer, k, v)
                past = [
                    _digest(
                        group.load(_gather(group.k, layer, s.read[g])), group.load(_gather(group.v, layer, s.read[g]))
                    )
                    for s in spans
                ]
                if group.overwrites:
                    _store(group, layer, k, v)
                mine = _digest(group.load(k), group.load(v))
                x = x.copy()
                for span, before in zip(spans, past, strict=True):
                    here = slice(span.start, span.end)
                    x[here] = mix(x[here] + _attend(before, mine[here], span.windows[g]))
    return [int(word) % VOCABULARY for word in x]


# Tokens that the model knows.
VOCABULARY = 1 << 17


def mix(words: Words) -> Words:
    """Return splitmix64 of each uint64 word."""
    with np.errstate(over="ignore"):
        z = words + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def _attend(past: Words, new: Words, window: int | None) -> Words:
    """Return, for each new token, the sum over what it attends to, itself included."""
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(np.concatenate([past, new]), dtype=np.uint64)])
    last = len(past) + np.arange(len(new)) + 1
    first = np.zeros_like(last) if window is None else np.maximum(last - 1 - window, 0)
    return sums[last] - sums[first]


def _spread(words: Words, count: int) -> np.ndarray:
    """Return uint8 [words, count]: so many bytes that depend on each word."""
    columns = mix(words[:, None] ^ mix(np.arange(-(-count // 8), dtype=np.uint64)))
    return np.ascontiguousarray(columns).view(np.uint8)[:, :count]


def _digest(k: np.ndarray, v: np.ndarray) -> Words:
    """Return a word for each token that depends on all its bytes."""
    data = np.concatenate([k, v], axis=1)
    padded = np.zeros((len(data), -(-data.shape[1] // 8) * 8), np.uint8)
    padded[:, : data.shape[1]] = data
    words = padded.view(np.uint64)
    return mix(mix(words ^ mix(np.arange(words.shape[1], dtype=np.uint64))).sum(axis=1, dtype=np.uint64))


def _store(group: Layers, layer: int, k: np.ndarray, v: np.ndarray) -> None:
    for slot, key, value in zip(group.write, k, v, strict=True):
        if slot > 0:
            group.k.layers[layer][slot] = torch.from_numpy(key.copy())
            group.v.layers[layer][slot] = torch.from_numpy(value.copy())


def _gather(source: KvSource, layer: int, slots: Sequence[int]) -> np.ndarray:
    return source.layers[layer][torch.tensor(list(slots), dtype=torch.int64)].numpy()
