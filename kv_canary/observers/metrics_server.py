"""An HTTP server of Prometheus metrics, shared by the canaries of one process."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from kv_canary.errors import must_be

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_starting = threading.Lock()
_servers: dict[int, MetricsServer] = {}


class MetricsServer:
    """A server of one registry on one port, for as long as somebody uses it; see `on`."""

    def __init__(self, port: int, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._port, self._users = port, 0
        self._http = _listen(port, registry)
        # How long stopping may take: it is looked for this often.
        options = {"poll_interval": 0.1}
        name = f"kv-canary-metrics-{port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs=options, name=name, daemon=True)
        self._thread.start()

    @classmethod
    def on(cls, port: int, registry: CollectorRegistry | None) -> MetricsServer:
        """Return the server on a port, started if need be, with one more user.

        Args:
            port: at every address of the host.
            registry: what it serves; None: what it serves already, or a registry of its own. What an engine's registry
                holds is the engine's to serve.

        Raises:
            ValueError: another process has the port; or it serves another registry.
        """
        import prometheus_client

        with _starting:
            server = _servers.get(port)
            if server is None:
                registry = prometheus_client.CollectorRegistry() if registry is None else registry
                server = _servers[port] = cls(port, registry)
            elif registry is not None and registry is not server.registry:
                expected = f"the one that port {port} serves already"
                raise ValueError(must_be("PrometheusMetrics", "registry", expected, "another"))
            server._users += 1
            return server

    def release(self) -> None:
        """Stop, if that was the last user."""
        with _starting:
            self._users -= 1
            if self._users:
                return
            del _servers[self._port]
            self._http.shutdown()
            self._http.server_close()
            self._thread.join()


def _listen(port: int, registry: CollectorRegistry) -> Any:
    """Return an HTTP server that listens on a port and serves the registry."""
    from socketserver import ThreadingMixIn
    from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

    from prometheus_client import make_wsgi_app

    class Server(ThreadingMixIn, WSGIServer):
        daemon_threads = True
        # Some Pythons let two processes listen on one port, and either would answer.
        allow_reuse_port = False

    class Silent(WSGIRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing: scrapes are no news."""

    try:
        return make_server("", port, make_wsgi_app(registry), Server, handler_class=Silent)
    except OSError as error:
        expected = "a port that is free here, another one for every process (KV_CANARY_METRICS_PORT)"
        raise ValueError(must_be("CanaryConfig", "metrics_port", expected, f"{port}: {error.strerror}")) from error
