"""A stand-in for `mooncake.engine`: writes into another process's registered memory, over a socket.

It copies what SGLang's own transfer manager asks for, block by block, refuses what is not registered on either side,
and can be told to do it wrong.
"""

from __future__ import annotations

import ctypes
import dataclasses
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

_COUNT, _BLOCK, _ANSWER = struct.Struct("<q"), struct.Struct("<qq"), struct.Struct("<b")


@dataclass(frozen=True, kw_only=True)
class Copy:
    """One page of one entry of a transfer list.

    Args:
        part: the entry, such as "K0", "V2", "HEAD" or "TAIL"; of a window's list with "swa " before it.
        page: its number on this side.
        source, target: addresses, here and on the other side.
        length: bytes.
        flipped: a bit of them that changes on the way; None: none does.
    """

    part: str
    page: int
    source: int
    target: int
    length: int
    flipped: int | None = None


Fault = Callable[[list[Copy]], list[Copy]]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An entry of this side's transfer lists: its name, its address, and the bytes of a page."""

    part: str
    address: int
    length: int
    page_bytes: int


class TransferEngine:
    """What SGLang uses of Mooncake's class of this name."""

    # Of the process: what its lists hold, and what is to go wrong.
    entries: Sequence[Entry] = ()
    fault: Fault | None = None

    def initialize(self, hostname: str, handshake: str, protocol: str, device: str) -> int:
        self._regions: list[tuple[int, int]] = []
        self._server = socket.create_server(("", 0), backlog=16)
        threading.Thread(target=self._accept, daemon=True).start()
        return 0

    def get_rpc_port(self) -> int:
        port: int = self._server.getsockname()[1]
        return port

    def register_memory(self, address: int, length: int) -> int:
        self._regions.append((address, length))
        return 0

    def batch_register_memory(self, addresses: Sequence[int], lengths: Sequence[int]) -> int:
        self._regions += zip(addresses, lengths, strict=True)
        return 0

    def send_probe(self, session: str) -> int:
        return 0

    def transfer_sync_write(self, session: str, source: int, target: int, length: int) -> int:
        return self.batch_transfer_sync_write(session, [source], [target], [length])

    def batch_transfer_sync_write(
        self, session: str, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]
    ) -> int:
        blocks = list(zip(sources, targets, lengths, strict=True))
        flips: list[int | None] = [None] * len(blocks)
        if self.fault is not None:
            copies = [c for block in blocks for c in self._pages(*block)]
            others = [block for block in blocks if not self._pages(*block)]
            copies = type(self).fault(copies) if copies else []
            blocks = others + [(c.source, c.target, c.length) for c in copies]
            flips = [None] * len(others) + [c.flipped for c in copies]
        if not all(self._is_registered(source, length) for source, _, length in blocks):
            return -1
        host, port = session.rsplit(":", 1)
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(_COUNT.pack(len(blocks)))
            for (source, target, length), flipped in zip(blocks, flips, strict=True):
                data = bytearray(ctypes.string_at(source, length))
                if flipped is not None:
                    data[flipped // 8] ^= 1 << flipped % 8
                connection.sendall(_BLOCK.pack(target, length) + data)
            (answer,) = _ANSWER.unpack(_receive(connection, _ANSWER.size))
        return int(answer)

    def _pages(self, source: int, target: int, length: int) -> list[Copy]:
        """Return the pages that a block is made of; none if it is no part of KV."""
        for entry in self.entries:
            if entry.address <= source < entry.address + entry.length:
                size = entry.page_bytes
                first = (source - entry.address) // size
                return [
                    Copy(
                        part=entry.part, page=first + i, source=source + i * size, target=target + i * size, length=size
                    )
                    for i in range(length // size)
                ]
        return []

    def _is_registered(self, address: int, length: int) -> bool:
        return any(start <= address and address + length <= start + size for start, size in self._regions)

    def _accept(self) -> None:
        while True:
            connection, _ = self._server.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            answer = 0
            for _ in range(_COUNT.unpack(_receive(connection, _COUNT.size))[0]):
                target, length = _BLOCK.unpack(_receive(connection, _BLOCK.size))
                data = _receive(connection, length)
                if self._is_registered(target, length):
                    ctypes.memmove(target, data, length)
                else:
                    answer = -1
            connection.sendall(_ANSWER.pack(answer))


def stand_in() -> None:
    """Let `from mooncake.engine import TransferEngine` give the one here, in this process."""
    package, module = ModuleType("mooncake"), ModuleType("mooncake.engine")
    module.TransferEngine = TransferEngine  # type: ignore[attr-defined]
    package.engine = module  # type: ignore[attr-defined]
    sys.modules.update({"mooncake": package, "mooncake.engine": module})


def dropped_page(copies: list[Copy]) -> list[Copy]:
    """The second page does not come."""
    page = _page(copies, 1)
    return [c for c in copies if c.page != page]


def page_of_another(copies: list[Copy]) -> list[Copy]:
    """Where the second page should be comes one that another request holds here: an earlier one, in page 1."""
    page = _page(copies, 1)
    return [c if c.page != page else dataclasses.replace(c, source=c.source + (1 - page) * c.length) for c in copies]


def page_at_a_wrong_place(copies: list[Copy]) -> list[Copy]:
    """The second page comes a second time, over the third."""
    second, third = _page(copies, 1), _page(copies, 2)
    places = {c.part: c.target for c in copies if c.page == third}
    return copies + [dataclasses.replace(c, target=places[c.part]) for c in copies if c.page == second]


def last_layer_cut(copies: list[Copy]) -> list[Copy]:
    """Of the last layer only the first page comes."""
    last = max(c.part for c in copies if c.part.startswith("K"))[1:]
    first = _page(copies, 0)
    return [c for c in copies if c.part not in (f"K{last}", f"V{last}") or c.page == first]


def v_missing(copies: list[Copy]) -> list[Copy]:
    """V does not come."""
    return [c for c in copies if not c.part.startswith("V")]


def start_cut(copies: list[Copy]) -> list[Copy]:
    """The first entries of the list do not come: HEAD's records."""
    return [c for c in copies if c.part != "HEAD"]


def end_cut(copies: list[Copy]) -> list[Copy]:
    """The last entries of the list do not come: TAIL's records."""
    return [c for c in copies if c.part != "TAIL"]


def window_page_dropped(copies: list[Copy]) -> list[Copy]:
    """Of the window's list one page does not come."""
    windowed = [c for c in copies if c.part.startswith("swa ")]
    return [c for c in copies if not windowed or c.page != _page(windowed, 1)]


def k_bit(copies: list[Copy]) -> list[Copy]:
    """A bit of K of a middle layer changes in the second page."""
    return _flipped(copies, "K1")


def v_bit(copies: list[Copy]) -> list[Copy]:
    """A bit of V likewise."""
    return _flipped(copies, "V1")


FAULTS: dict[str, Fault] = {
    f.__name__: f
    for f in (
        dropped_page,
        page_of_another,
        page_at_a_wrong_place,
        last_layer_cut,
        v_missing,
        start_cut,
        end_cut,
        window_page_dropped,
        k_bit,
        v_bit,
    )
}


def _flipped(copies: list[Copy], part: str) -> list[Copy]:
    page = _page(copies, 1)
    return [
        dataclasses.replace(c, flipped=4 * c.length + 43) if (c.part, c.page) == (part, page) else c for c in copies
    ]


def _page(copies: list[Copy], number: int) -> int:
    """Return a page by its place in the request's order."""
    pages = list(dict.fromkeys(c.page for c in copies))
    return pages[number] if number < len(pages) else -1


def _receive(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise ConnectionError("the other side has gone")
        parts += part
    return bytes(parts)
