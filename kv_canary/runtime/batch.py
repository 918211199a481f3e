"""One forward, as the engine says what it runs, and as those see it that are shown it when it is over."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from kv_canary.runtime.composition import BatchRequests, ForwardRequest, Int64s
from kv_canary.runtime.context import CanaryContext
from kv_canary.runtime.pools import BufferGroup
from kv_canary.specs.structures import WritePlan


@dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """One forward, as the engine is about to run it. The flat tensors may be on any device, int32 or int64.

    Args:
        requests: in the order of the flat inputs; those of engines that do it often are `BatchRequests`.
        input_ids: [tokens] the model is given; None where they are known at HEAD only.
        positions: [tokens] the model is given; None likewise.
        out_slots: [tokens] per group name: the slot each token's KV goes to, 0 where it is discarded.
        tables: int32 [rows, pages] per group name: the page of each cached position of a row, by its number, as
            `BufferGroup.page_size` says; a page of one slot is the slot.
        expected_input_ids: [tokens] that the model should be given, for WRITE_TOKEN; -1 where that is not known. None:
            the requests' own tokens where `CanaryConfig.check_inputs` is on, else not checked.
        check_positions: whether positions must continue the prefix; not so in a warm-up.
        rows, lengths: [requests] on the device, the row and the length (new tokens included) of each request as the
            attention backend is given them, for BATCH; None: not checked. Lengths may be given alone.
        is_given_at_tail: whether `tail` may be told where the model has read all of these; they are not copied before.
    """

    requests: Sequence[ForwardRequest]
    input_ids: torch.Tensor | None
    positions: torch.Tensor | None
    out_slots: Mapping[str, torch.Tensor]
    tables: Mapping[str, torch.Tensor]
    expected_input_ids: torch.Tensor | None = None
    check_positions: bool = True
    rows: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    is_given_at_tail: bool = False

    @functools.cached_property
    def arrays(self) -> BatchRequests:
        """The requests in arrays."""
        return BatchRequests.of(self.requests)


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelInputs:
    """What the model is given, where it reads it: the tensors of a CUDA graph, say, once they are filled.

    Args:
        input_ids, positions: [tokens].
        out_slots: [tokens] per group name.
        rows, lengths: [requests], the row of each request and its length with the new tokens, as the attention backend
            is given them; None: not checked. Lengths may be given alone.
        stays: whether all of it lies there at every forward: then launches read it in place, but for tensors of int32,
            which they copy; out_slots of int32 are copied before. To be made once, and given at every forward.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    out_slots: Mapping[str, torch.Tensor]
    rows: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    stays: bool = False

    @functools.cached_property
    def flat(self) -> dict[str, torch.Tensor]:
        """Every tensor by its name."""
        named = {"input_ids": self.input_ids, "positions": self.positions, "rows": self.rows, "lengths": self.lengths}
        named |= {f"out_slots[{name}]": slots for name, slots in self.out_slots.items()}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @functools.cached_property
    def is_in_place(self) -> bool:
        """Whether launches can read, or copy, all of it where it is."""
        is_wide = all(slots.dtype == torch.int64 for slots in self.out_slots.values())
        return self.stays and is_wide and all(t.is_contiguous() for t in self.flat.values())

    @functools.cached_property
    def layout(self) -> tuple[tuple[str, int, int, torch.dtype], ...]:
        """What there is, where, how much of it, and of which kind: views of one buffer may differ in length alone."""
        return tuple((name, t.data_ptr(), len(t), t.dtype) for name, t in self.flat.items())

    @functools.cached_property
    def room(self) -> tuple[int, int]:
        """How many requests and how many tokens it has room for."""
        of_requests = [len(t) for t in (self.rows, self.lengths) if t is not None]
        tokens = min(len(t) for t in (self.input_ids, self.positions, *self.out_slots.values()))
        return min(of_requests, default=tokens), tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class VerifiedEntries:
    """What HEAD verified, entry by entry.

    Args:
        slots, positions, rows: int64 [entries].
        valid: bool [entries]; the others are arbitrary.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    valid: torch.Tensor


class WatchedForward(Protocol):
    """The canary around a forward, as observers and ranks see it when the forward is over.

    Attributes:
        name: of the forward.
        inner: whether it ran inside a step, on tokens that may yet be rejected.
        groups: those that it reads and writes.
        context: of the canary.
    """

    name: str
    inner: bool
    groups: tuple[BufferGroup, ...]
    context: CanaryContext

    def verified(self, group: str, *, first: int = 0, end: int | None = None) -> VerifiedEntries:
        """Return entries [first, end) of what HEAD verified last in a group; good until its next HEAD."""

    @property
    def entry_capacities(self) -> Mapping[str, int]:
        """Entries that each group has room for now, by name."""

    @property
    def write_plans(self) -> Mapping[str, WritePlan]:
        """The segments that HEAD planned last, by group name: static buffers, which its next HEAD fills anew."""

    @property
    def statuses(self) -> Sequence[tuple[str, int, int]]:
        """Of each group: its name, and the numbers of its status words: of the last plan, and of earlier ones."""

    @property
    def groups_of_statuses(self) -> Mapping[int, str]:
        """The names of the groups, by the numbers of the status words of their last plans."""

    @property
    def launches(self) -> Mapping[int, int]:
        """Launches of HEAD and TAIL together, by tag."""

    def abort(self) -> None:
        """Give up the forward; what it had found so far is kept."""


def relied_on(requests: BatchRequests, group: BufferGroup) -> int:
    """Return how many cached positions a forward of `requests` is about to read in `group`."""
    if requests.pending is None:
        return num_read(requests, group)
    return int((_read(requests, group) - requests.pending).clip(0).sum())


def _read(requests: BatchRequests, group: BufferGroup) -> Int64s:
    """Return how many positions of its prefix a forward reads in `group`, of each request."""
    return np.minimum(requests.prefix, group.window) if group.window else requests.prefix


def num_read(requests: BatchRequests, group: BufferGroup) -> int:
    """Return how many positions of all prefixes together a forward reads in `group`."""
    return int(_read(requests, group).sum()) if group.window else requests.num_cached
