"""How metrics are served: to whom, at what cost to the engine's process whatever clients do, and across a fork."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

import kv_canary.observers.metrics
from kv_canary.observers import metrics_http, metrics_server
from kv_canary.observers.metrics import PrometheusMetrics

from .engine import full_engine
from .observed import free_port, get
from .test_metrics import samples
from .test_observers import facts


@pytest.fixture
def port() -> int:
    return free_port()


def request_of(port: int, text: bytes, *, address: str = "127.0.0.1") -> bytes:
    """Return all that is answered to these bytes."""
    with socket.create_connection((address, port), timeout=10) as client:
        client.sendall(text)
        answer = b""
        while data := client.recv(1 << 16):
            answer += data
    return answer


@pytest.fixture
def served(port: int) -> Iterator[PrometheusMetrics]:
    metrics = PrometheusMetrics(CollectorRegistry(), port=port)
    yield metrics
    metrics.close()


def addresses_of(port: int) -> set[str]:
    """Return the addresses at which this host listens on a port, as the kernel writes them."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {words[1].split(":")[0] for words in lines if words[1].endswith(f":{port:04X}") and words[3] == "0A"}


def test_only_this_host_is_served_unless_asked(port: int) -> None:
    engine = full_engine(metrics_port=port)
    assert addresses_of(port) == {"0100007F"}
    engine.manager.close()
    engine = full_engine(metrics_port=port, metrics_address="0.0.0.0")
    assert addresses_of(port) == {"00000000"}
    assert "kv_canary_steps_total" in get(port)
    engine.manager.close()
    assert addresses_of(port) == set()


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="there is no IPv6 here")
def test_all_addresses_are_those_of_both_kinds(port: int) -> None:
    metrics = PrometheusMetrics(CollectorRegistry(), port=port, address="::")
    try:
        for address in ("127.0.0.1", "::1"):
            assert b" 200 OK" in request_of(port, b"GET /metrics HTTP/1.0\r\n\r\n", address=address)
    finally:
        metrics.close()


def test_canaries_of_one_port_agree_on_the_address(port: int, served: PrometheusMetrics) -> None:
    with pytest.raises(ValueError, match=f"address must be 127.0.0.1, where port {port} is served.*got 0.0.0.0"):
        PrometheusMetrics(port=port, address="0.0.0.0")
    PrometheusMetrics(port=port, address="127.0.0.1").close()
    assert "kv_canary_steps_total" in get(port)


@pytest.mark.parametrize("address", ["here", "10.0.0.256", ""])
def test_an_address_is_one(port: int, address: str) -> None:
    with pytest.raises(ValueError, match=f"PrometheusMetrics: address must be an IP address of this host.*'{address}'"):
        PrometheusMetrics(port=port, address=address)


