"""What engines are made of, as strategies: lengths, pools, tables, KV sources, and records that fit them.

Structure is drawn from Hypothesis, so that it shrinks; bulk content (tokens, bytes) comes from a drawn seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from kv_canary.backends import implementation
from kv_canary.constants import ANCHOR, to_signed
from kv_canary.difftest.features import GIANT
from kv_canary.difftest.hostile import HOSTILE, INT64_MAX, INT64_MIN
from kv_canary.difftest.memory import sparse_storage
from kv_canary.specs.structures import Endpoint, KvSource, ViolationLog, WritePlan

# Just below, at and just above the tiles of the kernels and the blocks of a strided plan.
TILE_EDGES = (15, 16, 17, 31, 32, 33, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 2049)

seeds = st.integers(0, 2**32 - 1)
steps = st.one_of(st.integers(0, 100), st.sampled_from([(1 << 39) - 1, 1 << 39, (1 << 62) + 5, INT64_MIN]))
owner_numbers = st.one_of(st.integers(0, 20), st.sampled_from([(1 << 24) - 1, 1 << 24, (1 << 24) + 3, INT64_MAX, -1]))


def lengths(*, longest: int = 1025) -> st.SearchStrategy[int]:
    """Mostly short lengths, sometimes at the edge of a tile."""
    return st.one_of(st.integers(0, 40), st.sampled_from([e for e in TILE_EDGES if e <= longest]))


def batch_sizes() -> st.SearchStrategy[int]:
    """Mostly a handful of requests, sometimes none, rarely more than one block of them."""
    return st.one_of(st.integers(0, 6), st.integers(0, 6), st.sampled_from([0, 1, 1, 17, 255, 256, 257, 257, 300]))


def int64(values: Any) -> torch.Tensor:
    """Return an int64 tensor of `values`, each taken mod 2**64."""
    return torch.tensor([to_signed(int(v)) for v in values], dtype=torch.int64)


def replace_some(draw: Any, values: list[int], hostile: tuple[int, ...] = HOSTILE, *, most: int = 3) -> list[int]:
    """Return `values` with up to `most` of them replaced by hostile ones."""
    values = list(values)
    if values:
        for _ in range(draw(st.integers(0, most))):
            values[draw(st.integers(0, len(values) - 1))] = draw(st.sampled_from(hostile))
    return values


def draw_giant(draw: Any, giant: bool | None) -> bool:
    """Whether a case gets rows so far apart that 32 bits do not hold every offset: rarely, or as `giant` says."""
    return draw(st.sampled_from([False] * 24 + [True])) if giant is None else giant


def strided_rows(draw: Any, tensor: torch.Tensor, *, multiple: int = 1, giant: bool = False) -> torch.Tensor:
    """Return `tensor` [n, m], perhaps as a view whose rows lie further apart, or `giant` far apart."""
    if giant and tensor.shape[0] > 1:
        return _far_apart(draw, tensor, multiple=multiple)
    gap = draw(st.sampled_from([0, 0, multiple, 3 * multiple]))
    wide = torch.zeros(tensor.shape[0], tensor.shape[1] + gap, dtype=tensor.dtype)
    view = wide[:, : tensor.shape[1]]
    view.copy_(tensor)
    return view


def _far_apart(draw: Any, tensor: torch.Tensor, *, multiple: int) -> torch.Tensor:
    """Return `tensor` [n, m] with more than 2**31 elements between its first row and its last; few take memory."""
    num_rows, length = tensor.shape
    apart = GIANT // (num_rows - 1) // multiple + 1 + draw(st.sampled_from([0, 1, 5]))
    stride = max(apart, -(-length // multiple)) * multiple
    whole = sparse_storage(((num_rows - 1) * stride + length) * tensor.element_size()).view(tensor.dtype)
    return whole.as_strided((num_rows, length), (stride, 1)).copy_(tensor)


@st.composite
def kv_sources(draw: Any, num_slots: int, *, short: bool = True, giant: bool = False) -> KvSource:
    """A source of any geometry, which covers all slots or, rarely, if it may be `short`, is a row too short.

    A `giant` one has rows so far apart that 32 bits do not hold every offset, if it has several.
    """
    page_size = draw(st.sampled_from([1, 1, 2, 3, 16]))
    # Half of them have all their words aligned: everything is a multiple of eight bytes.
    unit = draw(st.sampled_from([1, 8]))
    bytes_per_token = draw(st.sampled_from([1, 4, 8, 12, 16, 24, 40, 73, 128, 584] if unit == 1 else [8, 24, 128, 584]))
    reads = [1, 3, 8, 16, 16, 20, 64] if unit == 1 else [8, 16, 64]
    read_bytes = draw(st.sampled_from([*reads, bytes_per_token, 2 * bytes_per_token]))
    offset_bytes = draw(st.sampled_from([0, 0, 1, 4, 8] if unit == 1 else [0, 8]))
    phase = draw(st.sampled_from([0, 0, 1, 2, 4] if unit == 1 else [0]))
    slot_bias = draw(st.integers(0, 1))
    num_layers = draw(st.integers(1, 3))
    missing = draw(st.sampled_from([0, 0, 0, 1])) if short else 0
    num_rows = max(1, -(-(num_slots - slot_bias) // page_size) - missing)
    row_bytes = offset_bytes + page_size * bytes_per_token + draw(st.sampled_from([0, 0, 3 * unit, 8]))
    row_stride = row_bytes + draw(st.sampled_from([0, 0, 5 * unit, 16]))
    rng = np.random.default_rng(draw(seeds))
    layers = []
    for _ in range(num_layers):
        if giant and num_rows > 1:
            row_stride = max(row_stride, (GIANT // (num_rows - 1) // unit + 1) * unit)
            raw = sparse_storage(phase + num_rows * row_stride)
        else:
            raw = torch.from_numpy(rng.integers(0, 256, phase + num_rows * row_stride, dtype=np.uint8))
        layers.append(raw.as_strided((num_rows, row_bytes), (row_stride, 1), phase))
        if giant:
            layers[-1].copy_(torch.from_numpy(rng.integers(0, 256, (num_rows, row_bytes), dtype=np.uint8)))
    return KvSource(
        layers=tuple(layers),
        page_size=page_size,
        bytes_per_token=bytes_per_token,
        read_bytes=read_bytes,
        offset_bytes=offset_bytes,
        slot_bias=slot_bias,
    )


@st.composite
def violation_logs(draw: Any) -> ViolationLog:
    """A log with room, nearly full, full or without a ring."""
    capacity = draw(st.sampled_from([0, 1, 8, 256, 2048]))
    log = ViolationLog.allocate(ring_cap=capacity)
    log.count[0] = draw(st.sampled_from([0, 0, 0, 1, capacity, capacity + 3]))
    return log


@dataclass(frozen=True, kw_only=True)
class World:
    """Requests as an engine holds them: rows with their tokens and slots, and records that fit."""

    num_slots: int
    rows: list[int]
    lengths: list[int]
    slots: torch.Tensor
    tokens: torch.Tensor
    owners: list[int]
    tails: torch.Tensor
    anchors: torch.Tensor | None
    endpoint: Endpoint
    seed: int

    @property
    def num_rows(self) -> int:
        return self.slots.shape[0]


@st.composite
def worlds(draw: Any, *, longest: int = 257, tag: int = 0, giant: bool = False) -> World:
    """A pool with some requests cached in it, their records written by the reference.

    Requests may share a prefix; slots come in pages, in random order; some slots are free. In a `giant` world records
    or sources have rows so far apart that 32 bits do not hold every offset.
    """
    if giant:
        longest = min(longest, 129)
    rng = np.random.default_rng(draw(seeds))
    count = draw(st.one_of(st.just(1), st.integers(0, 5)))
    lens = [draw(lengths(longest=longest)) for _ in range(count)]
    page = draw(st.sampled_from([1, 1, 4, 16]))
    num_rows = count + 1 + draw(st.integers(0, 2))
    rows = [int(r) for r in rng.permutation(np.arange(1, num_rows))[:count]]
    width = max([1, *lens])
    pages = [-(-n // page) for n in lens]
    order = 1 + rng.permutation(sum(pages) + draw(st.integers(0, 3)))
    num_slots = (len(order) + 1) * page
    slots = np.zeros((num_rows, width), dtype=np.int64)
    tokens = np.zeros((num_rows, width), dtype=np.int64)
    used = 0
    for row, n, p in zip(rows, lens, pages, strict=True):
        mine = order[used : used + p]
        used += p
        slots[row, :n] = (mine[:, None] * page + np.arange(page)).reshape(-1)[:n]
        tokens[row, :n] = rng.integers(0, 1 << 17, n)
    owners = [draw(owner_numbers) for _ in rows]
    anchors = None
    if draw(st.booleans()):
        anchors = torch.from_numpy(rng.integers(INT64_MIN, INT64_MAX, num_rows))
    # Sharing: a later request's first pages are an earlier one's, as a prefix cache hands them out.
    if count >= 2 and anchors is None and draw(st.booleans()):
        shared = min(lens[0], lens[1]) // page * page
        slots[rows[1], :shared] = slots[rows[0], :shared]
        tokens[rows[1], :shared] = tokens[rows[0], :shared]
        owners[1] = owners[0]
    far = draw(st.sampled_from(["records", "k", "v"])) if giant else ""
    sources = [
        draw(kv_sources(num_slots, giant=True) if far == name else st.one_of(st.none(), kv_sources(num_slots)))
        for name in ("k", "v")
    ]
    records = torch.zeros(num_slots, 4, dtype=torch.int64)
    endpoint = Endpoint(
        tag=tag,
        records=strided_rows(draw, records, multiple=4, giant=far == "records"),
        k_source=sources[0],
        v_source=sources[1],
    )
    world = World(
        num_slots=num_slots,
        rows=rows,
        lengths=lens,
        slots=torch.from_numpy(slots),
        tokens=torch.from_numpy(tokens),
        owners=owners,
        tails=torch.full((num_rows,), ANCHOR, dtype=torch.int64),
        anchors=anchors,
        endpoint=endpoint,
        seed=draw(seeds),
    )
    _write_history(world, step=draw(st.integers(0, 9)))
    return world


def _write_history(world: World, *, step: int) -> None:
    """Write every request's tokens with the reference, then set the tails to where they end."""
    count = len(world.rows)
    chosen = [
        (world.slots[r, :n], world.tokens[r, :n], torch.arange(n))
        for r, n in zip(world.rows, world.lengths, strict=True)
    ]
    flat = [torch.cat([c[i] for c in chosen]) if chosen else torch.zeros(0, dtype=torch.int64) for i in range(3)]
    offsets = int64(np.cumsum([0, *world.lengths]))
    if world.anchors is not None:
        world.tails.copy_(world.anchors)
    plan = WritePlan(
        rows=int64(world.rows),
        owners=int64(world.owners),
        offsets=offsets,
        prefix_lens=torch.zeros(count, dtype=torch.int64),
        seed_slots=torch.full((count,), -1, dtype=torch.int64),
        num_requests=torch.tensor([count], dtype=torch.int32),
    )
    implementation("write", "reference")(
        write_plan=plan,
        input_ids=flat[1],
        positions=flat[2],
        out_slots=flat[0],
        endpoint=world.endpoint,
        tails=world.tails,
        step=torch.tensor([step]),
        check_positions=torch.zeros(1, dtype=torch.int32),
        expected_input_ids=None,
        track_lifetime=False,
        violations=ViolationLog.allocate(ring_cap=0),
        counters=torch.zeros(6, 2, dtype=torch.int64),
        tile_sums=torch.zeros(0),
    )
    implementation("chain_tails", "reference")(
        flat=flat[1],
        offsets=offsets,
        rows=plan.rows,
        starts=plan.prefix_lens,
        anchors=world.anchors,
        tails=world.tails,
        status=torch.zeros(1, dtype=torch.int32),
    )


def damage_records(draw: Any, records: torch.Tensor, *, most: int = 4) -> None:
    """Damage up to `most` records: a bit flipped, a word or a whole record zeroed, or retired."""
    for _ in range(draw(st.integers(0, most)) if len(records) > 1 else 0):
        slot = draw(st.integers(1, len(records) - 1))
        kind = draw(st.sampled_from(["flip", "zero", "retire", "swap"]))
        if kind == "flip":
            records[slot, draw(st.integers(0, 3))] ^= to_signed(1 << draw(st.integers(0, 63)))
        elif kind == "zero":
            records[slot] = 0
        elif kind == "retire":
            records[slot, 3] |= to_signed(1 << 63)
        else:
            other = draw(st.integers(1, len(records) - 1))
            records[[slot, other]] = records[[other, slot]]


def damage_bytes(draw: Any, source: KvSource | None) -> None:
    """Flip a bit somewhere in the source's bytes, or not."""
    if source is not None and draw(st.booleans()):
        layer = source.layers[draw(st.integers(0, len(source.layers) - 1))]
        row, column = draw(st.integers(0, layer.shape[0] - 1)), draw(st.integers(0, layer.shape[1] - 1))
        layer[row, column] ^= 1 << draw(st.integers(0, 7))
