"""The model engine with a host tier: requests are stored there to make room, and loaded back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from kv_canary import BufferGroup, CanaryConfig, KvPool
from kv_canary.difftest.simulator import Call, EngineConfig, Request

from .served import CANARY, PAGE, ServedEngine

HOST_PAGES = 8


class HostTierEngine(ServedEngine):
    """An engine with full attention whose waiting requests may keep their KV on the host.

    Stores run on a stream of their own, which has caught up by the end of the next forward; loads are pipelined through
    two staging buffers. Records are carried along where the copies are asked for.
    """

    def __init__(self, config: EngineConfig, *, canary: CanaryConfig = CANARY) -> None:
        super().__init__(config, canary=canary)
        [group] = self.groups
        k, v = group.config.k_source, group.config.v_source
        self.pool = KvPool(
            name=group.name,
            num_slots=group.config.num_slots,
            k_source=k,
            v_source=v,
            extra_slots=HOST_PAGES * PAGE,
            device="cpu",
        )
        self.pools = {group.name: self.pool}
        self.install([BufferGroup(name=group.name, pool=self.pool)])
        self.layers = [layer for source in (k, v) for layer in source.layers]
        self.host_layers = [torch.zeros_like(layer[: HOST_PAGES * PAGE]) for layer in self.layers]
        self.free_hosts = list(range(HOST_PAGES))
        # Of each stored request: its pages on the host, and how many positions they hold.
        self.stored: dict[Request, tuple[list[int], int]] = {}
        # Copies that the storing stream has not made yet.
        self.stores: deque[Callable[[], None]] = deque()

    def offload(self, request: Request) -> None:
        """Store a running request on the host and let it wait."""
        pages, owner = list(request.pages), request.owner
        hosts = [self.free_hosts.pop() for _ in pages]
        self.stored[request] = hosts, request.cached
        self.carry(self.pages.slots(pages), self.host_records(hosts), owner=owner)
        self.keep_until_stored(pages, hosts, owner)
        self.take_back(request)

    def keep_until_stored(self, pages: list[int], hosts: list[int], owner: int) -> None:
        """Ask for pages to be stored, and hold them until they are."""
        self.pages.hold(pages)

        def store() -> None:
            self.store(pages, hosts)
            self.go(self.release(pages, owner=owner))

        self.stores.append(store)

    def restore(self, request: Request) -> None:
        """Admit a waiting request that was stored, and load what it had."""
        self.wait_for_stores()
        hosts, length = self.stored.pop(request)
        self.waiting.remove(request)
        self._take_row(request)
        self.go(self.make_room(len(hosts)))
        request.pages, request.cached, request.steps = self.new_pages(len(hosts)), length, 0
        self.fill_table(request)
        self.load(hosts, request.pages)
        self.carry(self.host_records(hosts), self.pages.slots(request.pages), owner=request.owner)
        self.free_hosts += hosts

    def wait_for_stores(self) -> None:
        """Wait until everything that is to be stored is."""
        while self.stores:
            self.stores.popleft()()

    def store(self, pages: Sequence[int], hosts: Sequence[int]) -> None:
        for device, host in zip(self.layers, self.host_layers, strict=True):
            host[_slots_of(hosts)] = device[self.pages.slots(pages)]

    def load(self, hosts: Sequence[int], pages: Sequence[int]) -> None:
        """Copy pages from the host: into one of two staging buffers, and from there on another stream."""
        staging: dict[int, list[torch.Tensor]] = {}
        copies: deque[Callable[[], None]] = deque()
        for i, (host, page) in enumerate(zip(hosts, pages, strict=True)):
            if len(copies) >= 2:
                self.wait_for_buffer(copies)
            staging[i % 2] = [layer[_slots_of([host])] for layer in self.host_layers]
            copies.append(partial(self.copy_in, staging, i % 2, page))
        for copy in copies:
            copy()

    def wait_for_buffer(self, copies: deque[Callable[[], None]]) -> None:
        """Wait until the staging buffer that is to be filled next has been copied from."""
        copies.popleft()()

    def copy_in(self, staging: Mapping[int, Sequence[torch.Tensor]], buffer: int, page: int) -> None:
        """Copy a staging buffer into a page."""
        slots = self.pages.slots([page])[: self.block_tokens()]
        for device, staged in zip(self.layers, staging[buffer], strict=True):
            device[slots] = staged[: len(slots)]

    def block_tokens(self) -> int:
        """Return how many tokens of a page a copy moves."""
        return PAGE

    def host_records(self, hosts: Sequence[int]) -> list[int]:
        """Return where the records of host pages lie."""
        return [self.pool.num_slots + s for s in _slots_of(hosts)]

    def carry(self, src: Sequence[int], dst: Sequence[int], *, owner: int) -> None:
        """Carry records along with their KV."""
        self.manager.move(self.pool, torch.tensor(list(src)), torch.tensor(list(dst)), owner=owner)

    def _step_calls(self, extends: Mapping[Request, int], *, padding: int) -> Iterator[Call]:
        yield from super()._step_calls(extends, padding=padding)
        HostTierEngine.wait_for_stores(self)


def _slots_of(hosts: Sequence[int]) -> list[int]:
    return [h * PAGE + i for h in hosts for i in range(PAGE)]
