"""KV pools and the groups of layers that read them.

A `KvPool` is memory: slots, their records, and the K and V bytes behind them. A `BufferGroup` is a way to read it: a
table of slots per row, and a window. Usually there is one group to a pool; engines whose attention types share one
pool have several.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kv_canary.constants import KV_WORD, RECORD_WORDS, Tag
from kv_canary.errors import must_be
from kv_canary.specs.structures import Endpoint, KvSource


class KvPool:
    """Slots, their records and their K/V bytes.

    Args:
        name: how reports call it.
        num_slots: slots that the engine can name, slot 0 (padding) included.
        k_source, v_source: the bytes; None leaves that half unchecked.
        extra_slots: further records behind the engine's slots, for a host tier; they have no K/V bytes here.
        layer_names: how reports call the layers of the sources, in order.
        device: where the records live.
    """

    # What is allocated in inference mode could not be changed outside of it.
    @torch.inference_mode(False)
    def __init__(
        self,
        *,
        name: str,
        num_slots: int,
        k_source: KvSource | None,
        v_source: KvSource | None,
        extra_slots: int = 0,
        layer_names: tuple[str, ...] = (),
        device: torch.device | str,
    ) -> None:
        for argument, value, low in (("num_slots", num_slots, 1), ("extra_slots", extra_slots, 0)):
            if value < low:
                raise ValueError(must_be("KvPool", argument, f"at least {low}", str(value)))
        self.name = name
        self.num_slots = num_slots
        self.k_source, self.v_source = k_source, v_source
        self.layer_names = layer_names
        self.records = torch.zeros(num_slots + extra_slots, RECORD_WORDS, dtype=torch.int64, device=device)
        self.head_records: torch.Tensor | None = None

    def keep_head_records(self) -> None:
        """Keep records of HEAD's own, zeroed: those that are written before the model, without fingerprints."""
        if self.head_records is None:
            self.head_records = torch.zeros_like(self.records)

    def take_back_head(self, slots: torch.Tensor) -> None:
        """Let HEAD's records of int64 `slots` be TAIL's again, because the forward was given up that they were for."""
        if self.head_records is not None:
            slots = slots[(slots > 0) & (slots < self.num_slots)]
            self.head_records[slots] = self.records[slots]
            self.head_records[slots, KV_WORD] = 0

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """Every buffer of records, HEAD's first; what frees or moves a slot does so in all of them."""
        return (self.records,) if self.head_records is None else (self.head_records, self.records)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V behind the pool's slots."""
        sources = [s for s in (self.k_source, self.v_source) if s is not None]
        return sum(self.num_slots * s.bytes_per_token * len(s.layers) for s in sources)


@dataclass(frozen=True, kw_only=True, eq=False)
class BufferGroup:
    """One attention type's view of a pool: which slots a row's positions lie in, and how far back it reads.

    Args:
        name: how the adapter and the reports call it.
        pool: the memory.
        window: 0 for full attention, else cached positions that a query may read (the model's sliding_window - 1).
        ring: whether new tokens overwrite the oldest of window + 1 slots.
        lut: full slot -> slot of this pool, int64 [N], where the tables hold full slots.
        page_size: slots of what an entry of its tables names: that entry times this is the first of them.
        token_offset: how many tokens later than the position the token stands that a slot holds: 0, or 1 for the pool
            of an EAGLE draft model.
    """

    name: str
    pool: KvPool
    window: int = 0
    ring: bool = False
    lut: torch.Tensor | None = None
    token_offset: int = 0
    page_size: int = 1

    def __post_init__(self) -> None:
        if self.window < 0:
            raise ValueError(must_be("BufferGroup", "window", "at least 0", str(self.window)))
        if self.ring and not self.window:
            raise ValueError(must_be("BufferGroup", "window", "at least 1 for a ring", "0"))
        if self.page_size < 1:
            raise ValueError(must_be("BufferGroup", "page_size", "at least 1", str(self.page_size)))
        if self.token_offset not in (0, 1):
            raise ValueError(must_be("BufferGroup", "token_offset", "0 or 1", str(self.token_offset)))

    def slots_named(self, table: torch.Tensor, rows: torch.Tensor | int, positions: torch.Tensor | int) -> torch.Tensor:
        """Return the int64 slots that a table names, before any LUT; below 0 where it names none.

        Args:
            table: int32 [rows, pages], of this group.
            rows, positions: in range, int64 [n] or one for all.
        """
        pages = table[rows, positions // self.page_size].to(torch.int64)
        return torch.where(pages < 0, pages, pages * self.page_size + positions % self.page_size)

    @property
    def head_tag(self) -> Tag:
        return Tag.HEAD_SWA if self.window else Tag.HEAD_FULL

    @property
    def tail_tag(self) -> Tag:
        return Tag.TAIL_SWA if self.window else Tag.TAIL_FULL

    @property
    def sweep_tag(self) -> Tag:
        return Tag.SWEEP_SWA if self.window else Tag.SWEEP_FULL

    @property
    def tags(self) -> tuple[Tag, Tag, Tag]:
        """The launch sites of this group."""
        return self.head_tag, self.tail_tag, self.sweep_tag

    def endpoint(self, tag: Tag, *, with_bytes: bool) -> Endpoint:
        """Return the launch site `tag` of this group; HEAD's own records, where there are any, have no bytes."""
        pool = self.pool
        if tag == self.head_tag and pool.head_records is not None:
            return Endpoint(tag=tag, records=pool.head_records)
        if not with_bytes:
            return Endpoint(tag=tag, records=pool.records)
        return Endpoint(tag=tag, records=pool.records, k_source=pool.k_source, v_source=pool.v_source)
