"""What the model hands over to be cached, held against what lies in the pool behind its forward.

TAIL seals what lies there. Where the forward itself has put it wrong, in another layer or slot, with K and V swapped or
not at all, or something else has written there in the same forward, that is sealed as if it were right. So the rows
that the model hands over are kept aside, hashed like those of the pool, and the seals become what was handed over.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kv_canary import ops
from kv_canary.constants import OWNER_BITS, STEP_MASK, WRITER_WORD
from kv_canary.errors import must_be
from kv_canary.runtime.context import CanaryContext
from kv_canary.runtime.pools import BufferGroup, KvPool
from kv_canary.runtime.seals import SEAL_COUNTS, verify_sealed
from kv_canary.runtime.summary import WriteFacts
from kv_canary.specs.structures import Endpoint, KvSource

# Tokens of a forward that are kept aside, at most: the first ones.
MOST_TOKENS = 1024


class HandedOver:
    """Keeps what forwards hand over, for the pools that are sealed; nothing where `check_writes` is off.

    Args:
        context: of the canary.
    """

    def __init__(self, context: CanaryContext) -> None:
        self._context = context
        self.is_on = context.config.check_writes
        tokens = min(context.limits.max_tokens, MOST_TOKENS)
        pools = [pool for pool in context.pools if pool.seals is not None] if self.is_on else []
        self._kept = {pool: _Kept(pool, tokens) for pool in pools}
        # Of the forward under way: what a layer's mark must be.
        self._forward = torch.zeros(1, dtype=torch.int64, device=context.device)
        self._checked = torch.zeros(SEAL_COUNTS, dtype=torch.int64, device=context.device)
        self._partly = torch.zeros(1, dtype=torch.int64, device=context.device)

    @property
    def facts(self) -> WriteFacts | None:
        """What was checked so far; None where nothing is. Waits for the device."""
        if not self.is_on:
            return None
        launches, slots, _, differ = self._checked.tolist()
        return WriteFacts(forwards=launches, slots=slots, differ=differ, unknown=int(self._partly))

    def forget_counts(self) -> None:
        """Count from here on: what was launched on nothing has held no forward's writes against anything."""
        for counts in (self._checked, self._partly):
            counts.zero_()

    def begin(self) -> None:
        """Take in that a forward begins: nothing has been handed over in it. On its stream; in a graph too."""
        if self.is_on:
            self._forward.add_(1)

    def take(self, pool: KvPool, layer: int, k: torch.Tensor | None, v: torch.Tensor | None) -> bool:
        """Keep the rows of K and V that the model hands over for a layer; return whether there was room for any.

        On the stream of the forward, before what it hands over is written; in a graph too.

        Args:
            pool: where it is to be written.
            layer: which of the pool's sources' it is.
            k, v: [tokens, ...] rows in the order of the forward's new tokens, of the bytes that the pool keeps of each;
                rows behind them are padding. None: of a half that the pool has not got.

        Raises:
            ValueError: there is no such layer, or rows have other bytes than the pool.
        """
        kept = self._kept.get(pool)
        if kept is None:
            return False
        for half, rows in (("k", k), ("v", v)):
            source = kept.sources[half]
            if source is None or rows is None:
                if source is not None:
                    raise ValueError(must_be("handed", half, "given", "None"))
                continue
            if not 0 <= layer < len(source.layers):
                raise ValueError(must_be("handed", "layer", f"in [0, {len(source.layers)})", str(layer)))
            size = rows[:1].numel() * rows.element_size()
            if len(rows) and size != source.bytes_per_token:
                raise ValueError(must_be("handed", half, f"rows of {source.bytes_per_token} bytes", str(size)))
            count = min(len(rows), kept.tokens)
            there = source.layers[layer][:count].view(rows.dtype).view(count, *rows.shape[1:])
            there.copy_(rows[:count])
        kept.marks[layer].copy_(self._forward[0])
        return True

    def check(self, group: BufferGroup, slots: torch.Tensor, step: torch.Tensor, *, count: torch.Tensor) -> None:
        """Let the seals of what a forward has written be of what was handed over, and hold the pool against them.

        Behind `seal_written`; where not all layers were handed over in this very forward, nothing is done.

        Args:
            group: that the forward has written.
            slots: int64 [tokens] that it was to write to, and padding behind them, which may be any slots.
            step: its number, int64 [1].
            count: int64 [1] on the device, how many of them are none.
        """
        context, pool = self._context, group.pool
        kept, seals = self._kept.get(pool), pool.seals
        if kept is None or seals is None or not len(slots):
            return
        slots = slots[: kept.tokens]
        given = kept.slots[: len(slots)]
        ops.seal(
            slots=given,
            span=seals.everything,
            endpoint=kept.endpoint(group),
            layers_per_band=seals.layers_per_band,
            seed=seals.seed,
            written_in=None,
            seals=kept.words,
            backend=context.backend,
        )
        whole = (kept.marks == self._forward).all()
        self._partly += ~whole
        inside = (given <= count) & (slots > 0) & (slots < pool.num_slots)
        there = torch.where(inside, slots, 0)
        records, words = pool.records[there], seals.words[there]
        writer = records[:, WRITER_WORD]
        of_step = ((writer >> OWNER_BITS) & STEP_MASK) == (step & STEP_MASK)
        taken = whole & inside & of_step & (words[:, 0] == writer) & (words[:, 1] != 0)
        there = torch.where(taken, there, 0)
        handed = torch.cat([words[:, :1], kept.words[given, 1 : words.shape[1]]], dim=1)
        # Slot 0 has no seal, so that it can stand for all that is not taken.
        seals.words[there] = torch.where(taken[:, None], handed, 0)
        verify_sealed(context, group, slots=there, span=None, checked=self._checked, tag=group.tail_tag)


