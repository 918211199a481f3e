"""Cases of verify_seals: sealed pools whose bytes, seals and records have changed since, or not."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from kv_canary.constants import Tag, to_signed
from kv_canary.difftest.strategies.domain import (
    damage_bytes,
    damage_records,
    draw_giant,
    int64,
    often,
    replace_some,
    steps,
    violation_logs,
)
from kv_canary.difftest.strategies.edge_values import HOSTILE, INT64_MAX, INT64_MIN
from kv_canary.difftest.strategies.seals import SealedPool, seal_all, sealed_pools
from kv_canary.specs.structures import KvSource


@st.composite
def cases(draw: Any, *, giant: bool | None = None) -> dict[str, Any]:
    """Draw one call of verify_seals; `giant`: whether rows span more than 2**31 elements; None: sometimes."""
    pool = draw(sealed_pools(tag=int(draw(st.sampled_from(list(Tag)))), giant=draw_giant(draw, giant)))
    if not often(draw, 8):
        seal_all(pool)
    endpoint = pool.endpoint
    sources = [s for s in (endpoint.k_source, endpoint.v_source, endpoint.k_scales, endpoint.v_scales) if s is not None]
    taken = pool.taken()
    for _ in range(draw(st.integers(0, 3)) if taken else 0):
        _flip(draw, draw(st.sampled_from(sources)), draw(st.sampled_from(taken)))
    for source in sources:
        damage_bytes(draw, source)
    if often(draw, 3):
        _damage_seals(draw, pool, taken)
    if often(draw, 3):
        damage_records(draw, endpoint.records, taken)
    total = len(endpoint.records) if pool.slots is None else len(pool.slots)
    ends = _ends(draw, total) if often(draw, 3) else None
    return {
        **pool.arguments,
        "step": int64([draw(steps)]),
        "violations": draw(violation_logs()),
        "checked": torch.arange(4) * 1000,
        "ends": None if ends is None else int64(ends),
        "counts": None if ends is None else torch.arange(3 * len(ends)).view(-1, 3) * 100,
    }


def _ends(draw: Any, total: int) -> list[int]:
    """Return where lists of so many entries end, some of them empty, and sometimes what no caller should give."""
    ends = sorted(draw(st.lists(st.integers(0, total), max_size=5)))
    if draw(st.booleans()):
        ends.append(total)
    return replace_some(draw, ends, (*HOSTILE, INT64_MAX, INT64_MIN)) if often(draw, 4) else ends


def _flip(draw: Any, source: KvSource, slot: int) -> None:
    """Flip a bit of a slot's token in one layer of the source, if the slot lies there; the last bytes often."""
    row, token = divmod(slot - source.slot_bias, source.page_size)
    if not 0 <= row < source.num_rows or slot < source.slot_bias:
        return
    inside = draw(st.one_of(st.integers(0, source.bytes_per_token - 1), st.just(source.bytes_per_token - 1)))
    layer = source.layers[draw(st.integers(0, len(source.layers) - 1))]
    whole = layer[row].reshape(-1).view(torch.uint8)
    whole[source.offset_bytes + token * source.token_stride_bytes + inside] ^= 1 << draw(st.integers(0, 7))


def _damage_seals(draw: Any, pool: SealedPool, taken: list[int]) -> None:
    """Change words of seals: a bit, a word that becomes zero, or two slots' that are swapped."""
    seals = pool.seals
    slots = taken or [len(seals) - 1]
    for _ in range(draw(st.integers(1, 3))):
        slot, word = draw(st.sampled_from(slots)), draw(st.integers(0, seals.shape[1] - 1))
        kind = draw(st.sampled_from(["bit", "zero", "swap"]))
        if kind == "bit":
            seals[slot, word] ^= to_signed(1 << draw(st.integers(0, 63)))
        elif kind == "zero":
            seals[slot, word] = 0
        else:
            other = draw(st.sampled_from(slots))
            seals[[slot, other]] = seals[[other, slot]]
