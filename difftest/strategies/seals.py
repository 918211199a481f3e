"""Pools with seals: what seal and verify_seals take, and the slots that they are to look at."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from kv_canary.backends import implementation
from kv_canary.difftest.strategies.domain import (
    damage_records,
    int64,
    often,
    replace_some,
    seeds,
    strided_rows,
    typed_sources,
    worlds,
)
from kv_canary.difftest.strategies.edge_values import HOSTILE, INT64_MAX, INT64_MIN
from kv_canary.specs.sealing import seal_words
from kv_canary.specs.structures import Endpoint, KvSource

# Token sizes of real pools, narrow and wide, and those beside the words that a kernel takes at a time.
_WIDE = (2048, 1152, 656, 2056, 4096)
# Most slots that are looked at where tokens are long and not of whole words: the interpreter takes long for each.
_MOST_BYTEWISE = 40


@dataclass(frozen=True, kw_only=True)
class SealedPool:
    """A pool with records, room for its seals, and which of its slots are looked at."""

    endpoint: Endpoint
    seals: torch.Tensor
    slots: torch.Tensor | None
    span: torch.Tensor
    layers_per_band: int
    seed: int

    @property
    def arguments(self) -> dict[str, Any]:
        """What both ops take."""
        return {
            "slots": self.slots,
            "span": self.span,
            "endpoint": self.endpoint,
            "layers_per_band": self.layers_per_band,
            "seed": self.seed,
            "seals": self.seals,
        }

    def taken(self) -> list[int]:
        """The slots that are looked at, as far as there are such."""
        first, count = self.span.tolist()
        entries = range(len(self.endpoint.records)) if self.slots is None else self.slots.tolist()
        inside = entries[first : first + max(count, 0)] if 0 <= first <= len(entries) else []
        return [slot for slot in inside if 0 < slot < len(self.endpoint.records)]


@st.composite
def sealed_pools(draw: Any, *, tag: int = 0, giant: bool = False) -> SealedPool:
    """Draw a pool of any geometry, records in any state, and slots to look at, in order or not; without seals yet."""
    many = often(draw, 5)
    world = draw(worlds(tag=tag, giant=giant, room=300 if many else 0, longest=64))
    rng = np.random.default_rng(world.seed)
    endpoint: Endpoint = world.endpoint
    if often(draw, 3) and not giant:
        endpoint = replace(endpoint, k_source=_wide_source(draw, world.num_slots))
    if endpoint.k_source is None and endpoint.v_source is None:
        source = draw(typed_sources(world.num_slots))
        endpoint = draw(st.sampled_from([replace(endpoint, k_source=source), replace(endpoint, v_source=source)]))
    if endpoint.k_source is not None and often(draw, 4):
        endpoint = replace(endpoint, k_scales=_scales(draw, len(endpoint.k_source.layers), world.num_slots))
    if endpoint.v_source is not None and often(draw, 4):
        endpoint = replace(endpoint, v_scales=_scales(draw, len(endpoint.v_source.layers), world.num_slots))
    num_layers = max(len(s.layers) for s in (endpoint.k_source, endpoint.v_source) if s is not None)
    layers_per_band = draw(st.sampled_from([1, 1, 2, num_layers, num_layers + 1, 1 << 40]))
    used = [int(s) for row, n in zip(world.rows, world.lengths, strict=True) for s in world.slots[row, :n]]
    damage_records(draw, endpoint.records, used)
    slots = None
    total = world.num_slots
    if draw(st.booleans()):
        n = draw(st.sampled_from([0, 1, 3, 8, 33] + ([257, 300] if many else [])))
        chosen = rng.permutation(used).tolist()[:n] if used and draw(st.booleans()) else []
        chosen = (chosen + [int(s) for s in rng.integers(0, world.num_slots, n)])[:n]
        if draw(st.booleans()):
            chosen = replace_some(draw, chosen, (*HOSTILE, 0, world.num_slots))
        slots, total = int64(chosen), n
    first, count = _span(draw, total)
    given = [s for s in (endpoint.k_source, endpoint.v_source) if s is not None]
    if total > _MOST_BYTEWISE and min(s.alignment for s in given) < 8 and max(s.bytes_per_token for s in given) > 128:
        count = min(count, _MOST_BYTEWISE)
    return SealedPool(
        endpoint=endpoint,
        seals=_no_seals(draw, endpoint, layers_per_band, rng),
        slots=slots,
        span=int64((first, count)),
        layers_per_band=layers_per_band,
        seed=draw(st.one_of(seeds, st.sampled_from([0, 1, -1, INT64_MAX, INT64_MIN]))),
    )


def seal_all(pool: SealedPool) -> None:
    """Seal every slot of the pool, by the reference."""
    whole = {**pool.arguments, "written_in": None, "slots": None, "span": int64([0, len(pool.endpoint.records)])}
    implementation("seal", "reference")(**whole)


def _no_seals(draw: Any, endpoint: Endpoint, layers_per_band: int, rng: np.random.Generator) -> torch.Tensor:
    """Return a buffer for seals that holds anything, rows perhaps apart."""
    shape = len(endpoint.records), seal_words(endpoint, layers_per_band) + draw(st.sampled_from([0, 0, 2]))
    return strided_rows(draw, torch.from_numpy(rng.integers(INT64_MIN, INT64_MAX, shape)))


def _span(draw: Any, total: int) -> tuple[int, int]:
    """Return the first entry to take and how many: mostly all, or a piece, and sometimes what no caller should give."""
    kind = draw(st.sampled_from(["all", "all", "piece", "piece", "beyond", "hostile"]))
    if kind == "all":
        return 0, total
    if kind == "piece":
        first = draw(st.integers(0, total))
        return first, draw(st.integers(0, total - first))
    if kind == "beyond":
        return draw(st.integers(0, total)), total + draw(st.integers(0, 3))
    numbers = (*HOSTILE, INT64_MAX, INT64_MIN, 0, -1, total, total + 1)
    return draw(st.sampled_from(numbers)), draw(st.sampled_from(numbers))


def _wide_source(draw: Any, num_slots: int) -> KvSource:
    """A source of tokens as wide as those of real pools, in a few layers."""
    bytes_per_token = draw(st.sampled_from([b for b in _WIDE if b * num_slots <= 1 << 19] or [128]))
    page_size = draw(st.sampled_from([1, 16]))
    shape = -(-num_slots // page_size), page_size * bytes_per_token
    rng = np.random.default_rng(draw(seeds))
    layers = tuple(
        torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8)) for _ in range(draw(st.integers(1, 4)))
    )
    return KvSource(layers=layers, page_size=page_size, bytes_per_token=bytes_per_token)


def _scales(draw: Any, num_layers: int, num_slots: int) -> KvSource:
    """A source of a few bytes a token, in as many layers."""
    bytes_per_token = draw(st.sampled_from([1, 4, 8, 12, 32]))
    rng = np.random.default_rng(draw(seeds))
    missing = draw(st.sampled_from([0, 0, 0, 1]))
    shape = max(1, num_slots - missing), bytes_per_token
    layers = tuple(torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8)) for _ in range(num_layers))
    return KvSource(layers=layers, page_size=1, bytes_per_token=bytes_per_token)
