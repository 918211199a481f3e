"""Requests of SGLang's that end are noted with their slots before those are given back, and no others are."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch

import kv_canary as kc
from kv_canary.engines.patches import Patches
from kv_canary.engines.sglang.completion import Ended


class Cache:
    """A prefix cache that keeps the rows of sessions."""

    def __init__(self) -> None:
        self.released: list[str] = []

    def claim_kv_row(self, req: Any) -> bool:
        return bool(req.session)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        self.released.append(req.rid)


def request(name: str, *, row: int = 1, length: int = 3, finished: bool = True, session: bool = False) -> Any:
    return SimpleNamespace(
        rid=name,
        session=session,
        kv=SimpleNamespace(req_pool_idx=row),
        finished=lambda: finished,
        owned_kv_len=lambda: length,
    )


def test_what_ends_is_noted_and_what_is_put_off_or_kept_is_not() -> None:
    cache, patches, table = Cache(), Patches(), torch.arange(20, dtype=torch.int32).view(2, 10)
    lut = torch.arange(40, 60)
    pools = [kc.KvPool(name=name, num_slots=60, k_source=None, v_source=None, device="cpu") for name in ("a", "b")]
    groups = [
        kc.BufferGroup(name="full", pool=pools[0]),
        kc.BufferGroup(name="swa", pool=pools[1], window=2, lut=lut),
    ]
    rows: list[int] = []
    freers: list[str | None] = []
    ended = Ended(
        cache,
        [(table, groups)],
        patches=patches,
        row_ended=rows.append,
        frees=lambda req: freers.append(None if req is None else req.rid),
        noting=suppress(AttributeError),
        completes=True,
    )
    assert cache.claim_kv_row(request("kept", session=True)) is True
    assert (rows, bool(ended)) == ([], False)
    assert cache.claim_kv_row(request("put off", finished=False)) is False
    assert (rows, bool(ended)) == ([1], False)
    assert freers == ["put off"]
    cache.on_release(request("put off"), checkpointed=False)
    assert (freers, cache.released) == (["put off", None], ["put off"])
    cache.claim_kv_row(request("done"))
    # What the row names is another's by the time that it is asked for.
    table.zero_()
    [(name, slots)] = ended.take()
    assert name == "done"
    assert {group: its.tolist() for group, its in slots.items()} == {"full": [10, 11, 12], "swa": [50, 51, 52]}
    assert ended.take() == []
    cache.claim_kv_row(request("dropped"))
    ended.forget()
    assert not ended
    # A request that cannot be read costs the engine nothing.
    assert cache.claim_kv_row(SimpleNamespace(session=False, kv=None)) is False
    patches.undo_all()
    cache.claim_kv_row(request("unwatched"))
    assert not ended
