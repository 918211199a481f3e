"""A small HTTP server for scrapes: one thread, few connections, and a limit on how long each of them lasts.

It lives in an engine's process, so what clients do must cost that process nothing: no thread for a client, no more than
a few descriptors for all of them, no waking up where nothing happens, and nothing that a forked child could wait for.
"""

from __future__ import annotations

import contextlib
import io
import ipaddress
import logging
import re
import select
import socket
import threading
import time
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

logger = logging.getLogger("kv_canary")

# Connections that are open at once.
MOST_CONNECTIONS = 8
# How long one may last, in seconds, whatever is sent or taken in that time.
SECONDS = 5.0
# Where all are taken, the oldest gives way to a new one, but not before it had this long to send its request.
_TURN = 0.02
# How long nothing is accepted after the process has run out of descriptors or memory, which waiting may mend.
_PAUSE = 1.0
# What waits in the kernel.
_BACKLOG = 128
_MOST_REQUEST = 16 << 10
_TOO_LARGE = b"HTTP/1.0 431 Request Header Fields Too Large\r\nContent-Length: 0\r\n\r\n"
_END = re.compile(rb"\n\r?\n")


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens at an IP address; `::` is every address of either kind.

    Raises:
        ValueError: `address` is no IP address.
        OSError: nobody can listen there now.
    """
    family = socket.AF_INET if ipaddress.ip_address(address).version == 4 else socket.AF_INET6
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A port whose last connections the kernel still remembers is free; some Pythons would set more than that.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


class HttpServer:
    """Answers requests by a WSGI application, one after another, in a thread of its own, until it is stopped.

    Args:
        listener: as `listen` returns it; closed with the server.
        app: the application; it is never called twice at once.
    """

    def __init__(self, listener: socket.socket, app: Any) -> None:
        self._listener = listener
        self._server = _WsgiServer(listener, app)
        self._wake, self._woken = socket.socketpair()
        self._stopping = False
        self._paused_until = 0.0
        self._clients: list[_Client] = []
        name = f"kv-canary-metrics-{listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._close()
            raise

    def stop(self) -> None:
        """Answer nobody any more, and give the port back."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join(SECONDS)
        # An application that hangs must not hang this one; the thread closes the rest when it comes back.
        _hang_up(self._listener)

    def forget(self) -> None:
        """Close this process's copies of a server that runs in the process that it was forked from.

        Nothing that was sent or is waited for there changes: what is open there stays so.
        """
        self._close()

    def _serve(self) -> None:
        try:
            while not self._stopping:
                self._step()
        finally:
            for each in (self._listener, *(client.socket for client in self._clients)):
                _hang_up(each)
            self._close()

    def _step(self) -> None:
        """Wait until there is something to do, and do it."""
        now = time.monotonic()
        for client in [c for c in self._clients if now >= c.since + SECONDS]:
            self._drop(client)
        leaving = self._leaving()
        accepts_at = max(self._paused_until, 0.0 if leaving is None else leaving.since + _TURN)
        until = [client.since + SECONDS for client in self._clients]
        events = select.poll()
        events.register(self._woken, select.POLLIN)
        if now >= accepts_at:
            events.register(self._listener, select.POLLIN)
        else:
            until.append(accepts_at)
        for client in self._clients:
            events.register(client.socket, select.POLLOUT if client.answer else select.POLLIN)
        ready = {fd for fd, _ in events.poll(max(0.0, min(until) - now) * 1000 if until else None)}
        if self._stopping:
            return
        for client in [c for c in self._clients if c.socket.fileno() in ready]:
            if not client.advance(self._server):
                self._drop(client)
        if self._listener.fileno() in ready:
            self._accept()

    def _accept(self) -> None:
        try:
            connection, peer = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError:
            # It stays ready: without a pause, this would be tried for ever and nothing else.
            self._paused_until = time.monotonic() + _PAUSE
            return
        connection.setblocking(False)
        leaving = self._leaving()
        if leaving is not None:
            self._drop(leaving)
        self._clients.append(_Client(connection, peer))

    def _leaving(self) -> _Client | None:
        """The client that gives way to the next one: the oldest, of those that have sent no whole request if any."""
        if len(self._clients) < MOST_CONNECTIONS:
            return None
        return min(self._clients, key=lambda client: (bool(client.answer), client.since))

    def _drop(self, client: _Client) -> None:
        self._clients.remove(client)
        _hang_up(client.socket)

    def _close(self) -> None:
        for each in (self._listener, self._wake, self._woken, *(client.socket for client in self._clients)):
            each.close()


class _Client:
    """A connection: its request, or what is left to send of the answer."""

    def __init__(self, connection: socket.socket, peer: Any) -> None:
        self.socket, self._peer = connection, peer
        self.since = time.monotonic()
        self._request = bytearray()
        self.answer = b""

    def advance(self, server: _WsgiServer) -> bool:
        """Take or send what can be taken or sent now; return whether the connection goes on."""
        try:
            if not self.answer and self._read():
                return True
            if not self.answer:
                self.answer = server.answer(bytes(self._request), self._peer)
            self.answer = self.answer[self.socket.send(self.answer) :]
        except (BlockingIOError, InterruptedError):
            return True
        except Exception as error:
            # Whatever a client sends or breaks off is its own trouble.
            logger.debug("kv-canary: metrics: a request was not answered (%s)", type(error).__name__)
            return False
        return bool(self.answer)

    def _read(self) -> bool:
        """Take what has come; return whether more is to come."""
        data = self.socket.recv(_MOST_REQUEST)
        # The end may have been cut in two.
        start = max(0, len(self._request) - 2)
        self._request += data
        if _END.search(self._request, start):
            return False
        if len(self._request) >= _MOST_REQUEST:
            # What was not taken when the connection is closed would take the answer with it.
            with contextlib.suppress(BlockingIOError):
                self.socket.recv(1 << 18)
            self.answer = _TOO_LARGE
            return False
        if not data:
            raise ConnectionError("it ended before its request did")
        return True


def _hang_up(connection: socket.socket) -> None:
    """End a connection, or listening, also where a process that is just being forked off holds a copy."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


class _WsgiServer:
    """The server that wsgiref's handler asks for, and the handler's use on bytes."""

    def __init__(self, listener: socket.socket, app: Any) -> None:
        address, port = listener.getsockname()[:2]
        self._app = app
        self.base_environ = {
            "SERVER_NAME": address,
            "SERVER_PORT": str(port),
            "GATEWAY_INTERFACE": "CGI/1.1",
            "REMOTE_HOST": "",
            "CONTENT_LENGTH": "",
            "SCRIPT_NAME": "",
        }

    def get_app(self) -> Any:
        return self._app

    def answer(self, request: bytes, peer: Any) -> bytes:
        """Return the answer to a request; nothing where it is none."""
        return _Handler(request, peer, self).answer.getvalue()  # type: ignore[arg-type]


class _Handler(WSGIRequestHandler):
    """Answers a request that is there in whole, into memory."""

    def setup(self) -> None:
        self.rfile, self.answer = io.BytesIO(self.request), io.BytesIO()
        self.wfile = self.answer

    def finish(self) -> None:
        """Leave the streams as they are."""

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: scrapes are no news."""
