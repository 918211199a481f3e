"""TCP ports that are bound some time after they were chosen, by this process or another one."""

from __future__ import annotations

import random
import socket
from pathlib import Path

# SGLang seeds the shared generator, so that processes which draw from it would try the same ports.
_random = random.SystemRandom()
_claims: list[socket.socket] = []


def claim() -> int:
    """Return a free TCP port that no other process of these tests gets until this one ends.

    It lies below those that the kernel gives to connections and to servers without a wish.

    Raises:
        OSError: every port is taken.
    """
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    # Where the kernel gives those from the lowest on, there is no such place.
    low, high = 10_000, ephemeral if ephemeral > 11_000 else 32_768
    for port in _random.sample(range(low, high), high - low):
        # Ports of UDP are numbered apart: to hold one says that TCP's of that number is meant for somebody.
        held = socket.socket(type=socket.SOCK_DGRAM)
        try:
            held.bind(("127.0.0.1", port))
            # As SGLang's rendezvous will, on every address.
            with socket.socket() as free:
                free.bind(("", port))
        except OSError:
            held.close()
            continue
        _claims.append(held)
        return port
    raise OSError(f"no port from {low} to {high - 1} is free")
