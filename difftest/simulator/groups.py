"""The pools of an engine: how positions map to slots under full, windowed and ring attention."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kv_canary.difftest.simulator.allocator import PageAllocator
from kv_canary.difftest.simulator.config import GroupConfig, Kind
from kv_canary.difftest.simulator.requests import Request
from kv_canary.errors import must_be
from kv_canary.specs.structures import KvSource


class Group:
    """A group whose slots are those of the pages: full attention, or a window over the same pool."""

    def __init__(self, config: GroupConfig, *, pages: PageAllocator, table: torch.Tensor) -> None:
        self.config, self.pages, self.table = config, pages, table
        self.lut: torch.Tensor | None = None

    @property
    def name(self) -> Kind:
        return self.config.kind

    @property
    def sources(self) -> list[KvSource]:
        return [s for s in (self.config.k_source, self.config.v_source) if s is not None]

    def can_map(self, count: int) -> bool:
        """Whether `count` more pages have a place here."""
        return True

    def map_pages(self, pages: Sequence[int]) -> None:
        """Give new pages their place here."""

    def unmap_pages(self, pages: Sequence[int]) -> list[int]:
        """Take back the places of freed pages, and return their slots."""
        return self.pages.slots(pages)

    def page_slots(self, pages: Sequence[int]) -> list[int]:
        """Return the slots of `pages`."""
        return self.pages.slots(pages)

    def out_slots(self, request: Request, start: int, end: int) -> list[int]:
        """Return where the tokens at [start, end) go."""
        return self.page_slots(request.pages)[start:end]


class LutGroup(Group):
    """A pool of its own for the pages that some window still reads, behind a table from full slots to its slots."""

    def __init__(
        self, config: GroupConfig, *, pages: PageAllocator, table: torch.Tensor, rng: np.random.Generator
    ) -> None:
        super().__init__(config, pages=pages, table=table)
        size = pages.page_size
        self.own = PageAllocator(first_slot=size, num_pages=config.num_slots // size - 1, page_size=size, rng=rng)
        self.resident: dict[int, int] = {}
        self.lookup = torch.zeros(pages.first_slot + pages.num_pages * size + 1, dtype=torch.int64)
        self.lut = self.lookup

    def can_map(self, count: int) -> bool:
        return self.own.num_free >= count

    def map_pages(self, pages: Sequence[int]) -> None:
        self.unmap_pages(pages)
        for page in pages:
            [self.resident[page]] = self.own.allocate(1)
            self.lookup[self.pages.slots([page])] = torch.tensor(self.own.slots([self.resident[page]]))

    def unmap_pages(self, pages: Sequence[int]) -> list[int]:
        here = [p for p in pages if p in self.resident]
        slots = self.page_slots(here)
        self.lookup[self.pages.slots(here)] = 0
        self.own.release(self.resident.pop(p) for p in here)
        return slots

    def rename(self, old: Sequence[int], new: Sequence[int]) -> None:
        """Give the places of the pages `old` to the free pages `new`."""
        slots = self.lookup[self.pages.slots(old)]
        self.lookup[self.pages.slots(old)] = 0
        self.lookup[self.pages.slots(new)] = slots
        for before, after in zip(old, new, strict=True):
            if before in self.resident:
                self.resident[after] = self.resident.pop(before)

    def page_slots(self, pages: Sequence[int]) -> list[int]:
        slots: list[int] = self.lookup[self.pages.slots(pages)].tolist()
        return slots

    def check_integrity(self) -> None:
        """Check the table against the pages that are resident.

        Raises:
            RuntimeError: they contradict each other.
        """
        expected = torch.zeros_like(self.lookup)
        for page, own in self.resident.items():
            expected[self.pages.slots([page])] = torch.tensor(self.own.slots([own]))
        if not torch.equal(self.lookup, expected) or not set(self.resident) <= set(self.pages.holders):
            raise RuntimeError(must_be("difftest engine", "lut", "what is resident", str(self.lookup.tolist())))
        if sorted(self.own.holders) != sorted(self.resident.values()):
            raise RuntimeError(must_be("difftest engine", "resident", "held once", str(self.resident)))


class RingGroup(Group):
    """A ring of window + 1 slots for each request: position p lives at p mod (window + 1)."""

    def __init__(
        self, config: GroupConfig, *, pages: PageAllocator, table: torch.Tensor, rng: np.random.Generator
    ) -> None:
        super().__init__(config, pages=pages, table=table)
        self.size = config.window + 1
        self.own = PageAllocator(
            first_slot=1, num_pages=(config.num_slots - 1) // self.size, page_size=self.size, rng=rng
        )
        self.rings: dict[int, int] = {}

    def unmap_pages(self, pages: Sequence[int]) -> list[int]:
        return []

    def admit(self, request: Request) -> None:
        """Give a request a ring; one must be free."""
        [self.rings[request.serial]] = self.own.allocate(1)
        # Engines wrap by arithmetic; as a table it is every position's slot.
        ring = torch.tensor(self.ring_slots(request), dtype=torch.int32)
        self.table[request.row] = ring[torch.arange(self.table.shape[1]) % self.size]

    def dismiss(self, request: Request) -> list[int]:
        """Take a request's ring back, and return its slots."""
        slots = self.ring_slots(request)
        self.own.release([self.rings.pop(request.serial)])
        return slots

    def ring_slots(self, request: Request) -> list[int]:
        return self.own.slots([self.rings[request.serial]])

    def out_slots(self, request: Request, start: int, end: int) -> list[int]:
        # Of a chunk longer than the ring only the end stays; the rest goes to the padding slot.
        ring = self.ring_slots(request)
        return [0 if p < end - self.size else ring[p % self.size] for p in range(start, end)]


def rows_apart(num_rows: int, length: int, gap: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a zeroed table whose rows lie `gap` elements further apart than they are long."""
    return torch.zeros(num_rows, length + gap, dtype=dtype)[:, :length]
