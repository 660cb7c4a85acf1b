"""Serves /metrics and /healthz over plain HTTP, for Prometheus, probes and browsers."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app

from hetero_pp.config.links import LOOPBACK_NAMES, is_loopback
from hetero_pp.config.topology import parse_address
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.sockets import host_and_port
from hetero_pp.program.operate.collector import RunCollector
from hetero_pp.program.operate.metrics import METRICS, build_info
from hetero_pp.program.operate.observed import Observed

LOOPBACK = "127.0.0.1"
MOST_REQUESTS = 16
"""Requests that are served at once; further ones are closed."""
SECONDS_OF_A_REQUEST = 10.0
SECONDS_TO_END = 0.1
"""Seconds between looks whether the block is over."""
REASON_CHARACTERS = 1000
"""Most characters of a reason: members send some of the text."""

OPTION = "--metrics"


def parse_listen(text: str) -> tuple[str, int]:
    """Return host and port of [ADDRESS:]PORT. Without an address the host is the loopback interface.

    Raises ConfigError for another text.
    """
    try:
        return host_and_port(parse_address(f"{LOOPBACK}:{text}" if text.isdigit() else text))
    except ValueError:
        found = f"{OPTION}: found `{text}`, expected PORT or ADDRESS:PORT, such as `9464` or `0.0.0.0:9464`"
        raise ConfigError((), found) from None


@contextmanager
def served(listen: str, observed: Observed) -> Iterator[str]:
    """Serve a run's metrics and health while the block runs; yield the URL. Raises ConfigError if it cannot listen."""
    host, port = parse_listen(listen)
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        server = _server(family, (str(address[0]), int(address[1])), _application(observed, host))
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError((), f"{OPTION} {listen}: cannot listen ({why}); choose another port or address") from None
    thread = threading.Thread(target=server.serve_forever, args=(SECONDS_TO_END,), name="metrics", daemon=True)
    thread.start()
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _application(observed: Observed, host: str) -> WSGIApplication:
    """Return the WSGI application of a server at a host.

    On loopback it answers to this machine's own names only: another name means that a foreign page has bound its own
    name to this machine's address.
    """
    names = {*LOOPBACK_NAMES, host} if is_loopback(f"{host}:0") or host == "::1" else None
    registry = CollectorRegistry()
    registry.register(RunCollector(observed, METRICS, build_info()))
    metrics = make_wsgi_app(registry)

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        asked, path = environ.get("HTTP_HOST", host), environ["PATH_INFO"]
        if names is not None and asked not in names and asked.rpartition(":")[0] not in names:
            return _answer(start_response, "400 Bad Request", {"names": sorted(names)})
        if path == "/metrics":
            return metrics(environ, start_response)
        if path != "/healthz":
            return _answer(start_response, "404 Not Found", {"paths": ["/metrics", "/healthz"]})
        health = observed.health()
        found: dict[str, Any] = {"condition": health.condition}
        if health.reason:
            found["reason"] = health.reason[:REASON_CHARACTERS]
        state = observed.state
        if state is not None:
            found |= {"run": state.spec.config.name, "round": observed.round(state), "rounds": state.rounds_planned}
            found |= {"rehearsal": state.spec.config.rehearsal is not None}
        return _answer(start_response, "200 OK" if health.is_well else "503 Service Unavailable", found)

    return application


def _answer(start_response: StartResponse, status: str, found: dict[str, Any]) -> Iterable[bytes]:
    start_response(status, [("Content-Type", "application/json"), ("X-Content-Type-Options", "nosniff")])
    return [(json.dumps(found) + "\n").encode()]


def _cut(request: socket.socket) -> None:
    """Wake the thread of a client that sends or reads too slowly."""
    with suppress(OSError):  # it is closed already
        request.shutdown(socket.SHUT_RDWR)


class _Handler(WSGIRequestHandler):
    """Logs nothing."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _server(family: socket.AddressFamily, address: tuple[str, int], application: WSGIApplication) -> WSGIServer:
    """Return a server that listens. Raises OSError if it cannot."""

    class MetricsServer(ThreadingMixIn, WSGIServer):
        address_family = family
        daemon_threads = True
        block_on_close = False
        room = threading.BoundedSemaphore(MOST_REQUESTS)

        def server_bind(self) -> None:
            TCPServer.server_bind(self)  # HTTPServer's own looks up a host name, which may take seconds
            self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
            self.setup_environ()

        def process_request(self, request: Any, client_address: Any) -> None:
            if self.room.acquire(blocking=False):
                super().process_request(request, client_address)
            else:
                self.shutdown_request(request)

        def process_request_thread(self, request: Any, client_address: Any) -> None:
            over = threading.Timer(SECONDS_OF_A_REQUEST, _cut, [request])  # a timeout of the socket is for each byte
            over.daemon = True
            try:
                over.start()
                super().process_request_thread(request, client_address)
            finally:
                over.cancel()
                self.room.release()

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Print nothing: a client that went away is no error."""

    server = MetricsServer(address, _Handler)
    server.set_app(application)
    return server
