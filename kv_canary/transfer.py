"""Handing a pool's KV and records to another process: what a prefill process sends, and how decode takes it in.

A pool that keeps two record buffers (`records="head_and_tail"`) is sent as one list of buffers, HEAD's records first
and TAIL's last, so that a transfer cut short is seen whichever end it lost. Its seals, where it keeps them, cross too,
and every byte that arrives is held against them. The sender has nothing else to do. The receiver compares geometries
once per sender, and lands every request before the first forward that uses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kv_canary.constants import ANCHOR, RECORD_WORDS, Tag
from kv_canary.errors import must_be
from kv_canary.hashing import mix
from kv_canary.output import logger
from kv_canary.runtime.aside import write_aside
from kv_canary.runtime.host import on_device
from kv_canary.runtime.pools import KvPool
from kv_canary.specs.structures import Endpoint, KvSource

if TYPE_CHECKING:
    from kv_canary.runtime.manager import CanaryManager

_RECORD_BYTES = 8 * RECORD_WORDS


@dataclass(frozen=True, kw_only=True, eq=False)
class TransferBuffer:
    """One entry of a transfer list: page p is `item_bytes` bytes at `address + p * stride_bytes`.

    Args:
        name: "HEAD", "SEALS", "K of <layer>", "V of <layer>", "FILLER" or "TAIL".
        pages: uint8 [num_pages, item_bytes], a view of the engine's memory. Page p holds the slots
            [p * page_size, (p + 1) * page_size), plus the `slot_bias` of the pool's sources.
    """

    name: str
    pages: torch.Tensor

    @property
    def address(self) -> int:
        return self.pages.data_ptr()

    @property
    def num_pages(self) -> int:
        return self.pages.shape[0]

    @property
    def item_bytes(self) -> int:
        """Bytes of one page."""
        return self.pages.shape[1]

    @property
    def stride_bytes(self) -> int:
        """Bytes from one page to the next: `item_bytes`, unless K and V take turns in memory."""
        return self.pages.stride(0)

    @property
    def num_bytes(self) -> int:
        """Bytes from the first page's first to the last page's last, as a transfer engine registers them."""
        return (self.num_pages - 1) * self.stride_bytes + self.item_bytes if self.num_pages else 0


@dataclass(frozen=True, kw_only=True)
class Landing:
    """The account of one landing, in slots.

    Args:
        received: stamped with the receiver's owner.
        cleared: of the received pages, past the received length.
        uncovered: whose fingerprints were taken on arrival, so that they say nothing of the way here.
    """

    received: int
    cleared: int
    uncovered: int


def buffers(pool: KvPool, *, page_size: int | None = None) -> tuple[TransferBuffer, ...]:
    """Return the pool's transfer list: HEAD's records, K layer by layer, V layer by layer, TAIL's records.

    Where the pool keeps seals, they come behind HEAD's records; before TAIL's is then a buffer that says nothing, so
    that both halves of a list of K and V stay equally long.

    Args:
        pool: of a canary with `records="head_and_tail"`.
        page_size: tokens in a page of the transfer; None: in a row of the pool's sources.

    Raises:
        ValueError: the pool keeps one record only or has no sources, or its memory does not divide into such pages.
    """
    if pool.head_records is None:
        raise ValueError(must_be("transfer", "pool", 'of a canary with records="head_and_tail"', f"{pool.name}: one"))
    halves = [(half, s) for half, s in (("K", pool.k_source), ("V", pool.v_source)) if s is not None]
    biases = {source.slot_bias for _, source in halves}
    if len(biases) != 1:
        raise ValueError(must_be("transfer", "slot_bias", "the same for K and V, one of which is there", str(biases)))
    size = max(source.page_size for _, source in halves) if page_size is None else page_size
    layers = [
        (f"{half} of {pool.layer_names[i] if i < len(pool.layer_names) else f'layer {i}'}", _pages(source, i, size))
        for half, source in halves
        for i in range(len(source.layers))
    ]
    [bias] = biases
    count = min((pool.num_slots - bias) // size, *(len(pages) for _, pages in layers))
    front, back = [("HEAD", pool.head_records)], [("TAIL", pool.records)]
    if pool.seals is not None:
        front.append(("SEALS", pool.seals.words))
        back.insert(0, ("FILLER", pool.seals.filler))
    before, behind = (
        [(name, words[bias : bias + count * size].view(torch.uint8).view(count, -1)) for name, words in part]
        for part in (front, back)
    )
    entries = [*before, *layers, *behind]
    return tuple(TransferBuffer(name=name, pages=pages[:count]) for name, pages in entries)


def geometry_word(pool: KvPool) -> int:
    """Return 64 bits, unsigned, that name which bytes of each token the pool's fingerprints and seals cover.

    The same in every process and version of Python. Page sizes and offsets play no part: a token's fingerprint is the
    same wherever the token lies.
    """
    word = ANCHOR
    for source in (pool.k_source, pool.v_source):
        numbers = (0, 0, 0, 0)
        if source is not None:
            read_bytes = min(source.read_bytes, source.bytes_per_token)
            numbers = (len(source.layers), source.num_windows, source.bytes_per_token, read_bytes)
        for number in numbers:
            word = mix(word ^ number)
    return word if pool.seals is None else mix(word ^ pool.seals.layers_per_band)


def is_of_the_canary(buffer: TransferBuffer) -> bool:
    """Whether an entry of a transfer list holds what is the canary's own, and no K or V."""
    return buffer.name in ("HEAD", "SEALS", "FILLER", "TAIL")


