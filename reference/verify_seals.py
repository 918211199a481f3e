"""verify_seals: the reference."""

from __future__ import annotations

import torch

from kv_canary.constants import Reason
from kv_canary.reference.hashing import LOW_32, shift_right, stored_position
from kv_canary.reference.records import load_records
from kv_canary.reference.reporting import report
from kv_canary.reference.seals import band_words, chosen_slots
from kv_canary.specs.sealing import seal_words
from kv_canary.specs.structures import Endpoint, ViolationLog


def verify_seals(
    *,
    slots: torch.Tensor | None,
    span: torch.Tensor,
    endpoint: Endpoint,
    layers_per_band: int,
    seed: int,
    seals: torch.Tensor,
    step: torch.Tensor,
    violations: ViolationLog,
    checked: torch.Tensor,
    ends: torch.Tensor | None,
    counts: torch.Tensor | None,
) -> None:
    """Hold all bytes of slots against their seals; see specs/verify_seals.py."""
    entries, chosen = chosen_slots(slots, span, endpoint)
    record = load_records(endpoint.records, chosen, torch.ones_like(chosen, dtype=torch.bool))
    live = record.written & (record.writer >= 0)
    sealed = live & (seals[chosen, 0] == record.writer) & (seals[chosen, 1] != 0)
    of_slot = sealed.nonzero()[:, 0]
    found = band_words(endpoint, chosen[of_slot], layers_per_band=layers_per_band, seed=seed)
    kept = seals[chosen[of_slot], 1 : seal_words(endpoint, layers_per_band)]
    wrong_k = (kept & LOW_32) != (found & LOW_32)
    wrong_v = shift_right(kept, 32) != shift_right(found, 32)
    reasons = torch.where(wrong_k, int(Reason.SEAL_K), 0) + torch.where(wrong_v, int(Reason.SEAL_V), 0)
    at, band = reasons.nonzero(as_tuple=True)
    entry = of_slot[at]
    report(
        violations,
        torch.ones_like(at, dtype=torch.bool),
        site=endpoint.site,
        reasons=reasons[at, band],
        slot=chosen[entry],
        position=stored_position(record.identity[entry]),
        identity=record.identity[entry],
        token=-1,
        chain=record.chain[entry],
        kv=kept[at, band],
        observed_kv=found[at, band],
        writer=record.writer[entry],
        step=step,
        given=band,
    )
    checked[0] += 1
    differ = torch.zeros_like(chosen)
    differ[of_slot] = torch.count_nonzero(reasons, dim=1)
    of_slots = torch.stack((sealed.long(), (live & ~sealed).long(), differ), dim=1)
    checked[1:] += of_slots.sum(0)
    if ends is not None and counts is not None:
        of_list = (ends <= entries[:, None]).sum(1)
        inside = of_list < len(ends)
        counts.index_add_(0, of_list[inside], of_slots[inside])
