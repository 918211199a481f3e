"""Pages, and who holds them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

import numpy as np

from kv_canary.errors import must_be


class PageAllocator:
    """Hands out the page freed last, so that it is soon used again; a page is free once nobody holds it."""

    def __init__(self, *, first_slot: int, num_pages: int, page_size: int, rng: np.random.Generator) -> None:
        self.first_slot, self.num_pages, self.page_size = first_slot, num_pages, page_size
        self._free = deque(int(p) for p in rng.permutation(num_pages))
        self.holders: Counter[int] = Counter()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Return `count` pages, each held once; there must be so many."""
        if count > self.num_free:
            raise RuntimeError(must_be("difftest engine", "pages", f"at most {self.num_free}", str(count)))
        pages = [self._free.popleft() for _ in range(count)]
        self.hold(pages)
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        self.holders.update(pages)

    def release(self, pages: Iterable[int]) -> list[int]:
        """Let go of `pages`, and return those that are free now."""
        freed = []
        for page in pages:
            self.holders[page] -= 1
            if self.holders[page] <= 0:
                del self.holders[page]
                self._free.appendleft(page)
                freed.append(page)
        return freed

    def is_free(self, page: int) -> bool:
        return page in self._free

    def free_held(self, page: int) -> None:
        """Commit the fault of a double free: `page` can be handed out although somebody holds it."""
        self._free.appendleft(page)

    def slots(self, pages: Sequence[int]) -> list[int]:
        """Return every slot of `pages`, in order."""
        size = self.page_size
        return [self.first_slot + p * size + i for p in pages for i in range(size)]

    def check_integrity(self, holders: Counter[int]) -> None:
        """Check that pages are held by exactly `holders`, and that every other page is free, once.

        Raises:
            RuntimeError: they are not.
        """
        if self.holders != holders:
            raise RuntimeError(must_be("difftest engine", "holders", str(dict(holders)), str(dict(self.holders))))
        free = sorted(self._free)
        if free != sorted(set(range(self.num_pages)) - set(holders)):
            raise RuntimeError(must_be("difftest engine", "free pages", "those that nobody holds, once", str(free)))
