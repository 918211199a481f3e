"""Strategies for the parts of engines: lengths, pools, tables, KV sources, and records that fit them.

Structure is drawn from Hypothesis, so that it shrinks; bulk content (tokens, bytes) comes from a drawn seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from kv_canary.backends import implementation
from kv_canary.cases.packing import sparse_storage
from kv_canary.constants import ANCHOR, to_signed
from kv_canary.difftest.features import GIANT
from kv_canary.difftest.strategies.edge_values import HOSTILE, INT64_MAX, INT64_MIN
from kv_canary.specs.structures import Endpoint, KvSource, ViolationLog, WritePlan
from kv_canary.specs.violation_row import MOST_GROUPS, VIOLATION_WORDS

# Just below, at and just above the tiles of the kernels and the blocks of a strided plan.
TILE_EDGES = (
    *(15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 127, 128, 129, 255, 256, 257),
    *(511, 512, 513, 1023, 1024, 1025, 2049, 4095, 4096, 4097),
)

# The longest span of a giant tensor: far enough for most rows to lie past 2**31, and a GPU must hold all of it.
_GIANT_BYTES = 20 << 30

# A source this long is given tokens of fewer bytes.
_SOURCE_BYTES = 1 << 18

# Elements of all sizes that KV is kept in. Random bytes as floats are now and then NaN: only bytes may be compared.
_DTYPES = (torch.int8, torch.bfloat16, torch.float32, torch.int64)

seeds = st.integers(0, 2**32 - 1)
steps = st.one_of(st.integers(0, 100), st.sampled_from([(1 << 39) - 1, 1 << 39, (1 << 62) + 5, INT64_MIN]))
owner_numbers = st.one_of(st.integers(0, 20), st.sampled_from([(1 << 24) - 1, 1 << 24, (1 << 24) + 3, INT64_MAX, -1]))


def lengths(*, longest: int = 1025) -> st.SearchStrategy[int]:
    """Mostly short lengths, sometimes at the edge of a tile."""
    edges = [e for e in TILE_EDGES if e <= longest]
    return st.one_of(st.integers(0, min(40, longest)), st.sampled_from(edges or [longest]))


def batch_sizes() -> st.SearchStrategy[int]:
    """Mostly a handful of requests, sometimes none, rarely more than one block of them, or two."""
    many = [0, 1, 1, 17, 255, 256, 257, 257, 513, 520, 600, 1025]
    return st.one_of(st.integers(0, 6), st.integers(0, 6), st.sampled_from(many))


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


def often(draw: Any, one_in: int) -> bool:
    """Whether one case of `one_in` gets something."""
    return bool(draw(st.sampled_from([False] * (one_in - 1) + [True])))


def draw_giant(draw: Any, giant: bool | None) -> bool:
    """Whether a case gets rows so far apart that 32 bits do not hold every offset: often, or as `giant` says."""
    return often(draw, 3) if giant is None else giant


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
    span = draw(st.sampled_from([GIANT, _GIANT_BYTES // tensor.element_size()]))
    apart = span // (num_rows - 1) // multiple + 1 + draw(st.sampled_from([0, 1, 5]))
    stride = max(apart, -(-length // multiple)) * multiple
    whole = sparse_storage(((num_rows - 1) * stride + length) * tensor.element_size()).view(tensor.dtype)
    return whole.as_strided((num_rows, length), (stride, 1)).copy_(tensor)


@st.composite
def kv_sources(draw: Any, num_slots: int, *, short: bool = True, giant: bool = False) -> KvSource:
    """A source of bytes of any geometry, which covers all slots or, if it may be `short`, rarely not the first or last.

    A `giant` one has rows so far apart that 32 bits do not hold every offset, if it has several.
    """
    page_size = draw(st.sampled_from([1, 1, 2, 3, 16]))
    # Half of them have all their words aligned: everything is a multiple of eight bytes.
    unit = draw(st.sampled_from([1, 8]))
    sizes = [1, 4, 8, 12, 16, 24, 40, 73, 128, 584, 584] if unit == 1 else [8, 24, 128, 584]
    bytes_per_token = draw(st.sampled_from([b for b in sizes if b * num_slots <= _SOURCE_BYTES] or [unit, 2 * unit]))
    reads = [1, 3, 8, 16, 16, 20, 64, 300] if unit == 1 else [8, 16, 64, 264]
    read_bytes = draw(st.sampled_from([*reads, bytes_per_token, bytes_per_token, 2 * bytes_per_token]))
    offset_bytes = draw(st.sampled_from([0, 0, 1, 4, 8] if unit == 1 else [0, 8]))
    phase = draw(st.sampled_from([0, 0, 1, 2, 4] if unit == 1 else [0]))
    slot_bias = draw(st.sampled_from([0, 0, 0, 1, 1, 2, 3] if short else [0, 1]))
    num_layers = draw(st.integers(1, 3))
    missing = draw(st.sampled_from([0, 0, 0, 1])) if short else 0
    num_rows = max(1, -(-(num_slots - slot_bias) // page_size) - missing)
    token_stride = bytes_per_token + draw(st.sampled_from([0, 0, 0, unit, 16]))
    row_bytes = (
        offset_bytes + (page_size - 1) * token_stride + bytes_per_token + draw(st.sampled_from([0, 0, 3 * unit, 8]))
    )
    row_stride = row_bytes + draw(st.sampled_from([0, 0, 5 * unit, 16]))
    rng = np.random.default_rng(draw(seeds))
    if giant and num_rows > 1:
        span = draw(st.sampled_from([GIANT, _GIANT_BYTES // num_layers]))
        row_stride = max(row_stride, (span // (num_rows - 1) // unit + 1) * unit)
    layers = []
    for _ in range(num_layers):
        if giant and num_rows > 1:
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
        token_stride_bytes=token_stride,
    )


@st.composite
def typed_sources(draw: Any, num_slots: int, *, giant: bool = False) -> KvSource:
    """A source as `kv_sources` draws them, half of the time as elements of another dtype, or rows of three axes."""
    source: KvSource = draw(kv_sources(num_slots, giant=giant))
    first = source.layers[0]
    numbers = (first.stride(0), first.shape[1], *(layer.data_ptr() for layer in source.layers))
    fits = [t for t in _DTYPES if not any(n % t.itemsize for n in numbers)]
    dtype = draw(st.sampled_from([torch.uint8, *fits[::-1]]))
    layers = tuple(layer if dtype == torch.uint8 else _as_dtype(layer, dtype) for layer in source.layers)
    length = layers[0].shape[1]
    heads = draw(st.sampled_from([1, 1, *(h for h in (1, 2, 4) if length % h == 0)]))
    if draw(st.booleans()):
        layers = tuple(layer.unflatten(1, (heads, length // heads)) for layer in layers)
    return replace(source, layers=layers)


def _as_dtype(layer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bytes [n, m] as elements of `dtype`, which its address, its strides and m are multiples of."""
    if layer.shape[0] == 1:
        return layer[0].view(dtype)[None]
    start, stride, size = layer.storage_offset(), layer.stride(0), dtype.itemsize
    # From the first row on, since what lies before it need not be a whole element.
    whole = layer.as_strided(((layer.shape[0] - 1) * stride + layer.shape[1],), (1,), start).view(dtype)
    shape = layer.shape[0], layer.shape[1] // size
    return whole.as_strided(shape, (stride // size, 1), whole.storage_offset())


@st.composite
def violation_logs(draw: Any) -> ViolationLog:
    """A log with room, nearly full, full or without a ring, whose rows hold anything."""
    capacity = draw(st.sampled_from([0, 1, 2, 8, 256, 2048]))
    rng = np.random.default_rng(draw(seeds))
    ring = torch.from_numpy(rng.integers(INT64_MIN, INT64_MAX, (capacity, VIOLATION_WORDS)))
    return ViolationLog(ring=ring, count=int64([draw(st.sampled_from([0, 0, 0, 1, capacity, capacity + 3, -2]))]))


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
    # Slots come in pages of so many.
    page_size: int = 1

    @property
    def num_rows(self) -> int:
        return self.slots.shape[0]


@st.composite
def worlds(
    draw: Any, *, longest: int = 257, room: int = 0, tag: int = 0, giant: bool = False, whole: bool = False
) -> World:
    """A pool with some requests cached in it, their records written by the reference.

    Requests may share a prefix; slots come in pages, in random order; at least `room` slots are free. In a `giant`
    world records or sources have rows so far apart that 32 bits do not hold every offset; half of the time it is
    small, so that most slots in use lie that far. In a `whole` world sources are plain bytes that cover every slot.
    """
    small = giant and draw(st.booleans())
    if small:
        longest, room = draw(st.integers(1, 4)), 0
    rng = np.random.default_rng(draw(seeds))
    count = draw(st.integers(1, 2) if small else st.one_of(st.just(1), st.integers(0, 5)))
    lens = [draw(st.integers(1, longest) if small else lengths(longest=longest)) for _ in range(count)]
    page = draw(st.sampled_from([1] if small else [1, 1, 4, 16, 3]))
    num_rows = count + 1 + draw(st.integers(0, 2))
    rows = [int(r) for r in rng.permutation(np.arange(1, num_rows))[:count]]
    width = max([1, *lens])
    pages = [-(-n // page) for n in lens]
    order = 1 + rng.permutation(sum(pages) + draw(st.integers(0, 3)) + -(-room // page))
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
    far = draw(st.sampled_from(["records", "records k", "records v", "k", "v"])).split() if giant else []
    near = kv_sources(num_slots, short=False) if whole else typed_sources(num_slots)
    sources = [
        draw(typed_sources(num_slots, giant=True) if name in far else st.one_of(st.none(), near)) for name in ("k", "v")
    ]
    records = torch.zeros(num_slots, 4, dtype=torch.int64)
    endpoint = Endpoint(
        tag=tag,
        records=strided_rows(draw, records, multiple=4, giant="records" in far),
        k_source=sources[0],
        v_source=sources[1],
        group=draw(st.sampled_from([0, 1, 2, MOST_GROUPS])),
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
        page_size=page,
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
        given_rows=None,
        given_lens=None,
        track_lifetime=False,
        ring=False,
        violations=ViolationLog.allocate(ring_cap=0),
        counters=torch.zeros(6, 2, dtype=torch.int64),
        tile_sums=torch.zeros(0),
        slot_marks=torch.zeros(0),
    )
    implementation("chain_tails", "reference")(
        flat=flat[1],
        offsets=offsets,
        rows=plan.rows,
        starts=plan.prefix_lens,
        anchors=world.anchors,
        tails=world.tails,
        pool=None,
        status=torch.zeros(1, dtype=torch.int32),
    )


def damage_records(draw: Any, records: torch.Tensor, used: Sequence[int] = (), *, most: int = 4) -> None:
    """Damage records: up to `most` anywhere, and often many of those in `used`, in all the ways there are.

    A bit is flipped, one word is left alone or zeroed, K and V are others, or the record is zeroed, retired, swapped.
    """
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
    inside = sorted({s for s in used if 0 < s < len(records)})
    if inside and not often(draw, 3):
        rng = np.random.default_rng(draw(seeds))
        chosen = rng.permutation(inside)[: draw(st.sampled_from([10, 20, 30]))].tolist()
        for i, slot in zip(rng.permutation(max(10, len(chosen))).tolist(), chosen, strict=False):
            _deform(records[slot], i % 10, int(rng.integers(1, 1 << 62)))
    if often(draw, 4):
        # Nothing writes there, and nobody may take it for a record.
        records[0] = int64([draw(seeds), draw(seeds), 0, draw(st.integers(0, 1))])


def _deform(record: torch.Tensor, kind: int, other: int) -> None:
    """Change one record in the way number `kind` of ten; `other` is any number that is not negative."""
    word = kind % 4
    if kind < 4:
        kept = int(record[word]) or other
        record.zero_()
        record[word] = kept
    elif kind < 8:
        record[word] = 0
    elif kind == 8:
        record[2] ^= to_signed(other << 1 | 1)
    else:
        record[3] |= to_signed(1 << 63)


def damage_bytes(draw: Any, source: KvSource | None) -> None:
    """Flip a bit somewhere in the source's bytes, or not."""
    if source is not None and draw(st.booleans()):
        layer = source.layers[draw(st.integers(0, len(source.layers) - 1))]
        row = layer[draw(st.integers(0, layer.shape[0] - 1))].view(-1).view(torch.uint8)
        row[draw(st.integers(0, len(row) - 1))] ^= 1 << draw(st.integers(0, 7))