def compare_geometry(pool: KvPool, theirs: int) -> bool:
    """Return whether fingerprints taken by the sender hold for `pool`; where they do not, say so in the log.

    Args:
        pool: the receiver's.
        theirs: the sender's `geometry_word`. To be compared once per sender, not per request.
    """
    mine = geometry_word(pool)
    if mine != theirs:
        logger.warning(
            "kv-canary: pool %s: the sender's fingerprints cover other bytes (geometry %016x, here %016x): they are "
            "taken anew on arrival, and damage to K and V on the way is not covered",
            pool.name,
            theirs,
            mine,
        )
    return mine == theirs


def land(
    manager: CanaryManager,
    pool: KvPool,
    *,
    slots: torch.Tensor,
    length: int,
    owner: int,
    same_geometry: bool = True,
) -> Landing:
    """Take received pages over: stamp the request's owner on their records, and clear those past its length.

    To be called once the bytes have arrived, on the stream of the forwards, before the first forward that uses the
    slots. The sender's stamp means nothing here, and a page's last owner may have left records past the length; either
    would look like a second owner. Records that were retired, or never written, are cleared: what did not arrive is
    then reported as never written. Bytes that differ from the seals that came with them are reported with the findings
    of the next step (`CanaryConfig.admission`).

    Args:
        manager: the receiver's canary.
        pool: one of its pools.
        slots: int64 [n] every slot of the received pages, in the order of positions; 0 where one is not resident.
        length: how many of them, from the front, hold the request's tokens.
        owner: the request's serial number here.
        same_geometry: what `compare_geometry` said. If not, fingerprints are taken from what lies here now.

    Raises:
        TypeError, ValueError: naming the argument, what it must be and what came.
    """
    if pool not in manager.pools:
        names = ", ".join(p.name for p in manager.pools)
        raise ValueError(must_be("land", "pool", f"one of the manager's ({names})", pool.name))
    if slots.dtype != torch.int64:
        raise TypeError(must_be("land", "slots", "of dtype torch.int64", str(slots.dtype)))
    if slots.dim() != 1:
        raise ValueError(must_be("land", "slots", "of shape [n]", str(list(slots.shape))))
    if not 0 <= length <= len(slots):
        raise ValueError(must_be("land", "length", f"in [0, {len(slots)}], the number of slots", str(length)))
    slots = on_device(slots, manager.device)
    # Moved onto themselves; out of slot 0, which has no record, comes a cleared one.
    sources = slots.clone()
    sources[length:] = 0
    manager.move(pool, sources, slots, owner=owner)
    if same_geometry:
        # What came with seals is held against them.
        manager.arrived(pool, slots[:length], pool.take_seals(slots[:length]))
    else:
        _fingerprint_anew(manager, pool, slots[:length])
        pool.drop_seals(slots[:length])
    uncovered = 0 if same_geometry else length
    manager.accounts.uncovered += uncovered
    return Landing(received=length, cleared=len(slots) - length, uncovered=uncovered)


def _pages(source: KvSource, layer: int, page_size: int) -> torch.Tensor:
    """Return uint8 [pages, bytes of a page], a view of one layer."""
    rows, rest = divmod(page_size, source.page_size)
    if rest or rows < 1:
        expected = f"a multiple of {source.page_size}, the tokens in a row of the sources"
        raise ValueError(must_be("transfer", "page_size", expected, str(page_size)))
    if rows > 1 and source.row_stride_bytes != source.row_bytes:
        expected = f"{source.page_size}, because the rows of the sources lie apart in memory"
        raise ValueError(must_be("transfer", "page_size", expected, str(page_size)))
    tensor = source.layers[layer]
    flat = tensor.flatten(1) if tensor.dim() > 1 else tensor[:, None]
    in_rows = flat.view(torch.uint8)
    count = source.num_rows // rows
    return in_rows if rows == 1 else in_rows[: count * rows].view(count, rows * source.row_bytes)


def _fingerprint_anew(manager: CanaryManager, pool: KvPool, slots: torch.Tensor) -> None:
    """Take the KV words of the records in `slots` from the bytes that lie here.

    A write is what takes fingerprints, but it stores whole records. So everything is put back but the KV word. Waits
    for nothing, and no record is seen half done by what follows on the stream.
    """
    records = pool.records
    # A bad slot stands for the padding slot, whose record is zero and stays so.
    slots = torch.where((slots > 0) & (slots < len(records)), slots, 0)
    arrived = records[slots]
    write_aside(
        manager.context,
        Endpoint(tag=Tag.TAIL_FULL, records=records, k_source=pool.k_source, v_source=pool.v_source),
        tokens=torch.zeros_like(slots),
        # Which bytes a fingerprint covers goes by the position that the record itself names.
        positions=(arrived[:, 0] >> 32) & 0xFFFFFFFF,
        slots=slots,
    )
    written = (arrived != 0).any(dim=1)
    arrived[:, 2] = torch.where(written, records[slots, 2], 0)
    records[slots] = arrived
