"""KV pools and the groups of layers that read them.

A `KvPool` is memory: slots, their records, and the K and V bytes behind them. A `BufferGroup` is a way to read it: a
table of slots per row, and a window. Usually there is one group to a pool; engines whose attention types share one
pool have several.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kv_canary.constants import KV_WORD, RECORD_WORDS, WRITER_WORD, Tag
from kv_canary.errors import must_be
from kv_canary.specs.sealing import SEAL_HEADER_WORDS
from kv_canary.specs.structures import Endpoint, KvSource

# Of the bytes of K and V, what records and seals may take.
_SEALS_SHARE = 0.003


@dataclass(frozen=True, kw_only=True, eq=False)
class PoolSeals:
    """The seals of a pool: how fine they are, and where they lie.

    Args:
        words: int64 [slots, 1 + bands], see `specs/sealing.py`.
        layers_per_band: layers that one word is of.
        seed: of the hash.
        everything: int64 [2], the span of all there is.
        filler: int64 [slots] of nothing, that goes with the words where they are sent; see `kv_canary.transfer`.
    """

    words: torch.Tensor
    layers_per_band: int
    seed: int
    everything: torch.Tensor
    filler: torch.Tensor


class KvPool:
    """Slots, their records and their K/V bytes.

    Args:
        name: how reports call it.
        num_slots: slots that the engine can name, slot 0 (padding) included.
        k_source, v_source: the bytes; None leaves that half unchecked.
        first_slot: the lowest slot that the engine hands out; those below it are padding, as of a page that it keeps.
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
        first_slot: int = 1,
        extra_slots: int = 0,
        layer_names: tuple[str, ...] = (),
        device: torch.device | str,
    ) -> None:
        sizes = (("num_slots", num_slots, 1), ("first_slot", first_slot, 1), ("extra_slots", extra_slots, 0))
        for argument, value, low in sizes:
            if value < low:
                raise ValueError(must_be("KvPool", argument, f"at least {low}", str(value)))
        self.name = name
        self.num_slots, self.first_slot = num_slots, first_slot
        self.k_source, self.v_source = k_source, v_source
        self.layer_names = layer_names
        self.records = torch.zeros(num_slots + extra_slots, RECORD_WORDS, dtype=torch.int64, device=device)
        self.head_records: torch.Tensor | None = None
        self.seals: PoolSeals | None = None

    def inside(self, slots: torch.Tensor) -> torch.Tensor:
        """Return integers `slots` with 0, which has no record, for what the pool does not have."""
        return torch.where((slots > 0) & (slots < len(self.records)), slots, 0)

    def keep_seals(
        self, *, by_layer: bool, seed: int, layers_per_band: int | None = None, words: torch.Tensor | None = None
    ) -> None:
        """Keep seals, none of any slot yet; nothing is kept where there are no bytes.

        Args:
            by_layer: whether they tell layers apart, as far as records and seals stay below 0.3 % of K and V.
            seed: of the hash.
            layers_per_band: layers that one word is of, whatever that takes; None: as `by_layer` says.
            words: where they lie, of the right shape, zeroed; None: in memory of their own.
        """
        sources = [source for source in (self.k_source, self.v_source) if source is not None]
        if self.seals is not None or not sources:
            return
        layers = max(len(source.layers) for source in sources)
        token = sum(len(source.layers) * source.bytes_per_token for source in sources)
        room = int(_SEALS_SHARE * token) // 8 - RECORD_WORDS - SEAL_HEADER_WORDS
        per_band = -(-layers // max(1, min(room, layers))) if by_layer else layers
        if layers_per_band is not None:
            per_band = layers_per_band
        shape, device = (len(self.records), SEAL_HEADER_WORDS + -(-layers // per_band)), self.records.device
        self.seals = PoolSeals(
            words=torch.zeros(shape, dtype=torch.int64, device=device) if words is None else words,
            layers_per_band=per_band,
            seed=seed,
            everything=torch.tensor([0, (1 << 63) - 1], dtype=torch.int64, device=device),
            # Only a pool that may be sent has both records, which comes before this.
            filler=torch.zeros(0 if self.head_records is None else shape[0], dtype=torch.int64, device=device),
        )

    def take_seals(self, slots: torch.Tensor) -> torch.Tensor | None:
        """Return the seals of int64 `slots` for `put_seals`, zeroes where a slot has none; None where none are kept."""
        if self.seals is None:
            return None
        there = self.inside(slots)
        words, records = self.seals.words[there], self.records[there]
        sealed = (there > 0) & (words[:, 0] == records[:, WRITER_WORD]) & (words[:, 1] != 0)
        return torch.where(sealed[:, None], words, 0)

    def put_seals(self, slots: torch.Tensor, taken: torch.Tensor | None) -> None:
        """Let the records that int64 `slots` have now be sealed as others were: what `take_seals` returned of those."""
        if self.seals is None or taken is None:
            return
        there = self.inside(slots)
        records = self.records[there]
        sealed = (there > 0) & (taken[:, 1] != 0) & (records != 0).any(dim=1)
        words = torch.cat([records[:, WRITER_WORD, None], taken[:, 1:]], dim=1)
        # Slot 0 has no seal, so that all of them can be written.
        self.seals.words[there] = torch.where(sealed[:, None], words, 0)

    def drop_seals(self, slots: torch.Tensor) -> None:
        """Drop the seals of int64 `slots`, which may have been written to without a record."""
        if self.seals is not None:
            self.seals.words[self.inside(slots)] = 0

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
