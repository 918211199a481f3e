"""One side of an engine whose prefill and decode are different processes: pages, tables, forwards, and transfers.

No model and no network: a forward writes random bytes where K and V would go, and a transfer is a list of `Copy`, which
somebody else carries. A full pool holds every token; a pool of its own, behind a LUT, those that a window still reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from kv_canary.config import CanaryConfig
from kv_canary.difftest.simulator.requests import Request
from kv_canary.difftest.simulator.scripted_engine import ScriptedEngine, kv_source
from kv_canary.errors import must_be
from kv_canary.runtime.capacities import CanaryLimits
from kv_canary.runtime.pools import BufferGroup, KvPool
from kv_canary.transfer import TransferBuffer, buffers, is_of_the_canary

FULL, SWA = "full", "swa"
PAGE = 4
WINDOW = 9
LAYERS = {FULL: 2, SWA: 3}
NUM_PAGES = {FULL: 96, SWA: 64}
READ_BYTES = 16
MAX_ROWS = 16
MAX_LEN = 96


@dataclass(kw_only=True, eq=False)
class PlacedRequest(Request):
    """A request on one side, with its pages in each pool by their place."""

    places: dict[str, dict[int, int]] = field(default_factory=lambda: {FULL: {}, SWA: {}})


@dataclass(frozen=True, kw_only=True)
class Copy:
    """One message of a transfer: these pages of one buffer, in the sender's pool and in the receiver's.

    Of each page go the first 1 / `share` of its bytes: all of them, unless a fault has it otherwise.
    """

    pool: str
    buffer: int
    src: tuple[int, ...]
    dst: tuple[int, ...]
    share: int = 1


class TransferEngine(ScriptedEngine):
    """Pools, tables and requests of one process, around one `CanaryManager`.

    Args:
        device: where it all lives.
        backend: of the canary's ops.
        seed: of page numbers and K/V bytes.
        first_owner: what owners are counted from; sides that count apart are told apart in reports.
        token_bytes: bytes of a token's K, and of its V, in one layer.
    """

    def __init__(
        self, *, device: torch.device, backend: str, seed: int, first_owner: int, token_bytes: int = 2 * READ_BYTES
    ) -> None:
        self.token_bytes = token_bytes
        random = torch.Generator(device).manual_seed(seed)
        # Page 0 is padding. The page freed last is handed out first, so that pages are soon used again.
        order = np.random.default_rng(seed)
        self._free = {name: (1 + order.permutation(count - 1)).tolist() for name, count in NUM_PAGES.items()}
        self._rows = list(range(1, MAX_ROWS))
        self._next_owner = first_owner
        self.lut = torch.zeros(NUM_PAGES[FULL] * PAGE, dtype=torch.int64, device=device)
        self.pools = {name: self._make_pool(name, device) for name in (FULL, SWA)}
        super().__init__(
            [
                BufferGroup(name=FULL, pool=self.pools[FULL]),
                BufferGroup(name=SWA, pool=self.pools[SWA], window=WINDOW, lut=self.lut),
            ],
            # What records and samples see by themselves, wherever it runs.
            CanaryConfig(
                backend=backend,
                records="head_and_tail",
                seals="off",
                stride=1,
                ring_capacity=4096,
                max_reports_per_step=1024,
            ),
            limits=CanaryLimits(max_rows=MAX_ROWS, max_requests=MAX_ROWS - 1, max_tokens=256, max_len=MAX_LEN),
            random=random,
        )
        self.tables = dict.fromkeys(self.pools, self.tables[FULL])
        # Every buffer of every pool, in the order in which a transfer sends them.
        self.buffers: dict[str, tuple[TransferBuffer, ...]] = {name: buffers(p) for name, p in self.pools.items()}

    def arrive(self, name: str, tokens: Sequence[int]) -> PlacedRequest:
        """Return a new request with its own tokens."""
        self._next_owner += 1
        return PlacedRequest(name=name, row=self._rows.pop(), owner=self._next_owner, tokens=list(tokens))

    def reserve(self, request: PlacedRequest, end: int, *, resident_from: int = 0) -> None:
        """Give the request pages for the positions before `end`; in the windowed pool from `resident_from` on."""
        for place in range(-(-end // PAGE)):
            if place not in request.places[FULL]:
                page = request.places[FULL][place] = self._free[FULL].pop()
                at = place * PAGE
                self.tables[FULL][request.row, at : at + PAGE] = torch.arange(page * PAGE, (page + 1) * PAGE)
                if (place + 1) * PAGE > resident_from:
                    own = request.places[SWA][place] = self._free[SWA].pop()
                    self.lut[page * PAGE : (page + 1) * PAGE] = self.slots(own)

    def expect(self, request: PlacedRequest, length: int) -> None:
        """Give the request pages for `length` tokens that will be received, and count them as cached."""
        self.reserve(request, length, resident_from=length - WINDOW)
        request.cached = length

    def slots(self, *pages: int) -> torch.Tensor:
        """Return every slot of `pages`, in order."""
        first = torch.tensor(pages, dtype=torch.int64, device=self.device)[:, None] * PAGE
        return (first + torch.arange(PAGE, device=self.device)).view(-1)

    def map(self, request: Request, start: int, end: int) -> None:
        if isinstance(request, PlacedRequest):
            self.reserve(request, end)

    def extend(
        self, *work: tuple[PlacedRequest, int], damage: Callable[[dict[str, torch.Tensor]], None] | None = None
    ) -> None:
        """Extend each request by so many tokens.

        Args:
            work: requests, with how many.
            damage: changes, by name of the pool, the slots that the forward writes.
        """
        batch = self.batch(*work)
        if damage is not None:
            out_slots = dict(batch.out_slots)
            damage(out_slots)
            batch = replace(batch, out_slots=out_slots)
        self.run(batch)
        for request, count in work:
            request.cached += count
            self._evict(request)

    def free(self, request: PlacedRequest) -> None:
        """End the request: its pages are retired and can be handed out again."""
        # The windowed pool first: which of its slots a full one stands for is known as long as that is the request's.
        for name in (SWA, FULL):
            self._release(request, name, list(request.places[name]))
        self._rows.append(request.row)

    def retire(self, request: PlacedRequest, pool: str) -> None:
        """Commit the fault of a free that comes too early: the records are retired, and the pages still used."""
        self.manager.retire(self.pools[pool], self.slots(*request.places[pool].values()), owner=request.owner)

    def copies(self, request: PlacedRequest, destinations: dict[str, dict[int, int]]) -> list[Copy]:
        """Return the messages that carry a request to the receiver's pages: pool by pool, in the order of the list."""
        result = []
        for name, places in destinations.items():
            own = request.places[name]
            if sorted(places) != sorted(own):
                raise RuntimeError(must_be("transfer engine", f"{name} pages", str(sorted(own)), str(sorted(places))))
            src, dst = tuple(own[p] for p in places), tuple(places.values())
            result += [Copy(pool=name, buffer=i, src=src, dst=dst) for i in range(len(self.buffers[name]))]
        return result

    def is_kv(self, copy: Copy) -> bool:
        """Return whether a message holds K or V, not records or seals."""
        return not is_of_the_canary(self.buffers[copy.pool][copy.buffer])

    def item_bytes(self, copy: Copy, token_bytes: int) -> int:
        """Return how many bytes of each page are sent to a receiver that has `token_bytes` a token."""
        whole = PAGE * token_bytes if self.is_kv(copy) else self.buffers[copy.pool][copy.buffer].item_bytes
        return whole // copy.share

    def read(self, copy: Copy, token_bytes: int) -> torch.Tensor:
        """Return the bytes of a message, uint8 [pages, item_bytes]: of K and V the first `token_bytes` of a token."""
        pages = self.buffers[copy.pool][copy.buffer].pages[list(copy.src)]
        if self.is_kv(copy):
            pages = pages.view(-1, PAGE, self.token_bytes)[:, :, :token_bytes].reshape(-1, PAGE * token_bytes)
        return pages[:, : self.item_bytes(copy, token_bytes)].contiguous()

    def store(self, copy: Copy, message: torch.Tensor) -> None:
        """Put the bytes of a message where they belong."""
        self.buffers[copy.pool][copy.buffer].pages[list(copy.dst), : message.shape[1]] = message

    def _make_pool(self, name: str, device: torch.device) -> KvPool:
        num_slots = NUM_PAGES[name] * PAGE
        k, v = (
            kv_source(
                num_slots,
                self.token_bytes,
                layers=LAYERS[name],
                page_size=PAGE,
                read_bytes=READ_BYTES,
                device=device,
            )
            for _ in range(2)
        )
        return KvPool(name=name, num_slots=num_slots, k_source=k, v_source=v, device=device)

    def _evict(self, request: PlacedRequest) -> None:
        """Let go of the windowed pages that no query of the request will read again."""
        gone = [place for place in request.places[SWA] if (place + 1) * PAGE <= request.cached - WINDOW]
        self._release(request, SWA, gone)

    def _release(self, request: PlacedRequest, name: str, places: Sequence[int]) -> None:
        if not places:
            return
        pages = [request.places[name].pop(place) for place in places]
        self.manager.retire(self.pools[name], self.slots(*pages), owner=request.owner)
        if name == SWA:
            full = [request.places[FULL][place] for place in places if place in request.places[FULL]]
            if full:
                self.lut[self.slots(*full)] = 0
        self._free[name] += pages
