"""One side of an engine whose prefill and decode are different processes: pages, tables, forwards, and transfers.

No model and no network: a forward writes random bytes where K and V would go, and a transfer is a list of `Copy`, which
somebody else carries. A full pool holds every token; a pool of its own, behind a LUT, those that a window still reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kv_canary.capacities import CanaryLimits
from kv_canary.config import CanaryConfig
from kv_canary.errors import must_be
from kv_canary.forward import ForwardBatch, ForwardRequest
from kv_canary.manager import CanaryManager
from kv_canary.pools import BufferGroup, KvPool
from kv_canary.specs.structures import KvSource
from kv_canary.transfer import TransferBuffer, buffers

FULL, SWA = "full", "swa"
PAGE = 4
WINDOW = 9
LAYERS = {FULL: 2, SWA: 3}
NUM_PAGES = {FULL: 96, SWA: 64}
READ_BYTES = 16
MAX_ROWS = 16
MAX_LEN = 96


@dataclass(kw_only=True, eq=False)
class Request:
    """A request on one side: its own tokens, how many are cached, and its pages in each pool by their place."""

    name: str
    row: int
    owner: int
    tokens: list[int]
    cached: int = 0
    pages: dict[str, dict[int, int]] = field(default_factory=lambda: {FULL: {}, SWA: {}})


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


class TransferEngine:
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
        self.device, self.token_bytes = device, token_bytes
        self._bytes = torch.Generator(device).manual_seed(seed)
        # Page 0 is padding. The page freed last is handed out first, so that pages are soon used again.
        order = np.random.default_rng(seed)
        self._free = {name: (1 + order.permutation(count - 1)).tolist() for name, count in NUM_PAGES.items()}
        self._rows = list(range(1, MAX_ROWS))
        self._next_owner = first_owner
        self.pools = {name: self._make_pool(name) for name in (FULL, SWA)}
        self.table = torch.zeros(MAX_ROWS, MAX_LEN, dtype=torch.int32, device=device)
        self.lut = torch.zeros(NUM_PAGES[FULL] * PAGE, dtype=torch.int64, device=device)
        self.manager = CanaryManager(
            [
                BufferGroup(name=FULL, pool=self.pools[FULL]),
                BufferGroup(name=SWA, pool=self.pools[SWA], window=WINDOW, lut=self.lut),
            ],
            limits=CanaryLimits(max_rows=MAX_ROWS, max_requests=MAX_ROWS - 1, max_tokens=256, max_len=MAX_LEN),
            config=CanaryConfig(
                backend=backend, records="head_and_tail", stride=1, ring_capacity=4096, max_reports_per_step=1024
            ),
        )
        # The canary's own failures are to be seen here, in log mode too.
        self.manager.guard.contains = False
        # Every buffer of every pool, in the order in which a transfer sends them.
        self.buffers: dict[str, tuple[TransferBuffer, ...]] = {name: buffers(p) for name, p in self.pools.items()}

    def add(self, name: str, tokens: Sequence[int]) -> Request:
        """Return a new request with its own tokens."""
        self._next_owner += 1
        return Request(name=name, row=self._rows.pop(), owner=self._next_owner, tokens=list(tokens))

    def reserve(self, request: Request, end: int, *, resident_from: int = 0) -> None:
        """Give the request pages for the positions before `end`; in the windowed pool from `resident_from` on."""
        for place in range(-(-end // PAGE)):
            if place not in request.pages[FULL]:
                page = request.pages[FULL][place] = self._free[FULL].pop()
                at = place * PAGE
                self.table[request.row, at : at + PAGE] = torch.arange(page * PAGE, (page + 1) * PAGE)
                if (place + 1) * PAGE > resident_from:
                    own = request.pages[SWA][place] = self._free[SWA].pop()
                    self.lut[page * PAGE : (page + 1) * PAGE] = self.slots(own)

    def expect(self, request: Request, length: int) -> None:
        """Give the request pages for `length` tokens that will be received, and count them as cached."""
        self.reserve(request, length, resident_from=length - WINDOW)
        request.cached = length

    def slots(self, *pages: int) -> torch.Tensor:
        """Return every slot of `pages`, in order."""
        first = torch.tensor(pages, dtype=torch.int64, device=self.device)[:, None] * PAGE
        return (first + torch.arange(PAGE, device=self.device)).view(-1)

    def slot_of(self, pool: str, request: Request, position: int) -> int:
        """Return the slot of a position; 0 where it is not resident."""
        page = request.pages[pool].get(position // PAGE, 0)
        return page * PAGE + position % PAGE if page else 0

    def forward(
        self, *work: tuple[Request, int], damage: Callable[[dict[str, torch.Tensor]], None] | None = None
    ) -> None:
        """Extend each request by so many tokens.

        Args:
            work: requests, with how many.
            damage: changes, by name of the pool, the slots that the forward writes.
        """
        requests: list[ForwardRequest] = []
        tokens: list[int] = []
        positions: list[int] = []
        out: dict[str, list[int]] = {FULL: [], SWA: []}
        for request, count in work:
            start, end = request.cached, request.cached + count
            self.reserve(request, end)
            requests.append(
                ForwardRequest(
                    request_id=request.name,
                    row=request.row,
                    owner=request.owner,
                    prefix_len=start,
                    extend_len=count,
                    tokens=_history(request),
                )
            )
            tokens += request.tokens[start:end]
            positions += range(start, end)
            for name, slots in out.items():
                slots += [self.slot_of(name, request, p) for p in range(start, end)]
        out_slots = {name: torch.tensor(slots, device=self.device) for name, slots in out.items()}
        if damage is not None:
            damage(out_slots)
        batch = ForwardBatch(
            requests=requests,
            input_ids=torch.tensor(tokens, device=self.device),
            positions=torch.tensor(positions, device=self.device),
            out_slots=out_slots,
            tables=dict.fromkeys(out_slots, self.table),
        )
        with self.manager.forward().around(batch):
            for name, slots_ in out_slots.items():
                self._write_bytes(name, slots_)
        for request, count in work:
            request.cached += count
            self._evict(request)

    def free(self, request: Request) -> None:
        """End the request: its pages are retired and can be handed out again."""
        # The windowed pool first: which of its slots a full one stands for is known as long as that is the request's.
        for name in (SWA, FULL):
            self._release(request, name, list(request.pages[name]))
        self._rows.append(request.row)

    def retire(self, request: Request, pool: str) -> None:
        """Commit the fault of a free that comes too early: the records are retired, and the pages still used."""
        self.manager.retire(self.pools[pool], self.slots(*request.pages[pool].values()), owner=request.owner)

    def copies(self, request: Request, destinations: dict[str, dict[int, int]]) -> list[Copy]:
        """Return the messages that carry a request to the receiver's pages: pool by pool, in the order of the list."""
        result = []
        for name, places in destinations.items():
            own = request.pages[name]
            if sorted(places) != sorted(own):
                raise RuntimeError(must_be("transfer engine", f"{name} pages", str(sorted(own)), str(sorted(places))))
            src, dst = tuple(own[p] for p in places), tuple(places.values())
            result += [Copy(pool=name, buffer=i, src=src, dst=dst) for i in range(len(self.buffers[name]))]
        return result

    def is_kv(self, copy: Copy) -> bool:
        """Return whether a message holds K or V, not records."""
        return 0 < copy.buffer < len(self.buffers[copy.pool]) - 1

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

    def flip(self, pool: str, half: str, slot: int, position: int) -> None:
        """Change one of the bytes that the fingerprint of a position covers."""
        source = self.pools[pool].k_source if half == "K" else self.pools[pool].v_source
        if source is not None:
            layer, first, _ = source.coverage(position)
            source.layers[layer].view(-1, self.token_bytes)[slot, first] ^= 1

    def _make_pool(self, name: str) -> KvPool:
        shape = (NUM_PAGES[name], PAGE * self.token_bytes)
        k, v = (
            KvSource(
                layers=tuple(torch.zeros(shape, dtype=torch.uint8, device=self.device) for _ in range(LAYERS[name])),
                page_size=PAGE,
                bytes_per_token=self.token_bytes,
                read_bytes=READ_BYTES,
            )
            for _ in range(2)
        )
        return KvPool(name=name, num_slots=NUM_PAGES[name] * PAGE, k_source=k, v_source=v, device=self.device)

    def _write_bytes(self, name: str, slots: torch.Tensor) -> None:
        """Do what the model does: put K and V into the slots of the new tokens."""
        for source in (self.pools[name].k_source, self.pools[name].v_source):
            for layer in () if source is None else source.layers:
                shape = (len(slots), self.token_bytes)
                new = torch.randint(0, 256, shape, dtype=torch.uint8, device=self.device, generator=self._bytes)
                layer.view(-1, self.token_bytes)[slots] = new

    def _evict(self, request: Request) -> None:
        """Let go of the windowed pages that no query of the request will read again."""
        gone = [place for place in request.pages[SWA] if (place + 1) * PAGE <= request.cached - WINDOW]
        self._release(request, SWA, gone)

    def _release(self, request: Request, name: str, places: Sequence[int]) -> None:
        if not places:
            return
        pages = [request.pages[name].pop(place) for place in places]
        self.manager.retire(self.pools[name], self.slots(*pages), owner=request.owner)
        if name == SWA:
            full = [request.pages[FULL][place] for place in places if place in request.pages[FULL]]
            if full:
                self.lut[self.slots(*full)] = 0
        self._free[name] += pages


def _history(request: Request) -> Callable[[int, int], list[int]]:
    """Return a function that gives the request's own tokens; it follows them as they grow."""
    return lambda start, end: request.tokens[start:end]
