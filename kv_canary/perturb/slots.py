"""The slots that a forward uses: those that a fault can be put into."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kv_canary.runtime.batch import ForwardBatch
from kv_canary.runtime.composition import ForwardRequest
from kv_canary.runtime.pools import BufferGroup


@dataclass(frozen=True, kw_only=True)
class ActiveSlot:
    """A slot, and the request and position that use it."""

    group: BufferGroup
    request: ForwardRequest
    position: int
    slot: int


def collect_active_slots(batch: ForwardBatch, group: BufferGroup) -> list[ActiveSlot]:
    """Return the cached positions that a forward is about to read in `group`.

    Left out are padding, what is out of range, and slots that the forward itself writes. Reads the table, so the host
    waits for the device.
    """
    written = set(batch.out_slots[group.name].tolist())
    table, lut = batch.tables[group.name], None if group.lut is None else group.lut.tolist()
    found = []
    for request in batch.requests:
        first = max(0, request.prefix_len - group.window) if group.window else 0
        positions = torch.arange(first, request.prefix_len, device=table.device)
        slots = group.slots_named(table, request.row_in_tables, positions).tolist()
        for position, named in enumerate(slots, first):
            inside = lut is None or 0 <= named < len(lut)
            slot = named if lut is None else lut[named] if inside else 0
            if 0 < slot < group.pool.num_slots and slot not in written:
                found.append(ActiveSlot(group=group, request=request, position=position, slot=slot))
    return found


def pick_out_cache_loc_slot(batch: ForwardBatch, group: BufferGroup, rng: random.Random) -> ActiveSlot | None:
    """Return one of the slots that a forward writes in `group`, or None where it writes none."""
    slots: Sequence[int] = batch.out_slots[group.name].tolist()
    written, at = [], 0
    for request in batch.requests:
        for k in range(request.extend_len):
            if 0 < slots[at] < group.pool.num_slots:
                position = request.prefix_len + k
                written.append(ActiveSlot(group=group, request=request, position=position, slot=slots[at]))
            at += 1
    return rng.choice(written) if written else None
