"""Lists of records that are verified outside of forwards, as plans."""

from __future__ import annotations

import torch

from kv_canary.specs.structures import VerifyPlan

# Entries are padded to a multiple of so many: kernels are compiled for one kind of number.
_ROOM = 16


def listed(
    slots: torch.Tensor, previous: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor | None = None
) -> VerifyPlan:
    """Return a plan of entries that no request relies on.

    Args:
        slots, previous, positions, tokens: int64 [n] on the device, see `VerifyPlan`; tokens None: none is checked.
    """
    count, device = len(slots), slots.device
    plan = VerifyPlan.allocate(verify_cap=max(1, -(-count // _ROOM)) * _ROOM, device=device)
    for buffer, column in ((plan.slots, slots), (plan.prev_slots, previous), (plan.positions, positions)):
        buffer[:count] = column
    plan.tokens[:count] = -1 if tokens is None else tokens
    plan.num_valid.fill_(count)
    plan.num_requested.fill_(count)
    return plan
