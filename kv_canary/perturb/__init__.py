"""Fault injection: damage done on purpose, to see that the canary of a running engine finds it."""

from __future__ import annotations

from kv_canary.perturb.perturber import Injection, Perturber, bytes_of
from kv_canary.perturb.slots import ActiveSlot, collect_active_slots, pick_out_cache_loc_slot
from kv_canary.perturb_settings import MODES, Mode, PerturbConfig

__all__ = [
    "MODES",
    "ActiveSlot",
    "Injection",
    "Mode",
    "PerturbConfig",
    "Perturber",
    "bytes_of",
    "collect_active_slots",
    "pick_out_cache_loc_slot",
]