def test_an_address_of_another_host_is_refused_by_name(port: int) -> None:
    # One that documentation may use and nobody has.
    with pytest.raises(
        ValueError, match=r"metrics_address must be an address of this host.*got 192\.0\.2\.1: Cannot assign"
    ):
        full_engine(metrics_port=port, metrics_address="192.0.2.1")


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"HTTP/1.0 200 OK"),
        (b"GET / HTTP/1.0\n\n", b"HTTP/1.0 200 OK"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", b"HTTP/1.0 405 Method Not Allowed"),
        (b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n", b"HTTP/1.0 431 "),
        (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n", b"HTTP/1.0 431 "),
        (b"GET /metrics HTTP/9.9\r\n\r\n", b"505"),
        (b"\x00\xff\r\n\r\n", b"400"),
        (b"\r\n\r\n", b""),
    ],
)
def test_whatever_is_asked_is_answered_or_not_and_the_next_one_is(
    port: int, served: PrometheusMetrics, request_: bytes, answer: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    got = request_of(port, request_)
    assert answer in got
    assert bool(got) == bool(answer)
    assert "kv_canary_steps_total" in get(port)
    assert capfd.readouterr().err == ""


def test_a_request_that_is_too_large_is_answered_and_let_go_of_as_soon_as_that_is_seen(
    port: int, served: PrometheusMetrics
) -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(b"x" * metrics_http._MOST_REQUEST)
        here.setblocking(False)
        assert served._server is not None
        goes_on = metrics_http._Client(here, None).advance(served._server._http._server)
        assert not goes_on
        there.settimeout(10)
        assert there.recv(12) == b"HTTP/1.0 431"


def test_a_request_may_come_byte_by_byte_and_a_large_answer_be_taken_slowly(port: int) -> None:
    registry = CollectorRegistry()
    metrics = [PrometheusMetrics(registry, port=port, labels={"canary": "x" * 20_000 + str(i)}) for i in range(40)]
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            for byte in b"GET /metrics HTTP/1.0\r\n\r\n":
                client.sendall(bytes([byte]))
            time.sleep(0.2)
            answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
        assert len(answer) > 5_000_000
        assert answer.endswith(b"\n")
        assert samples(answer.decode().partition("\r\n\r\n")[2])
    finally:
        for each in metrics:
            each.close()


# Opens connections that never end, in a process of its own; says so, and then how many were ended by the server.
_SLOW = """
import select, socket, sys, time
port, count = map(int, sys.argv[1:])
clients = [socket.socket() for _ in range(count)]
for number, client in enumerate(clients):
    client.setblocking(False)
    client.connect_ex(("127.0.0.1", port))
print("all are there", flush=True)
ended, until = set(), time.monotonic() + 60
while sys.stdin not in select.select([sys.stdin], [], [], 0.1)[0] and time.monotonic() < until:
    for client in clients:
        try:
            # A third say nothing; the others let a byte of a header fall now and then.
            if client.fileno() % 3:
                client.send(b"X")
            if client.recv(100) == b"":
                ended.add(client)
        except BlockingIOError:
            pass
        except OSError:
            ended.add(client)
print(len(ended))
"""


@contextmanager
def slow_clients(port: int, count: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-I", "-c", _SLOW, str(port), str(count)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "all are there\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def held() -> tuple[int, int]:
    """Return how many threads and descriptors this process has."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def ask(port: int) -> str:
    """Return what is served; a client that lets its own turn go by, as on a busy machine, asks again, and no other."""
    while True:
        began, answer = time.monotonic(), b""
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client, contextlib.suppress(ConnectionError):
            try:
                client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            finally:
                took = time.monotonic() - began
            while data := client.recv(1 << 16):
                answer += data
        if answer:
            return answer.decode()
        assert took > metrics_http._TURN


def test_slow_clients_take_no_threads_few_descriptors_and_nobodys_answer(port: int, served: PrometheusMetrics) -> None:
    get(port)
    threads, descriptors = held()
    with slow_clients(port, 600) as process:
        most, longest = (0, 0), 0.0
        until = time.monotonic() + 4
        while time.monotonic() < until:
            began = time.monotonic()
            assert "kv_canary_steps_total" in ask(port)
            longest = max(longest, time.monotonic() - began)
            most = max(most[0], held()[0]), max(most[1], held()[1])
            time.sleep(0.02)
        answered, _ = process.communicate("done\n", timeout=30)
    # Others take their turns, of milliseconds; a machine that is busy makes them longer.
    assert longest < 20
    assert most[0] <= threads
    # Beside the connections: two pipes to the clients, this one's own socket, and one just accepted.
    assert most[1] <= descriptors + metrics_http.MOST_CONNECTIONS + 4
    # Room is made by ending what took longest, not by keeping the others out.
    assert int(answered) > 300
    wait_until(lambda: held()[0] <= threads and held()[1] <= descriptors)


def test_a_client_has_its_turn_before_it_gives_way_to_another(
    port: int, served: PrometheusMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_http, "MOST_CONNECTIONS", 1)
    # Longer than this test may last on a busy machine.
    monkeypatch.setattr(metrics_http, "SECONDS", 60.0)
    monkeypatch.setattr(metrics_http, "_TURN", 50.0)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as first,
        socket.create_connection(("127.0.0.1", port), timeout=0.3) as second,
    ):
        second.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        with pytest.raises(TimeoutError):
            second.recv(1)
        first.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        second.settimeout(10)
        for client in (first, second):
            assert client.recv(12) == b"HTTP/1.0 200"


@pytest.mark.parametrize("begun", [b"", b"GET /metrics HTTP/1.1\r\nX-Slow: "])
def test_a_connection_lasts_so_long_and_no_longer(
    port: int, served: PrometheusMetrics, begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_http, "SECONDS", 0.6)
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(begun)
        client.settimeout(0.05)
        while time.monotonic() < began + 8:
            try:
                if not client.recv(100):
                    break
            except TimeoutError:
                # What goes on coming buys no time.
                with contextlib.suppress(OSError):
                    client.send(b"x" if begun else b"")
            except OSError:
                break
    # Ended by the server, and not by the loop, on a busy machine too.
    assert 0.5 < time.monotonic() - began < 8


def test_a_client_that_takes_no_answer_is_let_go(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    metrics = [PrometheusMetrics(registry, port=port, labels={"canary": "x" * 20_000 + str(i)}) for i in range(40)]
    try:
        descriptors = held()[1]
        get(port)
        # The server's end of that connection may outlast the answer.
        wait_until(lambda: held()[1] == descriptors)
        monkeypatch.setattr(metrics_http, "SECONDS", 2.0)
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            wait_until(lambda: held()[1] == descriptors + 2)
            wait_until(lambda: held()[1] == descriptors + 1)
    finally:
        for each in metrics:
            each.close()


def test_without_descriptors_it_waits_and_does_not_spin(
    port: int, served: PrometheusMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    get(port)
    tried = []
    accept = socket.socket.accept

    def fails(self: socket.socket) -> Any:
        tried.append(self)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(metrics_http, "_PAUSE", 0.2)
    monkeypatch.setattr(socket.socket, "accept", fails)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        wait_until(lambda: len(tried) > 0)
        began, before = time.monotonic(), len(tried)
        time.sleep(0.5)
        # However long the sleep was in the end.
        assert len(tried) - before <= 2 + (time.monotonic() - began) / 0.2
        monkeypatch.setattr(socket.socket, "accept", accept)
        assert client.recv(12) == b"HTTP/1.0 200"


def sockets() -> int:
    """Return how many sockets this process has."""
    with os.scandir("/proc/self/fd") as found:
        # Listing them is a descriptor too, which is gone by now.
        names = [os.readlink(each.path) for each in found if os.path.lexists(each.path)]
    return sum(name.startswith("socket:") for name in names)


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def in_child(work: Callable[[], None]) -> str:
    """Run `work` in a child that is forked off; return what went wrong there. It has ten seconds."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        # From here on nothing of pytest's may run: not its handlers, not its exits.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        try:
            work()
        except BaseException:
            os.write(writer, traceback.format_exc().encode()[-2000:])
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        text = said.read()
    _, status = os.waitpid(pid, 0)
    return "it hung" if os.WIFSIGNALED(status) else text


fork_is_meant = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@fork_is_meant
def test_a_forked_child_closes_its_canary_and_the_parent_serves_on(port: int) -> None:
    registry, before = CollectorRegistry(), sockets()
    metrics, other = PrometheusMetrics(registry, port=port), free_port()
    assert sockets() == before + 3

    def child() -> None:
        assert sockets() == before
        metrics.close()
        # A server of its own, in the same registry or in another one.
        for theirs in (None, registry):
            own = PrometheusMetrics(theirs, port=other)
            assert "kv_canary_steps_total" in get(other)
            own.close()
            with pytest.raises(urllib.error.URLError):
                get(other)
        with pytest.raises(ValueError, match=f"got {port} at 127.0.0.1: Address already in use"):
            PrometheusMetrics(port=port)
        assert "kv_canary_steps_total" in get(port)

    try:
        assert in_child(child) == ""
        assert "kv_canary_steps_total" in get(port)
    finally:
        metrics.close()
    with pytest.raises(urllib.error.URLError):
        get(port)


@fork_is_meant
def test_a_child_that_lives_on_keeps_neither_the_port_nor_a_client(port: int) -> None:
    metrics = PrometheusMetrics(CollectorRegistry(), port=port)
    before = held()[1]
    client = socket.create_connection(("127.0.0.1", port), timeout=10)
    wait_until(lambda: held()[1] == before + 2)
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    try:
        metrics.close()
        assert client.recv(1) == b""
        PrometheusMetrics(CollectorRegistry(), port=port).close()
    finally:
        client.close()
        os.close(writer)
        assert os.waitpid(pid, 0)[1] == 0


@fork_is_meant
def test_a_lock_that_a_thread_held_at_the_fork_does_not_hang_the_child(port: int) -> None:
    registry = CollectorRegistry()
    metrics, other = PrometheusMetrics(registry, port=port), free_port()
    locks = [metrics_server._starting, kv_canary.observers.metrics._making, metrics._board._lock, metrics._lock]
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with contextlib.ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            taken.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait(10)

    def child() -> None:
        metrics.on_step(facts())
        own = PrometheusMetrics(registry, port=other)
        assert "kv_canary_steps_total" in get(other)
        own.close()
        metrics.close()

    try:
        assert in_child(child) == ""
    finally:
        done.set()
        thread.join()
    assert "kv_canary_steps_total" in get(port)
    metrics.close()


def test_an_application_that_hangs_does_not_hang_the_one_that_closes(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_http, "SECONDS", 0.3)
    registry, released, asked = CollectorRegistry(), threading.Event(), threading.Event()

    class Hangs:
        def describe(self) -> list[Any]:
            return []

        def collect(self) -> list[Any]:
            asked.set()
            released.wait(30)
            return []

    registry.register(Hangs())  # type: ignore[arg-type]
    metrics = PrometheusMetrics(registry, port=port)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert asked.wait(10)
        began = time.monotonic()
        metrics.close()
        # Without a limit it would wait for half a minute.
        assert time.monotonic() - began < 15
        # The port is free again.
        PrometheusMetrics(CollectorRegistry(), port=port).close()
        threads = [each for each in threading.enumerate() if each.name == f"kv-canary-metrics-{port}"]
        assert len(threads) == 1
        released.set()
        threads[0].join(8)
        assert not threads[0].is_alive()
