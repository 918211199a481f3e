"""The configuration of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kv_canary.specs.structures import KvSource

Kind = Literal["full", "window", "lut", "ring"]


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """One group of layers that share a pool.

    Args:
        kind: "full" attention; "window" over the same pool as full attention has; "lut": a pool of its own behind a
            table from full slots; "ring": a ring of window + 1 slots for each request.
        num_slots: slots of the pool, the padding slot counted.
        window: cached positions that a new query may read; 0 for full attention.
        after_write: TAIL is planned for what is resident after the step; always so for rings.
        k_source: the bytes of K, or None; every slot lies within.
        v_source: those of V.
    """

    kind: Kind
    num_slots: int
    window: int = 0
    after_write: bool = False
    k_source: KvSource | None = None
    v_source: KvSource | None = None

    @property
    def planned_twice(self) -> bool:
        """Whether TAIL has a plan of its own."""
        return self.kind == "ring" or self.after_write


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The geometry of an engine, and how its canary is set up.

    Args:
        groups: the first owns the pages, unless all are rings; kinds differ.
        page_size: slots in a page.
        num_pages: pages that can be given out.
        first_slot: slot of the first page's first token: the page size, or 1 where an engine's slot 0 is real.
        max_rows: rows of the tables, the padding row counted.
        max_len: positions of a row.
        prefix_cache: keep finished prefixes for later requests; not with rings.
        rewrite_matched: a prompt that the cache holds wholly writes its last token once more, into the shared page.
        anchors: requests have identities, which anchor their chains.
        token_pool: keep the tokens of each row, for plans to expect.
        token_offset: 1 for a draft worker, whose position p is given token p + 1.
        token_oracle: writes are told what the input ids should be.
        serial_owners: owners are serial numbers from `first_owner` on; else rows.
        stride: n > 1: after a request's first step verify every n-th block of its positions only.
        two_records: HEAD has records of its own, written before the model and without fingerprints.
        fused: HEAD plans and verifies in one call, and TAIL verifies what that found; not where TAIL has its own plan.
        verify_cap: entries that a plan has room for.
        ring_cap: violations that the log has room for.
        gap: elements between the rows of tables; times 4 between records.
    """

    groups: tuple[GroupConfig, ...]
    page_size: int
    num_pages: int
    first_slot: int
    max_rows: int
    max_len: int
    prefix_cache: bool = True
    rewrite_matched: bool = False
    anchors: bool = False
    token_pool: bool = True
    token_offset: int = 0
    token_oracle: bool = False
    serial_owners: bool = True
    first_owner: int = 1
    first_step: int = 0
    stride: int = 1
    track_lifetime: bool = True
    check_positions: bool = True
    two_records: bool = False
    fused: bool = False
    verify_cap: int = 4096
    ring_cap: int = 256
    gap: int = 0
    seed: int = 0

    @property
    def has_ring(self) -> bool:
        return any(g.kind == "ring" for g in self.groups)
