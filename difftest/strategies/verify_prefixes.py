"""Cases of verify_prefixes: batches over a pool whose records fit, then damaged; and tables that hold anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from kv_canary.constants import Tag
from kv_canary.difftest.strategies.batches import (
    Batch,
    damage_cells,
    damage_lut,
    draw_padding,
    draw_strides,
    draw_tokens,
    draw_where,
    laid_out,
    make_hostile,
)
from kv_canary.difftest.strategies.domain import (
    World,
    damage_bytes,
    damage_records,
    draw_giant,
    int64,
    often,
    owner_numbers,
    steps,
    violation_logs,
    worlds,
)
from kv_canary.difftest.strategies.edge_values import INT64_MAX, INT64_MIN
from kv_canary.specs.structures import ResolvedSlots, WritePlan

# Requests of a batch that crosses blocks of them; most of those have a few cached tokens only.
_MANY = (17, 255, 256, 257, 300, 511, 512, 513, 520, 1025)


@st.composite
def cases(draw: Any, *, giant: bool | None = None) -> dict[str, Any]:
    """Draw one call of verify_prefixes; `giant`: whether rows span more than 2**31 elements; None: sometimes."""
    giant = draw_giant(draw, giant)
    # Of a giant case one thing is: the pool, the table, or the tokens.
    far = draw(st.sampled_from(["pool", "pool", "table", "tokens"])) if giant else ""
    hostile = draw(st.booleans())
    # One request alone may take more programs than there are.
    longest = draw(st.sampled_from([257, 257, 513]))
    world = draw(worlds(longest=longest, tag=int(draw(st.sampled_from(list(Tag)))), giant=far == "pool"))
    rng = np.random.default_rng(world.seed)
    batch = _draw_batch(draw, rng, world)
    window = draw(st.sampled_from([0] * 8 + [1, 2, 15, 16, 31, 127, 128, 1023]))
    table, lut = _draw_tables(draw, rng, world, batch, window=window)
    num_full = world.num_slots if lut is None else len(lut)
    if hostile:
        make_hostile(draw, batch, table, lut, num_full)
    if not often(draw, 3):
        damage_cells(draw, batch, table, num_full)
    if lut is not None and often(draw, 3):
        damage_lut(draw, batch, table, lut)
    if often(draw, 6):
        # Nothing is where it should be.
        table = np.roll(table, 1, axis=1)
    if often(draw, 2):
        damage_records(draw, world.endpoint.records, world.slots.unique().tolist())
        damage_bytes(draw, world.endpoint.k_source)
        damage_bytes(draw, world.endpoint.v_source)
    arguments: dict[str, Any] = {"step": int64([draw(steps)])}
    if far == "tokens" or draw(st.booleans()):
        truth = world.tokens.numpy() if not often(draw, 4) else None
        arguments |= draw_tokens(draw, rng, batch, hostile=hostile, giant=giant, far=far == "tokens", truth=truth)
    if draw(st.booleans()):
        arguments |= draw_strides(draw, rng, batch.size, hostile=hostile)
    owners = [draw(owner_numbers) for _ in range(min(batch.size, 20))]
    owners += [int(n) for n in rng.integers(0, 1 << 25, batch.size - len(owners))]
    enough = batch.most_entries
    capacity = draw(st.one_of(st.just(enough), st.just(enough), st.integers(0, 300)))
    arguments |= {
        "rows": int64(batch.rows),
        "owners": int64(owners) if draw(st.booleans()) else None,
        "prefix_lens": int64(batch.prefix),
        "extend_lens": int64(batch.extend),
        **draw_where(draw, rng, batch, table, hostile=hostile, giant=far == "table"),
        "window": window,
    }
    if draw(st.booleans()):
        arguments |= laid_out(arguments)
    return {
        **arguments,
        "lut": None if lut is None else torch.from_numpy(lut),
        "endpoint": world.endpoint,
        "anchors": _draw_anchors(draw, rng, world),
        "track_lifetime": draw(st.booleans()),
        "resolved": ResolvedSlots.allocate(entry_cap=capacity),
        "write_plan": WritePlan.allocate(write_cap=batch.size + draw(st.integers(0, 2))),
        "status": torch.zeros(1, dtype=torch.int32),
        "violations": draw(violation_logs()),
        "counters": torch.arange(2 * len(Tag)).view(-1, 2),
    }


def _draw_batch(draw: Any, rng: np.random.Generator, world: World) -> Batch:
    """Draw a batch of the world's requests, each once or, in a batch of many, again and again."""
    held = list(zip(world.rows, world.lengths, strict=True))
    held = [held[i] for i in rng.permutation(len(held))]
    bs = draw(st.sampled_from(_MANY)) if held and often(draw, 5) else len(held)
    many = bs > len(held)
    if held and not many and draw(st.booleans()):
        # So that some are left of those that are made hostile.
        bs += draw(st.integers(1, 4))
    if bs > len(held):
        held = [held[i] for i in rng.integers(0, len(held), bs)]
    part = st.sampled_from([1.0, 1.0, 1.0, 0.5, 0.0])
    prefix = [int(n * draw(part)) for _, n in held[:20]]
    prefix += [int(p) for p in rng.integers(0, 5, max(bs - 20, 0))]
    if many:
        # The first has all of its own; the others, which take long in numbers, have little.
        prefix[1:] = [min(p, 4) for p in prefix[1:]]
    prefix = [min(p, n) for p, (_, n) in zip(prefix, held, strict=True)]
    kind = draw(st.sampled_from(["decode", "decode", "decode", "extend", "continued", "continued", "mixed", "fresh"]))
    if kind == "fresh":
        prefix = [0] * bs
    if kind in ("decode", "continued"):
        prefix = [max(p, min(n, 1)) for p, (_, n) in zip(prefix, held, strict=True)]
    extend = [1] * bs if kind == "decode" else [int(e) for e in rng.integers(0 if kind == "mixed" else 2, 40, bs)]
    page_size = draw(st.sampled_from([1, world.page_size]))
    width = world.slots.shape[1] + draw(st.integers(0, 2))
    return Batch(
        rows=draw_padding(draw, [row for row, _ in held]),
        prefix=prefix,
        extend=extend,
        num_rows=world.num_rows,
        width=-(-width // page_size) * page_size,
        page_size=page_size,
    )


def _draw_tables(
    draw: Any, rng: np.random.Generator, world: World, batch: Batch, *, window: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64] | None]:
    """Return the table of the world's pages, with any pages where nothing is cached, and perhaps a LUT in between."""
    size = batch.page_size
    num_pages, inside = world.num_slots // size, np.arange(size)
    table = rng.integers(0, num_pages, (batch.num_rows, batch.width // size), dtype=np.int32)
    for row, n in zip(world.rows, world.lengths, strict=True):
        table[row, : -(-n // size)] = world.slots[row, :n:size].numpy() // size
    if draw(st.booleans()):
        return table, None
    num_full = (num_pages + draw(st.integers(0, 3))) * size
    full = np.concatenate([[0], 1 + rng.permutation(num_full // size - 1)[: num_pages - 1]])
    lut = np.zeros(num_full, dtype=np.int64)
    lut[(full[:, None] * size + inside).reshape(-1)] = np.arange(world.num_slots)
    table = full[table].astype(np.int32)
    evicted = draw(st.sampled_from(["none", "left behind", "left behind", "some", "all"]))
    if evicted == "left behind":
        # As an engine does: what no request's window reads any more.
        slots = (table[:, :, None].astype(np.int64) * size + inside).reshape(len(table), -1)
        read = [slots[row, max(p - window, 0) if window else 0 : p] for row, p in batch.cached]
        lut[np.setdiff1d(np.arange(num_full), np.concatenate([np.zeros(0, np.int64), *read]))] = 0
    elif evicted != "none":
        lut[rng.random(num_full) < (0.3 if evicted == "some" else 1.0)] = 0
    return table, lut


def _draw_anchors(draw: Any, rng: np.random.Generator, world: World) -> torch.Tensor | None:
    """Return the world's anchors, or others, or none, or too few."""
    anchors = world.anchors
    if anchors is None and often(draw, 3):
        anchors = torch.from_numpy(rng.integers(INT64_MIN, INT64_MAX, world.num_rows))
    if anchors is None or often(draw, 8):
        return None
    return anchors[: draw(st.integers(0, len(anchors)))] if often(draw, 4) else anchors
