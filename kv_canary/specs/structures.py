"""The structures that ops take: plans, endpoints, KV sources and the violation log.

A tensor field carries its `TensorSpec`, so that validation, allocation and difftest all read one declaration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from kv_canary.constants import HEAD_OF_CHAIN, RECORD_WORDS, RESOLVED_WORDS, RUN_ENTRIES, RUN_WORDS, UNCHECKED, Tag
from kv_canary.errors import must_be
from kv_canary.specs.interface import ROW, SLOT, TensorSpec, allocate_tensor
from kv_canary.specs.violation_row import MOST_GROUPS, VIOLATION_WORDS, ViolationRow, site_of

# A buffer of slot records.
RECORDS = TensorSpec(
    dtype=torch.int64,
    shape=("num_slots", RECORD_WORDS),
    row_strided=True,
    row_multiple=RECORD_WORDS,
    columns=("IDENTITY", "CHAIN", "KV", "WRITER"),
    doc="slot records",
)


def _tensor(dtype: torch.dtype, *shape: Any, doc: str, **options: Any) -> Any:
    return field(metadata={"spec": TensorSpec(dtype=dtype, shape=shape, doc=doc, **options)})


class _Allocates:
    """Adds `allocate(device=..., <size>=...)` to a structure whose fields are all tensors."""

    @classmethod
    def allocate(cls, *, device: torch.device | str = "cpu", **sizes: int) -> Self:
        """Allocate every field, zeroed, on `device`; sizes are given by the names used in the field shapes."""
        fields = cls.__dataclass_fields__  # type: ignore[attr-defined]
        return cls(**{name: allocate_tensor(f.metadata["spec"], sizes, device) for name, f in fields.items()})


@dataclass(frozen=True, kw_only=True, eq=False)
class VerifyPlan(_Allocates):
    """The records to verify, entry by entry; allocate with `verify_cap=`. The first `num_valid` entries count."""

    slots: torch.Tensor = _tensor(torch.int64, "verify_cap", index_of=SLOT, doc="slot of the entry, or BAD_SLOT")
    prev_slots: torch.Tensor = _tensor(
        torch.int64, "verify_cap", index_of=SLOT, doc="slot of the position before, or a slot code"
    )
    positions: torch.Tensor = _tensor(torch.int64, "verify_cap", doc="expected position")
    tokens: torch.Tensor = _tensor(torch.int64, "verify_cap", doc="expected token, or -1: not checked")
    rows: torch.Tensor = _tensor(
        torch.int32, "verify_cap", index_of=ROW, doc="row of the request that relies on the entry"
    )
    num_valid: torch.Tensor = _tensor(torch.int32, 1, doc="entries written: min(num_requested, verify_cap)")
    num_requested: torch.Tensor = _tensor(torch.int64, 1, doc="entries the batch asked for")


@dataclass(frozen=True, kw_only=True, eq=False)
class ResolvedSlots(_Allocates):
    """The slots of the cached positions of a batch; allocate with `entry_cap=`. The first `num_valid` count.

    Entries stand in runs: entries of one request at consecutive positions, in one block of RUN_ENTRIES. One that
    begins a run says so by ~position, and `runs` holds the rest about it; the others have the request of the one before
    and, as slot of the position before, its slot. What does not fit 32 bits is held as the largest number that does.
    """

    entries: torch.Tensor = _tensor(
        torch.int32,
        "entry_cap",
        RESOLVED_WORDS,
        index_of={"num_slots": 0},
        columns=("slot", "position"),
        doc="slot, position; ~position where a run begins",
    )
    runs: torch.Tensor = _tensor(
        torch.int32,
        "entry_cap",
        RUN_WORDS,
        index_of={"num_slots": 0, "bs": 1},
        columns=("slot of the position before", "request"),
        doc="where a run begins: slot of the position before, request",
    )
    num_valid: torch.Tensor = _tensor(torch.int32, 1, doc="entries written: min(num_requested, entry_cap)")
    num_requested: torch.Tensor = _tensor(torch.int64, 1, doc="entries the batch asked for")

    def unfold(
        self, first: int = 0, end: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return slot, slot of the position before, position and request of entries [first, end), all int64.

        Whatever the words hold: the first entry of every block begins a run, also where it does not say so.
        """
        start = first - first % RUN_ENTRIES
        entries, runs = self.entries[start:end].long(), self.runs[start:end].long()
        slot, position = entries.unbind(dim=1)
        at = torch.arange(len(entries), device=entries.device)
        begins = (position < 0) | (at % RUN_ENTRIES == 0)
        before = slot.roll(1)
        # A slot code of another meaning, which no table gives.
        before = torch.where(before == HEAD_OF_CHAIN, UNCHECKED, before)
        previous = torch.where(begins, runs[:, 0], before)
        request = runs[torch.where(begins, at, 0).cummax(dim=0).values, 1]
        found = slot, previous, torch.where(position < 0, ~position, position), request
        slot, previous, position, request = (words[first - start :] for words in found)
        return slot, previous, position, request