class _Kept:
    """Rows that were handed over for a pool, as if they were a pool of their own: token i is slot i + 1.

    Attributes:
        sources: by half; None for one that the pool has not got.
        marks: int64 [layers], the number of the forward that each was handed over in.
        words: their seals.
        slots: int64 [tokens].
    """

    def __init__(self, pool: KvPool, tokens: int) -> None:
        device = pool.records.device
        self.tokens = tokens
        self.sources = {"k": _like(pool.k_source, tokens, device), "v": _like(pool.v_source, tokens, device)}
        layers = max(len(source.layers) for source in self.sources.values() if source is not None)
        self.marks = torch.zeros(layers, dtype=torch.int64, device=device)
        self.slots = torch.arange(1, tokens + 1, device=device)
        # Of nobody, but there.
        self._records = torch.ones(tokens + 1, pool.records.shape[1], dtype=torch.int64, device=device)
        words = 0 if pool.seals is None else pool.seals.words.shape[1]
        self.words = torch.zeros(tokens + 1, words, dtype=torch.int64, device=device)
        self._endpoints: dict[str, Endpoint] = {}

    def endpoint(self, group: BufferGroup) -> Endpoint:
        """Return the launch site of a group's TAIL over these rows; the same one every time."""
        if group.name not in self._endpoints:
            self._endpoints[group.name] = Endpoint(
                tag=group.tail_tag, records=self._records, k_source=self.sources["k"], v_source=self.sources["v"]
            )
        return self._endpoints[group.name]


def _like(source: KvSource | None, tokens: int, device: torch.device) -> KvSource | None:
    """Return rows for so many tokens, of as many layers and bytes as a pool's."""
    if source is None:
        return None
    rows: Sequence[torch.Tensor] = torch.zeros(
        len(source.layers), tokens, source.bytes_per_token, dtype=torch.uint8, device=device
    ).unbind()
    return KvSource(layers=tuple(rows), page_size=1, bytes_per_token=source.bytes_per_token, slot_bias=1)
