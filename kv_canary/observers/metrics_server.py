"""The HTTP servers of Prometheus metrics, each shared by canaries of this process."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import threading
from typing import TYPE_CHECKING

from kv_canary.config import is_address
from kv_canary.errors import must_be
from kv_canary.observers.metrics_http import HttpServer, listen

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

# The address of every server for which no other is asked.
ADDRESS = "127.0.0.1"

_starting = threading.Lock()
_servers: dict[int, MetricsServer] = {}


class MetricsServer:
    """A server of one registry on one port, for as long as somebody uses it; see `on`."""

    def __init__(self, port: int, registry: CollectorRegistry, *, address: str) -> None:
        import prometheus_client

        self.registry, self.address = registry, address
        self._port, self._users = port, 0
        # Only this process serves. A child that was forked has this object, and neither the thread nor the sockets.
        self._pid = os.getpid()
        self._http = HttpServer(_listen(address, port), prometheus_client.make_wsgi_app(registry))

    @classmethod
    def on(cls, port: int, registry: CollectorRegistry | None = None, *, address: str = ADDRESS) -> MetricsServer:
        """Return the server on a port, started if need be, with one more user.

        Args:
            port: of the address.
            registry: what it serves; None: what it serves already, or a registry of its own. What an engine's registry
                holds is the engine's to serve.
            address: IP address of this host; 0.0.0.0 or :: for all of its addresses.

        Raises:
            ValueError: the port is taken there, or nobody can listen at the address; or the port serves another
                registry, or at another address.
        """
        import prometheus_client

        if not is_address(address):
            expected = "an IP address of this host, or 0.0.0.0 or :: for all of them"
            raise ValueError(must_be("PrometheusMetrics", "address", expected, repr(address)))
        with _starting:
            server = _servers.get(port)
            if server is None:
                registry = prometheus_client.CollectorRegistry() if registry is None else registry
                server = _servers[port] = cls(port, registry, address=address)
            elif ipaddress.ip_address(address) != ipaddress.ip_address(server.address):
                expected = f"{server.address}, where port {port} is served already"
                raise ValueError(must_be("PrometheusMetrics", "address", expected, address))
            elif registry is not None and registry is not server.registry:
                expected = f"the one that port {port} serves already"
                raise ValueError(must_be("PrometheusMetrics", "registry", expected, "another"))
            server._users += 1
            return server

    def release(self) -> None:
        """Stop, if that was the last user; in a child that was forked, do nothing: the server is its parent's."""
        if os.getpid() != self._pid:
            return
        with _starting:
            self._users -= 1
            if self._users:
                return
            try:
                self._http.stop()
            finally:
                # Not before: a child that is forked meanwhile closes what it finds here.
                del _servers[self._port]


def _in_child() -> None:
    """Leave the parent its servers, and wait for no lock that one of its threads held."""
    global _starting
    _starting = threading.Lock()
    for server in _servers.values():
        server._http.forget()
    _servers.clear()


os.register_at_fork(after_in_child=_in_child)


def cannot_listen(address: str, port: int, error: OSError) -> ValueError:
    """Return the complaint about a setting that keeps a server from listening."""
    if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        expected = "an address of this host, or 0.0.0.0 for all of them (KV_CANARY_METRICS_ADDRESS)"
        return ValueError(must_be("CanaryConfig", "metrics_address", expected, f"{address}: {error.strerror}"))
    expected = "a port that is free here, another one for every process (KV_CANARY_METRICS_PORT)"
    return ValueError(must_be("CanaryConfig", "metrics_port", expected, f"{port} at {address}: {error.strerror}"))


def _listen(address: str, port: int) -> socket.socket:
    try:
        return listen(address, port)
    except OSError as error:
        raise cannot_listen(address, port, error) from error
