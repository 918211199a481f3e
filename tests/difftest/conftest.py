"""Generated calls that the interpreter does not take long for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

from kv_canary.difftest.strategies import cases

Cases = Callable[[str], st.SearchStrategy[dict[str, Any]]]

# Where no more calls than so many are asked for, they are quick ones.
FEW = 30
# What takes longest are slots with wide tokens, of which a tile has few; so many tiles and a slot are looked at then,
# which is more than twice what the interpreter's programs take at a time.
SEALING, MOST_TILES = ("seal", "verify_seals"), 12


def shortened(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call that looks at slots, at fewer of them where it looks at more than `MOST_TILES` tiles of them."""
    from kv_canary.kernels.sealing import launch_of

    first, count = call["span"].tolist()
    _, sizes = launch_of(call["endpoint"], 1, 1, call["span"].device)
    most = MOST_TILES * sizes["SLOTS"] + 1
    return {**call, "span": torch.tensor([first, most])} if count > most else call


@pytest.fixture(scope="session")
def quick_cases() -> Cases:
    """Return what draws calls of an op, quick ones where few are asked for."""

    def drawn(op: str) -> st.SearchStrategy[dict[str, Any]]:
        few = op in SEALING and settings.default.max_examples <= FEW
        return cases(op).map(shortened) if few else cases(op)

    return drawn