@dataclass(frozen=True, kw_only=True, eq=False)
class WritePlan(_Allocates):
    """The segment of the flat inputs that each request writes; allocate with `write_cap=`."""

    rows: torch.Tensor = _tensor(torch.int64, "write_cap", index_of=ROW, doc="row, 0 for padding")
    owners: torch.Tensor = _tensor(torch.int64, "write_cap", doc="serial number of the request")
    offsets: torch.Tensor = _tensor(torch.int64, "write_cap+1", doc="segment r is [offsets[r], offsets[r+1])")
    prefix_lens: torch.Tensor = _tensor(torch.int64, "write_cap", doc="tokens cached before this forward")
    seed_slots: torch.Tensor = _tensor(
        torch.int64, "write_cap", index_of=SLOT, doc="slot of the last cached token, or a slot code"
    )
    num_requests: torch.Tensor = _tensor(torch.int32, 1, doc="requests in the plan, padding counted")

    def first(self, count: int) -> WritePlan:
        """Return the plan of the first `count` requests, for which it must have been made; views."""
        return WritePlan(
            rows=self.rows[:count],
            owners=self.owners[:count],
            offsets=self.offsets[: count + 1],
            prefix_lens=self.prefix_lens[:count],
            seed_slots=self.seed_slots[:count],
            num_requests=self.num_requests,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ViolationLog(_Allocates):
    """The log of violations; allocate with `ring_cap=`. Rows past the capacity are dropped, `count` counts them all."""

    ring: torch.Tensor = _tensor(
        torch.int64, "ring_cap", VIOLATION_WORDS, columns=ViolationRow._fields, doc="violation rows"
    )
    count: torch.Tensor = _tensor(torch.int64, 1, doc="violations ever found")


@dataclass(frozen=True, kw_only=True, eq=False)
class KvSource:
    """The K or the V bytes of a pool, as views: what a fingerprint is taken of.

    With e = slot - slot_bias, a slot's token lies in row e // page_size of every layer, at byte
    `offset_bytes + (e % page_size) * token_stride_bytes` of that row. A token at position p is covered in layer
    p % n, window (p // n) % num_windows; window w covers bytes [w * read_bytes, (w + 1) * read_bytes) of the
    token, the last one ending at bytes_per_token.

    Args:
        layers: one view per layer, `[num_rows, ...]`, any dtype, contiguous inside a row, all of one geometry.
            Views, not copies: the table of their addresses is built here, once, on their device.
        page_size: tokens in a row.
        bytes_per_token: bytes of one token in one layer.
        read_bytes: bytes fingerprinted of a token; `bytes_per_token` or more covers a whole layer.
        offset_bytes: bytes before the first token of a row.
        slot_bias: subtracted from a slot first; 1 for an engine whose slot 0 holds a real token.
        token_stride_bytes: bytes from a token of a row to the next; 0: `bytes_per_token`. More where something else
            lies between tokens, as V between the K of a layout that keeps both of a head together.

    Raises:
        TypeError, ValueError: naming the field, what it must be and what came.
    """

    layers: tuple[torch.Tensor, ...]
    page_size: int
    bytes_per_token: int
    read_bytes: int = 16
    offset_bytes: int = 0
    slot_bias: int = 0
    token_stride_bytes: int = 0
    table: torch.Tensor = field(init=False, repr=False)
    alignment: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, low in (
            ("page_size", 1),
            ("bytes_per_token", 1),
            ("read_bytes", 1),
            ("offset_bytes", 0),
            ("slot_bias", 0),
            ("token_stride_bytes", 0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(must_be("KvSource", name, "an int", type(value).__name__))
            if value < low:
                raise ValueError(must_be("KvSource", name, f"at least {low}", str(value)))
        if not isinstance(self.layers, tuple | list) or not all(isinstance(x, torch.Tensor) for x in self.layers):
            raise TypeError(must_be("KvSource", "layers", "a tuple of tensors", type(self.layers).__name__))
        if not self.layers:
            raise ValueError(must_be("KvSource", "layers", "at least one tensor", "none"))
        object.__setattr__(self, "layers", tuple(self.layers))
        first = self.layers[0]
        if first.dim() < 1:
            raise ValueError(must_be("KvSource", "layers[0]", "of shape [num_rows, ...]", "a scalar"))
        geometry = (first.shape, first.stride(), first.dtype, first.device)
        for i, layer in enumerate(self.layers):
            if (layer.shape, layer.stride(), layer.dtype, layer.device) != geometry:
                expected = f"like layers[0] ({_describe(first)})"
                raise ValueError(must_be("KvSource", f"layers[{i}]", expected, _describe(layer)))
        if first.numel() and not first[0].is_contiguous():
            raise ValueError(must_be("KvSource", "layers[0]", "contiguous inside a row", f"strides {first.stride()}"))
        if not self.token_stride_bytes:
            object.__setattr__(self, "token_stride_bytes", self.bytes_per_token)
        if self.token_stride_bytes < self.bytes_per_token:
            expected = f"at least bytes_per_token ({self.bytes_per_token}), or 0"
            raise ValueError(must_be("KvSource", "token_stride_bytes", expected, str(self.token_stride_bytes)))
        needed = self.offset_bytes + (self.page_size - 1) * self.token_stride_bytes + self.bytes_per_token
        if needed > self.row_bytes:
            expected = f"at least {needed} bytes a row (offset_bytes, page_size tokens and what lies between them)"
            raise ValueError(must_be("KvSource", "layers[0]", expected, f"{self.row_bytes}"))
        addresses = [layer.data_ptr() for layer in self.layers]
        object.__setattr__(self, "table", torch.tensor(addresses, dtype=torch.int64, device=first.device))
        # What every fingerprinted word is aligned to, 16 bytes at most.
        numbers = [*addresses, self.row_stride_bytes, self.offset_bytes, self.bytes_per_token, self.token_stride_bytes]
        if self.num_windows > 1:
            numbers.append(self.read_bytes)
        object.__setattr__(self, "alignment", math.gcd(16, *numbers))

    @property
    def device(self) -> torch.device:
        return self.layers[0].device

    @property
    def num_rows(self) -> int:
        return self.layers[0].shape[0]

    @property
    def row_bytes(self) -> int:
        """Bytes inside one row."""
        return math.prod(self.layers[0].shape[1:]) * self.layers[0].element_size()

    @property
    def row_stride_bytes(self) -> int:
        """Bytes from one row to the next."""
        return self.layers[0].stride(0) * self.layers[0].element_size()

    @property
    def num_windows(self) -> int:
        return -(-self.bytes_per_token // self.read_bytes)

    def coverage(self, position: int) -> tuple[int, int, int]:
        """Return (layer, first byte, end byte) that a token at `position` is fingerprinted in."""
        layer = position % len(self.layers)
        start = (position // len(self.layers)) % self.num_windows * self.read_bytes
        return layer, start, min(start + self.read_bytes, self.bytes_per_token)


@dataclass(frozen=True, kw_only=True, eq=False)
class Endpoint:
    """One launch site: its tag, the records it works on and the K and V bytes they stand for.

    Args:
        tag: see `Tag`.
        records: of the pool.
        k_source, v_source: its bytes; None leaves that half unchecked.
        k_scales, v_scales: scales of quantised K and V that lie in buffers of their own, with as many layers; seals
            are of them, too.
        group: number of the buffer group, from 1 on, for reports; 0: none is told.
    """

    tag: int
    records: torch.Tensor = field(metadata={"spec": RECORDS})
    k_source: KvSource | None = None
    v_source: KvSource | None = None
    k_scales: KvSource | None = None
    v_scales: KvSource | None = None
    group: int = 0

    def __post_init__(self) -> None:
        for name in ("tag", "group"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                kind = "a Tag" if name == "tag" else "an int"
                raise TypeError(must_be("Endpoint", name, kind, type(value).__name__))
        if not 0 <= self.group <= MOST_GROUPS:
            raise ValueError(must_be("Endpoint", "group", f"in [0, {MOST_GROUPS}]", str(self.group)))
        if not 0 <= self.tag < len(Tag):
            raise ValueError(must_be("Endpoint", "tag", f"one of {[int(t) for t in Tag]}", str(self.tag)))
        for name in ("k_source", "v_source", "k_scales", "v_scales"):
            source = getattr(self, name)
            if source is not None and not isinstance(source, KvSource):
                raise TypeError(must_be("Endpoint", name, "a KvSource or None", type(source).__name__))
        for name, scales, source in (
            ("k_scales", self.k_scales, self.k_source),
            ("v_scales", self.v_scales, self.v_source),
        ):
            layers = 0 if source is None else len(source.layers)
            if scales is not None and len(scales.layers) != layers:
                expected = f"of {layers} layers, as its source is" if layers else "None where there is no source"
                raise ValueError(must_be("Endpoint", name, expected, f"{len(scales.layers)} layers"))

    @property
    def site(self) -> int:
        """Tag and group in one word, as violation rows have them."""
        return site_of(self.tag, self.group)


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} strides {tensor.stride()} on {tensor.device}"
