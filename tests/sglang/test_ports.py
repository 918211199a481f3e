"""A port that was chosen is there when it is bound: no other process of these tests has been given it."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from . import ports


@pytest.fixture
def wanted(monkeypatch):
    """Let `claim` try the ports of a list, which begins with one that it would have given out."""
    tried = [ports.claim() for _ in range(3)]
    for held in ports._claims[-3:]:
        held.close()
    monkeypatch.setattr(ports, "_claims", ports._claims[:-3])
    monkeypatch.setattr(ports._random, "sample", lambda *args: tried)
    return tried


def test_a_port_is_claimed_once(wanted):
    assert [ports.claim(), ports.claim()] == wanted[:2]


def test_a_port_that_another_process_claimed_is_left_to_it(wanted):
    program = f"""
import random, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import ports
ports._random.sample = lambda *args: {wanted}
print(ports.claim(), flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-P", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert int(other.stdout.readline()) == wanted[0]
        assert ports.claim() == wanted[1]
        other.stdin.close()


def test_a_port_that_somebody_listens_to_is_not_free(wanted):
    with socket.create_server(("127.0.0.1", wanted[0])):
        assert ports.claim() == wanted[1]


def test_no_port_is_an_error(wanted):
    wanted.clear()
    with pytest.raises(OSError, match="no port from"):
        ports.claim()


def test_connections_get_other_ports(wanted):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        lowest = min(s.getsockname()[1] for s in (server, connection))
    if lowest < 11_000:
        pytest.skip("the kernel gives connections low ports here")
    assert max(wanted) < lowest
