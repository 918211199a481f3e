"""Cases of seal: pools of any geometry, records in any state, lists and ranges of slots."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from kv_canary.difftest.strategies.domain import draw_giant
from kv_canary.difftest.strategies.seals import seal_all, sealed_pools


@st.composite
def cases(draw: Any, *, giant: bool | None = None) -> dict[str, Any]:
    """Draw one call of seal; `giant`: whether rows span more than 2**31 elements; None: sometimes."""
    pool = draw(sealed_pools(giant=draw_giant(draw, giant)))
    if draw(st.booleans()):
        # Sealed before.
        seal_all(pool)
    return dict(pool.arguments)
